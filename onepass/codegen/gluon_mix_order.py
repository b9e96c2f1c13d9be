"""Steps -> Gluon source, for kernels that park rows in shared memory and reduce along them and down their columns.

Rows come and go as in `gluon`. What is gathered over rows lives in registers from a CTA's first row to its last, a state for every
chunk: so the walk that feeds it, the last, is written out chunk by chunk, and so is one that reads row vectors held in registers.
Other walks stay loops. No loop may follow the last walk: the compiler would put off all additions to the states until after it, and
hold what is to be added as well. At the end every CTA, also one that had no row, writes its partial states for the kernel that
joins them.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.size import Bindings
from ..plan.kernel import Kernel
from ..plan.schedule import Schedule
from ..plan.staged_rows import must_stage
from .gluon import Emitter
from .row_loop import RowLoop
from .source import GridDim, Source
from .steps import Walk
from .tile_refs import Segment, TileRef
from .values import Env


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel that parks rows and gathers over them; `wide` makes it count elements in 64 bits."""
    assert schedule.accumulates_columns and must_stage(kernel) <= schedule.staged
    return MixOrderEmitter(kernel, schedule, bindings, name, wide).source()


MANY_WARPS = 16  # with 128 registers a thread


class MixOrderEmitter(Emitter):
    """Writes a kernel that parks rows, reduces along them, and gathers over them."""

    counting = "gl.static_range"  # no loop after the last walk

    def _grid(self) -> tuple[GridDim, ...]:
        return (GridDim(self.split),)  # a join reads the states of all, whether they had a row or not

    def _rows(self, env: Env) -> None:
        row_loop = RowLoop(self.steps, self.values, self.folds)
        self.unrolled = self._unrolled()
        tile_refs = [t.ref for t in self.unrolled]
        row_loop.load_row_vectors(tile_refs, env)
        self._load_vectors_to_smem(tile_refs, env)
        self.accumulated = row_loop.start(tile_refs)
        # A loop that runs a known number of times is written out by the compiler, and then takes more than the registers which
        # states leave to threads of many warps.
        self.walk_from = "zero" if self.schedule.warps >= MANY_WARPS else "0"
        self.values.in_row_loop = True
        super()._rows(env)
        self.values.in_row_loop = False
        row_loop.close(tile_refs, env, self.accumulated)

    def _load_vectors_to_smem(self, tile_refs: list[TileRef], known: Env) -> None:
        """Load row vectors into shared memory. Every thread reads there what it has put there, so none waits for another."""
        for i in self.steps.vectors_in_smem:
            assert not self.cols.rest
            memory, dtype = self.w.fresh(f"{self._load_of(i).buffer}_beside"), self.program.dtypes[i].kernel
            shape, layout = [self.cols.count, 1, self.cols.width], "gl.SwizzledSharedLayout(1, 1, 1, [1, 0])"
            self.w.line(f"{memory} = gl.allocate_shared_memory(gl.{dtype}, {shape}, {layout})")
            found: list[Env] = [dict(known) for _ in tile_refs]
            for env, ref in zip(found, tile_refs, strict=True):  # all are asked for before the first is waited for
                self.values.with_operands(i, ref, env)
            for k, env in enumerate(found):
                self.w.line(f"{memory}.index({k}).store({env[i]})")
            self.values.smem_vectors[i] = memory

    def _unrolled(self) -> list[Segment]:
        """The chunks of a row one by one, each with a place of its own in the text."""
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
