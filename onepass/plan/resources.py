"""Registers, shared memory and CTAs per SM of (kernel, schedule, device), before anything is compiled.

The compiler has the last word: a kernel that spills or does not fit is remembered with its estimate, and of its schedules only
lighter ones are tried again (see pipeline.py). So these formulas only have to rank schedules and keep hopeless ones out.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Device
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Reduce, Store
from .kernel import Across, Kernel
from .schedule import Block, Cover, Loop, Role, Schedule


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
    count: int  # unrolled tiles


def tile_of(schedule: Schedule) -> Tile:
    """A schedule's tile."""

    def side(role: Role) -> tuple[int, int, int]:
        match role:
            case Block(size) | Loop(size):
                return size, size, 1
            case Cover(tiles):
                return max(tiles), sum(tiles), len(tiles)

    (height, all_height, down), (width, all_width, across) = side(schedule.rows), side(schedule.cols)
    return Tile(height, width, all_width, all_height, down * across)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a kernel asks of a thread, whatever its schedule. Counted once, used for every candidate."""

    accesses: int
    resident_bytes: float  # per element: multi-phase inputs in their storage types
    vector_bytes: float  # per column: row vectors
    full_bytes: int  # per element: full-size inputs
    gathered: float  # 32-bit state per column that a loop over rows gathers
    looped_elementwise: float  # 32-bit state per element that a walk carries
    looped_states: float  # 32-bit state per row that a walk carries
    reread: int  # values per element that a merge of a walked tile reads more than once
    live: int  # full-size values alive at once
    wide: int  # registers per value


def demand(kernel: Kernel) -> Demand:
    """Count a kernel's demands."""
    program = kernel.program
    gathered = elementwise = states = 0.0
    reread: set[int] = set()
    for fold in kernel.folds:
        node = program.nodes[fold.node]
        assert isinstance(node, Reduce)
        monoid = MONOIDS[node.monoid]
        carried = len(monoid.growing) if kernel.wide_data else 0  # what rounding took
        size = (len(monoid.state) + carried) * max(1, program.dtypes[node.args[0]].size // 4)
        if fold.rows and not fold.cols and any(kernel.by_col[a] is not Across.NONE for a in node.args):
            gathered += size
        if not fold.block and monoid.primitive:
            elementwise += size
        elif not fold.block:
            states += size
            reread.update(a for a in node.args if kernel.is_full[a])
    loads = list(program.of(Load))
    return Demand(
        accesses=sum(1 for n in program.nodes if isinstance(n, (Load, Store))),
        resident_bytes=sum(program.dtypes[i].size for i in kernel.multi_phase),
        vector_bytes=sum(program.dtypes[i].size for i in loads if not kernel.by_row[i] and kernel.by_col[i] is Across.FULL),
        full_bytes=sum(program.dtypes[i].size for i in loads if kernel.is_full[i]),
        gathered=gathered,
        looped_elementwise=elementwise,
        looped_states=states,
        reread=len(reread),
        live=_live_values(kernel),
        wide=max(1, max((program.dtypes[i].size for i in loads), default=4) // 4),
    )


def _live_values(kernel: Kernel) -> int:
    """Full-size values alive at once at the worst point, in emission order, per phase."""
    program, worst = kernel.program, 1
    for phase in range(kernel.passes):
        spans = []
        for i in range(len(program.nodes)):
            if kernel.is_full[i] and kernel.phase[i] <= phase:
                users = [u for u in program.users[i] if kernel.phase[u] == phase]
                if users:
                    spans.append((i, users[-1]))
        ends = sorted(end for _, end in spans)
        done = 0
        for alive, (start, _) in enumerate(sorted(spans), start=1):
            while done < len(ends) and ends[done] <= start:
                done += 1
            worst = max(worst, alive - done)
    return worst


# Fitted to ptxas's register counts for sm_90 (Triton 3.7.1, 0 spills) over the norm, softmax and loss kernels of
# tools/workloads.py at 512 to 32768 columns.
BASE, PER_POINTER, LIVE_SHARE = 18, 1.5, 0.55
MOST_IN_FLIGHT = 32  # elements a thread computes on at once, where it can take a tile bit by bit


def estimate(need: Demand, schedule: Schedule, device: Device) -> Resources:
    """Predict what a CTA takes. 0 CTAs per SM means it does not fit."""
    threads, tile = 32 * schedule.warps, tile_of(schedule)
    held = tile.resident_height * tile.resident_width / threads  # elements per thread of all a CTA holds
    once = tile.height * tile.width / threads
    registers = BASE + PER_POINTER * need.accesses + LIVE_SHARE * min(once, MOST_IN_FLIGHT) * need.live * need.wide
    if schedule.resident:
        registers += max(1.0, held * need.resident_bytes / 4)
    if isinstance(schedule.cols, Cover) and isinstance(schedule.rows, Loop):
        registers += need.gathered * held + (held * need.vector_bytes / 4 if schedule.hoisted else 0)
    elif isinstance(schedule.cols, Loop) or isinstance(schedule.rows, Loop):
        registers += need.looped_elementwise * max(1.0, once) + need.looped_states
        registers += need.reread * need.wide * max(0.0, once - MOST_IN_FLIGHT)  # the whole tile stays until it is merged
    smem = 1024 + schedule.warps * tile.height * 8
    if schedule.stages > 1:
        smem += (schedule.stages - 1) * tile.height * tile.resident_width * need.full_bytes
    count = int(min(max(registers, 16), 1024))
    most = min(device.registers_per_thread, device.registers_per_sm // threads)
    return Resources(count, smem, 0 if count > most else ctas_per_sm(count, smem, schedule.warps, device))


def ctas_per_sm(registers: int, smem: int, warps: int, device: Device) -> int:
    """How many CTAs fit: by registers (256 at a time per warp, a quarter of the file per scheduler), shared memory, threads."""
    per_warp = -(-registers * 32 // 256) * 256
    warps_that_fit = device.registers_per_sm // 4 // per_warp * 4
    by_smem = device.smem_per_sm // (smem + device.smem_reserve) if smem <= device.smem_per_cta else 0
    return max(0, min(warps_that_fit // warps, by_smem, device.threads_per_sm // (32 * warps), device.ctas_per_sm))
