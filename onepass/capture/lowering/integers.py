"""Integer operations without a kernel instruction: powers, and shifts by any count."""

from __future__ import annotations

from ...ir.expr import min_value
from .draft import Draft


def power_of_integers(d: Draft, a: int, b: int) -> int:
    """a ** b by repeated squaring. Negative powers are 0, except those of 1 and -1, as in torch."""
    dtype = d.dtype(a)
    zero, one = d.const(0, dtype), d.const(1, dtype)
    result, square, signed = one, a, min_value(dtype) < 0
    for k in range(8 * dtype.size - signed):
        is_set = d.op("ne", d.op("and", d.op("shr", b, d.const(k, dtype)), one), zero)
        result = d.op("where", is_set, d.op("mul", result, square), result)
        square = d.op("mul", square, square)
    if not signed:
        return result
    sign = d.op("where", d.op("ne", d.op("and", b, one), zero), a, one)  # 1 or -1 to this power, and to its inverse
    is_unit = d.op("or", d.op("eq", a, one), d.op("eq", a, d.const(-1, dtype)))
    return d.op("where", d.op("lt", b, zero), d.op("where", is_unit, sign, zero), result)


def shift(name: str, d: Draft, a: int, count: int) -> int:
    """A shift. Counts out of range, which are undefined in a kernel, shift out all bits, as in torch."""
    dtype, bits = d.dtype(a), 8 * d.dtype(a).size
    zero = d.const(0, dtype)
    beyond = d.op("or", d.op("lt", count, zero), d.op("ge", count, d.const(bits, dtype)))
    if name == "shr" and min_value(dtype) < 0:
        return d.op(name, a, d.op("where", beyond, d.const(bits - 1, dtype), count))  # 0 or -1: only the sign remains
    return d.op("where", beyond, zero, d.op(name, a, d.op("where", beyond, zero, count)))
