"""What generated kernels import: folds of a tile along one axis that keep the axis and, unlike tl.max, propagate NaN.

A fold takes float32, float64 or an integer of at least 32 bits, never a narrow float. Only generated text and the runtime
import this module, because it imports triton.
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
    """A float32 value as float8e5. The hardware's conversion stops at the largest finite value, where torch's goes on to inf."""
    bits = x.to(tl.float8e5).to(tl.int8, bitcast=True)
    infinite = tl.where(x < 0, -4, 124).to(tl.int8)
    return tl.where(tl.abs(x) >= 61440.0, infinite, bits).to(tl.float8e5, bitcast=True)


@triton.jit
def widen(x: tl.tensor, zero: tl.tensor = 0) -> tl.tensor:
    """A bfloat16 value as float32: of two in a register, the lower half is shifted, the upper one masked.

    A conversion takes out each half before it is shifted. `zero` is 0, which the compiler may not know: see `values`.
    """
    if x.numel % 2 == 1:
        wide = x.to(tl.float32)
    else:
        two: tl.constexpr = "mad.lo.u32 $0, $2, 65536, $3; lop3.b32 $1, $2, 0xffff0000, $4, 0xea;"
        # & as the first result is written before the operand is read for the second.
        bits = tl.inline_asm_elementwise(two, "=&r,=r,r,r,r", [x, zero], dtype=tl.int32, is_pure=True, pack=2)
        wide = bits.to(tl.float32, bitcast=True)
    return wide


# For results of 16 bits. tl.exp asks for results below the least normal number, at three more instructions each; a
# quotient right to the last bit takes eight instructions, one right to two units takes two.


@triton.jit
def fast_exp(x: tl.tensor) -> tl.tensor:
    """The exponential of a float32 value; 0 where that is no normal number."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def fast_sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x)) of a float32 value."""
    return libdevice.fast_dividef(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def fast_tanh(x: tl.tensor) -> tl.tensor:
    """The hyperbolic tangent of a float32 value; near 0 by its series, for there the difference below would lose digits."""
    far = 1.0 - libdevice.fast_dividef(tl.full(x.shape, 2.0, tl.float32), 1.0 + tl.exp2(x * 2.885390081777927))
    return tl.where(tl.abs(x) < 0.04, x - x * x * x * 0.3333333333333333, far)


@triton.jit
def fast_erf(x: tl.tensor) -> tl.tensor:
    """The error function of a float32 value (Abramowitz and Stegun 7.1.26): 5.3e-7 off at most; near 0 by its series."""
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
    """The greatest along an axis; NaN where there is one."""
    return tl.reduce(x, axis, _larger, keep_dims=True)


@triton.jit
def fold_min(x: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """The least along an axis; NaN where there is one."""
    return tl.reduce(x, axis, _smaller, keep_dims=True)
