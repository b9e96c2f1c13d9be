"""How far a result is from float64, measured against how far eager torch is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


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


@dataclass(frozen=True, slots=True)
class Check:
    """Errors of one result against float64, and the bounds eager's own errors set."""

    max_error: float
    max_bound: float
    rms_error: float
    rms_bound: float

    @property
    def ok(self) -> bool:
        """Whether both errors keep within their bounds."""
        return self.max_error <= self.max_bound and self.rms_error <= self.rms_bound


def check(result: Tensor, eager: Tensor, reference: Tensor) -> Check:
    """Max error <= 1.5 x eager's + 1 ulp at max|reference|; RMS error <= 1.1 x eager's + 0.5 ulp."""
    ulp = spacing(_max(reference.abs()), result.dtype)
    ours, theirs = (reference - result.double()).abs(), (reference - eager.double()).abs()
    return Check(_max(ours), 1.5 * _max(theirs) + ulp, _rms(ours), 1.1 * _rms(theirs) + 0.5 * ulp)


def spacing(value: float, dtype: torch.dtype) -> float:
    """One unit in the last place of a dtype at a value; below its normal range all values are equally far apart."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    return max(info.eps * 2.0 ** (math.frexp(value)[1] - 1), least) if value else least


def _max(error: Tensor) -> float:
    return float(error.max()) if error.numel() else 0.0


def _rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt()) if error.numel() else 0.0
