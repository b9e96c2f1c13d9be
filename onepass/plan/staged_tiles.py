"""Staging column tiles in shared memory via TMA: which kernels qualify, the thread layout of a tile, and the smem footprint.

A CTA owns some columns and walks rows in tiles. TMA copies the tile of every full-size input to a ring slot, and one mbarrier
per slot signals that all of them arrived. Threads read a tile strip by strip, at least 16 bytes at a time, and keep reduction
states for their own columns. They merge states once, after the last row. By then the ring is empty, and the exchange reuses
its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Device
from ..ir.program import Load, Reduce, Store
from .kernel import Kernel
from .schedule import StagedTiles
from .staged_rows import BARRIER_BYTES, BARRIERS, TMA_BOX, register_limit, tma_describes

MIN_LINE_BYTES = 64  # bytes per row of a tile; shorter runs waste half of a DRAM access
MIN_STAGES, MAX_STAGES = 2, 8  # ring slots: one is read while another is filled; more mbarriers than the maximum cost time
MAX_CAPPED_INPUTS = 32  # staged inputs of a kernel with a register cap
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


def strips(schedule: StagedTiles, vector: int) -> Strips:
    """The thread layout of a schedule's tiles. ValueError if the threads do not divide them evenly."""
    tall, width, warps, height = schedule.step, schedule.width, schedule.warps, schedule.strip_rows
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


def smem_bytes(schedule: StagedTiles, vector: int, element_bytes: int, state_bytes: int) -> int:
    """Shared memory of a CTA: mbarriers, and the larger of the rings and the exchange that reuses them."""
    rings = schedule.stages * schedule.step * schedule.width * element_bytes
    down = strips(schedule, vector).down
    return max(rings, down * schedule.width * state_bytes if down > 1 else 0) + BARRIERS * BARRIER_BYTES
