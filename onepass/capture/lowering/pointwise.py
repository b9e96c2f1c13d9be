"""Lowering of elementwise ops, one table entry per overload.

Arithmetic on 16- and 8-bit floats runs in fp32, and every op rounds to the dtype torch would return. Simplification later
drops the roundings that no one can observe.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import Any

import torch

from ...errors import IntegerDivisionByZero
from ...ir.expr import BOOL, F64, I64, as_dtype, compute_dtype, max_value
from ...ir.size import Sym
from .align import broadcast
from .call import Call, Handler, TensorHandler, for_overloads, with_shape_args
from .draft import Draft, Tensor
from .elementwise import (
    Emit,
    OperandTypes,
    checked_literal,
    const_like,
    converted,
    elementwise,
    floats_only,
    literal,
    numeric_only,
    numeric_or_bool,
    op,
    pointwise,
    promoted,
)
from .integers import power_of_integers, shift
from .schema import op_name

_MUL = numeric_or_bool("mul", "and")


def _factor(call: Call, value: Any) -> int | None:
    """The node of a scalar factor; None for 1. On bools, a factor says whether the operand counts at all."""
    return None if value == 1 else checked_literal(call, value, call.dtype)


def _scaled(draft: Draft, node: int, by: int | None) -> int:
    return node if by is None else _MUL(draft, node, by)


def _add(call: Call) -> Tensor:
    """a + alpha * b."""
    alpha = _factor(call, call.arg("alpha"))
    plus = numeric_or_bool("add", "or")
    return pointwise(lambda d, a, b: plus(d, a, _scaled(d, b, alpha)), arity=2)(call)


def _sub(call: Call) -> Tensor:
    alpha = _factor(call, call.arg("alpha"))
    return pointwise(lambda d, a, b: d.op("sub", a, _scaled(d, b, alpha)), arity=2)(call)


def _rsub(call: Call) -> Tensor:
    alpha = _factor(call, call.arg("alpha"))
    return pointwise(lambda d, a, b: d.op("sub", b, _scaled(d, a, alpha)), arity=2)(call)


def _addcmul(call: Call) -> Tensor:
    """a + value * b * c."""
    value = _factor(call, call.arg("value"))
    return numeric_only(lambda d, a, b, c: d.op("add", a, _scaled(d, d.op("mul", b, c), value)))(call)


def _div(call: Call) -> Tensor:
    by_mode = {None: pointwise(op("div"), arity=2), "trunc": _division(_div_trunc), "floor": _division(_div_floor)}
    mode = call.arg("rounding_mode", None)
    if mode not in by_mode:
        call.unsupported(f"rounding mode {mode!r}")
    return by_mode[mode](call)


def _division(emit: Emit) -> TensorHandler:
    """A handler for divisions that are also defined on integers."""

    def handle(call: Call) -> Tensor:
        divisor = call.args[1]
        if not call.dtype.is_float and not isinstance(divisor, (Tensor, Sym)) and as_dtype(divisor, call.dtype) == 0:
            raise IntegerDivisionByZero(op=call.op, where=call.where)
        return numeric_only(emit, arity=2)(call)

    return handle


def _div_trunc(d: Draft, a: int, b: int) -> int:
    return d.op("trunc", d.op("div", a, b)) if d.dtype(a).is_float else _quotient(d, a, b)


def _quotient(d: Draft, a: int, b: int) -> int:
    """Integer division, truncated. A zero divisor yields a quotient with all bits set, as on a GPU.

    The divisor is replaced where it is zero: otherwise the compiler infers that it is nonzero, even in the test for zero.
    """
    is_zero = d.op("eq", b, const_like(d, b, 0))
    return d.op("where", is_zero, const_like(d, a, -1), d.op("floordiv", a, d.op("where", is_zero, const_like(d, b, 1), b)))


def _trunc_remainder(d: Draft, a: int, b: int) -> int:
    """The remainder with the dividend's sign. For an integer division by zero, the dividend."""
    if d.dtype(a).is_float:
        return d.op("fmod", a, b)
    is_zero = d.op("eq", b, const_like(d, b, 0))
    return d.op("where", is_zero, a, d.op("rem", a, d.op("where", is_zero, const_like(d, b, 1), b)))


def _remainder(d: Draft, a: int, b: int) -> int:
    """The remainder with the divisor's sign, from the one with the dividend's sign."""
    rem = _trunc_remainder(d, a, b)
    return d.op("where", _sign_differs(d, rem, b), d.op("add", rem, b), rem)


