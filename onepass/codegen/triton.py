"""Steps -> Triton source. One emitter writes every schedule.

Residency lives in `use`: a multi-phase input kept in registers is handed out, in later walks, as its 16-bit self xor a zero the
compiler cannot know, or else the widened fp32 copy would be kept alive across the reduction in its stead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from ..ir.expr import I64, DType
from ..ir.monoid import MONOIDS, Monoid, State
from ..ir.program import Const, Index, Load, Node, Op, Reduce, Result, Store
from ..ir.size import Bindings, product
from ..plan.access import PART, row_stride, runs, streams_rows
from ..plan.kernel import Across, Fold, Kernel
from ..plan.schedule import Block, Cover, Loop, Schedule
from . import spots
from .expr import COMBINE, TileAlgebra, join, literal, op_text, run_text, size_text, typed_literal
from .source import GridDim, Param, ParamKind, Source
from .spots import Segment, Side, Spot
from .steps import Steps, Walk, program_arg, steps
from .writer import Writer

Env = dict[int, str]  # what each value is called here
HEADER = (
    "import triton",
    "import triton.language as tl",
    "from triton.language.extra import libdevice",
    "",
    "from onepass.codegen.helpers import fold_max, fold_min, fold_prod",
    "",
    "",
)
RESERVED = ("tl", "triton", "libdevice", "fold_max", "fold_min", "fold_prod", "zero", "pid", "part", "batch", "row_block",
            "col_block", "float", "r", "c", "r_in", "c_in", "u", "last", "whole", "before", "sector", "row_at", "u_edge", "c_edge",
            "edge_in", "u_start")
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel; `wide` makes it count in 64 bits."""
    return _Emitter(kernel, schedule, bindings, name, wide).source()


@dataclass
class _Gathered:
    """The running states of one reduction: by tile, by tile width, or one."""

    fold: Fold
    monoid: Monoid
    dtype: DType
    axes: tuple[int, ...]  # of a tile
    states: dict[str, State] = field(default_factory=dict)


