"""Specialize a Program to given sizes: choose the symbols worth specializing, and replace symbols by numbers."""

from __future__ import annotations

from dataclasses import replace

from .program import Const, Load, Node, Program, Reduce, Store, operands
from .size import Bindings, Size, Sym, mul, symbols


def symbols_to_specialize(program: Program) -> frozenset[str]:
    """Symbols in the extents of axes that a value varies over after they were reduced.

    Such a column stays on chip only if its length is known at compile time. A row count that is only summed over (the gradient of
    a weight) stays symbolic.
    """
    found: set[str] = set()
    for i in program.of(Reduce):
        node = program.nodes[i]
        assert isinstance(node, Reduce)
        after = _descendants(program, i)
        for axis in node.axes:
            if any(axis in program.dims[j] for j in after):
                found |= set(symbols(program.axis[axis].extent))
    return frozenset(found)


def _descendants(program: Program, root: int) -> set[int]:
    """All nodes that depend on `root`."""
    found = {root}
    for i, node in enumerate(program.nodes):
        if any(o in found for o in operands(node)):
            found.add(i)
    return found - {root}


def substitute(program: Program, bindings: Bindings) -> Program:
    """Replace symbols of a Program by their values in `bindings`."""
    if not bindings:
        return program

    def size(s: Size) -> Size:
        if isinstance(s, int):
            return s
        total: Size = s.coef
        for name in s.names:
            total = mul(total, bindings[name] if name in bindings else Sym(1, (name,)))
        return total

    def strides(pairs: tuple[tuple[str, Size], ...]) -> tuple[tuple[str, Size], ...]:
        return tuple((axis, size(s)) for axis, s in pairs)

    def fixed(node: Node) -> Node:
        match node:
            case Load():
                indexed = tuple(replace(g, stride=size(g.stride), extent=size(g.extent)) for g in node.indexed)
                return replace(node, strides=strides(node.strides), offset=size(node.offset), indexed=indexed)
            case Store():
                return replace(node, strides=strides(node.strides), offset=size(node.offset))
            case Const() if not isinstance(node.scale, int):
                scale = size(node.scale)
                return replace(node, value=node.value * scale, scale=1) if isinstance(scale, int) else replace(node, scale=scale)
            case _:
                return node

    return Program(
        program.name,
        tuple(replace(a, extent=size(a.extent)) for a in program.axes),
        tuple(replace(b, shape=tuple(map(size, b.shape)), strides=tuple(map(size, b.strides))) for b in program.buffers),
        tuple(map(fixed, program.nodes)),
    )
