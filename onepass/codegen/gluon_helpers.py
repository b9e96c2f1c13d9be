"""Functions that generated Gluon kernels call: what `helpers` is to Triton's, but as text that a kernel brings along.

A kernel's text defines those that it calls, so that no module of the package imports Gluon, which Triton still calls experimental.
"""

from __future__ import annotations

import re

# All threads of a CTA wait for each other. Triton 3.6 knows it by the second name.
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
    """A float32 value as float8e5. The hardware's conversion stops at the largest finite value, where torch's goes on to inf."""
    bits = x.to(gl.float8e5).to(gl.int8, bitcast=True)
    infinite = gl.where(x < 0, -4, 124).to(gl.int8)
    return gl.where(gl.abs(x) >= 61440.0, infinite, bits).to(gl.float8e5, bitcast=True)
''',
    "widen": '''
@gluon.jit
def widen(x, zero=0):
    """A bfloat16 value as float32: of two in a register, the lower half is shifted, the upper one masked."""
    if x.numel % 2 == 1:
        wide = x.to(gl.float32)
    else:
        two: gl.constexpr = "mad.lo.u32 $0, $2, 65536, $3; lop3.b32 $1, $2, 0xffff0000, $4, 0xea;"
        # & as the first result is written before the operand is read for the second.
        bits = gl.inline_asm_elementwise(two, "=&r,=r,r,r,r", [x, zero], dtype=gl.int32, is_pure=True, pack=2)
        wide = bits.to(gl.float32, bitcast=True)
    return wide
''',
    "fast_exp": '''
@gluon.jit
def fast_exp(x):
    """The exponential of a float32 value; 0 where that is no normal number."""
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
    """The hyperbolic tangent of a float32 value; near 0 by its series, for there the difference below would lose digits."""
    raised = 1.0 + gl.exp2(x * 2.885390081777927)
    far = 1.0 - libdevice.fast_dividef(2.0, raised)
    return gl.where(gl.abs(x) < 0.04, x - x * x * x * 0.3333333333333333, far)
''',
    "fast_erf": '''
@gluon.jit
def fast_erf(x):
    """The error function of a float32 value, to 1.5e-7 (Abramowitz and Stegun 7.1.26); near 0 by its series."""
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
    """Put 32 bits of state into a word of their own, with the flag beside them, so no fence is needed. Who waits reads meanwhile:
    that is defined for atomic writes only."""
    one = gl.max(gl.max(state.to(gl.int32, bitcast=True), axis=1), axis=0)  # of [1, 1]: as a tensor, each lane would be stored
    bits = one.to(gl.int64) & 0xFFFFFFFF
    gl.atomic_xchg(mailboxes_ptr + at, bits | 0x100000000, sem="relaxed", scope="gpu")
''',
    "published": '''
@gluon.jit
def published(word, dtype: gl.constexpr):
    """The state in such a word."""
    return (word & 0xFFFFFFFF).to(gl.int32).to(dtype, bitcast=True)
''',
    "sum_two": '''
@gluon.jit
def sum_two(x, y, axis: gl.constexpr):
    """The sums of two tiles along an axis, for which threads meet as often as for one."""
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
    """The greatest along an axis; NaN where there is one."""
    return gl.expand_dims(gl.reduce(x, axis, _larger), axis)
''',
    "fold_min": '''
@gluon.jit
def fold_min(x, axis: gl.constexpr):
    """The least along an axis; NaN where there is one."""
    return gl.expand_dims(gl.reduce(x, axis, _smaller), axis)
''',
}


def called_definitions(body: str) -> tuple[str, ...]:
    """The definitions that a kernel's text needs, each before those that call it."""
    found: list[str] = []
    todo = [body]
    while todo:
        text = todo.pop()
        fresh = [n for n in FUNCTIONS if n not in found and re.search(rf"\b{n}\b", text)]
        found += fresh
        todo += [FUNCTIONS[n] for n in fresh]
    return (BARRIER, *(FUNCTIONS[n].strip() for n in FUNCTIONS if n in found))
