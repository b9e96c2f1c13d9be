"""Rows parked in shared memory that start anywhere: their tensors are seen as one long row, cut into pieces of 64 elements.

TMA describes only rows that start on 16 bytes. Where they do not (50257 columns of 2 bytes), it brings the pieces that a row lies
in. `before` elements of the first one belong to the row above; everything in shared memory is counted from that piece's beginning,
and so are stores, which thereby stay aligned. The first chunk masks what is before the row and the rest masks what is behind it;
chunks between need no mask. The view has whole pieces only. What it leaves out at the tensor's end, less than a piece, lies in the
rest of the last row, and is read from its address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..ir.program import Load, Store
from ..ir.size import Bindings
from ..plan.kernel import Kernel
from ..plan.parked import FLAT, Chunks
from ..plan.schedule import Schedule
from .expr import size_text
from .gluon import LATER, REST, Emitter, Names, Parked
from .source import Param, ParamKind, Source, TensorView
from .spots import Segment, Spot
from .values import Env

OWN = ("row_at", "before", "piece", "sector", "u_at", "u_first", "c_first", "first_in", "u_rest", "covered", "left_out",
       "early_piece", "ahead_piece")


FIRST = "_first"  # marks names of the chunk that a row begins in


class FlatParked(Parked):
    """Values of which some wait in shared memory, with what is before and behind their row."""

    def _load(self, i: int, node: Load, spot: Spot, env: Env) -> str:
        ring = self.rings.get(i)
        waiting = super()._load(i, node, spot, env)
        if ring is None or spot.tag != REST:
            return waiting
        there = f"gl.load({node.buffer}_ptr + (sector + {spot.aligned}), mask=left_out, other=0)"
        return f"gl.where(left_out, {there}, {waiting})"


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel that parks rows of a flat view; `wide` makes it count elements in 64 bits."""
    return FlatEmitter(kernel, schedule, bindings, name, wide).source()


class FlatEmitter(Emitter):
    """Writes a kernel whose rows are brought by the pieces of a flat view."""

    flat, own, values_of = True, OWN, FlatParked

    def at_once(self, cols: Chunks) -> int:
        return cols.at_once(FLAT)

    @property
    def _stride(self) -> str:
        assert self.values.lead_stride is not None
        return size_text(self.values.lead_stride)

    def _params(self) -> tuple[Param, ...]:
        """Pointers of everything: what the view leaves out is read by its address."""
        params = super()._params()
        named = {p.name for p in params if p.kind is ParamKind.POINTER}
        used = {n.buffer for n in self.program.nodes if isinstance(n, (Load, Store))} - named
        more = [Param(b.name, ParamKind.POINTER, f"{b.name}_ptr", b.dtype) for b in self.program.buffers if b.name in used]
        return (*more, *params)

    def _view(self, i: int, taken: tuple[int, ...]) -> TensorView:
        return replace(super()._view(i, taken), shape=(self.rows, self.extent), strides=(self._step(i), 1), flat=FLAT)

    def _tiles(self) -> list[Segment]:
        width, count, rest = self.cols.width, self.cols.count, self.cols.rest
        start, w = width * count, self.w
        w.line(f"lanes = gl.arange(0, {width}, layout=gl.SliceLayout(0, TILE))[None, :]")
        w.line(f"u_rest = {start} + gl.arange(0, {rest}, layout=gl.SliceLayout(0, TILE))[None, :]")
        last = f"(row_count{'.to(gl.int64)' if self.wide else ''} - 1) * {self._stride}"
        w.line(f"covered = ({last} + {self.extent}) // {FLAT} * {FLAT}")
        first = Spot(col="c_first", width=width, col_mask="first_in", col_count=f"({width} - before)", aligned="lanes",
                     tag=FIRST)
        whole = Spot(col="c_at", width=width, col_start=f"(k * {width})", aligned="u_at")
        behind = Spot(col="c_rest", width=rest, col_start=str(start), col_mask="c_rest_in", aligned="u_rest", tag=REST,
                      col_count=f"({self.extent - start} + before)")
        self.values.numbers[FIRST] = "0"
        found = [Segment(first, ("c_first = lanes - before", "first_in = lanes >= before"))]
        if count > 1:
            found.append(Segment(whole, (f"u_at = k * {width} + lanes", "c_at = u_at - before"), f"for k in range(1, {count})"))
        inside = (f"c_rest_in = u_rest < before + {self.extent}", "left_out = c_rest_in & (sector + u_rest >= covered)")
        return [*found, Segment(behind, ("c_rest = u_rest - before", *inside))]

    def _row_start(self) -> None:
        super()._row_start()
        self.w.line(f"row_at = r * {self._stride}")
        self.w.line(f"before = (row_at % {FLAT}){'.to(gl.int32)' if self.wide else ''}")
        self.w.line(f"sector = row_at // {FLAT} * {FLAT}")

    def _visit(self, tiles: list[Segment], chunk: Callable[[Segment], None], drains: bool) -> None:
        """The first chunk has a mask that the others of its copy have not."""
        if not drains:
            super()._visit(tiles, chunk, drains)
            return
        first, whole, rest = tiles[0], tiles[1], tiles[-1]
        chunk(first)
        if self.together > 1:
            with self.w.block(f"for k in range(1, {self.together})"):
                chunk(whole)
        self._release()
        self._copy(LATER, "0", rest=False)
        if self.copies > 1:
            self._drain(1, partial(chunk, whole))
        self._stretch(rest, partial(chunk, rest), drains)

    def _expect(self, names: Names, row: str) -> None:
        super()._expect(names, row)
        counted = f"{names.row}{'.to(gl.int64)' if self.wide else ''} * {self._stride} // {FLAT}"
        self.w.line(f"{names.row}_piece = ({counted}){'.to(gl.int32)' if self.wide else ''}")

    def _where(self, names: Names, taken: tuple[int, ...], along: str) -> str:
        return f"[0, {names.row}_piece{f' + {along}' if along != '0' else ''}, 0]"
