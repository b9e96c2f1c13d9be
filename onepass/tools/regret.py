"""How good the default pick is: other plans of a workload, measured beside it.

Kernels of all candidates are compiled beforehand by worker processes, those that spill are left out, and the rest is measured in
turn with what `onepass.fuse` runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import pipeline
from ..codegen.source import Source
from ..device import Device
from ..errors import CompileFailed, NotMeasured
from ..plan.plan import Plan
from ..runtime import offline
from ..runtime.binary import Binary
from ..runtime.compiled import Artifact, Compiled
from ..runtime.executable import Executable, aligned_of, assemble
from .captured_function import CapturedFunction, schedules
from .results import Candidate, Regret
from .timing import Call, Clock, Timed

RUNS = 10  # of each candidate
NEAR_BEST = 0.05  # a pick this close to the best is as good
MAX_DIFFERENCE = 0.02  # of the largest value: how far results of two plans may be apart before one of them is taken for wrong


@dataclass(frozen=True)
class CompiledCandidate:
    """A plan, written and compiled; without binaries where that failed."""

    plan: Plan
    sources: tuple[Source, ...]
    binaries: tuple[Binary, ...] | None

    @property
    def spill_bytes(self) -> int | None:
        return None if self.binaries is None else sum(b.spill_bytes for b in self.binaries)

    @property
    def registers(self) -> int | None:
        return None if self.binaries is None else max(b.registers for b in self.binaries)

    def runs_on(self, device: Device) -> bool:
        """Whether it is worth loading."""
        return self.binaries is not None and not self.spill_bytes and all(
            b.smem_bytes <= device.smem_per_cta for b in self.binaries)


@dataclass(frozen=True)
class RegretSummary:
    """What a suite's regrets come to."""

    workloads: int
    good: float  # the share of workloads whose pick is within GOOD of the best
    worst: tuple[str, float] | None
    pick_error: float | None  # the median of |predicted / measured - 1|, over picks
    plan_error: float | None  # the same over all candidates


def compile_candidates(ours: CapturedFunction, device: Device, most: int, pool: Executor) -> tuple[Future[CompiledCandidate], ...]:
    """Start to write and compile the candidates of a workload."""
    return tuple(pool.submit(_try, ours, plan, device) for plan in ours.plans(device, most))


def _try(ours: CapturedFunction, plan: Plan, device: Device) -> CompiledCandidate:
    sources = pipeline.generate(plan, ours.wide)
    try:
        binaries = tuple(offline.compile(s, device, aligned_of(s, ours.aligned, ours.outputs)) for s in sources)
    except CompileFailed:
        return CompiledCandidate(plan, sources, None)
    return CompiledCandidate(plan, sources, binaries)


def regret(id: str, ours: CapturedFunction, tried: Sequence[CompiledCandidate], inputs: Sequence[Tensor], clock: Clock, device: Device) -> Regret:
    """Measure a workload's candidates beside its default pick."""
    picked = ours.executable(clock.device)
    calls: dict[str, Call] = {"picked": ours.call(picked, inputs)}
    truth = calls["picked"]()
    same = {k for k, t in enumerate(tried) if schedules(t.plan) == schedules(picked.artifact)}
    for k, t in enumerate(tried):
        if k not in same and t.runs_on(device):
            made = Compiled(t.plan, t.sources, t.binaries or ()).artifact
            call = ours.call(_assembled(made, clock.device, ours), inputs)
            if same_results(call(), truth):
                calls[str(k)] = call
    del truth
    times = {name: found.us for name, found in clock.times(calls, RUNS).items() if isinstance(found, Timed)}
    if "picked" not in times:
        raise NotMeasured(detail="the default pick did not always run the same kernels")
    times |= {str(k): times["picked"] for k in same}
    return regret_from_times(id, ours.predicted_us(picked.artifact, device), picked.artifact, tried, times)


def _assembled(made: Artifact, where: torch.device, ours: CapturedFunction) -> Executable:
    return assemble(made, where, ours.aligned)


def same_results(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether two plans computed the same, but for the order of sums."""
    for name, tensor in theirs.items():
        a, b = mine[name].float(), tensor.float()
        top = float(b.abs().max()) if b.numel() else 0.0
        apart = float((a - b).abs().max()) if b.numel() else 0.0
        if not apart <= MAX_DIFFERENCE * top + 1e-6:  # a NaN is not
            return False
    return True


def regret_from_times(id: str, predicted_us: float, picked: Artifact, tried: Sequence[CompiledCandidate], times: Mapping[str, float]) -> Regret:
    """The regret of a pick from the times of it and of the candidates, by their number."""
    pick = Candidate(_text(picked.summary.kernels), picked.summary.kernels[0].family, predicted_us, times["picked"],
                     max((b.registers for b in picked.binaries), default=None), sum(b.spill_bytes for b in picked.binaries))
    others = tuple(Candidate(_text(t.plan.kernels), t.plan.kernels[0].family, t.plan.predicted_us, times.get(str(k)), t.registers,
                             t.spill_bytes) for k, t in enumerate(tried) if schedules(t.plan) != schedules(picked))
    return Regret(id, times["picked"], min(times.values()), predicted_us, (pick, *others))


def _text(kernels: Iterable[object]) -> str:
    return " + ".join(str(k.schedule) for k in kernels if not k.name.endswith("_join"))  # type: ignore[attr-defined]


def summarize_regret(regrets: Sequence[Regret]) -> RegretSummary:
    """What regrets come to."""
    worst = max(regrets, key=lambda r: r.regret, default=None)
    picks = [(r.predicted_us, r.picked_us) for r in regrets]
    plans = [(c.predicted_us, c.us) for r in regrets for c in r.candidates]
    return RegretSummary(len(regrets), sum(r.regret <= NEAR_BEST for r in regrets) / len(regrets) if regrets else 0.0,
                   (worst.id, worst.regret) if worst else None, _median_error(picks), _median_error(plans))


def _median_error(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    errors = [abs(predicted / us - 1) for predicted, us in pairs if predicted is not None and us]
    return statistics.median(errors) if errors else None