def _sign_differs(d: Draft, rem: int, b: int) -> int:
    """Whether a remainder is nonzero and differs in sign from the divisor."""
    zero = const_like(d, rem, 0)
    return d.op("and", d.op("ne", rem, zero), d.op("ne", d.op("lt", rem, zero), d.op("lt", b, zero)))


def _div_floor(d: Draft, a: int, b: int) -> int:
    return _floor_of_floats(d, a, b) if d.dtype(a).is_float else _floor_of_integers(d, a, b)


def _floor_of_integers(d: Draft, a: int, b: int) -> int:
    """The truncated quotient, minus one where truncation rounded up. `(a - rem) // b` could overflow."""
    quotient = _quotient(d, a, b)
    if d.dtype(a).name == "u8":
        return quotient
    rem = d.op("sub", a, d.op("mul", quotient, b))
    return d.op("where", _sign_differs(d, rem, b), d.op("sub", quotient, const_like(d, a, 1)), quotient)


def _floor_of_floats(d: Draft, a: int, b: int) -> int:
    """torch's algorithm: a minus its remainder is a multiple of b up to rounding, so the quotient is the nearest integer."""
    rem, true = d.op("fmod", a, b), d.op("div", a, b)
    zero = const_like(d, a, 0)
    whole = d.op("div", d.op("sub", a, rem), b)
    whole = d.op("where", _sign_differs(d, rem, b), d.op("sub", whole, const_like(d, a, 1)), whole)
    floor = d.op("floor", whole)
    up = d.op("gt", d.op("sub", whole, floor), const_like(d, a, 0.5))
    nearest = d.op("where", up, d.op("add", floor, const_like(d, a, 1)), floor)
    # A zero result takes the quotient's sign. x / 0 is inf or NaN, although the remainder is NaN.
    nearest = d.op("where", d.op("eq", whole, zero), d.op("mul", true, zero), nearest)
    return d.op("where", d.op("eq", b, zero), true, nearest)


def _pow(call: Call) -> Tensor:
    base, exponent = call.args[:2]
    if isinstance(exponent, (int, float)) and not isinstance(base, (int, float)):
        return pointwise(lambda d, a: _power(call, d, a, exponent), arity=1)(call)
    if promoted(call, (base, exponent)) is BOOL:  # although torch tells a result type
        call.unsupported("on bools")
    return pointwise(op("pow") if call.dtype.is_float else power_of_integers, arity=2)(call)


def _power(call: Call, d: Draft, a: int, exponent: float) -> int:
    """A constant power, computed the cheapest way."""
    most = 8 if d.dtype(a).is_float else max_value(I64)
    power = int(abs(exponent)) if abs(exponent) <= most and exponent == int(exponent) else None
    if exponent == 0:
        return const_like(d, a, 1)
    if power is not None and exponent > 0:
        return _integer_power(d, a, power)
    if not d.dtype(a).is_float:
        call.unsupported(f"an integer raised to {exponent}")
    if power is not None:
        return d.op("reciprocal", _integer_power(d, a, power))
    roots = {0.5: "sqrt", -0.5: "rsqrt"}
    return d.op(roots[exponent], a) if exponent in roots else d.op("pow", a, const_like(d, a, exponent))


