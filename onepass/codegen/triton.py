"""Steps -> Triton source. One emitter handles every schedule: the grid, the walks, and the loop over rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.program import Load, Node, Store
from ..ir.size import Bindings
from ..plan.access import PART
from ..plan.kernel import Kernel
from ..plan.resources import loads_after_reduction, prefetched_loads
from ..plan.schedule import Block, Cover, Loop, Schedule
from ..plan.thread_layout import max_contiguous
from . import tile_refs
from .expr import factor_text, size_text
from .folds import Folds, Running
from .row_loop import RowLoop
from .source import GridDim, Param, ParamKind, Source
from .steps import Steps, Walk, steps
from .tile_refs import Segment, Side, TileRef
from .values import Env, Values
from .writer import Writer

HEADER = (
    "import triton",
    "import triton.language as tl",
    "from triton.language.extra import libdevice",
    "",
    "from onepass.codegen.helpers import fast_erf, fast_exp, fast_sigmoid, fast_tanh, fold_max, fold_min, fold_prod",
    "from onepass.codegen.helpers import to_e5m2, widen",
    "",
    "",
)
RESERVED = (
    "tl", "triton", "libdevice", "fold_max", "fold_min", "fold_prod", "to_e5m2", "widen", "fast_erf", "fast_exp",
    "fast_sigmoid", "fast_tanh", "float", "zero", "pid", "part", "batch", "row_block", "col_block", "r", "c", "r_in", "c_in",
    "lane", "last", "whole", "before", "sector", "row_at", "u_edge", "c_edge", "edge_in", "u_start",
)


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel. `wide` selects 64-bit indices."""
    return _Emitter(kernel, schedule, bindings, name, wide).source()


