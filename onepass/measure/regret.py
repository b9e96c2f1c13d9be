"""Regret of the default plan: how much faster the best of several measured candidate plans is.

Worker processes compile all candidates first. Candidates that spill are excluded; the rest are timed in interleaved runs with the
kernels that `onepass.fuse` runs.
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
from .schedule_record import ScheduleRecord
from .timing import Call, Clock, Timed

RUNS = 10  # per candidate
VARIED = 4  # candidates per workload that differ from a schedule in one field that the planner does not search
NEAR_BEST = 0.05  # regret up to which a picked plan counts as good
MAX_DIFFERENCE = 0.02  # between results of two plans, relative to the largest value, before a candidate counts as wrong


@dataclass(frozen=True)
class CompiledCandidate:
    """A candidate plan with its generated sources and binaries; `binaries` is None if compilation failed."""

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
        """Whether it compiled, does not spill and fits in shared memory."""
        return (
            self.binaries is not None and not self.spill_bytes and all(b.smem_bytes <= device.smem_per_cta for b in self.binaries)
        )


@dataclass(frozen=True)
class RegretSummary:
    """Summary of the regrets of a suite."""

    workloads: int
    good: float  # share of workloads whose picked plan is within NEAR_BEST of the best
    worst: tuple[str, float] | None
    pick_error: float | None  # median of |predicted / measured - 1| over picked plans
    plan_error: float | None  # the same over all candidates


def compile_candidates(ours: CapturedFunction, device: Device, most: int, pool: Executor) -> tuple[Future[CompiledCandidate], ...]:
    """Start generating and compiling the candidates of a workload."""
    return tuple(pool.submit(_try, ours, plan, device) for plan in ours.plans(device, most, VARIED))


def _try(ours: CapturedFunction, plan: Plan, device: Device) -> CompiledCandidate:
    sources = pipeline.generate(plan, ours.wide)
    try:
        binaries = tuple(offline.compile(s, device, aligned_of(s, ours.aligned, ours.outputs)) for s in sources)
    except CompileFailed:
        return CompiledCandidate(plan, sources, None)
    return CompiledCandidate(plan, sources, binaries)


def regret(
    id: str, ours: CapturedFunction, candidates: Sequence[CompiledCandidate], inputs: Sequence[Tensor], clock: Clock, device: Device
) -> Regret:
    """Measure a workload's candidates together with its default plan."""
    picked = ours.executable(clock.device)
    calls: dict[str, Call] = {"picked": ours.call(picked, inputs)}
    truth = calls["picked"]()
    equal_to_pick = {k for k, t in enumerate(candidates) if schedules(t.plan) == schedules(picked.artifact)}
    for k, t in enumerate(candidates):
        if k not in equal_to_pick and t.runs_on(device):
            made = Compiled(t.plan, t.sources, t.binaries or ()).artifact
            call = ours.call(_assembled(made, clock.device, ours), inputs)
            if same_results(call(), truth):
                calls[str(k)] = call
    del truth
    times = {name: found.us for name, found in clock.times(calls, RUNS).items() if isinstance(found, Timed)}
    if "picked" not in times:
        raise NotMeasured(detail="the default plan did not run the same kernels every time")
    times |= {str(k): times["picked"] for k in equal_to_pick}
    return regret_from_times(id, ours.predicted_us(picked.artifact, device), picked.artifact, candidates, times)


def _assembled(made: Artifact, where: torch.device, ours: CapturedFunction) -> Executable:
    return assemble(made, where, ours.aligned)


def same_results(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether the results of two plans agree up to the order of sums."""
    for name, tensor in expected.items():
        a, b = results[name].float(), tensor.float()
        top = float(b.abs().max()) if b.numel() else 0.0
        difference = float((a - b).abs().max()) if b.numel() else 0.0
        if not difference <= MAX_DIFFERENCE * top + 1e-6:  # false for NaN
            return False
    return True


def regret_from_times(
    id: str, predicted_us: float, picked: Artifact, candidates: Sequence[CompiledCandidate], times: Mapping[str, float]
) -> Regret:
    """The Regret record from the times of the picked plan and of the candidates, by index."""
    pick = Candidate(
        _records(picked),
        picked.summary.kernels[0].family,
        predicted_us,
        times["picked"],
        max((b.registers for b in picked.binaries), default=None),
        sum(b.spill_bytes for b in picked.binaries),
    )
    others = tuple(
        Candidate(_records(t.plan), t.plan.kernels[0].family, t.plan.predicted_us, times.get(str(k)), t.registers, t.spill_bytes)
        for k, t in enumerate(candidates)
        if schedules(t.plan) != schedules(picked)
    )
    return Regret(id, times["picked"], min(times.values()), predicted_us, (pick, *others))


def _records(of: Plan | Artifact) -> tuple[ScheduleRecord, ...]:
    return tuple(map(ScheduleRecord.of, schedules(of)))


def summarize_regret(regrets: Sequence[Regret]) -> RegretSummary:
    """Summarize the regrets of a suite."""
    worst = max(regrets, key=lambda r: r.regret, default=None)
    picks = [(r.predicted_us, r.picked_us) for r in regrets]
    plans = [(c.predicted_us, c.us) for r in regrets for c in r.candidates]
    return RegretSummary(
        len(regrets),
        sum(r.regret <= NEAR_BEST for r in regrets) / len(regrets) if regrets else 0.0,
        (worst.id, worst.regret) if worst else None,
        _median_error(picks),
        _median_error(plans),
    )


def _median_error(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    errors = [abs(predicted / us - 1) for predicted, us in pairs if predicted is not None and us]
    return statistics.median(errors) if errors else None
