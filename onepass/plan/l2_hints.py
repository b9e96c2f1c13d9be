"""L2 cache hints: which loads and stores are marked evict_last.

The next kernel often reads first what this one wrote last. DRAM is also slower when reads and writes alternate; results that
stay in L2 longer are presumably written back in larger pieces. Measured on H200 with bf16 over 146 benchmark workloads
(docs/decisions/0020): marked stores save 1-4 % on norms and softmax of 256 MB and 1 % on norm backward passes. Marked loads
help large tensors too: softmax 131072x4096 takes 518 us unmarked, 514 us with marked stores, 500 us with both.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..constants import SHIPPED
from ..ir.program import Load, Store
from ..ir.size import Bindings
from .kernel import Kernel

HINTS = SHIPPED.hints


@dataclass(frozen=True, slots=True)
class Streams:
    """The full-size tensors that a kernel reads and writes, and what they weigh."""

    loads: frozenset[int]
    stores: frozenset[int]  # none if one of them is never marked
    read: int  # bytes per element of all loads
    moved: float  # bytes of all loads and stores

    def evict_last(self, elements: int, warps: int) -> frozenset[int]:
        """The loads and stores to mark in a kernel whose CTAs take so many elements at once."""
        if self.stores and self.moved >= HINTS.mark_loads_from and elements * self.read <= HINTS.max_load_per_thread * 32 * warps:
            return self.stores | self.loads
        return self.evict_last_stores(elements)

    def evict_last_stores(self, elements: int) -> frozenset[int]:
        """The stores to mark in a kernel that marks no loads, because its CTAs walk down the rows.

        Loops over rows that TMA prefetches into shared memory mark nothing. Reads and writes alternate less there, and marked
        stores take as long or 1 % longer (H200, norm backward, 32768 and 65536 columns).
        """
        return self.stores if elements * self.read <= HINTS.max_row_bytes else frozenset()


def streams(kernel: Kernel, bindings: Bindings) -> Streams:
    """The full-size tensors of a kernel."""
    program = kernel.program
    found = (i for i, n in enumerate(program.nodes) if isinstance(n, Store) or isinstance(n, Load) and not n.indexed)
    sizes = {i: program.dtypes[i].size for i in found if kernel.is_full[i]}
    stores = frozenset(i for i in sizes if isinstance(program.nodes[i], Store))
    loads = frozenset(sizes) - stores
    batch, rows, cols = kernel.counts(bindings)
    marked = frozenset[int]() if any(sizes[i] <= HINTS.narrow_element for i in stores) else stores
    return Streams(loads, marked, sum(sizes[i] for i in loads), sum(sizes.values()) * batch * rows * cols)
