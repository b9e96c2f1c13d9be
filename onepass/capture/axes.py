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
    """Cut two lists of the same product into the shortest runs whose products agree."""
    ends = {product(left[:i]): i for i in range(len(left) + 1)}
    products = [product(right[:j]) for j in range(len(right) + 1)]
    cuts = [(ends[p], j) for j, p in enumerate(products) if p in ends]
    return tuple(Segment((a, b), (c, d)) for (a, c), (b, d) in pairwise(cuts))


def cut(atoms: Sequence[str], extents: Sequence[Size], sizes: Sequence[Size]) -> Dims:
    """Runs of atoms whose extents multiply to each of `sizes`; a size of 1 takes none."""
    dims: list[Dim] = []
    at = 0
    for size in sizes:
        start = at
        have: Size = 1
        while have != size:
            have = mul(have, extents[at])
            at += 1
        dims.append(tuple(atoms[start:at]))
    return tuple(dims)


class Atoms:
    """Every atom of one graph: its extent, what it was split into or merged with, and which atoms must stay apart.

    Two atoms that index one value at once are different positions, and may never become one axis.
    """

    def __init__(self) -> None:
        self._extents: dict[str, Size] = {}
        self._became: dict[str, Dim] = {}  # split into these, or merged into this one
        self._apart: dict[str, set[str]] = {}  # between atoms that are still themselves

    def fresh(self, extent: Size) -> str:
        """A new atom. An extent of 1 has no atom: such a dim is `()`."""
        assert extent != 1
        name = f"a{len(self._extents)}"
        self._extents[name] = extent
        self._apart[name] = set()
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
        if atom not in self._became:
            return (atom,)
        return tuple(a for part in self._became[atom] for a in self.final(part))

    def resolve(self, dim: Iterable[str]) -> Dim:
        """A dim in the atoms it has become."""
        return tuple(a for atom in dim for a in self.final(atom))

    def split(self, dim: Dim, factors: Sequence[Size]) -> Dim:
        """Split the atoms of a resolved dim, everywhere, so that their extents are `factors`."""
        parts: list[str] = []
        for atom, sizes in zip(dim, _runs([self._extents[a] for a in dim], factors), strict=True):
            parts += [atom] if len(sizes) == 1 else self._split(atom, sizes)
        return tuple(parts)

    def _split(self, atom: str, sizes: Sequence[Size]) -> Dim:
        parts = tuple(self.fresh(size) for size in sizes)
        neighbours = self._apart.pop(atom)
        for other in neighbours:
            self._apart[other].remove(atom)
        self._became[atom] = parts
        for part in parts:
            self.keep_apart((part, *neighbours), only=part)
        self.keep_apart(parts)
        return parts

    def keep_apart(self, atoms: Iterable[str], only: str | None = None) -> None:
        """These atoms index one value: no two may become one (`only`: none of the others with that one)."""
        names = self.resolve(atoms)
        for a in names if only is None else (only,):
            for b in names:
                if a != b:
                    self._apart[a].add(b)
                    self._apart[b].add(a)

    def are_apart(self, a: str, b: str) -> bool:
        """Whether two final atoms index one value somewhere."""
        return b in self._apart[a]

    def unify(self, a: str, b: str) -> None:
        """Make two final atoms of equal extent one, everywhere."""
        assert self._extents[a] == self._extents[b] and not self.are_apart(a, b)
        if a == b:
            return
        neighbours = self._apart.pop(b)
        for other in neighbours:
            self._apart[other].remove(b)
        self._became[b] = (a,)
        self.keep_apart((a, *neighbours), only=a)


def _runs(sizes: Sequence[Size], factors: Sequence[Size]) -> list[list[Size]]:
    """The factors each size is the product of, in order."""
    runs: list[list[Size]] = []
    at = 0
    for size in sizes:
        run: list[Size] = []
        while not run or product(run) != size:
            run.append(factors[at])
            at += 1
        runs.append(run)
    return runs
