"""How TMA and walks address staged rows: rows that start on 16 bytes, or unaligned rows in a flat view.

TMA needs rows that start at a multiple of 16 bytes. Where they do not (50257 columns of 2 bytes), the tensor is viewed as one long
row of pieces of 64 elements, and TMA copies the pieces that overlap a row. The first `before` elements of the first piece belong to
the previous row. Positions in shared memory and addresses of stores count from the start of that piece, so stores stay aligned. The
first chunk masks the elements before the row, the tail masks those after it, and the chunks between need no mask. The view has
whole pieces only. It leaves out less than a piece at the end of the tensor, which belongs to the tail of the last row: after TMA
has copied that row, threads store the missing elements into its slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ir.program import Store
from ..plan.schedule import PIECE_ELEMS
from ..plan.staged_rows import Chunks
from .expr import size_text
from .kernel_ir import Expr, For, If, Layout, Load, Name, SharedStore, Slot, View
from .memory import Memory, pointer
from .scope import Scope
from .source import Param
from .tile_refs import Segment, TileRef, named

if TYPE_CHECKING:
    from .row_copies import RowMemory  # which is built on this module

REST = "_rest"  # suffix of the names of a row's tail, which is narrower than a chunk
FIRST = "_first"  # suffix of the names of an unaligned row's first chunk


def columns(start: int | Expr, width: int, layout: str = "TILE") -> Expr:
    """Column indices of a tile."""
    counted = f"gl.arange(0, {width}, layout=gl.SliceLayout(0, {layout}))[None, :]"
    return f"{start} + {counted}" if start else counted


class AlignedRows:
    """Rows that start on 16 bytes. With several CTAs per row, each takes a part of the columns."""

    unaligned = False  # whether TMA reads pieces of a flat view

    def __init__(self, scope: Scope, cols: Chunks) -> None:
        self.scope, self.builder, self.cols = scope, scope.builder, cols
        self._part = scope.extent // scope.schedule.ctas_per_row if scope.schedule.ctas_per_row > 1 else 0

    def mapped(self, param: Param, i: int) -> Param:
        """The map of rows of columns."""
        return param

    def coordinates(self, row: Name, box: tuple[int, ...], along: Expr | None) -> tuple[Expr, ...]:
        """The row, the box along the row, and for boxes of several lines the start of a line."""
        if self._part:
            before = f"cta_rank * {self._part // box[-1]}"
            along = f"{before} + {along}" if along else before
        return (row, along or "0") if len(box) == 2 else (row, along or "0", "0")

    def expected(self, row: Name) -> None:
        """The row's number is enough."""

    def view_tails(self, memory: Mapping[int, RowMemory]) -> None:
        """TMA copies all of a row."""

    def tiles(self) -> list[Segment]:
        """A loop over whole chunks, then the tail."""
        width, count, rest = self.cols.width, self.cols.count, self.cols.rest
        self.builder.set("lanes", columns(f"cta_rank * {self._part}" if self._part else "", width))
        found = [Segment(TileRef(col="lanes", width=width, col_start="0"))]
        if count > 1:
            whole = TileRef(col="cols", width=width, col_start=f"k * {width}")
            found = [Segment(whole, (named("cols", f"k * {width} + lanes"),), For(Name("k"), "0", str(count)))]
        if rest:
            start = width * count
            self.builder.set("cols_rest", columns(start, rest))
            ref = TileRef(col="cols_rest", width=rest, col_start=str(start), tag=REST)
            if start + rest > self.scope.extent:
                self.builder.set("cols_rest_in", f"cols_rest < {self.scope.extent}")
                ref = replace(ref, col_mask=(Name("cols_rest_in"),), col_count=str(self.scope.extent - start))
            found.append(Segment(ref))
        return found

    def enter_row(self) -> None:
        """The row's number is enough."""

    def patch_tail(self) -> None:
        """TMA copies all of a row."""

    def enter_walk(self, walk: int) -> None:
        """Masks are the same for all rows."""

    def store_parts(self, node: Store, ref: TileRef) -> tuple[TileRef, ...]:
        """The whole tile."""
        return (ref,)


