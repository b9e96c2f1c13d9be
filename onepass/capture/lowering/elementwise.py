"""How elementwise ops are lowered: the types of operands, literals, and torch's type promotion."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import reduce
from typing import Any, TypeAlias

import torch

from ...errors import NumberOutOfRange
from ...ir.expr import BOOL, BY_TORCH, DType, can_fill, compute_dtype
from ...ir.size import Sym
from .align import broadcast
from .call import Call, TensorHandler
from .draft import Draft, Tensor

Literal: TypeAlias = Callable[[Call, Any, DType], int]  # (call, number, dtype) -> node
Emit: TypeAlias = Callable[..., int]  # (draft, *nodes of one dtype) -> node


class OperandTypes(Enum):
    """What the operands of an elementwise op are converted to."""

    RESULT = "the type the op gives"
    OPERANDS = "the type torch promotes the operands to: comparisons"
    TRUTH = "bool"


def pointwise(emit: Emit, types: OperandTypes = OperandTypes.RESULT, arity: int | None = None) -> TensorHandler:
    """A handler that broadcasts and converts the first `arity` arguments (None: all), then emits the op."""

    return lambda call: elementwise(call, emit, call.args[:arity], types)


def numeric_only(emit: Emit, arity: int | None = None) -> TensorHandler:
    """`pointwise` for ops that torch does not define on bools."""

    def handle(call: Call) -> Tensor:
        if call.dtype is BOOL:
            call.unsupported("on bools")
        return pointwise(emit, arity=arity)(call)

    return handle


def floats_only(emit: Emit) -> TensorHandler:
    """`pointwise` for ops that torch only defines on floats, although it tells the result type of others."""

    def handle(call: Call) -> Tensor:
        if not call.dtype.is_float:
            call.unsupported(f"on {call.dtype}")
        return pointwise(emit)(call)

    return handle


def elementwise(
    call: Call, emit: Emit, operands: Any, types: OperandTypes = OperandTypes.RESULT, number: Literal | None = None
) -> Tensor:
    """Broadcast tensors and numbers, convert them, emit the op, and round to the result's dtype.

    Tensors are first converted to the dtype torch promotes them to. In comparisons this also rounds 0-dim tensors of wider types.
    In other ops 0-dim tensors keep their precision, like numbers: torch rounds them on a GPU but not on a CPU.
    """
    draft = call.draft
    common = _common_dtype(call, operands, types)
    number = number or (_comparison_literal if types is OperandTypes.OPERANDS else literal)
    tensors = [a if isinstance(a, Tensor) else Tensor(number(call, a, common), ()) for a in operands]
    nodes, dims = broadcast(draft, tensors)
    rounded = [isinstance(a, Tensor) and (types is OperandTypes.OPERANDS or bool(a.dims)) for a in operands]
    operand_nodes = [converted(draft, n, common) if first else n for n, first in zip(nodes, rounded, strict=True)]
    result = emit(draft, *(draft.cast(n, compute_dtype(common)) for n in operand_nodes))
    return draft.tensor(draft.cast(result, call.dtype), dims)


def literal(call: Call, value: Any, dtype: DType) -> int:
    """A Python number or symbolic size as a node, in the compute type of `dtype`. Integers wrap around."""
    if isinstance(value, Sym) and dtype is not BOOL:
        return call.draft.const(1, compute_dtype(dtype), value)
    if not isinstance(value, (bool, int, float)):
        call.unsupported(f"an argument is {value!r}")
    return call.draft.const(value, compute_dtype(dtype))


def checked_literal(call: Call, value: Any, dtype: DType) -> int:
    """`literal` for fills, bounds and factors, where torch requires that `dtype` can represent the number."""
    if isinstance(value, (int, float)) and not can_fill(value, dtype):
        raise NumberOutOfRange(number=value, dtype=dtype.torch, op=call.op, where=call.where)
    return literal(call, value, dtype)


def _comparison_literal(call: Call, value: Any, dtype: DType) -> int:
    """`literal` rounded to the dtype torch compares in."""
    if dtype.is_float and isinstance(value, (bool, int, float)):
        value = torch.tensor(float(value), dtype=dtype.torch).item()
    return literal(call, value, dtype)


def converted(draft: Draft, node: int, dtype: DType) -> int:
    """Convert a value. Conversions between integers and narrow floats go through fp32."""
    own = draft.dtype(node)
    if own != dtype and (own.is_narrow_float or dtype.is_narrow_float):
        node = draft.cast(node, compute_dtype(own if own.is_float else dtype))
    return draft.cast(node, dtype)


def _common_dtype(call: Call, operands: Any, types: OperandTypes) -> DType:
    match types:
        case OperandTypes.RESULT:
            return call.dtype
        case OperandTypes.OPERANDS:
            return promoted(call, operands)
        case OperandTypes.TRUTH:
            return BOOL


def promoted(call: Call, operands: Any) -> DType:
    """torch's promoted dtype. A 0-dim tensor has lower priority than other tensors, and a number has the lowest."""
    tensors = [_promotion_proxy(call.draft, a) for a in operands if isinstance(a, Tensor)]
    result = reduce(lambda a, b: torch.empty((1,) * max(a.dim(), b.dim()), dtype=torch.result_type(a, b)), tensors)
    for number in (a for a in operands if not isinstance(a, Tensor)):
        kind = 1.0 if isinstance(number, float) else isinstance(number, bool) or 1
        result = result.to(torch.result_type(result, kind))
    return BY_TORCH[result.dtype]


def _promotion_proxy(draft: Draft, operand: Tensor) -> torch.Tensor:
    return torch.empty((1,) * min(len(operand.dims), 1), dtype=draft.dtype(operand.node).torch)


def op(name: str) -> Emit:
    """Emit an op of the op table."""
    return lambda draft, *nodes: draft.op(name, *nodes)


def const_like(draft: Draft, like: int, value: float) -> int:
    """A literal in the dtype of another node."""
    return draft.const(value, draft.dtype(like))


def numeric_or_bool(name: str, on_bool: str) -> Emit:
    """An op that has another name on bools: add becomes or, mul becomes and."""
    return lambda draft, a, b: draft.op(on_bool if draft.dtype(a) is BOOL else name, a, b)
