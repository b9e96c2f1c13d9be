"""(kernel, schedule) -> Source, by the emitter of the schedule's family."""

from __future__ import annotations

from ..device import Device
from ..errors import IllegalSchedule
from ..ir.size import Bindings
from ..plan.kernel import Kernel
from ..plan.schedule import MultiCtaMixOrder, Schedule, StagedMixOrder, StagedRows, StagedTiles
from ..plan.schedule.check import check
from . import gluon, gluon_mix_order, gluon_multi_cta, gluon_tiles, gluon_unaligned, triton
from .source import Source


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, device: Device, wide: bool = False) -> Source:
    """The source of one kernel. `wide` selects 64-bit indices. Raises IllegalSchedule if the schedule cannot run the kernel."""
    if refused := check(kernel, schedule, device, emitted=True):
        raise IllegalSchedule(kernel=name, schedule=schedule, device=device.title, reason=refused.reason.value,
                              detail=refused.detail)
    match schedule:
        case StagedTiles():
            return gluon_tiles.emit(kernel, schedule, bindings, name, wide)
        case MultiCtaMixOrder():
            return gluon_multi_cta.emit(kernel, schedule, bindings, name, wide)
        case StagedMixOrder():
            return gluon_mix_order.emit(kernel, schedule, bindings, name, wide)
        case StagedRows(unaligned=True):
            return gluon_unaligned.emit(kernel, schedule, bindings, name, wide)
        case StagedRows():
            return gluon.emit(kernel, schedule, bindings, name, wide)
        case _:
            return triton.emit(kernel, schedule, bindings, name, wide)
