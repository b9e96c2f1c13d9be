"""Monoids: the reductions of the IR, each defined by its state, identity, lift, merge and finalize.

`lift` turns an element into a state, `merge` combines states, and `finalize` computes the results from a state. `merge` is
written as passes of primitive folds (sum, prod, max, min), and serves every form of a reduction:
- over a row kept on chip, it is the two-pass form;
- over a loaded tile, it is the tile form (about one exponential per element for logsumexp, tile mean and M2 for variance);
- over two states, it joins tiles (Chan's merge for variance);
- over partial results, it is the final step of a split reduction.
The oracle, the planner and the kernels share this one definition, because it is written against an abstract Algebra instead of
torch or Triton. To add a reduction, add a record: no other code asks for its name, only for its fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import inf, nan
from typing import Any, TypeAlias

from .expr import BOOL, I32, I64, DType, Takes, max_value, min_value

Value: TypeAlias = Any  # a value of the algebra, or a Python number known at code generation
State: TypeAlias = tuple[Value, ...]


class Algebra(ABC):
    """An interpreter of monoid definitions: on tensors, as kernel text, or as nodes of a Program."""

    @abstractmethod
    def emit(self, op: str, *args: Value) -> Value:
        """Apply an op of the op table."""

    @abstractmethod
    def fold(self, kind: str, value: Value) -> Value:
        """Fold a value over the merged axes with a primitive: sum, prod, max or min."""

    def op(self, op: str, *args: Value) -> Value:
        """Apply an op of the op table, after folding identities (1 * x, 0 + x, products of numbers)."""
        match op, args:
            case "mul", (int() | float() as one, x) | (x, int() | float() as one) if one == 1:
                return x  # 1 * x -> x
            case "add", (int() | float() as zero, x) | (x, int() | float() as zero) if zero == 0:
                return x  # 0 + x -> x
            case "mul", (int() | float() as a, int() | float() as b):
                return a * b
            case _:
                return self.emit(op, *args)


@dataclass(frozen=True, slots=True)
class Accumulated:
    """A state component that accumulates: scale * before + by. Marking it lets kernels compensate its rounding error."""

    before: Value
    by: Value
    scale: Value = 1


class Stage(Enum):
    """Which part of a reduction a record is."""

    WHOLE = "elements in, results out"
    PARTIAL = "the first half of a split reduction: elements in, state out"
    MERGE = "the second half: states in, results out"


@dataclass(frozen=True)
class Monoid:
    """One reduction. `lift`, `merge` and `finalize` are written against an Algebra."""

    name: str
    inputs: int
    takes: Takes  # types of the first input
    state: tuple[str, ...]
    identity: Callable[[DType], State]
    lift: Callable[..., State]  # (algebra, *inputs) -> state
    merge: Callable[..., State]  # (algebra, *state) -> state, folding over an axis
    finalize: Callable[..., State]  # (algebra, *state) -> results
    state_dtypes: Callable[[DType], tuple[DType, ...]]
    result_dtypes: Callable[[DType], tuple[DType, ...]]
    primitive: str | None = None  # the primitive fold, if `merge` is just that
    join: Callable[[Algebra, State, State], State] | None = None  # of two states, by accumulation: less rounding error than `merge`
    accumulating: tuple[int, ...] = ()  # indices of the state components that accumulate in `join`
    tracks_count: bool = False  # whether the state includes the element count
    mufu: float = 0.0  # special-function operations per element
    discontinuous: bool = False  # whether a difference in an element's last bit may change the result by any amount
    stage: Stage = Stage.WHOLE

    @property
    def takes_states(self) -> bool:
        """Whether the inputs are states already, each of its component's type."""
        return self.lift is _through

    @property
    def fold(self) -> str | None:
        """The primitive fold of elements that this reduction is; None if it is more than that, or half of a split one."""
        return self.primitive if self.stage is Stage.WHOLE and self.takes_states else None

    @property
    def passes(self) -> int:
        """How many times `merge` reads its input."""
        return 1 if self.primitive else 2


def _through(_: Algebra, *state: Value) -> State:
    return state


def _primitive(name: str, identity: Callable[[DType], float | int], takes: Takes = Takes.NUMBERS) -> Monoid:
    adds = name == "sum"
    return Monoid(
        name,
        1,
        takes,
        (name,),
        identity=lambda dtype: (identity(dtype),),
        lift=_through,
        merge=lambda alg, x: (alg.fold(name, x),),
        finalize=_through,
        state_dtypes=lambda dtype: (dtype,),
        result_dtypes=lambda dtype: (dtype,),
        primitive=name,
        join=_join_sum if adds else None,
        accumulating=(0,) if adds else (),
    )


