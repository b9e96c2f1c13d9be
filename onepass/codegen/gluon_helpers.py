"""Text of the functions that generated Gluon kernels call, the counterpart of `helpers` for Triton.

Each kernel's text includes the functions it calls, so no module of the package imports Gluon, which is experimental in Triton.
"""

from __future__ import annotations

# Synchronizes all threads of a CTA. Triton 3.6 has only `thread_barrier`.
BARRIER = 'cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier'

FUNCTIONS = {
    "_larger": '''
@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "_smaller": '''
@gluon.jit
def _smaller(a, b):
    return gl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "_times": '''
@gluon.jit
def _times(a, b):
    return a * b
''',
    "_plus": '''
@gluon.jit
def _plus(a, b, more_a, more_b):
    return a + more_a, b + more_b
''',
    "to_e5m2": '''
@gluon.jit
def to_e5m2(x):
    """float32 to float8e5. The hardware conversion saturates at the largest finite value; torch rounds to inf."""
    bits = x.to(gl.float8e5).to(gl.int8, bitcast=True)
    infinite = gl.where(x < 0, -4, 124).to(gl.int8)
    return gl.where(gl.abs(x) >= 61440.0, infinite, bits).to(gl.float8e5, bitcast=True)
''',
    "widen": '''
@gluon.jit
def widen(x, zero=0):
    """bfloat16 to float32, two values per register: shift the lower half, mask the upper half."""
    if x.numel % 2 == 1:
        wide = x.to(gl.float32)
    else:
        two: gl.constexpr = "mad.lo.u32 $0, $2, 65536, $3; lop3.b32 $1, $2, 0xffff0000, $4, 0xea;"
        # Early clobber (&): the first result is written before the operand is read again.
        bits = gl.inline_asm_elementwise(two, "=&r,=r,r,r,r", [x, zero], dtype=gl.int32, is_pure=True, pack=2)
        wide = bits.to(gl.float32, bitcast=True)
    return wide
''',
    "fast_exp": '''
@gluon.jit
def fast_exp(x):
    """exp of a float32 value. Subnormal results are 0."""
    return gl.exp2(x * 1.4426950408889634)
''',
    "fast_sigmoid": '''
@gluon.jit
def fast_sigmoid(x):
    """1 / (1 + exp(-x)) of a float32 value."""
    raised = 1.0 + gl.exp2(x * -1.4426950408889634)
    return libdevice.fast_dividef(1.0, raised)
''',
    "fast_tanh": '''
@gluon.jit
def fast_tanh(x):
    """tanh of a float32 value. Near 0 it uses the series, because the difference below cancels there."""
    raised = 1.0 + gl.exp2(x * 2.885390081777927)
    far = 1.0 - libdevice.fast_dividef(2.0, raised)
    return gl.where(gl.abs(x) < 0.04, x - x * x * x * 0.3333333333333333, far)
''',
    "fast_erf": '''
@gluon.jit
def fast_erf(x):
    """erf of a float32 value, to 1.5e-7 (Abramowitz and Stegun 7.1.26). Near 0 it uses the series."""
    size = gl.abs(x)
    raised = 1.0 + 0.3275911 * size
    t = libdevice.fast_dividef(1.0, raised)
    poly = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    far = 1.0 - poly * gl.exp2(size * size * -1.4426950408889634)
    return gl.where(size < 0.04, x * (1.1283791671 - 0.3761263890 * size * size), gl.where(x < 0, -far, far))
''',
    "publish": '''
@gluon.jit
def publish(mailboxes_ptr, at, state):
    """Write 32 bits of state and a flag as one 64-bit word, so no fence is needed. The write is atomic because other CTAs poll
    the word meanwhile."""
    one = gl.max(gl.max(state.to(gl.int32, bitcast=True), axis=1), axis=0)  # [1, 1] to scalar: a tensor is stored by each lane
    bits = one.to(gl.int64) & 0xFFFFFFFF
    gl.atomic_xchg(mailboxes_ptr + at, bits | 0x100000000, sem="relaxed", scope="gpu")
''',
    "published": '''
@gluon.jit
def published(word, dtype: gl.constexpr):
    """The state in a word written by `publish`."""
    return (word & 0xFFFFFFFF).to(gl.int32).to(dtype, bitcast=True)
''',
    "sum_two": '''
@gluon.jit
def sum_two(x, y, axis: gl.constexpr):
    """The sums of two tiles along an axis, in one exchange between threads."""
    return gl.reduce((x, y), axis, _plus, keep_dims=True)
''',
    "fold_prod": '''
@gluon.jit
def fold_prod(x, axis: gl.constexpr):
    """The product along an axis."""
    return gl.expand_dims(gl.reduce(x, axis, _times), axis)
''',
    "fold_max": '''
@gluon.jit
def fold_max(x, axis: gl.constexpr):
    """The maximum along an axis. NaN propagates."""
    return gl.expand_dims(gl.reduce(x, axis, _larger), axis)
''',
    "fold_min": '''
@gluon.jit
def fold_min(x, axis: gl.constexpr):
    """The minimum along an axis. NaN propagates."""
    return gl.expand_dims(gl.reduce(x, axis, _smaller), axis)
''',
}


CALLS = {"fold_prod": "_times", "fold_max": "_larger", "fold_min": "_smaller", "sum_two": "_plus"}  # between helpers


def definitions(called: frozenset[str]) -> tuple[str, ...]:
    """The definitions of helper functions, and of those that they call, callees first."""
    needed = called | {CALLS[name] for name in called if name in CALLS}
    return (BARRIER, *(FUNCTIONS[n].strip() for n in FUNCTIONS if n in needed))
