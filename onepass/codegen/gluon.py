"""Steps -> Gluon source, for schedules that stage rows in shared memory.

A CTA processes its rows one after another, or a single row. A ring buffer in shared memory has slots for a few rows. TMA fills a
slot while earlier rows are processed, and one mbarrier per slot signals that all chunks of the row have arrived. Walks read the
chunks from shared memory in a loop that the compiler does not unroll, so registers never hold more than one chunk. After the last
walk over a row its slot is refilled with the row that this CTA processes `slots` iterations later. With a single slot, the last
walk refills it chunk by chunk. `gluon_mix_order` adds reductions over rows, `gluon_multi_cta` several CTAs per row.

Where shared memory holds one row and a part of the next, the ring holds copies instead of rows: each copy of a few chunks has its
own slot and mbarrier, and the copies of all rows of a CTA use the slots in turn. The first walk over a row waits for one copy at a
time, so it starts before the later ones arrive. The last walk refills each slot that it has read with the next copy due there, of
the next row or the one after.

The generated text uses only this part of Gluon, and `gluon_model` has to model all of it:

- `gl.program_id`, `range`, `gl.static_range`, arithmetic, comparisons, `&`, `|`, `^`, `~`, scalars mixed with tensors, `.to`, also
  with `bitcast=True`
- `gl.BlockedLayout`, `gl.SliceLayout`; every tensor is [1, width] or [1, 1] in layout `TILE`, except one piece of a flat view,
  [1, 64], in layout `PIECE`
- `gl.arange(0, n, layout=)` with `[None, :]` or `[:, None]`, `gl.full`, `.broadcast_to`, `gl.where`, `gl.abs`, `gl.maximum`,
  `gl.minimum` and the other functions of one value in the op table, `libdevice`
- `gl.sum(x, axis=, keep_dims=True)` along either axis, and the folds of `gluon_helpers`: `gl.reduce` of one tile, or of two with
  `keep_dims=True`, and `gl.expand_dims`; `gl.max` of one element, to convert it to a scalar
- `gl.load` and `gl.store` with and without `mask=` and `other=`; `gl.load(..., volatile=True)` of one word that other CTAs write,
  in a loop `while` it is 0
- `gl.allocate_shared_memory(dtype, shape, layout)`, `.index(i)`, `.reshape(shape)`, `.load(TILE)`; `x_tiles.layout` of a tensor map
- `._reinterpret(dtype, shape, layout)` of a whole ring: the same bytes in the same order, as chunks or pieces instead of copies
- `.store(x)` into a piece that has arrived, or a whole walk, under an `if` whose condition is a scalar, and so the same for all
  threads; one `.store` into memory of `gl.SwizzledSharedLayout(1, 1, 1, [1, 0])`, from which each thread reads what it stored
- `mbarrier.MBarrierLayout()`, `mbarrier.init(b, count=1)`, `mbarrier.expect(b, bytes, pred=)`, `mbarrier.wait(b, phase)`,
  `mbarrier.invalidate(b)`
- `tma.async_copy_global_to_shared(map, coordinates, barrier, slot, pred=)`
- `fence_async_shared()`, and `cta_barrier()` of `gluon_helpers`, between the last read of a slot and its refill; `cta_barrier()`
  also after a wait, after stores of threads, and inside a walk that refills slots while it reads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..ir.program import Load
from ..ir.size import Bindings
from ..plan.kernel import Across, Kernel
from ..plan.schedule import Block, Cover, Loop, Schedule
from ..plan.staged_rows import MIN_COPIES, TMA_BOX, chunks, tma_box_shape
from ..plan.thread_layout import chunk_vector
from .expr import GLUON, size_text
from .folds import Folds, Running
from .gluon_ring import RingEmitter
from .source import GridDim, Param, Source
from .steps import Steps, Walk, steps
from .tile_refs import Segment, TileRef
from .values import Env, Values

OWN_NAMES = ("row", "j", "c_at", "c_rest", "c_rest_in", "r", "j_early", "number", "first", "phase", "at", "over", "later")


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel that stages rows. `wide` selects 64-bit element indices."""
    return Emitter(kernel, schedule, bindings, name, wide).source()


