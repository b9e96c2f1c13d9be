"""References to tiles: index names, shapes and masks of one tile, and the order in which a walk visits tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.size import Size
from ..plan import schedule
from ..plan.schedule import Block, Cover, Role
from .builder import Builder
from .expr import size_text
from .kernel_ir import Assign, Expr, For, Loop, Name

TILE_SUFFIX = "NAME_tT: tile T of a row or column"


@dataclass(frozen=True, slots=True)
class TileRef:
    """One tile: names of its row and column indices, its shape, and its masks."""

    row: str = "0"  # row indices, shaped [height, 1]
    col: str = "0"  # column indices, shaped [1, width]
    height: int = 1
    width: int = 1
    row_mask: tuple[Expr, ...] = ()  # names or comparisons, of which all must hold
    col_mask: tuple[Expr, ...] = ()
    aligned: str | None = None  # columns counted from the start of the row's first sector, if rows are read by whole sectors
    row_count: str | None = None  # number of rows inside the mask, known without a reduction
    col_count: str | None = None
    col_start: str = "0"  # the tile's first column
    tag: str = ""  # suffix of names, different for each unrolled tile

    @property
    def shape(self) -> str:
        return f"[{self.height}, {self.width}]"

    def at_rows(self, of: TileRef) -> TileRef:
        """This tile's columns with the rows of another tile."""
        return replace(self, row=of.row, height=of.height, row_mask=of.row_mask, row_count=of.row_count)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a walk: one tile, or a loop over tiles. `prepare` names the tile's indices."""

    ref: TileRef
    prepare: tuple[Assign, ...] = ()
    loop: For | None = None
    start: str = "0"  # the name of the tile's first index
    first: int = 0  # the number of the first tile of a loop over chunks


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the iteration space: its extent, its role, and how it maps to the lanes of a tile."""

    what: str  # "row" or "col"
    extent: Size
    role: Role
    wide: bool  # 64-bit indices
    max_contiguous: int | None = None  # limit of a thread's vector width, if any

    @property
    def indices(self) -> Name:
        """What the indices of a tile are called."""
        return Name(f"{self.what}s")

    def lanes(self, width: int) -> str:
        along = "[:, None]" if self.what == "row" else "[None, :]"
        counted = f"tl.arange(0, {width})"
        if self.max_contiguous is not None and width > self.max_contiguous:
            counted = f"tl.max_contiguous({counted}, {self.max_contiguous})"
        return counted + along + (".to(tl.int64)" if self.wide else "")

    def place(
        self, ref: TileRef, index: str, start: str, width: int, inside: tuple[Name, str] | None = None, tag: str = ""
    ) -> TileRef:
        """`ref` with a tile of this side. `inside` is its mask and the number of lanes inside."""
        mask, count = ((inside[0],), inside[1]) if inside else ((), None)
        if self.what == "row":
            return replace(ref, row=index, height=width, row_mask=mask, row_count=count, tag=ref.tag + tag)
        return replace(ref, col=index, col_start=start, width=width, col_mask=mask, col_count=count, tag=ref.tag + tag)


def named(name: str, value: Expr) -> Assign:
    """An assignment of arithmetic to a name."""
    return Assign((Name(name),), value)


def block(side: Side, ref: TileRef, builder: Builder, pid: str) -> TileRef:
    """The tile of a CTA on a side with role Block."""
    assert isinstance(side.role, Block)
    size, indices = side.role.size, side.indices
    start = f"{pid} * {size}" if size > 1 else pid
    builder.set(indices, f"{start} + {side.lanes(size)}")
    if size == 1 or (isinstance(side.extent, int) and side.extent % size == 0):
        return side.place(ref, indices, start, size)
    extent = size_text(side.extent)
    mask = builder.set(f"{indices}_in", f"{indices} < {extent}")
    return side.place(ref, indices, start, size, (mask, f"tl.minimum({extent} - {start}, {size})"))


def cover(side: Side, ref: TileRef, builder: Builder) -> list[Segment]:
    """All tiles of a side with role Cover. Their indices are computed once, before any loop."""
    assert isinstance(side.role, Cover) and isinstance(side.extent, int)
    segments, start, alone = [], 0, len(side.role.tiles) == 1
    if not alone:
        builder.explain(TILE_SUFFIX)
    for k, width in enumerate(side.role.tiles):
        name = Name(side.indices) if alone else builder.fresh(f"{side.indices}{k}")
        builder.set(name, f"{start} + {side.lanes(width)}" if start else side.lanes(width))
        inside = None
        if start + width > side.extent:
            mask = builder.set(f"{name}_in" if alone else builder.fresh(f"{name}_in"), f"{name} < {side.extent}")
            inside = mask, str(max(0, side.extent - start))
        segments.append(Segment(side.place(ref, name, str(start), width, inside, "" if alone else f"_t{k}")))
        start += width
    return segments


def loop(side: Side, ref: TileRef, builder: Builder, part: str | None, stages: int) -> list[Segment]:
    """A peeled loop: whole tiles without a mask, then a masked tail. With `part`, CTAs take tiles in turn."""
    assert isinstance(side.role, schedule.Loop)
    step, index, split = side.role.step, side.indices, side.role.split
    start, mask = Name(side.what if step == 1 else f"{side.what}_start"), Name(f"{index}_in")
    extent = size_text(side.extent)
    whole = str(side.extent // step * step) if isinstance(side.extent, int) else f"{extent} // {step} * {step}"
    if step == 1:
        whole = extent
    prepare = (named(index, f"{start} + {side.lanes(step)}"),)
    stride = step * split
    first = "0" if not part or split == 1 else part if step == 1 else f"{part} * {step}"
    segments = []
    if not (isinstance(side.extent, int) and side.extent < step):
        header = For(start, first, whole, stride, Loop.PIPELINED, stages)
        segments.append(Segment(side.place(ref, index, start, step), prepare, header, start))
    if step > 1 and not (isinstance(side.extent, int) and side.extent % step == 0):
        masked = (*prepare, named(mask, f"{index} < {extent}"))
        inside = side.place(ref, index, start, step, (mask, f"({extent} - {start})"))
        if split > 1:  # the tail belongs to the first CTA
            segments.append(Segment(inside, masked, For(start, f"{whole} + {first}", extent, stride, Loop.PIPELINED), start))
        else:
            segments.append(Segment(inside, (named(start, whole), *masked), None, start))
    return segments


def sectors(side: Side, ref: TileRef, sector_elems: int, stages: int, builder: Builder) -> list[Segment]:
    """A walk along a row that starts inside a memory sector, with columns counted from the start of that sector.

    The first `before` elements of the first sector belong to the previous row. The two partial sectors at the ends of the row form
    one small tile. The whole sectors between, [sector_elems, whole), are read with vector loads. So is the last tile, because its
    mask changes only at a multiple of `sector_elems`. A row that ends in its first sector has no second partial sector.
    """
    whole = f"({size_text(side.extent)} + before) // {sector_elems} * {sector_elems}"
    may_be_short = not isinstance(side.extent, int) or side.extent < sector_elems
    builder.set("whole", f"tl.maximum({whole}, {sector_elems})" if may_be_short else whole)
    segments = [_edges(side, ref, sector_elems)]

    def tile(start: str, width: int, masked: bool, tag: str, header: For | None = None) -> Segment:
        pos, cols, mask = (builder.fresh(f"{name}{tag}") for name in ("pos", "cols", "in"))
        prepare = [named(pos, f"{start} + {side.lanes(width)}"), named(cols, f"{pos} - before")]
        prepare += [named(mask, f"{pos} < whole")] if masked else []
        inside = (mask, f"tl.minimum(tl.maximum(whole - {start}, 0), {width})") if masked else None
        return Segment(replace(side.place(ref, cols, start, width, inside, tag), aligned=pos), tuple(prepare), header)

    match side.role:
        case Cover(tiles):
            start = sector_elems
            for k, width in enumerate(tiles):
                segments.append(tile(str(start), width, start + width > _least_whole(side.extent, sector_elems), f"_{k}"))
                start += width
        case schedule.Loop(step=step):
            builder.set("last", f"{sector_elems} + (whole - {sector_elems}) // {step} * {step}")
            header = For(Name("pos_start"), str(sector_elems), "last", step, Loop.PIPELINED, stages)
            segments.append(tile("pos_start", step, False, "_main", header))
            segments.append(tile("last", step, True, "_tail"))
        case _:
            raise AssertionError("rows are read from sector starts only where they are walked")
    return segments


def _edges(side: Side, ref: TileRef, sector_elems: int) -> Segment:
    """The tile of the two partial sectors at the ends of a row."""
    extent = size_text(side.extent)
    prepare = (
        named("lane", side.lanes(2 * sector_elems)),
        named("pos_edge", f"tl.where(lane < {sector_elems}, lane, whole + lane - {sector_elems})"),
        named("cols_edge", "pos_edge - before"),
        named("edge_in", f"(cols_edge >= 0) & (cols_edge < {extent})"),
    )
    inside = Name("edge_in"), f"({extent} - (whole - {sector_elems}))"
    return Segment(replace(side.place(ref, "cols_edge", "0", 2 * sector_elems, inside, "_edge"), aligned="pos_edge"), prepare)


def _least_whole(extent: Size, sector_elems: int) -> int:
    """A lower bound of the end of the whole sectors."""
    return extent // sector_elems * sector_elems if isinstance(extent, int) else 0