def _truth(name: str, fold: str, start: int) -> Monoid:
    """any and all: the max or min of 0s and 1s."""
    return Monoid(
        name,
        1,
        Takes.ANY,
        (name,),
        identity=lambda _: (start,),
        lift=lambda alg, x: (alg.op("where", alg.op("ne", x, 0), 1, 0),),
        merge=lambda alg, x: (alg.fold(fold, x),),
        finalize=lambda alg, x: (alg.op("ne", x, 0),),
        state_dtypes=lambda _: (I32,),
        result_dtypes=lambda _: (BOOL,),
        primitive=fold,
    )


_NO_POSITION = (1 << 63) - 1  # larger than any position


def _arg(name: str, fold: str, start: Callable[[DType], float | int]) -> Monoid:
    """argmax and argmin: map (value, position) to the first position of the extreme. NaN counts as the extreme."""

    def merge(alg: Algebra, x: Value, at: Value) -> State:
        best = alg.fold(fold, x)
        hit = alg.op("or", alg.op("eq", x, best), alg.op("isnan", x))
        return best, alg.fold("min", alg.op("where", hit, at, _NO_POSITION))

    return Monoid(
        name,
        2,
        Takes.ANY,
        ("best", "at"),
        identity=lambda dtype: (start(dtype), _NO_POSITION),
        lift=_through,
        merge=merge,
        finalize=lambda alg, _, at: (at,),
        state_dtypes=lambda dtype: (dtype, I64),
        result_dtypes=lambda _: (I64,),
        discontinuous=True,
    )


def _join_sum(_: Algebra, a: State, b: State) -> State:
    return (Accumulated(a[0], b[0]),)


def _merge_welford(alg: Algebra, n: Value, mean: Value, m2: Value) -> State:
    """Add counts, take the weighted mean, and add the M2s, each corrected for its distance from the new mean."""
    total = alg.fold("sum", n)
    at_least_one = alg.op("maximum", total, 1.0)
    center = alg.op("div", alg.fold("sum", alg.op("mul", n, mean)), at_least_one)
    off = alg.op("sub", mean, center)
    return total, center, alg.fold("sum", alg.op("add", m2, alg.op("mul", alg.op("mul", n, off), off)))


# The mean is corrected only where total * drift**2 exceeds this share of M2. A smaller drift is below 8 fp32 roundings of the
# standard deviation, which is no more than the error of the elements themselves.
MIN_DRIFT = 2.0**-42


def _merge_moments(alg: Algebra, n: Value, mean: Value, low: Value, m2: Value) -> State:
    """Welford merge with a double-fp32 mean (mean + low), for means many times larger than the standard deviation."""
    total = alg.fold("sum", n)
    at_least_one = alg.op("maximum", total, 1.0)
    center = alg.op("div", alg.fold("sum", alg.op("mul", n, mean)), at_least_one)
    off = alg.op("add", alg.op("sub", mean, center), low)
    weighted = alg.op("mul", n, off)  # n * off first: off * off may overflow where n is 0
    drift = alg.op("div", alg.fold("sum", weighted), at_least_one)
    spread = alg.fold("sum", alg.op("add", m2, alg.op("mul", weighted, off)))
    excess = alg.op("mul", total, alg.op("mul", drift, drift))
    significant = alg.op("gt", excess, alg.op("mul", spread, MIN_DRIFT))
    step = alg.op("where", significant, drift, 0.0)
    new_mean = alg.op("add", center, step)
    rest = alg.op("add", alg.op("sub", center, new_mean), step)
    return total, new_mean, rest, alg.op("maximum", alg.op("sub", spread, excess), 0.0)


def _join_welford(alg: Algebra, a: State, b: State) -> State:
    """Chan's merge of two states. The mean moves by a fraction of the distance, so only the step is rounded, not a weighted sum."""
    (n_a, mean_a, m2_a), (n_b, mean_b, m2_b) = a, b
    total = alg.op("add", n_a, n_b)
    share = alg.op("div", n_b, alg.op("maximum", total, 1.0))
    off = alg.op("sub", mean_b, mean_a)
    step = alg.op("mul", off, share)
    return total, Accumulated(mean_a, step), Accumulated(m2_a, alg.op("add", m2_b, _m2_between_means(alg, off, n_a, share)))


def _join_moments(alg: Algebra, a: State, b: State) -> State:
    """Chan's merge of two states with a double-fp32 mean. The step is small, so its own rounding error does not matter."""
    (n_a, mean_a, low_a, m2_a), (n_b, mean_b, low_b, m2_b) = a, b
    total = alg.op("add", n_a, n_b)
    share = alg.op("div", n_b, alg.op("maximum", total, 1.0))
    high, low = alg.op("sub", mean_b, mean_a), alg.op("sub", low_b, low_a)
    step = alg.op("mul", high, share)
    mean = alg.op("add", mean_a, step)
    taken = alg.op("add", alg.op("sub", mean_a, mean), step)
    rest = alg.op("add", taken, alg.op("add", low_a, alg.op("mul", low, share)))
    spread = _m2_between_means(alg, alg.op("add", high, low), n_a, share)
    return total, mean, rest, Accumulated(m2_a, alg.op("add", m2_b, spread))