@dataclass(frozen=True, slots=True)
class FillNames:
    """Variable names where TMA copies are issued. The index of an unrolled loop is a constant, so its names must not be reused."""

    row: str
    inside: str
    slot: str
    counter: str


FIRST_FILL = FillNames("early", "early_inside", "slot_early", "j_early")
REFILL = FillNames("ahead", "inside", "slot", "j")
COPY_REFILL = FillNames("ahead", "inside", "at", "j")  # where the ring holds copies
REST = "_rest"  # suffix of the names of a row's tail, which is narrower than a chunk


@dataclass(frozen=True, slots=True)
class _Ring:
    """The ring of a staged load: names of its shared memory and tensor maps, and the TMA boxes that fill it."""

    whole: str  # shared memory of whole chunks, indexed by copy
    chunks: str  # the same memory, indexed by chunk
    chunk: tuple[int, ...]
    whole_map: str
    whole_box: tuple[int, ...]
    rest: str  # shared memory of the tails
    rest_map: str
    rest_box: tuple[int, ...]


class StagedValues(Values):
    """Values of which some are staged in shared memory."""

    first_rows = "(row == 0)"
    rings: dict[int, _Ring]
    smem_vectors: dict[int, str]  # shared memory of the staged row vectors, indexed by chunk
    whole: int  # whole chunks of a row
    numbers: dict[str, str]  # chunk index by tag
    # Variables of the current row: its index, its slot in the ring, the index of its first chunk there.
    row, slot, place = "r", "slot", "place"

    def _load(self, i: int, node: Load, ref: TileRef, env: Env) -> str:
        ring = self.rings.get(i)
        if i in self.smem_vectors:
            return f"{self.smem_vectors[i]}.index({self.numbers[ref.tag]}).load(TILE)"
        if ring is None:  # one element per row: a scalar address, because a tensor load would repeat it for every lane
            alone = self.kernel.by_col[i] is Across.NONE
            return super()._load(i, node, replace(ref, row=self.row) if alone else ref, env)
        if ref.tag == REST:
            memory, place, taken = ring.rest, self.slot, ring.rest_box
        else:
            at = f"{self.place} + {self.numbers[ref.tag]}" if self.whole > 1 else self.slot
            memory, place, taken = ring.chunks, at, ring.chunk
        flat = "" if len(taken) == 2 else f".reshape({ref.shape})"
        return f"{memory}.index({place}){flat}.load(TILE)"


