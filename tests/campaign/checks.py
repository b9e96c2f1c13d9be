"""The check of one graph: captured and evaluated in float64, interpreted, or compiled, and compared with eager torch.

A result is right, refused with a code, or a finding: wrong, of another form, an error without a code, internal, or slow.
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
from onepass import compat
from onepass.capture.function.captured import Captured
from onepass.capture.function.trace import capture
from onepass.device import Device
from onepass.errors import OnepassError
from onepass.integration import failure, journal
from onepass.ir.axes import unify_axes
from onepass.ir.oracle import evaluate
from onepass.ir.program import Program
from onepass.ir.size import Bindings
from onepass.pipeline import optimize
from onepass.plan.plan import KernelPlan
from onepass.plan.schedule.check import check as check_schedule
from onepass.plan.variant import specialize
from tests.support import forced_schedules as forced
from tests.support.correctness import twice
from tests.support.random_schedules import Draw

from .compare import Results, Truth, compared, differ_exactly, moved, precision_of
from .draw import graph as any_graph
from .draw import pair_graph
from .graph import DTYPES, Graph, default_float64, make_inputs
from .integers import integers, integral
from .rows import one_way_graph, row_graph, small_graph

# Codes that say onepass itself is at fault.
INTERNAL = ("ONEPASS-205", "ONEPASS-9", "ONEPASS-113", "ONEPASS-303", "ONEPASS-31", "ONEPASS-32", "ONEPASS-000")
# How likely a family is to be chosen for a graph that can use it. Other families, which fewer graphs can use, have 8.
COMMON = {
    "pointwise": 1,
    "inner": 1,
    "inner looped": 1,
    "mix-order": 1,
    "outer": 2,
    "mix-order multi-CTA": 40,
    "inner split": 20,
    "inner staged": 60,
    "outer staged": 40,
    "outer staged split": 60,
}
COARSE = 2.0**-12  # how much simplification may change a value: 1/33 is rounded, and a later cancellation exposes that
PLANNED_FOR = (2, 5, 33, 260, 3000)  # symbolic sizes of kernels that then run at other sizes
DRAWS = 12  # random schedules tried until one is legal
TOO_LONG = 20.0  # CPU seconds for one graph


@dataclass(frozen=True)
class Finding:
    """The outcome for one graph. `kind`: right, noise, refused, skipped, or a finding (wrong, form, uncoded, internal, slow)."""

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
        """What distinguishes one class of defects from another."""
        return self.kind, self.where

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


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
    """A way to compute a graph. `exactly`: in float64 itself."""

    answer: Callable[[Graph, list[Any]], tuple[Results, str]]  # the results, and a word on how they were computed
    exactly: bool = False
    device: str = "cpu"
    gradients: bool = False
    draw: Callable[[int], Graph] = any_graph

    def run(self, function: Callable[..., Results], inputs: list[Any]) -> Results:
        """The values to compare: the results, and the gradients if the stage computes any."""
        return (with_gradients if self.gradients else plainly)(function, inputs)

    def inputs(self, graph: Graph) -> list[Any]:
        """Fresh arguments."""
        made = make_inputs(graph, device=self.device)
        for tensor in made if self.gradients else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                tensor.requires_grad_()
        return made


def checked(graph: Graph, stage: Stage) -> Finding:
    """Compare the results of a stage with eager and float64."""
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
            actual, how = stage.answer(graph, stage.inputs(graph))
        except Exception as error:
            failed = fault(graph.seed, error)
            return found(failed.kind, failed.detail, failed.where)
        kind, detail, where = _compared(graph, stage, actual, eager)
        return found(kind, detail, where or how)


def fault(seed: int, error: Exception) -> Finding:
    """An error as a finding: a refusal if its code does not blame onepass itself."""
    if not isinstance(error, OnepassError):
        return Finding(seed, "uncoded", f"{type(error).__name__}: {error}"[:600], f"{type(error).__name__} {_place(error)}")
    if error.code.startswith(INTERNAL):
        return Finding(seed, "internal", str(error)[:600], _place(error))
    return Finding(seed, "refused", str(error)[:600], error.code)


def _place(error: BaseException) -> str:
    """The innermost line of onepass, in the error or what caused it."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/onepass/" in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "elsewhere"


def _compared(graph: Graph, stage: Stage, actual: Results, eager: Results) -> tuple[str, str, str]:
    """The kind of finding, what is wrong, and the op whose result it is."""

    def reference(step: float | None, draw: int) -> Results:
        inputs = [moved(t, step, draw) for t in stage.inputs(graph)]
        with default_float64():
            return stage.run(graph.function(exact=True), inputs)

    dtypes = {DTYPES[i.dtype] for i in graph.inputs} | {d for s in graph.steps for n, d in DTYPES.items() if f"{n}" in s.text}
    overlaps = any(i.layout in ("overlapping", "expanded") for i in graph.inputs)
    truth = Truth(
        eager,
        reference,
        precision_of(dtypes, stage.exactly),
        stage.exactly,
        overlaps,
        lambda: _traced(graph, stage),
        loses_infinities=any("_mean(" in step.text for step in graph.steps),
    )
    kind, detail, output = compared(actual, truth)
    if kind not in ("wrong", "form"):
        return kind, detail, ""
    return kind, f"output {output}: {detail}", graph_op(graph, output) if kind == "wrong" else detail.split(":")[0]


