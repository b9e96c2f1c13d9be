"""Which values need all digits, and which may be computed to a few units in the last place of fp32.

It follows from the values themselves, never from what else a kernel happens to read.
"""

from __future__ import annotations

from .program import Load, Op, Program, Reduce, Store, operands

_JUMPS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "trunc", "round", "fmod"))


def feeds_discontinuity(program: Program) -> tuple[bool, ...]:
    """Which values reach, element by element, an op that jumps: a comparison, a rounding to integers, the place of an extreme.

    There the last digit decides, so each of them must be what eager has, with every rounding on the way.
    """
    found = [False] * len(program.nodes)
    for i in reversed(range(len(program.nodes))):
        node = program.nodes[i]
        if _jumps(program, i) or isinstance(node, Op) and found[i]:
            for operand in operands(node):
                found[operand] = program.dtypes[operand].is_float or found[operand]
    return tuple(found)


def _jumps(program: Program, i: int) -> bool:
    match program.nodes[i]:
        case Op(name="cast", args=(arg,), dtype=dtype):
            return program.dtypes[arg].is_float and not dtype.is_float
        case Op(name=name):
            return name in _JUMPS
        case Reduce(monoid=monoid):
            return monoid.startswith(("argmax", "argmin"))
    return False


def may_be_approximate(program: Program) -> tuple[bool, ...]:
    """Which values may be approximate: those that come from 16-bit data, or go into nothing else, and decide nothing."""
    loads, wide, decide = _loads(program), depends_on_fp32(program), feeds_discontinuity(program)
    found = [False] * len(program.nodes)
    for i in reversed(range(len(program.nodes))):
        users = program.users[i]
        absorbed = bool(users) and all(found[u] and not isinstance(program.nodes[u], Store) for u in users)
        found[i] = (bool(loads[i]) and not wide[i] or absorbed) and not decide[i]
    return tuple(found)


def depends_on_fp32(program: Program) -> tuple[bool, ...]:
    """Into which values fp32 data goes. Vectors and scalars beside larger tensors of 16 or 8 bits do not count.

    What was left by another kernel counts as narrow: where nothing else is, all of a kernel is exact anyway.
    """
    return tuple(_is_wide(program, each) for each in _loads(program))


def _loads(program: Program) -> tuple[frozenset[int], ...]:
    """The loads of floats that go into each value."""
    found: list[frozenset[int]] = []
    for i, node in enumerate(program.nodes):
        if not program.dtypes[i].is_float:
            found.append(frozenset())  # a count, a choice: what it was made from no longer shows
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
