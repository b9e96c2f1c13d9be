"""What estimates of resources are made of: the demands of a kernel, tiles, fits of registers, and CTAs per SM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..constants import SHIPPED
from ..device import Device
from ..ir.expr import DType
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Reduce, Store
from .kernel import Across, Kernel
from .schedule import Block, Cover, Loop, Role, Schedule
from .staged_rows import exchange_bytes
from .thread_layout import explicit_vector, matches_tile_layout, max_contiguous, vector


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one CTA, and how many CTAs fit per SM."""

    registers: int
    smem_bytes: int
    ctas_per_sm: int


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of the work a CTA holds at once."""

    height: int
    width: int  # of the widest tile
    resident_width: int  # sum over all tiles of a covered side
    resident_height: int
    count: int  # unrolled tiles


def tile_of(schedule: Schedule) -> Tile:
    """A schedule's tile. Cached by its roles."""
    return _tile(schedule.rows, schedule.cols)


@lru_cache(maxsize=4096)
def _tile(rows: Role, cols: Role) -> Tile:
    """Cached, because many schedules share a tile and each asks for it several times."""

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
    """A load that is used after a reduction."""

    node: int
    size: int  # bytes per element
    once_from_cols: int  # a tile of at least this many columns per warp is loaded once for all its rows


def loads_after_reduction(kernel: Kernel) -> tuple[PostReductionLoad, ...]:
    """A kernel's loads that are used after a reduction and are not resident anyway."""
    own, found = vector(kernel), []
    for i in kernel.after_reduction:
        alike = not kernel.is_full[i] and matches_tile_layout(kernel, i, 32 * own, 1, max_contiguous(kernel) or 0)
        found.append(PostReductionLoad(i, kernel.program.dtypes[i].size, 32 * own if alike else NEVER))
    return tuple(found)


NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class Demand:
    """A kernel's demands per thread under any schedule. Counted once for all candidates."""

    accesses: int
    resident_bytes: float  # per element: multi-phase inputs in their storage types
    resident_registers: float  # per element: multi-phase inputs, widened to compute types
    after_reduction: tuple[PostReductionLoad, ...]  # in the order of Kernel.after_reduction
    accumulated: float  # 32-bit state per column accumulated by a loop over rows
    vectors: float  # per column: row vectors in their storage types, in 32-bit words
    looped_elementwise_registers: float  # state per element carried by a walk
    looped_state_registers: float  # state per row carried by a walk
    reread: int  # values per element that the merge of a walked tile reads more than once
    live: int  # full-size values alive at once
    registers_per_value: int
    full_loads: tuple[tuple[int, int], ...]  # (load, bytes per element) of full-size inputs
    exchange_bytes: int  # per warp, in the largest reduction along rows
    exchange_bytes_down: int  # per warp, in the largest reduction along columns
    explicit_vector: int  # adjacent elements per thread of a staged tile
    state_registers: int  # all states of one column
    entering_registers: int  # one element of every value that enters a merge
    merged_registers: int  # states of one column that a merge recomputes

    @property
    def full_bytes(self) -> int:
        """Bytes per element of all full-size inputs together."""
        return sum(size for _, size in self.full_loads)

    def staged_bytes(self, schedule: Schedule) -> int:
        """Bytes per element of all staged loads together."""
        return sum(size for i, size in self.full_loads if i in schedule.staged)


