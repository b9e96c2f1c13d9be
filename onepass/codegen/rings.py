"""Rings in shared memory that TMA fills while earlier data is processed, with one mbarrier per slot.

A ring of rows has a slot for each of a few rows. After the last walk over a row its slot is refilled with the row that this CTA
processes `slots` iterations later. With a single slot, the last walk refills it copy by copy.

A ring of copies serves where shared memory holds one row and a part of the next: each copy of a few chunks has its own slot and
mbarrier, and the copies of all rows of a CTA use the slots in turn. The first walk over a row waits for one copy at a time, so it
starts before the later ones arrive. The last walk refills each slot that it has read with the next copy due there, of the next row
or the one after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..plan.staged_rows import BARRIERS
from .builder import Builder
from .kernel_ir import Advance, Alloc, CtaBarrier, Expr, Fence, For, InitBarrier, Invalidate, Loop, Name, Release, Slot, Wait
from .names import SPLIT
from .row_access import REST
from .row_copies import COPY_REFILL, FIRST_FILL, READY, REFILL, Geometry, RowCopies
from .tile_refs import Segment

Visit = Callable[[Segment], None]  # does the work of one chunk


def make_barriers(builder: Builder, slots: int) -> None:
    """Initialize one mbarrier per slot. The fence makes them visible to TMA, which uses the async proxy."""
    builder.add(Alloc(READY, "int64", (BARRIERS, 1), "mbarrier.MBarrierLayout()"))
    index = Name("each_slot")
    builder.add(For(index, "", str(slots), kind=Loop.UNROLLED, body=(InitBarrier(Slot(READY, index)),)), Fence())


def end_barriers(builder: Builder, slots: int) -> None:
    """Invalidate the mbarriers at the end of the kernel, where a CTA barrier follows the last wait.

    Without this the compiler takes an mbarrier's last wait for its last use, and reuses its memory for exchanges between
    threads in reductions. The hardware does not allow that: H200, norm 16384x1024, one row per CTA, 4 to 27 rows per launch
    were wrong.
    """
    index = Name("each_slot")
    builder.add(For(index, "", str(slots), kind=Loop.UNROLLED, body=(Invalidate(Slot(READY, index)),)))


def parity(turn: Expr, slots: int) -> Expr:
    """The parity of the phase in which a ring's slot is filled for the `turn`-th row or tile of a CTA."""
    return f"{turn} // {slots} & 1" if slots > 1 else f"{turn} & 1"