def _traced(graph: Graph, stage: Stage) -> Results:
    """Shape-only results."""
    with compat.fake_mode() as mode:
        inputs = [mode.from_tensor(i) if isinstance(i, torch.Tensor) else i for i in stage.inputs(graph)]
        return stage.run(graph.function(), inputs)


def graph_op(graph: Graph, output: int) -> str:
    """The op that makes an output."""
    if output >= len(graph.outputs):
        return "gradient"
    at = graph.outputs[output] - len(graph.inputs)
    return graph.steps[at].op if at >= 0 else "input"


# ---- the stages -----------------------------------------------------------------------------------------------------------------


def by_oracle(graph: Graph, inputs: list[Any]) -> tuple[Results, str]:
    """Captured, simplified, and evaluated in float64, before and after: both must agree.

    Every third graph is captured for any number of rows, which takes torch three times as long.
    """
    captured = capture(graph.function(), tuple(inputs), dynamic=None if graph.seed % 3 == 0 else False)
    bindings = captured.bind(tuple(inputs))
    assert bindings is not None, "a capture applies to the arguments it was made from"
    if _is_empty(captured.program, bindings):  # `fuse` calls the function itself
        with default_float64():
            exact = plainly(graph.function(exact=True), [moved(i, None, 0) for i in inputs])
        return tuple(map(_laid_out_as, exact, plainly(graph.function(), inputs))), "empty"
    optimised = optimize(captured.program)
    before, after = (_evaluated(captured, program, inputs, bindings) for program in (captured.program, optimised))
    for k, (one, other) in enumerate(zip(before, after, strict=True)):
        if isinstance(one, torch.Tensor) and differ_exactly(other, one, COARSE):  # else left to the comparison with eager
            raise Changed(f"output {k} of {graph_op(graph, k)} is changed by simplification")
    _second_size(graph, captured, optimised)
    return after, "symbolic" if optimised.symbols else ""


def _laid_out_as(exact: Any, eager: Any) -> Any:
    """A float64 result in eager's layout: a cast that copies in eager may be a no-op in float64."""
    if not isinstance(exact, torch.Tensor) or exact.stride() == eager.stride():
        return exact
    return torch.empty_like(eager, dtype=exact.dtype).copy_(exact)


def _is_empty(program: Program, bindings: Bindings) -> bool:
    """Whether an axis has no elements, so that no kernel runs."""
    return any(program.points((axis.name,), bindings) == 0 for axis in program.axes)


def _evaluated(captured: Captured, program: Program, inputs: list[Any], bindings: Bindings) -> Results:
    """The results of a Program in float64, in the form the function returns."""
    tensors = captured.tensors(tuple(inputs))
    exact = evaluate(program, {n: t for n, t in tensors.items() if n in program.buffer}, bindings)
    return tuple(captured.result(exact, tuple(inputs)))


class Changed(Exception):
    """The result is no longer the same: after a rewrite, or for other sizes."""


def _second_size(graph: Graph, captured: Captured, program: Program) -> None:
    """A capture whose row count may vary is right for other counts as well."""
    if not program.symbols:
        return
    rows = next(i.shape[0] for i in graph.inputs if i.is_tensor and i.shape)
    taller = replace(
        graph,
        inputs=tuple(
            replace(i, shape=tuple(s + 3 if s == rows and k == 0 else s for k, s in enumerate(i.shape))) for i in graph.inputs
        ),
    )
    inputs = make_inputs(taller)
    bindings = captured.bind(tuple(inputs))
    if bindings is None or _is_empty(program, bindings):
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


# A card so small that even a few rows are split among CTAs and combined, as many rows are on a large card.
SMS = 2
FEW_SMS = replace(
    forced.H200,
    name="h200 of 2 SMs",
    sms=SMS,
    bandwidth=forced.H200.bandwidth * SMS / forced.H200.sms,
    l2_bandwidth=forced.H200.l2_bandwidth * SMS / forced.H200.sms,
)


def by_family(graph: Graph, inputs: list[Any]) -> tuple[Results, str]:
    """As one kernel, under a schedule drawn from all that are legal on a card of few SMs."""
    return by_schedule(graph, inputs, FEW_SMS)


def by_schedule(graph: Graph, inputs: list[Any], on: Device = forced.H200) -> tuple[Results, str]:
    """As one kernel, under a schedule drawn from all that are legal."""
    captured, program, sizes, tensors = _one_kernel(graph, inputs)
    chosen = _drawn(graph, program, sizes, on)
    made = forced.run(forced.planned(program, sizes, chosen, on), tensors, sizes)
    return tuple(captured.result(made, tuple(inputs))), str(chosen.schedule.family)


