"""Registers, shared memory and CTAs per SM of (kernel, schedule, device), before anything is compiled.

The compiler has the last word: a kernel that spills or does not fit is remembered with its estimate, and of its schedules only
lighter ones are tried again (see pipeline.py). So these formulas only have to rank schedules and keep hopeless ones out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..device import Device
from ..ir.expr import DType
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Reduce, Store
from . import staged_rows, staged_tiles
from .kernel import Across, Kernel
from .schedule import Block, Cover, Loop, Role, Schedule
from .thread_layout import matches_tile_layout, vector, widest


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
    return _tile(schedule.rows, schedule.cols)


@lru_cache(maxsize=4096)
def _tile(rows: Role, cols: Role) -> Tile:
    """Many schedules have the same, and each is asked for it several times."""

    def side(role: Role) -> tuple[int, int, int]:
        match role:
            case Block(size) | Loop(size):
                return size, size, 1
            case Cover(tiles):
                return max(tiles), sum(tiles), len(tiles)

    (height, all_height, down), (width, all_width, across) = side(rows), side(cols)
    return Tile(height, width, all_width, all_height, down * across)


@dataclass(frozen=True, slots=True)
class PostReductionLoad:
    """A load that is needed after a reduction."""

    node: int
    size: int  # bytes of an element
    once_from_cols: int  # a tile of that many columns a warp is loaded once for all its rows


def loads_after_reduction(kernel: Kernel) -> tuple[PostReductionLoad, ...]:
    """What a kernel needs after a reduction and does not hold anyway."""
    own, found = vector(kernel), []
    for i in kernel.after_reduction:
        alike = not kernel.is_full[i] and matches_tile_layout(kernel, i, 32 * own, 1)
        found.append(PostReductionLoad(i, kernel.program.dtypes[i].size, 32 * own if alike else NEVER))
    return tuple(found)


NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class Demand:
    """What a kernel asks of a thread, whatever its schedule. Counted once, used for every candidate."""

    accesses: int
    resident_bytes: float  # per element: multi-phase inputs in their storage types
    resident_registers: float  # the same, each in the registers it is computed in
    after_reduction: tuple[PostReductionLoad, ...]  # loads that are needed after a reduction, in the order of Kernel.late
    full_bytes: int  # per element: full-size inputs
    accumulated: float  # 32-bit state per column that a loop over rows gathers
    vectors: float  # per column: row vectors in their storage types, in 32-bit words
    looped_elementwise_registers: float  # 32-bit state per element that a walk carries
    looped_state_registers: float  # 32-bit state per row that a walk carries
    reread: int  # values per element that a merge of a walked tile reads more than once
    live: int  # full-size values alive at once
    registers_per_value: int  # registers per value
    tma_stageable: tuple[tuple[int, int], ...]  # loads that can wait in shared memory, and bytes of an element of each
    exchange_bytes: int  # bytes a warp leaves for others in the largest fold
    exchange_bytes_multi_cta: int  # the same where several CTAs take a row
    exchange_bytes_down: int  # the same of folds down columns
    widest: int  # elements a thread takes at once of a tile that comes through shared memory
    state_registers: int  # registers of all states of one column
    entering_registers: int  # registers of one element of all that enters merges
    merged: int  # registers of all states of one column that are computed anew when they merge

    def staged_bytes(self, schedule: Schedule) -> int:
        """Of an element of all parked loads together."""
        return sum(size for i, size in self.tma_stageable if i in schedule.staged)


def demand(kernel: Kernel) -> Demand:
    """Count a kernel's demands."""
    program = kernel.program
    accumulated = elementwise = states = 0.0
    reread: set[int] = set()
    entering_registers: set[int] = set()
    own = merged = 0
    for fold in kernel.folds:
        node = program.nodes[fold.node]
        assert isinstance(node, Reduce)
        monoid = MONOIDS[node.monoid]
        carried = len(monoid.accumulating) if kernel.is_full_precision[fold.node] else 0  # what rounding took
        size = (len(monoid.state) + carried) * max(1, program.dtypes[node.args[0]].size // 4)
        if fold.rows and not fold.cols and any(kernel.by_col[a] is not Across.NONE for a in node.args):
            accumulated += size
        if not fold.block and monoid.primitive:
            elementwise += size
        elif not fold.block:
            states += size
            reread.update(a for a in node.args if kernel.is_full[a])
            entering_registers.update(node.args)
        registers_held = sum(_words(d) for d in monoid.state_dtypes(program.dtypes[node.args[0]]))
        own += carried + registers_held
        merged += registers_held if monoid.accumulating and not monoid.primitive else 0  # positions are picked, not computed
    loads = list(program.of(Load))
    return Demand(
        accesses=sum(1 for n in program.nodes if isinstance(n, (Load, Store))),
        resident_bytes=sum(program.dtypes[i].size for i in kernel.multi_phase),
        resident_registers=sum(max(1, program.dtypes[i].size // 4) for i in kernel.multi_phase),
        after_reduction=loads_after_reduction(kernel),
        full_bytes=sum(program.dtypes[i].size for i in loads if kernel.is_full[i]),
        accumulated=accumulated,
        vectors=sum(program.dtypes[i].size for i in kernel.row_vectors) / 4,
        looped_elementwise_registers=elementwise,
        looped_state_registers=states,
        reread=len(reread),
        live=_live_values(kernel),
        registers_per_value=max(1, max((program.dtypes[i].size for i in loads), default=4) // 4),
        tma_stageable=tuple((i, program.dtypes[i].size) for i in
                       staged_rows.tma_stageable(kernel) or staged_rows.tma_stageable_unaligned(kernel) or staged_tiles.tile_stageable(kernel)),
        exchange_bytes=staged_rows.exchange_bytes(kernel),
        exchange_bytes_multi_cta=staged_rows.exchange_bytes_multi_cta(kernel),
        exchange_bytes_down=staged_rows.exchange_bytes(kernel, down=True),
        widest=widest(kernel),
        state_registers=own,
        entering_registers=sum(_words(program.dtypes[i]) for i in entering_registers),
        merged=merged,
    )


def _words(dtype: DType) -> int:
    return max(1, dtype.size // 4)


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


@dataclass(frozen=True, slots=True)
class RegisterFit:
    """Registers a thread takes: some whatever it does, per access, per value alive at once, per word it holds or gathers."""

    base: float
    access: float
    live: float
    resident: float = 0.0
    accumulated: float = 0.0


# Fitted to the register counts of 1950 kernels (Triton 3.6, sm_90, 0 spills), and of 1390 more after code generation had changed:
# norms, softmax, losses, column sums and the regions of three models. Mean error 15 %.
FIT_RESIDENT = RegisterFit(11, 0.3, 0.31, 1.4)
FIT_MIX_ORDER = RegisterFit(6, 1.75, 0.21, 1.14, 1.7)
# Where a kernel that gathers over rows, with a pipeline and one row at a time, would take a little more than its share of the file,
# the compiler finds the rest: all of 7 up to this factor compiled without a spill (Triton 3.6, sm_90; 16 warps, backward of norms).
# Of those without a pipeline, or with several rows at a time, a third spilled.
REGISTER_SQUEEZE = 1.09
FIT_LOOP_COLS = RegisterFit(31, 0, 0.15)
FIT_LOOP_ROWS = RegisterFit(31, 0, 0.78)
# Fitted to 174 kernels that read rows from shared memory, which may take what they like: mean error 18 %. Told the most they may
# take, such kernels take more of it than they need: 26 % of 148.
FIT_STAGED_ROWS = RegisterFit(23, 4.3, 0.31)
# Fitted to the fewest registers, in steps of eight, with which 85 such kernels that also gather over rows spill at most 16 bytes
# (Triton 3.7, sm_90: backward passes of norms, sums of rows and columns): mean error 8 %. Allowed more, they take up to twice that.
FIT_STAGED_MIX_ORDER = RegisterFit(5, 3.5, 0.46, 1.6, 1.2)
FIT_STAGED_TILES = RegisterFit(24, 0, 0)  # beside what a thread has of a strip
FIT_POINTWISE = RegisterFit(28, 0.2, 0.1)
FIRST_STATE_REGISTERS = 0.33  # registers of the first state that a walk carries for every element of a tile; a further one takes its own
STAGED_STATE_SHARE = 0.33  # of that, where chunks are read from shared memory: few of their values are alive beside the states
# Of a tile that is merged down its columns, how much is there at once, and what every merge takes besides. By eye, from 60 kernels
# (Triton 3.6, sm_90): variances and logsumexps of 1, 3 and 5 inputs, 16 to 128 elements a thread.
MERGED_TILE_SHARE, MERGE_REGISTERS = 1.1, 10
MAX_ELEMS_IN_FLIGHT = 32  # elements a thread computes on at once, where it can take a tile bit by bit
MAX_WIDENED_REGISTERS = 32  # registers a thread spends on widened copies of resident values before it rather widens them again


def keeps_packed(schedule: Schedule, registers_held: float) -> bool:
    """Are resident values kept in their 16 bits, and widened anew in each walk? A few may as well stay as they are computed.

    Widening again costs two or three instructions a value, and short rows of many inputs are bound by instructions.
    """
    tile = tile_of(schedule)
    most = MAX_WIDENED_REGISTERS if isinstance(schedule.rows, Loop) else MAX_WIDENED_REGISTERS // 2
    return registers_held * tile.resident_height * tile.resident_width > most * 32 * schedule.warps


MAX_PREFETCH_REGISTERS = 16  # registers a thread spends on what it loads before a reduction and needs only after


def prefetched_loads(wanted: Sequence[PostReductionLoad], schedule: Schedule) -> list[tuple[int, float]]:
    """The late loads that are issued with the first ones, so that they too arrive while the row does; registers of each.

    H200, norm of 65536 x 512 with four row vectors: a CTA that asks for them after its reduction lives 0.8 us longer.
    """
    if schedule.staged or not (isinstance(schedule.rows, Block) and isinstance(schedule.cols, Cover)):
        return []
    found, spent = [], 0.0
    for load in wanted:
        rows = 1 if min(schedule.cols.tiles) >= load.once_from_cols * schedule.warps else schedule.rows.size
        registers_held = rows * sum(schedule.cols.tiles) / (32 * schedule.warps) * load.size / 4
        spent += registers_held
        if spent <= MAX_PREFETCH_REGISTERS:
            found.append((load.node, registers_held))
    return found


def estimate(need: Demand, schedule: Schedule, device: Device) -> Resources:
    """Predict what a CTA takes. 0 CTAs per SM means it does not fit."""
    threads, tile = 32 * schedule.warps, tile_of(schedule)
    held = tile.resident_height * tile.resident_width / threads  # elements per thread of all a CTA holds
    once = tile.height * tile.width / threads
    fit = _register_fit(schedule)
    registers = fit.base + fit.access * need.accesses + fit.live * min(once, MAX_ELEMS_IN_FLIGHT) * need.live * need.registers_per_value
    if schedule.resident:
        registers_held = need.resident_bytes / 4 if keeps_packed(schedule, need.resident_registers) else need.resident_registers
        registers += max(1.0, fit.resident * held * registers_held)
    registers += sum(registers_held for _, registers_held in prefetched_loads(need.after_reduction, schedule))
    if fit in (FIT_MIX_ORDER, FIT_STAGED_MIX_ORDER):
        registers += fit.accumulated * need.accumulated * held
        registers += fit.resident * need.vectors * held if schedule.hoisted and fit is FIT_STAGED_MIX_ORDER else 0.0
    elif fit is FIT_STAGED_TILES:
        registers += _staged_tile_registers(need, schedule)
    elif fit in (FIT_LOOP_COLS, FIT_LOOP_ROWS, FIT_STAGED_ROWS):
        states = max(0.0, need.looped_elementwise_registers - 1) + FIRST_STATE_REGISTERS * min(1.0, need.looped_elementwise_registers)
        registers += states * max(1.0, once) * (STAGED_STATE_SHARE if schedule.staged else 1.0) + need.looped_state_registers
        if fit is FIT_LOOP_ROWS:
            registers += need.reread * (MERGED_TILE_SHARE * once * need.registers_per_value + MERGE_REGISTERS)
        else:  # the whole tile stays until it is merged
            registers += need.reread * need.registers_per_value * max(0.0, once - MAX_ELEMS_IN_FLIGHT)
    smem = _shared(need, schedule)
    count = int(min(max(registers, 16), 1024))
    most = min(device.registers_per_thread, device.registers_per_sm // threads, schedule.registers or device.registers_per_thread)
    if fit is FIT_MIX_ORDER and schedule.stages > 1 and tile.height == 1 and most < count <= REGISTER_SQUEEZE * most:
        count = most
    return Resources(count, smem, 0 if count > most else ctas_per_sm(count, smem, schedule.warps, device))


# Of the words of a strip that a thread loads, and of those that enter a merge, which reads them twice: how many are in registers at
# once. By eye, from 60 kernels (Triton 3.7, sm_90, 0 spills): sums of 1 to 56 inputs, extremes, variances, logsumexp, positions.
STRIP_SHARE, ENTERING_SHARE = 0.6, 0.5
# And of the states that a merge computes anew, how many are there twice. By eye, from 64 more (Triton 3.6): variances and
# logsumexps of 1 to 7 inputs took 0 to 80 registers more than without, those of 16-bit types most.
MERGED_STATE_SHARE = 0.7


def _staged_tile_registers(need: Demand, schedule: Schedule) -> float:
    """Registers for states of a thread's own columns, and for its part of a strip."""
    element = need.staged_bytes(schedule)
    elements = need.widest * staged_tiles.strips(schedule, need.widest, element).each
    states = need.widest * (need.state_registers + MERGED_STATE_SHARE * need.merged_registers)
    return states + elements * (STRIP_SHARE * element / 4 + ENTERING_SHARE * need.entering_registers)


def _shared(need: Demand, schedule: Schedule) -> int:
    """Shared memory of a CTA: exactly what is asked for where rows are parked, else what the compiler is likely to take."""
    if schedule.staged and isinstance(schedule.cols, Block):
        return staged_tiles.smem_bytes(schedule, need.widest, need.staged_bytes(schedule), need.exchange_bytes_down)
    if schedule.staged:
        assert isinstance(schedule.cols, Cover)
        beside = int(4 * need.vectors) * schedule.cols.width if schedule.beside else 0
        exchange_bytes = need.exchange_bytes_multi_cta if schedule.ctas_per_row > 1 else need.exchange_bytes
        return beside + staged_rows.smem_bytes(need.staged_bytes(schedule), schedule.cols, schedule.stages, exchange_bytes,
                                            schedule.warps, schedule.prefetch)
    tile = tile_of(schedule)
    pipelined = (schedule.stages - 1) * tile.height * tile.resident_width * need.full_bytes
    return 1024 + schedule.warps * tile.height * 8 + pipelined


def _register_fit(schedule: Schedule) -> RegisterFit:
    if schedule.staged:
        if isinstance(schedule.cols, Block):
            return FIT_STAGED_TILES
        return FIT_STAGED_MIX_ORDER if schedule.accumulates_columns else FIT_STAGED_ROWS
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


def ctas_per_sm(registers: int, smem: int, warps: int, device: Device) -> int:
    """How many CTAs fit: by registers (256 at a time per warp, a quarter of the file per scheduler), shared memory, threads."""
    per_warp = -(-registers * 32 // 256) * 256
    warps_that_fit = device.registers_per_sm // 4 // per_warp * 4
    by_smem = device.smem_per_sm // (smem + device.smem_reserve) if smem <= device.smem_per_cta else 0
    return max(0, min(warps_that_fit // warps, by_smem, device.threads_per_sm // (32 * warps), device.ctas_per_sm))
