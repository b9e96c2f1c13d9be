"""Schedule: a role for every side of a kernel's space. One emitter writes them all.

    rows     columns   what it is called elsewhere
    Block    Cover     persistent inner reduction: whole rows on chip; with `parked` loads, one row a CTA in shared memory
    Block    Loop      looped inner reduction, peeled; with split > 1 the columns are shared by several CTAs
    Cover    Block     a whole column on chip: an outer result used on the data
    Loop     Block     outer reduction; with split > 1 the rows are shared by several CTAs; with `parked` loads, all that are
                       full-size come through shared memory, a tile of every input at a time
    Loop     Cover     mix-order: inner and outer reductions in one pass over whole rows; with `parked` loads, over rows that wait
                       in shared memory, of which every CTA takes one after another: reductions along them, and where the
                       loop `gathers`, also down their columns; `shared`, several CTAs take every row together, a part of its
                       columns each
    Block    Block     pointwise
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Block:
    """One tile of `size` per CTA; the grid covers the side."""

    size: int


@dataclass(frozen=True, slots=True)
class Cover:
    """The whole side in every CTA, as unrolled tiles of these widths; the last may overhang."""

    tiles: tuple[int, ...]

    @property
    def width(self) -> int:
        return sum(self.tiles)


@dataclass(frozen=True, slots=True)
class Loop:
    """Walk the side `step` at a time: an unmasked main loop, then what is left. `split` CTAs share it, strided."""

    step: int
    split: int = 1


Role: TypeAlias = Block | Cover | Loop

SECTOR = 32  # bytes; rows of odd length are read from the sector below their start (16 is not enough: measured)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a kernel runs."""

    rows: Role
    cols: Role
    warps: int
    stages: int = 1  # of the row loop's software pipeline; rows, or tiles of them, that a ring in shared memory has room for
    prefetch: int = 0  # copies of the next row that a ring of one row has room for besides
    sector_elems: int = 0  # elements of a sector, when rows start inside one and are read from its beginning; 0: rows start aligned
    resident: frozenset[int] = frozenset()  # multi-phase loads kept in registers, in their storage type
    hoisted: bool = False  # row vectors are loaded once before the row loop, not once per row
    beside: bool = False  # row vectors wait in shared memory beside the ring, put there once before the row loop
    staged: frozenset[int] = frozenset()  # full-size loads that TMA brings to a ring in shared memory, and are read there
    accumulates_columns: bool = False  # a loop over parked rows also carries reductions over rows; one over others always does
    ctas_per_row: int = 1  # CTAs that take a row together; `cols` then covers the part that each of them has, and `split` counts groups
    registers: int = 0  # the most that a thread may take; 0: as many as the compiler sees fit

    @property
    def family(self) -> str:
        """The name the field knows it by."""
        match self.rows, self.cols:
            case Block(), Cover():
                return "inner parked" if self.staged else "inner"
            case Block(), Loop(split=1):
                return "inner looped"
            case Block(), Loop():
                return "inner split"
            case Cover(), Block():
                return "column"
            case Loop(split=k), Block():
                return "outer" + (" parked" if self.staged else "") + (" split" if k > 1 else "")
            case Loop(), Cover():
                if not self.staged:
                    return "mix-order"
                return "mix-order shared" if self.ctas_per_row > 1 else "mix-order parked" if self.accumulates_columns else "inner parked"
            case _:
                return "pointwise"

    @property
    def splits(self) -> int:
        """How many CTAs, or groups of them, share one result; above 1 a second kernel joins their partial states."""
        match self.rows, self.cols:
            case Loop(), Cover() if self.staged and not self.accumulates_columns:  # they share the rows, and nothing that a row gives
                return 1
            case Loop(split=k), _:
                return k
            case _, Loop(split=k):
                return k
            case _:
                return 1

    def __str__(self) -> str:
        def role(r: Role) -> str:
            match r:
                case Block(size):
                    return f"block {size}"
                case Cover(tiles):
                    return "cover " + "+".join(str(t) for t in tiles)
                case Loop(step, split):
                    return f"loop {step}" + (f" split {split}" if split > 1 else "")

        extra = [f"{self.ctas_per_row} CTAs a row"] if self.ctas_per_row > 1 else []
        extra += [f"{self.warps} warps"]
        extra += [f"{self.stages} stages"] if self.stages > 1 else []
        extra += [f"{self.prefetch} {'copy' if self.prefetch == 1 else 'copies'} ahead"] if self.prefetch else []
        extra += [f"lead {self.sector_elems}"] if self.sector_elems else []
        extra += [f"{len(self.resident)} resident"] if self.resident else []
        extra += ["hoisted"] if self.hoisted else ["row vectors beside"] if self.beside else []
        extra += [f"{len(self.staged)} parked"] if self.staged else []
        extra += [f"at most {self.registers} registers"] if self.registers else []
        return f"{self.family}: rows {role(self.rows)}, cols {role(self.cols)}, " + ", ".join(extra)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, (n - 1).bit_length())


def cover(extent: int, widest: int) -> tuple[int, ...]:
    """Tiles of power-of-two width over an extent, without padding to a power of two: 5120 = 4096 + 1024.

    A remainder goes to one overhanging tile when that is at least three quarters full, else its largest power of two is
    split off first.
    """
    tiles = [widest] * (extent // widest)
    rest = extent % widest
    while rest:
        up = power_of_two(rest)
        if 4 * rest >= 3 * up or up <= 16 or len(tiles) >= 24:
            return (*tiles, up)
        tiles.append(up // 2)
        rest -= up // 2
    return tuple(tiles)


def sector_span(extent: int, lead: int) -> int:
    """How many columns lie between the broken sectors at a row's ends, wherever the row starts."""
    return (extent + lead - 1) // lead * lead - lead