class Emitter(RingEmitter):
    """Emits a kernel that stages rows and reduces along them. The base class of all emitters that stage rows."""

    counting = "range"  # the loop over the copies of a refill
    walk_from = "0"  # start of the loop over copies, as text
    # What a kernel of unaligned rows overrides.
    unaligned = False
    box_elems = TMA_BOX  # elements of one line of a TMA box
    own_names: tuple[str, ...] = ()
    values_type = StagedValues

    def __init__(self, kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool) -> None:
        assert isinstance(schedule.cols, Cover)
        self.one_row = isinstance(schedule.rows, Block)  # one row per CTA
        super().__init__(kernel, schedule, name, wide, (*OWN_NAMES, *self.own_names))
        self.split = schedule.rows.split if isinstance(schedule.rows, Loop) else 1
        self.cols = chunks(schedule.cols, self.extent // schedule.ctas_per_row)
        # With one slot the last walk refills what it has read. With more slots the next row is already staged.
        self.refills_in_walk = self.slots == 1 and not self.one_row
        self.copy_ring = schedule.prefetch > 0  # each copy has its own slot and mbarrier
        self.chunks_per_copy = self.cols.chunks_per_box(self.box_elems, MIN_COPIES if self.refills_in_walk else 1)
        self.copies_per_row = self.cols.count // self.chunks_per_copy
        self.copy_slots = self.slots * self.copies_per_row + schedule.prefetch
        self.steps: Steps = steps(kernel, schedule)
        self.rings = {i: self._ring(i) for i in sorted(schedule.staged)}
        self.values = self.values_type(kernel, schedule, bindings, self.w, GLUON)
        self.values.rings, self.values.smem_vectors, self.values.whole = self.rings, {}, self.cols.count
        self.values.numbers = {"": "k" if self.cols.count > 1 else "0"}
        self.folds = Folds(kernel, self.values, row_loop=not self.one_row)
        self.accumulated: dict[int, Running] = {}  # reductions that the loop over rows carries

    def _ring(self, i: int) -> _Ring:
        node = self._load_of(i)
        ring, tiles, rest, rest_tile = (self.w.fresh(f"{node.buffer}_{what}") for what in ("ring", "tiles", "rest", "rest_tile"))
        by_chunk = self.w.fresh(f"{node.buffer}_chunks") if self.chunks_per_copy > 1 else ring
        width = self.cols.width
        widths = width, width * self.chunks_per_copy, self.cols.rest
        chunk, whole, last = (tma_box_shape(self.extent, n, self.unaligned) for n in widths)
        return _Ring(ring, by_chunk, chunk, tiles, whole, rest, rest_tile, last)

    # ---- the whole kernel ----------------------------------------------------------------------------------------------

    def _maps(self) -> list[Param]:
        return [self._map(i, name, taken) for i, ring in self.rings.items()
                for name, taken, there in ((ring.whole_map, ring.whole_box, True), (ring.rest_map, ring.rest_box, self.cols.rest))
                if there]

    def _grid(self) -> tuple[GridDim, ...]:
        return (GridDim(self.rows) if self.one_row else GridDim(self.rows, max_programs=self.split),)

    def _body(self) -> None:
        w, row_count = self.w, size_text(self.rows)
        along = chunk_vector(self.kernel, self.schedule)
        w.line(f"TILE: gl.constexpr = gl.BlockedLayout([1, {along}], [1, 32], [1, {self.schedule.warps}], [1, 0])")
        narrowed = self.wide and not isinstance(self.rows, int)  # TMA counts in 32 bits
        w.line(f"row_count = ({row_count}).to(gl.int32)" if narrowed else f"row_count = {row_count}")
        self._name_cta()
        self._allocate()
        self.tiles = self._tiles()
        env: Env = {}
        for i in self.steps.constants:
            self.values.node(i, TileRef(), env)
        with w.block(f"for slot_early in gl.static_range({self.copy_slots if self.copy_ring else self.slots})"):
            if self.copy_ring:
                self._expect(FIRST_FILL, f"part + slot_early // {self.copies_per_row} * {self.split}")
                self._copy(FIRST_FILL, f"slot_early % {self.copies_per_row}", rest=False)
            else:
                self._fill(FIRST_FILL, "part" if self.one_row else f"part + slot_early * {self.split}")
        self._rows(env)

    def _name_cta(self) -> None:
        """Name the index of this CTA."""
        self.w.line("part = gl.program_id(0)")

    def _rows(self, env: Env) -> None:
        """Process all rows of a CTA."""
        if self.one_row:
            self.w.line("row = part")
            self._row(env)
            return
        self.w.line("number = 0" if self.copy_ring else "turn = 0")
        self._before_rows(env)
        with self.w.block(f"for row in range(part, row_count, {self.split})"):
            self._row(env)

    def _before_rows(self, env: Env) -> None:
        """Work on the first row before the loop over rows."""

    def _allocate(self) -> None:
        """Allocate rings and mbarriers."""
        for i, ring in self.rings.items():
            dtype = self.program.dtypes[i].kernel
            parts = [(ring.whole, ring.whole_map, self.copy_slots, ring.whole_box)]
            parts += [(ring.rest, ring.rest_map, self.slots, ring.rest_box)] if self.cols.rest else []
            for name, tiles, count, taken in parts:
                self.w.line(f"{name} = gl.allocate_shared_memory(gl.{dtype}, {[count, *taken]}, {tiles}.layout)")
            if ring.chunks != ring.whole:
                shape = [self.copy_slots * self.chunks_per_copy, *ring.chunk]
                self.w.line(f"{ring.chunks} = {ring.whole}._reinterpret(gl.{dtype}, {shape}, {ring.whole_map}.layout)")
        self._barriers(self.copy_slots if self.copy_ring else self.slots)

    def _tiles(self) -> list[Segment]:
        """The chunks of a row: a loop over whole chunks, then the tail. Lane indices are computed once."""
        width, count, rest = self.cols.width, self.cols.count, self.cols.rest
        self.w.line(f"lanes = {self._first_column()}gl.arange(0, {width}, layout=gl.SliceLayout(0, TILE))[None, :]")
        whole = TileRef(col="c_at", width=width, col_start=f"(k * {width})")
        found = [Segment(whole, (f"c_at = k * {width} + lanes",), f"for k in range(0, {count})")]
        if count == 1:
            found = [Segment(replace(whole, col="lanes", col_start="0"))]
        if rest:
            start = width * count
            self.w.line(f"c_rest = {start} + gl.arange(0, {rest}, layout=gl.SliceLayout(0, TILE))[None, :]")
            ref = TileRef(col="c_rest", width=rest, col_start=str(start), tag=REST)
            if start + rest > self.extent:
                self.w.line(f"c_rest_in = c_rest < {self.extent}")
                ref = replace(ref, col_mask="c_rest_in", col_count=str(self.extent - start))
            found.append(Segment(ref))
        return found

    def _first_column(self) -> str:
        """Text of the offset of this CTA's first column within the row."""
        return ""

    # ---- one row -------------------------------------------------------------------------------------------------------

    def _row(self, outside: Env) -> None:
        w, last = self.w, len(self.steps.walks) - 1
        self._row_slot()
        self._row_start()
        at = TileRef(row="r_at")
        env = dict(outside)
        for p, walk in enumerate(self.steps.walks):
            self.values.walk = p
            for i in walk.uniform:
                self.values.node(i, at, env)
            if p == 0:  # issue the per-row loads before waiting for the row
                if not self.copy_ring:
                    w.line(f"mbarrier.wait(ready.index(slot), {self._phase()})")
                self._patch_tail()
                w.line("cta_barrier()")  # without this barrier Triton inserts one per chunk
            inner = [replace(t, ref=t.ref.at_rows(at)) for t in self._tiles_of(walk)]
            self._walk(walk, env, inner, waits=p == 0, refills=self.refills_in_walk and p == last)
        if not self.refills_in_walk and not self.one_row:
            self._release()
            self._fill(REFILL, f"row + {self.slots * self.split}")
        if not self.one_row:
            w.line(f"number += {self.copies_per_row}" if self.copy_ring else "turn += 1")
        for i in self.steps.trailing:
            self.values.node(i, at, env)
        for fold in self.steps.row_folds:
            self.folds.feed(self.accumulated[fold.node], at, env, unrolled=False)

    def _row_slot(self) -> None:
        """Name the slot of the current row, or of its first copy. Copies are numbered over all rows of this CTA."""
        if self.copy_ring:
            self.w.line(f"first = number % {self.copy_slots}")
            self.w.line(f"phase = number // {self.copy_slots} & 1")
            return
        self.w.line(f"slot = turn % {self.slots}" if self.slots > 1 else "slot = 0")
        if self.cols.count > 1:
            self.w.line(f"place = slot * {self.cols.count}")

    def _phase(self) -> str:
        return "0" if self.one_row else super()._phase()

    def _patch_tail(self) -> None:
        """Store into a slot the elements of its row that TMA cannot copy. A CTA barrier follows."""

    def _tiles_of(self, walk: Walk) -> list[Segment]:
        """The tiles of a walk."""
        return self.tiles

    def _row_start(self) -> None:
        self.w.line("r = row.to(gl.int64)" if self.wide else "r = row")
        self.w.line("r_at = r + gl.arange(0, 1, layout=gl.SliceLayout(1, TILE))[:, None]")

    def _walk(self, walk: Walk, env: Env, tiles: list[Segment], waits: bool, refills: bool) -> None:
        """One walk over a row.

        `waits`: the walk is the first to read the row. `refills`: it refills every part of a slot that all threads have read.
        """
        running = {f.node: self.folds.running(f) for f in walk.folds}
        for state in running.values():
            self.folds.start(state, [t.ref for t in tiles if t.loop is not None])
        if refills and not self.copy_ring:
            self._release()  # all threads are past the wait for the current row
            self._expect(REFILL, f"row + {self.slots * self.split}")

        def chunk(tile: Segment) -> None:
            self._chunk(walk, dict(env), tile, running)

        if self.copy_ring:
            self._visit_copies(tiles, chunk, waits, refills)
        else:
            self._visit(tiles, chunk, refills)
        self._finish(running, tiles[0].ref)

    def _finish(self, running: dict[int, Running], ref: TileRef) -> None:
        """Read out the reductions of a walk."""
        for state in running.values():
            self.folds.finish(state, ref)

    def _visit(self, tiles: list[Segment], chunk: Callable[[Segment], None], refills: bool) -> None:
        """Visit every chunk of a row."""
        for tile in tiles:
            self._visit_segment(tile, partial(chunk, tile), refills)

    def _visit_segment(self, tile: Segment, chunk: Callable[[], None], refills: bool) -> None:
        """Visit all chunks of one segment."""
        if tile.loop is None:
            chunk()
            if refills:
                self._refill(tile.ref.tag)
        elif not refills:
            with self.w.block(tile.loop):
                chunk()
        else:
            self._visit_and_refill(0, chunk)

    def _visit_and_refill(self, first: int, chunk: Callable[[], None]) -> None:
        """Visit the copies from `first` on, and refill each one after its chunks have been read."""
        with self.w.block(f"for j in range({first}, {self.copies_per_row})"):
            if self.chunks_per_copy > 1:
                self.w.line("cta_barrier()")  # without this barrier Triton inserts one per chunk
            with self.w.block(self._chunks_of_copy()):
                chunk()
            self._release()
            self._copy(REFILL, "j", rest=False)

    def _chunks_of_copy(self) -> str:
        """The loop over the chunks of copy j."""
        count = self.chunks_per_copy
        return f"for k in range(j * {count}, j * {count} + {count})"

    def _refill(self, tag: str) -> None:
        """After an unrolled chunk: if it was the last of its copy, issue that copy of a later row."""
        rest = tag == REST
        done = 0 if rest else int(self.values.numbers[tag]) + 1
        if done % self.chunks_per_copy == 0:
            self._release()
            self._copy(REFILL, "0" if rest else str(done // self.chunks_per_copy - 1), rest)

    def _chunk(self, walk: Walk, env: Env, tile: Segment, running: dict[int, Running]) -> None:
        for line in tile.prepare:
            self.w.line(line)
        for i in walk.body:
            self.values.node(i, tile.ref, env)
        for fold in walk.folds:
            self.folds.feed(running[fold.node], tile.ref, env, unrolled=tile.loop is None)
        for fold in walk.accumulated:
            self.folds.feed(self.accumulated[fold.node], tile.ref, env, unrolled=False)

    # ---- a ring of copies ----------------------------------------------------------------------------------------------

    def _visit_copies(self, tiles: list[Segment], chunk: Callable[[Segment], None], waits: bool, refills: bool) -> None:
        """Visit every chunk of a row, copy by copy: in a loop, or unrolled where each chunk has its own tile."""
        if tiles[0].loop is None:
            for j in range(self.copies_per_row):
                self._enter_copy(str(j), waits)
                for tile in tiles[j * self.chunks_per_copy:(j + 1) * self.chunks_per_copy]:
                    chunk(tile)
                self._next_copy(str(j), refills)
            return
        counter = "k" if self.chunks_per_copy == 1 else "j"
        with self.w.block(f"for {counter} in range({self.walk_from}, {self.copies_per_row})"):
            self._enter_copy(counter, waits)
            if self.chunks_per_copy == 1:
                chunk(tiles[0])
            else:
                with self.w.block(self._chunks_of_copy()):
                    chunk(tiles[0])
            self._next_copy(counter, refills)

    def _enter_copy(self, number: str, waits: bool) -> None:
        """Name the slot `at` of a copy and wait for the copy.

        `place` is where the row's first chunk would be if the row's chunks were contiguous around this copy.
        """
        w, phase = self.w, "phase"
        if number == "0":
            w.line("at = first")
            w.line(f"place = at * {self.chunks_per_copy}")
        else:
            w.line(f"at = first + {number}")
            w.line(f"over = at >= {self.copy_slots}")
            w.line(f"at = gl.where(over, at - {self.copy_slots}, at)")
            w.line(f"place = (at - {number}) * {self.chunks_per_copy}")
            phase = "phase ^ over"
        if waits:
            w.line(f"mbarrier.wait(ready.index(at), {phase})")

    def _next_copy(self, number: str, refills: bool) -> None:
        """After the last read of a copy, issue the next copy into its slot.

        No thread waits for a copy that has been read, so its mbarrier may expect new bytes before all threads have read the copy.
        Triton wants a CTA barrier between the expect and the copies. The barrier that frees the slot serves as that one.
        """
        if not refills:
            return
        if number.isdigit():
            later = int(number) + self.copy_slots
            turns, part = str(later // self.copies_per_row * self.split), str(later % self.copies_per_row)
        else:
            self.w.line(f"later = {number} + {self.copy_slots}")
            turns, part = f"later // {self.copies_per_row} * {self.split}", f"later % {self.copies_per_row}"
        self._expect(COPY_REFILL, f"row + {turns}")
        self._release()
        self._copy(COPY_REFILL, part, rest=False)

    # ---- the ring ------------------------------------------------------------------------------------------------------

    def _fill(self, names: FillNames, row: str) -> None:
        """Issue the copies of all chunks of a row, if the row exists."""
        self._expect(names, row)
        if self.copies_per_row == 1:
            self._copy(names, "0", rest=False)
        else:
            with self.w.block(f"for {names.counter} in {self.counting}(0, {self.copies_per_row})"):
                self._copy(names, names.counter, rest=False)
        if self.cols.rest:
            self._copy(names, "0", rest=True)

    def _expect(self, names: FillNames, row: str) -> None:
        """Set the bytes that a slot's mbarrier expects."""
        size = sum(self.program.dtypes[i].size for i in self.rings)
        columns = self.cols.width * (self.chunks_per_copy if self.copy_ring else self.cols.count) + self.cols.rest
        self.w.line(f"{names.row} = {row}")
        self.w.line(f"{names.inside} = {names.row} < row_count")
        self.w.line(f"mbarrier.expect(ready.index({names.slot}), {columns * size}, pred={names.inside})")

    def _copy(self, names: FillNames, number: str, rest: bool) -> None:
        """Issue one copy of a row for every staged load: the copy of chunks with this number, or the tail."""
        for ring in self.rings.values():
            taken = ring.rest_box if rest else ring.whole_box
            first = self.cols.width * self.cols.count // (1 if len(taken) == 2 else taken[-1])
            along = str(first) if rest else "0" if number == "0" else f"{number} * {taken[1]}"
            whole_slot = rest or self.copy_ring or self.copies_per_row == 1
            place = names.slot if whole_slot else f"{names.slot} * {self.copies_per_row} + {number}"
            where = self._coordinates(names, taken, along)
            tiles, memory = (ring.rest_map, ring.rest) if rest else (ring.whole_map, ring.whole)
            into = f"ready.index({names.slot}), {memory}.index({place})"
            self.w.line(f"tma.async_copy_global_to_shared({tiles}, {where}, {into}, pred={names.inside})")

    def _coordinates(self, names: FillNames, taken: tuple[int, ...], along: str) -> str:
        """The TMA coordinates of a copy."""
        return f"[{names.row}, {along}]" if len(taken) == 2 else f"[{names.row}, {along}, 0]"