def demand(kernel: Kernel) -> Demand:
    """Count a kernel's demands."""
    program = kernel.program
    accumulated = elementwise = states = 0.0
    reread: set[int] = set()
    entering: set[int] = set()
    for fold in kernel.folds:
        node = program.nodes[fold.node]
        assert isinstance(node, Reduce)
        monoid = MONOIDS[node.monoid]
        carried = len(monoid.accumulating) if kernel.is_full_precision[fold.node] else 0  # compensation terms
        size = (len(monoid.state) + carried) * max(1, program.dtypes[node.args[0]].size // 4)
        if fold.rows and not fold.cols and any(kernel.by_col[a] is not Across.NONE for a in node.args):
            accumulated += size
        if not fold.block and monoid.primitive:
            elementwise += size
        elif not fold.block:
            states += size
            reread.update(a for a in node.args if kernel.is_full[a])
            entering.update(node.args)
    loads = list(program.of(Load))
    own, merged = _state_registers(kernel)
    return Demand(
        accesses=sum(1 for n in program.nodes if isinstance(n, (Load, Store))),
        resident_bytes=sum(program.dtypes[i].size for i in kernel.multi_phase),
        resident_registers=sum(max(1, program.dtypes[i].size // 4) for i in kernel.multi_phase),
        after_reduction=loads_after_reduction(kernel),
        accumulated=accumulated,
        vectors=sum(program.dtypes[i].size for i in kernel.row_vectors) / 4,
        looped_elementwise_registers=elementwise,
        looped_state_registers=states,
        reread=len(reread),
        live=_live_values(kernel),
        registers_per_value=max(1, max((program.dtypes[i].size for i in loads), default=4) // 4),
        full_loads=tuple((i, program.dtypes[i].size) for i in loads if kernel.is_full[i]),
        exchange_bytes=exchange_bytes(kernel),
        exchange_bytes_down=exchange_bytes(kernel, down=True),
        explicit_vector=explicit_vector(kernel),
        state_registers=own,
        entering_registers=sum(_registers(program.dtypes[i]) for i in entering),
        merged_registers=merged,
    )


def _state_registers(kernel: Kernel) -> tuple[int, int]:
    """Registers of all states of one column, and of those that a merge recomputes."""
    own = merged = 0
    for fold in kernel.folds:
        node = kernel.program.nodes[fold.node]
        assert isinstance(node, Reduce)
        monoid = MONOIDS[node.monoid]
        registers = sum(_registers(d) for d in monoid.state_dtypes(kernel.program.dtypes[node.args[0]]))
        own += registers + (len(monoid.accumulating) if kernel.is_full_precision[fold.node] else 0)  # compensation terms
        merged += registers if monoid.accumulating and not monoid.primitive else 0  # argmax-like states are selected
    return own, merged


def _registers(dtype: DType) -> int:
    return max(1, dtype.size // 4)


def _live_values(kernel: Kernel) -> int:
    """The most full-size values alive at once, in emission order, over all phases."""
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
    """Linear fit of registers per thread: a base, plus terms per access, live value, resident word and accumulated word."""

    base: float
    access: float
    live: float
    resident: float = 0.0
    accumulated: float = 0.0

    def of(self, need: Demand, once: float) -> float:
        """Registers before what a family keeps beside `once` elements per thread of one tile."""
        found = self.base + self.access * need.accesses
        return found + self.live * min(once, MAX_ELEMS_IN_FLIGHT) * need.live * need.registers_per_value


MAX_ELEMS_IN_FLIGHT = 32  # elements a thread computes at once, if it can process a tile piecewise


def elements_per_thread(schedule: Schedule) -> tuple[float, float]:
    """Elements per thread of the largest tile, and of all that a CTA holds."""
    tile, threads = tile_of(schedule), 32 * schedule.warps
    return tile.height * tile.width / threads, tile.resident_height * tile.resident_width / threads


def walked_states(need: Demand, once: float, share: float = 1.0) -> float:
    """Registers of the states that a walk carries. `share`: of those that are kept for each element of a tile."""
    states = max(0.0, need.looped_elementwise_registers - 1)
    states += SHIPPED.registers.first_state * min(1.0, need.looped_elementwise_registers)
    return states * max(1.0, once) * share + need.looped_state_registers


def early_load_registers(load: PostReductionLoad, height: int, tiles: Sequence[int], warps: int) -> float:
    """Registers per thread of a load that only later walks need, if it is issued with the first loads of a resident row."""
    rows = 1 if min(tiles) >= load.once_from_cols * warps else height
    return rows * sum(tiles) / (32 * warps) * load.size / 4


def ctas_per_sm(registers: int, smem: int, warps: int, device: Device) -> int:
    """How many CTAs fit per SM: by registers (allocated in units of 256 per warp, a quarter of the file per scheduler),
    shared memory and threads.
    """
    per_warp = -(-registers * 32 // 256) * 256
    warps_that_fit = device.registers_per_sm // 4 // per_warp * 4
    by_smem = device.smem_per_sm // (smem + device.smem_reserve) if smem <= device.smem_per_cta else 0
    return max(0, min(warps_that_fit // warps, by_smem, device.threads_per_sm // (32 * warps), device.ctas_per_sm))
