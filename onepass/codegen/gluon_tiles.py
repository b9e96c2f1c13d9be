"""Steps -> Gluon source, for reductions down the columns whose rows come through shared memory, tile by tile.

A CTA owns some columns and walks its share of the rows. TMA fills the places of a ring with tiles of all inputs, one barrier for
each place; threads read a tile strip by strip, fold what they hold of it by themselves, and join that to states of their own. A
place is filled again, as many turns ahead as the ring has places, as soon as all threads have read it. Threads meet once, behind
the last tile. Rows past the end arrive as zeros: only the last tile can have some, and it is written apart, with a mask.

Beside what the text of `gluon` uses, this text uses so much more of Gluon:

- tensors of several rows: [height, width], [height, 1] and their folds along axis 0
- `.reshape(shape)` of a tensor, to three axes of which every thread holds the first whole, and back; folds along that axis
- `gl.convert_layout(x, TILE, assert_trivial=True)` of what comes back: the compiler is held to moving nothing
- copies that cross the end of a tensor, along rows and columns
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.expr import F32
from ..ir.monoid import State, Value
from ..ir.program import Load
from ..ir.size import Bindings
from ..plan.kernel import Across, Fold, Kernel
from ..plan.schedule import Block, Loop, Schedule
from ..plan.staged_tiles import Strips, strips, tile_stageable
from ..plan.thread_layout import widest
from .expr import GLUON, TileAlgebra, size_text
from .folds import Folds, Running
from .gluon_ring import RingEmitter
from .source import GridDim, Param, Source
from .steps import Steps, steps
from .tile_refs import TileRef
from .values import Env, Values, fold_text

# Rows that enter a variance at once with no more rounding than tiles of 64 rows have: 65536 rows of fp16 around 3, in 16 states,
# are 3.6e-7 off in their mean by fours, 7.4e-7 one by one.
LEAST_TOGETHER = 4
OWN_NAMES = ("tile", "tile_count", "whole_tiles", "first_col", "r_in")


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel that walks tiles in shared memory; `wide` makes it count elements in 64 bits."""
    return _Emitter(kernel, schedule, bindings, name, wide).source()


class _StagedTileValues(Values):
    """Values of which some wait in shared memory."""

    places: dict[int, str]  # the strip of each parked load that is being read

    def _load(self, i: int, node: Load, ref: TileRef, env: Env) -> str:
        place = self.places.get(i)
        return f"{place}.load(TILE)" if place else super()._load(i, node, ref, env)


@dataclass(frozen=True)
class _WithinThreads(TileAlgebra):
    """Folds what a thread holds. Numbers stay numbers, so that what has a name is a tensor."""

    each: int = 1

    def fold(self, kind: str, value: Value) -> Value:
        if isinstance(value, str):
            return super().fold(kind, value)
        return value * self.each if kind == "sum" else value


class _ThreadFolds(Folds):
    """Reductions of which every thread keeps a state for each of its columns, until all rows are walked."""

    strips: Strips

    def running(self, fold: Fold) -> Running:
        """A reduction that nothing has entered yet. Variances that are joined for every row or two remember what rounding takes."""
        found = super().running(fold)
        often = found.monoid.tracks_count and found.dtype is F32 and self.strips.each < LEAST_TOGETHER
        return replace(found, compensated=found.compensated or often)

    def _running_shape(self, running: Running, ref: TileRef) -> str:
        return f"[{self.strips.at_once}, {self._entering_shape(running, ref)[1]}]"

    def key(self, running: Running, ref: TileRef) -> str:
        """One state serves all strips."""
        return ""

    def _tile_state(self, running: Running, entered: State, ref: TileRef, algebra: TileAlgebra) -> State:
        """What a thread holds of a strip, as one state: fewer joins than by element, and less rounding.

        The first of three axes is what a thread holds of a column, so folding it moves nothing between threads.
        """
        each, assign = self.strips.each, self.values.assign
        if each == 1:
            return entered
        shape = [self.strips.at_once, self._entering_shape(running, ref)[1]]
        held = (assign("held", f"{x}.reshape({[each, *shape]})") if isinstance(x, str) else x for x in entered)
        within = _WithinThreads(assign, lambda kind, text: fold_text(kind, text, 0, self.language), lambda: str(each),
                                running.exact, self.language, each)
        return tuple(assign("own", f"gl.convert_layout({x}.reshape({shape}), TILE, assert_trivial=True)") if isinstance(x, str)
                     else x for x in running.monoid.merge(within, *held))

    def _broadcast(self, i: int, running: Running, ref: TileRef, env: Env) -> str:
        """A value in the shape of all that enters with it, or it would lie otherwise when it is seen by threads."""
        text, (height, width) = super()._broadcast(i, running, ref, env), self._entering_shape(running, ref)
        if self.kernel.by_col[i] is Across.NONE and width > 1 and self.strips.each > 1:
            return self.values.assign("spread", self.language.broadcast(text, f"[{height}, {width}]"))
        return text

    def _fold_lanes(self, running: Running, key: str, state: State, algebra: TileAlgebra) -> State:
        return running.monoid.merge(algebra, *state)


