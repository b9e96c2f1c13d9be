"""Shared-memory staging of unaligned rows: the tensor is viewed as one long row of pieces of 64 elements (a flat view).

TMA needs rows that start at a multiple of 16 bytes. Where they do not (50257 columns of 2 bytes), it copies the pieces that overlap
a row. The first `before` elements of the first piece belong to the previous row. Positions in shared memory and addresses of stores
count from the start of that piece, so stores stay aligned. The first chunk masks the elements before the row, the tail masks those
after it, and the chunks between need no mask. The view has whole pieces only. It leaves out less than a piece at the end of the
tensor, which belongs to the tail of the last row: after TMA has copied that row, threads store the missing elements into its slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..ir.program import Load, Store
from ..ir.size import Bindings
from ..plan.kernel import Kernel
from ..plan.schedule import PIECE_ELEMS, Schedule
from .expr import size_text
from .gluon import REFILL, REST, Emitter, FillNames, StagedValues
from .source import Param, ParamKind, Source, TensorView
from .steps import Walk
from .tile_refs import Segment, TileRef
from .values import Env

OWN_NAMES = ("row_at", "before", "piece", "sector", "u_at", "u_first", "c_first", "first_in", "u_rest", "covered", "left_out",
       "early_piece", "ahead_piece", "shift", "border", "PIECE", "at_end", "end")
FIRST = "_first"  # suffix of the names of a row's first chunk


class UnalignedValues(StagedValues):
    """Values that are staged by pieces, with stores split at piece boundaries."""

    def _store(self, i: int, node: Store, ref: TileRef, env: Env) -> None:
        """Store the partial pieces at both ends of a row apart from the whole pieces.

        A mask that changes only at piece boundaries allows vector stores. Few threads store to the two partial pieces.
        """
        if ref.tag not in (FIRST, REST) or not self._address(i, node, ref).startswith("sector"):
            super()._store(i, node, ref, env)
            return
        first, at = ref.tag == FIRST, ref.aligned
        reached = PIECE_ELEMS - 1 if first else self.program.extent(self.kernel.space.cols)
        self.writer.line(f"border = (shift + {reached}) // {PIECE_ELEMS} * {PIECE_ELEMS}")
        whole, broken = (f"({at} >= border)", f"({at} < border)") if first else (f"({at} < border)", f"({at} >= border)")
        for mask in (f"{ref.col_mask} & {broken}", whole):  # this order takes fewer registers
            super()._store(i, node, replace(ref, col_mask=mask), env)


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel that stages unaligned rows. `wide` selects 64-bit element indices."""
    return UnalignedEmitter(kernel, schedule, bindings, name, wide).source()


