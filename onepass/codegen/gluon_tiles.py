"""Steps -> Gluon source, for column reductions whose input tiles are staged in shared memory.

A CTA owns a block of columns and walks its share of the rows. TMA fills the slots of a ring with tiles of all inputs, one mbarrier
per slot. Threads read a tile strip by strip, fold the elements they hold, and merge the result into their own states. A slot is
refilled as soon as all threads have read it. Threads exchange states once, after the last tile. Rows past the end arrive as zeros.
Only the last tile can have such rows, so it is emitted separately, with a mask.

Beyond the part of Gluon that `gluon` uses, this text uses:

- tensors of several rows: [height, width], [height, 1] and their folds along axis 0
- `.reshape(shape)` of a tensor to three axes and back, where each thread holds the whole first axis; folds along that axis
- `gl.convert_layout(x, TILE, assert_trivial=True)` of the result, which asserts that no data moves between threads
- copies that cross the end of a tensor, along rows and columns
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.expr import F32
from ..ir.monoid import State, Value
from ..ir.program import Load
from ..ir.size import Bindings
from ..plan.kernel import Across, Fold, Kernel
from ..plan.schedule import Schedule, StagedTiles
from ..plan.staged_tiles import Strips, strips
from ..plan.thread_layout import access_vector
from .expr import GLUON, TileAlgebra, size_text
from .folds import Folds, Running
from .gluon_ring import RingEmitter
from .source import GridDim, Param, Source
from .steps import Steps, steps
from .tile_refs import TileRef
from .values import Env, Values, fold_text

# With at least this many rows per merge, a variance needs no compensation: it rounds no more than tiles of 64 rows do. Mean of
# 65536 fp16 rows around 3, in 16 states: error 3.6e-7 with 4 rows per merge, 7.4e-7 with one.
MIN_ROWS_PER_MERGE = 4
OWN_NAMES = ("tile", "tile_count", "whole_tiles", "first_col", "r_in")


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel that stages tiles. `wide` selects 64-bit element indices."""
    return _Emitter(kernel, schedule, bindings, name, wide).source()


class _StagedTileValues(Values):
    """Values of which some are staged in shared memory."""

    places: dict[int, str]  # the current strip of each staged load

    def _load(self, i: int, node: Load, ref: TileRef, env: Env) -> str:
        place = self.places.get(i)
        return f"{place}.load(TILE)" if place else super()._load(i, node, ref, env)


@dataclass(frozen=True)
class _WithinThreads(TileAlgebra):
    """Folds the elements that a thread holds. Constants stay literals, so every name is a tensor."""

    rows_per_thread: int = 1

    def fold(self, kind: str, value: Value) -> Value:
        if isinstance(value, str):
            return super().fold(kind, value)
        return value * self.rows_per_thread if kind == "sum" else value


class _ThreadFolds(Folds):
    """Reductions in which each thread keeps a state per column until the last row."""

    strips: Strips

    def running(self, fold: Fold) -> Running:
        """A reduction before its first element. Variances that merge every one or two rows use compensated summation."""
        found = super().running(fold)
        often = found.monoid.tracks_count and found.dtype is F32 and self.strips.rows_per_thread < MIN_ROWS_PER_MERGE
        return replace(found, compensated=found.compensated or often)

    def _running_shape(self, running: Running, ref: TileRef) -> str:
        return f"[{self.strips.rows_per_step}, {self._entering_shape(running, ref)[1]}]"

    def key(self, running: Running, ref: TileRef) -> str:
        """All strips update one state."""
        return ""

    def _tile_state(self, running: Running, entered: State, ref: TileRef, algebra: TileAlgebra) -> State:
        """One state of the elements that a thread holds of a strip: fewer merges than one per element, and less rounding.

        A thread holds the whole first of the three axes, so folding it moves no data between threads.
        """
        each, assign = self.strips.rows_per_thread, self.values.assign
        if each == 1:
            return entered
        shape = [self.strips.rows_per_step, self._entering_shape(running, ref)[1]]
        held = (assign("held", f"{x}.reshape({[each, *shape]})") if isinstance(x, str) else x for x in entered)
        within = _WithinThreads(assign, lambda kind, text: fold_text(kind, text, 0, self.language), lambda: str(each),
                                running.exact, self.language, each)
        return tuple(assign("own", f"gl.convert_layout({x}.reshape({shape}), TILE, assert_trivial=True)") if isinstance(x, str)
                     else x for x in running.monoid.merge(within, *held))

    def _broadcast(self, i: int, running: Running, ref: TileRef, env: Env) -> str:
        """A value in the shape of the other operands, because another shape would get another layout when it is reshaped."""
        text, (height, width) = super()._broadcast(i, running, ref, env), self._entering_shape(running, ref)
        if self.kernel.by_col[i] is Across.NONE and width > 1 and self.strips.rows_per_thread > 1:
            return self.values.assign("spread", self.language.broadcast(text, f"[{height}, {width}]"))
        return text

    def _fold_lanes(self, running: Running, key: str, state: State, algebra: TileAlgebra) -> State:
        return running.monoid.merge(algebra, *state)


