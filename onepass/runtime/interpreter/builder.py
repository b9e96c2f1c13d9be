"""Arithmetic of the interpreter, corrected where Triton's interpreter differs from a GPU or from torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ... import compat
from ...ir.expr import DTYPES


def make_builder(parts: compat.InterpreterParts) -> Any:
    """A builder that evaluates Triton's semantics with numpy."""
    tl, handle_type = parts.language, parts.runtime.TensorHandle
    # Types that numpy lacks are stored as raw bits and converted by torch (round to nearest even, NaN kept).
    narrow = {getattr(tl, d.kernel): d.torch for d in DTYPES.values() if d.is_narrow_float and d.name != "f16"}

    class Builder(parts.runtime.InterpreterBuilder):  # type: ignore[misc, name-defined]  # Triton has no types
        def __init__(self) -> None:
            super().__init__()
            # Integers wrap, as on a GPU.
            self.options: Any = replace(parts.runtime.InterpreterOptions(), sanitize_overflow=False)

        def cast_impl(self, src: Any, dst_type: Any) -> Any:
            """Convert values with the rounding of the hardware."""
            source, target = src.dtype.scalar, dst_type.scalar
            data = src.data
            if source in narrow and data.dtype.kind == "u":  # the result of a comparison still has its operands' type
                data = _widen(data, narrow[source])
            data = narrowed(data, narrow[target]) if target in narrow else data.astype(parts.runtime._get_np_dtype(target))
            return handle_type(data, target)

        def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
            """Give comparisons the type int1. Triton's interpreter gives the result its operands' type."""
            made = super().binary_op(lhs, rhs, op)
            return handle_type(made.data, tl.int1) if made.data.dtype == np.bool_ else made

        def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
            return self.cast_impl(src, dst_type)

        def get_all_ones_value(self, type: Any) -> Any:
            """All bits set. numpy does not convert -1 to unsigned types."""
            return handle_type(~np.zeros(1, dtype=parts.runtime._get_np_dtype(type)), type.scalar)

        def create_fma(self, x: Any, y: Any, z: Any) -> Any:
            """Round once: a float64 holds the product of two float32 values exactly."""
            wide = x.data.astype(np.float64) * y.data + z.data
            return handle_type(wide.astype(x.data.dtype), x.dtype.scalar)

        def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
            return self.binary_op(lhs, rhs, np.fmax)

        def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
            return self.binary_op(lhs, rhs, np.fmin)

    return Builder()


def _widen(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.tensor(bits.view(_signed(bits.dtype))).view(dtype).to(torch.float32).numpy()


def narrowed(data: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The bits of floats rounded to a type that numpy lacks."""
    value = torch.tensor(data.astype(np.float32))
    if dtype.itemsize == 1:  # the hardware saturates at the largest finite number and keeps NaN
        value = value.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    value = value.to(dtype)
    return value.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy().view(f"u{dtype.itemsize}")


def _signed(dtype: np.dtype) -> str:
    """The raw integer type that torch accepts: int16 for 16 bits, uint8 for 8."""
    return "i2" if dtype.itemsize == 2 else "u1"
