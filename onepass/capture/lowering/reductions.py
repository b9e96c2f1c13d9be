"""Lowering of reductions: aten overloads to Monoid records."""

from __future__ import annotations

import math
from typing import Any

from ...ir.expr import BOOL, I32, I64, DType, compute_dtype
from ...ir.program import Op, Reduce, operands
from ...ir.size import Size, Sym
from .axes import Dim, Dims, Inexpressible
from .call import Call, Handler, for_overloads, normalize_dim, with_shape_args
from .draft import Draft, Tensor
from .substitute import Affine, substitute

MIN_REDUCTION_SIZE = 8  # fewest elements of a reduction; smaller ones are unrolled into arithmetic
# Limits for unrolling: nodes and nested reductions after duplication. Without them, nested sums would grow exponentially.
MAX_NODES, MAX_REDUCTIONS = 512, 32
_UNROLLED_OPS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def _dims_of(call: Call, dims: Any) -> tuple[int, ...]:
    """The reduced dims as non-negative ints. None means all dims; for [], the result's shape decides."""
    rank = len(call.args[0].dims)
    if dims is None or dims == []:
        return () if dims == [] and _keeps_shape(call) else tuple(range(rank))
    given = dims if isinstance(dims, (list, tuple)) else (dims,)
    return tuple(normalize_dim(d, rank) for d in given) if rank else ()


def _keeps_shape(call: Call) -> bool:
    """Whether torch reduces nothing. An empty list of dims means all dims for sum, but none for any and all."""
    first = call.result_fake[0] if isinstance(call.result_fake, (tuple, list)) else call.result_fake
    return call.shape_of(first) == tuple(call.draft.atoms.size(dim) for dim in call.args[0].dims)


class _Reduction:
    """A reduction being lowered: the atoms it reduces over and the dims that remain."""

    def __init__(self, call: Call, dims: Any, keepdim: bool) -> None:
        self.call, self.draft, self.source = call, call.draft, call.args[0]
        self.reduced = reduced = sorted(set(_dims_of(call, dims)))
        own = self.draft.dims(self.source)
        self.over: Dim = tuple(a for d in reduced for a in own[d])
        left: dict[int, Dims] = dict.fromkeys(reduced, ((),) if keepdim else ())
        self.dims: Dims = tuple(k for d, dim in enumerate(own) for k in left.get(d, (dim,)))

    @property
    def count(self) -> Size:
        """The number of elements reduced to one."""
        return self.draft.atoms.size(self.over)

    def value(self, dtype: DType) -> int:
        """The argument in the dtype the reduction runs in."""
        return self.draft.cast(self.source.node, dtype)

    def reduce(self, monoid: str, *args: int) -> tuple[int, ...]:
        """Reduce values. Small reductions over rows are unrolled, which makes them elementwise ops over the columns."""
        if monoid in _UNROLLED_OPS and self.is_small and self._unrolls_cheaply(args[0]):
            try:
                return (self._unrolled(_UNROLLED_OPS[monoid], args[0]),)
            except Inexpressible:  # the operand contains a reduction or a lookup along these rows
                pass
        return self.draft.reduce(monoid, args, self.over)

    @property
    def is_small(self) -> bool:
        """Whether few elements are reduced and they are not contiguous. Contiguous elements are loaded together anyway."""
        stride = self.call.input_fake.stride(self.reduced[0]) if len(self.reduced) == 1 else 1
        return isinstance(self.count, int) and 1 < self.count < MIN_REDUCTION_SIZE and not (isinstance(stride, int) and stride == 1)

    def _unrolls_cheaply(self, value: int) -> bool:
        """Whether unrolling duplicates few nodes. Only nodes that vary over the reduced atoms are duplicated."""
        assert isinstance(self.count, int)
        draft, over = self.draft, set(self.over)
        found, worklist = {value}, [value]
        while worklist:
            fresh = [o for o in operands(draft.nodes[worklist.pop()]) if o not in found and not over.isdisjoint(draft.free(o))]
            found.update(fresh)
            worklist += fresh
        reductions = sum(isinstance(draft.nodes[at], Reduce) for at in found)
        return self.count * len(found) <= MAX_NODES and self.count * reductions <= MAX_REDUCTIONS

    def _unrolled(self, op: str, value: int) -> int:
        assert isinstance(self.count, int)
        first, *others = (substitute(self.draft, value, {self.over: Affine((), k)}) for k in range(self.count))
        for other in others:
            first = self.draft.op(op, first, other)
        return first

    def tensor(self, node: int, dtype: DType) -> Tensor:
        return self.draft.tensor(self.draft.cast(node, dtype), self.dims)


