"""(kernel, schedule) -> kernel IR -> Source, by the lowering of the schedule's family."""

from __future__ import annotations

from ..device import Device
from ..errors import IllegalSchedule
from ..ir.size import Bindings
from ..plan.kernel import Kernel
from ..plan.schedule import MultiCtaMixOrder, Schedule, StagedMixOrder, StagedRows, StagedTiles
from ..plan.schedule.check import check
from . import gluon, gluon_tiles, triton
from .printer import Lowered
from .source import Source


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, device: Device, wide: bool = False) -> Source:
    """The source of one kernel. `wide` selects 64-bit indices. Raises IllegalSchedule if the schedule cannot run the kernel."""
    return lower(kernel, schedule, bindings, name, device, wide).source()


def lower(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, device: Device, wide: bool = False) -> Lowered:
    """One kernel in IR, checked as in `emit`."""
    if refused := check(kernel, schedule, device, emitted=True):
        raise IllegalSchedule(
            kernel=name, schedule=schedule, device=device.title, reason=refused.reason.value, detail=refused.detail
        )
    match schedule:
        case StagedTiles():
            return gluon_tiles.lower(kernel, schedule, bindings, name, wide)
        case StagedRows() | StagedMixOrder() | MultiCtaMixOrder():
            return gluon.lower(kernel, schedule, bindings, name, wide)
        case _:
            return triton.lower(kernel, schedule, bindings, name, wide)
