"""Observations that the cost model can predict: their kernels, found among the planner's candidates by the stored schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..constants import CostConstants
from ..device import Device
from ..errors import OnepassError
from ..ir.program import Program
from ..ir.size import Bindings
from ..plan.candidates import schedules
from ..plan.cost import Cost
from ..plan.cost.model import cost, join_us
from ..plan.estimate import estimate
from ..plan.kernel import Kernel
from ..plan.legality import Illegal
from ..plan.plan import KernelPlan
from ..plan.resources import Resources, demand
from ..plan.schedule import Schedule
from ..plan.scoring import Scored, fits_one_wave, forms_of
from ..plan.traffic import Traffic, traffic
from ..plan.variant import specialize
from .captured_function import CapturedFunction
from .observations import Observation
from .schedule_record import ScheduleRecord
from .suites import Job

HELD_OUT = 4  # one workload in so many is not fitted to


@dataclass(frozen=True)
class Sample:
    """One measured kernel, with everything that its predicted time depends on but the constants."""

    seen: Observation
    kernel: Kernel
    schedule: Schedule
    resources: Resources
    t: Traffic
    device: Device

    def cost(self, constants: CostConstants) -> Cost:
        """Its cost according to the model. It fits at least once on an SM: it has run."""
        fitting = self.resources if self.resources.ctas_per_sm else replace(self.resources, ctas_per_sm=1)
        return cost(self.kernel, self.schedule, fitting, self.t, self.device, constants)

    def predicted_us(self, constants: CostConstants) -> float:
        """Its time according to the model, with the join of partial results."""
        return self.cost(constants).us + join_us(self.schedule, self.t, self.device, constants)

    def scored(self, constants: CostConstants) -> Scored:
        """The sample as the planner scores it."""
        one = self.cost(constants)
        chosen = KernelPlan(
            self.kernel.program.name, self.kernel, self.schedule, self.resources, one, (self.kernel.program, self.schedule)
        )
        return Scored(chosen, one.us + join_us(self.schedule, self.t, self.device, constants))

    @property
    def may_be_chosen(self) -> bool:
        """Whether the planner expects that it fits."""
        return self.resources.ctas_per_sm > 0 and fits_one_wave(self.schedule, self.resources.ctas_per_sm, self.device)

    @property
    def held_out(self) -> bool:
        """Whether its workload is kept from the fit, to judge it. Decided by the name alone, whatever else is measured."""
        return hashlib.sha256(self.seen.id.encode()).digest()[0] % HELD_OUT == 0


def samples(found: Iterable[Observation], device: Device) -> tuple[Sample, ...]:
    """The observations that are of today's kernels, do not spill, and are candidates of the planner as one kernel."""
    known: dict[str, dict[ScheduleRecord, Sample]] = {}
    matched = []
    for seen in found:
        if not seen.schedules or not seen.current or seen.variant or seen.kernel or seen.spill_bytes:
            continue
        if seen.id not in known:
            known[seen.id] = {_key(ScheduleRecord.of(s.schedule)): s for s in _candidates(seen, device)}
        like = known[seen.id].get(_key(seen.schedules[0]))
        if like is not None and _is_one_kernel(seen, like.schedule) and _as_planned(seen, like.schedule):
            matched.append(replace(like, seen=seen))
    return tuple(matched)


def _key(record: ScheduleRecord) -> ScheduleRecord:
    """What is compared: not how many loads are kept in registers, nor other choices that follow from the rest and have changed."""
    return replace(record.without_choices(), resident=0)


def _as_planned(seen: Observation, schedule: Schedule) -> bool:
    """Whether a measured schedule is not one whose choices were varied. Older files do not record them."""
    return seen.schedules[0].has_choices_of(ScheduleRecord.of(schedule))


def _is_one_kernel(seen: Observation, schedule: Schedule) -> bool:
    """Whether the plan is one kernel and at most the join of its partial results."""
    return len(seen.schedules) <= (2 if schedule.splits > 1 else 1)


def _candidates(seen: Observation, device: Device) -> Iterator[Sample]:
    try:
        job = Job(seen.workload, seen.shape, seen.dtype)
        captured = CapturedFunction.of(job.subject.function, job.inputs())
    except (OnepassError, RuntimeError):  # a workload that is gone, or not of such a shape or type
        return
    program, bindings = specialize(captured.program, captured.bindings)
    yield from candidates(program, bindings, device, seen)


def candidates(program: Program, bindings: Bindings, device: Device, seen: Observation) -> Iterator[Sample]:
    """Every candidate of a Program as one kernel."""
    written = forms_of(program, bindings)
    for family, form in () if isinstance(written, Illegal) else written:
        t, need = traffic(form.kernel, bindings), demand(form.kernel)
        for schedule in schedules(form.kernel, family, form.held, need, t, bindings, device):
            yield Sample(seen, form.kernel, schedule, estimate(need, schedule, device), t, device)
