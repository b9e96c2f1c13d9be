"""Single values: literals, ops, sizes, indices, and monoids applied to them. This module knows nothing of loops or tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import copysign, isinf, isnan

import torch

from ..ir.expr import BOOL, DType, as_dtype
from ..ir.monoid import Accumulated, Algebra, Monoid, State, Value
from ..ir.size import Size, Sym
from ..plan.access import Run
from .kernel_ir import Apply, Expr, Language, Name, RightSide, Sum

TRITON = Language("tl", "triton.jit")
GLUON = Language("gl", "gluon.jit", "TILE")

Assigner = Callable[[str, RightSide], Name]  # (hint, value) -> the name that the value is assigned to
COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def literal(value: float | int | bool) -> str:
    """A number as kernel text."""
    if isinstance(value, float) and (isinf(value) or isnan(value)):
        return f'float("{value}")'
    return repr(value)


def is_bare(value: float | int | bool, dtype: DType) -> bool:
    """Whether a number is written as a bare literal, which Triton gives the right type and bits.

    Triton reads the bare literal 0.1 as fp32, 7 as int32, 1e-40 as fp64 and -0.0 as 0.0.
    """
    value = as_dtype(value, dtype)
    negative_zero = dtype.is_float and value == 0 and copysign(1, value) < 0
    subnormal = dtype.is_float and 0 < abs(value) < 2.0**-126
    return not (negative_zero or subnormal or dtype.is_float8 or dtype.name in ("f64", "i64"))


def typed_literal(value: float | int | bool, dtype: DType, language: Language = TRITON) -> str:
    """A number of exactly this type: a bare literal, or a tensor of one element."""
    value = as_dtype(value, dtype)
    if is_bare(value, dtype):
        return literal(value)
    if dtype.is_float and value == 0 and copysign(1, value) < 0:
        bits = f"int{8 * dtype.size}"
        negative = language.full("[1, 1]", literal(-(1 << 8 * dtype.size - 1)), bits)
        return f"{negative}.to({language.prefix}.{dtype.kernel}, bitcast=True)"
    if dtype.name == "f8e5m2":
        as_int8 = int(torch.tensor(value, dtype=torch.float32).to(dtype.torch).view(torch.int8))
        return f"{language.full('[1, 1]', literal(as_int8), 'int8')}.to({language.prefix}.{dtype.kernel}, bitcast=True)"
    if dtype.is_float8:
        return f"{language.full('[1, 1]', literal(value), 'float32')}.to({language.prefix}.{dtype.kernel})"
    return language.full("[1, 1]", literal(value), dtype.kernel)


def scaled_literal(value: float | int | bool, scale: Size, dtype: DType, language: Language = TRITON) -> str:
    """A number times a size. The product is converted where `dtype` is a narrower integer type than the size's."""
    text = typed_literal(value, dtype, language)
    if scale == 1:
        return text
    product = f"{text} * {size_text(scale)}"
    return language.full("[1, 1]", product, dtype.kernel) if dtype.kind == "int" and dtype.size < 8 else product


def size_text(size: Size) -> str:
    """A size as kernel text. Symbols are kernel parameters of the same name."""
    return str(size) if isinstance(size, int) else str(size).replace("*", " * ")


def size_factor(size: Size) -> str:
    """A size as an operand of a product, a quotient or a method."""
    text = size_text(size)
    return f"({text})" if isinstance(size, Sym) and (size.coef != 1 or len(size.names) > 1) else text


def run_text(index: Expr, run: Run, compound: bool = False) -> Expr:
    """What one run of axes contributes to an address. A `compound` index is a sum."""
    trivial = run.inner == 1 and run.first and run.stride == 1
    text = f"({index})" if compound and not trivial else index
    text = text if run.inner == 1 else f"{text} // {size_factor(run.inner)}"
    text = text if run.first else f"{text} % {size_factor(run.size)}"
    if run.stride != 1:
        text = f"{text} * {size_factor(run.stride)}"
    return Name(text) if trivial and not compound else text


def conjunction(masks: Sequence[Expr]) -> Expr:
    """All of several masks, which are names or comparisons."""
    if len(masks) == 1:
        return masks[0]
    return " & ".join(mask if isinstance(mask, Name) else f"({mask})" for mask in masks)


@dataclass(frozen=True)
class TileAlgebra(Algebra):
    """Applies a monoid to a tile: ops become lines, folds become reductions of the tile."""

    assign: Assigner
    folded: Callable[[str, Expr], RightSide]  # (kind, operand) -> the fold
    active: Callable[[], Expr] | int  # the number of folded elements: an expression, or known, so that constants stay literals
    exact: bool = False
    fold_name: Callable[[str], str] = "all_{}".format  # what a fold is called, by its kind

    def emit(self, op: str, *args: Value) -> Name:
        return self.assign(op, _on_state(op, args, self.exact, self.assign))

    def fold(self, kind: str, value: Value) -> Value:
        """A reduction of the tile, or for a constant its multiple."""
        if isinstance(value, str):
            return self.assign(self.fold_name(kind), self.folded(kind, value))
        if kind != "sum" or value == 0:
            return value
        if isinstance(self.active, int):
            return value * self.active
        return self.assign("count", self.active() if value == 1 else f"{literal(value)} * {self.active()}")


@dataclass(frozen=True)
class Pair:
    """The same component of two states."""

    a: Value
    b: Value


class PairAlgebra(Algebra):
    """Applies a monoid to two states: a fold of a pair is one binary op. Tiles are joined this way."""

    def __init__(self, assign: Assigner, exact: bool) -> None:
        self._assign, self._exact = assign, exact

    def op(self, op: str, *args: Value) -> Value:
        if any(isinstance(x, Pair) for x in args):
            a, b = ([getattr(x, side) if isinstance(x, Pair) else x for x in args] for side in "ab")
            return Pair(super().op(op, *a), super().op(op, *b))
        return super().op(op, *args)

    def emit(self, op: str, *args: Value) -> Name:
        return self._assign(op, _on_state(op, args, self._exact, self._assign))

    def fold(self, kind: str, value: Value) -> Value:
        return self.op(COMBINE[kind], value.a, value.b) if isinstance(value, Pair) else value


def _on_state(op: str, args: tuple[Value, ...], exact: bool, assign: Assigner) -> Apply:
    """An op on components of states. Counts are plain numbers, and exact forms of binary ops do not accept plain numbers."""
    texts = (a if isinstance(a, str) else literal(a) for a in args)
    named = tuple(assign("total", text) if isinstance(text, Sum) else text for text in texts)
    return Apply(op, named, BOOL, exact and len(args) == 1)


def growth(monoid: Monoid, a: State, b: State, assign: Assigner, exact: bool) -> State:
    """Two states merged into one. Components that only accumulate are returned as increments."""
    algebra = PairAlgebra(assign, exact)
    if monoid.join is not None:
        return monoid.join(algebra, a, b)
    return monoid.merge(algebra, *(Pair(x, y) for x, y in zip(a, b)))


def join(monoid: Monoid, a: State, b: State, assign: Assigner, exact: bool) -> State:
    """Two states merged into one."""
    algebra = PairAlgebra(assign, exact)
    return tuple(
        algebra.op("add", algebra.op("mul", x.before, x.scale), x.by) if isinstance(x, Accumulated) else x
        for x in growth(monoid, a, b, assign, exact)
    )
