"""Column tiles staged in shared memory, and reduced down the columns.

A CTA owns some columns and walks rows in tiles. TMA copies the tile of every full-size input to a ring slot, and one mbarrier
per slot signals that all of them arrived. Threads read a tile strip by strip, at least 16 bytes at a time, and keep reduction
states for their own columns. They merge states once, after the last row. By then the ring is empty, and the exchange reuses
its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...constants import SHIPPED
from ...device import Device
from ...ir.program import Load, Reduce, Store
from ..choices import Choices
from ..cost.looped import looped
from ..kernel import Kernel
from ..legality import Family, Illegal, Reason, may_split
from ..resources import Demand
from ..schedule import StagedTiles, power_of_two
from ..schedule.roles import is_power_of_two
from ..staged_rows import BARRIER_BYTES, BARRIERS, TMA_BOX, register_limit, tma_describes
from ..thread_layout import access_vector, explicit_vector
from ..traffic import Traffic
from .family import MAX_RINGS_PER_SM, StagedFamily, too_many_slots

MIN_LINE_BYTES = 64  # bytes per row of a tile; shorter runs waste half of a DRAM access
MIN_STAGES, MAX_STAGES = 2, 8  # ring slots: one is read while another is filled; more mbarriers than the maximum cost time
MAX_CAPPED_INPUTS = 32  # staged inputs of a kernel with a register cap
FITTED = SHIPPED.registers
MAX_STRIP_REGISTERS = 32  # registers per thread for a strip of all inputs, if it has more than one vector of each


@dataclass(frozen=True, slots=True)
class Strips:
    """Thread layout of a tile: `count` strips of `height` rows; a thread reads `height / rows_per_step` rows of its columns."""

    vector: int  # adjacent columns per thread
    lanes: int  # threads of a warp along a row
    across: int  # warps along a row
    down: int  # warps along a column
    rows_per_step: int  # rows covered by one vector of every thread of the CTA
    height: int
    count: int

    @property
    def rows_per_thread(self) -> int:
        """Rows of a strip per thread."""
        return self.height // self.rows_per_step


def tile_stageable(kernel: Kernel) -> tuple[int, ...]:
    """All full-size loads, if TMA can stage each and the kernel needs only one walk over the rows; otherwise none."""
    space, program = kernel.space, kernel.program
    folds = bool(kernel.folds) and all(f.rows and not f.cols for f in kernel.folds)
    if not folds or space.batch or space.block or not isinstance(program.extent(space.cols), int):
        return ()
    again = any(kernel.phase[i] and (kernel.by_row[i] or isinstance(program.nodes[i], Reduce)) for i in program.of(Reduce, Store))
    full = tuple(i for i in program.of(Load) if kernel.is_full[i])
    return full if not again and all(tma_describes(kernel, i) for i in full) else ()


def rows_at_once(width: int, vector: int, warps: int) -> int:
    """Minimum tile height: the rows of `width` columns that a CTA's threads cover with one vector each."""
    return max(1, 32 * warps * vector // width)


def strip_rows(step: int, width: int, warps: int, vector: int, element_bytes: int) -> int:
    """Rows of a tile to read at once: as many as leave a strip of all inputs in few registers, at least one vector per thread.

    `element_bytes` is the size of one element of all staged inputs together.
    """
    least = rows_at_once(width, vector, warps)
    height = least
    while 2 * height <= step and 2 * height // least * vector * max(4, element_bytes) <= 4 * MAX_STRIP_REGISTERS:
        height *= 2
    return height


def strips(tall: int, width: int, warps: int, height: int, vector: int) -> Strips:
    """The thread layout of tiles of `tall` rows, in strips of `height`. ValueError if the threads do not divide them evenly."""
    lanes = max(1, min(32, width // vector))
    across = min(warps, width // (lanes * vector))
    least = rows_at_once(width, vector, warps)
    if width > TMA_BOX or tall > TMA_BOX or tall % least or lanes * across * vector != width:
        raise ValueError(f"{warps} warps cannot read tiles of {tall} x {width} in vectors of {vector}")
    if height % least or tall % height:
        raise ValueError(f"{warps} warps cannot read tiles of {tall} x {width} in strips of {height} rows")
    return Strips(vector, lanes, across, warps // across, least, height, tall // height)


def register_cap(inputs: int, warps: int, ctas_per_sm: int, device: Device) -> int:
    """The register cap that lets `ctas_per_sm` CTAs share an SM; 0, none, if there are very many staged inputs.

    With a cap, ptxas issues as many loads as fit in registers before it adds anything. A capped sum of 32 inputs takes 237 of
    255 registers and one of 40 spills; uncapped, the latter takes 153.
    """
    return register_limit(warps, ctas_per_sm, device) if inputs <= MAX_CAPPED_INPUTS else 0


def candidates(kernel: Kernel, need: Demand, t: Traffic, device: Device) -> Iterator[StagedTiles]:
    """Outer reductions over staged tiles of columns, if TMA can stage all full-size inputs.

    Tiles get shorter, down to one vector per thread, until two fit; if even those do not fit, there is no such schedule.
    Partial results of another kernel are in L2 already, and a ring only adds startup time: H200, two sums of 264x5120
    partials 7 us staged, 2.5 us with plain loads.
    """
    stageable = frozenset(tile_stageable(kernel))
    if not stageable or _reads_only_partials(kernel):
        return
    vec, splits = need.explicit_vector, may_split(kernel, Family.OUTER)
    sizes = [kernel.program.dtypes[i].size for i in stageable]
    min_width = MIN_LINE_BYTES // min(sizes)
    max_width = max(min_width, power_of_two(t.cols))
    for warps in (4, 8):
        for width in (w for w in (16, 32, 64, 128, 256) if max(min_width, vec) <= w <= max_width):
            min_height = rows_at_once(width, vec, warps)
            for height in (min_height * k for k in (1, 2, 4, 8)):
                if height > min(TMA_BOX, max(min_height, power_of_two(t.rows))):
                    break
                strip = strip_rows(height, width, warps, vec, sum(sizes))
                for stages in (MIN_STAGES, 3, 4, MAX_STAGES):
                    one = StagedTiles(height, width, warps, stages, strip_rows=strip, staged=stageable)
                    smem = smem_bytes(need, one)
                    if smem > device.smem_per_cta:
                        break
                    max_ctas = min(MAX_RINGS_PER_SM, device.smem_per_sm // (smem + device.smem_reserve))
                    if max_ctas * smem < device.bytes_in_flight:  # staging gains nothing
                        continue
                    for split, ctas in _row_splits(height, width, sorted({1, min(2, max_ctas), max_ctas}), splits, t, device):
                        cap = register_cap(len(stageable), warps, ctas, device)
                        yield replace(one, split=split, registers=cap)


def _reads_only_partials(kernel: Kernel) -> bool:
    """Whether a kernel reads only partial results of another kernel."""
    return all(
        kernel.program.buffer[n.buffer].role == "temp"
        for i, n in enumerate(kernel.program.nodes)
        if isinstance(n, Load) and kernel.is_full[i]
    )


def _row_splits(
    height: int, width: int, ctas_per_sm: list[int], may_split_rows: bool, t: Traffic, device: Device
) -> list[tuple[int, int]]:
    """How many CTAs share the rows of a column, each with its CTAs per SM: one, and where allowed as many as fill the SMs."""
    blocks, tiles = -(-t.cols // width), -(-t.rows // height)
    splits = {1: min(ctas_per_sm[-1], -(-blocks // device.sms))}
    for ctas in reversed(ctas_per_sm) if may_split_rows else ():
        if (split := min(tiles, round(ctas * device.sms / blocks))) > 1:
            splits[split] = ctas
    return sorted(splits.items())


def completed(kernel: Kernel, make: Choices, schedule: StagedTiles) -> StagedTiles:
    """Strips are as tall as registers allow."""
    element = sum(kernel.program.dtypes[i].size for i in schedule.staged)
    strip = strip_rows(schedule.step, schedule.width, schedule.warps, explicit_vector(kernel), element)
    return replace(schedule, strip_rows=strip, evict_last=make.streams.evict_last_stores(schedule.step * schedule.width))


def refused(kernel: Kernel, schedule: StagedTiles) -> Illegal | None:
    """Tiles of all full-size inputs are staged, in a shape that threads and TMA can read."""
    if not schedule.staged or schedule.staged != frozenset(tile_stageable(kernel)):
        return Illegal(Reason.STORAGE, "staged tiles need every full-size input, each of which TMA can describe, and one pass")
    if not is_power_of_two(schedule.strip_rows):
        return Illegal(Reason.SIZES, f"strips of {schedule.strip_rows} rows: every size must be a power of two")
    try:
        strips_of(schedule, access_vector(kernel, schedule))
    except ValueError as error:
        return Illegal(Reason.SIZES, str(error))
    return too_many_slots(schedule.stages)


def strips_of(schedule: StagedTiles, vector: int) -> Strips:
    """The thread layout of a schedule's tiles."""
    return strips(schedule.step, schedule.width, schedule.warps, schedule.strip_rows, vector)


def registers(need: Demand, schedule: StagedTiles) -> float:
    """Registers for the states of a thread's columns and for its part of a strip."""
    element = need.staged_bytes(schedule)
    vector = schedule.vector_limit or need.explicit_vector
    elements = vector * strips_of(schedule, vector).rows_per_thread
    states = vector * (need.state_registers + FITTED.merged_state_share * need.merged_registers)
    strip = elements * (FITTED.strip_share * element / 4 + FITTED.entering_share * need.entering_registers)
    return FITTED.staged_tiles_base + (states + strip)


def smem_bytes(need: Demand, schedule: StagedTiles) -> int:
    """Shared memory of a CTA: mbarriers, and the larger of the rings and the exchange that reuses them."""
    rings = schedule.stages * schedule.step * schedule.width * need.staged_bytes(schedule)
    down = strips_of(schedule, schedule.vector_limit or need.explicit_vector).down
    exchange = down * schedule.width * need.exchange_bytes_down if down > 1 else 0
    return max(rings, exchange) + BARRIERS * BARRIER_BYTES


FAMILY = StagedFamily(StagedTiles, False, candidates, completed, refused, registers, smem_bytes, looped)
