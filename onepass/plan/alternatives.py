"""Alternative plans of one Program, for tuning and for judging the default pick.

The default comes first. Then come other schedules of its slowest kernel and other ways to group results into kernels, ordered
by predicted time. Similar schedules run alike, so only the best of each kind is kept. Variations of the best schedules in one field
that the planner does not search come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from types import MappingProxyType

from ..device import Device
from ..ir.program import Program
from ..ir.size import Bindings
from ..stages import stage
from .partition import Search
from .plan import CompileFeedback, Plan
from .schedule import Block, Cover, Loop, Schedule
from .scoring import Scored
from .variations import variations

VARIED_SCHEDULES = 3  # schedules of the slowest kernel that are varied, the default and the best others
MAX_SLOWDOWN = 2.0  # plans predicted to take longer than this multiple of the default's time are not compiled


@stage("planning other kernels to time")
def alternatives(
    program: Program,
    bindings: Bindings,
    device: Device,
    most: int = 12,
    feedback: CompileFeedback = MappingProxyType({}),
    varied: int = 0,
) -> tuple[Plan, ...]:
    """Return at most `most` plans, the default pick first, and then at most `varied` with one field changed."""
    search = Search(program, bindings, device, feedback)
    groups = search.run()
    default = search.assemble(groups, {})
    if not groups:
        return (default,)
    slowest = max(groups, key=lambda g: _us(search, g))
    found = [search.assemble(other, {}) for other in search.other_partitions(groups)]
    others = _best_of_each_kind(search.others(slowest), search.scored(slowest), most)
    found += [search.assemble(groups, {slowest: scored}) for scored in others]
    near = [p for p in found if p.predicted_us <= MAX_SLOWDOWN * default.predicted_us]
    sizes = (default, *sorted(near, key=lambda p: p.predicted_us)[: most - 1])
    changed = islice(_variations(search, slowest, others), varied)
    return *sizes, *(search.assemble(groups, {slowest: scored}) for scored in changed)


def _us(search: Search, group: frozenset[int]) -> float:
    found = search.scored(group)
    return found.us if isinstance(found, Scored) else 0.0


def _variations(search: Search, group: frozenset[int], others: Sequence[Scored]) -> Iterator[Scored]:
    """The best schedules of a group with one field changed: all of the default's, then those of the best others."""
    default = search.scored(group)
    assert isinstance(default, Scored)
    seen = {s.plan.scored_as for s in (default, *others)}
    for base in (default, *sorted(others, key=lambda s: s.us)[: VARIED_SCHEDULES - 1]):
        for scored in variations(base, search.bindings, search.device):
            if scored.plan.scored_as not in seen:
                seen.add(scored.plan.scored_as)
                yield scored


def _best_of_each_kind(found: list[Scored], default: object, most: int) -> list[Scored]:
    """The best schedule of every kind, ordered by time; then the next best of any kind if there are too few kinds."""
    assert isinstance(default, Scored)
    ranked = sorted((s for s in found if s.plan.scored_as != default.plan.scored_as), key=lambda s: s.us)
    first: dict[tuple[object, ...], Scored] = {schedule_kind(default.plan.schedule): default}
    for scored in ranked:
        first.setdefault(schedule_kind(scored.plan.schedule), scored)
    kinds = [s for s in first.values() if s is not default]
    return (kinds + [s for s in ranked if s not in kinds])[:most]


def schedule_kind(schedule: Schedule) -> tuple[object, ...]:
    """Key of the schedules that run alike; tuning times one of each."""
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
