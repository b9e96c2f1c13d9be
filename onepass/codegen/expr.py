"""Kernel text of single values: literals, ops, sizes, indices, and monoids applied to them.

An emitted value is a name or a literal of known type. This module knows nothing of loops or tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import copysign, isinf, isnan

from ..ir.expr import BOOL, OPS, DType, as_dtype
from ..ir.monoid import Accumulated, Algebra, Monoid, State, Value
from ..ir.size import Size
from ..plan.access import Run


@dataclass(frozen=True, slots=True)
class Language:
    """How Triton and Gluon differ in the text of single values."""

    prefix: str  # module of the built-in functions
    layout: str = ""  # layout of a new tensor, where the language wants one

    def full(self, shape: str, value: str, dtype: str) -> str:
        """A tensor filled with one value."""
        return f"{self.prefix}.full({shape}, {value}, {self.prefix}.{dtype}{', ' + self.layout if self.layout else ''})"

    def broadcast(self, text: str, shape: str) -> str:
        """A tensor broadcast along its axes of extent 1."""
        return f"{text}.broadcast_to({shape})" if self.layout else f"{self.prefix}.broadcast_to({text}, {shape})"


TRITON = Language("tl")
GLUON = Language("gl", "TILE")

COMBINE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def literal(value: float | int | bool) -> str:
    """A number as kernel text."""
    if isinstance(value, float) and (isinf(value) or isnan(value)):
        return f'float("{value}")'
    return f"({value!r})" if value < 0 else repr(value)


def typed_literal(value: float | int | bool, dtype: DType, language: Language = TRITON) -> str:
    """A number of exactly this type. Triton reads the bare literal 0.1 as fp32, 7 as int32, 1e-40 as fp64 and -0.0 as 0.0."""
    value = as_dtype(value, dtype)
    if dtype.is_float and value == 0 and copysign(1, value) < 0:
        bits = f"int{8 * dtype.size}"
        negative = language.full("[1, 1]", literal(-(1 << 8 * dtype.size - 1)), bits)
        return f"{negative}.to({language.prefix}.{dtype.kernel}, bitcast=True)"
    if dtype.is_float8:
        return op_text("cast", (language.full("[1, 1]", literal(value), "float32"),), dtype, language=language)
    if dtype.name in ("f64", "i64") or dtype.is_float and 0 < abs(value) < 2.0**-126:
        return language.full("[1, 1]", literal(value), dtype.kernel)
    return literal(value)


def scaled_literal(value: float | int | bool, scale: Size, dtype: DType, language: Language = TRITON) -> str:
    """A number times a size. The product is converted where `dtype` is a narrower integer type than the size's."""
    text = typed_literal(value, dtype, language)
    if scale == 1:
        return text
    product = f"({text} * {size_text(scale)})"
    return language.full("[1, 1]", product, dtype.kernel) if dtype.kind == "int" and dtype.size < 8 else product


def size_text(size: Size) -> str:
    """A size as kernel text. Symbols are kernel parameters of the same name."""
    return str(size) if isinstance(size, int) else str(size).replace("*", " * ")


def op_text(name: str, args: tuple[str, ...], gives: DType, exact: bool = False, language: Language = TRITON) -> str:
    """One op of the op table applied to names. `exact` selects the form that is accurate to the last bits of fp32."""
    if name == "cast" and gives is BOOL:
        return f"({args[0]} != 0)"
    if name == "cast" and gives.name == "f8e5m2":
        return f"to_e5m2({args[0]})"
    if name == "neg" and gives.is_float:
        return f"({args[0]} * -1.0)"  # Triton computes -x as 0 - x, which turns 0.0 into 0.0
    text = OPS[name].exact if exact and OPS[name].exact else OPS[name].text
    return text.format(*args, L=language.prefix, T=f"{language.prefix}.{gives.kernel}")


def run_text(index: str, run: Run) -> str:
    """What one run of axes contributes to an address."""
    text = index if run.inner == 1 else f"({index} // {factor_text(run.inner)})"
    text = text if run.first else f"({text} % {factor_text(run.size)})"
    return text if run.stride == 1 else f"{text} * {factor_text(run.stride)}"


def factor_text(size: Size) -> str:
    """A size as an operand of `*`, `//` or `%`."""
    text = size_text(size)
    return text if isinstance(size, int) or "*" not in text else f"({text})"


@dataclass(frozen=True)
class TileAlgebra(Algebra):
    """Applies a monoid to a tile: ops become lines, folds become reductions of the tile."""

    assign: Callable[[str, str], str]  # (hint, text) -> the assigned name
    folded: Callable[[str, str], str]  # (kind, text) -> text of the fold
    active: Callable[[], str]  # text of the number of folded elements
    exact: bool = False
    language: Language = TRITON

    def emit(self, op: str, *args: Value) -> str:
        return self.assign(op, _state_text(op, args, self.exact, self.language))

    def fold(self, kind: str, value: Value) -> Value:
        if isinstance(value, str):
            return self.assign(f"all_{kind}", self.folded(kind, value))
        if kind != "sum" or value == 0:
            return value
        return self.assign("count", self.active() if value == 1 else f"{literal(value)} * {self.active()}")


@dataclass(frozen=True)
class Pair:
    """The same component of two states."""

    a: Value
    b: Value


class PairAlgebra(Algebra):
    """Applies a monoid to two states: a fold of a pair is one binary op. Tiles are joined this way."""

    def __init__(self, assign: Callable[[str, str], str], exact: bool, language: Language) -> None:
        self._assign, self._exact, self._language = assign, exact, language

    def op(self, op: str, *args: Value) -> Value:
        if any(isinstance(x, Pair) for x in args):
            a, b = ([getattr(x, side) if isinstance(x, Pair) else x for x in args] for side in "ab")
            return Pair(super().op(op, *a), super().op(op, *b))
        return super().op(op, *args)

    def emit(self, op: str, *args: Value) -> str:
        return self._assign(op, _state_text(op, args, self._exact, self._language))

    def fold(self, kind: str, value: Value) -> Value:
        return self.op(COMBINE[kind], value.a, value.b) if isinstance(value, Pair) else value


def _state_text(op: str, args: tuple[Value, ...], exact: bool, language: Language) -> str:
    """An op on components of states. Counts are plain numbers, and exact forms of binary ops do not accept plain numbers."""
    texts = tuple(a if isinstance(a, str) else literal(a) for a in args)
    return op_text(op, texts, BOOL, exact and len(args) == 1, language)


def growth(monoid: Monoid, a: State, b: State, assign: Callable[[str, str], str], exact: bool,
           language: Language = TRITON) -> State:
    """Two states merged into one. Components that only accumulate are returned as increments."""
    algebra = PairAlgebra(assign, exact, language)
    if monoid.join is not None:
        return monoid.join(algebra, a, b)
    return monoid.merge(algebra, *(Pair(x, y) for x, y in zip(a, b)))


def join(monoid: Monoid, a: State, b: State, assign: Callable[[str, str], str], exact: bool,
         language: Language = TRITON) -> State:
    """Two states merged into one."""
    algebra = PairAlgebra(assign, exact, language)
    return tuple(algebra.op("add", algebra.op("mul", x.before, x.scale), x.by) if isinstance(x, Accumulated) else x
                 for x in growth(monoid, a, b, assign, exact, language))
