"""Expands monoids into nodes: reductions over no axes, and reductions that read their input twice."""

from __future__ import annotations

from dataclasses import dataclass

from .expr import I32, OPS, DType, result_dtype
from .monoid import MONOIDS, Algebra, Stage, State, Value
from .one_hot import times_extent
from .program import Const, Node, Op, Reduce, Result
from .rewrite import Draft


def inline_single_element(draft: Draft, node: Node) -> int | None:
    """a reduction over no axes -> its monoid expanded on a single element"""
    match node:
        case Result(reduce=owner, k=k):
            match draft.nodes[owner]:
                case Reduce(axes=()) as reduce:
                    return expand_monoid(draft, reduce)[k]
    return None


def expand_two_pass(draft: Draft, node: Node) -> int | None:
    """a reduction that reads its input twice -> its monoid expanded into primitive folds"""
    match node:
        case Result(reduce=owner, k=k):
            match draft.nodes[owner]:
                case Reduce(monoid=name) as reduce if MONOIDS[name].passes > 1 and MONOIDS[name].stage is Stage.WHOLE:
                    return expand_monoid(draft, reduce)[k]
    return None


def expand_monoid(draft: Draft, reduce: Reduce) -> tuple[int, ...]:
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
            return _Ref(self.draft.add(times_extent(value, self.draft.program.extent(self.axes), self.dtype, self.src)))
        folded = self.draft.add(Reduce(kind, (self.place(value, self.dtype),), self.axes, self.src))
        return _Ref(self.draft.add(Result(folded, 0, self.src)))

    def place(self, value: Value, dtype: DType) -> int:
        """The position of a value. A Python number becomes a constant."""
        if isinstance(value, _Ref):
            return value.at
        typed = {"bool": bool, "int": int, "float": float}[dtype.kind](value)
        return self.draft.add(Const(typed, dtype, src=self.src))
