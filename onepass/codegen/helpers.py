"""Functions that generated Triton kernels import: conversions, fast math, and folds along one axis.

A fold keeps its axis and, unlike tl.max, propagates NaN. It takes float32, float64 or integers of at least 32 bits, never a narrow
float. Only generated kernels and the runtime import this module, because it imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _times(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a * b


@triton.jit
def to_e5m2(x: tl.tensor) -> tl.tensor:
    """float32 to float8e5. The hardware conversion saturates at the largest finite value; torch rounds to inf."""
    bits = x.to(tl.float8e5).to(tl.int8, bitcast=True)
    infinite = tl.where(x < 0, -4, 124).to(tl.int8)
    return tl.where(tl.abs(x) >= 61440.0, infinite, bits).to(tl.float8e5, bitcast=True)


@triton.jit
def widen(x: tl.tensor, zero: tl.tensor = 0) -> tl.tensor:
    """bfloat16 to float32, two values per register: shift the lower half, mask the upper half.

    The built-in conversion extracts each half first. `zero` is a run-time 0 that the compiler cannot fold: see `values`.
    """
    if x.numel % 2 == 1:
        wide = x.to(tl.float32)
    else:
        two: tl.constexpr = "mad.lo.u32 $0, $2, 65536, $3; lop3.b32 $1, $2, 0xffff0000, $4, 0xea;"
        # Early clobber (&): the first result is written before the operand is read again.
        bits = tl.inline_asm_elementwise(two, "=&r,=r,r,r,r", [x, zero], dtype=tl.int32, is_pure=True, pack=2)
        wide = bits.to(tl.float32, bitcast=True)
    return wide


# Approximations for 16-bit results. tl.exp handles subnormal results, which takes three more instructions. An exactly rounded
# quotient takes eight instructions, one accurate to 2 ulp takes two.


@triton.jit
def fast_exp(x: tl.tensor) -> tl.tensor:
    """exp of a float32 value. Subnormal results are 0."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def fast_sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x)) of a float32 value."""
    return libdevice.fast_dividef(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def fast_tanh(x: tl.tensor) -> tl.tensor:
    """tanh of a float32 value. Near 0 it uses the series, because the difference below cancels there."""
    far = 1.0 - libdevice.fast_dividef(tl.full(x.shape, 2.0, tl.float32), 1.0 + tl.exp2(x * 2.885390081777927))
    return tl.where(tl.abs(x) < 0.04, x - x * x * x * 0.3333333333333333, far)


@triton.jit
def fast_erf(x: tl.tensor) -> tl.tensor:
    """erf of a float32 value (Abramowitz and Stegun 7.1.26), to 5.3e-7. Near 0 it uses the series."""
    size = tl.abs(x)
    t = libdevice.fast_dividef(tl.full(x.shape, 1.0, tl.float32), 1.0 + 0.3275911 * size)
    poly = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    far = 1.0 - poly * tl.exp2(size * size * -1.4426950408889634)
    return tl.where(size < 0.04, x * (1.1283791671 - 0.3761263890 * size * size), tl.where(x < 0, -far, far))


@triton.jit
def fold_sum(x: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """The sum along an axis."""
    return tl.sum(x, axis, keep_dims=True)


@triton.jit
def fold_prod(x: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """The product along an axis."""
    return tl.reduce(x, axis, _times, keep_dims=True)


@triton.jit
def fold_max(x: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """The maximum along an axis. NaN propagates."""
    return tl.reduce(x, axis, _larger, keep_dims=True)


@triton.jit
def fold_min(x: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """The minimum along an axis. NaN propagates."""
    return tl.reduce(x, axis, _smaller, keep_dims=True)
