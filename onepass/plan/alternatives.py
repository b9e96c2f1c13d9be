"""Different plans of one Program: what tuning measures, and what the default pick is judged by.

The default comes first. Then come other ways to run its slowest kernel and other ways to share the work between kernels, by
predicted time, one of each kind: neighbours of a schedule run alike, and measuring them teaches little.
"""

from __future__ import annotations

from types import MappingProxyType

from ..device import Device
from ..ir.program import Program
from ..ir.size import Bindings
from ..stages import stage
from .partition import Search
from .plan import Lessons, Plan
from .schedule import Block, Cover, Loop, Schedule
from .scoring import Scored

WORST = 2.0  # times the default's predicted time: what is predicted slower still is not worth compiling


@stage("planning other kernels to time")
def alternatives(program: Program, bindings: Bindings, device: Device, most: int = 12,
                 lessons: Lessons = MappingProxyType({})) -> tuple[Plan, ...]:
    """At most `most` plans, the default pick first."""
    search = Search(program, bindings, device, lessons)
    groups = search.run()
    default = search.assembled(groups, {})
    if not groups:
        return (default,)
    slowest = max(groups, key=lambda g: _us(search, g))
    found = [search.assembled(other, {}) for other in search.partitions(groups)]
    others = _of_each_kind(search.others(slowest), search.scored(slowest), most)
    found += [search.assembled(groups, {slowest: scored}) for scored in others]
    near = [p for p in found if p.predicted_us <= WORST * default.predicted_us]
    return (default, *sorted(near, key=lambda p: p.predicted_us)[: most - 1])


def _us(search: Search, group: frozenset[int]) -> float:
    found = search.scored(group)
    return found.us if isinstance(found, Scored) else 0.0


def _of_each_kind(found: list[Scored], default: object, most: int) -> list[Scored]:
    """The best of every kind, the best kinds first; then the next best, of whatever kind, where kinds are few."""
    assert isinstance(default, Scored)
    ranked = sorted((s for s in found if s.plan.scored_as != default.plan.scored_as), key=lambda s: s.us)
    first: dict[tuple[object, ...], Scored] = {kind(default.plan.schedule): default}
    for scored in ranked:
        first.setdefault(kind(scored.plan.schedule), scored)
    kinds = [s for s in first.values() if s is not default]
    return (kinds + [s for s in ranked if s not in kinds])[:most]


def kind(schedule: Schedule) -> tuple[object, ...]:
    """What makes two schedules run differently enough to try both."""
    match schedule.rows, schedule.cols:
        case Loop(), Cover(tiles):
            shape: tuple[object, ...] = (schedule.splits, len(tiles), schedule.ctas_per_row)
        case Block(height), Cover():
            shape = (height,)
        case Loop(), Block(width):
            shape = (width, schedule.splits > 1)
        case _:
            shape = (schedule.splits > 1,)
    ring = schedule.stages, bool(schedule.prefetch)
    return schedule.family, bool(schedule.resident), len(schedule.staged), schedule.warps, *ring, *shape