class _Emitter:
    def __init__(self, kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool) -> None:
        self.kernel, self.schedule, self.name = kernel, schedule, name
        self.program = kernel.program
        self.steps: Steps = steps(kernel, schedule)
        self.w = Writer((*RESERVED, *self.program.symbols, *(f"{b.name}_ptr" for b in self.program.buffers)))
        self.wide = wide
        self.lead_stride = row_stride(kernel, bindings) if schedule.lead else None
        self.kept: dict[tuple[int, str], str] = {}  # resident loads, by tile
        self.results: dict[int, State] = {}
        self.walk_number = 0
        self.in_row_loop = False
        self.names = _names(self.program)
        space = kernel.space
        far_cols = self.wide and any(_strided_cols(kernel, n) for n in self.program.nodes)
        self.rows = Side("r", self.program.extent(space.rows), schedule.rows, self.wide)
        self.cols = Side("c", self.program.extent(space.cols), schedule.cols, far_cols)

    # ---- the whole kernel -------------------------------------------------------------------------------------------

    def source(self) -> Source:
        params = self._params()
        for line in HEADER:
            self.w.line(line)
        self.w.line('@triton.jit(do_not_specialize=["zero"])')
        with self.w.block(f"def {self.name}({', '.join(p.text_name for p in params)})"):
            self.w.line(f'"""{self.schedule}"""')
            grid = self._grid()
            self._body()
        return Source(self.name, self.w.done(), params, grid, self.schedule.warps, self.schedule.stages,
                      self.schedule.max_registers, self.wide, frozenset(b.name for b in self.program.buffers if b.role != "input"))

    def _params(self) -> tuple[Param, ...]:
        used = {n.buffer for n in self.program.nodes if isinstance(n, (Load, Store))}
        pointers = [Param(b.name, ParamKind.POINTER, f"{b.name}_ptr", b.dtype) for b in self.program.buffers if b.name in used]
        sizes = [Param(s, ParamKind.SIZE, s) for s in self.program.symbols]
        return (*pointers, *sizes, Param("zero", ParamKind.ZERO, "zero"))

    def _grid(self) -> tuple[GridDim, ...]:
        """Name this CTA's place on each gridded side; the last side takes what is left of the program id."""
        dims: list[tuple[str, GridDim]] = []
        if isinstance(self.schedule.cols, Block):
            dims.append(("col_block", GridDim(self.cols.extent, self.schedule.cols.size)))
        if self.schedule.splits > 1:
            dims.append((PART, GridDim(self.schedule.splits)))
        if isinstance(self.schedule.rows, Block) and self.kernel.space.rows:
            dims.append(("row_block", GridDim(self.rows.extent, self.schedule.rows.size)))
        if self.kernel.space.batch:
            dims.append(("batch", GridDim(self.program.extent(self.kernel.space.batch))))
        rest = "tl.program_id(0)" + (".to(tl.int64)" if self.wide else "")
        for k, (name, dim) in enumerate(dims):
            if k == len(dims) - 1:
                self.w.line(f"{name} = {rest}")
                break
            count = _count_text(dim)
            if rest != "pid":
                self.w.line(f"pid = {rest}")
                rest = "pid"
            if count != "1":
                self.w.line(f"{name} = pid % {count}")
                self.w.line(f"pid = pid // {count}")
            else:
                self.w.line(f"{name} = 0")
        return tuple(d for _, d in dims) or (GridDim(1),)

    def _body(self) -> None:
        if not self.steps.row_loop:
            self._zeros("zero * {}", range(1, len(self.steps.walks)))
        spot = Spot()
        if isinstance(self.schedule.rows, Block) and self.kernel.space.rows:
            spot = spots.block(self.rows, spot, self.w, "row_block")
        if isinstance(self.schedule.cols, Block):
            spot = spots.block(self.cols, spot, self.w, "col_block")
        env: Env = {}
        for i in self.steps.constants:
            self._node(i, spot, env)
        if self.steps.row_loop:
            self._row_loop(spot, env)
        else:
            self._walks(spot, env, self._walk_segments(spot), {})

    def _zeros(self, form: str, walks: range) -> None:
        """A zero for every walk, each another value to the compiler: or it would see that two walks compute the same."""
        narrow = [i for i in (*self.schedule.resident, *self.steps.hoisted) if self.program.dtypes[i].size <= 2]
        for p in walks if narrow else ():
            self.w.line(f"zero{p} = ({form.format(p)}).to(tl.int16)")

    def _walks(self, spot: Spot, env: Env, segments: list[Segment], gathered: dict[int, _Gathered]) -> None:
        for p, walk in enumerate(self.steps.walks):
            self.walk_number = p
            for i in walk.uniform:
                self._node(i, spot, env)
            self._walk(p, walk, env, segments, gathered)
        for i in self.steps.trailing:
            self._node(i, spot, env)

    # ---- walks ------------------------------------------------------------------------------------------------------

    def _walk_segments(self, spot: Spot) -> list[Segment]:
        """The tiles of the walked side."""
        side = self.cols if self.steps.over_cols else self.rows
        stages = self.schedule.stages if not self.steps.row_loop else 1
        if self.schedule.lead and side is self.cols:
            self._sector_start(spot)
            return spots.sectors(side, spot, self.schedule.lead, stages, self.w)
        match side.role:
            case Cover():
                return spots.cover(side, spot, self.w)
            case Loop():
                return spots.loop(side, spot, self.w, PART if self.schedule.splits > 1 else None, stages)
            case _:
                return [Segment(spot)]

    def _sector_start(self, spot: Spot) -> None:
        assert self.lead_stride is not None
        lead = self.schedule.lead
        row = "row_block" if self.kernel.space.rows else "0"
        self.w.line(f"row_at = {row} * {size_text(self.lead_stride)}")
        self.w.line(f"before = row_at % {lead}")
        self.w.line(f"sector = row_at // {lead} * {lead}")

    @property
    def _block_size(self) -> int:
        size = self.program.extent(self.kernel.space.block)
        assert isinstance(size, int)
        return size

    def _walk(self, p: int, walk: Walk, env: Env, segments: list[Segment], gathered: dict[int, _Gathered]) -> None:
        running = {f.node: self._gather(f) for f in walk.folds}
        self._start_loops(running, segments)
        covered = isinstance((self.cols if self.steps.over_cols else self.rows).role, Cover)
        if covered and p == 0:  # every load of a resident row is issued before the first is used
            for segment in segments:
                for line in segment.prepare:
                    self.w.line(line)
                for i in walk.body:
                    if i in self.schedule.resident:
                        self._use(i, p, segment.spot)
        for segment in segments:
            self._segment(p, walk, dict(env), segment, {**gathered, **running}, prepared=covered)
        for state in running.values():
            self._finish(state, segments[0].spot)

    def _segment(self, p: int, walk: Walk, env: Env, segment: Segment, states: dict[int, _Gathered], prepared: bool) -> None:
        def tile() -> None:
            for line in () if prepared else segment.prepare:
                self.w.line(line)
            for i in walk.body:
                if i in self.schedule.resident:
                    env[i] = self._use(i, p, segment.spot)
                else:
                    self._node(i, segment.spot, env)
            for fold in walk.folds:
                self._feed(states[fold.node], segment.spot, env, once=segment.loop is None)
            for fold in walk.gathered:
                self._feed(states[fold.node], segment.spot, env, once=False)

        if segment.loop is None:
            tile()
        else:
            with self.w.block(segment.loop):
                tile()

    def _use(self, i: int, p: int, spot: Spot) -> str:
        """A resident input: loaded in the first walk that needs it, taken from registers in later ones."""
        node = self.program.nodes[i]
        assert isinstance(node, Load)
        key = (i, spot.tag)
        if key not in self.kept:
            env: Env = {}
            self._node(i, spot, env)
            self.kept[key] = env[i]
            return env[i]
        return self.kept[key] if p == 0 else self._opaque(i, self.kept[key], spot)

    def _opaque(self, i: int, held: str, spot: Spot) -> str:
        """A held 16-bit value as something the compiler has not seen before, so that it is the 16 bits that stay held."""
        dtype, node = self.program.dtypes[i], self.program.nodes[i]
        assert isinstance(node, Load)
        if dtype.size > 2:
            return held
        bits, zero = ("int16", f"zero{self.walk_number}") if dtype.size == 2 else ("int8", f"zero{self.walk_number}.to(tl.int8)")
        text = f"({held}.to(tl.{bits}, bitcast=True) ^ {zero}).to(tl.{dtype.kernel}, bitcast=True)"
        return self._assign(f"{node.buffer}{spot.tag}_again", text)

    # ---- the row loop of mix-order kernels --------------------------------------------------------------------------

    def _row_loop(self, spot: Spot, env: Env) -> None:
        tiles = self._walk_segments(spot)
        height = self.schedule.rows.step if isinstance(self.schedule.rows, Loop) else 1
        hoisted = self._hoist(tiles, height)
        gathered = {f.node: self._gather(f) for walk in self.steps.walks for f in walk.gathered}
        gathered |= {f.node: self._gather(f) for f in self.steps.row_folds}
        for state in gathered.values():
            self._start_gathering(state, tiles, height)
        for segment in spots.loop(self.rows, spot, self.w, PART if self.schedule.splits > 1 else None, self.schedule.stages):
            self.kept = dict(hoisted)
            inner = [replace(t, spot=replace(t.spot, row=segment.spot.row, height=segment.spot.height, row_mask=segment.spot.row_mask))
                     for t in tiles]

            def body(segment: Segment = segment, inner: list[Segment] = inner) -> None:
                row_env = dict(env)
                for line in segment.prepare:
                    self.w.line(line)
                self._zeros(f"zero & ({segment.start} + {{}})", range(len(self.steps.walks)))
                self._walks(segment.spot, row_env, inner, gathered)
                for fold in self.steps.row_folds:
                    self._feed(gathered[fold.node], segment.spot, row_env, once=False)

            self.in_row_loop = True
            if segment.loop is None:
                body()
            else:
                with self.w.block(segment.loop):
                    body()
            self.in_row_loop = False
        self.kept = hoisted
        self._close(tiles, env, gathered)

    def _hoist(self, tiles: list[Segment], height: int) -> dict[tuple[int, str], str]:
        """Load row vectors before the loop, shaped like the tiles they meet there."""
        self.kept = {}
        for i in self.steps.hoisted:
            for tile in tiles:
                env: Env = {}
                self._node(i, replace(tile.spot, height=height), env)
                self.kept[(i, tile.spot.tag)] = env[i]
        return self.kept

    def _close(self, tiles: list[Segment], env: Env, gathered: dict[int, _Gathered]) -> None:
        """After the row loop: read the gathered reductions out, per tile where they vary along the columns."""
        flat = [i for i in self.steps.closing if self.kernel.by_col[i] is Across.NONE]
        for state in gathered.values():
            if state.fold.cols or self.kernel.by_col[program_arg(self.kernel, state.fold)] is Across.NONE:
                self._finish(state, tiles[0].spot)
        for i in flat:
            self._node(i, Spot(), env)
        for tile in tiles:
            spot = replace(tile.spot, height=1)
            for state in gathered.values():
                if not state.fold.cols and self.kernel.by_col[program_arg(self.kernel, state.fold)] is not Across.NONE:
                    self._finish(replace(state, states={"": state.states[tile.spot.tag]}), spot)
            tile_env = dict(env)
            needed = [i for i in self.steps.closing if i not in flat]
            for i in self._row_free_sources(needed):
                if i not in tile_env:
                    self._node(i, spot, tile_env)
            for i in needed:
                self._node(i, spot, tile_env)

    def _row_free_sources(self, needed: list[int]) -> list[int]:
        """Values the closing part reads that earlier walks computed inside the row loop."""
        from ..ir.program import operands

        found: set[int] = set()
        todo = list(needed)
        while todo:
            for o in operands(self.program.nodes[todo.pop()]):
                if o not in self.steps.closing and o not in found and not isinstance(self.program.nodes[o], Reduce):
                    found.add(o)
                    todo.append(o)
        return sorted(found)

    # ---- reductions -------------------------------------------------------------------------------------------------

    def _gather(self, fold: Fold) -> _Gathered:
        node = self.program.nodes[fold.node]
        assert isinstance(node, Reduce)
        axes = ((1,) if fold.cols else ()) + ((0,) if fold.rows else ())
        return _Gathered(fold, MONOIDS[node.monoid], self.program.dtypes[node.args[0]], axes)

    def _initial(self, state: _Gathered, shape: str, hint: str) -> State:
        names = []
        dtypes = state.monoid.state_dtypes(state.dtype)
        for part, start, dtype in zip(state.monoid.state, state.monoid.identity(state.dtype), dtypes):
            names.append(self._assign(f"{hint}_{part}", f"tl.full({shape}, {literal(start)}, tl.{dtype.kernel})"))
        return tuple(names)

    def _start_loops(self, running: dict[int, _Gathered], segments: list[Segment]) -> None:
        """States that a loop carries must exist before it."""
        for segment in segments:
            if segment.loop is not None:
                for state in running.values():
                    key = self._key(state, segment.spot)
                    if key not in state.states:
                        state.states[key] = self._initial(state, self._running_shape(state, segment.spot), self.names[state.fold.node])

    def _start_gathering(self, state: _Gathered, tiles: list[Segment], height: int) -> None:
        for tile in tiles:
            spot = replace(tile.spot, height=height)
            key = self._key(state, spot)
            if key not in state.states:
                state.states[key] = self._initial(state, self._running_shape(state, spot), self.names[state.fold.node])

    def _entering_shape(self, state: _Gathered, spot: Spot) -> tuple[int, int]:
        """The shape of what enters a reduction from one tile."""
        across = self.kernel.by_col[program_arg(self.kernel, state.fold)]
        if 1 in state.axes or across is Across.FULL:
            return spot.height, spot.width
        return spot.height, spot.width // self._block_size if across is Across.BLOCK else 1

    def _running_shape(self, state: _Gathered, spot: Spot) -> str:
        """The shape of a running state: a whole tile where lanes are folded last, else one lane per result."""
        height, width = self._entering_shape(state, spot)
        if state.monoid.primitive:
            return f"[{height}, {width}]"
        return f"[{1 if 0 in state.axes else height}, {1 if 1 in state.axes else width}]"

    def _key(self, state: _Gathered, spot: Spot) -> str:
        """Which running state a tile feeds."""
        across_rows = self.steps.row_loop and state.fold.rows
        if across_rows and not state.fold.cols:
            flat = self.kernel.by_col[program_arg(self.kernel, state.fold)] is Across.NONE
            return "1" if flat else spot.tag
        return self._running_shape(state, spot) if state.monoid.primitive else ""

    def _feed(self, state: _Gathered, spot: Spot, env: Env, once: bool) -> None:
        """Let a tile enter a reduction: elementwise where one primitive fold is all it is, else by one merge a tile."""
        node = self.program.nodes[state.fold.node]
        assert isinstance(node, Reduce)
        masks = [m for m, axis in ((spot.row_mask, 0), (spot.col_mask, 1)) if m and axis in state.axes]
        algebra = self._algebra(state, spot, masks)
        entered = state.monoid.enter(algebra, *(self._filled(a, state, spot, env) for a in node.args))
        if masks:  # lanes outside become the identity: f(0) is not 0 in general
            identity = state.monoid.identity(state.dtype)
            entered = tuple(
                x if x == e else self._assign("inside", f"tl.where({' & '.join(masks)}, {x if isinstance(x, str) else literal(x)}, {literal(e)})")
                for x, e in zip(entered, identity)
            )
        key = self._key(state, spot)
        if not state.monoid.primitive:
            entered = state.monoid.merge(algebra, *entered)
        before = state.states.get(key)
        if before is None:
            state.states[key] = tuple(x if isinstance(x, str) else literal(x) for x in entered)
            return
        if state.monoid.primitive:
            merged: State = (op_text(COMBINE[state.monoid.primitive], (before[0], entered[0]), state.dtype),)
        else:
            merged = join(state.monoid, before, entered, self._assign)
        if once:
            state.states[key] = tuple(self._assign(f"{self.names[state.fold.node]}_{n}", m) for n, m in zip(state.monoid.state, merged))
        else:
            for name, text in zip(before, merged):
                self.w.line(f"{name} = {text}")

    def _filled(self, i: int, state: _Gathered, spot: Spot, env: Env) -> str:
        """A value spread over the axes it is folded along."""
        text = env[i]
        thin = (0 in state.axes and spot.height > 1 and not self.kernel.by_row[i]) or (
            1 in state.axes and self.kernel.by_col[i] is Across.NONE)
        if thin or isinstance(self.program.nodes[i], Const):
            height, width = self._entering_shape(state, spot)
            return self._assign("spread", f"tl.broadcast_to({self._tensor(i, text)}, [{height}, {width}])")
        return text

    def _algebra(self, state: _Gathered, spot: Spot, masks: list[str]) -> TileAlgebra:
        def folded(kind: str, text: str) -> str:
            for axis in state.axes:
                text = f"tl.sum({text}, axis={axis}, keep_dims=True)" if kind == "sum" else f"fold_{kind}({text}, {axis})"
            return text

        def active() -> str:
            if not masks:
                count = (spot.height if 0 in state.axes else 1) * (spot.width if 1 in state.axes else 1)
                return f"{float(count)}"
            height, width = self._entering_shape(state, spot)
            return folded("sum", f"tl.broadcast_to(({' & '.join(masks)}).to(tl.{state.dtype.kernel}), [{height}, {width}])")

        return TileAlgebra(self._assign, folded, active)

    def _finish(self, state: _Gathered, spot: Spot) -> None:
        """Read a reduction out: fold what its lanes hold, join what its tiles hold."""
        algebra = self._algebra(state, spot, [])
        states = [s if not state.monoid.primitive else state.monoid.merge(algebra, *s) for s in state.states.values()]
        total = states[0]
        for other in states[1:]:
            total = join(state.monoid, total, other, self._assign)
        left = state.monoid.leave(algebra, *total)
        hint = self.names[state.fold.node]
        self.results[state.fold.node] = tuple(
            x if isinstance(x, str) and x.isidentifier() else self._assign(hint, x if isinstance(x, str) else literal(x)) for x in left)

    def _block_reduce(self, i: int, node: Reduce, spot: Spot, env: Env) -> None:
        """A reduction within the blocks of one tile."""
        size, monoid, dtype = self._block_size, MONOIDS[node.monoid], self.program.dtypes[node.args[0]]
        count = spot.width // size

        def folded(kind: str, text: str) -> str:
            cube = f"tl.reshape({text}, [{spot.height}, {count}, {size}])"
            fold = f"tl.sum({cube}, axis=2, keep_dims=True)" if kind == "sum" else f"fold_{kind}({cube}, 2)"
            return f"tl.reshape({fold}, [{spot.height}, {count}])"

        algebra = TileAlgebra(self._assign, folded, lambda: f"{float(size)}")
        args = [self._assign("spread", f"tl.broadcast_to({self._as_full(a, spot, env)}, {spot.shape})") for a in node.args]
        entered = monoid.enter(algebra, *args)
        self.results[i] = monoid.leave(algebra, *monoid.merge(algebra, *entered))

    # ---- single values ----------------------------------------------------------------------------------------------

    def _assign(self, hint: str, text: str, note: str = "") -> str:
        name = self.w.fresh(hint)
        self.w.line(f"{name} = {text}", note)
        return name

    def _tensor(self, i: int, text: str) -> str:
        """A literal as a tensor, for functions that take no bare numbers."""
        node = self.program.nodes[i]
        if isinstance(node, Const) and node.scale == 1 and not text.startswith("tl.full"):
            return f"tl.full([1, 1], {text}, tl.{node.dtype.kernel})"
        return text

    def _as_full(self, i: int, spot: Spot, env: Env) -> str:
        """A value that varies by block, repeated for every column of its block."""
        if self.kernel.by_col[i] is not Across.BLOCK:
            return self._tensor(i, env[i])
        size, count = self._block_size, spot.width // self._block_size
        height = spot.height
        return f"tl.reshape(tl.broadcast_to(tl.reshape({env[i]}, [{height}, {count}, 1]), [{height}, {count}, {size}]), {spot.shape})"

    def _node(self, i: int, spot: Spot, env: Env) -> None:
        node = self.program.nodes[i]
        hint = self.names[i] + spot.tag
        match node:
            case Const():
                scaled = "" if node.scale == 1 else f" * {size_text(node.scale)}"
                env[i] = f"({typed_literal(node.value, node.dtype)}{scaled})" if scaled else typed_literal(node.value, node.dtype)
            case Index():
                env[i] = self._assign(hint, self._index(i, node, spot), node.src)
            case Load():
                if (i, spot.tag) in self.kept and self.in_row_loop:
                    env[i] = self._opaque(i, self.kept[(i, spot.tag)], spot)
                elif (i, spot.tag) in self.kept:
                    env[i] = self.kept[(i, spot.tag)]
                else:
                    env[i] = self._assign(hint, self._load(i, node, spot, env), node.src)
            case Op():
                env[i] = self._assign(hint, self._op(i, node, spot, env), node.src)
            case Reduce():
                self._block_reduce(i, node, spot, env)
            case Result():
                env[i] = self.results[node.reduce][node.k]
            case Store():
                self._store(i, node, spot, env)

    def _op(self, i: int, node: Op, spot: Spot, env: Env) -> str:
        constant = all(isinstance(self.program.nodes[a], Const) for a in node.args)
        full = self.kernel.by_col[i] is Across.FULL
        args = [self._as_full(a, spot, env) if full and self.kernel.by_col[a] is Across.BLOCK else env[a] for a in node.args]
        if constant or (len(args) == 1 and isinstance(self.program.nodes[node.args[0]], Const)):
            args = [self._tensor(a, t) for a, t in zip(node.args, args)]
        elif node.name in ("maximum", "minimum", "pow", "where"):
            args = [self._tensor(a, t) for a, t in zip(node.args, args)]
        return op_text(node.name, tuple(args), self.program.dtypes[i])

    def _index(self, i: int, node: Index, spot: Spot) -> str:
        extents = [self.program.axis[a].extent for a in node.axes]
        strides = tuple((axis, product(extents[k + 1 :])) for k, axis in enumerate(node.axes))
        text = " + ".join(self._offsets(strides, spot, i)) or "0"
        compared = all(isinstance(u := self.program.nodes[x], Op) and u.name in COMPARISONS for x in self.program.users[i])
        zero = "" if text != "0" else " + tl.zeros([1, 1], tl.int32)"
        return f"({text}{zero})" + (".to(tl.int64)" if node.dtype is I64 and not compared else "")

    def _offsets(self, strides: tuple[tuple[str, object], ...], spot: Spot, i: int) -> list[str]:
        space = self.kernel.space
        block_level = self.kernel.by_col[i] is Across.BLOCK
        cols = tuple(a for a in space.cols if a not in space.block) if block_level else space.cols
        col = self._block_index(spot) if block_level else spot.col
        mine = PART in self.program.axis and PART not in (*space.rows, *space.cols, *space.batch)
        sides = ((space.batch, "batch"), (space.rows, spot.row), (cols, col), ((PART,) if mine else (), PART))
        return [run_text(index, run) for side, index in sides for run in runs(self.program, side, strides)]  # type: ignore[arg-type]

    def _block_index(self, spot: Spot) -> str:
        count = spot.width // self._block_size
        return f"({spot.col_start} // {self._block_size} + tl.arange(0, {count})[None, :])"

    def _address(self, i: int, node: Load | Store, spot: Spot) -> str:
        parts: list[str]
        if spot.aligned and self._follows_lead(node):
            parts = ["sector", spot.aligned]
        else:
            parts = self._offsets(node.strides, spot, i)
        if node.offset != 0:
            parts.append(size_text(node.offset))
        return " + ".join(parts)

    def _follows_lead(self, node: Load | Store) -> bool:
        aligned = isinstance(node.offset, int) and node.offset % self.schedule.lead == 0
        return aligned and streams_rows(self.kernel, node) == self.lead_stride

    def _masks(self, i: int, spot: Spot) -> list[str]:
        rows, cols = self.kernel.by_row[i], self.kernel.by_col[i]
        found = [spot.row_mask] if rows and spot.row_mask else []
        if cols is Across.FULL and spot.col_mask:
            found.append(spot.col_mask)
        if cols is Across.BLOCK and spot.col_mask:
            blocks = self.program.extent(tuple(a for a in self.kernel.space.cols if a not in self.kernel.space.block))
            found.append(f"({self._block_index(spot)} < {size_text(blocks)})")
        return found

    def _load(self, i: int, node: Load, spot: Spot, env: Env) -> str:
        where = self._address(i, node, spot)
        masks = self._masks(i, spot)
        for gather in node.gathers:
            at = env[gather.index]
            step = "" if gather.stride == 1 else f" * {size_text(gather.stride)}"
            where = f"{where} + {at}{step}" if where else f"{at}{step}"
            masks.append(f"({at} >= 0) & ({at} < {size_text(gather.extent)})")
        if self.kernel.by_col[i] is Across.FULL and not self.kernel.by_row[i] and spot.height > 1:
            # Shaped like the tiles it meets: a [1, width] load would get narrow accesses and a layout change.
            where = f"{where} + tl.zeros([{spot.height}, 1], tl.int32)"
        pointer = f"{node.buffer}_ptr" + (f" + ({where})" if where else "")
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        return f"tl.load({pointer}{mask})"

    def _store(self, i: int, node: Store, spot: Spot, env: Env) -> None:
        where = self._address(i, node, spot)
        if not self.kernel.by_row[i] and (spot.height > 1 or self.kernel.by_col[i] is Across.NONE):
            where = f"{where + ' + ' if where else ''}tl.zeros([{spot.height}, 1], tl.int32)"
        masks = self._masks(i, spot)
        mask = f", mask={' & '.join(masks)}" if masks else ""
        stored = self._as_full(node.value, spot, env) if self.kernel.by_col[i] is Across.FULL else self._tensor(node.value, env[node.value])
        self.w.line(f"tl.store({node.buffer}_ptr + ({where}), {stored}{mask})", node.src)


