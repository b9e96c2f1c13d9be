"""What is asked of one graph: captured and evaluated in float64, interpreted, or compiled, and held against eager torch.

An answer is right, refused with a code, or a finding: wrong, an error without a code, or internal. Where a rounding decides
between two answers (a comparison, a cast to integers, an overflow), references that are computed a little differently disagree
among themselves, and an answer that one of them gives is not held to be wrong.
"""

from __future__ import annotations

import random
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import onepass
from onepass.capture.captured import Captured
from onepass.capture.trace import capture
from onepass.errors import OnepassError
from onepass.integration import failure, journal
from onepass.ir.criterion import judge
from onepass.ir.oracle import evaluate
from onepass.ir.program import Program
from onepass.ir.size import Bindings
from onepass.pipeline import optimise, specialise
from tests import forced
from tests.support import twice

from .graph import Graph, default_float64, make_inputs, widened

INTERNAL = ("ONEPASS-9", "ONEPASS-303", "ONEPASS-31", "ONEPASS-32", "ONEPASS-000")  # codes that say onepass itself is at fault
TOO_LONG = 20.0  # CPU seconds for one graph
EXACT = 2.0**-22  # of the largest value: constants such as 1/6 are rounded to fp32
DRAWS, STEP = 3, {"narrow": 2.0**-7, "single": 2.0**-18, "double": 1e-11}


@dataclass(frozen=True)
class Finding:
    """What came of one graph. `kind`: right, noise, refused, skipped, or a finding (wrong, form, uncoded, internal, slow)."""

    seed: int
    kind: str
    detail: str = ""
    where: str = ""
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        return self.kind in ("wrong", "form", "uncoded", "internal", "slow")

    @property
    def signature(self) -> tuple[str, str]:
        """What tells one class of defects from another."""
        return self.kind, self.where

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


Results = tuple[Any, ...]


def plainly(function: Callable[..., Results], inputs: list[Any]) -> Results:
    """A call without gradients."""
    with torch.no_grad():
        return function(*inputs)


def with_gradients(function: Callable[..., Results], inputs: list[Any]) -> Results:
    """The results of a call, then the gradients of its arguments for given gradients of its results."""
    results = function(*inputs)
    ends = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    starts = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    seeds = [torch.linspace(-1, 1, e.numel(), dtype=torch.float64, device=e.device).to(e.dtype).reshape(e.shape) for e in ends]
    grads = torch.autograd.grad(ends, starts, seeds, allow_unused=True) if ends and starts else ()
    return tuple(r.detach() if isinstance(r, torch.Tensor) else r for r in (*results, *grads))


@dataclass(frozen=True)
class Stage:
    """A way to have a graph computed. `exactly`: in float64 itself."""

    answer: Callable[[Graph, list[Any]], tuple[Results, str]]  # the results, and a word on how
    exactly: bool = False
    device: str = "cpu"
    gradients: bool = False

    def run(self, function: Callable[..., Results], inputs: list[Any]) -> Results:
        """What is compared: the results, and the gradients where the stage has any."""
        return (with_gradients if self.gradients else plainly)(function, inputs)

    def inputs(self, graph: Graph) -> list[Any]:
        """Fresh arguments."""
        made = make_inputs(graph, device=self.device)
        for tensor in made if self.gradients else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                tensor.requires_grad_()
        return made


def checked(graph: Graph, stage: Stage) -> Finding:
    """Hold what a stage makes of a graph against eager and float64."""
    started = time.process_time()

    def found(kind: str, detail: str = "", where: str = "") -> Finding:
        seconds = time.process_time() - started
        if seconds > TOO_LONG:
            return Finding(graph.seed, "slow", f"{kind}: {detail}"[:300], "", seconds)
        return Finding(graph.seed, kind, detail[:600], where, seconds)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            eager = stage.run(graph.function(), stage.inputs(graph))
        except Exception as error:  # shrinking may make graphs that eager refuses
            return found("skipped", str(error))
        try:
            mine, how = stage.answer(graph, stage.inputs(graph))
        except OnepassError as error:
            kind = "internal" if error.code.startswith(INTERNAL) else "refused"
            return found(kind, str(error), _place(error) if kind == "internal" else error.code)
        except Exception as error:
            return found("uncoded", f"{type(error).__name__}: {error}", f"{type(error).__name__} {_place(error)}")
        kind, detail, where = _compared(graph, stage, mine, eager)
        return found(kind, detail, where or how)


