"""Tuning: time the few best plans of a Program on the card and take the fastest, if it is faster beyond doubt.

`choose` decides, given a way to time; `OnCard` is that way on a CUDA card, with scratch tensors of the Program's own layout. The
caller's tensors and random state are not touched. The default pick is always among those timed and stays unless another is
faster by more than the margin and the spread of single runs, so tuning never returns something slower.
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

PLANS_PER_LEVEL = {"off": 1, "on": 6, "full": 24}  # how many are timed, the default included
FIRST_RUNS, FINAL_RUNS = 5, 20  # runs of everyone, and of those that are near the best
MAX_FINALISTS, FINALIST_FACTOR = 3, 1.15  # how many beside the default, within how many times the best
MARGIN = 0.02  # by which a plan must be faster than the default, beyond the spread of single runs
RANDOM_ELEMENTS = 1 << 20  # random values that scratch tensors repeat

TIMING_LOCK = threading.Lock()  # held while plans are timed: two threads would time each other
Time = Callable[[Sequence[Artifact], int], Sequence[Timing]]  # plans, how often to run each


def stored_levels(level: str) -> tuple[str, ...]:
    """Whose remembered winners serve a level: a search among more plans serves one among fewer."""
    return ("full", "on") if level == "on" else (level,)


# ---- deciding --------------------------------------------------------------------------------------------------------------


def choose(default: Artifact, others: Sequence[Artifact], time: Time) -> tuple[Artifact, tuple[tuple[Artifact, Timing], ...]]:
    """The plan to take, which knows the trials that led to it, and everything that was timed, the default first."""
    everyone = (default, *others)
    timed = list(time(everyone, FIRST_RUNS))
    best, final = 0, _finalists(timed)
    if len(final) > 1:
        for k, again in zip(final, time([everyone[k] for k in final], FINAL_RUNS), strict=True):
            timed[k] = again
        best = min((k for k in final if _valid(timed[k])), key=lambda k: timed[k].us, default=0)
    taken = best if _beats(timed[best], timed[0]) else 0
    trials = tuple(_trial(made, timed[k], k == taken) for k, made in enumerate(everyone))
    return replace(everyone[taken], trials=trials), tuple(zip(everyone, timed, strict=True))


def _finalists(timed: Sequence[Timing]) -> list[int]:
    """The default and the few others that are near the best."""
    ranked = sorted((k for k in range(1, len(timed)) if _valid(timed[k])), key=lambda k: timed[k].us)
    if not ranked or not _valid(timed[0]):
        return [0]
    near = FINALIST_FACTOR * min(timed[0].us, timed[ranked[0]].us)
    return [0, *(k for k in ranked[:MAX_FINALISTS] if timed[k].us <= near)]


def _valid(one: Timing) -> bool:
    return isfinite(one.us) and one.us > 0


def _beats(one: Timing, default: Timing) -> bool:
    """Whether a plan is faster than the default beyond the spread of either."""
    return _valid(one) and _valid(default) and one.us < default.us * (1 - MARGIN - max(one.spread, default.spread))


def _trial(made: Artifact, timing: Timing, taken: bool) -> Trial:
    kernels = made.summary.kernels
    main = max(kernels, key=lambda k: k.predicted_us)
    return Trial("; ".join(str(k.schedule) for k in kernels), main.family, made.summary.predicted_us, timing.us, timing.spread,
                 max((b.registers for b in made.binaries), default=0), sum(b.spill_bytes for b in made.binaries), taken)


def comparable(default: Artifact, found: Sequence[Artifact]) -> tuple[Artifact, ...]:
    """Of some plans those that can stand in for the default: other kernels, which allow an output the same input's memory."""
    seen = {default.sources}
    kept = []
    for made in found:
        if made.sources not in seen and set(default.in_place) <= set(made.in_place):
            seen.add(made.sources)
            kept.append(made)
    return tuple(kept)


