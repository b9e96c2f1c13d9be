"""Algebraic rewrites of a Program.

A rule takes one node whose operands are already rewritten. It returns the position of an equal earlier value, a replacement node,
or None. `simplify` applies to every plan. `two_pass` and `online_softmax` are alternative forms of the same reductions; the planner
picks the cheaper one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeAlias

import torch

from ..errors import SimplifyTooLong
from .budget import Budget
from .expr import BOOL, F32, I32, OPS, DType, result_dtype
from .monoid import MONOIDS, Algebra, Stage, State, Value
from .precision import feeds_discontinuity, may_be_approximate
from .program import Builder, Const, Index, Load, Node, Op, Program, Reduce, Result, Store, operands, prune, with_operands
from .size import Size

REWRITE_BUDGET = Budget("Rewriting a Program by rules", SimplifyTooLong, base=256, per_item=16)  # items: nodes


def simplify(program: Program) -> Program:
    """Simplify a Program. Roundings to 16 bits remain only where a stored value or a discontinuous op needs them."""
    # Exact rules run first, because they reveal which rounded values are equal to a stored value.
    return prune(_sweep(prune(_sweep(prune(program), EXACT)), (*EXACT, elide_rounding, div_to_reciprocal)))


def two_pass(program: Program, over: frozenset[str] | None = None) -> Program:
    """Expand reductions that read their input twice into primitive folds (for rows kept on chip). `over`: only these axes."""

    def expand(draft: Draft, node: Node) -> int | None:
        if isinstance(node, Result) and over is not None:
            owner = draft.nodes[node.reduce]
            if isinstance(owner, Reduce) and frozenset(owner.axes) != over:
                return None
        return expand_two_pass(draft, node)

    return prune(_sweep(program, (expand, fold_constants)))


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


class Draft:
    """A Program being rewritten: the nodes rewritten so far."""

    def __init__(self, program: Program, rules: "tuple[Rule, ...]") -> None:
        self.program, self.rules = program, rules
        self.source = 0  # position of the node being rewritten in the original Program
        self.stored: set[int] = set()  # values that are stored to memory
        self._builder = Builder()
        self._dims: list[frozenset[str]] = []
        self._steps = REWRITE_BUDGET.steps(len(program.nodes))

    @property
    def nodes(self) -> list[Node]:
        return self._builder.nodes

    @cached_property
    def feeds_discontinuity(self) -> tuple[bool, ...]:
        """For each value of the original Program, whether it reaches a discontinuous op elementwise."""
        return feeds_discontinuity(self.program)

    @cached_property
    def may_be_approximate(self) -> tuple[bool, ...]:
        """For each value of the original Program, whether it may be approximate."""
        return may_be_approximate(self.program)

    def add(self, node: Node) -> int:
        """The position of `node` after applying the rules to it."""
        better = self._apply_rules(node)
        while better is not None:
            if isinstance(better, int):
                return better
            self._steps.spend()
            node, better = better, self._apply_rules(better)
        at = self._builder.add(node)
        if at == len(self._dims):
            self._dims.append(self._varies(node))
        return at

    def _apply_rules(self, node: Node) -> Node | int | None:
        """The result of the first rule that applies to a node."""
        return next((better for rule in self.rules if (better := rule(self, node)) is not None), None)

    def _varies(self, node: Node) -> frozenset[str]:
        own = frozenset[str]().union(*(self._dims[o] for o in operands(node)))
        match node:
            case Load(strides=strides):
                return own | {axis for axis, _ in strides}
            case Index(axes=axes):
                return own | set(axes)
            case Reduce(axes=axes):
                return own - set(axes)
            case _:
                return own

    def varies(self, at: int, axes: tuple[str, ...]) -> bool:
        """Whether a value varies over any of `axes`."""
        return not self._dims[at].isdisjoint(axes)

    def dtype(self, at: int) -> DType:
        """The type of a value."""
        match self.nodes[at]:
            case Load(buffer=name):
                return self.program.buffer[name].dtype
            case Const(dtype=dtype) | Index(dtype=dtype) | Op(dtype=dtype):
                return dtype
            case Reduce(args=args):
                return self.dtype(args[0])
            case Result(reduce=owner, k=k):
                node = self.nodes[owner]
                assert isinstance(node, Reduce)
                return MONOIDS[node.monoid].result_dtypes(self.dtype(owner))[k]
            case Store(value=stored):
                return self.dtype(stored)

    def op(self, at: int, *names: str) -> Op | None:
        """The op at a position, if it has one of these names."""
        node = self.nodes[at]
        return node if isinstance(node, Op) and node.name in names else None

    def number(self, at: int) -> float | int | bool | None:
        """The literal at a position, if it is one."""
        match self.nodes[at]:
            case Const(value=number, scale=1):
                return number
        return None


Rule: TypeAlias = Callable[[Draft, Node], "Node | int | None"]


def _sweep(program: Program, rules: tuple[Rule, ...]) -> Program:
    """Apply the rules to all nodes in order. Nodes that a rule adds are rewritten too."""
    draft, new = Draft(program, rules), dict[int, int]()
    stored = {node.value for node in program.nodes if isinstance(node, Store)}
    for i, node in enumerate(program.nodes):
        draft.source = i
        new[i] = draft.add(with_operands(node, new))
        if i in stored:
            draft.stored.add(new[i])
    return replace(program, nodes=tuple(draft.nodes))


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
                count = draft.add(_times(1.0 if dtype.is_float else 1, draft.program.extent(axes), dtype, src))
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
    high = draft.add(_times(1, extent, dtype, src))
    above = draft.add(Op("ge", (t, low), BOOL, src))
    below = draft.add(Op("lt", (t, high), BOOL, src))
    return draft.add(Op("and", (above, below), BOOL, src))


def _times(number: float | int, extent: Size, dtype: DType, src: str) -> Const:
    """number * extent as one constant"""
    return Const(number * extent, dtype, src=src) if isinstance(extent, int) else Const(number, dtype, extent, src)


def inline_single_element(draft: Draft, node: Node) -> int | None:
    """a reduction over no axes -> its monoid expanded on a single element"""
    match node:
        case Result(reduce=owner, k=k):
            match draft.nodes[owner]:
                case Reduce(axes=()) as reduce:
                    return _expand(draft, reduce)[k]
    return None


def expand_two_pass(draft: Draft, node: Node) -> int | None:
    """a reduction that reads its input twice -> its monoid expanded into primitive folds"""
    match node:
        case Result(reduce=owner, k=k):
            match draft.nodes[owner]:
                case Reduce(monoid=name) as reduce if MONOIDS[name].passes > 1 and MONOIDS[name].stage is Stage.WHOLE:
                    return _expand(draft, reduce)[k]
    return None


EXACT: tuple[Rule, ...] = (
    drop_cast, drop_widening, drop_one, drop_zero, drop_negations, drop_choice, fold_constants, sum_of_one_hot,
    inline_single_element,
)


def _expand(draft: Draft, reduce: Reduce) -> tuple[int, ...]:
    """Expand a reduction's monoid into nodes; returns its results."""
    monoid = MONOIDS[reduce.monoid]
    algebra = _NodeAlgebra(draft, reduce.axes, draft.dtype(reduce.args[0]), reduce.src)
    state: State = monoid.lift(algebra, *(_Ref(a) for a in reduce.args))
    results = monoid.finalize(algebra, *monoid.merge(algebra, *state))
    return tuple(algebra.place(r, algebra.dtype) for r in results)


