"""Reductions: aten's names for them, over Monoid records."""

from __future__ import annotations

import math
from typing import Any

from ..ir.expr import BOOL, I32, I64, DType, compute_dtype
from ..ir.program import Op, Reduce, operands
from ..ir.size import Size, Sym
from .axes import Dim, Dims
from .call import Call, Handler, positive, rows, shaping
from .draft import Draft, Tensor
from .substitute import Affine, Inexpressible, substitute

HANDFUL = 8  # elements that a reduction folds at least; fewer are arithmetic
# What is written again for each of them at most, in all: beyond, they are reduced, or sums of sums would grow without end.
MOST_NODES, MOST_REDUCTIONS = 512, 32
_ONE_BY_ONE = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def _dims_of(call: Call, dims: Any) -> tuple[int, ...]:
    """The reduced dims, counted from the front. None means all of them; what [] means, the result's shape tells."""
    rank = len(call.args[0].dims)
    if dims is None or dims == []:
        return () if dims == [] and _keeps_shape(call) else tuple(range(rank))
    given = dims if isinstance(dims, (list, tuple)) else (dims,)
    return tuple(positive(d, rank) for d in given) if rank else ()


def _keeps_shape(call: Call) -> bool:
    """Whether torch reduces nothing: an empty list of dims is all of them to sum, and none of them to any and all."""
    first = call.gives[0] if isinstance(call.gives, (tuple, list)) else call.gives
    return call.shape_of(first) == tuple(call.draft.atoms.size(dim) for dim in call.args[0].dims)


class _Folding:
    """One reduction in the making: which atoms fold, and which dims are left."""

    def __init__(self, call: Call, dims: Any, keepdim: bool) -> None:
        self.call, self.draft, self.source = call, call.draft, call.args[0]
        self.folded = folded = sorted(set(_dims_of(call, dims)))
        own = self.draft.dims(self.source)
        self.over: Dim = tuple(a for d in folded for a in own[d])
        left: dict[int, Dims] = dict.fromkeys(folded, ((),) if keepdim else ())
        self.dims: Dims = tuple(k for d, dim in enumerate(own) for k in left.get(d, (dim,)))

    @property
    def count(self) -> Size:
        """How many elements fold into one."""
        return self.draft.atoms.size(self.over)

    def value(self, dtype: DType) -> int:
        """The argument in the type the fold runs in."""
        return self.draft.cast(self.source.node, dtype)

    def fold(self, monoid: str, *args: int) -> tuple[int, ...]:
        """Fold values; a handful of rows is combined one by one, which leaves columns alone and needs no reduction."""
        if monoid in _ONE_BY_ONE and self.is_handful and self._is_short(args[0]):
            try:
                return (self._one_by_one(_ONE_BY_ONE[monoid], args[0]),)
            except Inexpressible:  # what is folded was itself reduced, or looked up, along these rows
                pass
        return self.draft.reduce(monoid, args, self.over)

    @property
    def is_handful(self) -> bool:
        """Whether few elements fold, and not neighbours in memory: those are read together anyway."""
        stride = self.call.takes.stride(self.folded[0]) if len(self.folded) == 1 else 1
        return isinstance(self.count, int) and 1 < self.count < HANDFUL and not (isinstance(stride, int) and stride == 1)

    def _is_short(self, value: int) -> bool:
        """Whether little is written again if each element is computed apart: what differs between the elements."""
        assert isinstance(self.count, int)
        draft, over = self.draft, set(self.over)
        found, waiting = {value}, [value]
        while waiting:
            fresh = [o for o in operands(draft.nodes[waiting.pop()]) if o not in found and not over.isdisjoint(draft.free(o))]
            found.update(fresh)
            waiting += fresh
        reductions = sum(isinstance(draft.nodes[at], Reduce) for at in found)
        return self.count * len(found) <= MOST_NODES and self.count * reductions <= MOST_REDUCTIONS

    def _one_by_one(self, op: str, value: int) -> int:
        assert isinstance(self.count, int)
        first, *others = (substitute(self.draft, value, {self.over: Affine((), k)}) for k in range(self.count))
        for other in others:
            first = self.draft.op(op, first, other)
        return first

    def tensor(self, node: int, dtype: DType) -> Tensor:
        return self.draft.tensor(self.draft.cast(node, dtype), self.dims)


