"""Roles: what a kernel does with each side of its iteration space, and the widths of the tiles that cover a side.

Block    one tile per CTA; the grid covers the side
Cover    every CTA covers the whole side, as unrolled tiles
Loop     a CTA walks the side in steps; several CTAs may split it
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
MAX_UNROLLED_TILES = 24  # of a cover; limits the length of a kernel's text
PIECE_ELEMS = 64  # unaligned rows are staged in pieces of this many elements, starting with the piece a row starts in


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, (n - 1).bit_length())


def is_power_of_two(n: int) -> bool:
    """Whether a number is a power of two."""
    return n > 0 and n & (n - 1) == 0


def cover(extent: int, widest: int) -> tuple[int, ...]:
    """Cover an extent with tiles of power-of-two width, without padding it to a power of two: 5120 = 4096 + 1024.

    A remainder becomes one overhanging tile if that is at least three quarters full. Otherwise its largest power of two is
    split off first.
    """
    tiles = [widest] * (extent // widest)
    rest = extent % widest
    while rest:
        up = power_of_two(rest)
        if 4 * rest >= 3 * up or up <= 16 or len(tiles) >= MAX_UNROLLED_TILES:
            return (*tiles, up)
        tiles.append(up // 2)
        rest -= up // 2
    return tuple(tiles)


def sector_span(extent: int, sector: int) -> int:
    """Columns between the partial sectors at a row's ends, for any row start. `sector` is in elements."""
    return (extent + sector - 1) // sector * sector - sector