class _Emitter:
    def __init__(self, kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool) -> None:
        self.kernel, self.schedule, self.name, self.wide = kernel, schedule, name, wide
        self.program = kernel.program
        self.steps: Steps = steps(kernel, schedule)
        self.w = Writer((*RESERVED, *self.program.symbols, *(f"{b.name}_ptr" for b in self.program.buffers)))
        self.values = Values(kernel, schedule, bindings, self.w)
        self.folds = Folds(kernel, self.values, self.steps.row_loop)
        self.row_loop = RowLoop(self.steps, self.values, self.folds)
        far_cols = wide and any(_strided_cols(kernel, n) for n in self.program.nodes)
        self.rows = Side("r", self.program.extent(kernel.space.rows), schedule.rows, wide)
        self.cols = Side("c", self.program.extent(kernel.space.cols), schedule.cols, far_cols, max_contiguous(kernel))
        self.part = PART if schedule.splits > 1 else None

    # ---- the whole kernel ----------------------------------------------------------------------------------------------

    def source(self) -> Source:
        params = self._params()
        for line in HEADER:
            self.w.line(line)
        self.w.line('@triton.jit(do_not_specialize=["zero"])')
        with self.w.block(f"def {self.name}({', '.join(p.text_name for p in params)})"):
            self.w.line(f'"""{self.schedule}"""')
            grid = self._grid()
            self._body()
        fresh = frozenset(b.name for b in self.program.buffers if b.role != "input")
        return Source(self.name, self.w.done(), params, grid, self.schedule.warps, self.schedule.stages,
                      wide_index=self.wide, fresh=fresh)

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
            dims.append((PART, GridDim(self.schedule.splits)))
        if isinstance(self.schedule.rows, Block) and self.kernel.space.rows:
            dims.append(("row_block", GridDim(self.rows.extent, self.schedule.rows.size)))
        if self.kernel.space.batch:
            dims.append(("batch", GridDim(self.program.extent(self.kernel.space.batch))))
        rest = "tl.program_id(0)" + (".to(tl.int64)" if self.wide else "")
        if len(dims) > 1:
            self.w.line(f"pid = {rest}")
            rest = "pid"
        for name, dim in dims[:-1]:
            count = _count_text(dim)
            self.w.line(f"{name} = pid % {count}")
            self.w.line(f"pid = pid // {count}")
        if dims:
            self.w.line(f"{dims[-1][0]} = {rest}")
        return tuple(d for _, d in dims) or (GridDim(1),)

    def _body(self) -> None:
        if not self.steps.row_loop:
            self.values.opaque_zeros("zero * {}", range(1, len(self.steps.walks)), tuple(self.schedule.resident))
        ref = TileRef()
        if isinstance(self.schedule.rows, Block) and self.kernel.space.rows:
            ref = tile_refs.block(self.rows, ref, self.w, "row_block")
        if isinstance(self.schedule.cols, Block):
            ref = tile_refs.block(self.cols, ref, self.w, "col_block")
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
            return tile_refs.sectors(side, ref, self.schedule.sector_elems, stages, self.w)
        match side.role:
            case Cover():
                return tile_refs.cover(side, ref, self.w)
            case Loop():
                return tile_refs.loop(side, ref, self.w, self.part, stages)
            case Block():
                return [Segment(ref)]

    def _sector_start(self) -> None:
        sector_elems, stride = self.schedule.sector_elems, self.values.sector_row_stride
        assert stride is not None
        self.w.line(f"row_at = {'row_block' if self.kernel.space.rows else '0'} * {size_text(stride)}")
        self.w.line(f"before = row_at % {sector_elems}")
        self.w.line(f"sector = row_at // {sector_elems} * {sector_elems}")

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
                self._lines(tile.prepare)
                for i in walk.body:
                    if i in self.schedule.resident:
                        self.values.use_resident(i, tile.ref, env)
            self._prefetch_late_loads(tiles, env)
        for tile in tiles:
            self._tile(walk, dict(env), tile, {**accumulated, **running}, prepared=covered)
        for state in running.values():
            self.folds.finish(state, tiles[0].ref)

    def _prefetch_late_loads(self, tiles: list[Segment], env: Env) -> None:
        """Issue the loads that only later walks need, if registers allow."""
        for i, _ in prefetched_loads(loads_after_reduction(self.kernel), self.schedule):
            for tile in tiles:
                self.values.preload(i, tile.ref, env)

    def _tile(self, walk: Walk, env: Env, tile: Segment, states: dict[int, Running], prepared: bool) -> None:
        def body() -> None:
            self._lines(() if prepared else tile.prepare)
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
            with self.w.block(segment.loop):
                body()

    def _lines(self, lines: tuple[str, ...]) -> None:
        for line in lines:
            self.w.line(line)

    # ---- the row loop of mix-order kernels -----------------------------------------------------------------------------

    def _row_loop(self, ref: TileRef, env: Env) -> None:
        assert isinstance(self.schedule.rows, Loop)
        height = self.schedule.rows.step
        tiles = self._tiles(ref)
        here = [replace(t.ref, height=height) for t in tiles]
        self.row_loop.load_row_vectors(here, env)
        hoisted = dict(self.values.held)
        accumulated = self.row_loop.start(here)
        for rows in tile_refs.loop(self.rows, ref, self.w, self.part, self.schedule.stages):
            self.values.held = dict(hoisted)
            self.values.in_row_loop = True
            self._looped(rows, lambda rows=rows: self._rows(rows, tiles, dict(env), accumulated))  # type: ignore[misc]
            self.values.in_row_loop = False
        self.row_loop.close([t.ref for t in tiles], env, accumulated)

    def _rows(self, rows: Segment, tiles: list[Segment], env: Env, accumulated: dict[int, Running]) -> None:
        """One iteration of the row loop."""
        self._lines(rows.prepare)
        held = (*self.schedule.resident, *self.steps.vectors_in_registers)
        self.values.opaque_zeros(f"zero & ({rows.start} + {{}})", range(len(self.steps.walks)), held)
        at = rows.ref
        inner = [replace(t, ref=t.ref.at_rows(at)) for t in tiles]
        self._walks(at, env, inner, accumulated)
        for fold in self.steps.row_folds:
            self.folds.feed(accumulated[fold.node], at, env, unrolled=False)


def _count_text(dim: GridDim) -> str:
    if isinstance(dim.extent, int):
        return str(-(-dim.extent // dim.step))
    return factor_text(dim.extent) if dim.step == 1 else f"tl.cdiv({size_text(dim.extent)}, {dim.step})"


def _strided_cols(kernel: Kernel, node: Node) -> bool:
    return isinstance(node, (Load, Store)) and any(a in kernel.space.cols and s != 1 for a, s in node.strides)