def by_other_sizes(graph: Graph, inputs: list[Any]) -> tuple[Results, str]:
    """As one kernel that was planned and emitted for other sizes, as happens when the calls of a row class share kernels."""
    captured, program, sizes, tensors = _one_kernel(graph, inputs)
    if not sizes:
        raise NotOneKernel(detail="no size is symbolic")
    rng = random.Random(graph.seed)
    others = {name: rng.choice(PLANNED_FOR) for name in sizes}
    chosen = _drawn(graph, program, others, FEW_SMS)
    made = forced.run(forced.planned(program, others, chosen, FEW_SMS), tensors, sizes)
    return tuple(captured.result(made, tuple(inputs))), str(chosen.schedule.family)


def _one_kernel(graph: Graph, inputs: list[Any]) -> tuple[Captured, Program, Bindings, dict[str, torch.Tensor]]:
    """A capture, its Program with sizes fixed where kernels need it, the other sizes, and the tensors of a call."""
    captured = capture(graph.function(), tuple(inputs))
    bindings = captured.bind(tuple(inputs))
    assert bindings is not None
    program, sizes = specialize(optimize(captured.program), bindings)
    tensors = captured.tensors(tuple(inputs))
    program = replace(
        program,
        buffers=tuple(replace(b, aligned=b.name not in tensors or tensors[b.name].data_ptr() % 16 == 0) for b in program.buffers),
    )
    return captured, program, sizes, tensors


def _drawn(graph: Graph, program: Program, sizes: Bindings, on: Device = forced.H200) -> KernelPlan:
    """A random legal kernel and schedule: a candidate of the planner with some fields changed.

    Families that few graphs can use come first.
    """
    offered: dict[str, list[KernelPlan]] = {}
    for _, plans in () if _is_empty(program, sizes) else forced.candidates(program, sizes, on):
        for plan in plans:
            offered.setdefault(plan.family, []).append(plan)
    if not offered:
        raise NotOneKernel(detail="more than one kernel, or none")
    rng, names = random.Random(graph.seed), sorted(offered)
    family = rng.choices(names, [COMMON.get(name, 8) for name in names])[0]
    return _changed(rng, rng.choice(offered[family]), sizes, on)


def _changed(rng: random.Random, one: KernelPlan, sizes: Bindings, on: Device) -> KernelPlan:
    """A kernel with one or two fields of its schedule changed, if a few draws find a legal change; half stay unchanged."""
    draw = Draw(rng, one.kernel, sizes)
    for _ in range(rng.choice((0, DRAWS))):
        schedule = draw.changed(one.schedule, rng.choice((1, 2)))
        if schedule != one.schedule and check_schedule(one.kernel, schedule, on) is None:
            return forced.under(one.kernel, schedule, sizes, on)
    return one


def by_integers(graph: Graph, inputs: list[Any]) -> tuple[Results, str]:
    """As one kernel under a random schedule, over integers instead of floats: the result must match the Program bit for bit."""
    captured = capture(graph.function(), tuple(inputs))
    bindings = captured.bind(tuple(inputs))
    assert bindings is not None
    program, sizes = specialize(unify_axes(integral(captured.program)), bindings)
    chosen = _drawn(graph, program, sizes)
    tensors = {n: integers(t, graph.seed + k) for k, (n, t) in enumerate(captured.tensors(tuple(inputs)).items())}
    actual, exact = forced.run(forced.planned(program, sizes, chosen), tensors, sizes), evaluate(program, tensors, sizes)
    for name, result in exact.items():
        if not torch.equal(actual[name], result):
            raise Changed(f"{name} is not what the Program says, under {chosen.schedule}")
    return plainly(graph.function(), inputs), str(chosen.schedule.family)


class NotOneKernel(OnepassError):
    """The function is more than one kernel, which this stage does not check."""

    code = "not one kernel"


def by_backend(graph: Graph, inputs: list[Any]) -> tuple[Results, str]:
    """Forward and backward through torch.compile, claiming everything possible."""
    torch._dynamo.reset()
    for forget in (journal.reset, failure.reset_warnings):
        forget()
    options: dict[str, Any] = {"interpret": True, "by_cost": False, "rest": "eager", "on_error": "raise"}
    compiled = torch.compile(graph.function(), backend=onepass.backend, options=options)
    return with_gradients(compiled, inputs), f"{sum(len(g.regions) for g in journal.snapshot().graphs)} regions"


STAGES: dict[str, Stage] = {
    "oracle": Stage(by_oracle, exactly=True),
    "pairs": Stage(by_oracle, exactly=True, draw=pair_graph),
    "pair kernels": Stage(by_fuse, draw=pair_graph),
    "interpret": Stage(by_fuse),
    "schedules": Stage(by_schedule),
    "families": Stage(by_family, draw=row_graph),
    "one way": Stage(by_family, draw=one_way_graph),
    "other sizes": Stage(by_other_sizes, draw=small_graph),
    "integers": Stage(by_integers),
    "compile": Stage(by_backend, gradients=True),
    "card": Stage(by_fuse, device="cuda"),
}


def check(graph: Graph, stage: str) -> Finding:
    """The outcome of checking a graph in a stage."""
    return checked(graph, STAGES[stage])
