"""Elementwise ops: one row each.

Arithmetic on 16- and 8-bit floats runs in fp32 and is rounded to the type torch would give, op by op; simplification drops
the roundings nobody can see.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from enum import Enum
from functools import reduce
from typing import Any, TypeAlias

import torch

from ..ir.expr import BOOL, BY_TORCH, F64, I64, DType, compute_dtype
from ..ir.size import Sym
from .align import broadcast
from .call import Call, Handler, rows, shaping
from .draft import Draft, Tensor
from .schema import op_name

Emit: TypeAlias = Callable[..., int]  # (draft, *nodes of one type) -> node


class Types(Enum):
    """What the operands of an elementwise op are converted to."""

    RESULT = "the type the op gives"
    OPERANDS = "the type torch promotes the operands to: comparisons"
    TRUTH = "bool"


def pointwise(emit: Emit, types: Types = Types.RESULT, arity: int | None = None) -> Handler:
    """A handler that broadcasts and converts the first `arity` arguments (all, if not said), then emits."""

    return lambda call: elementwise(call, emit, call.args[:arity], types)


def elementwise(call: Call, emit: Emit, operands: Any, types: Types = Types.RESULT) -> Tensor:
    """Broadcast tensors and numbers, convert them, emit, and round to the type torch gives."""
    draft = call.draft
    dtype = _operand_dtype(call, operands, types)
    numbers = promoted(call, operands) if types is Types.OPERANDS else dtype
    tensors = [a if isinstance(a, Tensor) else Tensor(literal(call, a, dtype, numbers), ()) for a in operands]
    nodes, dims = broadcast(draft, tensors)
    result = emit(draft, *(draft.cast(n, dtype) for n in nodes))
    return draft.tensor(draft.cast(result, call.dtype), dims)


def literal(call: Call, value: Any, dtype: DType, rounded: DType | None = None) -> int:
    """A Python number, or a symbolic size, as a node; first `rounded` to a type, where torch compares in that type."""
    if isinstance(value, Sym):
        return call.draft.const(1, dtype, value)
    if not isinstance(value, (bool, int, float)):
        call.unsupported(f"an argument is {value!r}")
    if rounded is not None and rounded.is_narrow_float:
        value = torch.tensor(value, dtype=rounded.torch).item()
    return call.draft.const(value, dtype)


def _operand_dtype(call: Call, operands: Any, types: Types) -> DType:
    match types:
        case Types.RESULT:
            return compute_dtype(call.dtype)
        case Types.OPERANDS:
            return compute_dtype(promoted(call, operands))
        case Types.TRUTH:
            return BOOL


def promoted(call: Call, operands: Any) -> DType:
    """The type torch computes in when these tensors and numbers meet."""
    stand_ins = [_stand_in(call.draft, a) for a in operands]
    dtype = reduce(lambda a, b: torch.empty((1,) * max(a.dim(), b.dim()), dtype=torch.result_type(a, b)), stand_ins).dtype
    return BY_TORCH[dtype]


def _stand_in(draft: Draft, operand: Any) -> torch.Tensor:
    """A tensor that promotes as the operand does: a number counts for less than a tensor, a 0-dim tensor lies between."""
    if isinstance(operand, Tensor):
        return torch.empty((1,) * min(len(operand.dims), 1), dtype=draft.dtype(operand.node).torch)
    value = 1 if isinstance(operand, Sym) else operand
    return torch.tensor(value)


def op(name: str) -> Emit:
    """A row of the op table, as it is."""
    return lambda draft, *nodes: draft.op(name, *nodes)


def number(draft: Draft, like: int, value: float) -> int:
    """A literal in the type of another node."""
    return draft.const(value, draft.dtype(like))


def either(name: str, on_bool: str) -> Emit:
    """An op of numbers that is another one on bools: add is or, mul is and."""
    return lambda draft, a, b: draft.op(on_bool if draft.dtype(a) is BOOL else name, a, b)


_plus, _times = either("add", "or"), either("mul", "and")


def _scaled(call: Call, node: int, by: Any) -> int:
    """by * node, in the type of the node: for bools any number but zero is True, as in torch."""
    dtype = call.draft.dtype(node)
    return node if isinstance(by, (int, float)) and by == 1 else _times(call.draft, node, literal(call, by, dtype))


def _add(call: Call) -> Tensor:
    """a + alpha * b."""
    alpha = call.arg("alpha")
    return pointwise(lambda d, a, b: _plus(d, a, _scaled(call, b, alpha)), arity=2)(call)


def _sub(call: Call) -> Tensor:
    alpha = call.arg("alpha")
    return pointwise(lambda d, a, b: d.op("sub", a, _scaled(call, b, alpha)), arity=2)(call)


def _rsub(call: Call) -> Tensor:
    alpha = call.arg("alpha")
    return pointwise(lambda d, a, b: d.op("sub", b, _scaled(call, a, alpha)), arity=2)(call)


def _addcmul(call: Call) -> Tensor:
    """a + value * b * c."""
    value = call.arg("value")
    return pointwise(lambda d, a, b, c: d.op("add", a, _scaled(call, d.op("mul", b, c), value)))(call)


def _div(call: Call) -> Tensor:
    by_mode = {None: op("div"), "trunc": _div_trunc, "floor": _div_floor}
    mode = call.arg("rounding_mode", None)
    if mode not in by_mode:
        call.unsupported(f"rounding mode {mode!r}")
    return pointwise(by_mode[mode], arity=2)(call)


def _div_trunc(d: Draft, a: int, b: int) -> int:
    return d.op("trunc", d.op("div", a, b)) if d.dtype(a).is_float else d.op("floordiv", a, b)


def _trunc_remainder(d: Draft, a: int, b: int) -> int:
    """The remainder with the dividend's sign."""
    return d.op("fmod" if d.dtype(a).is_float else "rem", a, b)


