"""Axes of different tensors that are alike and never meet, made one: what walks them may then share a kernel."""

from __future__ import annotations

from dataclasses import replace

from .program import Builder, Index, Load, Node, Program, Reduce, Store, operands, prune, with_operands
from .size import Size


def unify_axes(program: Program) -> Program:
    """x0[a, b] ... x1[c, d] -> x0[a, b] ... x1[a, b], where a and c (b and d) have the same extent and strides and never meet.

    Three norms of three tensors that share a weight come in as three sets of rows. Whether one walk over all of them pays
    is the planner's to say; without this it could not ask.
    """
    met = _meetings(program)
    looks = {a.name: _look(program, a.name) for a in program.axes}
    groups: list[list[str]] = []
    for axis in (a.name for a in program.axes):
        alike = (g for g in groups if looks[g[0]] == looks[axis] and not any(frozenset({axis, other}) in met for other in g))
        home = next(alike, None)
        if home is None:
            groups.append([axis])
        else:
            home.append(axis)
            met |= {frozenset({home[0], x}) for pair in met if axis in pair for x in pair - {axis}}
    names = {axis: group[0] for group in groups for axis in group}
    return program if len(groups) == len(program.axes) else _renamed(program, names)


def _meetings(program: Program) -> set[frozenset[str]]:
    """Pairs of axes some value varies over together."""
    pairs: set[frozenset[str]] = set()
    for i, node in enumerate(program.nodes):
        dims = program.dims[i] | (frozenset(node.axes) if isinstance(node, Reduce) else frozenset())
        for o in operands(node):
            dims |= program.dims[o]
        pairs |= {frozenset({a, b}) for a in dims for b in dims if a != b}
    return pairs


def _look(program: Program, axis: str) -> tuple[Size, frozenset[Size]]:
    """An axis's extent and the strides tensors have along it."""
    moves = [n for n in program.nodes if isinstance(n, (Load, Store))]
    return program.axis[axis].extent, frozenset(s for n in moves for a, s in n.strides if a == axis)


def _renamed(program: Program, names: dict[str, str]) -> Program:
    builder = Builder()
    new: dict[int, int] = {}
    for i, node in enumerate(program.nodes):
        new[i] = builder.add(_node_renamed(with_operands(node, new), names))
    return prune(replace(program, nodes=tuple(builder.nodes)))


def _node_renamed(node: Node, names: dict[str, str]) -> Node:
    match node:
        case Load(strides=strides) | Store(strides=strides):
            return replace(node, strides=tuple((names[a], s) for a, s in strides))
        case Index(axes=axes) | Reduce(axes=axes):
            return replace(node, axes=tuple(names[a] for a in axes))
        case _:
            return node
