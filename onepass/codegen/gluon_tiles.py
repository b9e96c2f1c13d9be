"""Steps -> Gluon source, for column reductions whose input tiles are staged in shared memory.

A CTA owns a block of columns and walks its share of the rows. TMA fills the slots of a ring with tiles of all inputs, one mbarrier
per slot. Threads read a tile strip by strip, fold the elements they hold, and merge the result into their own states. A slot is
refilled as soon as all threads have read it. Threads exchange states once, after the last tile. Rows past the end arrive as zeros.
Only the last tile can have such rows, so it is emitted separately, with a mask.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import F32
from ..ir.monoid import State
from ..ir.size import Bindings
from ..plan.kernel import Across, Fold, Kernel
from ..plan.schedule import Schedule, StagedTiles
from ..plan.staging.tiles import Strips, strips_of
from ..plan.thread_layout import access_vector
from .expr import GLUON, TileAlgebra
from .folds import Folds, Key, Running
from .kernel_ir import (
    Advance,
    Alloc,
    CopyAsync,
    CtaBarrier,
    Expect,
    Expr,
    For,
    Layout,
    Name,
    Release,
    SharedLoad,
    Slot,
    TileFold,
    View,
    Wait,
)
from .kernel_ir import Loop as LoopKind
from .memory import Env, Memory
from .names import SPLIT
from .printer import Lowered
from .rings import end_barriers, make_barriers, parity
from .row_access import columns
from .row_copies import READY, FillNames
from .scope import Scope
from .source import GridDim
from .steps import Steps, steps
from .tile_refs import TileRef
from .values import Unstaged, Values

# With at least this many rows per merge, a variance needs no compensation: it rounds no more than tiles of 64 rows do. Mean of
# 65536 fp16 rows around 3, in 16 states: error 3.6e-7 with 4 rows per merge, 7.4e-7 with one.
MIN_ROWS_PER_MERGE = 4

FIRST_TILES = FillNames(Name("prologue_tile"), Name("prologue_in"), Name("prologue_slot"), Name("prologue_j"))
NEXT_TILE = FillNames(Name("prefetch_tile"), Name("prefetch_in"), Name("slot"), Name("j"))


def lower(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Lowered:
    """One kernel that stages tiles."""
    scope = Scope(kernel, schedule, name, wide)
    return _StagedTiles(scope, Memory(kernel, schedule, bindings, GLUON)).lowered()


class StripReads(Unstaged):
    """Reads the current strip of each staged load."""

    def __init__(self, places: dict[int, Slot]) -> None:
        self._places = places

    def read(self, i: int, ref: TileRef) -> SharedLoad | None:
        """The strip of a staged load."""
        return SharedLoad(self._places[i]) if i in self._places else None


class ThreadFolds(Folds):
    """Reductions in which each thread keeps a state per column until the last row."""

    def __init__(self, kernel: Kernel, values: Values, strips: Strips) -> None:
        super().__init__(kernel, values, row_loop=False)
        self.strips = strips

    def running(self, fold: Fold) -> Running:
        """A reduction before its first element. Variances that merge every one or two rows use compensated summation."""
        found = super().running(fold)
        often = found.monoid.tracks_count and found.dtype is F32 and self.strips.rows_per_thread < MIN_ROWS_PER_MERGE
        return replace(found, compensated=found.compensated or often)

    def _running_shape(self, running: Running, ref: TileRef) -> tuple[int, ...]:
        return self.strips.rows_per_step, self._entering_shape(running, ref)[1]

    def key(self, running: Running, ref: TileRef) -> str:
        """All strips update one state."""
        return ""

    def _tile_state(self, running: Running, entered: State, ref: TileRef, algebra: TileAlgebra) -> State:
        """One state of the elements that a thread holds of a strip: fewer merges than one per element, and less rounding.

        A thread holds the whole first of the three axes, so folding it moves no data between threads.
        """
        each, assign = self.strips.rows_per_thread, self.builder.assign
        if each == 1:
            return entered
        shape = [self.strips.rows_per_step, self._entering_shape(running, ref)[1]]
        held = (assign("held", f"{x}.reshape({[each, *shape]})") if isinstance(x, str) else x for x in entered)
        within = TileAlgebra(
            assign, lambda kind, value: TileFold(kind, value, (0,)), each, running.exact, self.fold_name(running, "_thread")
        )
        return tuple(
            assign("own", f"gl.convert_layout({x}.reshape({shape}), TILE, assert_trivial=True)") if isinstance(x, str) else x
            for x in running.monoid.merge(within, *held)
        )

    def _broadcast(self, i: int, running: Running, ref: TileRef, env: Env) -> str:
        """A value in the shape of the other operands, because another shape would get another layout when it is reshaped."""
        text, (height, width) = super()._broadcast(i, running, ref, env), self._entering_shape(running, ref)
        if self.kernel.by_col[i] is Across.NONE and width > 1 and self.strips.rows_per_thread > 1:
            return self.builder.assign("spread", self.language.broadcast(text, f"[{height}, {width}]"))
        return text

    def _fold_lanes(self, running: Running, key: Key, state: State, algebra: TileAlgebra) -> State:
        return running.monoid.merge(algebra, *state)


class _StagedTiles:
    """Builds a kernel that stages tiles."""

    def __init__(self, scope: Scope, memory: Memory) -> None:
        schedule = scope.schedule
        assert isinstance(schedule, StagedTiles)
        self.scope, self.builder, self.slots = scope, scope.builder, schedule.stages
        self.tall, self.split, self.width = schedule.step, schedule.split, schedule.width
        self.element_bytes = sum(scope.program.dtypes[i].size for i in schedule.staged)
        self.strips = strips_of(schedule, access_vector(scope.kernel, schedule))
        self.steps: Steps = steps(scope.kernel, schedule)
        fresh, loads = self.builder.fresh, {i: scope.load_of(i).buffer for i in sorted(schedule.staged)}
        self.maps = {i: fresh(f"{name}_tiles") for i, name in loads.items()}
        self.rings = {i: fresh(f"{name}_ring") for i, name in loads.items()}
        one = self.strips.count == 1
        self.parts = {i: self.rings[i] if one else fresh(f"{name}_strips") for i, name in loads.items()}
        places = {i: Slot(part, "slot" if one else "first_strip + k") for i, part in self.parts.items()}
        self.values = Values(memory, self.builder, StripReads(places))
        self.folds = ThreadFolds(scope.kernel, self.values, self.strips)

    # ---- the whole kernel ----------------------------------------------------------------------------------------------

    def lowered(self) -> Lowered:
        """The whole kernel."""
        self._place()
        self._allocate()
        with self.builder.block(For(FIRST_TILES.slot, "", str(self.slots), kind=LoopKind.UNROLLED)):
            self._fill(FIRST_TILES, f"{SPLIT} + prologue_slot * {self.split}")
        ref = self._columns()
        walk, env = self.steps.walks[0], Env()
        for i in walk.uniform:
            self.values.node(i, ref, env)
        running = {f.node: self.folds.running(f) for f in walk.folds}
        for state in running.values():
            self.folds.start(state, [ref])
        self._turns(ref, env, running)
        for state in running.values():
            self.folds.finish(state, ref)
        if self.scope.wide:
            self.builder.set(SPLIT, f"{SPLIT}.to(gl.int64)")
        for i in self.steps.trailing:
            self.values.node(i, ref, env)
        end_barriers(self.builder, self.slots)
        maps = [self.scope.tensor_map(i, name, (self.tall, self.width)) for i, name in self.maps.items()]
        return self.scope.lowered(maps, (GridDim(self.scope.extent, self.width), GridDim(self.split)))

    def _place(self) -> None:
        """Name this CTA's columns and its share of the rows."""
        s, put = self.strips, self.builder.set
        self.builder.add(Layout(Name("TILE"), (1, s.vector), (32 // s.lanes, s.lanes), (s.down, s.across)))
        self.scope.count_rows()
        put("whole_tiles", f"row_count // {self.tall}")
        put("tile_count", f"(row_count + {self.tall - 1}) // {self.tall}")
        blocks = -(-self.scope.extent // self.width)
        put("first_col", f"gl.program_id(0) % {blocks} * {self.width}")
        put(SPLIT, f"gl.program_id(0) // {blocks}")

    def _allocate(self) -> None:
        """Allocate rings, with views by tile and by strip, and mbarriers."""
        for i, ring in self.rings.items():
            dtype, layout = self.scope.program.dtypes[i].kernel, f"{self.maps[i]}.layout"
            self.builder.add(Alloc(ring, dtype, (self.slots, self.tall, self.width), layout))
            if self.strips.count > 1:
                shape = (self.slots * self.strips.count, self.strips.height, self.width)
                self.builder.add(View(self.parts[i], ring, dtype, shape, layout))
        make_barriers(self.builder, self.slots)

    def _columns(self) -> TileRef:
        """This CTA's columns, without rows."""
        put, extent = self.builder.set, self.scope.extent
        put("lanes", f"gl.arange(0, {self.strips.height}, layout=gl.SliceLayout(1, TILE))[:, None]")
        cols = columns("first_col", self.width)
        put("cols", f"({cols}).to(gl.int64)" if self.scope.wide else cols)
        if extent % self.width == 0:
            return TileRef(col="cols", width=self.width, col_start="first_col")
        mask = put("cols_in", f"cols < {extent}")
        return TileRef(col="cols", width=self.width, col_mask=(mask,), col_start="first_col")

    # ---- tiles ---------------------------------------------------------------------------------------------------------

    def _turns(self, columns: TileRef, env: Env, running: dict[int, Running]) -> None:
        """All tiles of this CTA: whole tiles, then the partial last tile if this CTA owns it."""
        self.builder.set("iteration", "0")
        with self.builder.block(For(Name("tile"), SPLIT, "whole_tiles", self.split)):
            self._turn(columns, env, running, masked=False)
        if isinstance(self.scope.rows, int) and self.scope.rows % self.tall == 0:
            return
        turns = f"(whole_tiles - {SPLIT} + {self.split - 1}) // {self.split}"
        after = "whole_tiles" if self.split == 1 else f"{SPLIT} + {turns} * {self.split}"
        with self.builder.block(For(Name("tile"), after, "tile_count", self.split)):
            self._turn(columns, env, running, masked=True)

    def _turn(self, columns: TileRef, env: Env, running: dict[int, Running], masked: bool) -> None:
        """Wait for a tile, read it, and refill its slot."""
        builder, count = self.builder, self.strips.count
        builder.set("slot", f"iteration % {self.slots}")
        builder.add(Wait(Slot(READY, "slot"), parity("iteration", self.slots)))
        if count == 1:
            self._strip("", columns, dict(env), running, masked)
        else:
            builder.add(CtaBarrier())  # without this barrier Triton inserts one per strip
            builder.set("first_strip", f"slot * {count}")
            # The compiler must not know the trip count: it would unroll the loop and load all strips of a tile before adding any.
            with builder.block(For(Name("k"), "0", f"{count} + zero")):
                self._strip(f" + k * {self.strips.height}", columns, dict(env), running, masked)
        builder.add(Release())
        self._fill(NEXT_TILE, f"tile + {self.slots * self.split}")
        builder.add(Advance(Name("iteration"), 1))

    def _strip(self, below: Expr, columns: TileRef, env: Env, running: dict[int, Running], masked: bool) -> None:
        """One strip of a tile: compute its values and update the reductions."""
        walk, rows_at = self.steps.walks[0], f"tile * {self.tall}{below} + lanes"
        self.builder.set("rows", f"({rows_at}).to(gl.int64)" if self.scope.wide else rows_at)
        mask = (self.builder.set("rows_in", "rows < row_count"),) if masked else ()
        rows = TileRef(row="rows", height=self.strips.height, row_mask=mask)
        ref = columns.at_rows(rows)
        for i in walk.body:
            self.values.node(i, ref, env)
        for fold in walk.folds:
            self.folds.feed(running[fold.node], ref, env, unrolled=False)

    def _fill(self, names: FillNames, tile: Expr) -> None:
        """Issue the copies of a tile of every input, if the tile exists."""
        self.builder.set(names.row, tile)
        self.builder.set(names.inside, f"{names.row} < tile_count")
        ready = Slot(READY, names.slot)
        self.builder.add(Expect(ready, self.tall * self.width * self.element_bytes, names.inside))
        for i, ring in self.rings.items():
            where = f"{names.row} * {self.tall}", "first_col"
            self.builder.add(CopyAsync(self.maps[i], where, ready, Slot(ring, names.slot), names.inside))