def _count_text(dim: GridDim) -> str:
    if isinstance(dim.extent, int):
        return str(-(-dim.extent // dim.step))
    return size_text(dim.extent) if dim.step == 1 else f"tl.cdiv({size_text(dim.extent)}, {dim.step})"


def _strided_cols(kernel: Kernel, node: Node) -> bool:
    return isinstance(node, (Load, Store)) and any(a in kernel.space.cols and s != 1 for a, s in node.strides)


_TARGET = re.compile(r"^\S+ (\w+) = ")


def _names(program) -> tuple[str, ...]:  # type: ignore[no-untyped-def]
    """What each value is called: as the user called it where a source line ends in it, else after its buffer or op."""
    last = {n.src: i for i, n in enumerate(program.nodes) if n.src and isinstance(n, (Op, Load))}
    found = []
    for i, node in enumerate(program.nodes):
        target = _TARGET.match(node.src)
        if target and last.get(node.src) == i and not target[1].startswith("tl"):
            found.append(target[1])
        else:
            match node:
                case Load(buffer=buffer):
                    found.append(buffer)
                case Op(name=name):
                    found.append(f"{name}{i}")
                case Reduce(monoid=monoid):
                    found.append(f"{monoid.replace('.', '_')}{i}")
                case _:
                    found.append(f"v{i}")
    return tuple(found)
