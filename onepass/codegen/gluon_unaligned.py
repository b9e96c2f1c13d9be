"""Rows parked in shared memory that start anywhere: their tensors are seen as one long row, cut into pieces of 64 elements.

TMA describes only rows that start on 16 bytes. Where they do not (50257 columns of 2 bytes), it brings the pieces that a row lies
in. `before` elements of the first one belong to the row above; everything in shared memory is counted from that piece's beginning,
and so are stores, which thereby stay aligned. The first chunk masks what is before the row and the rest masks what is behind it;
chunks between need no mask. The view has whole pieces only. What it leaves out at the tensor's end, less than a piece, lies in the
rest of the last row: when TMA has brought that row, threads put it into its place, and walks need not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..ir.program import Load, Store
from ..ir.size import Bindings
from ..plan.kernel import Kernel
from ..plan.schedule import Schedule
from ..plan.staged_rows import PIECE_ELEMS
from .expr import size_text
from .gluon import REFILL, REST, Emitter, FillNames, StagedValues
from .source import Param, ParamKind, Source, TensorView
from .steps import Walk
from .tile_refs import Segment, TileRef
from .values import Env

OWN_NAMES = ("row_at", "before", "piece", "sector", "u_at", "u_first", "c_first", "first_in", "u_rest", "covered", "left_out",
       "early_piece", "ahead_piece", "shift", "border", "PIECE", "at_end", "end")
FIRST = "_first"  # marks names of the chunk that a row begins in


class UnalignedValues(StagedValues):
    """Values of which some wait in shared memory, and others leave by whole pieces."""

    def _store(self, i: int, node: Store, ref: TileRef, env: Env) -> None:
        """Where a row begins and ends, whole pieces by themselves: a mask that changes only between pieces lets threads store
        vectors. Few threads have something to store of the two pieces that are broken."""
        if ref.tag not in (FIRST, REST) or not self._address(i, node, ref).startswith("sector"):
            super()._store(i, node, ref, env)
            return
        first, at = ref.tag == FIRST, ref.aligned
        reached = PIECE_ELEMS - 1 if first else self.program.extent(self.kernel.space.cols)
        self.writer.line(f"border = (shift + {reached}) // {PIECE_ELEMS} * {PIECE_ELEMS}")
        whole, broken = (f"({at} >= border)", f"({at} < border)") if first else (f"({at} < border)", f"({at} >= border)")
        for mask in (f"{ref.col_mask} & {broken}", whole):  # in this order fewer registers are taken
            super()._store(i, node, replace(ref, col_mask=mask), env)


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel that parks rows of a flat view; `wide` makes it count elements in 64 bits."""
    return UnalignedEmitter(kernel, schedule, bindings, name, wide).source()


class UnalignedEmitter(Emitter):
    """Writes a kernel whose rows are brought by the pieces of a flat view."""

    unaligned, box_elems, own_names, values_type = True, PIECE_ELEMS, OWN_NAMES, UnalignedValues

    @property
    def _stride(self) -> str:
        assert self.values.sector_row_stride is not None
        return size_text(self.values.sector_row_stride)

    def _params(self) -> tuple[Param, ...]:
        """Pointers of everything: what the view leaves out is read by its address."""
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
        self.ends: dict[int, str] = {}  # rests by pieces
        for i, ring in self.rings.items():
            name = self.ends[i] = self.w.fresh(f"{self._load_of(i).buffer}_ends")
            shape = [self.slots * self.cols.rest // PIECE_ELEMS, 1, 1, PIECE_ELEMS]
            self.w.line(f"{name} = {ring.rest}._reinterpret(gl.{self.program.dtypes[i].kernel}, {shape}, {ring.rest_map}.layout)")

    def _patch_tail(self) -> None:
        """What the view leaves out is a piece that TMA brought nothing of: threads put it where the walks look for it."""
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
        """`shift` is `before`, but another value to the compiler in every walk: or masks would be computed once a row and held."""
        self.w.line(f"shift = before + zero * {self.values.walk}" if self.values.walk else "shift = before")
        super()._walk(walk, env, tiles, waits, refills)

    def _visit(self, tiles: list[Segment], chunk: Callable[[Segment], None], refills: bool) -> None:
        """The first chunk has a mask that the others of its copy have not."""
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