def _reduction(call: Call) -> _Reduction:
    return _Reduction(call, call.arg("dim", None), bool(call.arg("keepdim", False)))


def _sum_or_product(monoid: str, on_bool: str) -> Handler:
    """Sum or product. With dtype bool, any or all."""

    def handle(call: Call) -> Tensor:
        r = _reduction(call)
        if call.dtype is BOOL:
            return _any_or_all_of(r, on_bool)
        value = r.value(compute_dtype(call.dtype))
        return r.tensor(r.reduce(monoid, value)[0] if r.over else value, call.dtype)

    return handle


def _mean(call: Call) -> Tensor:
    r, dtype = _reduction(call), compute_dtype(call.dtype)
    value = r.value(dtype)
    total = r.reduce("sum", value)[0] if r.over else value
    return r.tensor(_mean_of(call.draft, total, r.count), call.dtype)


def _mean_of(draft: Draft, total: int, count: Size) -> int:
    """total / count. The mean of no elements is 0 / 0 = NaN, as in torch."""
    return total if count == 1 else draft.op("div", total, draft.const(1.0, draft.dtype(total), count))


def _min_or_max(monoid: str) -> Handler:
    """amax, amin, and max and min over all elements."""
    return lambda call: _min_or_max_of(call, _reduction(call), monoid, call.dtype)


def _min_or_max_of(call: Call, r: _Reduction, monoid: str, dtype: DType) -> Tensor:
    if dtype is BOOL:
        return _any_or_all_of(r, "any" if monoid == "max" else "all")
    value = r.value(compute_dtype(dtype))
    return r.tensor(r.reduce(monoid, value)[0] if r.over else value, dtype)


def _min_or_max_with_index(monoid: str) -> Handler:
    """max and min over a dim, which also return the index."""

    def handle(call: Call) -> tuple[Tensor, Tensor]:
        values = _min_or_max_of(call, _reduction(call), monoid, call.dtype_of(call.result_fake[0]))
        return values, _index_of(_reduction(call), f"arg{monoid}")

    return handle


def _arg_min_or_max(monoid: str) -> Handler:
    return lambda call: _index_of(_reduction(call), monoid)


def _index_of(r: _Reduction, monoid: str) -> Tensor:
    """argmax and argmin. Over all dims, the index is row-major."""
    own = r.draft.dtype(r.source.node)
    value = r.value(I32 if own is BOOL else compute_dtype(own))
    at = r.reduce(monoid, value, r.draft.index(r.over))[0] if r.over else r.draft.const(0, I64)
    return r.tensor(at, I64)


def _any_or_all(monoid: str) -> Handler:
    def handle(call: Call) -> Tensor:
        truth = _any_or_all_of(_reduction(call), monoid)
        return Tensor(call.draft.cast(truth.node, call.dtype), truth.dims)

    return handle


def _any_or_all_of(r: _Reduction, monoid: str) -> Tensor:
    value = r.value(compute_dtype(r.draft.dtype(r.source.node)))
    return r.tensor(r.reduce(monoid, value)[0] if r.over else r.draft.cast(value, BOOL), BOOL)


def _moments(call: Call, dtype: DType) -> tuple[_Reduction, int, int]:
    """Mean and variance. The divisor of the variance is max(count - correction, 0), as in torch."""
    r = _reduction(call)
    draft, value = call.draft, r.value(compute_dtype(dtype))
    # For one element m2 is 0, or NaN if the element is not finite.
    record = "welford" if _is_narrow(draft, value) else "moments"
    mean, m2 = r.reduce(record, value) if r.over else (value, draft.op("sub", value, value))
    return r, mean, _variance(draft, m2, r.count, _correction(call))


