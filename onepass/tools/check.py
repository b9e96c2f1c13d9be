"""A function computed in float64, to hold results against by the criterion (ir/criterion.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ir.criterion import Check, check, spacing


class _Float64(TorchFunctionMode):
    """Where a function says .float(), read .double()."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if func is not Tensor.float else Tensor.double(*args)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """One tensor or several, as several."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def in_float64(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A function of floating-point tensors, computed in float64 throughout."""
    with _Float64():
        return as_tuple(function(*(t.double() if t.is_floating_point() else t for t in inputs)))


__all__ = ["Check", "as_tuple", "check", "in_float64", "spacing"]
