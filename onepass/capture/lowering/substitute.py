"""Rewrites a value at other coordinates: renamed, sliced, looked up or regrouped.

Loads are cheap, so a value that is needed at other coordinates is duplicated: `x + x.t()` loads x twice, and `y[2:]` is the
expression of y with every Load shifted by two. Reductions are duplicated too, unless they do not vary along the moved atoms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...ir.expr import I64
from ...ir.program import Gather, Index, Load, Reduce, Strides, operands, with_operands
from ...ir.size import Size, Sym, mul
from .axes import Dim, Inexpressible
from .draft import Draft


@dataclass(frozen=True, slots=True)
class Affine:
    """A position: offset plus the sum of step * position along each atom."""

    terms: tuple[tuple[str, Size], ...] = ()
    offset: Size = 0


@dataclass(frozen=True, slots=True)
class Lookup:
    """The value of a node, known to lie in [0, extent)."""

    index: int
    extent: Size


Coordinate: TypeAlias = Affine | Lookup
Moves: TypeAlias = Mapping[Dim, Coordinate]  # runs of final atoms -> the coordinate that replaces their position


def rename(old: Dim, new: Dim) -> dict[Dim, Coordinate]:
    """Moves that replace atoms by others of the same extents."""
    return {(a,): Affine(((b, 1),)) for a, b in zip(old, new, strict=True) if a != b}


def substitute(draft: Draft, node: int, moves: Moves) -> int:
    """A node's value with some of its atoms replaced by other coordinates."""
    return _Substitution(draft, dict(moves), {}).at(node)


ReductionKey: TypeAlias = tuple[Dim, frozenset[tuple[Dim, Coordinate]]]  # the atoms a reduction folds, and the moves inside it


