"""Registers, shared memory and CTAs per SM of (kernel, schedule, device), before anything is compiled.

The compiler has the last word: a compiled kernel's real register count replaces the estimate (see pipeline.py), so these
formulas only have to rank schedules and keep hopeless ones out.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Device
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Reduce, Store
from .kernel import Across, Kernel
from .schedule import Block, Cover, Loop, Schedule


@dataclass(frozen=True, slots=True)
class Resources:
    """What one CTA takes and how many fit."""

    registers: int
    smem_bytes: int
    ctas_per_sm: int


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of the work a CTA holds at once."""

    height: int
    width: int  # of the widest tile
    resident_width: int  # of all tiles of a covered side together
    resident_height: int


def tile_of(schedule: Schedule) -> Tile:
    def side(role: "Block | Cover | Loop") -> tuple[int, int]:
        match role:
            case Block(size):
                return size, size
            case Cover(tiles):
                return max(tiles), sum(tiles)
            case Loop(step):
                return step, step

    (height, all_height), (width, all_width) = side(schedule.rows), side(schedule.cols)
    return Tile(height, width, all_width, all_height)


def live_values(kernel: Kernel) -> int:
    """Full-size values alive at once at the worst point, in emission order, per phase."""
    program, worst = kernel.program, 0
    for phase in range(kernel.passes):
        last: dict[int, int] = {}
        here = [i for i in range(len(program.nodes)) if kernel.is_full[i] and kernel.phase[i] <= phase]
        for i in here:
            for user in program.users[i]:
                if kernel.phase[user] == phase:
                    last[i] = user
        events = sorted(last.items())
        for i, _ in events:
            worst = max(worst, sum(1 for start, end in events if start <= i < end))
    return max(worst, 1)


# Fitted to ptxas's register counts for sm_90 (Triton 3.7.1, 0 spills) over the norm, softmax and loss kernels of
# tools/workloads.py at 512 to 32768 columns; see docs/decisions.
BASE, PER_POINTER, LIVE_SHARE = 18, 1.5, 0.55


def estimate(kernel: Kernel, schedule: Schedule, device: Device, known: int | None = None) -> Resources:
    """Predict what a CTA takes; `known` registers are taken as they are. 0 CTAs per SM means it does not fit."""
    program, threads, tile = kernel.program, 32 * schedule.warps, tile_of(schedule)
    held = tile.resident_height * tile.resident_width / threads  # elements per thread of all a CTA holds
    once = tile.height * tile.width / threads
    registers = BASE + PER_POINTER * sum(1 for n in program.nodes if isinstance(n, (Load, Store)))
    registers += sum(max(1.0, held * program.dtypes[i].size / 4) for i in schedule.resident)
    for fold in kernel.folds:
        node = program.nodes[fold.node]
        assert isinstance(node, Reduce)
        states = len(MONOIDS[node.monoid].state) if not fold.block else 0
        size = max(1, program.dtypes[node.args[0]].size // 4)
        loops = isinstance(schedule.cols, Loop) if fold.cols else isinstance(schedule.rows, Loop)
        if fold.rows and isinstance(schedule.cols, Cover) and not fold.cols and _varies(kernel, node):
            registers += states * size * held
        elif loops:
            registers += states * size * (max(1.0, once) if MONOIDS[node.monoid].primitive else 1)
    if schedule.hoisted:
        registers += sum(held for i in program.of(Load) if not kernel.by_row[i] and kernel.by_col[i] is Across.FULL)
    wide = max((program.dtypes[i].size for i in program.of(Load)), default=4)
    registers += LIVE_SHARE * min(once, 32) * live_values(kernel) * max(1, wide // 4)
    registers = known or int(min(max(registers, 16), 1024))
    cap = schedule.max_registers or device.registers_per_thread
    spills = registers > min(cap, device.registers_per_thread)
    smem = 1024 + schedule.warps * tile.height * 8
    if schedule.stages > 1:
        full = [i for i in program.of(Load) if kernel.is_full[i]]
        smem += (schedule.stages - 1) * sum(tile.height * tile.resident_width * program.dtypes[i].size for i in full)
    return Resources(registers, smem, 0 if spills else ctas_per_sm(registers, smem, schedule.warps, device))


def _varies(kernel: Kernel, node: Reduce) -> bool:
    return any(kernel.by_col[a] is not Across.NONE for a in node.args)


def ctas_per_sm(registers: int, smem: int, warps: int, device: Device) -> int:
    """How many CTAs fit: by registers (allocated 256 at a time per warp, warps in fours), shared memory and threads."""
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = device.registers_per_sm // per_warp // 4 * 4 // max(warps, 1) if warps >= 4 else device.registers_per_sm // per_warp // warps
    by_smem = device.smem_per_sm // (smem + device.smem_reserve) if smem <= device.smem_per_cta else 0
    return max(0, min(by_registers, by_smem, device.threads_per_sm // (32 * warps), device.ctas_per_sm))
