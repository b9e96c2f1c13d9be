"""References to tiles: index names, shapes and masks of one tile, and the order in which a walk visits tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.size import Size
from ..plan.schedule import Block, Cover, Loop, Role
from .expr import size_text
from .writer import Writer


@dataclass(frozen=True, slots=True)
class TileRef:
    """One tile: names of its row and column indices, its shape, and its masks."""

    row: str = "0"  # row indices, shaped [height, 1]
    col: str = "0"  # column indices, shaped [1, width]
    height: int = 1
    width: int = 1
    row_mask: str | None = None
    col_mask: str | None = None
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
    """A part of a walk: one tile, or a loop over tiles. `prepare` are the lines that name the tile's indices."""

    ref: TileRef
    prepare: tuple[str, ...] = ()
    loop: str | None = None
    start: str = "0"  # the name of the tile's first index


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the iteration space: its extent, its role, and how it maps to the lanes of a tile."""

    letter: str  # "r" or "c"
    extent: Size
    role: Role
    wide: bool  # 64-bit indices
    max_contiguous: int | None = None  # limit of a thread's vector width, if any

    def lanes(self, width: int) -> str:
        along = "[:, None]" if self.letter == "r" else "[None, :]"
        counted = f"tl.arange(0, {width})"
        if self.max_contiguous is not None and width > self.max_contiguous:
            counted = f"tl.max_contiguous({counted}, {self.max_contiguous})"
        return counted + along + (".to(tl.int64)" if self.wide else "")

    def place(self, ref: TileRef, index: str, start: str, width: int, inside: tuple[str, str] | None = None,
              tag: str = "") -> TileRef:
        """`ref` with a tile of this side. `inside` is its mask and the number of lanes inside."""
        mask, count = inside or (None, None)
        if self.letter == "r":
            return replace(ref, row=index, height=width, row_mask=mask, row_count=count, tag=ref.tag + tag)
        return replace(ref, col=index, col_start=start, width=width, col_mask=mask, col_count=count, tag=ref.tag + tag)


def block(side: Side, ref: TileRef, writer: Writer, pid: str) -> TileRef:
    """The tile of a CTA on a side with role Block."""
    assert isinstance(side.role, Block)
    size, letter = side.role.size, side.letter
    start = f"{pid} * {size}" if size > 1 else pid
    writer.line(f"{letter} = {start} + {side.lanes(size)}")
    if size == 1 or (isinstance(side.extent, int) and side.extent % size == 0):
        return side.place(ref, letter, f"({start})", size)
    extent = size_text(side.extent)
    writer.line(f"{letter}_in = {letter} < {extent}")
    return side.place(ref, letter, f"({start})", size, (f"{letter}_in", f"tl.minimum({extent} - {start}, {size})"))


def cover(side: Side, ref: TileRef, writer: Writer) -> list[Segment]:
    """All tiles of a side with role Cover. Their indices are computed once, before any loop."""
    assert isinstance(side.role, Cover) and isinstance(side.extent, int)
    segments, start = [], 0
    for k, width in enumerate(side.role.tiles):
        name = writer.fresh(f"{side.letter}{k}" if len(side.role.tiles) > 1 else f"{side.letter}_all")
        writer.line(f"{name} = {start} + {side.lanes(width)}" if start else f"{name} = {side.lanes(width)}")
        inside = None
        if start + width > side.extent:
            mask = writer.fresh(f"{name}_in")
            writer.line(f"{mask} = {name} < {side.extent}")
            inside = mask, str(max(0, side.extent - start))
        segments.append(Segment(side.place(ref, name, str(start), width, inside, f"_{k}" if len(side.role.tiles) > 1 else "")))
        start += width
    return segments


def loop(side: Side, ref: TileRef, writer: Writer, part: str | None, stages: int) -> list[Segment]:
    """A peeled loop: whole tiles without a mask, then a masked tail. With `part`, CTAs take tiles in turn."""
    assert isinstance(side.role, Loop)
    step, letter, split = side.role.step, side.letter, side.role.split
    start = writer.fresh(f"{letter}_start")
    index = writer.fresh(f"{letter}_at")
    mask = writer.fresh(f"{letter}_at_in")
    extent = size_text(side.extent)
    whole = str(side.extent // step * step) if isinstance(side.extent, int) else f"{extent} // {step} * {step}"
    if step == 1:
        whole = extent
    named = (f"{index} = {start} + {side.lanes(step)}",)
    stride = step * split
    first = "0" if not part or split == 1 else part if step == 1 else f"{part} * {step}"
    deep = f", num_stages={stages}" if stages > 1 else ""
    segments = []
    if not (isinstance(side.extent, int) and side.extent < step):
        header = f"for {start} in tl.range({first}, {whole}, {stride}{deep})"
        segments.append(Segment(side.place(ref, index, start, step), named, header, start))
    if step > 1 and not (isinstance(side.extent, int) and side.extent % step == 0):
        masked = (*named, f"{mask} = {index} < {extent}")
        inside = side.place(ref, index, start, step, (mask, f"({extent} - {start})"))
        if split > 1:  # the tail belongs to the first CTA
            header = f"for {start} in tl.range({whole} + {first}, {extent}, {stride})"
            segments.append(Segment(inside, masked, header, start))
        else:
            segments.append(Segment(inside, (f"{start} = {whole}", *masked), None, start))
    return segments


def sectors(side: Side, ref: TileRef, sector_elems: int, stages: int, writer: Writer) -> list[Segment]:
    """A walk along a row that starts inside a memory sector, with columns counted from the start of that sector.

    The first `before` elements of the first sector belong to the previous row. The two partial sectors at the ends of the row form
    one small tile. The whole sectors between, [sector_elems, whole), are read with vector loads. So is the last tile, because its
    mask changes only at a multiple of `sector_elems`. A row that ends in its first sector has no second partial sector.
    """
    extent = size_text(side.extent)
    whole = f"({extent} + before) // {sector_elems} * {sector_elems}"
    may_be_short = not isinstance(side.extent, int) or side.extent < sector_elems
    writer.line("whole = " + (f"tl.maximum({whole}, {sector_elems})" if may_be_short else whole))
    edge = (
        f"lane = {side.lanes(2 * sector_elems)}",
        f"u_edge = tl.where(lane < {sector_elems}, lane, whole + lane - {sector_elems})",
        "c_edge = u_edge - before",
        f"edge_in = (c_edge >= 0) & (c_edge < {extent})",
    )
    broken = "edge_in", f"({extent} - (whole - {sector_elems}))"
    segments = [Segment(replace(side.place(ref, "c_edge", "0", 2 * sector_elems, broken, "_edge"), aligned="u_edge"), edge)]

    def tile(start: str, width: int, masked: bool, tag: str, header: str | None = None) -> Segment:
        u, c, mask = (writer.fresh(f"{name}{tag}") for name in ("u", "c", "in"))
        lines = [f"{u} = {start} + {side.lanes(width)}", f"{c} = {u} - before"]
        lines += [f"{mask} = {u} < whole"] if masked else []
        inside = (mask, f"tl.minimum(tl.maximum(whole - {start}, 0), {width})") if masked else None
        return Segment(replace(side.place(ref, c, start, width, inside, tag), aligned=u), tuple(lines), header)

    match side.role:
        case Cover(tiles):
            start = sector_elems
            for k, width in enumerate(tiles):
                segments.append(tile(str(start), width, start + width > _least_whole(side.extent, sector_elems), f"_{k}"))
                start += width
        case Loop(step=step):
            deep = f", num_stages={stages}" if stages > 1 else ""
            writer.line(f"last = {sector_elems} + (whole - {sector_elems}) // {step} * {step}")
            segments.append(tile("u_start", step, False, "_main", f"for u_start in tl.range({sector_elems}, last, {step}{deep})"))
            segments.append(tile("last", step, True, "_tail"))
        case _:
            raise AssertionError("rows are read from sector starts only where they are walked")
    return segments


def _least_whole(extent: Size, sector_elems: int) -> int:
    """A lower bound of the end of the whole sectors."""
    return extent // sector_elems * sector_elems if isinstance(extent, int) else 0
