"""Tuning: time the best plans of a Program on the GPU and choose the fastest if it is significantly faster.

`choose` makes the decision with any timer; `DeviceTimer` times on a CUDA GPU with scratch tensors in the Program's layouts. The
caller's tensors and random state are not touched. The default plan is always timed, and it stays unless another plan is faster by
more than the margin plus the spread of single runs, so tuning never returns a slower plan.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from ..ir.program import Buffer, Load, Program
from ..ir.size import Bindings, value
from .compiled import Artifact, Trial
from .executable import Executable, assemble
from .stopwatch import Stopwatch, Timing, Work

_LOG = logging.getLogger(__name__)

PLANS_PER_LEVEL = {"off": 1, "on": 6, "full": 24}  # plans timed per level, including the default
VARIED_PER_LEVEL = {"off": 0, "on": 0, "full": 8}  # and then with one field changed that the planner does not search
FIRST_RUNS, FINAL_RUNS = 5, 20  # runs per plan in the first round, and in the final round
MAX_FINALISTS, FINALIST_FACTOR = 3, 1.15  # plans in the final round besides the default; how close to the best they must be
MARGIN = 0.02  # fraction by which a plan must beat the default, in addition to the spread of single runs
RANDOM_ELEMENTS = 1 << 20  # random values that fill scratch tensors, repeated

TIMING_LOCK = threading.Lock()  # held while plans are timed: concurrent runs would disturb each other
Time = Callable[[Sequence[Artifact], int], Sequence[Timing]]  # (plans, runs per plan)


def stored_levels(level: str) -> tuple[str, ...]:
    """The levels whose stored winners a level can reuse: a search of more plans also serves a search of fewer."""
    return ("full", "on") if level == "on" else (level,)


# ---- deciding --------------------------------------------------------------------------------------------------------------


def choose(default: Artifact, others: Sequence[Artifact], time: Time) -> tuple[Artifact, tuple[tuple[Artifact, Timing], ...]]:
    """The chosen artifact, with its trials, and all timings, the default first."""
    plans = (default, *others)
    timed = list(time(plans, FIRST_RUNS))
    best, final = 0, _finalists(timed)
    if len(final) > 1:
        for k, retimed in zip(final, time([plans[k] for k in final], FINAL_RUNS), strict=True):
            timed[k] = retimed
        best = min((k for k in final if _valid(timed[k])), key=lambda k: timed[k].us, default=0)
    taken = best if _beats(timed[best], timed[0]) else 0
    trials = tuple(_trial(artifact, timed[k], k == taken) for k, artifact in enumerate(plans))
    return replace(plans[taken], trials=trials), tuple(zip(plans, timed, strict=True))


def _finalists(timed: Sequence[Timing]) -> list[int]:
    """Indices of the default and of the few other plans that are close to the best."""
    ranked = sorted((k for k in range(1, len(timed)) if _valid(timed[k])), key=lambda k: timed[k].us)
    if not ranked or not _valid(timed[0]):
        return [0]
    near = FINALIST_FACTOR * min(timed[0].us, timed[ranked[0]].us)
    return [0, *(k for k in ranked[:MAX_FINALISTS] if timed[k].us <= near)]


def _valid(one: Timing) -> bool:
    return isfinite(one.us) and one.us > 0


def _beats(one: Timing, default: Timing) -> bool:
    """Whether a plan is faster than the default by more than the margin and the larger spread."""
    return _valid(one) and _valid(default) and one.us < default.us * (1 - MARGIN - max(one.spread, default.spread))


def _trial(artifact: Artifact, timing: Timing, taken: bool) -> Trial:
    kernels = artifact.summary.kernels
    main = max(kernels, key=lambda k: k.predicted_us)
    return Trial(
        "; ".join(str(k.schedule) for k in kernels),
        main.family,
        artifact.summary.predicted_us,
        timing.us,
        timing.spread,
        max((b.registers for b in artifact.binaries), default=0),
        sum(b.spill_bytes for b in artifact.binaries),
        taken,
    )


def comparable(default: Artifact, found: Sequence[Artifact]) -> tuple[Artifact, ...]:
    """The artifacts that can replace the default: different kernels that allow at least the same outputs to alias inputs."""
    seen = {default.sources}
    kept = []
    for artifact in found:
        if artifact.sources not in seen and set(default.in_place) <= set(artifact.in_place):
            seen.add(artifact.sources)
            kept.append(artifact)
    return tuple(kept)


# ---- on a card -------------------------------------------------------------------------------------------------------------


class DeviceTimer:
    """Times plans of one Program on a GPU."""

    def __init__(self, program: Program, sizes: Bindings, where: torch.device, aligned: frozenset[str]) -> None:
        self.sizes, self.where, self.aligned = sizes, where, aligned
        self._tensors = scratch(program, sizes, where, aligned)
        self._watch = Stopwatch(where)

    def __call__(self, plans: Sequence[Artifact], runs: int) -> Sequence[Timing]:
        """Time all plans on the same tensors, round-robin."""
        return self._watch([self._work(assemble(artifact, self.where, self.aligned)) for artifact in plans], runs)

    def _work(self, executable: Executable) -> Work:
        artifact = executable.artifact
        outs, ins = ([self._tensors[b.name] for b in buffers] for buffers in (artifact.outputs, artifact.inputs))
        return partial(executable.bound(self.sizes), outs, ins)


def scratch(program: Program, sizes: Bindings, where: torch.device, aligned: frozenset[str]) -> dict[str, Tensor]:
    """Tensors in the layouts of a Program's inputs and outputs. Inputs hold random values; integers are valid indices."""
    generator = torch.Generator(device=where).manual_seed(0)  # a private generator leaves the global random state unchanged
    indexed = [g for i in program.of(Load) for g in program.nodes[i].indexed]  # type: ignore[union-attr]
    most = max(1, min([*(value(g.extent, sizes) for g in indexed), 128]))
    tensors = {}
    with torch.no_grad():
        floats = torch.randn(RANDOM_ELEMENTS, generator=generator, device=where, dtype=torch.float32)
        integers = torch.randint(0, most, (RANDOM_ELEMENTS,), generator=generator, device=where)
        for buffer in program.buffers:
            if buffer.role == "temp":
                continue
            flat, tensor = _empty(buffer, sizes, where, buffer.name in aligned)
            tensors[buffer.name] = tensor
            if buffer.role == "input":
                drawn = floats if buffer.dtype.is_float else integers % 2 if buffer.dtype.kind == "bool" else integers
                for part in flat.split(RANDOM_ELEMENTS):
                    part.copy_(drawn[: part.numel()])
    return tensors