def _is_narrow(draft: Draft, value: int) -> bool:
    """Whether a value was cast from a narrow float."""
    node = draft.nodes[value]
    return isinstance(node, Op) and node.name == "cast" and draft.dtype(node.args[0]).is_narrow_float


def _correction(call: Call) -> float:
    """The number subtracted from the element count. Older overloads pass `unbiased` instead."""
    given = call.arg("correction", None)
    if given is not None and not isinstance(given, (int, float)):
        call.unsupported("a correction that is no constant")
    return given if given is not None else 1 if call.arg("unbiased", True) else 0


def _variance(draft: Draft, m2: int, count: Size, correction: float) -> int:
    dtype = draft.dtype(m2)
    if isinstance(count, Sym):
        freedom = draft.op("sub", draft.const(1.0, dtype, count), draft.const(correction, dtype))
        return draft.op("div", m2, draft.op("maximum", freedom, draft.const(0.0, dtype)))
    return draft.op("div", m2, draft.const(max(count - correction, 0), dtype))


def _var(call: Call) -> Tensor:
    r, _, var = _moments(call, call.dtype)
    return r.tensor(var, call.dtype)


def _std(call: Call) -> Tensor:
    r, _, var = _moments(call, call.dtype)
    return r.tensor(call.draft.op("sqrt", var), call.dtype)


def _var_mean(call: Call) -> tuple[Tensor, Tensor]:
    dtype = call.dtype_of(call.result_fake[0])
    r, mean, var = _moments(call, dtype)
    return r.tensor(var, dtype), r.tensor(mean, dtype)


def _softmax_parts(r: _Reduction, value: int) -> tuple[int, int]:
    """The maximum, and the sum of exp(x - maximum)."""
    if r.over:
        top, total = r.reduce("logsumexp", value)
        return top, total
    return value, r.draft.op("exp", r.draft.op("sub", value, value))


def _prepare_softmax(call: Call) -> tuple[Tensor, Tensor]:
    r, dtype = _Reduction(call, call.args[1], True), call.dtype_of(call.result_fake[0])
    top, total = _softmax_parts(r, r.value(compute_dtype(dtype)))
    return r.tensor(top, dtype), r.tensor(total, dtype)


def _logsumexp(call: Call) -> Tensor:
    """max + log of the sum. If the maximum is infinite, it is the result."""
    r, draft = _reduction(call), call.draft
    dtype = compute_dtype(call.dtype)
    top, total = _softmax_parts(r, r.value(dtype))
    infinite = draft.op("eq", draft.op("abs", top), draft.const(math.inf, dtype))
    return r.tensor(draft.op("where", infinite, top, draft.op("add", top, draft.op("log", total))), call.dtype)


REDUCTIONS: dict[str, Handler] = {
    **for_overloads("aten.sum", "default dim_IntList", with_shape_args(_sum_or_product("sum", "any"), "dtype")),
    **for_overloads("aten.mean", "default dim", with_shape_args(_mean, "dtype")),
    **for_overloads("aten.prod", "default dim_int", with_shape_args(_sum_or_product("prod", "all"), "dtype")),
    "aten.amax.default": _min_or_max("max"),
    "aten.amin.default": _min_or_max("min"),
    "aten.max.default": _min_or_max("max"),
    "aten.max.dim": _min_or_max_with_index("max"),
    "aten.min.default": _min_or_max("min"),
    "aten.min.dim": _min_or_max_with_index("min"),
    "aten.argmax.default": _arg_min_or_max("argmax"),
    "aten.argmin.default": _arg_min_or_max("argmin"),
    **for_overloads("aten.any", "default dim dims", _any_or_all("any")),
    **for_overloads("aten.all", "default dim dims", _any_or_all("all")),
    **for_overloads("aten.var", "default dim correction", _var),
    **for_overloads("aten.std", "default dim correction", _std),
    **for_overloads("aten.var_mean", "default dim correction", _var_mean),
    "aten.logsumexp.default": _logsumexp,
    "prims.prepare_softmax_online.default": _prepare_softmax,
}