class RowRing:
    """A ring of rows. `numbers` are the chunk numbers of tiles, by tag."""

    def __init__(self, builder: Builder, at: Geometry, copies: RowCopies, numbers: dict[str, int | Expr]) -> None:
        self.builder, self.at, self.copies, self.numbers = builder, at, copies, numbers
        self.slots = at.slots

    def fill(self) -> None:
        """Issue the copies of the first rows."""
        with self.builder.block(For(FIRST_FILL.slot, "", str(self.slots), kind=Loop.UNROLLED)):
            self.copies.fill(FIRST_FILL, "row" if self.at.one_row else f"{SPLIT} + prologue_slot * {self.at.split}")

    def start(self) -> None:
        """Rows are counted by turn."""
        self.builder.set("iteration", "0")

    def enter_row(self) -> None:
        """Name the slot of the current row, and the index of its first chunk."""
        self.builder.set("slot", f"iteration % {self.slots}" if self.slots > 1 else "0")
        if self.at.cols.count > 1:
            self.builder.set("first_chunk", f"slot * {self.at.cols.count}")

    def arrive(self) -> None:
        """Wait for all copies of the current row."""
        self.builder.add(Wait(Slot(READY, "slot"), "0" if self.at.one_row else parity("iteration", self.slots)))

    def visit(self, tiles: list[Segment], chunk: Visit, first: bool, last: bool) -> None:
        """Visit every chunk. With one slot, the last walk refills every part of it that all threads have read."""
        refills = last and self.at.refills_in_walk
        if refills:
            self.builder.add(Release())  # all threads are past the wait for the current row
            self.copies.expect(REFILL, self.at.refill_row)
        for tile in tiles:
            work = partial(chunk, tile)
            if tile.loop is None:
                work()
                if refills:
                    self._refill(tile.ref.tag)
            elif refills:
                self._visit_and_refill(tile.first, work)
            else:
                with self.builder.block(tile.loop):
                    work()

    def _visit_and_refill(self, first: int, work: Callable[[], None]) -> None:
        """Visit the chunks from `first` on, and refill each copy after its chunks have been read."""
        count = self.at.chunks_per_copy
        if first % count:  # the first chunk of this copy was a tile of its own
            with self.builder.block(For(Name("k"), str(first), str(count))):
                work()
            self.builder.add(Release())
            self.copies.copy(REFILL, 0)
        begin = -(-first // count)
        if begin == self.at.copies_per_row:
            return
        with self.builder.block(For(REFILL.counter, str(begin), str(self.at.copies_per_row))):
            if count > 1:
                self.builder.add(CtaBarrier())  # without this barrier Triton inserts one per chunk
            with self.builder.block(chunks_of_copy(count)):
                work()
            self.builder.add(Release())
            self.copies.copy(REFILL, REFILL.counter)

    def _refill(self, tag: str) -> None:
        """After an unrolled chunk: if it was the last of its copy, issue that copy of a later row."""
        if tag == REST:
            self.builder.add(Release())
            self.copies.copy_rest(REFILL)
            return
        number = self.numbers[tag]
        assert isinstance(number, int)
        if (number + 1) % self.at.chunks_per_copy == 0:
            self.builder.add(Release())
            self.copies.copy(REFILL, (number + 1) // self.at.chunks_per_copy - 1)

    def leave_row(self) -> None:
        """Refill the slot as a whole."""
        if not self.at.refills_in_walk and not self.at.one_row:
            self.builder.add(Release())
            self.copies.fill(REFILL, self.at.refill_row)

    def advance(self) -> None:
        """Count the row."""
        if not self.at.one_row:
            self.builder.add(Advance(Name("iteration"), 1))


def chunks_of_copy(count: int) -> For:
    """The loop over the chunks of copy j."""
    return For(Name("k"), f"j * {count}", f"j * {count} + {count}")


class CopyRing:
    """A ring of copies. `walk_from` is the start of loops over copies, as the compiler may see it."""

    def __init__(self, builder: Builder, at: Geometry, copies: RowCopies, walk_from: Expr) -> None:
        self.builder, self.at, self.copies, self.walk_from = builder, at, copies, walk_from
        self.slots = at.copy_slots

    def fill(self) -> None:
        """Issue the first copies."""
        per_row = self.at.copies_per_row
        with self.builder.block(For(FIRST_FILL.slot, "", str(self.slots), kind=Loop.UNROLLED)):
            self.copies.expect(FIRST_FILL, f"{SPLIT} + prologue_slot // {per_row} * {self.at.split}")
            self.copies.copy(FIRST_FILL, f"prologue_slot % {per_row}")

    def start(self) -> None:
        """Copies are numbered over all rows of a CTA."""
        self.builder.set("copies_done", "0")

    def enter_row(self) -> None:
        """Name the slot of the row's first copy, and its parity."""
        self.builder.set("first_slot", f"copies_done % {self.slots}")
        self.builder.set("phase", f"copies_done // {self.slots} & 1")

    def arrive(self) -> None:
        """The first walk waits for each copy."""

    def visit(self, tiles: list[Segment], chunk: Visit, first: bool, last: bool) -> None:
        """Visit every chunk of a row, copy by copy: in a loop, or unrolled where each chunk has its own tile."""
        per_copy, refills = self.at.chunks_per_copy, last and self.at.refills_in_walk
        if tiles[0].loop is None:
            for j in range(self.at.copies_per_row):
                self._enter_copy(j, first)
                for tile in tiles[j * per_copy : (j + 1) * per_copy]:
                    chunk(tile)
                if refills:
                    self._next_copy(j)
            return
        counter = Name("k" if per_copy == 1 else "j")
        with self.builder.block(For(counter, self.walk_from, str(self.at.copies_per_row))):
            self._enter_copy(counter, first)
            if per_copy == 1:
                chunk(tiles[0])
            else:
                with self.builder.block(chunks_of_copy(per_copy)):
                    chunk(tiles[0])
            if refills:
                self._next_copy(counter)

    def _enter_copy(self, number: int | Name, waits: bool) -> None:
        """Name the slot of a copy and wait for the copy.

        `first_chunk` is where the row's first chunk would be if the row's chunks were contiguous around this copy.
        """
        put, phase = self.builder.set, "phase"
        if number == 0:
            put("copy_slot", "first_slot")
            put("first_chunk", f"copy_slot * {self.at.chunks_per_copy}")
        else:
            put("copy_slot", f"first_slot + {number}")
            put("wrapped", f"copy_slot >= {self.slots}")
            put("copy_slot", f"gl.where(wrapped, copy_slot - {self.slots}, copy_slot)")
            put("first_chunk", f"(copy_slot - {number}) * {self.at.chunks_per_copy}")
            phase = "phase ^ wrapped"
        if waits:
            self.builder.add(Wait(Slot(READY, "copy_slot"), phase))

    def _next_copy(self, number: int | Name) -> None:
        """After the last read of a copy, issue the next copy into its slot.

        No thread waits for a copy that has been read, so its mbarrier may expect new bytes before all threads have read the copy.
        Triton wants a CTA barrier between the expect and the copies. The barrier that frees the slot serves as that one.
        """
        part: int | Expr
        if isinstance(number, int):
            later = number + self.slots
            turns, part = str(later // self.at.copies_per_row * self.at.split), later % self.at.copies_per_row
        else:
            self.builder.set("next_copy", f"{number} + {self.slots}")
            turns, part = f"next_copy // {self.at.copies_per_row} * {self.at.split}", f"next_copy % {self.at.copies_per_row}"
        self.copies.expect(COPY_REFILL, f"row + {turns}")
        self.builder.add(Release())
        self.copies.copy(COPY_REFILL, part)

    def leave_row(self) -> None:
        """The last walk has refilled all slots."""

    def advance(self) -> None:
        """Count the copies of the row."""
        self.builder.add(Advance(Name("copies_done"), self.at.copies_per_row))


Ring = RowRing | CopyRing
