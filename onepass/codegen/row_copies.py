"""TMA copies of rows into shared memory: how a row is cut into copies, the memory that receives them, and issuing them."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.schedule import Block, Cover, Loop, Schedule
from ..plan.staged_rows import MIN_COPIES, Chunks, chunks, tma_box_shape
from . import kernel_ir as ir
from .kernel_ir import Alloc, CopyAsync, Expect, Expr, For, Name, Slot, View
from .row_access import RowAccess
from .scope import Scope
from .source import Param

READY = Name("ready")  # the mbarriers


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the rows of a CTA are cut into copies, and how many of them the ring holds."""

    cols: Chunks  # the chunks of a row, or of this CTA's part of a row
    slots: int  # rows that the ring holds
    split: int  # CTAs that share the rows
    one_row: bool  # one row per CTA
    chunks_per_copy: int
    prefetch: int  # copies that the ring holds besides whole rows: then each copy has its own slot and mbarrier
    accumulates: bool  # whether a loop over rows carries reductions

    @property
    def copies_per_row(self) -> int:
        """Copies of whole chunks."""
        return self.cols.count // self.chunks_per_copy

    @property
    def copy_slots(self) -> int:
        """Copies of whole chunks that the ring holds."""
        return self.slots * self.copies_per_row + self.prefetch

    @property
    def refills_in_walk(self) -> bool:
        """With one slot the last walk refills what it has read. With more slots the next row is already staged."""
        return self.slots == 1 and not self.one_row

    @property
    def refill_row(self) -> Expr:
        """The row that takes the slot of the current one."""
        return f"row + {self.slots * self.split}"


