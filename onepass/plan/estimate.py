"""Resource estimates: registers, shared memory and CTAs per SM of (kernel, schedule, device) before compiling.

These formulas only rank schedules and reject hopeless ones. The compiler decides: a kernel that spills or does not fit is
remembered with its estimate, and only schedules with lower estimates are tried again (see pipeline.py).
"""

from __future__ import annotations

from ..constants import SHIPPED
from ..device import Device
from .resources import (
    MAX_ELEMS_IN_FLIGHT,
    Demand,
    RegisterFit,
    Resources,
    ctas_per_sm,
    early_load_registers,
    elements_per_thread,
    tile_of,
    walked_states,
)
from .schedule import Block, Cover, Loop, MixOrder, ResidentRows, Schedule
from .staging import staged_family

FITTED = SHIPPED.registers
FIT_RESIDENT = RegisterFit(FITTED.resident_base, FITTED.resident_access, FITTED.resident_live, FITTED.resident_resident)
FIT_MIX_ORDER = RegisterFit(
    FITTED.mix_order_base, FITTED.mix_order_access, FITTED.mix_order_live, FITTED.mix_order_resident, FITTED.mix_order_accumulated
)
FIT_LOOP_COLS = RegisterFit(FITTED.loop_cols_base, 0, FITTED.loop_cols_live)
FIT_LOOP_ROWS = RegisterFit(FITTED.loop_rows_base, 0, FITTED.loop_rows_live)
FIT_POINTWISE = RegisterFit(FITTED.pointwise_base, FITTED.pointwise_access, FITTED.pointwise_live)


def estimate(need: Demand, schedule: Schedule, device: Device) -> Resources:
    """Predict the resources of a CTA. 0 CTAs per SM means it does not fit."""
    if family := staged_family(schedule):
        registers, smem = family.registers(need, schedule), family.smem_bytes(need, schedule)
    else:
        registers, smem = _registers(need, schedule), _compiled_smem_bytes(need, schedule)
    threads, count = 32 * schedule.warps, int(min(max(registers, 16), 1024))
    most = min(device.registers_per_thread, device.registers_per_sm // threads, schedule.registers or device.registers_per_thread)
    pipelined = isinstance(schedule, MixOrder) and schedule.stages > 1 and schedule.step == 1
    if pipelined and most < count <= FITTED.squeeze * most:
        count = most
    return Resources(count, smem, 0 if count > most else ctas_per_sm(count, smem, schedule.warps, device))


def _registers(need: Demand, schedule: Schedule) -> float:
    """Registers per thread with all tiles in registers."""
    fit, (once, held) = _register_fit(schedule), elements_per_thread(schedule)
    found = fit.of(need, once)
    if schedule.resident:
        per_element = need.resident_bytes / 4 if schedule.packed else need.resident_registers
        found += max(1.0, fit.resident * held * per_element)
    if isinstance(schedule, ResidentRows) and schedule.early_loads:
        early = (load for load in need.after_reduction if load.node in schedule.early_loads)
        found += sum(early_load_registers(load, schedule.height, schedule.tiles, schedule.warps) for load in early)
    if fit is FIT_MIX_ORDER:
        found += fit.accumulated * need.accumulated * held
    elif fit is FIT_LOOP_ROWS:
        merged = FITTED.merged_tile_share * once * need.registers_per_value + FITTED.merge_registers
        found = found + walked_states(need, once) + need.reread * merged
    elif fit is FIT_LOOP_COLS:  # the whole tile stays alive until it is merged
        late = need.reread * need.registers_per_value * max(0.0, once - MAX_ELEMS_IN_FLIGHT)
        found = found + walked_states(need, once) + late
    return found


def _compiled_smem_bytes(need: Demand, schedule: Schedule) -> int:
    """The compiler's likely use of shared memory."""
    tile = tile_of(schedule)
    pipelined = (schedule.stages - 1) * tile.height * tile.resident_width * need.full_bytes
    return 1024 + schedule.warps * tile.height * 8 + pipelined


def _register_fit(schedule: Schedule) -> RegisterFit:
    match schedule.rows, schedule.cols:
        case Loop(), Cover():
            return FIT_MIX_ORDER
        case _, Loop():
            return FIT_LOOP_COLS
        case Loop(), _:
            return FIT_LOOP_ROWS
        case Block(), Block():
            return FIT_POINTWISE
        case _:
            return FIT_RESIDENT
