"""Variations of a schedule in one field that candidates do not search: L2 hints, packing, early loads, private states and others.

`choices.py` and the families of `staging/` decide these fields. The model predicts some of them not at all (docs/tuning.md), so
only timing can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from ..device import Device
from ..ir.size import Bindings
from .cost.model import cost, join_us
from .estimate import estimate
from .kernel import Kernel
from .l2_hints import streams
from .resources import demand
from .schedule import Cover, Schedule
from .schedule.check import check
from .scoring import Scored, fits_one_wave
from .thread_layout import access_vector, chunk_vector
from .traffic import traffic

WORD = 4  # bytes of a register
# The fields that are varied, the one that is likeliest to matter first. Sizes and places of data are searched by candidates.
VARIED = ("evict_last", "packed", "private_states", "early_loads", "strip_rows", "unroll_copies", "folds_two_sums", "vector_limit")


def variations(of: Scored, bindings: Bindings, device: Device) -> Iterator[Scored]:
    """A schedule with one field changed, once for every other value that is legal and fits the device."""
    kernel, schedule = of.plan.kernel, of.plan.schedule
    own = {f.name for f in fields(schedule)}
    t, need = traffic(kernel, bindings), demand(kernel)
    for name in VARIED:
        for value in _other_values(kernel, schedule, name, bindings) if name in own else ():
            other = replace(schedule, **{name: value})
            if check(kernel, other, device):
                continue
            resources = estimate(need, other, device)
            if resources.ctas_per_sm < 1 or not fits_one_wave(other, resources.ctas_per_sm, device):
                continue
            one = cost(kernel, other, resources, t, device)
            plan = replace(of.plan, schedule=other, resources=resources, cost=one, scored_as=(kernel.program, other))
            yield Scored(plan, one.us + join_us(other, t, device))


def _other_values(kernel: Kernel, schedule: Schedule, name: str, bindings: Bindings) -> Iterator[Any]:
    """The values to try for a field instead of the one it has."""
    has = getattr(schedule, name)
    match name:
        case "evict_last":
            found = streams(kernel, bindings)
            tried: list[Any] = [found.stores, found.stores | (found.loads - schedule.staged), frozenset()]
        case "packed":
            narrow = any(kernel.program.dtypes[i].size < WORD for i in schedule.resident)
            tried = [not has] if narrow else []
        case "early_loads":
            tried = [frozenset(kernel.after_reduction), frozenset()]
        case "strip_rows":
            tried = [2 * has, has // 2]
        case "vector_limit":
            chunked = schedule.staged and isinstance(schedule.cols, Cover)
            tried = [(chunk_vector if chunked else access_vector)(kernel, schedule) // 2]
        case _:
            tried = [not has]
    yield from (value for value in dict.fromkeys(tried) if value != has)
