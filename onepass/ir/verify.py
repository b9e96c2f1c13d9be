"""Verify that a Program is well-formed. Runs after every stage.

A rule is a function that yields a Program's violations. Rules run in order and the first violation raises, so a rule may rely on
the rules before it. For example, types are computed only after all operands are known to be earlier values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeAlias

from ..errors import IllegalProgram
from .expr import BOOL, OPS, DType, OpSpec, ResultKind, result_dtype
from .monoid import MONOIDS, Monoid
from .program import Const, Index, Load, Op, Program, Reduce, Result, Store, operands
from .size import Size

Violations: TypeAlias = Iterator[str]


def verify(program: Program, stage: str) -> Program:
    """Return the Program if it is well-formed, else raise IllegalProgram. `stage` names the stage that produced it."""
    for rule in RULES:
        for violation in rule(program):
            raise IllegalProgram(stage=stage, detail=f"{program.name}: {violation}")
    return program


def names_are_unique(program: Program) -> Violations:
    """No two axes and no two buffers share a name."""
    for kind, names in (("axes", [a.name for a in program.axes]), ("buffers", [b.name for b in program.buffers])):
        for name, count in Counter(names).items():
            if count > 1:
                yield f"{count} {kind} are called {name}"


def buffers_are_sound(program: Program) -> Violations:
    """A buffer has a known role and a stride per dimension."""
    for buffer in program.buffers:
        if buffer.role not in ("input", "output", "temp"):
            yield f"buffer {buffer.name} has the unknown role {buffer.role}"
        if len(buffer.shape) != len(buffer.strides):
            yield f"buffer {buffer.name} has {len(buffer.shape)} dimensions and {len(buffer.strides)} strides"


def operands_come_first(program: Program) -> Violations:
    """A node reads earlier nodes, and never a Store."""
    for i, node in enumerate(program.nodes):
        for operand in operands(node):
            if not 0 <= operand < i:
                yield f"%{i} reads %{operand}, which is not earlier"
            elif isinstance(program.nodes[operand], Store):
                yield f"%{i} reads %{operand}, which is a store"


def axes_are_known(program: Program) -> Violations:
    """Every axis that a node names exists and is named once. Zero strides are omitted."""
    for i, node in enumerate(program.nodes):
        match node:
            case Load(strides=strides) | Store(strides=strides):
                named = [axis for axis, _ in strides]
                if any(stride == 0 for _, stride in strides):
                    yield f"%{i} writes out a stride of zero"
            case Index(axes=axes) | Reduce(axes=axes):
                named = list(axes)
            case _:
                named = []
        for axis, count in Counter(named).items():
            if axis not in program.axis:
                yield f"%{i} names the unknown axis {axis}"
            elif count > 1:
                yield f"%{i} names axis {axis} {count} times"


def buffers_are_known(program: Program) -> Violations:
    """Loads and Stores name existing buffers."""
    for i, node in enumerate(program.nodes):
        if isinstance(node, (Load, Store)) and node.buffer not in program.buffer:
            yield f"%{i} names the unknown buffer {node.buffer}"


def tables_are_known(program: Program) -> Violations:
    """Ops and reductions exist, and have the right number of arguments."""
    for i, node in enumerate(program.nodes):
        match node:
            case Op(name=name) if name not in OPS:
                yield f"%{i} is the unknown op {name}"
            case Op(name=name, args=args) if len(args) != OPS[name].arity:
                yield f"%{i}: {name} takes {OPS[name].arity} values, not {len(args)}"
            case Reduce(monoid=name) if name not in MONOIDS:
                yield f"%{i} is the unknown reduction {name}"
            case Reduce(monoid=name, args=args) if len(args) != MONOIDS[name].inputs:
                yield f"%{i}: {name} takes {MONOIDS[name].inputs} values, not {len(args)}"


def reductions_are_read_by_results(program: Program) -> Violations:
    """A Result reads an existing result of a Reduce, and nothing else reads a Reduce."""
    for i, node in enumerate(program.nodes):
        reduces = [program.nodes[o] for o in operands(node) if isinstance(program.nodes[o], Reduce)]
        if not isinstance(node, Result):
            if reduces:
                yield f"%{i} reads a reduction without a result"
        elif not isinstance(owner := program.nodes[node.reduce], Reduce):
            yield f"%{i} is a result of %{node.reduce}, which is no reduction"
        elif not 0 <= node.k < len(MONOIDS[owner.monoid].result_dtypes(BOOL)):
            yield f"%{i} reads result {node.k} of {owner.monoid}, which does not exist"


def loads_read_what_exists(program: Program) -> Violations:
    """A Load reads an input, or a temporary written by an earlier Store. Without a Store here, another kernel wrote it."""
    written: set[str] = set()
    ours = {n.buffer for n in program.nodes if isinstance(n, Store)}
    for i, node in enumerate(program.nodes):
        if isinstance(node, Store):
            written.add(node.buffer)
        if isinstance(node, Load):
            role = program.buffer[node.buffer].role
            if role == "output" or (role == "temp" and node.buffer in ours - written):
                yield f"%{i} loads {node.buffer}, an {'output' if role == 'output' else 'unwritten temporary'}"
            for gather in node.indexed:
                if program.dtypes[gather.index].kind != "int":
                    yield f"%{i} looks up with %{gather.index}, which is {program.dtypes[gather.index]}"


def constants_are_plain(program: Program) -> Violations:
    """A Const is not a narrow float, and a NaN is the object math.nan: other NaN objects would compare unequal."""
    for i, node in enumerate(program.nodes):
        if isinstance(node, Const):
            if node.dtype.is_narrow_float:
                yield f"%{i} is a {node.dtype} constant; constants are f32 and cast"
            if isinstance(node.value, float) and math.isnan(node.value) and node.value is not math.nan:
                yield f"%{i} is a NaN that is not math.nan"


def op_types_agree(program: Program) -> Violations:
    """An op's arguments share one type that the op supports, and its result type matches."""
    for i, node in enumerate(program.nodes):
        if isinstance(node, Op):
            args = tuple(program.dtypes[a] for a in node.args)
            wrong = _bad_arguments(OPS[node.name], args)
            if wrong:
                yield f"%{i}: {node.name} of {', '.join(d.name for d in args)}: {wrong}"
            elif node.dtype != result_dtype(OPS[node.name], args, node.dtype):
                yield f"%{i}: {node.name} of {args[-1]} does not give {node.dtype}"