class _Substitution:
    """Rewrites values under some moves. `inner` holds the substitutions inside reductions, keyed by folded atoms and moves: without
    sharing, a chain of dependent reductions would be rewritten once per path through it."""

    def __init__(self, draft: Draft, moves: dict[Dim, Coordinate], inner: dict[ReductionKey, tuple[Dim, _Substitution]]) -> None:
        self.draft = draft
        self.moves = moves
        self.inner = inner
        self.traffic_saved = frozenset(a for dim in moves for a in dim)
        self.done: dict[int, int] = {}

    def at(self, node: int) -> int:
        """A node's value after the moves."""
        if not self._moves(node):
            return node
        if node not in self.done:
            for each in self._to_rewrite(node):
                self.done[each] = self._rewrite(each)
        return self.done[node]

    def _moves(self, node: int) -> bool:
        return not self.traffic_saved.isdisjoint(self.draft.free(node))

    def _to_rewrite(self, node: int) -> list[int]:
        """The node and its operands that still have to be rewritten, operands first. Stops at reductions."""
        found, worklist = {node}, [node]
        while worklist:
            at = self.draft.nodes[worklist.pop()]
            unvisited = [] if isinstance(at, Reduce) else [o for o in operands(at) if o not in found and o not in self.done]
            moving = [o for o in unvisited if self._moves(o)]
            found.update(moving)
            worklist += moving
        return sorted(found)

    def _rewrite(self, position: int) -> int:
        node, dtype = self.draft.nodes[position], self.draft.dtype(position)
        match node:
            case Load():
                return self._load(node, position)
            case Index(axes=axes):
                dim = self.draft.atoms.resolve(axes)
                return self._count(tuple(zip(dim, self.draft.steps(dim), strict=True)))
            case Reduce():
                return self._reduce(node, position)
            case _:
                return self.draft.add(with_operands(node, {o: self.at(o) for o in operands(node)}), dtype)

    def _load(self, node: Load, position: int) -> int:
        final = tuple(s for atom, stride in node.strides for s in self.draft.final_strides(atom, stride))
        strides, offset, indexed = self._move(final)
        kept = tuple(replace(g, index=self.at(g.index)) for g in node.indexed)
        moved = replace(node, strides=strides, offset=_sum(node.offset, offset), indexed=kept + indexed)
        return self.draft.add(moved, self.draft.dtype(position))

    def _count(self, steps: Strides) -> int:
        """A position counted along `steps`, rewritten in the new coordinates."""
        draft = self.draft
        strides, offset, indexed = self._move(steps)
        dim = tuple(a for a, _ in strides)
        if dim and tuple(s for _, s in strides) == draft.steps(dim):
            total = draft.index(dim)
        else:
            total = draft.const(0, I64)
            for atom, step in strides:
                total = draft.op("add", total, draft.op("mul", draft.index((atom,)), draft.const(1, I64, step)))
        for gather in indexed:
            step = draft.const(1, I64, gather.stride)
            total = draft.op("add", total, draft.op("mul", draft.cast(gather.index, I64), step))
        return total if offset == 0 else draft.op("add", total, draft.const(1, I64, offset))

    def _move(self, strides: Strides) -> tuple[Strides, Size, tuple[Gather, ...]]:
        """An address as strides along atoms, rewritten in the new coordinates."""
        left = dict(strides)
        steps: dict[str, Size] = {}
        offset: Size = 0
        indexed: list[Gather] = []
        for dim, coordinate in self.moves.items():
            stride = self._stride_along(dim, {a: left.pop(a) for a in dim if a in left})
            match coordinate:
                case _ if stride == 0:
                    pass
                case Affine(terms=terms, offset=start):
                    for atom, step in terms:
                        steps[atom] = _sum(steps.get(atom, 0), mul(stride, step))
                    offset = _sum(offset, mul(stride, start))
                case Lookup(index=index, extent=extent):
                    indexed.append(Gather(index, stride, extent))
        for atom, stride in left.items():
            steps[atom] = _sum(steps.get(atom, 0), stride)
        return tuple((a, s) for a, s in steps.items() if s != 0), offset, tuple(indexed)

    def _stride_along(self, dim: Dim, strides: Mapping[str, Size]) -> Size:
        """The stride of several atoms treated as one; 0 if the address does not depend on them."""
        if not strides:
            return 0
        inner = strides.get(dim[-1], 0)
        if any(strides.get(a, 0) != mul(inner, step) for a, step in zip(dim, self.draft.steps(dim), strict=True)):
            raise Inexpressible
        return inner

    def _reduce(self, node: Reduce, position: int) -> int:
        """Duplicate a reduction. Its own atoms must not move, and must differ from the atoms of the new coordinates."""
        draft = self.draft
        folded = draft.atoms.resolve(node.axes)
        if any(0 < len(set(dim) & set(folded)) < len(dim) for dim in self.moves):
            raise Inexpressible
        new, inner = self._inside(folded)
        again = replace(node, args=tuple(inner.at(a) for a in node.args), axes=new)
        return draft.add(again, draft.dtype(position))

    def _inside(self, folded: Dim) -> tuple[Dim, _Substitution]:
        """The atoms that a reduction folds after the moves, and the substitution for its operands."""
        moves = {dim: c for dim, c in self.moves.items() if not set(dim) & set(folded)}
        key = folded, frozenset(moves.items())
        if key not in self.inner:
            atoms, new_atoms = self.draft.atoms, frozenset().union(*(_atoms_of(self.draft, c) for c in moves.values()))
            new = tuple(atoms.fresh(atoms.extent(a)) if a in new_atoms else a for a in folded)
            self.inner[key] = new, _Substitution(self.draft, moves | rename(folded, new), self.inner)
        return self.inner[key]


def _atoms_of(draft: Draft, coordinate: Coordinate) -> frozenset[str]:
    match coordinate:
        case Affine(terms=terms):
            return frozenset(a for a, _ in terms)
        case Lookup(index=index):
            return draft.free(index)


def _sum(a: Size, b: Size) -> Size:
    """a + b, if the sum is a Size."""
    if a == 0 or b == 0:
        return b if a == 0 else a
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if isinstance(a, Sym) and isinstance(b, Sym) and a.names == b.names:
        return Sym(a.coef + b.coef, a.names) if a.coef + b.coef else 0
    raise Inexpressible
