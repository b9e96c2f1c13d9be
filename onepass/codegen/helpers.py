"""The functions that generated kernels call: conversions, fast math, and folds along one axis. The only definition of each.

The text of a kernel includes the functions it calls, so it stands alone. {L} is the language, tl or gl. A fold keeps its axis and,
unlike tl.max, propagates NaN. It takes float32, float64 or integers of at least 32 bits, never a narrow float.
"""

from __future__ import annotations

from dataclasses import dataclass

from .kernel_ir import Language


@dataclass(frozen=True, slots=True)
class Helper:
    """One function."""

    text: str
    calls: str = ""  # another helper
    modules: tuple[str, ...] = ()  # that are imported for it


# tl.exp handles subnormal results, which takes three more instructions. An exactly rounded quotient takes eight instructions, one
# accurate to 2 ulp takes two. The built-in conversion of two bfloat16 values extracts each half first.
FUNCTIONS = {
    "_larger": Helper(
        """
def _larger(a, b):
    return {L}.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
        modules=("tl",),
    ),
    "_smaller": Helper(
        """
def _smaller(a, b):
    return {L}.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
        modules=("tl",),
    ),
    "_times": Helper("""
def _times(a, b):
    return a * b
"""),
    "_plus": Helper("""
def _plus(a, b, more_a, more_b):
    return a + more_a, b + more_b
"""),
    "to_e5m2": Helper('''
def to_e5m2(x):
    """float32 to float8e5. The hardware conversion saturates at the largest finite value; torch rounds to inf."""
    bits = x.to({L}.float8e5).to({L}.int8, bitcast=True)
    infinite = {L}.where(x < 0, -4, 124).to({L}.int8)
    return {L}.where({L}.abs(x) >= 61440.0, infinite, bits).to({L}.float8e5, bitcast=True)
'''),
    "widen": Helper('''
def widen(x, zero=0):
    """bfloat16 to float32, two values per register: shift the lower half, mask the upper half.

    `zero` is a run-time 0 that the compiler cannot fold: each zero makes it widen again instead of keeping fp32 in registers.
    """
    if x.numel % 2 == 1:
        wide = x.to({L}.float32)
    else:
        two: {L}.constexpr = "mad.lo.u32 $0, $2, 65536, $3; lop3.b32 $1, $2, 0xffff0000, $4, 0xea;"
        # Early clobber (&): the first result is written before the operand is read again.
        bits = {L}.inline_asm_elementwise(two, "=&r,=r,r,r,r", [x, zero], dtype={L}.int32, is_pure=True, pack=2)
        wide = bits.to({L}.float32, bitcast=True)
    return wide
'''),
    "fast_exp": Helper('''
def fast_exp(x):
    """exp of a float32 value. Subnormal results are 0."""
    return {L}.exp2(x * 1.4426950408889634)
'''),
    "fast_sigmoid": Helper(
        '''
def fast_sigmoid(x):
    """1 / (1 + exp(-x)) of a float32 value."""
    raised = 1.0 + {L}.exp2(x * -1.4426950408889634)
    return libdevice.fast_dividef(1.0, raised)
''',
        modules=("libdevice",),
    ),
    "fast_tanh": Helper(
        '''
def fast_tanh(x):
    """tanh of a float32 value. Near 0 it uses the series, because the difference below cancels there."""
    raised = 1.0 + {L}.exp2(x * 2.885390081777927)
    far = 1.0 - libdevice.fast_dividef(2.0, raised)
    return {L}.where({L}.abs(x) < 0.04, x - x * x * x * 0.3333333333333333, far)
''',
        modules=("libdevice",),
    ),
    "fast_erf": Helper(
        '''
def fast_erf(x):
    """erf of a float32 value (Abramowitz and Stegun 7.1.26), to 5.3e-7. Near 0 it uses the series."""
    size = {L}.abs(x)
    raised = 1.0 + 0.3275911 * size
    t = libdevice.fast_dividef(1.0, raised)
    poly = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    far = 1.0 - poly * {L}.exp2(size * size * -1.4426950408889634)
    return {L}.where(size < 0.04, x * (1.1283791671 - 0.3761263890 * size * size), {L}.where(x < 0, -far, far))
''',
        modules=("libdevice",),
    ),
    "publish": Helper('''
def publish(mailboxes_ptr, at, state):
    """Write 32 bits of state and a flag as one 64-bit word, so no fence is needed. It is atomic: other CTAs poll the word."""
    one = {L}.max({L}.max(state.to({L}.int32, bitcast=True), axis=1), axis=0)  # to a scalar: a tensor is stored by each lane
    bits = one.to({L}.int64) & 0xFFFFFFFF
    {L}.atomic_xchg(mailboxes_ptr + at, bits | 0x100000000, sem="relaxed", scope="gpu")
'''),
    "published": Helper('''
def published(word, dtype: {L}.constexpr):
    """The state in a word written by `publish`."""
    return (word & 0xFFFFFFFF).to({L}.int32).to(dtype, bitcast=True)
'''),
    "sum_two": Helper(
        '''
def sum_two(x, y, axis: {L}.constexpr):
    """The sums of two tiles along an axis, in one exchange between threads."""
    return {L}.reduce((x, y), axis, _plus, keep_dims=True)
''',
        calls="_plus",
    ),
    "fold_prod": Helper(
        '''
def fold_prod(x, axis: {L}.constexpr):
    """The product along an axis."""
    return {L}.reduce(x, axis, _times, keep_dims=True)
''',
        calls="_times",
    ),
    "fold_max": Helper(
        '''
def fold_max(x, axis: {L}.constexpr):
    """The maximum along an axis. NaN propagates."""
    return {L}.reduce(x, axis, _larger, keep_dims=True)
''',
        calls="_larger",
    ),
    "fold_min": Helper(
        '''
def fold_min(x, axis: {L}.constexpr):
    """The minimum along an axis. NaN propagates."""
    return {L}.reduce(x, axis, _smaller, keep_dims=True)
''',
        calls="_smaller",
    ),
}


def with_callees(called: frozenset[str]) -> frozenset[str]:
    """Helpers with those that they call."""
    return called | {FUNCTIONS[name].calls for name in called if FUNCTIONS[name].calls}


def definitions(called: frozenset[str], language: Language) -> tuple[str, ...]:
    """The text of helpers and of those that they call, callees first."""
    needed = with_callees(called)
    return tuple(
        f"@{language.jit}{helper.text.replace('{L}', language.prefix)}".rstrip()
        for name, helper in FUNCTIONS.items()
        if name in needed
    )