# ---- on a card -------------------------------------------------------------------------------------------------------------


class DeviceTimer:
    """Times plans of one Program on a card."""

    def __init__(self, program: Program, sizes: Bindings, where: torch.device, aligned: frozenset[str]) -> None:
        self.sizes, self.where, self.aligned = sizes, where, aligned
        self._tensors = scratch(program, sizes, where, aligned)
        self._watch = Stopwatch(where)

    def __call__(self, plans: Sequence[Artifact], runs: int) -> Sequence[Timing]:
        """Time every plan on the same tensors, in turn."""
        return self._watch([self._work(assemble(made, self.where, self.aligned)) for made in plans], runs)

    def _work(self, executable: Executable) -> Work:
        made = executable.artifact
        outs, ins = ([self._tensors[b.name] for b in buffers] for buffers in (made.outputs, made.inputs))
        return partial(executable.bound(self.sizes), outs, ins)


def scratch(program: Program, sizes: Bindings, where: torch.device, aligned: frozenset[str]) -> dict[str, Tensor]:
    """Tensors of the layout of a Program's inputs and outputs; inputs repeat some random values, small enough for lookups."""
    generator = torch.Generator(device=where).manual_seed(0)  # its own: the process's random numbers stay as they are
    indexed = [g for i in program.of(Load) for g in program.nodes[i].indexed]  # type: ignore[union-attr]
    most = max(1, min([*(value(g.extent, sizes) for g in indexed), 128]))
    made = {}
    with torch.no_grad():
        floats = torch.randn(RANDOM_ELEMENTS, generator=generator, device=where, dtype=torch.float32)
        integers = torch.randint(0, most, (RANDOM_ELEMENTS,), generator=generator, device=where)
        for buffer in program.buffers:
            if buffer.role == "temp":
                continue
            flat, tensor = _empty(buffer, sizes, where, buffer.name in aligned)
            made[buffer.name] = tensor
            if buffer.role == "input":
                drawn = floats if buffer.dtype.is_float else integers % 2 if buffer.dtype.kind == "bool" else integers
                for part in flat.split(RANDOM_ELEMENTS):
                    part.copy_(drawn[: part.numel()])
    return made


def _empty(buffer: Buffer, sizes: Bindings, where: torch.device, aligned: bool) -> tuple[Tensor, Tensor]:
    """An uninitialised tensor of a buffer's layout, and all memory it spans, flat."""
    shape, strides = ([value(s, sizes) for s in each] for each in (buffer.shape, buffer.strides))
    reach = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    flat = torch.empty(reach + (not aligned), dtype=buffer.dtype.torch, device=where)[int(not aligned):]
    return flat, flat.as_strided(shape, strides, flat.storage_offset())


# ---- what the user sees ----------------------------------------------------------------------------------------------------


@contextmanager
def progress(name: str) -> Iterator[Callable[[str], None]]:
    """A line on the terminal while plans are compiled and timed; a line in the log where there is no terminal."""
    if not sys.stderr.isatty():
        _LOG.info("%s: tuning", name)
        yield lambda doing: _LOG.debug("%s: %s", name, doing)
        return
    from rich.console import Console  # only a terminal needs it
    from rich.markup import escape  # the same

    # Redrawing takes the interpreter from the thread that times: seldom will do.
    with Console(stderr=True).status(f"onepass: tuning {escape(name)}", refresh_per_second=2) as line:
        yield lambda doing: line.update(f"onepass: tuning {escape(name)}: {escape(doing)}")


def describe_outcome(made: Artifact) -> str:
    """The outcome in a sentence."""
    default, *others = made.trials
    taken = next(t for t in made.trials if t.taken)
    if taken is default:
        return f"the default plan stays, {default.us:.1f} us; of {len(others)} others none was faster beyond doubt"
    return f"{taken.us:.1f} us instead of the default's {default.us:.1f}, by {taken.plan}; {len(made.trials)} plans timed"
