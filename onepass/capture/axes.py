"""Dims as tuples of atomic axes: splitting, regrouping and unifying them.

A dim of a tensor value is a tuple of atoms, row-major: `[B*T, D]` may be `((b, t), (d,))`, and a dim of size 1 is `()`.
A reshape splits atoms and regroups them, an elementwise op makes the atoms that meet in it one. Both hold for the whole
graph, so `Atoms` remembers them until the end, when every atom resolves to the final ones it became.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from ..ir.size import Size, divide, mul, product

Dim: TypeAlias = tuple[str, ...]
Dims: TypeAlias = tuple[Dim, ...]


class Inexpressible(Exception):
    """A value has no form at the coordinates asked for."""


def common_factors(left: Sequence[Size], right: Sequence[Size]) -> tuple[Size, ...] | None:
    """The coarsest row-major factors that both lists are products of runs of; None if there are none.

    (6, 4) and (2, 12) -> (2, 3, 4); (2, 3) and (3, 2) -> None.
    """
    factors: list[Size] = []
    a, b = list(left)[::-1], list(right)[::-1]  # the outermost at the end, where pop takes it
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
    """A run of sizes on either side with the same product, none shorter."""

    left: tuple[int, int]  # positions, half open
    right: tuple[int, int]


def segments(left: tuple[Size, ...], right: tuple[Size, ...]) -> tuple[Segment, ...]:
    """Cut two lists into the shortest runs whose products agree.

    The whole lists have the same product when the graph runs, whether or not their symbols show it (`s` and `s//2, 2`). So what is
    left between runs that agree from the front and runs that agree from the back has the same product too.
    """
    cuts = _common_ends(left, right)
    if cuts[-1] != (len(left), len(right)):
        back = [(len(left) - i, len(right) - j) for i, j in _common_ends(left[::-1], right[::-1])]
        cuts += [end for end in reversed(back) if end[0] >= cuts[-1][0] and end[1] >= cuts[-1][1] and end != cuts[-1]]
    return tuple(Segment((a, b), (c, d)) for (a, c), (b, d) in pairwise(cuts))


def _common_ends(left: tuple[Size, ...], right: tuple[Size, ...]) -> list[tuple[int, int]]:
    """How many sizes of either list, from the front, have the same product."""
    ends = {product(left[:i]): i for i in range(len(left) + 1)}
    products = [product(right[:j]) for j in range(len(right) + 1)]
    return [(ends[p], j) for j, p in enumerate(products) if p in ends]


def cut(atoms: Sequence[str], extents: Sequence[Size], sizes: Sequence[Size]) -> Dims:
    """Runs of atoms whose extents multiply to each of `sizes`; a size of 1 takes none."""
    dims: list[Dim] = []
    at = 0
    for size in sizes:
        end = _end_of(size, extents, at)
        dims.append(tuple(atoms[at:end]))
        at = end
    return tuple(dims)


def _end_of(size: Size, extents: Sequence[Size], start: int) -> int:
    """Where the run of extents ends that begins at `start` and multiplies to a size."""
    have: Size = 1
    for end in range(start, len(extents)):
        if have == size:
            return end
        have = mul(have, extents[end])
    if have != size:
        raise Inexpressible
    return len(extents)


class Atoms:
    """Every atom of one graph: its extent, what it was split into or merged with, and which atoms must stay apart.

    Two atoms that index one value at once are different positions, and may never become one axis.
    """

    def __init__(self) -> None:
        self._extents: dict[str, Size] = {}
        self._replaced_by: dict[str, Dim] = {}  # split into these, or merged into this one
        self._distinct: dict[str, set[str]] = {}  # between atoms that are still themselves

    def fresh(self, extent: Size) -> str:
        """A new atom. An extent of 1 has no atom: such a dim is `()`."""
        assert extent != 1
        name = f"a{len(self._extents)}"
        self._extents[name] = extent
        self._distinct[name] = set()
        return name

    def dim(self, extent: Size) -> Dim:
        """A new dim of that size: one fresh atom, or none for a size of 1."""
        return () if extent == 1 else (self.fresh(extent),)

    def extent(self, atom: str) -> Size:
        """How many positions an atom has."""
        return self._extents[atom]

    def size(self, dim: Iterable[str]) -> Size:
        """How many positions a dim has."""
        return product([self._extents[a] for a in dim])

    def final(self, atom: str) -> Dim:
        """The atoms this one has become, row-major."""
        if atom not in self._replaced_by:
            return (atom,)
        return tuple(a for part in self._replaced_by[atom] for a in self.final(part))

    def resolve(self, dim: Iterable[str]) -> Dim:
        """A dim in the atoms it has become."""
        return tuple(a for atom in dim for a in self.final(atom))

    def split(self, dim: Dim, factors: Sequence[Size]) -> Dim:
        """Split the atoms of a resolved dim, everywhere, so that their extents are `factors`."""
        parts: list[str] = []
        for atom, sizes in zip(dim, _runs([self._extents[a] for a in dim], factors), strict=True):
            parts += [atom] if len(sizes) == 1 else self._split(atom, sizes)
        return tuple(parts)

    def split_as(self, atom: str, sizes: Sequence[Size]) -> Dim:
        """Count an atom's positions along sizes that have its extent as their product when the graph runs (`s` as `s//2, 2`)."""
        return self._split(atom, sizes)

    def _split(self, atom: str, sizes: Sequence[Size]) -> Dim:
        parts = tuple(self.fresh(size) for size in sizes)
        neighbours = self._distinct.pop(atom)
        for other in neighbours:
            self._distinct[other].remove(atom)
        self._replaced_by[atom] = parts
        for part in parts:
            self.keep_distinct((part, *neighbours), only=part)
        self.keep_distinct(parts)
        return parts

    def keep_distinct(self, atoms: Iterable[str], only: str | None = None) -> None:
        """These atoms index one value: no two may become one (`only`: none of the others with that one)."""
        names = self.resolve(atoms)
        for a in names if only is None else (only,):
            for b in names:
                if a != b:
                    self._distinct[a].add(b)
                    self._distinct[b].add(a)

    def are_distinct(self, a: str, b: str) -> bool:
        """Whether two final atoms index one value somewhere."""
        return b in self._distinct[a]

    def unify(self, a: str, b: str) -> None:
        """Make two final atoms of equal extent one, everywhere."""
        assert self._extents[a] == self._extents[b] and not self.are_distinct(a, b)
        if a == b:
            return
        neighbours = self._distinct.pop(b)
        for other in neighbours:
            self._distinct[other].remove(b)
        self._replaced_by[b] = (a,)
        self.keep_distinct((a, *neighbours), only=a)


def _runs(sizes: Sequence[Size], factors: Sequence[Size]) -> list[Sequence[Size]]:
    """The factors each size is the product of, in order."""
    runs: list[Sequence[Size]] = []
    at = 0
    for size in sizes:
        end = _end_of(size, factors, at)
        runs.append(factors[at:end])
        at = end
    return runs