def geometry(schedule: Schedule, extent: int, box_elems: int) -> Geometry:
    """The geometry of a schedule that stages rows. `box_elems` is the number of elements of one line of a TMA box."""
    assert isinstance(schedule.cols, Cover)
    one_row = isinstance(schedule.rows, Block)
    split = schedule.rows.split if isinstance(schedule.rows, Loop) else 1
    cols = chunks(schedule.cols, extent // schedule.ctas_per_row)
    least = MIN_COPIES if schedule.stages == 1 and not one_row else 1
    return Geometry(
        cols,
        schedule.stages,
        split,
        one_row,
        cols.chunks_per_box(box_elems, least),
        schedule.prefetch,
        schedule.accumulates_columns,
    )


@dataclass(frozen=True, slots=True)
class FillNames:
    """Variable names where TMA copies are issued. The index of an unrolled loop is a constant, so its names must not be reused."""

    row: Name
    inside: Name
    slot: Name
    counter: Name


FIRST_FILL = FillNames(Name("prologue_row"), Name("prologue_in"), Name("prologue_slot"), Name("prologue_j"))
REFILL = FillNames(Name("prefetch_row"), Name("prefetch_in"), Name("slot"), Name("j"))
COPY_REFILL = FillNames(Name("prefetch_row"), Name("prefetch_in"), Name("copy_slot"), Name("j"))  # where the ring holds copies


@dataclass(frozen=True, slots=True)
class RowMemory:
    """The shared memory of a staged load, its tensor maps, and the TMA boxes that fill it."""

    whole: Name  # shared memory of whole chunks, indexed by copy
    chunks: Name  # the same memory, indexed by chunk
    chunk: tuple[int, ...]
    whole_map: Name
    whole_box: tuple[int, ...]
    rest: Name  # shared memory of the tails
    rest_map: Name
    rest_box: tuple[int, ...]


class RowCopies:
    """Issues the copies of rows, of all staged loads."""

    def __init__(self, scope: Scope, at: Geometry, access: RowAccess) -> None:
        self.scope, self.builder, self.at, self.access = scope, scope.builder, at, access
        self.memory = {i: self._named(i) for i in sorted(scope.schedule.staged)}

    def _named(self, i: int) -> RowMemory:
        buffer, fresh = self.scope.load_of(i).buffer, self.builder.fresh
        ring, tiles, rest, rest_tile = (fresh(f"{buffer}_{what}") for what in ("ring", "tiles", "rest_ring", "rest_tile"))
        by_chunk = fresh(f"{buffer}_chunks") if self.at.chunks_per_copy > 1 else ring
        cols = self.at.cols
        widths = cols.width, cols.width * self.at.chunks_per_copy, cols.rest
        chunk, whole, last = (tma_box_shape(self.scope.extent, n, self.access.unaligned) for n in widths)
        return RowMemory(ring, by_chunk, chunk, tiles, whole, rest, rest_tile, last)

    def maps(self) -> list[Param]:
        """The tensor map parameters."""
        boxes = [
            (i, name, box, there)
            for i, memory in self.memory.items()
            for name, box, there in (
                (memory.whole_map, memory.whole_box, True),
                (memory.rest_map, memory.rest_box, bool(self.at.cols.rest)),
            )
        ]
        return [self.access.mapped(self.scope.tensor_map(i, name, box), i) for i, name, box, there in boxes if there]

    def allocate(self) -> None:
        """Allocate the rings."""
        for i, memory in self.memory.items():
            dtype = self.scope.program.dtypes[i].kernel
            parts = [(memory.whole, memory.whole_map, self.at.copy_slots, memory.whole_box)]
            parts += [(memory.rest, memory.rest_map, self.at.slots, memory.rest_box)] if self.at.cols.rest else []
            for name, tiles, count, box in parts:
                self.builder.add(Alloc(name, dtype, (count, *box), f"{tiles}.layout"))
            if memory.chunks != memory.whole:
                shape = (self.at.copy_slots * self.at.chunks_per_copy, *memory.chunk)
                self.builder.add(View(memory.chunks, memory.whole, dtype, shape, f"{memory.whole_map}.layout"))

    def fill(self, names: FillNames, row: Expr) -> None:
        """Issue the copies of all chunks of a row, if the row exists."""
        self.expect(names, row)
        if self.at.copies_per_row == 1:
            self.copy(names, 0)
        else:  # unrolled where the kernel accumulates: no loop may follow the last walk
            kind = ir.Loop.UNROLLED if self.at.accumulates else ir.Loop.RANGE
            with self.builder.block(For(names.counter, "0", str(self.at.copies_per_row), kind=kind)):
                self.copy(names, names.counter)
        if self.at.cols.rest:
            self.copy_rest(names)

    def expect(self, names: FillNames, row: Expr) -> None:
        """Set the bytes that a slot's mbarrier expects."""
        size = sum(self.scope.program.dtypes[i].size for i in self.memory)
        columns = self.at.cols.width * (self.at.chunks_per_copy if self.at.prefetch else self.at.cols.count) + self.at.cols.rest
        self.builder.set(names.row, row)
        self.builder.set(names.inside, f"{names.row} < row_count")
        self.builder.add(Expect(Slot(READY, names.slot), columns * size, names.inside))
        self.access.expected(names.row)

    def copy(self, names: FillNames, number: int | Expr) -> None:
        """Issue one copy of a row for every staged load: that of the chunks with this number."""
        alone = self.at.prefetch or self.at.copies_per_row == 1
        place = names.slot if alone else f"{names.slot} * {self.at.copies_per_row} + {number}"
        for memory in self.memory.values():
            along = None if number == 0 else f"{number} * {memory.whole_box[1]}"
            self._issue(names, memory.whole_map, memory.whole_box, along, Slot(memory.whole, place))

    def copy_rest(self, names: FillNames) -> None:
        """Issue the copy of a row's tail for every staged load."""
        for memory in self.memory.values():
            box, start = memory.rest_box, self.at.cols.width * self.at.cols.count
            along = str(start // (1 if len(box) == 2 else box[-1]))
            self._issue(names, memory.rest_map, box, along, Slot(memory.rest, names.slot))

    def _issue(self, names: FillNames, tiles: Name, box: tuple[int, ...], along: Expr | None, into: Slot) -> None:
        where = self.access.coordinates(names.row, box, along)
        self.builder.add(CopyAsync(tiles, where, Slot(READY, names.slot), into, names.inside))
