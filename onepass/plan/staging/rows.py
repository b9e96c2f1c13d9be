"""Staged rows: the family that reduces along them, and what it shares with those that also reduce down the columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from ...constants import SHIPPED
from ...device import Device
from ..choices import Choices
from ..cost.case import Case
from ..cost.resident import resident
from ..cost.staged_rows import staged_rows
from ..cost.terms import Cost
from ..kernel import Kernel
from ..legality import Illegal, Reason
from ..resources import MAX_ELEMS_IN_FLIGHT, Demand, RegisterFit, elements_per_thread, walked_states
from ..schedule import PIECE_ELEMS, Cover, Loop, MultiCtaMixOrder, Ring, StagedMixOrder, StagedRows
from ..staged_rows import (
    BARRIERS,
    Chunks,
    chunk_cover,
    chunk_cover_unaligned,
    chunks,
    must_stage,
    prefetched_columns,
    register_limit,
    smem_bytes,
    tma_stageable,
    tma_stageable_unaligned,
)
from ..thread_layout import chunk_vector, vector
from ..traffic import Traffic
from .family import MAX_RINGS_PER_SM, StagedFamily, too_many_slots

MAX_RING_ROWS = 4  # rows per ring
FITTED = SHIPPED.registers
FIT = RegisterFit(FITTED.staged_rows_base, FITTED.staged_rows_access, FITTED.staged_rows_live)

OfRows: TypeAlias = StagedRows | StagedMixOrder | MultiCtaMixOrder


def ring_rows(kernel: Kernel, need: Demand, t: Traffic, device: Device) -> Iterator[StagedRows]:
    """Staged rows, if some load is needed twice and TMA can stage all such loads within a CTA's shared memory."""
    cols, required = t.cols, must_stage(kernel)
    unaligned = not required <= frozenset(tma_stageable(kernel))
    stageable = frozenset(tma_stageable_unaligned(kernel) if unaligned else tma_stageable(kernel))
    if not required or not required <= stageable:
        return
    vec = vector(kernel)
    for staged in (required,) if required == stageable else (required, stageable):
        for warps in (4, 8, 16):
            for width in (32 * warps * vec * k for k in (1, 2, 4)):
                if width > cols:
                    continue
                covered = (chunk_cover_unaligned if unaligned else chunk_cover)(cols, width, 32 * warps * vec)
                if covered is None:
                    continue
                for stages in range(1, MAX_RING_ROWS + 1):
                    one = StagedRows(covered.tiles, warps, Ring(1, stages), unaligned, staged)
                    smem = ring_bytes(need, one)
                    if smem > device.smem_per_cta:
                        break
                    max_ctas = min(MAX_RINGS_PER_SM, device.smem_per_sm // (smem + device.smem_reserve))
                    for ctas_per_sm in sorted({1, min(2, max_ctas), max_ctas}):
                        split = max(1, min(ctas_per_sm * device.sms, t.rows))
                        registers = register_limit(warps, ctas_per_sm, device)
                        room = min(device.smem_per_cta, device.smem_per_sm // ctas_per_sm - device.smem_reserve) - smem
                        depths = [] if unaligned or stages > 1 else _prefetch_depths(covered, cols, room // need.staged_bytes(one))
                        for prefetch in (0, *depths):
                            yield replace(one, ring=Ring(split, stages, prefetch), registers=registers)


def _prefetch_depths(covered: Cover, cols: int, room: int) -> list[int]:
    """Copies of the next row to prefetch into a single-row ring: as many as fit, and half as many.

    If a whole row fits, another schedule gives it a slot.
    """
    copies = chunks(covered, cols).copies
    if not copies or room >= cols:
        return []
    deepest = min(room // prefetched_columns(covered, 1), BARRIERS - copies)
    return [n for n in sorted({deepest, deepest // 2}) if n]


def refused_rows(kernel: Kernel, schedule: OfRows) -> Illegal | None:
    """Rows are staged in chunks that every thread has a part of."""
    unaligned = isinstance(schedule, StagedRows) and schedule.unaligned
    stageable = frozenset(tma_stageable_unaligned(kernel) if unaligned else tma_stageable(kernel))
    if not schedule.staged:
        return Illegal(Reason.STORAGE, "nothing is staged")
    if not schedule.staged <= stageable:
        return Illegal(Reason.STORAGE, f"TMA cannot describe all staged loads as rows{' of pieces' if unaligned else ''}")
    try:
        shape = chunks_of(kernel, schedule)
    except ValueError as error:
        return Illegal(Reason.SIZES, str(error))
    threads = 32 * schedule.warps
    if shape.width < threads:
        return Illegal(Reason.SIZES, f"chunks of {shape.width} columns leave some of {threads} threads without any")
    if shape.rest and shape.rest < min(shape.width, threads * chunk_vector(kernel, schedule)):
        return Illegal(Reason.SIZES, f"a rest of {shape.rest} columns leaves some of {threads} threads without any")
    return too_many_slots(schedule.stages)


def refused_ring(kernel: Kernel, schedule: StagedRows | StagedMixOrder) -> Illegal | None:
    """Copies of the next row are prefetched where a ring has one row of several whole copies, and mbarriers for all."""
    if not schedule.prefetch:
        return None
    if schedule.stages > 1:
        return Illegal(Reason.FIELDS, "prefetch without a ring of one row")
    shape = chunks_of(kernel, schedule)
    if not shape.copies:
        return Illegal(Reason.SIZES, "prefetch of rows that are not several whole copies")
    if shape.copies + schedule.prefetch > BARRIERS:
        return Illegal(Reason.SIZES, f"{schedule.prefetch} copies prefetched by a row of {shape.copies}: {BARRIERS} mbarriers")
    return None


def chunks_of(kernel: Kernel, schedule: OfRows) -> Chunks:
    """The chunks of a row, or of a CTA's part of it. ValueError if these tiles are none."""
    extent = kernel.program.extent(kernel.space.cols)
    assert isinstance(extent, int), "tiles are checked before"
    return chunks(schedule.cols, extent // schedule.ctas_per_row)


def ring_bytes(need: Demand, schedule: OfRows, exchanged: int = 1) -> int:
    """Shared memory of a CTA without row vectors. `exchanged`: states that warps exchange at once."""
    element, exchange = need.staged_bytes(schedule), need.exchange_bytes * exchanged
    return smem_bytes(element, schedule.cols, schedule.stages, exchange, schedule.warps, schedule.prefetch)


def candidates(kernel: Kernel, need: Demand, t: Traffic, device: Device) -> Iterator[StagedRows]:
    """Inner reductions over staged rows: one row per CTA, or a loop over rows.

    With one row per CTA the load is balanced dynamically, because SMs are not equally fast. H200, softmax 8192x32768: 258 us;
    132 to 396 CTAs that loop over rows 275 to 290 us.
    """
    for one in ring_rows(kernel, need, t, device):
        if 2 * one.tiles[0] <= t.cols:  # registers hold what is shorter
            yield one
            if one.stages == 1 and not one.prefetch:
                yield replace(one, ring=None)


def completed(kernel: Kernel, make: Choices, schedule: StagedRows) -> StagedRows:
    """A single row per CTA marks what is not staged for L2; a loop over rows does not."""
    marked = frozenset[int]() if schedule.ring else make.streams.evict_last(schedule.cols.width, schedule.warps) - schedule.staged
    return replace(schedule, evict_last=marked, vector_limit=make.vector_limit)


def refused(kernel: Kernel, schedule: StagedRows) -> Illegal | None:
    """Rows are what TMA can describe, as rows in a ring or as pieces of the flat tensor."""
    return refused_rows(kernel, schedule) or (_unaligned if schedule.unaligned else refused_ring)(kernel, schedule)


def _unaligned(kernel: Kernel, schedule: StagedRows) -> Illegal | None:
    """Unaligned rows end in a rest that has room for the offset of a row, and for the end of the tensor."""
    shape, extent = chunks_of(kernel, schedule), kernel.program.extent(kernel.space.cols)
    assert isinstance(extent, int)
    over = extent - shape.count * shape.width
    if over < PIECE_ELEMS or not over + PIECE_ELEMS - 1 <= shape.rest <= shape.width or shape.width % PIECE_ELEMS:
        return Illegal(Reason.SIZES, f"chunks of {shape.width} and a rest of {shape.rest} do not fit unaligned rows of {extent}")
    return Illegal(Reason.FIELDS, "prefetch of unaligned rows") if schedule.prefetch else None


def registers(need: Demand, schedule: StagedRows) -> float:
    """States of a chunk, which stays alive until it is merged."""
    once, _ = elements_per_thread(schedule)
    found = FIT.of(need, once) + walked_states(need, once, FITTED.staged_state_share)
    return found + need.reread * need.registers_per_value * max(0.0, once - MAX_ELEMS_IN_FLIGHT)


def cost(case: Case) -> Cost:
    """A single row is loaded as resident rows are, and rows of a ring overlap."""
    return staged_rows(case) if isinstance(case.schedule.rows, Loop) else resident(case, case.t.rows * case.t.batch, case.t.cols, 1)


FAMILY = StagedFamily(StagedRows, True, candidates, completed, refused, registers, ring_bytes, cost)