@dataclass(frozen=True, slots=True)
class _Ref:
    """A value of the draft. The class distinguishes it from a Python number."""

    at: int


@dataclass(frozen=True)
class _NodeAlgebra(Algebra):
    """Expands a monoid into nodes of a draft."""

    draft: Draft
    axes: tuple[str, ...]
    dtype: DType  # of the reduction's first argument
    src: str

    def emit(self, op: str, *args: Value) -> _Ref:
        typed = [a for a in (args[1:] if op == "where" else args) if isinstance(a, _Ref)]
        numbers = I32 if any(isinstance(a, int) for a in args) else self.dtype
        dtype = self.draft.dtype(typed[-1].at) if typed else numbers
        positions = tuple(self.place(a, dtype) for a in args)
        gives = result_dtype(OPS[op], tuple(self.draft.dtype(p) for p in positions))
        return _Ref(self.draft.add(Op(op, positions, gives, self.src)))

    def fold(self, kind: str, value: Value) -> Value:
        if not self.axes:
            return value
        if kind == "sum" and not isinstance(value, _Ref):
            return _Ref(self.draft.add(_times(value, self.draft.program.extent(self.axes), self.dtype, self.src)))
        folded = self.draft.add(Reduce(kind, (self.place(value, self.dtype),), self.axes, self.src))
        return _Ref(self.draft.add(Result(folded, 0, self.src)))

    def place(self, value: Value, dtype: DType) -> int:
        """The position of a value. A Python number becomes a constant."""
        if isinstance(value, _Ref):
            return value.at
        typed = {"bool": bool, "int": int, "float": float}[dtype.kind](value)
        return self.draft.add(Const(typed, dtype, src=self.src))