def _place(error: BaseException) -> str:
    """The innermost line of onepass, in the error or what caused it."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/onepass/" in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "elsewhere"


def _compared(graph: Graph, stage: Stage, mine: Results, eager: Results) -> tuple[str, str, str]:
    if len(mine) != len(eager):
        return "form", f"{len(mine)} results, not {len(eager)}", "count"
    for k, (one, other) in enumerate(zip(mine, eager, strict=True)):
        wrong = _form(one, other, stage.exactly, any(i.layout in ("overlapping", "expanded") for i in graph.inputs))
        if wrong:
            return "form", f"output {k}: {wrong}", wrong.split(":")[0]
    try:
        exact = _reference(graph, stage, stage.inputs(graph))
    except Exception as error:
        return "skipped", f"no float64 reference: {error}", ""
    kind = "right"
    for k, (one, other, reference) in enumerate(zip(mine, eager, exact, strict=True)):
        if not isinstance(other, torch.Tensor) or not other.numel():
            continue
        wrong = _exactly_wrong(one, other, reference) if stage.exactly else _wrong(one, other, reference)
        if wrong:
            odd = _undecided(graph, stage, k, one, other, reference)
            if odd:
                return "wrong", f"output {k}: {odd}; {wrong}", f"{graph_op(graph, k)}"
            kind = "noise"
    return kind, "", ""


def _reference(graph: Graph, stage: Stage, inputs: list[Any]) -> Results:
    """What the graph gives without rounding."""
    with default_float64():
        return stage.run(graph.function(exact=True), widened(inputs))


def graph_op(graph: Graph, output: int) -> str:
    """The op that makes an output."""
    if output >= len(graph.outputs):
        return "gradient"
    at = graph.outputs[output] - len(graph.inputs)
    return graph.steps[at].op if at >= 0 else "input"


def _form(mine: Any, eager: Any, exactly: bool, overlaps: bool) -> str:
    """What differs in kind. Of inputs that overlap themselves, shape-only tensors give other strides than real ones do."""
    if not isinstance(eager, torch.Tensor):
        return "" if type(mine) is type(eager) and (mine == eager or mine != mine) else f"value: {mine!r}, not {eager!r}"
    if not isinstance(mine, torch.Tensor):
        return f"type: {type(mine).__name__}, not a tensor"
    if mine.shape != eager.shape:
        return f"shape: {tuple(mine.shape)}, not {tuple(eager.shape)}"
    if not exactly and mine.dtype != eager.dtype:
        return f"dtype: {mine.dtype}, not {eager.dtype}"
    if eager.numel() and not overlaps and _steps(mine) != _steps(eager):
        return f"strides: {mine.stride()}, not {eager.stride()}"
    return ""


def _steps(t: torch.Tensor) -> list[int]:
    """Strides that mean anything."""
    return [step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1]


def _wrong(mine: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor) -> str | None:
    return judge(mine, eager, reference.double() if reference.is_floating_point() else reference)


def _exactly_wrong(mine: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor) -> str | None:
    """Both are float64, and differ by nothing but the order of sums."""
    if not mine.is_floating_point():
        return None if torch.equal(mine, reference.to(mine.dtype)) else "integers differ from float64's"
    if not mine.numel():
        return None
    a, b = mine.double(), reference.double()
    same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= EXACT * b.abs().where(b.isfinite(), 0).amax().clamp_min(1e-30))
    return None if bool(same.all()) else f"{int((~same).sum())} elements differ from float64's"


def _undecided(graph: Graph, stage: Stage, k: int, mine: torch.Tensor, eager: torch.Tensor,
               reference: torch.Tensor) -> str:
    """What is wrong with elements on which references agree; empty where none is."""
    references, exactly = [reference.double(), eager.double()], stage.exactly
    names = {i.dtype for i in graph.inputs} | {w for s in graph.steps for w in ("bf16", "f16", "e4m3", "e5m2") if w in s.text}
    step = STEP["double" if exactly else "narrow" if names & {"bf16", "f16", "e4m3", "e5m2"} else "single"]
    for draw in range(DRAWS):
        noise = torch.Generator().manual_seed(draw)
        moved = [_moved(t, step, noise) for t in stage.inputs(graph)]
        try:
            references.append(_reference(graph, stage, moved)[k].double())
        except Exception:
            continue
    stacked, given = torch.stack([r.cpu() for r in references]), mine.double().cpu()
    agree = _all_alike(stacked)
    finite = stacked.isfinite().all(0)
    middle = stacked[0]
    spread = torch.where(finite, (stacked - middle).abs().amax(0), 0.0)
    out = torch.finfo(mine.dtype if mine.is_floating_point() else torch.float64).eps
    slack = 0.0 if not mine.is_floating_point() else EXACT if exactly else 4 * out + 2.0**-18
    scale = torch.where(finite, middle.abs(), 0.0).amax() if not exactly and slack else middle.abs()
    near = (given - middle).abs() <= 8 * spread + slack * torch.maximum(middle.abs(), 2.0**-6 * scale)
    alike = (given == middle) | (given.isnan() & middle.isnan())
    bad = agree & ~torch.where(finite, near | alike, alike)
    if not bool(bad.any()):
        return ""
    at = bad.nonzero()[0].tolist()
    where = tuple(at)
    return (f"{int(bad.sum())} of {bad.numel()}, first at {at}: {float(given[where])!r}, eager {float(eager[where])!r}, "
            f"float64 {float(middle[where])!r}")


def _all_alike(stacked: torch.Tensor) -> torch.Tensor:
    """Where all references are finite, or the same odd value."""
    nan, first = stacked.isnan(), stacked[0]
    return (nan.all(0)) | (~nan.any(0) & (stacked.isfinite().all(0) | (stacked == first).all(0)))


def _moved(value: Any, step: float, noise: torch.Generator) -> Any:
    """An argument with its floats a rounding away."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    sign = torch.randint(0, 2, value.shape, generator=noise).double() * 2 - 1
    return (value.detach().double() * (1 + step * sign.to(value.device))).requires_grad_(value.requires_grad)


