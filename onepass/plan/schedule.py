"""Schedule: how a kernel runs, as a role for each side of its iteration space.

    rows     columns   known elsewhere as
    Block    Cover     persistent inner reduction: whole rows on chip; with `staged` loads, one row per CTA in shared memory
    Block    Loop      looped inner reduction, peeled; with split > 1, several CTAs share the columns
    Cover    Block     a whole column on chip: an outer result is used on the data
    Loop     Block     outer reduction; with split > 1, several CTAs share the rows; with `staged` loads, every full-size
                       input passes through shared memory, one tile at a time
    Loop     Cover     mix-order: inner and outer reductions in one pass over whole rows. With `staged` loads, each CTA loops
                       over rows in shared memory: inner reductions, and with `accumulates_columns` also outer ones.
                       With `ctas_per_row` > 1, several CTAs share each row, a range of columns each.
    Block    Block     pointwise

One emitter generates all of them.
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
    """Walk the side in steps: an unmasked main loop, then the remainder. `split` CTAs share it, interleaved."""

    step: int
    split: int = 1


Role: TypeAlias = Block | Cover | Loop

SECTOR = 32  # bytes; unaligned rows are read from the sector below their start (16 is not enough: measured)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a kernel runs: the role of each side, and where its inputs live."""

    rows: Role
    cols: Role
    warps: int
    stages: int = 1  # pipeline stages of the row loop; with `staged` loads, ring slots (rows or tiles)
    prefetch: int = 0  # copies of the next row that a ring of one row also has room for
    sector_elems: int = 0  # elements per sector if rows start inside a sector and are read from its start; 0: aligned rows
    resident: frozenset[int] = frozenset()  # multi-phase loads kept in registers, in their storage type
    hoisted: bool = False  # row vectors are loaded into registers once, before the row loop
    beside: bool = False  # row vectors are copied to shared memory once, before the row loop
    staged: frozenset[int] = frozenset()  # full-size loads that TMA copies to a ring in shared memory
    accumulates_columns: bool = False  # a loop over staged rows also accumulates reductions over rows (other row loops always do)
    ctas_per_row: int = 1  # CTAs that share a row; `cols` covers the columns of one of them, `split` counts groups of them
    registers: int = 0  # register cap per thread; 0: no cap

    @property
    def family(self) -> str:
        """The kernel family's name, in the field's terms."""
        match self.rows, self.cols:
            case Block(), Cover():
                return "inner staged" if self.staged else "inner"
            case Block(), Loop(split=1):
                return "inner looped"
            case Block(), Loop():
                return "inner split"
            case Cover(), Block():
                return "column"
            case Loop(split=k), Block():
                return "outer" + (" staged" if self.staged else "") + (" split" if k > 1 else "")
            case Loop(), Cover():
                if not self.staged:
                    return "mix-order"
                if self.ctas_per_row > 1:
                    return "mix-order multi-CTA"
                return "mix-order staged" if self.accumulates_columns else "inner staged"
            case _:
                return "pointwise"

    @property
    def splits(self) -> int:
        """The number of CTAs, or groups of CTAs, that share one result. Above 1, a second kernel joins their partial states."""
        match self.rows, self.cols:
            case Loop(), Cover() if self.staged and not self.accumulates_columns:  # CTAs share the rows, but no row's result
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

        extra = [f"{self.ctas_per_row} CTAs per row"] if self.ctas_per_row > 1 else []
        extra += [f"{self.warps} warps"]
        extra += [f"{self.stages} stages"] if self.stages > 1 else []
        extra += [f"prefetch {self.prefetch}"] if self.prefetch else []
        extra += [f"sector {self.sector_elems}"] if self.sector_elems else []
        extra += [f"{len(self.resident)} resident"] if self.resident else []
        extra += ["row vectors in registers"] if self.hoisted else ["row vectors in smem"] if self.beside else []
        extra += [f"{len(self.staged)} staged"] if self.staged else []
        extra += [f"at most {self.registers} registers"] if self.registers else []
        return f"{self.family}: rows {role(self.rows)}, cols {role(self.cols)}, " + ", ".join(extra)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, (n - 1).bit_length())


def cover(extent: int, widest: int) -> tuple[int, ...]:
    """Cover an extent with tiles of power-of-two width, without padding it to a power of two: 5120 = 4096 + 1024.

    A remainder becomes one overhanging tile if that is at least three quarters full. Otherwise its largest power of two is
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


def sector_span(extent: int, sector: int) -> int:
    """Columns between the partial sectors at a row's ends, for any row start. `sector` is in elements."""
    return (extent + sector - 1) // sector * sector - sector
