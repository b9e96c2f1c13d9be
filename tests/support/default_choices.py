"""Handwritten schedules, completed with the planner's default choices."""

from __future__ import annotations

from onepass.ir.size import Bindings
from onepass.plan.choices import choices
from onepass.plan.kernel import Kernel
from onepass.plan.schedule import Schedule
from onepass.plan.staging import staged_family
from onepass.plan.traffic import traffic


def completed(kernel: Kernel, schedule: Schedule, bindings: Bindings) -> Schedule:
    """A schedule with the sizes and staging of another and the default choices of a candidate."""
    make, family = choices(kernel, traffic(kernel, bindings), bindings), staged_family(schedule)
    made: Schedule = family.completed(kernel, make, schedule) if family else make.completed(kernel, schedule)
    return made
