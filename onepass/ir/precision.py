"""Decide which values need full precision, and which may be off by a few fp32 ulps.

The decision depends only on the data that a value is computed from, not on what else its kernel reads.
"""

from __future__ import annotations

from .expr import OPS
from .monoid import MONOIDS
from .program import Load, Op, Program, Reduce, Store, operands


def feeds_discontinuity(program: Program) -> tuple[bool, ...]:
    """For each value, whether it reaches a discontinuous op elementwise: a comparison, a rounding to integers, an argmax.

    There a difference in the last bit changes the result, so these values must match eager, including every intermediate rounding.
    """
    found = [False] * len(program.nodes)
    for i in reversed(range(len(program.nodes))):
        node = program.nodes[i]
        if _is_discontinuous(program, i) or isinstance(node, Op) and found[i]:
            for operand in operands(node):
                found[operand] = program.dtypes[operand].is_float or found[operand]
    return tuple(found)


def _is_discontinuous(program: Program, i: int) -> bool:
    match program.nodes[i]:
        case Op(name="cast", args=(arg,), dtype=dtype):
            return program.dtypes[arg].is_float and not dtype.is_float
        case Op(name=name):
            return OPS[name].discontinuous
        case Reduce(monoid=monoid):
            return MONOIDS[monoid].discontinuous
    return False


def may_be_approximate(program: Program) -> tuple[bool, ...]:
    """For each value, whether it may be approximate.

    It may be if it comes from 16-bit data or is used only by such values, and feeds no discontinuous op.
    """
    loads, wide, decide = _loads(program), depends_on_fp32(program), feeds_discontinuity(program)
    found = [False] * len(program.nodes)
    for i in reversed(range(len(program.nodes))):
        users = program.users[i]
        absorbed = bool(users) and all(found[u] and not isinstance(program.nodes[u], Store) for u in users)
        found[i] = (bool(loads[i]) and not wide[i] or absorbed) and not decide[i]
    return tuple(found)


def depends_on_fp32(program: Program) -> tuple[bool, ...]:
    """For each value, whether it depends on fp32 data. Vectors and scalars that meet larger 16- or 8-bit tensors do not count.

    Temporaries from another kernel count as narrow. A kernel that reads nothing narrow otherwise is exact anyway.
    """
    return tuple(_is_wide(program, each) for each in _loads(program))


def _loads(program: Program) -> tuple[frozenset[int], ...]:
    """The float loads that each value depends on."""
    found: list[frozenset[int]] = []
    for i, node in enumerate(program.nodes):
        if not program.dtypes[i].is_float:
            found.append(frozenset())  # an integer or bool no longer carries the precision of its inputs
        else:
            own = frozenset((i,)) if isinstance(node, Load) else frozenset()
            found.append(own.union(*(found[o] for o in operands(node))))
    return tuple(found)


def _is_wide(program: Program, loads: frozenset[int]) -> bool:
    narrow = [i for i in loads if _is_narrow(program, i)]
    return not all(any(program.dims[i] < program.dims[n] for n in narrow) for i in loads if i not in narrow)


def _is_narrow(program: Program, i: int) -> bool:
    node = program.nodes[i]
    return program.dtypes[i].is_narrow_float or isinstance(node, Load) and program.buffer[node.buffer].role == "temp"
