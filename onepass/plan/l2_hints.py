"""What L2 should evict last: full-size tensors that a kernel writes, and of large ones those it reads too.

What a kernel wrote last the next one reads first. And DRAM that is read and written in turn is slower than its best rate; results
that stay in L2 for longer are, presumably, written in larger pieces. H200, 2026-11, bf16, 146 workloads of the benchmark suites
(docs/decisions/0020): marked stores take 1 to 4 % off norms and softmax of 256 MB, 1 % off backward passes of norms; with marked
loads too, softmax of 131072 x 4096 takes 500 us, with marked stores alone 514, with nothing 518.
"""

from __future__ import annotations

from ..ir.program import Load, Store
from ..ir.size import Bindings
from .kernel import Kernel
from .resources import tile_of
from .schedule import Block, Cover, Loop, Schedule

# Bytes a kernel moves from which marked loads pay: below, they displace results that the next kernel would have found. H200,
# RMSNorm of 8192 columns, marked stores and both: 256 MB 60.8 and 64.0 us, 512 MB 125.9 and 126.1, 1 GB 255.9 and 252.6.
MARK_LOADS_FROM = 500e6
# Bytes a thread asks for at once of what it reads up to which marked loads pay. H200, RMSNorm of 8192 x 32768 in four tiles by 16
# and by 8 warps: 259 -> 252 and 259 -> 260 us; in sixteen by 8: 263 -> 277.
MAX_LOAD_PER_THREAD = 128
# Bytes of a row that leave no room for a second one on an SM. Then all SMs load, and all of them store, and results that stay only
# put off the writing. H200, softmax of 1024 x 65536: 77 us with nothing marked, 84 with stores.
MAX_ROW_BYTES = 113 * 1024
NARROW_ELEMENT = 1  # bytes of an element whose runs are short: RMSNorm to fp8 of 32768 x 8192 took 193 us, with marked stores 195


def l2_evict_last(kernel: Kernel, schedule: Schedule, bindings: Bindings) -> frozenset[int]:
    """Loads and stores that are marked to be evicted last."""
    program = kernel.program
    streams = (i for i, n in enumerate(program.nodes) if isinstance(n, Store) or isinstance(n, Load) and not n.indexed)
    sizes = {i: program.dtypes[i].size for i in streams if kernel.is_full[i]}
    stores = frozenset(i for i in sizes if isinstance(program.nodes[i], Store))
    if not stores or any(sizes[i] <= NARROW_ELEMENT for i in stores) or _rows_come_by_tma(schedule):
        return frozenset()
    loads = frozenset(sizes) - stores
    batch, rows, cols = kernel.counts(bindings)
    tile, read = tile_of(schedule), sum(sizes[i] for i in loads)
    held = tile.resident_height * tile.resident_width * read
    if isinstance(schedule.rows, Block) and sum(sizes.values()) * batch * rows * cols >= MARK_LOADS_FROM \
            and held <= MAX_LOAD_PER_THREAD * 32 * schedule.warps:
        return stores | loads
    return stores if held <= MAX_ROW_BYTES else frozenset()


def _rows_come_by_tma(schedule: Schedule) -> bool:
    """Do CTAs go from row to row, the next ones on their way into shared memory? Reads and writes alternate less, and marked
    stores take as long or 1 % longer (H200, backward of norms of 32768 and 65536 columns)."""
    return bool(schedule.staged) and isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Cover)