def _bad_arguments(spec: OpSpec, args: tuple[DType, ...]) -> str:
    """What is wrong with an op's argument types; empty if they are valid."""
    conditional = spec.result_kind is ResultKind.LAST
    alike = args[1:] if conditional else args
    if conditional and args[0] != BOOL:
        return "the condition is not bool"
    if len(set(alike)) > 1:
        return "the types differ"
    if spec.result_kind is not ResultKind.CAST and any(d.is_narrow_float for d in args):
        return "narrow floats are cast to f32 first"
    return spec.takes.error(alike[0])


def reduction_types_agree(program: Program) -> Violations:
    """A Reduce has argument types that its monoid supports."""
    for i, node in enumerate(program.nodes):
        if isinstance(node, Reduce):
            args = tuple(program.dtypes[a] for a in node.args)
            wrong = _bad_reduction(MONOIDS[node.monoid], args)
            if wrong:
                yield f"%{i}: {node.monoid} of {', '.join(d.name for d in args)}: {wrong}"


def _bad_reduction(monoid: Monoid, args: tuple[DType, ...]) -> str:
    """What is wrong with a reduction's argument types; empty if they are valid."""
    if any(d.is_narrow_float for d in args):
        return "narrow floats are cast to f32 first"
    if monoid.takes_states and args != monoid.state_dtypes(args[0]):
        return f"its values are {', '.join(d.name for d in monoid.state_dtypes(args[0]))}"
    return monoid.takes.error(args[0])


def stores_have_the_buffers_type(program: Program) -> Violations:
    """A Store writes an output or a temporary, with the buffer's type."""
    for i, node in enumerate(program.nodes):
        if isinstance(node, Store):
            buffer = program.buffer[node.buffer]
            if buffer.role == "input":
                yield f"%{i} stores to {buffer.name}, an input"
            if program.dtypes[node.value] != buffer.dtype:
                yield f"%{i} stores {program.dtypes[node.value]} to {buffer.name}, which is {buffer.dtype}"


def stores_write_each_address_once(program: Program) -> Violations:
    """The address varies over every axis that the stored value varies over, and no two static axes have the same stride."""
    for i, node in enumerate(program.nodes):
        if isinstance(node, Store):
            varied = {a for a in program.dims[node.value] if program.axis[a].extent != 1}
            missing = varied - {a for a, _ in node.strides}
            if missing:
                yield f"%{i} stores a value that varies over {', '.join(sorted(missing))} to an address that does not"
            steps = Counter(stride for axis, stride in node.strides if axis in varied and _at_least_two(program, axis))
            for step, count in steps.items():
                if count > 1:
                    yield f"%{i} stores along {count} axes with the same stride {step}"


def stores_stay_inside(program: Program) -> Violations:
    """No Store writes past the end of its buffer, where sizes are static. Nothing is written to an empty buffer."""
    for i, node in enumerate(program.nodes):
        if isinstance(node, Store) and all(program.axis[axis].extent != 0 for axis, _ in node.strides):
            buffer = program.buffer[node.buffer]
            if 0 in buffer.shape:
                yield f"%{i} stores to {buffer.name}, which is empty, along no empty axis"
            last = _last_address(node.offset, [(stride, program.axis[axis].extent) for axis, stride in node.strides])
            end = _last_address(0, list(zip(buffer.strides, buffer.shape, strict=True)))
            if last is not None and end is not None and last > end:
                yield f"%{i} stores to element {last} of {buffer.name}, whose last is {end}"


def _last_address(offset: Size, steps: list[tuple[Size, Size]]) -> int | None:
    """The highest address that strides reach over extents; None if it is symbolic."""
    last = offset
    for stride, extent in steps:
        if not isinstance(last, int) or not isinstance(stride, int) or not isinstance(extent, int):
            return None
        last += stride * (extent - 1)
    return last if isinstance(last, int) else None


def _at_least_two(program: Program, axis: str) -> bool:
    extent = program.axis[axis].extent
    return isinstance(extent, int) and extent > 1


# fmt: off
RULES: tuple[Callable[[Program], Violations], ...] = (
    names_are_unique,
    buffers_are_sound,
    operands_come_first,
    axes_are_known,
    buffers_are_known,
    tables_are_known,
    reductions_are_read_by_results,
    loads_read_what_exists,
    constants_are_plain,
    op_types_agree,
    reduction_types_agree,
    stores_have_the_buffers_type,
    stores_write_each_address_once,
    stores_stay_inside,
)
# fmt: on