class _Emitter(RingEmitter):
    def __init__(self, kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool) -> None:
        assert isinstance(schedule, StagedTiles)
        super().__init__(kernel, schedule, name, wide, OWN_NAMES)
        self.tall, self.split, self.width = schedule.step, schedule.split, schedule.width
        self.element_bytes = sum(self.program.dtypes[i].size for i in schedule.staged)
        self.strips = strips(schedule, access_vector(kernel, schedule))
        self.steps: Steps = steps(kernel, schedule)
        named = {i: self._load_of(i).buffer for i in sorted(schedule.staged)}
        self.maps = {i: self.w.fresh(f"{name}_tiles") for i, name in named.items()}
        self.rings = {i: self.w.fresh(f"{name}_ring") for i, name in named.items()}
        one = self.strips.count == 1
        self.parts = {i: self.rings[i] if one else self.w.fresh(f"{name}_strips") for i, name in named.items()}
        self.values = _StagedTileValues(kernel, schedule, bindings, self.w, GLUON)
        self.values.places = {i: f"{part}.index({'slot' if one else 'place + k'})" for i, part in self.parts.items()}
        self.folds = _ThreadFolds(kernel, self.values, row_loop=False)
        self.folds.strips = self.strips

    # ---- the whole kernel ----------------------------------------------------------------------------------------------

    def _maps(self) -> list[Param]:
        return [self._map(i, name, (self.tall, self.width)) for i, name in self.maps.items()]

    def _grid(self) -> tuple[GridDim, ...]:
        return GridDim(self.extent, self.width), GridDim(self.split)

    def _body(self) -> None:
        self._place()
        self._allocate()
        with self.w.block(f"for slot_early in gl.static_range({self.slots})"):
            self._fill("early", "early_inside", "slot_early", f"part + slot_early * {self.split}")
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
        if self.wide:
            self.w.line("part = part.to(gl.int64)")
        for i in self.steps.trailing:
            self.values.node(i, ref, env)

    def _place(self) -> None:
        """Name this CTA's columns and its share of the rows. TMA coordinates have 32 bits."""
        s, line, rows = self.strips, self.w.line, size_text(self.rows)
        layout = f"[1, {s.vector}], [{32 // s.lanes}, {s.lanes}], [{s.down}, {s.across}], [1, 0]"
        line(f"TILE: gl.constexpr = gl.BlockedLayout({layout})")
        line(f"row_count = ({rows}).to(gl.int32)" if self.wide and not isinstance(self.rows, int) else f"row_count = {rows}")
        line(f"whole_tiles = row_count // {self.tall}")
        line(f"tile_count = (row_count + {self.tall - 1}) // {self.tall}")
        blocks = -(-self.extent // self.width)
        line(f"first_col = gl.program_id(0) % {blocks} * {self.width}")
        line(f"part = gl.program_id(0) // {blocks}")

    def _allocate(self) -> None:
        """Allocate rings, with views by tile and by strip, and mbarriers."""
        for i, ring in self.rings.items():
            dtype, layout = f"gl.{self.program.dtypes[i].kernel}", f"{self.maps[i]}.layout"
            self.w.line(f"{ring} = gl.allocate_shared_memory({dtype}, {[self.slots, self.tall, self.width]}, {layout})")
            if self.strips.count > 1:
                shape = [self.slots * self.strips.count, self.strips.height, self.width]
                self.w.line(f"{self.parts[i]} = {ring}._reinterpret({dtype}, {shape}, {layout})")
        self._barriers(self.slots)

    def _columns(self) -> TileRef:
        """This CTA's columns, without rows."""
        wide = ".to(gl.int64)" if self.wide else ""
        self.w.line(f"lanes = gl.arange(0, {self.strips.height}, layout=gl.SliceLayout(1, TILE))[:, None]")
        self.w.line(f"c = (first_col + gl.arange(0, {self.width}, layout=gl.SliceLayout(0, TILE))[None, :]){wide}")
        if self.extent % self.width == 0:
            return TileRef(col="c", width=self.width, col_start="first_col")
        self.w.line(f"c_in = c < {self.extent}")
        return TileRef(col="c", width=self.width, col_mask="c_in", col_start="first_col")

    # ---- tiles ---------------------------------------------------------------------------------------------------------

    def _turns(self, columns: TileRef, env: Env, running: dict[int, Running]) -> None:
        """All tiles of this CTA: whole tiles, then the partial last tile if this CTA owns it."""
        self.w.line("turn = 0")
        with self.w.block(f"for tile in range(part, whole_tiles, {self.split})"):
            self._turn(columns, env, running, masked=False)
        if isinstance(self.rows, int) and self.rows % self.tall == 0:
            return
        turns = f"(whole_tiles - part + {self.split - 1}) // {self.split}"
        after = "whole_tiles" if self.split == 1 else f"part + {turns} * {self.split}"
        with self.w.block(f"for tile in range({after}, tile_count, {self.split})"):
            self._turn(columns, env, running, masked=True)

    def _turn(self, columns: TileRef, env: Env, running: dict[int, Running], masked: bool) -> None:
        """Wait for a tile, read it, and refill its slot."""
        w, count = self.w, self.strips.count
        w.line(f"slot = turn % {self.slots}")
        w.line(f"mbarrier.wait(ready.index(slot), {self._phase()})")
        if count == 1:
            self._strip("", columns, dict(env), running, masked)
        else:
            w.line("cta_barrier()")  # without this barrier Triton inserts one per strip
            w.line(f"place = slot * {count}")
            # The compiler must not know the trip count: it would unroll the loop and load all strips of a tile before adding any.
            with w.block(f"for k in range(0, {count} + zero)"):
                self._strip(f" + k * {self.strips.height}", columns, dict(env), running, masked)
        self._release()
        self._fill("ahead", "inside", "slot", f"tile + {self.slots * self.split}")
        w.line("turn += 1")

    def _strip(self, below: str, columns: TileRef, env: Env, running: dict[int, Running], masked: bool) -> None:
        """One strip of a tile: compute its values and update the reductions."""
        walk, wide = self.steps.walks[0], ".to(gl.int64)" if self.wide else ""
        self.w.line(f"r_at = (tile * {self.tall}{below} + lanes){wide}")
        if masked:
            self.w.line("r_in = r_at < row_count")
        rows = TileRef(row="r_at", height=self.strips.height, row_mask="r_in" if masked else None)
        ref = columns.at_rows(rows)
        for i in walk.body:
            self.values.node(i, ref, env)
        for fold in walk.folds:
            self.folds.feed(running[fold.node], ref, env, unrolled=False)

    def _fill(self, tile: str, inside: str, slot: str, number: str) -> None:
        """Issue the copies of a tile of every input, if the tile exists."""
        self.w.line(f"{tile} = {number}")
        self.w.line(f"{inside} = {tile} < tile_count")
        self.w.line(f"mbarrier.expect(ready.index({slot}), {self.tall * self.width * self.element_bytes}, pred={inside})")
        for i, ring in self.rings.items():
            into = f"[{tile} * {self.tall}, first_col], ready.index({slot}), {ring}.index({slot})"
            self.w.line(f"tma.async_copy_global_to_shared({self.maps[i]}, {into}, pred={inside})")