def _remainder(d: Draft, a: int, b: int) -> int:
    """The remainder with the divisor's sign, from the one with the dividend's."""
    zero, rem = number(d, a, 0), _trunc_remainder(d, a, b)
    other_side = d.op("and", d.op("ne", rem, zero), d.op("ne", d.op("lt", rem, zero), d.op("lt", b, zero)))
    return d.op("where", other_side, d.op("add", rem, b), rem)


def _div_floor(d: Draft, a: int, b: int) -> int:
    if not d.dtype(a).is_float:
        return d.op("floordiv", d.op("sub", a, _remainder(d, a, b)), b)
    # a less its remainder is a multiple of b up to rounding, so the quotient is the integer nearest; 1 / 0 stays inf.
    whole = d.op("round", d.op("div", d.op("sub", a, _remainder(d, a, b)), b))
    return d.op("where", d.op("eq", b, number(d, b, 0)), d.op("div", a, b), whole)


def _pow(call: Call) -> Tensor:
    base, exponent = call.args[:2]
    if isinstance(exponent, (int, float)) and not isinstance(base, (int, float)):
        return pointwise(lambda d, a: _power(call, d, a, exponent), arity=1)(call)
    if not call.dtype.is_float:
        call.unsupported("an integer raised to a tensor's power")
    return pointwise(op("pow"), arity=2)(call)


def _power(call: Call, d: Draft, a: int, exponent: float) -> int:
    """A known power, by the cheapest means."""
    times = int(abs(exponent)) if abs(exponent) <= 8 and exponent == int(exponent) else None
    if exponent == 0:
        return number(d, a, 1)
    if times is not None and exponent > 0:
        return _repeated(d, a, times)
    if not d.dtype(a).is_float:
        call.unsupported(f"an integer to the power {exponent}")
    if times is not None:
        return d.op("reciprocal", _repeated(d, a, times))
    roots = {0.5: "sqrt", -0.5: "rsqrt"}
    return d.op(roots[exponent], a) if exponent in roots else d.op("pow", a, number(d, a, exponent))


