"""Column reductions of mix-order kernels: they stage rows in shared memory and reduce along rows and down columns.

Column accumulators stay in registers from a CTA's first row to its last, one state per chunk. So the last walk, which updates
them, is unrolled chunk by chunk, and so is any walk that reads row vectors held in registers. Other walks stay loops. No loop may
follow the last walk: the compiler would delay all additions to the accumulators until after that loop, and keep their operands in
registers as well. At the end every CTA writes its partial states for the join kernel, even if it had no row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from ..plan.kernel import Fold
from ..plan.schedule import Schedule, StagedMixOrder
from .folds import Running
from .kernel_ir import Alloc, Expr, Name, SharedStore, Slot
from .memory import Env
from .row_loop import RowLoop, zero_of_row
from .staged_values import RowParts, StagedRows
from .steps import Walk
from .tile_refs import TILE_SUFFIX, Segment, TileRef


def walk_from(schedule: Schedule) -> Expr:
    """The start of a loop over copies, as the compiler may see it: it unrolls a loop with a known trip count."""
    return "zero" if isinstance(schedule, StagedMixOrder) and not schedule.unroll_copies else "0"


class Accumulation:
    """Builds the reductions that the loop over rows carries."""

    def __init__(self, parts: RowParts, staging: StagedRows, numbers: dict[str, int | Expr]) -> None:
        self.scope, self.builder, self.at, self.steps = parts.scope, parts.scope.builder, parts.at, parts.steps
        self.values, self.folds, self.staging, self.numbers = parts.values, parts.folds, staging, numbers
        self.row_loop = RowLoop(parts.steps, parts.values, parts.folds)
        self.unrolled: list[Segment] = []  # the chunks of a row
        self.running: dict[int, Running] = {}

    def open(self, tiles: list[Segment], env: Env) -> None:
        """Unroll the chunks, load row vectors, and start the reductions."""
        self.unrolled = self._unroll(tiles)
        refs = [t.ref for t in self.unrolled]
        self.row_loop.load_row_vectors(refs, env)
        self._load_vectors_to_smem(refs, env)
        self.running = self.row_loop.start(refs)

    def zeros(self, walks: range, row: Name) -> None:
        """Make a zero for every walk over a row, so that row vectors in registers stay packed."""
        self.values.opaque_zeros(partial(zero_of_row, row), walks, self.steps.vectors_in_registers)

    def tiles_of(self, walk: Walk, tiles: list[Segment]) -> list[Segment]:
        """The tiles of a walk: unrolled if it reads or updates registers of each chunk."""
        held = any(not f.cols for f in walk.accumulated) or not set(self.steps.vectors_in_registers).isdisjoint(walk.body)
        return self.unrolled if held else tiles

    def feed(self, folds: Iterable[Fold], ref: TileRef, env: Env) -> None:
        """Add a tile, or a row, to the reductions."""
        for fold in folds:
            self.folds.feed(self.running[fold.node], ref, env, unrolled=False)

    def close(self, env: Env) -> None:
        """Read out the reductions."""
        self.row_loop.close([t.ref for t in self.unrolled], env, self.running)

    def _load_vectors_to_smem(self, refs: list[TileRef], known: Env) -> None:
        """Load row vectors into shared memory. Each thread reads only what it stored itself, so no barrier is needed."""
        for i in self.steps.vectors_in_smem:
            memory, dtype = self.builder.fresh(f"{self.scope.load_of(i).buffer}_beside"), self.scope.program.dtypes[i].kernel
            shape, layout = (self.at.cols.count, 1, self.at.cols.width), "gl.SwizzledSharedLayout(1, 1, 1, [1, 0])"
            self.builder.add(Alloc(memory, dtype, shape, layout))
            found: list[Env] = [dict(known) for _ in refs]
            for env, ref in zip(found, refs, strict=True):  # issue all loads before the first is used
                self.values.with_operands(i, ref, env)
            for k, env in enumerate(found):
                self.builder.add(SharedStore(Slot(memory, str(k)), env[i]))
            self.staging.vectors[i] = memory

    def _unroll(self, tiles: list[Segment]) -> list[Segment]:
        """The chunks of a row, unrolled."""
        found: list[Segment] = []
        for tile in tiles:
            if tile.loop is None:
                found.append(tile)
                continue
            self.builder.explain(TILE_SUFFIX)
            for k in range(self.at.cols.count):
                start = k * self.at.cols.width
                col = self.builder.assign(f"cols{k}", f"{start} + lanes")
                found.append(Segment(replace(tile.ref, col=col, col_start=str(start), tag=f"_t{k}")))
                self.numbers[f"_t{k}"] = k
        return found