class _Emitter(RingEmitter):
    def __init__(self, kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool) -> None:
        assert isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Block)
        assert schedule.staged and schedule.staged == set(tile_stageable(kernel)), "all that is full-size comes through the ring"
        super().__init__(kernel, schedule, name, wide, OWN_NAMES)
        self.tall, self.split, self.width = schedule.rows.step, schedule.rows.split, schedule.cols.size
        self.element_bytes = sum(self.program.dtypes[i].size for i in schedule.staged)
        self.strips = strips(schedule, widest(kernel), self.element_bytes)
        self.steps: Steps = steps(kernel, schedule)
        assert len(self.steps.walks) == 1
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
        """Which columns and which share of the rows are this CTA's. TMA counts in 32 bits."""
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
        """Rings, seen by tiles and by strips, and barriers."""
        for i, ring in self.rings.items():
            dtype, layout = f"gl.{self.program.dtypes[i].kernel}", f"{self.maps[i]}.layout"
            self.w.line(f"{ring} = gl.allocate_shared_memory({dtype}, {[self.slots, self.tall, self.width]}, {layout})")
            if self.strips.count > 1:
                shape = [self.slots * self.strips.count, self.strips.height, self.width]
                self.w.line(f"{self.parts[i]} = {ring}._reinterpret({dtype}, {shape}, {layout})")
        self._barriers(self.slots)

    def _columns(self) -> TileRef:
        """This CTA's columns, of no row in particular."""
        wide = ".to(gl.int64)" if self.wide else ""
        self.w.line(f"lanes = gl.arange(0, {self.strips.height}, layout=gl.SliceLayout(1, TILE))[:, None]")
        self.w.line(f"c = (first_col + gl.arange(0, {self.width}, layout=gl.SliceLayout(0, TILE))[None, :]){wide}")
        if self.extent % self.width == 0:
            return TileRef(col="c", width=self.width, col_start="first_col")
        self.w.line(f"c_in = c < {self.extent}")
        return TileRef(col="c", width=self.width, col_mask="c_in", col_start="first_col")

    # ---- turns ---------------------------------------------------------------------------------------------------------

    def _turns(self, columns: TileRef, env: Env, running: dict[int, Running]) -> None:
        """All tiles of this CTA: whole ones, then the last of all if it is this CTA's and not whole."""
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
        """Wait for a tile, read it, and ask for another in its place."""
        w, count = self.w, self.strips.count
        w.line(f"slot = turn % {self.slots}")
        w.line(f"mbarrier.wait(ready.index(slot), {self._phase()})")
        if count == 1:
            self._strip("", columns, dict(env), running, masked)
        else:
            w.line("cta_barrier()")  # said here once, or the compiler says one for every strip
            w.line(f"place = slot * {count}")
            # A count that the compiler does not know: else it unrolls the loop, and loads all strips of a tile before it adds any.
            with w.block(f"for k in range(0, {count} + zero)"):
                self._strip(f" + k * {self.strips.height}", columns, dict(env), running, masked)
        self._release()
        self._fill("ahead", "inside", "slot", f"tile + {self.slots * self.split}")
        w.line("turn += 1")

    def _strip(self, below: str, columns: TileRef, env: Env, running: dict[int, Running], masked: bool) -> None:
        """One strip of a tile: its values, and what they add to the reductions."""
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
        """Ask for a tile of every input, if there is such a tile."""
        self.w.line(f"{tile} = {number}")
        self.w.line(f"{inside} = {tile} < tile_count")
        self.w.line(f"mbarrier.expect(ready.index({slot}), {self.tall * self.width * self.element_bytes}, pred={inside})")
        for i, ring in self.rings.items():
            into = f"[{tile} * {self.tall}, first_col], ready.index({slot}), {ring}.index({slot})"
            self.w.line(f"tma.async_copy_global_to_shared({self.maps[i]}, {into}, pred={inside})")
