"""The kernel families that stage inputs in shared memory, one module each."""

from __future__ import annotations

from typing import Any

from ..schedule import Schedule
from . import mix_order, multi_cta, rows, tiles
from .family import StagedFamily

FAMILIES: tuple[StagedFamily[Any], ...] = (rows.FAMILY, mix_order.FAMILY, multi_cta.FAMILY, tiles.FAMILY)
_BY_RECORD = {family.record: family for family in FAMILIES}


def staged_family(schedule: Schedule) -> StagedFamily[Any] | None:
    """The family of a schedule if it stages inputs."""
    return _BY_RECORD.get(type(schedule))