def _integer_power(d: Draft, a: int, power: int) -> int:
    """A positive integer power by repeated squaring."""
    if power == 1:
        return a
    half = _integer_power(d, a, power // 2)
    square = d.op("mul", half, half)
    return d.op("mul", square, a) if power % 2 else square


def _shift(name: str) -> TensorHandler:
    """A shift of integers."""

    def handle(call: Call) -> Tensor:
        if call.dtype.kind != "int":
            call.unsupported(f"on {call.dtype}")
        return pointwise(partial(shift, name))(call)

    return handle


def _clamp(call: Call) -> Tensor:
    """NaN stays NaN, and the upper bound takes precedence over the lower, as in torch."""
    return clamped(call, [call.args[0]], call.arg("min"), call.arg("max"))


def clamped(call: Call, value: list[Any], low: Any, high: Any) -> Tensor:
    """A value clamped to bounds. Either bound may be None."""
    if call.dtype is BOOL:
        call.unsupported("on bools")
    bounds = [(name, b) for name, b in (("maximum", low), ("minimum", high)) if b is not None]

    def emit(d: Draft, node: int, *limits: int) -> int:
        for (name, _), limit in zip(bounds, limits, strict=True):
            node = d.op(name, node, limit)
        return node

    return elementwise(call, emit, [*value, *(b for _, b in bounds)], number=checked_literal)


def _sign(d: Draft, a: int) -> int:
    """-1, 0 or 1. torch returns 0 for NaN."""
    zero, one = const_like(d, a, 0), const_like(d, a, 1)
    if d.dtype(a) is BOOL:
        return a
    below = zero if d.dtype(a).name == "u8" else d.op("where", d.op("lt", a, zero), const_like(d, a, -1), zero)
    return d.op("where", d.op("gt", a, zero), one, below)


def _abs(d: Draft, a: int) -> int:
    return a if d.dtype(a).name == "u8" else d.op("abs", a)


def _relu(d: Draft, a: int) -> int:
    return d.op("maximum", a, const_like(d, a, 0))


def _rounding(name: str) -> Emit:
    """floor, ceil and trunc. They leave integers unchanged."""
    return lambda d, a: d.op(name, a) if d.dtype(a).is_float else a


def _round(call: Call) -> Tensor:
    if call.arg("decimals", 0):
        call.unsupported("decimals other than 0")
    return numeric_only(_rounding("round"), arity=1)(call)


def _isnan(d: Draft, a: int) -> int:
    return d.op("isnan", a) if d.dtype(a).is_float else d.const(False, BOOL)


def _isinf(d: Draft, a: int) -> int:
    return d.op("eq", d.op("abs", a), const_like(d, a, math.inf)) if d.dtype(a).is_float else d.const(False, BOOL)


def _isfinite(d: Draft, a: int) -> int:
    # NaN compares false here too.
    return d.op("lt", d.op("abs", a), const_like(d, a, math.inf)) if d.dtype(a).is_float else d.const(True, BOOL)


def _signbit(d: Draft, a: int) -> int:
    """Whether the sign is negative, that of -0.0 and of a NaN too."""
    if d.dtype(a) is BOOL:
        return d.const(False, BOOL)
    signed = d.op("copysign", const_like(d, a, 1), a) if d.dtype(a).is_float else a
    return d.op("lt", signed, const_like(d, a, 0))


def _times(factor: float) -> TensorHandler:
    return pointwise(lambda d, a: d.op("mul", a, const_like(d, a, factor)))


def _where(call: Call) -> Tensor:
    condition, *branches = call.args
    draft, dtype = call.draft, compute_dtype(call.dtype)
    tensors = [b if isinstance(b, Tensor) else Tensor(checked_literal(call, b, call.dtype), ()) for b in branches]
    (test, *nodes), dims = broadcast(draft, [condition, *tensors])
    chosen = draft.op("where", draft.cast(test, BOOL), *(draft.cast(n, dtype) for n in nodes))
    return draft.tensor(draft.cast(chosen, call.dtype), dims)


def _convert(call: Call) -> Tensor:
    """Convert the dtype. Device and layout do not affect the value."""
    source = call.args[0]
    return Tensor(converted(call.draft, source.node, call.dtype), source.dims)


def size_arithmetic(name: str) -> Handler:
    """Arithmetic that torch did on symbolic sizes while tracing: computed in double precision, as in Python."""

    def handle(call: Call) -> Tensor:
        dtype = F64 if isinstance(call.result_fake, torch.SymFloat) else I64
        nodes = [call.draft.cast(a.node if isinstance(a, Tensor) else literal(call, a, dtype), dtype) for a in call.args]
        return Tensor(call.draft.op(name, *nodes) if name != "cast" else nodes[0], ())

    return handle


# fmt: off
_FUNCTIONS = ("neg", "reciprocal", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "sigmoid",
          "erf", "erfc", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "atan2")
# fmt: on
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_TENSOR_OR_SCALAR = "Tensor Scalar"
_SHIFTS = "Tensor Tensor_Scalar Scalar_Tensor"
_SCALAR_EITHER_SIDE = "Tensor Scalar Scalar_Tensor"

POINTWISE: dict[str, Handler] = {
    **{f"aten.{name}.default": pointwise(op(name)) for name in _FUNCTIONS},
    **{
        f"aten.{name}.{overload}": pointwise(op(name), OperandTypes.OPERANDS)
        for name in _COMPARE
        for overload in _TENSOR_OR_SCALAR.split()
    },
    **for_overloads("aten.add", _TENSOR_OR_SCALAR, _add),
    **for_overloads("aten.sub", _TENSOR_OR_SCALAR, _sub),
    **for_overloads("aten.rsub", _TENSOR_OR_SCALAR, _rsub),
    **for_overloads("aten.mul", _TENSOR_OR_SCALAR, pointwise(_MUL)),
    **for_overloads("aten.div", "Tensor Scalar Tensor_mode Scalar_mode", _div),
    **for_overloads("aten.true_divide", _TENSOR_OR_SCALAR, _div),
    **for_overloads("aten.floor_divide", "default Scalar", _division(_div_floor)),
    **for_overloads("aten.remainder", _SCALAR_EITHER_SIDE, _division(_remainder)),
    **for_overloads("aten.fmod", _TENSOR_OR_SCALAR, _division(_trunc_remainder)),
    **for_overloads("aten.pow", "Tensor_Tensor Tensor_Scalar Scalar", _pow),
    "aten.square.default": numeric_only(lambda d, a: d.op("mul", a, a)),
    "aten.addcmul.default": _addcmul,
    "prims.fma.default": pointwise(op("fma")),
    "aten.abs.default": numeric_only(_abs),
    "aten.sign.default": pointwise(_sign),
    "aten.sgn.default": pointwise(_sign),
    "aten.relu.default": numeric_only(_relu),
    "aten.log10.default": pointwise(lambda d, a: d.op("mul", d.op("log", a), const_like(d, a, 1 / math.log(10)))),
    "aten.deg2rad.default": _times(math.pi / 180),
    "aten.rad2deg.default": _times(180 / math.pi),
    "aten.signbit.default": pointwise(_signbit, OperandTypes.OPERANDS),
    **for_overloads("aten.copysign", _TENSOR_OR_SCALAR, pointwise(op("copysign"))),
    "aten.floor.default": numeric_only(_rounding("floor")),
    "aten.ceil.default": numeric_only(_rounding("ceil")),
    "aten.trunc.default": numeric_only(_rounding("trunc")),
    **for_overloads("aten.round", "default decimals", _round),
    "aten.maximum.default": pointwise(numeric_or_bool("maximum", "or")),
    "aten.max.other": pointwise(numeric_or_bool("maximum", "or")),
    "aten.minimum.default": pointwise(numeric_or_bool("minimum", "and")),
    "aten.min.other": pointwise(numeric_or_bool("minimum", "and")),
    "aten.hypot.default": floats_only(op("hypot")),
    "aten.fmax.default": pointwise(numeric_or_bool("fmax", "or")),
    "aten.fmin.default": pointwise(numeric_or_bool("fmin", "and")),
    **for_overloads("aten.clamp", "default Tensor", _clamp),
    **for_overloads("aten.clamp_min", "default Tensor", lambda call: clamped(call, [call.args[0]], call.args[1], None)),
    **for_overloads("aten.clamp_max", "default Tensor", lambda call: clamped(call, [call.args[0]], None, call.args[1])),
    "aten.isnan.default": pointwise(_isnan, OperandTypes.OPERANDS),
    "aten.isinf.default": pointwise(_isinf, OperandTypes.OPERANDS),
    "aten.isfinite.default": pointwise(_isfinite, OperandTypes.OPERANDS),
    "prims.isfinite.default": pointwise(_isfinite, OperandTypes.OPERANDS),
    "aten.logical_and.default": pointwise(op("and"), OperandTypes.TRUTH),
    "aten.logical_or.default": pointwise(op("or"), OperandTypes.TRUTH),
    "aten.logical_xor.default": pointwise(op("xor"), OperandTypes.TRUTH),
    "aten.logical_not.default": pointwise(op("not"), OperandTypes.TRUTH),
    **for_overloads("aten.bitwise_and", _SCALAR_EITHER_SIDE, pointwise(op("and"))),
    **for_overloads("aten.bitwise_or", _SCALAR_EITHER_SIDE, pointwise(op("or"))),
    **for_overloads("aten.bitwise_xor", _SCALAR_EITHER_SIDE, pointwise(op("xor"))),
    "aten.bitwise_not.default": pointwise(op("not")),
    **for_overloads("aten.bitwise_left_shift", _SHIFTS, _shift("shl")),
    **for_overloads("aten.bitwise_right_shift", _SHIFTS, _shift("shr")),
    **for_overloads("aten.__lshift__", _TENSOR_OR_SCALAR, _shift("shl")),
    **for_overloads("aten.__rshift__", _TENSOR_OR_SCALAR, _shift("shr")),
    **for_overloads("aten.where", "self ScalarOther ScalarSelf Scalar", _where),
    "aten._to_copy.default": with_shape_args(_convert, "dtype"),
    "prims.convert_element_type.default": with_shape_args(_convert, "dtype"),
    op_name(operator.mul): size_arithmetic("mul"),
    op_name(operator.add): size_arithmetic("add"),
    op_name(operator.sub): size_arithmetic("sub"),
    op_name(operator.truediv): size_arithmetic("div"),
    op_name(torch.sym_float): size_arithmetic("cast"),
    "torch._sym_sqrt": size_arithmetic("sqrt"),
}