def _empty(buffer: Buffer, sizes: Bindings, where: torch.device, aligned: bool) -> tuple[Tensor, Tensor]:
    """The memory that a buffer spans, as an uninitialized flat tensor, and a view of it in the buffer's layout."""
    shape, strides = ([value(s, sizes) for s in each] for each in (buffer.shape, buffer.strides))
    span = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    flat = torch.empty(span + (not aligned), dtype=buffer.dtype.torch, device=where)[int(not aligned) :]
    return flat, flat.as_strided(shape, strides, flat.storage_offset())


# ---- what the user sees ----------------------------------------------------------------------------------------------------


@contextmanager
def progress(name: str) -> Iterator[Callable[[str], None]]:
    """Show a status line on the terminal while plans are compiled and timed; without a terminal, write to the log."""
    if not sys.stderr.isatty():
        _LOG.info("%s: tuning", name)
        yield lambda doing: _LOG.debug("%s: %s", name, doing)
        return
    from rich.console import Console  # imported only for a terminal
    from rich.markup import escape  # imported only for a terminal

    # Redrawing takes the GIL from the timing thread, so refresh rarely.
    with Console(stderr=True).status(f"onepass: tuning {escape(name)}", refresh_per_second=2) as line:
        yield lambda doing: line.update(f"onepass: tuning {escape(name)}: {escape(doing)}")


def describe_outcome(artifact: Artifact) -> str:
    """The outcome of tuning, in one sentence."""
    default, *others = artifact.trials
    taken = next(t for t in artifact.trials if t.taken)
    if taken is default:
        return f"the default plan stays, {default.us:.1f} us; none of {len(others)} others was significantly faster"
    gain = f"{taken.us:.1f} us instead of {default.us:.1f} us for the default"
    return f"{gain}, with {taken.plan}; {len(artifact.trials)} plans timed"
