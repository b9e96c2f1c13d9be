"""Which values need all digits, and which may be computed to a few units in the last place of fp32.

It follows from the values themselves, never from what else a kernel happens to read.
"""

from __future__ import annotations

from .program import Load, Op, Program, Reduce, Store, operands

_JUMPS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "trunc", "round", "fmod"))


def decisive(program: Program) -> tuple[bool, ...]:
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


def tolerant(program: Program) -> tuple[bool, ...]:
    """Which values may be approximate: those that come from 16-bit data, or go into nothing else, and decide nothing."""
    from_narrow, decide = _from_narrow(program), decisive(program)
    found = [False] * len(program.nodes)
    for i in reversed(range(len(program.nodes))):
        users = program.users[i]
        absorbed = bool(users) and all(found[u] and not isinstance(program.nodes[u], Store) for u in users)
        found[i] = (from_narrow[i] or absorbed) and not decide[i]
    return tuple(found)


def _from_narrow(program: Program) -> tuple[bool, ...]:
    """Which values are computed from 16- or 8-bit floats, with none of fp32 but vectors and scalars beside larger narrow tensors.

    What was left by another kernel counts as narrow: where nothing else is, all of a kernel is exact anyway.
    """
    loads: list[frozenset[int]] = []  # of floats, that go into each value
    for i, node in enumerate(program.nodes):
        if not program.dtypes[i].is_float:
            loads.append(frozenset())  # a count, a choice: what it was made from no longer shows
        else:
            own = frozenset((i,)) if isinstance(node, Load) else frozenset()
            loads.append(own.union(*(loads[o] for o in operands(node))))
    return tuple(_mostly_narrow(program, each) for each in loads)


def _mostly_narrow(program: Program, loads: frozenset[int]) -> bool:
    narrow = [i for i in loads if _is_narrow(program, i)]
    return bool(narrow) and all(any(program.dims[i] < program.dims[n] for n in narrow) for i in loads if i not in narrow)


def _is_narrow(program: Program, i: int) -> bool:
    node = program.nodes[i]
    return program.dtypes[i].is_narrow_float or isinstance(node, Load) and program.buffer[node.buffer].role == "temp"
