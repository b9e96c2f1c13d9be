"""A Program over integers instead of floats. Addition and multiplication of 64-bit integers wrap around, so they are exact in
any order, and a schedule must match the Program bit for bit, however it splits, loops and joins.

Ops that integers lack are replaced: a function of one element by a polynomial, a quotient by a product, a variance
by a sum. The data flow and the axes of reductions stay the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from onepass.ir.expr import BOOL, I64, DType
from onepass.ir.program import Buffer, Builder, Const, Node, Op, Program, Reduce, Result, Store, operands, with_operands

KEPT = {"add", "sub", "mul", "fma", "neg", "maximum", "minimum", "where", "eq", "ne", "lt", "le", "gt", "ge"}
FOLDS = {"sum", "prod", "max", "min", "any", "all", "argmax", "argmin"}


def integral(program: Program) -> Program:
    """The same data flow over 64-bit integers."""
    builder, new = Builder(), dict[int, int]()
    for at, node in enumerate(program.nodes):
        new[at] = _added(builder, program, at, with_operands(node, new), new)
    return Program(program.name, program.axes, tuple(map(_whole, program.buffers)), tuple(builder.nodes))


def integers(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Random 64-bit integers in a tensor's layout; integers and booleans stay, because they may be indices."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(seed)
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    line = torch.randint(-(2**62), 2**62, (max(span, 0),), generator=generator)
    return line.as_strided(tensor.shape, tensor.stride())


def _added(builder: Builder, program: Program, at: int, node: Node, new: dict[int, int]) -> int:
    dtype = _int(program.dtypes[at]) if not isinstance(node, Store) else I64
    match node:
        case Const(value=number) if program.dtypes[at].is_float:
            return builder.add(Const(1 + hash(repr(number)) % 97, I64))
        case Op(name="cast", dtype=to, args=(source, *_)) if (
            _int(to) == I64 == _int(program.dtypes[operands(program.nodes[at])[0]])
        ):
            return source
        case Op(name="cast", dtype=to):
            return builder.add(replace(node, dtype=_int(to)))
        case Op(name=name) if name in KEPT:
            return builder.add(replace(node, dtype=dtype))
        case Op(name="isnan", args=(a,)):
            return builder.add(Op("lt", (a, builder.add(Const(0, I64))), BOOL))
        case Op() if not program.dtypes[at].is_float:
            return builder.add(node)
        case Op(args=(a, b)):  # a quotient, or another function of two elements
            return builder.add(Op("mul", (a, b), I64))
        case Op(args=(a,)):  # a function of one element
            return builder.add(Op("fma", (a, a, builder.add(Const(1 + len(node.name), I64))), I64))
        case Reduce(monoid=monoid, args=args) if monoid not in FOLDS:
            return builder.add(replace(node, monoid="sum", args=args[:1]))
        case Result(reduce=reduce) if (owner := builder.nodes[reduce]) and isinstance(owner, Reduce):
            return builder.add(replace(node, k=0 if owner.monoid == "sum" else node.k))
        case _:
            return builder.add(node)


def _int(dtype: DType) -> DType:
    return I64 if dtype.is_float else dtype


def _whole(buffer: Buffer) -> Buffer:
    return replace(buffer, dtype=_int(buffer.dtype))
