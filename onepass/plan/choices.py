"""Default choices: the fields of a schedule that the planner does not search, set as candidates are made.

`Choices` makes schedules of one kernel. Candidates give the sizes and where data waits; everything else that the kernel's text
depends on is decided here. Every choice is a field of the schedule, so other values can be tried too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.monoid import MONOIDS
from ..ir.program import Load, Reduce
from ..ir.size import Bindings
from .kernel import Kernel
from .l2_hints import Streams, streams
from .resources import PostReductionLoad, early_load_registers
from .schedule import (
    LoopedRows,
    MixOrder,
    MultiCtaMixOrder,
    Outer,
    Pointwise,
    ResidentRows,
    Ring,
    RowVectors,
    SplitRows,
    StagedMixOrder,
    StagedRows,
    StagedTiles,
    WholeColumns,
)
from .staged_rows import has_two_sums
from .staged_tiles import strip_rows
from .thread_layout import allows_private_states, explicit_vector, max_contiguous
from .traffic import Traffic

# Registers per thread for widened copies of resident values; beyond, values stay packed. Widening takes two or three instructions
# per value, and short rows with many inputs are bound by instructions, so a few values stay widened.
MAX_WIDENED_REGISTERS, MAX_WIDENED_REGISTERS_ROW_LOOP = 16, 32
# Registers per thread for loads issued before a reduction but used only after it. H200, norm of 65536x512 with four row vectors:
# a CTA that issues them after its reduction lives 0.8 us longer.
MAX_EARLY_REGISTERS = 16
# Warps (128 registers per thread) from which walks over copies stay loops. The compiler unrolls a loop with a known trip count, and
# the unrolled loop needs more registers than the accumulators leave.
MANY_WARPS = 16


@dataclass(frozen=True, slots=True)
class Choices:
    """The default choices for one kernel."""

    vector: int  # adjacent elements per thread, which the limit and the types allow
    vector_limit: int
    resident: frozenset[int]
    widened: float  # registers per element of all resident loads, widened
    after_reduction: tuple[PostReductionLoad, ...]
    private_states: bool  # some reduction allows a state per thread
    two_sums: bool
    streams: Streams
    element_bytes: int  # of all full-size loads together
    strip_vector: int  # adjacent elements per thread of a staged tile

    # ---- choices -------------------------------------------------------------------------------------------------------

    def packs(self, elements: int, warps: int, row_loop: bool = False) -> bool:
        """Whether resident values of a tile of so many elements stay in their 16-bit storage type, widened in each walk."""
        return self.widened * elements > (MAX_WIDENED_REGISTERS_ROW_LOOP if row_loop else MAX_WIDENED_REGISTERS) * 32 * warps

    def early(self, height: int, tiles: Sequence[int], warps: int) -> frozenset[int]:
        """The loads used after a reduction that are issued with the first loads, so that they arrive with the row."""
        found, spent = [], 0.0
        for load in self.after_reduction:
            spent += early_load_registers(load, height, tiles, warps)
            if spent <= MAX_EARLY_REGISTERS:
                found.append(load.node)
        return frozenset(found)

    def keeps_states(self, height: int, step: int, warps: int) -> bool:
        """Whether each thread keeps its own state of a walk.

        Merging a tile across threads takes two exchanges through shared memory. With its own state, a thread merges only the few
        elements it holds, and threads exchange states once, at the end.
        """
        held = step // (32 * warps)
        return self.private_states and height == 1 and held >= self.vector and held % self.vector == 0

    # ---- schedules -----------------------------------------------------------------------------------------------------

    def resident_rows(self, height: int, tiles: tuple[int, ...], warps: int, sector_elems: int = 0) -> ResidentRows:
        elements = height * sum(tiles)
        return ResidentRows(
            height,
            tiles,
            warps,
            sector_elems,
            self.resident,
            self.packs(elements, warps),
            self.early(height, tiles, warps),
            evict_last=self.streams.evict_last(elements, warps),
            vector_limit=self.vector_limit,
        )

    def looped_rows(self, height: int, step: int, warps: int, stages: int = 1, sector_elems: int = 0) -> LoopedRows:
        return LoopedRows(
            height,
            step,
            warps,
            stages,
            sector_elems,
            self.keeps_states(height, step, warps),
            evict_last=self.streams.evict_last(height * step, warps),
            vector_limit=self.vector_limit,
        )

    def split_rows(self, height: int, step: int, split: int, warps: int, stages: int = 1) -> SplitRows:
        return SplitRows(
            height,
            step,
            split,
            warps,
            stages,
            self.keeps_states(height, step, warps),
            evict_last=self.streams.evict_last(height * step, warps),
            vector_limit=self.vector_limit,
        )

    def whole_columns(self, tiles: tuple[int, ...], width: int, warps: int) -> WholeColumns:
        elements = sum(tiles) * width
        return WholeColumns(
            tiles,
            width,
            warps,
            self.resident,
            self.packs(elements, warps),
            evict_last=self.streams.evict_last_stores(elements),
            vector_limit=self.vector_limit,
        )

    def outer(self, step: int, width: int, warps: int, split: int = 1, stages: int = 1) -> Outer:
        return Outer(
            step,
            width,
            warps,
            split,
            stages,
            evict_last=self.streams.evict_last_stores(step * width),
            vector_limit=self.vector_limit,
        )

    def mix_order(
        self,
        step: int,
        split: int,
        tiles: tuple[int, ...],
        warps: int,
        stages: int = 1,
        row_vectors: RowVectors = RowVectors.RELOAD,
    ) -> MixOrder:
        elements = step * sum(tiles)
        return MixOrder(
            step,
            split,
            tiles,
            warps,
            stages,
            self.resident,
            self.packs(elements, warps, row_loop=True),
            row_vectors,
            evict_last=self.streams.evict_last_stores(elements),
            vector_limit=self.vector_limit,
        )

    def staged_rows(
        self, tiles: tuple[int, ...], warps: int, ring: Ring | None, unaligned: bool, staged: frozenset[int], registers: int
    ) -> StagedRows:
        marked = frozenset[int]() if ring else self.streams.evict_last(sum(tiles), warps) - staged
        return StagedRows(tiles, warps, ring, unaligned, staged, registers, evict_last=marked, vector_limit=self.vector_limit)

    def staged_mix_order(
        self, tiles: tuple[int, ...], warps: int, ring: Ring, row_vectors: RowVectors, staged: frozenset[int], registers: int
    ) -> StagedMixOrder:
        unrolls = ring.prefetch > 0 and warps < MANY_WARPS
        return StagedMixOrder(tiles, warps, ring, row_vectors, unrolls, staged, registers, vector_limit=self.vector_limit)

    def multi_cta_mix_order(
        self,
        tiles: tuple[int, ...],
        ctas_per_row: int,
        groups: int,
        warps: int,
        stages: int,
        row_vectors: RowVectors,
        staged: frozenset[int],
        registers: int,
    ) -> MultiCtaMixOrder:
        return MultiCtaMixOrder(
            tiles,
            ctas_per_row,
            groups,
            warps,
            stages,
            row_vectors,
            self.two_sums,
            staged,
            registers,
            vector_limit=self.vector_limit,
        )

    def staged_tiles(
        self, step: int, width: int, warps: int, stages: int, split: int, staged: frozenset[int], registers: int = 0
    ) -> StagedTiles:
        strip = strip_rows(step, width, warps, self.strip_vector, self.element_bytes)
        return StagedTiles(
            step, width, warps, stages, split, strip, staged, registers, evict_last=self.streams.evict_last_stores(step * width)
        )

    def pointwise(self, height: int, width: int, warps: int) -> Pointwise:
        return Pointwise(
            height, width, warps, evict_last=self.streams.evict_last(height * width, warps), vector_limit=self.vector_limit
        )


def choices(kernel: Kernel, t: Traffic, bindings: Bindings) -> Choices:
    """The default choices for a kernel at some sizes."""
    program = kernel.program
    reduced = [node for f in kernel.folds if f.cols and isinstance(node := program.nodes[f.node], Reduce)]
    loads = [i for i in program.of(Load) if kernel.is_full[i]]
    return Choices(
        vector=t.vector,
        vector_limit=max_contiguous(kernel) or 0,
        resident=frozenset(kernel.multi_phase),
        widened=t.resident_registers,
        after_reduction=t.after_reduction,
        private_states=any(allows_private_states(MONOIDS[node.monoid]) for node in reduced),
        two_sums=has_two_sums(kernel),
        streams=streams(kernel, bindings),
        element_bytes=sum(program.dtypes[i].size for i in loads),
        strip_vector=explicit_vector(kernel),
    )
