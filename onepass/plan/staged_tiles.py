"""Tiles of columns in shared memory: which kernels may walk rows so, how a tile lies on threads, and every byte it takes.

A CTA owns some columns and walks rows in tiles. TMA brings the tile of every full-size input to a place of a ring, and one
barrier a place tells when all of them have arrived. Threads read a tile strip by strip, 16 bytes or more at a time, and each keeps
the state of a reduction for its own columns; they meet once, when all rows are walked. By then the ring is drained, and what they
exchange takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..device import Device
from ..ir.program import Load, Reduce, Store
from .kernel import Kernel
from .schedule import Block, Loop, Schedule
from .staged_rows import BARRIER_BYTES, BARRIERS, TMA_BOX, register_limit, tma_describes

MIN_LINE_BYTES = 64  # bytes of a row that a copy brings: less wastes half of what DRAM hands out at once
MIN_STAGES, MAX_STAGES = 2, 8  # places of a ring: one to read while another is filled, and no more than barriers are cheap for
MAX_CAPPED_INPUTS = 32  # inputs of a kernel that is told how many registers it may take
MAX_STRIP_REGISTERS = 32  # registers that a thread spends on a strip of all inputs, where more than one vector of each is at all possible


@dataclass(frozen=True, slots=True)
class Strips:
    """A tile as threads read it: `count` strips of `height` rows, of which every thread has `height / at_once` in its columns."""

    vector: int  # columns that lie side by side in a thread
    lanes: int  # threads of a warp along a row
    across: int  # warps along a row
    down: int  # warps along a column
    at_once: int  # rows that all threads of a CTA read with one vector each
    height: int
    count: int

    @property
    def each(self) -> int:
        """Rows of a strip that a thread has."""
        return self.height // self.at_once


def tile_stageable(kernel: Kernel) -> tuple[int, ...]:
    """All full-size loads, where TMA can bring each of them and one walk over the rows is all that the kernel needs; else none."""
    space, program = kernel.space, kernel.program
    folds = bool(kernel.folds) and all(f.rows and not f.cols for f in kernel.folds)
    if not folds or space.batch or space.block or not isinstance(program.extent(space.cols), int):
        return ()
    again = any(kernel.phase[i] and (kernel.by_row[i] or isinstance(program.nodes[i], Reduce)) for i in program.of(Reduce, Store))
    full = tuple(i for i in program.of(Load) if kernel.is_full[i])
    return full if not again and all(tma_describes(kernel, i) for i in full) else ()


def rows_at_once(width: int, vector: int, warps: int) -> int:
    """Rows of so many columns that a CTA's threads read with one vector each: the least height of a tile."""
    return max(1, 32 * warps * vector // width)


def strips(schedule: Schedule, vector: int, element_bytes: int) -> Strips:
    """How the tiles of a schedule lie on threads; `element_bytes` of all parked loads together."""
    assert isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Block)
    tall, width, warps = schedule.rows.step, schedule.cols.size, schedule.warps
    lanes = min(32, width // vector)
    across = min(warps, width // (lanes * vector))
    least = rows_at_once(width, vector, warps)
    if width > TMA_BOX or tall > TMA_BOX or tall % least or lanes * across * vector != width:
        raise ValueError(f"{warps} warps do not read tiles of {tall} x {width} by vectors of {vector}")
    height = least
    while 2 * height <= tall and 2 * height // least * vector * max(4, element_bytes) <= 4 * MAX_STRIP_REGISTERS:
        height *= 2
    return Strips(vector, lanes, across, warps // across, least, height, tall // height)


def with_register_cap(schedule: Schedule, here: int, device: Device) -> Schedule:
    """A schedule that says the most registers with which so many CTAs share an SM.

    Of very many inputs it says nothing: told so, ptxas loads all that it has registers for before it adds any. A sum of 32 then
    takes 237 of 255, one of 40 spills, where untold it takes 153.
    """
    few = len(schedule.staged) <= MAX_CAPPED_INPUTS
    return replace(schedule, registers=register_limit(schedule.warps, here, device) if few else 0)


def smem_bytes(schedule: Schedule, vector: int, element_bytes: int, state_bytes: int) -> int:
    """Shared memory of a CTA: barriers, and rings of all parked inputs, or what warps exchange when those are no longer needed."""
    assert isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Block)
    width = schedule.cols.size
    rings = schedule.stages * schedule.rows.step * width * element_bytes
    down = strips(schedule, vector, element_bytes).down
    return max(rings, down * width * state_bytes if down > 1 else 0) + BARRIERS * BARRIER_BYTES