def _repeated(d: Draft, a: int, times: int) -> int:
    """a to a positive whole power, squaring where that saves a product."""
    if times == 1:
        return a
    half = _repeated(d, a, times // 2)
    square = d.op("mul", half, half)
    return d.op("mul", square, a) if times % 2 else square


def _clamp(call: Call) -> Tensor:
    """NaN stays NaN, and the upper bound wins over the lower, as in torch."""
    return bounded(call, [call.args[0]], call.arg("min"), call.arg("max"))


def bounded(call: Call, value: list[Any], low: Any, high: Any) -> Tensor:
    """A value held between bounds, either of which may be missing."""
    bounds = [(name, b) for name, b in (("maximum", low), ("minimum", high)) if b is not None]

    def emit(d: Draft, node: int, *limits: int) -> int:
        for (name, _), limit in zip(bounds, limits, strict=True):
            node = d.op(name, node, limit)
        return node

    return elementwise(call, emit, [*value, *(b for _, b in bounds)])


def _sign(d: Draft, a: int) -> int:
    """-1, 0 or 1; torch says 0 for NaN."""
    zero, one = number(d, a, 0), number(d, a, 1)
    if d.dtype(a) is BOOL:
        return a
    below = zero if d.dtype(a).name == "u8" else d.op("where", d.op("lt", a, zero), number(d, a, -1), zero)
    return d.op("where", d.op("gt", a, zero), one, below)


def _abs(d: Draft, a: int) -> int:
    return a if d.dtype(a).name in ("bool", "u8") else d.op("abs", a)


def _relu(d: Draft, a: int) -> int:
    return d.op("maximum", a, number(d, a, 0))


def _rounding(name: str) -> Emit:
    """floor, ceil, trunc: nothing to do on integers."""
    return lambda d, a: d.op(name, a) if d.dtype(a).is_float else a


def _round(call: Call) -> Tensor:
    if call.arg("decimals", 0):
        call.unsupported("decimals")
    return pointwise(_rounding("round"), arity=1)(call)


def _isnan(d: Draft, a: int) -> int:
    return d.op("isnan", a) if d.dtype(a).is_float else d.const(False, BOOL)


def _isinf(d: Draft, a: int) -> int:
    return d.op("eq", d.op("abs", a), number(d, a, math.inf)) if d.dtype(a).is_float else d.const(False, BOOL)


def _isfinite(d: Draft, a: int) -> int:
    # NaN is not below infinity either.
    return d.op("lt", d.op("abs", a), number(d, a, math.inf)) if d.dtype(a).is_float else d.const(True, BOOL)


def _where(call: Call) -> Tensor:
    condition, *branches = call.args
    draft, dtype = call.draft, compute_dtype(call.dtype)
    tensors = [b if isinstance(b, Tensor) else Tensor(literal(call, b, dtype), ()) for b in branches]
    (test, *nodes), dims = broadcast(draft, [condition, *tensors])
    chosen = draft.op("where", draft.cast(test, BOOL), *(draft.cast(n, dtype) for n in nodes))
    return draft.tensor(draft.cast(chosen, call.dtype), dims)


def _convert(call: Call) -> Tensor:
    """A change of type; device and layout do not concern the value. Between integers and narrow floats lies fp32."""
    source, draft = call.args[0], call.draft
    own, node = draft.dtype(source.node), source.node
    if own.is_narrow_float or call.dtype.is_narrow_float:
        node = draft.cast(node, compute_dtype(own if own.is_float else call.dtype))
    return Tensor(draft.cast(node, call.dtype), source.dims)


def scalar(name: str) -> Handler:
    """Arithmetic torch did on symbolic sizes while tracing: a number like any other, in double precision as in Python."""

    def handle(call: Call) -> Tensor:
        dtype = F64 if isinstance(call.gives, torch.SymFloat) else I64
        nodes = [call.draft.cast(a.node if isinstance(a, Tensor) else literal(call, a, dtype), dtype) for a in call.args]
        return Tensor(call.draft.op(name, *nodes) if name != "cast" else nodes[0], ())

    return handle


_UNARY = ("neg", "reciprocal", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "sigmoid",
          "erf")
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_WITH_NUMBER = "Tensor Scalar"
_EITHER_NUMBER = "Tensor Scalar Scalar_Tensor"

POINTWISE: dict[str, Handler] = {
    **{f"aten.{name}.default": pointwise(op(name)) for name in _UNARY},
    **{f"aten.{name}.{each}": pointwise(op(name), Types.OPERANDS) for name in _COMPARE for each in _WITH_NUMBER.split()},
    **rows("aten.add", _WITH_NUMBER, _add),
    **rows("aten.sub", _WITH_NUMBER, _sub),
    **rows("aten.rsub", _WITH_NUMBER, _rsub),
    **rows("aten.mul", _WITH_NUMBER, pointwise(_times)),
    **rows("aten.div", "Tensor Scalar Tensor_mode Scalar_mode", _div),
    **rows("aten.true_divide", _WITH_NUMBER, _div),
    **rows("aten.floor_divide", "default Scalar", pointwise(_div_floor)),
    **rows("aten.remainder", _EITHER_NUMBER, pointwise(_remainder)),
    **rows("aten.fmod", _WITH_NUMBER, pointwise(_trunc_remainder)),
    **rows("aten.pow", "Tensor_Tensor Tensor_Scalar Scalar", _pow),
    "aten.square.default": pointwise(lambda d, a: d.op("mul", a, a)),
    "aten.addcmul.default": _addcmul,
    "prims.fma.default": pointwise(op("fma")),
    "aten.abs.default": pointwise(_abs),
    "aten.sign.default": pointwise(_sign),
    "aten.sgn.default": pointwise(_sign),
    "aten.relu.default": pointwise(_relu),
    "aten.log10.default": pointwise(lambda d, a: d.op("mul", d.op("log", a), number(d, a, 1 / math.log(10)))),
    "aten.floor.default": pointwise(_rounding("floor")),
    "aten.ceil.default": pointwise(_rounding("ceil")),
    "aten.trunc.default": pointwise(_rounding("trunc")),
    **rows("aten.round", "default decimals", _round),
    "aten.maximum.default": pointwise(either("maximum", "or")),
    "aten.max.other": pointwise(either("maximum", "or")),
    "aten.minimum.default": pointwise(either("minimum", "and")),
    "aten.min.other": pointwise(either("minimum", "and")),
    **rows("aten.clamp", "default Tensor", _clamp),
    **rows("aten.clamp_min", "default Tensor", lambda call: bounded(call, [call.args[0]], call.args[1], None)),
    **rows("aten.clamp_max", "default Tensor", lambda call: bounded(call, [call.args[0]], None, call.args[1])),
    "aten.isnan.default": pointwise(_isnan, Types.OPERANDS),
    "aten.isinf.default": pointwise(_isinf, Types.OPERANDS),
    "aten.isfinite.default": pointwise(_isfinite, Types.OPERANDS),
    "prims.isfinite.default": pointwise(_isfinite, Types.OPERANDS),
    "aten.logical_and.default": pointwise(op("and"), Types.TRUTH),
    "aten.logical_or.default": pointwise(op("or"), Types.TRUTH),
    "aten.logical_xor.default": pointwise(op("xor"), Types.TRUTH),
    "aten.logical_not.default": pointwise(op("not"), Types.TRUTH),
    **rows("aten.bitwise_and", _EITHER_NUMBER, pointwise(op("and"))),
    **rows("aten.bitwise_or", _EITHER_NUMBER, pointwise(op("or"))),
    **rows("aten.bitwise_xor", _EITHER_NUMBER, pointwise(op("xor"))),
    "aten.bitwise_not.default": pointwise(op("not")),
    **rows("aten.where", "self ScalarOther ScalarSelf Scalar", _where),
    "aten._to_copy.default": shaping(_convert, "dtype"),
    "prims.convert_element_type.default": shaping(_convert, "dtype"),
    op_name(operator.mul): scalar("mul"),
    op_name(operator.add): scalar("add"),
    op_name(operator.sub): scalar("sub"),
    op_name(operator.truediv): scalar("div"),
    op_name(torch.sym_float): scalar("cast"),
    "torch._sym_sqrt": scalar("sqrt"),
}
