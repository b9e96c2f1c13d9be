"""Steps -> Gluon source, for mix-order kernels: they stage rows in shared memory and reduce along rows and down columns.

Rows are staged as in `gluon`. Column accumulators stay in registers from a CTA's first row to its last, one state per chunk. So the
last walk, which updates them, is unrolled chunk by chunk, and so is any walk that reads row vectors held in registers. Other walks
stay loops. No loop may follow the last walk: the compiler would delay all additions to the accumulators until after that loop, and
keep their operands in registers as well. At the end every CTA writes its partial states for the join kernel, even if it had no row.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.size import Bindings
from ..plan.kernel import Kernel
from ..plan.schedule import Schedule, StagedMixOrder
from .gluon import Emitter
from .row_loop import RowLoop
from .source import GridDim, Source
from .steps import Walk
from .tile_refs import Segment, TileRef
from .values import Env


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel that stages rows and accumulates over them. `wide` selects 64-bit element indices."""
    return MixOrderEmitter(kernel, schedule, bindings, name, wide).source()


class MixOrderEmitter(Emitter):
    """Emits a kernel that stages rows, reduces along them, and accumulates over them."""

    counting = "gl.static_range"  # unrolled: no loop may follow the last walk

    def _grid(self) -> tuple[GridDim, ...]:
        return (GridDim(self.split),)  # the join kernel reads the states of every CTA

    def _rows(self, env: Env) -> None:
        row_loop = RowLoop(self.steps, self.values, self.folds)
        self.unrolled = self._unrolled()
        tile_refs = [t.ref for t in self.unrolled]
        row_loop.load_row_vectors(tile_refs, env)
        self._load_vectors_to_smem(tile_refs, env)
        self.accumulated = row_loop.start(tile_refs)
        # The compiler unrolls a loop with a known trip count.
        self.walk_from = "0" if isinstance(self.schedule, StagedMixOrder) and self.schedule.unroll_copies else "zero"
        self.values.in_row_loop = True
        super()._rows(env)
        self.values.in_row_loop = False
        row_loop.close(tile_refs, env, self.accumulated)

    def _load_vectors_to_smem(self, tile_refs: list[TileRef], known: Env) -> None:
        """Load row vectors into shared memory. Each thread reads only what it stored itself, so no barrier is needed."""
        for i in self.steps.vectors_in_smem:
            memory, dtype = self.w.fresh(f"{self._load_of(i).buffer}_beside"), self.program.dtypes[i].kernel
            shape, layout = [self.cols.count, 1, self.cols.width], "gl.SwizzledSharedLayout(1, 1, 1, [1, 0])"
            self.w.line(f"{memory} = gl.allocate_shared_memory(gl.{dtype}, {shape}, {layout})")
            found: list[Env] = [dict(known) for _ in tile_refs]
            for env, ref in zip(found, tile_refs, strict=True):  # issue all loads before the first is used
                self.values.with_operands(i, ref, env)
            for k, env in enumerate(found):
                self.w.line(f"{memory}.index({k}).store({env[i]})")
            self.values.smem_vectors[i] = memory

    def _unrolled(self) -> list[Segment]:
        """The chunks of a row, unrolled."""
        found: list[Segment] = []
        for tile in self.tiles:
            if tile.loop is None:
                found.append(tile)
                continue
            for k in range(self.cols.count):
                col, start = self.w.fresh(f"c{k}"), k * self.cols.width
                self.w.line(f"{col} = {start} + lanes")
                found.append(Segment(replace(tile.ref, col=col, col_start=str(start), tag=f"_{k}")))
                self.values.numbers[f"_{k}"] = str(k)
        return found

    def _row(self, outside: Env) -> None:
        self.values.opaque_zeros("zero & (row + {})", range(len(self.steps.walks)), self.steps.vectors_in_registers)
        super()._row(outside)

    def _tiles_of(self, walk: Walk) -> list[Segment]:
        held = any(not f.cols for f in walk.accumulated) or not set(self.steps.vectors_in_registers).isdisjoint(walk.body)
        return self.unrolled if held else self.tiles
