"""L2 cache hints: which loads and stores are marked evict_last.

The next kernel often reads first what this one wrote last. DRAM is also slower when reads and writes alternate; results that
stay in L2 longer are presumably written back in larger pieces. Measured on H200 with bf16 over 146 benchmark workloads
(docs/decisions/0020): marked stores save 1-4 % on norms and softmax of 256 MB and 1 % on norm backward passes. Marked loads
help large tensors too: softmax 131072x4096 takes 518 us unmarked, 514 us with marked stores, 500 us with both.
"""

from __future__ import annotations

from ..constants import SHIPPED
from ..ir.program import Load, Store
from ..ir.size import Bindings
from .kernel import Kernel
from .resources import tile_of
from .schedule import Block, Cover, Loop, Schedule

HINTS = SHIPPED.hints


def l2_evict_last(kernel: Kernel, schedule: Schedule, bindings: Bindings) -> frozenset[int]:
    """The loads and stores to mark evict_last."""
    program = kernel.program
    streams = (i for i, n in enumerate(program.nodes) if isinstance(n, Store) or isinstance(n, Load) and not n.indexed)
    sizes = {i: program.dtypes[i].size for i in streams if kernel.is_full[i]}
    stores = frozenset(i for i in sizes if isinstance(program.nodes[i], Store))
    if not stores or any(sizes[i] <= HINTS.narrow_element for i in stores) or _rows_come_by_tma(schedule):
        return frozenset()
    loads = frozenset(sizes) - stores
    batch, rows, cols = kernel.counts(bindings)
    tile, read = tile_of(schedule), sum(sizes[i] for i in loads)
    held = tile.resident_height * tile.resident_width * read
    if isinstance(schedule.rows, Block) and sum(sizes.values()) * batch * rows * cols >= HINTS.mark_loads_from \
            and held <= HINTS.max_load_per_thread * 32 * schedule.warps:
        return stores | loads
    return stores if held <= HINTS.max_row_bytes else frozenset()


def _rows_come_by_tma(schedule: Schedule) -> bool:
    """Whether CTAs loop over rows that TMA prefetches into shared memory.

    Reads and writes alternate less there. Marked stores take as long or 1 % longer (H200, norm backward, 32768 and 65536
    columns).
    """
    return bool(schedule.staged) and isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Cover)
