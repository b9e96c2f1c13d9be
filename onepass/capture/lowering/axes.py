"""Dims as tuples of atomic axes ("atoms"), and how atoms are split, regrouped and unified.

Each dim of a tensor is a row-major tuple of atoms: `[B*T, D]` may be `((b, t), (d,))`, and a dim of size 1 is `()`. A reshape
splits and regroups atoms; an elementwise op unifies the atoms that meet in it. Both apply to the whole graph, so `Atoms`
records them until the end, when every atom resolves to its final atoms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from ...ir.size import Size, divide, mul, product

Dim: TypeAlias = tuple[str, ...]
Dims: TypeAlias = tuple[Dim, ...]


class Inexpressible(Exception):
    """A value cannot be written at the requested coordinates."""


def common_factors(left: Sequence[Size], right: Sequence[Size]) -> tuple[Size, ...] | None:
    """The coarsest row-major factors into which both lists of sizes can be split, or None.

    (6, 4) and (2, 12) -> (2, 3, 4); (2, 3) and (3, 2) -> None.
    """
    factors: list[Size] = []
    a, b = list(left)[::-1], list(right)[::-1]  # outermost last, where pop takes it
    while a and b:
        x, y = a.pop(), b.pop()
        if x == y:
            factors.append(x)
        elif (rest := divide(x, y)) is not None:
            factors.append(y)
            a.append(rest)
        elif (rest := divide(y, x)) is not None:
            factors.append(x)
            b.append(rest)
        else:
            return None
    return None if a or b else tuple(factors)


@dataclass(frozen=True, slots=True)
class Segment:
    """A minimal run of sizes on each side with equal products."""

    left: tuple[int, int]  # start and end position, half-open
    right: tuple[int, int]


def segments(left: tuple[Size, ...], right: tuple[Size, ...]) -> tuple[Segment, ...]:
    """Cut two lists of sizes into the shortest runs with equal products.

    The full lists have equal products at run time, even if their symbols do not show it (`s` and `s//2, 2`). So the part that is
    left between runs matched from the front and runs matched from the back has equal products too.
    """
    cuts = _common_ends(left, right)
    if cuts[-1] != (len(left), len(right)):
        back = [(len(left) - i, len(right) - j) for i, j in _common_ends(left[::-1], right[::-1])]
        cuts += [end for end in reversed(back) if end[0] >= cuts[-1][0] and end[1] >= cuts[-1][1] and end != cuts[-1]]
    return tuple(Segment((a, b), (c, d)) for (a, c), (b, d) in pairwise(cuts))


def _common_ends(left: tuple[Size, ...], right: tuple[Size, ...]) -> list[tuple[int, int]]:
    """All pairs of prefix lengths whose products are equal."""
    ends = {product(left[:i]): i for i in range(len(left) + 1)}
    products = [product(right[:j]) for j in range(len(right) + 1)]
    return [(ends[p], j) for j, p in enumerate(products) if p in ends]


def cut(atoms: Sequence[str], extents: Sequence[Size], sizes: Sequence[Size]) -> Dims:
    """Cut atoms into runs whose extents multiply to each of `sizes`. A size of 1 takes no atom."""
    dims: list[Dim] = []
    at = 0
    for size in sizes:
        end = _end_of(size, extents, at)
        dims.append(tuple(atoms[at:end]))
        at = end
    return tuple(dims)


def _end_of(size: Size, extents: Sequence[Size], start: int) -> int:
    """The end of the run of extents that begins at `start` and multiplies to `size`."""
    have: Size = 1
    for end in range(start, len(extents)):
        if have == size:
            return end
        have = mul(have, extents[end])
    if have != size:
        raise Inexpressible
    return len(extents)


class Atoms:
    """The atoms of one graph: extents, what each was split into or unified with, and which must stay distinct.

    Two atoms that index the same value are different positions, and must never become one axis.
    """

    def __init__(self) -> None:
        self._extents: dict[str, Size] = {}
        self._replaced_by: dict[str, Dim] = {}  # the atoms it was split into, or the atom it was unified with
        self._distinct: dict[str, set[str]] = {}  # only between final atoms

    def fresh(self, extent: Size) -> str:
        """A new atom. A dim of size 1 has no atom: it is `()`."""
        assert extent != 1
        name = f"a{len(self._extents)}"
        self._extents[name] = extent
        self._distinct[name] = set()
        return name

    def dim(self, extent: Size) -> Dim:
        """A new dim: one fresh atom, or none if its size is 1."""
        return () if extent == 1 else (self.fresh(extent),)

    def extent(self, atom: str) -> Size:
        """The number of positions of an atom."""
        return self._extents[atom]

    def size(self, dim: Iterable[str]) -> Size:
        """The number of positions of a dim."""
        return product([self._extents[a] for a in dim])

    def final(self, atom: str) -> Dim:
        """The final atoms that an atom has become, row-major."""
        if atom not in self._replaced_by:
            return (atom,)
        return tuple(a for part in self._replaced_by[atom] for a in self.final(part))

    def resolve(self, dim: Iterable[str]) -> Dim:
        """A dim in final atoms."""
        return tuple(a for atom in dim for a in self.final(atom))

    def split(self, dim: Dim, factors: Sequence[Size]) -> Dim:
        """Split the atoms of a resolved dim so that their extents are `factors`. Applies everywhere."""
        parts: list[str] = []
        for atom, sizes in zip(dim, _runs([self._extents[a] for a in dim], factors), strict=True):
            parts += [atom] if len(sizes) == 1 else self._split(atom, sizes)
        return tuple(parts)

    def split_as(self, atom: str, sizes: Sequence[Size]) -> Dim:
        """Split an atom into sizes whose product equals its extent only at run time (`s` as `s//2, 2`)."""
        return self._split(atom, sizes)

    def _split(self, atom: str, sizes: Sequence[Size]) -> Dim:
        parts = tuple(self.fresh(size) for size in sizes)
        neighbors = self._distinct.pop(atom)
        for other in neighbors:
            self._distinct[other].remove(atom)
        self._replaced_by[atom] = parts
        for part in parts:
            self.keep_distinct((part, *neighbors), only=part)
        self.keep_distinct(parts)
        return parts

    def keep_distinct(self, atoms: Iterable[str], only: str | None = None) -> None:
        """Record that these atoms index one value, so no two of them may be unified. `only`: just the pairs with this atom."""
        names = self.resolve(atoms)
        for a in names if only is None else (only,):
            for b in names:
                if a != b:
                    self._distinct[a].add(b)
                    self._distinct[b].add(a)

    def are_distinct(self, a: str, b: str) -> bool:
        """Whether two final atoms index the same value somewhere."""
        return b in self._distinct[a]

    def unify(self, a: str, b: str) -> None:
        """Unify two final atoms of equal extent. Applies everywhere."""
        assert self._extents[a] == self._extents[b] and not self.are_distinct(a, b)
        if a == b:
            return
        neighbors = self._distinct.pop(b)
        for other in neighbors:
            self._distinct[other].remove(b)
        self._replaced_by[b] = (a,)
        self.keep_distinct((a, *neighbors), only=a)


def _runs(sizes: Sequence[Size], factors: Sequence[Size]) -> list[Sequence[Size]]:
    """For each size, the run of factors it is the product of."""
    runs: list[Sequence[Size]] = []
    at = 0
    for size in sizes:
        end = _end_of(size, factors, at)
        runs.append(factors[at:end])
        at = end
    return runs