def _folding(call: Call) -> _Folding:
    return _Folding(call, call.arg("dim", None), bool(call.arg("keepdim", False)))


def _total(monoid: str, of_truths: str) -> Handler:
    """A sum or a product. Asked for as a bool, it is of truths: of which any, or all, are true."""

    def handle(call: Call) -> Tensor:
        f = _folding(call)
        if call.dtype is BOOL:
            return _truth_of(f, of_truths)
        value = f.value(compute_dtype(call.dtype))
        return f.tensor(f.fold(monoid, value)[0] if f.over else value, call.dtype)

    return handle


def _mean(call: Call) -> Tensor:
    f, dtype = _folding(call), compute_dtype(call.dtype)
    value = f.value(dtype)
    total = f.fold("sum", value)[0] if f.over else value
    return f.tensor(_divided(call.draft, total, f.count), call.dtype)


def _divided(draft: Draft, total: int, count: Size) -> int:
    """total / count; the mean of nothing is 0 / 0 = NaN, as in torch."""
    return total if count == 1 else draft.op("div", total, draft.const(1.0, draft.dtype(total), count))


def _extreme(monoid: str) -> Handler:
    """amax, amin and the max and min over everything."""
    return lambda call: _extreme_of(call, _folding(call), monoid, call.dtype)


def _extreme_of(call: Call, f: _Folding, monoid: str, dtype: DType) -> Tensor:
    if dtype is BOOL:
        return _truth_of(f, "any" if monoid == "max" else "all")
    value = f.value(compute_dtype(dtype))
    return f.tensor(f.fold(monoid, value)[0] if f.over else value, dtype)


def _extreme_with_position(monoid: str) -> Handler:
    """max and min over a dim, which also say where."""

    def handle(call: Call) -> tuple[Tensor, Tensor]:
        values = _extreme_of(call, _folding(call), monoid, call.dtype_of(call.gives[0]))
        return values, _position_of(_folding(call), f"arg{monoid}")

    return handle


def _position(monoid: str) -> Handler:
    return lambda call: _position_of(_folding(call), monoid)


def _position_of(f: _Folding, monoid: str) -> Tensor:
    """argmax and argmin; over all dims the position counts row-major over them."""
    own = f.draft.dtype(f.source.node)
    value = f.value(I32 if own is BOOL else compute_dtype(own))
    at = f.fold(monoid, value, f.draft.index(f.over))[0] if f.over else f.draft.const(0, I64)
    return f.tensor(at, I64)


def _truth(monoid: str) -> Handler:
    def handle(call: Call) -> Tensor:
        truth = _truth_of(_folding(call), monoid)
        return Tensor(call.draft.cast(truth.node, call.dtype), truth.dims)

    return handle


def _truth_of(f: _Folding, monoid: str) -> Tensor:
    value = f.value(compute_dtype(f.draft.dtype(f.source.node)))
    return f.tensor(f.fold(monoid, value)[0] if f.over else f.draft.cast(value, BOOL), BOOL)


def _moments(call: Call, dtype: DType) -> tuple[_Folding, int, int]:
    """Mean and variance, the latter over max(count - correction, 0) as in torch."""
    f = _folding(call)
    draft, value = call.draft, f.value(compute_dtype(dtype))
    # The spread of one element is 0, or NaN where its difference from itself is.
    record = "welford" if _is_narrow(draft, value) else "moments"
    mean, spread = f.fold(record, value) if f.over else (value, draft.op("sub", value, value))
    return f, mean, _over_freedom(draft, spread, f.count, _correction(call))