def _finalize_moments(alg: Algebra, mean: Value, m2: Value) -> State:
    """(mean, M2). With an infinity among the elements, M2 is NaN, and so is the mean, as in eager."""
    return alg.op("where", alg.op("isnan", m2), m2, mean), m2


def _m2_between_means(alg: Algebra, off: Value, n: Value, share: Value) -> Value:
    """What the distance between two means adds to M2. In this order of products, an empty state gives 0 without overflow."""
    return alg.op("mul", off, alg.op("mul", off, alg.op("mul", n, share)))


def _merge_logsumexp(alg: Algebra, top: Value, total: Value) -> State:
    """Take the larger maximum and rescale the sums to it. The guard avoids -inf - -inf in a tile of only -inf."""
    peak = alg.fold("max", top)
    safe = alg.op("where", alg.op("eq", peak, -inf), 0.0, peak)
    return peak, alg.fold("sum", alg.op("mul", total, alg.op("exp", alg.op("sub", top, safe))))


def _join_logsumexp(alg: Algebra, a: State, b: State) -> State:
    """Join two states: rescale both sums to the larger maximum and add the second to the first."""
    (top_a, total_a), (top_b, total_b) = a, b
    peak = alg.op("maximum", top_a, top_b)
    safe = alg.op("where", alg.op("eq", peak, -inf), 0.0, peak)
    scale_a, scale_b = (alg.op("exp", alg.op("sub", top, safe)) for top in (top_a, top_b))
    return peak, Accumulated(total_a, alg.op("mul", total_b, scale_b), scale_a)


_BASE = (
    _primitive("sum", lambda dtype: 0.0 if dtype.is_float else 0),
    _primitive("prod", lambda dtype: 1.0 if dtype.is_float else 1),
    _primitive("max", min_value, Takes.ANY),
    _primitive("min", max_value, Takes.ANY),
    _truth("any", "max", 0),
    _truth("all", "min", 1),
    _arg("argmax", "max", min_value),
    _arg("argmin", "min", max_value),
    Monoid(  # for 16-bit data: rounding of the fp32 mean is below the precision of the data
        "welford",
        1,
        Takes.FLOATS,
        ("n", "mean", "m2"),
        identity=lambda _: (0.0, 0.0, 0.0),
        lift=lambda alg, x: (1.0, x, 0.0),
        merge=_merge_welford,
        finalize=lambda alg, n, mean, m2: _finalize_moments(alg, mean, m2),
        state_dtypes=lambda dtype: (dtype,) * 3,
        result_dtypes=lambda dtype: (dtype,) * 2,
        join=_join_welford,
        accumulating=(1, 2),
        tracks_count=True,
    ),
    Monoid(
        "moments",
        1,
        Takes.FLOATS,
        ("n", "mean", "low", "m2"),
        identity=lambda _: (0.0, 0.0, 0.0, 0.0),
        lift=lambda alg, x: (1.0, x, 0.0, 0.0),
        merge=_merge_moments,
        finalize=lambda alg, n, mean, low, m2: _finalize_moments(alg, mean, m2),
        state_dtypes=lambda dtype: (dtype,) * 4,
        result_dtypes=lambda dtype: (dtype,) * 2,
        join=_join_moments,
        accumulating=(3,),
        tracks_count=True,
    ),
    Monoid(
        "logsumexp",
        1,
        Takes.FLOATS,
        ("top", "total"),
        identity=lambda _: (-inf, 0.0),
        lift=lambda alg, x: (x, 1.0),
        merge=_merge_logsumexp,
        # Eager's sum(exp(x - max)) over a row of only -inf is NaN.
        finalize=lambda alg, top, total: (top, alg.op("where", alg.op("eq", top, -inf), nan, total)),
        state_dtypes=lambda dtype: (dtype,) * 2,
        result_dtypes=lambda dtype: (dtype,) * 2,
        join=_join_logsumexp,
        accumulating=(1,),
        mufu=1,
    ),
)


def _partial(monoid: Monoid) -> Monoid:
    """The first half of a split reduction: elements in, state out."""
    return replace(monoid, name=f"{monoid.name}.partial", stage=Stage.PARTIAL, finalize=_through, result_dtypes=monoid.state_dtypes)


def _merging(monoid: Monoid) -> Monoid:
    """The second half of a split reduction: states in, results out. The states' own types are all that it takes."""
    return replace(monoid, name=f"{monoid.name}.merge", stage=Stage.MERGE, inputs=len(monoid.state), lift=_through)


MONOIDS: dict[str, Monoid] = {m.name: m for base in _BASE for m in (base, _partial(base), _merging(base))}
