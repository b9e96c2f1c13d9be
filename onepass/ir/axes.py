"""Unify equivalent axes of different tensors, so that the loops over them can share a kernel."""

from __future__ import annotations

from dataclasses import replace

from .program import Builder, Index, Load, Node, Program, Reduce, Store, operands, prune, with_operands
from .size import Size


def unify_axes(program: Program) -> Program:
    """x0[a, b], x1[c, d] -> x0[a, b], x1[a, b]: rename axes with equal extent and strides that no value varies over together.

    For example, three norms of three tensors that share a weight arrive with three separate row axes. After this pass the planner
    can fuse them; the cost model decides whether it does.
    """
    together = _cooccurring(program)
    signatures = {a.name: _signature(program, a.name) for a in program.axes}
    groups: list[list[str]] = []
    for axis in (a.name for a in program.axes):
        matching = (
            g
            for g in groups
            if signatures[g[0]] == signatures[axis] and not any(frozenset({axis, other}) in together for other in g)
        )
        group = next(matching, None)
        if group is None:
            groups.append([axis])
        else:
            group.append(axis)
            together |= {frozenset({group[0], x}) for pair in together if axis in pair for x in pair - {axis}}
    names = {axis: group[0] for group in groups for axis in group}
    return program if len(groups) == len(program.axes) else _renamed(program, names)


def _cooccurring(program: Program) -> set[frozenset[str]]:
    """Pairs of axes that some value varies over together."""
    pairs: set[frozenset[str]] = set()
    for i, node in enumerate(program.nodes):
        dims = program.dims[i] | (frozenset(node.axes) if isinstance(node, Reduce) else frozenset())
        for o in operands(node):
            dims |= program.dims[o]
        pairs |= {frozenset({a, b}) for a in dims for b in dims if a != b}
    return pairs


def _signature(program: Program, axis: str) -> tuple[Size, frozenset[Size]]:
    """An axis's extent and the strides that Loads and Stores have along it. Axes must agree in both to be unified."""
    accesses = [n for n in program.nodes if isinstance(n, (Load, Store))]
    return program.axis[axis].extent, frozenset(s for n in accesses for a, s in n.strides if a == axis)


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