def _is_narrow(draft: Draft, value: int) -> bool:
    """Whether 16 bits hold a value."""
    node = draft.nodes[value]
    return isinstance(node, Op) and node.name == "cast" and draft.dtype(node.args[0]).is_narrow_float


def _correction(call: Call) -> float:
    """What the count of elements is less by: the older overloads say it as whether the variance is unbiased."""
    given = call.arg("correction", None)
    if given is not None and not isinstance(given, (int, float)):
        call.unsupported("a correction that varies between calls")
    return given if given is not None else 1 if call.arg("unbiased", True) else 0


def _over_freedom(draft: Draft, spread: int, count: Size, correction: float) -> int:
    dtype = draft.dtype(spread)
    if isinstance(count, Sym):
        freedom = draft.op("sub", draft.const(1.0, dtype, count), draft.const(correction, dtype))
        return draft.op("div", spread, draft.op("maximum", freedom, draft.const(0.0, dtype)))
    return draft.op("div", spread, draft.const(max(count - correction, 0), dtype))


def _var(call: Call) -> Tensor:
    f, _, var = _moments(call, call.dtype)
    return f.tensor(var, call.dtype)


def _std(call: Call) -> Tensor:
    f, _, var = _moments(call, call.dtype)
    return f.tensor(call.draft.op("sqrt", var), call.dtype)


def _var_mean(call: Call) -> tuple[Tensor, Tensor]:
    dtype = call.dtype_of(call.gives[0])
    f, mean, var = _moments(call, dtype)
    return f.tensor(var, dtype), f.tensor(mean, dtype)


def _softmax_parts(f: _Folding, value: int) -> tuple[int, int]:
    """The maximum and the sum of exp(x - maximum)."""
    if f.over:
        top, total = f.fold("logsumexp", value)
        return top, total
    return value, f.draft.op("exp", f.draft.op("sub", value, value))


def _prepare_softmax(call: Call) -> tuple[Tensor, Tensor]:
    f, dtype = _Folding(call, call.args[1], True), call.dtype_of(call.gives[0])
    top, total = _softmax_parts(f, f.value(compute_dtype(dtype)))
    return f.tensor(top, dtype), f.tensor(total, dtype)


def _logsumexp(call: Call) -> Tensor:
    """max + log of the sum; an infinite maximum is the answer itself."""
    f, draft = _folding(call), call.draft
    dtype = compute_dtype(call.dtype)
    top, total = _softmax_parts(f, f.value(dtype))
    infinite = draft.op("eq", draft.op("abs", top), draft.const(math.inf, dtype))
    return f.tensor(draft.op("where", infinite, top, draft.op("add", top, draft.op("log", total))), call.dtype)


REDUCTIONS: dict[str, Handler] = {
    **rows("aten.sum", "default dim_IntList", shaping(_total("sum", "any"), "dtype")),
    **rows("aten.mean", "default dim", shaping(_mean, "dtype")),
    **rows("aten.prod", "default dim_int", shaping(_total("prod", "all"), "dtype")),
    "aten.amax.default": _extreme("max"),
    "aten.amin.default": _extreme("min"),
    "aten.max.default": _extreme("max"),
    "aten.max.dim": _extreme_with_position("max"),
    "aten.min.default": _extreme("min"),
    "aten.min.dim": _extreme_with_position("min"),
    "aten.argmax.default": _position("argmax"),
    "aten.argmin.default": _position("argmin"),
    **rows("aten.any", "default dim dims", _truth("any")),
    **rows("aten.all", "default dim dims", _truth("all")),
    **rows("aten.var", "default dim correction", _var),
    **rows("aten.std", "default dim correction", _std),
    **rows("aten.var_mean", "default dim correction", _var_mean),
    "aten.logsumexp.default": _logsumexp,
    "prims.prepare_softmax_online.default": _prepare_softmax,
}
