"""Runs a function in float64, as the reference for the accuracy criterion (ir/criterion.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ir.criterion import Check, check, ulp_at


class _Float64(TorchFunctionMode):
    """Replaces Tensor.float() by Tensor.double()."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if func is not Tensor.float else Tensor.double(*args)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """A result as a tuple of tensors."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def in_float64(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a function with floating-point inputs and all conversions to fp32 replaced by float64."""
    with _Float64():
        return as_tuple(function(*(t.double() if t.is_floating_point() else t for t in inputs)))


__all__ = ["Check", "as_tuple", "check", "in_float64", "ulp_at"]