class FlatRows:
    """Rows that start anywhere, through a flat view."""

    unaligned = True

    def __init__(self, scope: Scope, cols: Chunks, memory: Memory) -> None:
        self.scope, self.builder, self.cols, self._memory = scope, scope.builder, cols, memory
        assert memory.sector_row_stride is not None
        self._stride = size_text(memory.sector_row_stride)
        self._wide = ".to(gl.int64)" if scope.wide else ""
        self._ends: dict[int, Name] = {}  # memory of the tails, indexed by piece

    def _narrowed(self, text: Expr) -> Expr:
        """A small number in 32 bits."""
        return f"({text}).to(gl.int32)" if self.scope.wide else text

    def mapped(self, param: Param, i: int) -> Param:
        """The map of pieces."""
        assert param.view is not None
        view = replace(
            param.view, shape=(self.scope.rows, self.scope.extent), strides=(self.scope.row_stride(i), 1), piece_elems=PIECE_ELEMS
        )
        return replace(param, view=view)

    def coordinates(self, row: Name, box: tuple[int, ...], along: Expr | None) -> tuple[Expr, ...]:
        """The piece, counted from the first of the tensor."""
        return "0", f"{row}_piece + {along}" if along else f"{row}_piece", "0"

    def expected(self, row: Name) -> None:
        """Name a row's first piece."""
        self.builder.set(f"{row}_piece", self._narrowed(f"{row}{self._wide} * {self._stride} // {PIECE_ELEMS}"))

    def view_tails(self, memory: Mapping[int, RowMemory]) -> None:
        """See the memory of the tails as pieces."""
        self.builder.add(Layout(Name("PIECE"), (1, 1), (1, 32), (1, self.scope.schedule.warps)))
        for i, ring in memory.items():
            name = self._ends[i] = self.builder.fresh(f"{self.scope.load_of(i).buffer}_ends")
            shape = (self.scope.schedule.stages * self.cols.rest // PIECE_ELEMS, 1, 1, PIECE_ELEMS)
            self.builder.add(View(name, ring.rest, self.scope.program.dtypes[i].kernel, shape, f"{ring.rest_map}.layout"))

    def tiles(self) -> list[Segment]:
        """The first chunk, a loop over whole chunks, and the tail."""
        width, count, rest, extent = self.cols.width, self.cols.count, self.cols.rest, self.scope.extent
        start = width * count
        self.builder.set("lanes", columns("", width))
        self.builder.set("pos_rest", columns(start, rest))
        last = f"(row_count{self._wide} - 1) * {self._stride}"
        self.builder.set("covered", f"({last} + {extent}) // {PIECE_ELEMS} * {PIECE_ELEMS}")
        first = TileRef(
            col="cols_first", width=width, col_mask=(Name("first_in"),), col_count=f"({width} - before)", aligned="lanes", tag=FIRST
        )
        whole = TileRef(col="cols", width=width, col_start=f"k * {width}", aligned="pos")
        behind = TileRef(
            col="cols_rest",
            width=rest,
            col_start=str(start),
            col_mask=(Name("cols_rest_in"),),
            aligned="pos_rest",
            tag=REST,
            col_count=f"({extent - start} + before)",
        )
        found = [Segment(first, (named("cols_first", "lanes - shift"), named("first_in", "lanes >= shift")))]
        if count > 1:
            prepare = named("pos", f"k * {width} + lanes"), named("cols", "pos - shift")
            found.append(Segment(whole, prepare, For(Name("k"), "1", str(count)), first=1))
        prepare = named("cols_rest", "pos_rest - shift"), named("cols_rest_in", f"pos_rest < shift + {extent}")
        return [*found, Segment(behind, prepare)]

    def enter_row(self) -> None:
        """Name the row's first element, its place in its first piece, and that piece's first element."""
        self.builder.set("row_offset", f"row_index * {self._stride}")
        self.builder.set("before", self._narrowed(f"row_offset % {PIECE_ELEMS}"))
        self.builder.set("sector", f"row_offset // {PIECE_ELEMS} * {PIECE_ELEMS}")

    def patch_tail(self) -> None:
        """Store the elements that the flat view leaves out into the slot, where the walks read them."""
        start, pieces = self.cols.width * self.cols.count, self.cols.rest // PIECE_ELEMS
        self.builder.set("tail_elems", f"row_offset + {self.scope.extent} - covered")
        with self.builder.block(If("tail_elems > 0")):
            self.builder.set("tail_lanes", columns("", PIECE_ELEMS, "PIECE"))
            self.builder.set("tail_piece", f"slot * {pieces} + ({self._narrowed('covered - sector')} - {start}) // {PIECE_ELEMS}")
            for i, name in self._ends.items():
                there = Load(pointer(self.scope.load_of(i)), ("covered", "tail_lanes"), ("tail_lanes < tail_elems",), "0")
                self.builder.add(SharedStore(Slot(name, "tail_piece"), there, (1, PIECE_ELEMS)))

    def enter_walk(self, walk: int) -> None:
        """`shift` equals `before`, but the compiler cannot tell, so it does not keep masks in registers across walks."""
        self.builder.set("shift", f"before + zero * {walk}" if walk else "before")

    def store_parts(self, node: Store, ref: TileRef) -> tuple[TileRef, ...]:
        """Store the partial pieces at both ends of a row apart from the whole pieces.

        A mask that changes only at piece boundaries allows vector stores. Few threads store to the two partial pieces.
        """
        if ref.tag not in (FIRST, REST) or not self._memory.follows_sectors(node, ref):
            return (ref,)
        first, at = ref.tag == FIRST, ref.aligned
        reached = PIECE_ELEMS - 1 if first else self.scope.extent
        self.builder.set("border", f"(shift + {reached}) // {PIECE_ELEMS} * {PIECE_ELEMS}")
        whole, broken = (f"{at} >= border", f"{at} < border") if first else (f"{at} < border", f"{at} >= border")
        edge = replace(ref, col_mask=(*ref.col_mask, broken))
        return edge, replace(ref, col_mask=(whole,))  # this order takes fewer registers


RowAccess = AlignedRows | FlatRows