# ---- the stages -----------------------------------------------------------------------------------------------------------------


def by_oracle(graph: Graph, inputs: list[Any]) -> tuple[Results, str]:
    """Captured, simplified, and evaluated in float64, before and after: both must agree."""
    captured = capture(graph.function(), tuple(inputs))
    bindings = captured.bind(tuple(inputs))
    assert bindings is not None, "a capture applies to the arguments it was made from"
    optimised = optimise(captured.program)
    before, after = (_evaluated(captured, program, inputs, bindings) for program in (captured.program, optimised))
    for k, (one, other) in enumerate(zip(before, after, strict=True)):
        if isinstance(one, torch.Tensor) and _exactly_wrong(other, one, one):
            raise Changed(f"output {k} of {graph_op(graph, k)} is changed by simplification")
    _second_size(graph, captured, optimised)
    return after, "symbolic" if optimised.symbols else ""


def _evaluated(captured: Captured, program: Program, inputs: list[Any], bindings: Bindings) -> Results:
    """What a Program gives in float64, in the form the function returns."""
    tensors = captured.tensors(tuple(inputs))
    exact = evaluate(program, {n: t for n, t in tensors.items() if n in program.buffer}, bindings)
    return tuple(captured.result(exact, tuple(inputs)))


class Changed(Exception):
    """Not the same any more: after a rewrite, or for other sizes."""


def _second_size(graph: Graph, captured: Captured, program: Program) -> None:
    """A capture whose row count may vary answers for other counts as well."""
    if not program.symbols:
        return
    rows = next(i.shape[0] for i in graph.inputs if i.is_tensor and i.shape)
    taller = replace(graph, inputs=tuple(
        replace(i, shape=tuple(s + 3 if s == rows and k == 0 else s for k, s in enumerate(i.shape))) for i in graph.inputs))
    inputs = make_inputs(taller)
    bindings = captured.bind(tuple(inputs))
    if bindings is None:
        return
    eager = plainly(taller.function(), make_inputs(taller))
    kind, detail, _ = _compared(taller, STAGES["oracle"], _evaluated(captured, program, inputs, bindings), eager)
    if kind in ("wrong", "form"):
        raise Changed(f"for other sizes: {detail}")


def by_fuse(graph: Graph, inputs: list[Any]) -> tuple[Results, str]:
    """Planned, written and interpreted (on a card: compiled), twice, on memory that was poisoned before."""
    fused = onepass.fuse(graph.function())
    tensors: Callable[..., Any] = lambda *args: tuple(r for r in fused(*args) if isinstance(r, torch.Tensor))  # noqa: E731
    results = fused(*inputs)
    if any(isinstance(r, torch.Tensor) for r in results):
        twice(tensors, inputs)
    return tuple(results), ""


def by_schedule(graph: Graph, inputs: list[Any]) -> tuple[Results, str]:
    """As one kernel, under a schedule drawn from all that the planner would weigh."""
    captured = capture(graph.function(), tuple(inputs))
    bindings = captured.bind(tuple(inputs))
    assert bindings is not None
    program, sizes = specialise(optimise(captured.program), bindings)
    empty = any(program.points((axis.name,), sizes) == 0 for axis in program.axes)
    offered = [] if empty else [plan for _, plans in forced.candidates(program, sizes) for plan in plans]
    if not offered:
        raise NotOneKernel(detail="more than one kernel, or none")
    chosen = random.Random(graph.seed).choice(offered)
    tensors = captured.tensors(tuple(inputs))
    made = forced.run(forced.planned(program, sizes, chosen), tensors, sizes)
    return tuple(captured.result(made, tuple(inputs))), str(chosen.schedule.family)


class NotOneKernel(OnepassError):
    """What this stage does not look at."""

    code = "not one kernel"


def by_backend(graph: Graph, inputs: list[Any]) -> tuple[Results, str]:
    """Forward and backward through torch.compile, with everything claimed that can be."""
    torch._dynamo.reset()
    for forget in (journal.reset, failure.forget):
        forget()
    options = {"interpret": True, "by_cost": False, "rest": "eager", "on_error": "raise"}
    compiled = torch.compile(graph.function(), backend=onepass.backend, options=options)
    return with_gradients(compiled, inputs), f"{sum(len(g.regions) for g in journal.snapshot().graphs)} regions"


STAGES: dict[str, Stage] = {
    "oracle": Stage(by_oracle, exactly=True),
    "interpret": Stage(by_fuse),
    "schedules": Stage(by_schedule),
    "compile": Stage(by_backend, gradients=True),
    "card": Stage(by_fuse, device="cuda"),
}


def check(graph: Graph, stage: str) -> Finding:
    """What came of a graph in a stage."""
    return checked(graph, STAGES[stage])
