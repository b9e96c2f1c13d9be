"""Steps -> Triton source, for schedules that stage nothing in shared memory: the grid, the walks, and the loop over rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..ir.program import Load, Node, Store
from ..ir.size import Bindings
from ..plan.kernel import Kernel
from ..plan.schedule import Block, Cover, Loop, Schedule
from . import kernel_ir as ir
from . import tile_refs
from .builder import Builder
from .expr import TRITON, size_factor, size_text
from .folds import Folds, Running
from .memory import Env, Memory
from .names import SPLIT, TRITON_NAMES, description
from .printer import Lowered
from .row_loop import RowLoop, zero_of_row
from .source import GridDim, Param, ParamKind, Source
from .steps import Steps, Walk, steps
from .tile_refs import Segment, Side, TileRef
from .values import Values


def lower(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Lowered:
    """One kernel whose tiles are all in registers."""
    return _Tiles(kernel, schedule, bindings, name, wide).lowered()


class _Tiles:
    """Builds a kernel whose tiles are all in registers."""

    def __init__(self, kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool) -> None:
        self.kernel, self.schedule, self.name, self.wide = kernel, schedule, name, wide
        self.program = kernel.program
        self.steps: Steps = steps(kernel, schedule)
        self.builder = Builder((*TRITON_NAMES, *self.program.symbols, *(f"{b.name}_ptr" for b in self.program.buffers)))
        self.values = Values(Memory(kernel, schedule, bindings, TRITON), self.builder)
        self.folds = Folds(kernel, self.values, self.steps.row_loop)
        self.row_loop = RowLoop(self.steps, self.values, self.folds)
        far_cols = wide and any(_strided_cols(kernel, n) for n in self.program.nodes)
        self.rows = Side("row", self.program.extent(kernel.space.rows), schedule.rows, wide)
        self.cols = Side("col", self.program.extent(kernel.space.cols), schedule.cols, far_cols, schedule.vector_limit or None)
        self.part = SPLIT if schedule.splits > 1 else None

    # ---- the whole kernel ----------------------------------------------------------------------------------------------

    def lowered(self) -> Lowered:
        """The whole kernel."""
        params = self._params()
        grid = self._grid()
        self._body()
        fresh = frozenset(b.name for b in self.program.buffers if b.role != "input")
        lowered = ir.Kernel(
            self.name,
            description(self.kernel, self.schedule),
            tuple(p.text_name for p in params),
            self.builder.done(),
            TRITON,
            self.builder.legend,
        )
        blank = Source(self.name, "", params, grid, self.schedule.warps, self.schedule.stages, wide_index=self.wide, fresh=fresh)
        return Lowered(lowered, blank)

    def _params(self) -> tuple[Param, ...]:
        used = {n.buffer for n in self.program.nodes if isinstance(n, (Load, Store))}
        pointers = [Param(b.name, ParamKind.POINTER, f"{b.name}_ptr", b.dtype) for b in self.program.buffers if b.name in used]
        sizes = [Param(s, ParamKind.SIZE, s) for s in self.program.symbols]
        return (*pointers, *sizes, Param("zero", ParamKind.ZERO, "zero"))

    def _grid(self) -> tuple[GridDim, ...]:
        """Name this CTA's index along each grid dimension. The last dimension takes the rest of the program id."""
        dims: list[tuple[str, GridDim]] = []
        if isinstance(self.schedule.cols, Block):
            dims.append(("col_block", GridDim(self.cols.extent, self.schedule.cols.size)))
        if self.part:
            dims.append((SPLIT, GridDim(self.schedule.splits)))
        if isinstance(self.schedule.rows, Block) and self.kernel.space.rows:
            dims.append(("row_block", GridDim(self.rows.extent, self.schedule.rows.size)))
        if self.kernel.space.batch:
            dims.append(("batch", GridDim(self.program.extent(self.kernel.space.batch))))
        rest = "tl.program_id(0)" + (".to(tl.int64)" if self.wide else "")
        if len(dims) > 1:
            self.builder.set("pid", rest)
            rest = "pid"
        for name, dim in dims[:-1]:
            count = _count_text(dim)
            self.builder.set(name, f"pid % {count}")
            self.builder.set("pid", f"pid // {count}")
        if dims:
            self.builder.set(dims[-1][0], rest)
        return tuple(d for _, d in dims) or (GridDim(1),)

    def _body(self) -> None:
        if not self.steps.row_loop:
            self.values.opaque_zeros(lambda p: f"zero * {p}", range(1, len(self.steps.walks)), tuple(self.schedule.resident))
        ref = TileRef()
        if isinstance(self.schedule.rows, Block) and self.kernel.space.rows:
            ref = tile_refs.block(self.rows, ref, self.builder, "row_block")
        if isinstance(self.schedule.cols, Block):
            ref = tile_refs.block(self.cols, ref, self.builder, "col_block")
        env: Env = {}
        for i in self.steps.constants:
            self.values.node(i, ref, env)
        if self.steps.row_loop:
            self._row_loop(ref, env)
        else:
            self._walks(ref, env, self._tiles(ref), {})

    # ---- walks ---------------------------------------------------------------------------------------------------------

    def _tiles(self, ref: TileRef) -> list[Segment]:
        """The tiles of the walked side."""
        side = self.cols if self.steps.over_cols else self.rows
        stages = 1 if self.steps.row_loop else self.schedule.stages
        if self.schedule.sector_elems and side is self.cols:
            self._sector_start()
            return tile_refs.sectors(side, ref, self.schedule.sector_elems, stages, self.builder)
        match side.role:
            case Cover():
                return tile_refs.cover(side, ref, self.builder)
            case Loop():
                return tile_refs.loop(side, ref, self.builder, self.part, stages)
            case Block():
                return [Segment(ref)]

    def _sector_start(self) -> None:
        sector_elems, stride = self.schedule.sector_elems, self.values.memory.sector_row_stride
        assert stride is not None
        self.builder.set("row_offset", f"{'row_block' if self.kernel.space.rows else '0'} * {size_text(stride)}")
        self.builder.set("before", f"row_offset % {sector_elems}")
        self.builder.set("sector", f"row_offset // {sector_elems} * {sector_elems}")

    def _walks(self, ref: TileRef, env: Env, tiles: list[Segment], accumulated: dict[int, Running]) -> None:
        """All walks in order, each after its uniform values."""
        for p, walk in enumerate(self.steps.walks):
            self.values.walk = p
            for i in walk.uniform:
                self.values.node(i, ref, env)
            self._walk(walk, env, tiles, accumulated)
        for i in self.steps.trailing:
            self.values.node(i, ref, env)

    def _walk(self, walk: Walk, env: Env, tiles: list[Segment], accumulated: dict[int, Running]) -> None:
        running = {f.node: self.folds.running(f) for f in walk.folds}
        for state in running.values():
            self.folds.start(state, [t.ref for t in tiles if t.loop is not None])
        covered = isinstance((self.cols if self.steps.over_cols else self.rows).role, Cover)
        if covered and self.values.walk == 0:  # issue all loads of a resident row before the first is used
            for tile in tiles:
                self.builder.add(*tile.prepare)
                for i in walk.body:
                    if i in self.schedule.resident:
                        self.values.use_resident(i, tile.ref, env)
            self._prefetch_late_loads(tiles, env)
        for tile in tiles:
            self._tile(walk, dict(env), tile, {**accumulated, **running}, prepared=covered)
        for state in running.values():
            self.folds.finish(state, tiles[0].ref)

    def _prefetch_late_loads(self, tiles: list[Segment], env: Env) -> None:
        """Issue the loads that only later walks need and that the schedule has early."""
        for i in (i for i in self.kernel.after_reduction if i in self.schedule.early_loads):
            for tile in tiles:
                self.values.preload(i, tile.ref, env)

    def _tile(self, walk: Walk, env: Env, tile: Segment, states: dict[int, Running], prepared: bool) -> None:
        def body() -> None:
            self.builder.add(*(() if prepared else tile.prepare))
            for i in walk.body:
                if i in self.schedule.resident:
                    env[i] = self.values.use_resident(i, tile.ref, env)
                else:
                    self.values.node(i, tile.ref, env)
            for fold in walk.folds:
                self.folds.feed(states[fold.node], tile.ref, env, unrolled=tile.loop is None)
            for fold in walk.accumulated:
                self.folds.feed(states[fold.node], tile.ref, env, unrolled=False)

        self._looped(tile, body)

    def _looped(self, segment: Segment, body: Callable[[], None]) -> None:
        if segment.loop is None:
            body()
        else:
            with self.builder.block(segment.loop):
                body()

    # ---- the row loop of mix-order kernels -----------------------------------------------------------------------------

    def _row_loop(self, ref: TileRef, env: Env) -> None:
        assert isinstance(self.schedule.rows, Loop)
        height = self.schedule.rows.step
        tiles = self._tiles(ref)
        here = [replace(t.ref, height=height) for t in tiles]
        self.row_loop.load_row_vectors(here, env)
        hoisted = dict(self.values.held)
        accumulated = self.row_loop.start(here)
        for rows in tile_refs.loop(self.rows, ref, self.builder, self.part, self.schedule.stages):
            self.values.held = dict(hoisted)
            self.values.in_row_loop = True
            self._looped(rows, lambda rows=rows: self._rows(rows, tiles, dict(env), accumulated))  # type: ignore[misc]
            self.values.in_row_loop = False
        self.row_loop.close([t.ref for t in tiles], env, accumulated)

    def _rows(self, rows: Segment, tiles: list[Segment], env: Env, accumulated: dict[int, Running]) -> None:
        """One iteration of the row loop."""
        self.builder.add(*rows.prepare)
        held = (*self.schedule.resident, *self.steps.vectors_in_registers)
        self.values.opaque_zeros(partial(zero_of_row, rows.start), range(len(self.steps.walks)), held)
        at = rows.ref
        inner = [replace(t, ref=t.ref.at_rows(at)) for t in tiles]
        self._walks(at, env, inner, accumulated)
        for fold in self.steps.row_folds:
            self.folds.feed(accumulated[fold.node], at, env, unrolled=False)


def _count_text(dim: GridDim) -> str:
    if isinstance(dim.extent, int):
        return str(-(-dim.extent // dim.step))
    return size_factor(dim.extent) if dim.step == 1 else f"tl.cdiv({size_text(dim.extent)}, {dim.step})"


def _strided_cols(kernel: Kernel, node: Node) -> bool:
    return isinstance(node, (Load, Store)) and any(a in kernel.space.cols and s != 1 for a, s in node.strides)
