"""A rewrite for losses: the sum of a one-hot row needs no loop."""

from __future__ import annotations

import math

from .expr import BOOL, DType
from .monoid import MONOIDS
from .program import Const, Index, Node, Op, Reduce, Result
from .rewrite import Draft
from .size import Size


def sum_of_one_hot(draft: Draft, node: Node) -> int | None:
    """sum over n of where(index(n) == t, a, 0) * r + c -> where(0 <= t < N, a, 0) * r + 0 * r + N * c: only the index varies over n

    All other positions contribute 0 * r, which is NaN if r is infinite or NaN. The rule needs N >= 2, so that they exist.
    """
    match node:
        case Result(reduce=owner):
            match draft.nodes[owner]:
                case Reduce(monoid=name, args=(summed,), axes=axes) if MONOIDS[name].fold == "sum":
                    total = _hit_total(draft, summed, axes, node.src)
                    return _hit_and_constant(draft, summed, axes, node.src) if total is None else total
    return None


def _hit_and_constant(draft: Draft, summed: int, axes: tuple[str, ...], src: str) -> int | None:
    """The sum of a one-hot term and an invariant. Other sums are not split: their terms might cancel."""
    added = draft.op(summed, "add")
    for hit, constant in (added.args, added.args[::-1]) if added else ():
        if not draft.varies(constant, axes):
            total = _hit_total(draft, hit, axes, src)
            if total is not None:
                dtype = draft.dtype(summed)
                count = draft.add(times_extent(1.0 if dtype.is_float else 1, draft.program.extent(axes), dtype, src))
                every = draft.add(Op("mul", (constant, count), dtype, src))
                return draft.add(Op("add", (total, every), dtype, src))
    return None


def _hit_total(draft: Draft, picked: int, axes: tuple[str, ...], src: str) -> int | None:
    """The sum of a one-hot term where(index == t, a, 0), or of its product with an invariant."""
    if not draft.varies(picked, axes):  # it holds no index; so at most one factor of a product is searched
        return None
    if where := draft.op(picked, "where"):
        hit, a, zero = where.args
        t = _compared_to_index(draft, hit, axes)
        if t is not None and draft.number(zero) == 0 and not draft.varies(a, axes):
            inside = _in_range(draft, t, draft.program.extent(axes), src)
            return draft.add(Op("where", (inside, a, zero), where.dtype, src))
    scaled = draft.op(picked, "mul")
    for hit, scale in (scaled.args, scaled.args[::-1]) if scaled else ():
        if not draft.varies(scale, axes):
            total = _hit_total(draft, hit, axes, src) if _at_least_two(draft.program.extent(axes)) else None
            if total is not None:
                return _scaled_total(draft, total, scale, src)
    return None


def _at_least_two(extent: Size) -> bool:
    return not isinstance(extent, int) or extent > 1  # symbolic sizes are at least 2


def _scaled_total(draft: Draft, total: int, scale: int, src: str) -> int:
    """total * scale, plus 0 * scale for the positions that do not match"""
    dtype, number = draft.dtype(scale), draft.number(scale)
    scaled = draft.add(Op("mul", (total, scale), dtype, src))
    if not dtype.is_float or number is not None and math.isfinite(number):
        return scaled
    missed = draft.add(Op("mul", (scale, draft.add(Const(0.0, dtype, src=src))), dtype, src))
    return draft.add(Op("add", (scaled, missed), dtype, src))


def _compared_to_index(draft: Draft, hit: int, axes: tuple[str, ...]) -> int | None:
    """The t of `index(axes) == t`, if t does not vary over these axes."""
    compared = draft.op(hit, "eq")
    for at, t in (compared.args, compared.args[::-1]) if compared else ():
        match draft.nodes[at]:
            case Index(axes=own, dtype=dtype) if set(own) == set(axes) and dtype.kind == "int" and not draft.varies(t, axes):
                return t
    return None


def _in_range(draft: Draft, t: int, extent: Size, src: str) -> int:
    """0 <= t < extent"""
    dtype = draft.dtype(t)
    low = draft.add(Const(0, dtype, src=src))
    high = draft.add(times_extent(1, extent, dtype, src))
    above = draft.add(Op("ge", (t, low), BOOL, src))
    below = draft.add(Op("lt", (t, high), BOOL, src))
    return draft.add(Op("and", (above, below), BOOL, src))


def times_extent(number: float | int, extent: Size, dtype: DType, src: str) -> Const:
    """number * extent as one constant"""
    return Const(number * extent, dtype, src=src) if isinstance(extent, int) else Const(number, dtype, extent, src)