class UnalignedEmitter(Emitter):
    """Emits a kernel that stages rows through a flat view."""

    unaligned, box_elems, own_names, values_type = True, PIECE_ELEMS, OWN_NAMES, UnalignedValues

    @property
    def _stride(self) -> str:
        assert self.values.sector_row_stride is not None
        return size_text(self.values.sector_row_stride)

    def _params(self) -> tuple[Param, ...]:
        """The parameters, with pointers of the staged buffers too: elements outside the flat view are read by address."""
        params = super()._params()
        named = {p.name for p in params if p.kind is ParamKind.POINTER}
        used = {n.buffer for n in self.program.nodes if isinstance(n, (Load, Store))} - named
        more = [Param(b.name, ParamKind.POINTER, f"{b.name}_ptr", b.dtype) for b in self.program.buffers if b.name in used]
        return (*more, *params)

    def _view(self, i: int, taken: tuple[int, ...]) -> TensorView:
        return replace(super()._view(i, taken), shape=(self.rows, self.extent), strides=(self._step(i), 1), piece_elems=PIECE_ELEMS)

    def _tiles(self) -> list[Segment]:
        width, count, rest = self.cols.width, self.cols.count, self.cols.rest
        start, w = width * count, self.w
        w.line(f"lanes = gl.arange(0, {width}, layout=gl.SliceLayout(0, TILE))[None, :]")
        w.line(f"u_rest = {start} + gl.arange(0, {rest}, layout=gl.SliceLayout(0, TILE))[None, :]")
        last = f"(row_count{'.to(gl.int64)' if self.wide else ''} - 1) * {self._stride}"
        w.line(f"covered = ({last} + {self.extent}) // {PIECE_ELEMS} * {PIECE_ELEMS}")
        first = TileRef(col="c_first", width=width, col_mask="first_in", col_count=f"({width} - before)", aligned="lanes",
                     tag=FIRST)
        whole = TileRef(col="c_at", width=width, col_start=f"(k * {width})", aligned="u_at")
        behind = TileRef(col="c_rest", width=rest, col_start=str(start), col_mask="c_rest_in", aligned="u_rest", tag=REST,
                      col_count=f"({self.extent - start} + before)")
        self.values.numbers[FIRST] = "0"
        found = [Segment(first, ("c_first = lanes - shift", "first_in = lanes >= shift"))]
        if count > 1:
            found.append(Segment(whole, (f"u_at = k * {width} + lanes", "c_at = u_at - shift"), f"for k in range(1, {count})"))
        return [*found, Segment(behind, ("c_rest = u_rest - shift", f"c_rest_in = u_rest < shift + {self.extent}"))]

    def _row_start(self) -> None:
        super()._row_start()
        self.w.line(f"row_at = r * {self._stride}")
        self.w.line(f"before = (row_at % {PIECE_ELEMS}){'.to(gl.int32)' if self.wide else ''}")
        self.w.line(f"sector = row_at // {PIECE_ELEMS} * {PIECE_ELEMS}")

    def _allocate(self) -> None:
        super()._allocate()
        self.w.line(f"PIECE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, {self.schedule.warps}], [1, 0])")
        self.ends: dict[int, str] = {}  # memory of the tails, indexed by piece
        for i, ring in self.rings.items():
            name = self.ends[i] = self.w.fresh(f"{self._load_of(i).buffer}_ends")
            shape = [self.slots * self.cols.rest // PIECE_ELEMS, 1, 1, PIECE_ELEMS]
            self.w.line(f"{name} = {ring.rest}._reinterpret(gl.{self.program.dtypes[i].kernel}, {shape}, {ring.rest_map}.layout)")

    def _patch_tail(self) -> None:
        """Store the elements that the flat view leaves out into the slot, where the walks read them."""
        w, start = self.w, self.cols.width * self.cols.count
        narrow = ".to(gl.int32)" if self.wide else ""
        w.line(f"left_out = row_at + {self.extent} - covered")
        with w.block("if left_out > 0"):
            w.line(f"at_end = gl.arange(0, {PIECE_ELEMS}, layout=gl.SliceLayout(0, PIECE))[None, :]")
            w.line(f"end = slot * {self.cols.rest // PIECE_ELEMS} + ((covered - sector){narrow} - {start}) // {PIECE_ELEMS}")
            for i, name in self.ends.items():
                there = f"gl.load({self._load_of(i).buffer}_ptr + (covered + at_end), mask=at_end < left_out, other=0)"
                w.line(f"{name}.index(end).reshape([1, {PIECE_ELEMS}]).store({there})")

    def _walk(self, walk: Walk, env: Env, tiles: list[Segment], waits: bool, refills: bool) -> None:
        """One walk. `shift` equals `before`, but the compiler cannot tell, so it does not keep masks in registers across walks."""
        self.w.line(f"shift = before + zero * {self.values.walk}" if self.values.walk else "shift = before")
        super()._walk(walk, env, tiles, waits, refills)

    def _visit(self, tiles: list[Segment], chunk: Callable[[Segment], None], refills: bool) -> None:
        """Visit every chunk of a row. The first chunk has a mask, the others of its copy have none."""
        if not refills:
            super()._visit(tiles, chunk, refills)
            return
        first, whole, rest = tiles[0], tiles[1], tiles[-1]
        chunk(first)
        if self.chunks_per_copy > 1:
            with self.w.block(f"for k in range(1, {self.chunks_per_copy})"):
                chunk(whole)
        self._release()
        self._copy(REFILL, "0", rest=False)
        if self.copies_per_row > 1:
            self._visit_and_refill(1, partial(chunk, whole))
        self._visit_segment(rest, partial(chunk, rest), refills)

    def _expect(self, names: FillNames, row: str) -> None:
        super()._expect(names, row)
        counted = f"{names.row}{'.to(gl.int64)' if self.wide else ''} * {self._stride} // {PIECE_ELEMS}"
        self.w.line(f"{names.row}_piece = ({counted}){'.to(gl.int32)' if self.wide else ''}")

    def _coordinates(self, names: FillNames, taken: tuple[int, ...], along: str) -> str:
        return f"[0, {names.row}_piece{f' + {along}' if along != '0' else ''}, 0]"
