"""Algebraic rewrites of a Program.

A rule takes one node whose operands are already rewritten. It returns the position of an equal earlier value, a replacement node,
or None. `simplify` applies to every plan. `two_pass` and `online_softmax` are alternative forms of the same reductions; the planner
picks the cheaper one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from .expand import expand_two_pass, inline_single_element
from .expr import F32, OPS, DType
from .monoid import MONOIDS
from .one_hot import sum_of_one_hot
from .program import Builder, Const, Node, Op, Program, Reduce, Result, prune, with_operands
from .rewrite import Draft, Rule, sweep


def simplify(program: Program) -> Program:
    """Simplify a Program. Roundings to 16 bits remain only where a stored value or a discontinuous op needs them."""
    # Exact rules run first, because they reveal which rounded values are equal to a stored value.
    return prune(sweep(prune(sweep(prune(program), EXACT)), (*EXACT, elide_rounding, div_to_reciprocal)))


def two_pass(program: Program, over: frozenset[str] | None = None) -> Program:
    """Expand reductions that read their input twice into primitive folds (for rows kept on chip). `over`: only these axes."""

    def expand(draft: Draft, node: Node) -> int | None:
        if isinstance(node, Result) and over is not None:
            owner = draft.nodes[node.reduce]
            if isinstance(owner, Reduce) and frozenset(owner.axes) != over:
                return None
        return expand_two_pass(draft, node)

    return prune(sweep(program, (expand, fold_constants)))


def online_softmax(program: Program) -> Program:
    """m = max(x), s = sum(exp(x - m)) over the same axes -> m, s = logsumexp(x): one pass, for rows read in a loop."""
    tops = dict(_softmax_pairs(program))
    if not tops:
        return prune(program)
    builder, new = Builder(), dict[int, int]()
    for i, node in enumerate(program.nodes):
        if i in tops:
            new[i] = new[tops[i]]
            continue
        if isinstance(node, Reduce) and i in tops.values():
            node = replace(node, monoid="logsumexp")
        if isinstance(node, Result) and node.reduce in tops:
            node = replace(node, k=1)
        new[i] = builder.add(with_operands(node, new))
    return prune(replace(program, nodes=tuple(builder.nodes)))


def _softmax_pairs(program: Program) -> Iterator[tuple[int, int]]:
    """(sum, max) for every sum of exp(x - max(x)) over the axes of that max."""
    nodes = program.nodes
    for i in program.of(Reduce):
        total = nodes[i]
        assert isinstance(total, Reduce)
        match MONOIDS[total.monoid].fold, nodes[total.args[0]]:
            case "sum", Op(name="exp", args=(shifted,)):
                match nodes[shifted]:
                    case Op(name="sub", args=(x, m)) if (top := _maximum_of(program, x, m, total.axes)) is not None:
                        yield i, top


def _maximum_of(program: Program, x: int, m: int, axes: tuple[str, ...]) -> int | None:
    """The Reduce that `m` is the result of, if it is the maximum of `x` over `axes`."""
    match program.nodes[m]:
        case Result(reduce=top):
            match program.nodes[top]:
                case Reduce(monoid=name, args=(arg,), axes=over) if arg == x and set(over) == set(axes):
                    return top if MONOIDS[name].fold == "max" else None
    return None


def drop_cast(draft: Draft, node: Node) -> int | None:
    """cast T (x: T) -> x"""
    match node:
        case Op(name="cast", args=(x,), dtype=dtype) if draft.dtype(x) == dtype:
            return x
    return None


def drop_widening(draft: Draft, node: Node) -> int | None:
    """cast bf16 (cast f32 (x: bf16)) -> x"""
    match node:
        case Op(name="cast", args=(wide,), dtype=dtype) if inner := draft.op(wide, "cast"):
            x = inner.args[0]
            if draft.dtype(x) == dtype and dtype.is_float and _holds(inner.dtype, dtype):
                return x
    return None


def _holds(wide: DType, narrow: DType) -> bool:
    """Whether `wide` represents every value of `narrow` exactly."""
    return wide.is_float and wide.size >= 4 and wide.size > narrow.size


def elide_rounding(draft: Draft, node: Node) -> Node | None:
    """cast f32 (cast bf16 (x: f32)) -> cast f32 x, unless the bf16 value is stored or feeds a discontinuous op.

    A cast to fp8 is deliberate and stays.
    """
    match node:
        case Op(name="cast", args=(rounded,), dtype=dtype) if inner := draft.op(rounded, "cast"):
            between_wide = all(d.is_float and d.size >= 4 for d in (dtype, draft.dtype(inner.args[0])))
            seen = rounded in draft.stored or draft.feeds_discontinuity[draft.source]
            if between_wide and inner.dtype.is_narrow_float and inner.dtype.size == 2 and not seen:
                return replace(node, args=inner.args)
    return None


def drop_one(draft: Draft, node: Node) -> int | None:
    """x * 1 -> x;  1 * x -> x;  x / 1 -> x"""
    match node:
        case Op(name="mul" | "div", args=(x, one)) if draft.number(one) == 1:
            return x
        case Op(name="mul", args=(one, x)) if draft.number(one) == 1:
            return x
    return None


def drop_zero(draft: Draft, node: Node) -> int | None:
    """x - 0 -> x;  x + -0.0 -> x;  for integers x + 0 -> x   (for floats, x + 0.0 turns -0.0 into 0.0)"""
    match node:
        case Op(name="sub", args=(x, zero)) if _is_zero(draft.number(zero), sign=1):
            return x
        case Op(name="add", args=(x, zero)) | Op(name="add", args=(zero, x)) if _drops_from_sum(draft, zero):
            return x
    return None


def _drops_from_sum(draft: Draft, at: int) -> bool:
    return _is_zero(draft.number(at), sign=-1 if draft.dtype(at).is_float else 1)


def _is_zero(number: float | int | bool | None, sign: int) -> bool:
    return number is not None and number == 0 and math.copysign(1, number) == sign


def drop_negations(draft: Draft, node: Node) -> int | None:
    """-(-x) -> x"""
    match node:
        case Op(name="neg", args=(negated,)) if inner := draft.op(negated, "neg"):
            return inner.args[0]
    return None


def difference_from_itself(draft: Draft, node: Node) -> Node | None:
    """x - x -> x * 0 + 0, for floats: zero, or NaN if x is infinite or NaN"""
    match node:  # if x is a product, a fused multiply-add would leave its rounding error instead of zero
        case Op(name="sub", args=(x, same), dtype=dtype) if x == same and dtype.is_float and dtype.size >= 4:
            zero = draft.add(Const(0.0, dtype, src=node.src))
            return replace(node, name="add", args=(draft.add(replace(node, name="mul", args=(x, zero))), zero))
    return None


def drop_choice(draft: Draft, node: Node) -> int | None:
    """where(c, a, a) -> a;  where(True, a, b) -> a;  where(False, a, b) -> b"""
    match node:
        case Op(name="where", args=(_, a, b)) if a == b:
            return a
        case Op(name="where", args=(c, a, b)) if (known := draft.number(c)) is not None:
            return a if known else b
    return None


def div_to_reciprocal(draft: Draft, node: Node) -> int | None:
    """x / c -> x * (1 / c);  e / s -> e * (1 / s) for a softmax's sum of exponentials s >= 1

    The reciprocal adds a rounding. Values that need full precision allow only powers of two, whose reciprocal is exact.
    """
    match node:
        case Op(name="div", args=(x, by), dtype=dtype, src=src) if dtype is F32:
            c = draft.number(by)
            if not draft.may_be_approximate[draft.source] and not (c and math.frexp(c)[0] in (0.5, -0.5)):
                return None
            if c and 2.0**-100 <= abs(c) <= 2.0**100:
                inverse = Const(_computed("reciprocal", (Const(c, F32),), F32), F32, src=src)
                return draft.add(Op("mul", (x, draft.add(inverse)), F32, src))
            if _is_softmax_sum(draft, by):
                return draft.add(Op("mul", (x, draft.add(Op("reciprocal", (by,), F32, src))), F32, src))
    return None


def _is_softmax_sum(draft: Draft, at: int) -> bool:
    match draft.nodes[at]:
        case Result(reduce=owner, k=k):
            match draft.nodes[owner]:
                case Reduce(monoid=name) if MONOIDS[name].mufu:
                    return k == 1  # of (maximum, sum of exponentials)
                case Reduce(monoid=name, args=(arg,)) if MONOIDS[name].fold == "sum" and (e := draft.op(arg, "exp")):
                    shifted = draft.op(e.args[0], "sub")
                    return shifted is not None and isinstance(draft.nodes[shifted.args[1]], Result)
    return False


def fold_constants(draft: Draft, node: Node) -> Node | None:
    """op(constants) -> its value, rounded to the result type"""
    match node:
        case Op(name=name, args=args, dtype=dtype) if not dtype.is_narrow_float:
            consts = tuple(c for c in (draft.nodes[a] for a in args) if isinstance(c, Const) and c.scale == 1)
            undefined = OPS[name].divides and consts and consts[-1].value == 0
            if len(consts) == len(args) and not undefined:
                return Const(_computed(name, consts, dtype), dtype, src=node.src)
    return None


@lru_cache(maxsize=4096)
def _computed(name: str, consts: tuple[Const, ...], dtype: DType) -> float | int | bool:
    """Evaluate an op on constants in float64 (integers in their own type), and round once."""
    args = [torch.tensor(c.value, dtype=c.dtype.torch) for c in consts]
    args = [a.double() if a.is_floating_point() else a for a in args]
    number = OPS[name].reference(*args).to(dtype.torch).item()
    return math.nan if number != number else number


# fmt: off
EXACT: tuple[Rule, ...] = (
    drop_cast, drop_widening, drop_one, drop_zero, difference_from_itself, drop_negations, drop_choice, fold_constants,
    sum_of_one_hot, inline_single_element,
)
# fmt: on
