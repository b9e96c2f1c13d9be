"""The laws of every reduction: identity, any grouping, and agreement with a formula written without the record."""

from __future__ import annotations

from math import exp, inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepass.ir import oracle
from onepass.ir.expr import BY_TORCH
from onepass.ir.monoid import MONOIDS, Accumulated
from onepass.ir.oracle import reduce

Tensors = tuple[torch.Tensor, ...]


def first(hit: torch.Tensor) -> torch.Tensor:
    return hit.to(torch.int64).argmax()


def softmax_sums(x: torch.Tensor) -> Tensors:
    top = x.max()
    return top, (x - top).exp().sum()


def moments(x: torch.Tensor) -> Tensors:
    """Mean and variance as in eager: both NaN if there is an infinity."""
    off = x - x.mean()
    return x.mean() + off.sum() / len(x), off.square().sum()


FORMULAS = {
    "sum": lambda x: (x.sum(dtype=x.dtype),),
    "prod": lambda x: (x.prod(dtype=x.dtype),),
    "max": lambda x: (x.max(),),
    "min": lambda x: (x.min(),),
    "any": lambda x: ((x != 0).any(),),
    "all": lambda x: ((x != 0).all(),),
    "argmax": lambda x: (first(x.isnan() if x.isnan().any() else x == x.max()),),
    "argmin": lambda x: (first(x.isnan() if x.isnan().any() else x == x.min()),),
    "welford": moments,
    "moments": moments,
    "logsumexp": softmax_sums,
}
ROWS = {
    "floats": torch.tensor([0.5, -1.25, 3.0, 3.0, -7.5, 0.0, 1e-3, 2.0], dtype=torch.float64),
    "one element": torch.tensor([-2.5], dtype=torch.float64),
    "far from zero": torch.linspace(0, 1, 9, dtype=torch.float64) + 1e6,
    "all -inf": torch.full((5,), -inf, dtype=torch.float64),
    "some -inf": torch.tensor([-inf, -inf, 1.0, -inf, 2.0, -inf], dtype=torch.float64),
    "+inf": torch.tensor([1.0, inf, 2.0, 3.0], dtype=torch.float64),
    "both infs": torch.tensor([1.0, inf, -inf, 3.0], dtype=torch.float64),
    "nan": torch.tensor([1.0, 5.0, nan, 3.0, nan], dtype=torch.float64),
    "nan and inf": torch.tensor([inf, nan, -inf, 3.0], dtype=torch.float64),
    "i64": torch.tensor([3, -2, 7, 7, -9, 1]),
    "i64 extremes": torch.tensor([-(1 << 63), (1 << 63) - 1, 0]),
    "i32": torch.tensor([2, -2, 5], dtype=torch.int32),
    "bool": torch.tensor([False, True, True, False]),
    "all true": torch.tensor([True, True]),
    "all false": torch.tensor([False, False, False]),
}


def takes(name: str, row: torch.Tensor) -> bool:
    """Variances and exponentials take floats; booleans are only for any and all."""
    if name in ("welford", "moments", "logsumexp"):
        return row.is_floating_point()
    return row.dtype != torch.bool or name in ("any", "all")


CASES = [pytest.param(name, row, id=f"{name}-{label}") for name in FORMULAS for label, row in ROWS.items() if takes(name, row)]


def inputs(name: str, row: torch.Tensor, start: int = 0) -> Tensors:
    """The row, with its positions where the reduction wants them."""
    return (row, torch.arange(start, start + len(row))) if name.startswith("arg") else (row,)


def partial(name: str, row: torch.Tensor, start: int = 0) -> Tensors:
    return reduce(MONOIDS[f"{name}.partial"], inputs(name, row, start), (0,))


def merged(name: str, states: list[Tensors]) -> Tensors:
    results = reduce(MONOIDS[f"{name}.merge"], tuple(torch.cat(part) for part in zip(*states, strict=True)), (0,))
    return tuple(r.squeeze(0) for r in results)


def grouped(name: str, row: torch.Tensor, cuts: list[int]) -> Tensors:
    """Partial results of the pieces between cuts (some may be empty), merged."""
    ends = sorted(min(c, len(row)) for c in cuts) + [len(row)]
    starts = [0, *ends[:-1]]
    return merged(name, [partial(name, row[a:b], a) for a, b in zip(starts, ends, strict=True)])


def same(actual: Tensors, expected: Tensors) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_every_reduction_has_a_formula() -> None:
    assert {name.partition(".")[0] for name in MONOIDS} == set(FORMULAS)
    assert len(MONOIDS) == 3 * len(FORMULAS)


@pytest.mark.parametrize(("name", "row"), CASES)
def test_a_whole_row_matches_the_formula(name: str, row: torch.Tensor) -> None:
    results = reduce(MONOIDS[name], inputs(name, row), (0,))
    same(tuple(r.squeeze(0) for r in results), FORMULAS[name](row))


@pytest.mark.parametrize(("name", "row"), CASES)
@pytest.mark.parametrize("cuts", [[], [1], [1, 2, 3, 4, 5, 6, 7, 8], [2, 2], [0, 100]], ids=str)
def test_given_groupings_match_the_formula(name: str, row: torch.Tensor, cuts: list[int]) -> None:
    same(grouped(name, row, cuts), FORMULAS[name](row))


@pytest.mark.parametrize(("name", "row"), CASES)
def test_merging_identities_changes_nothing(name: str, row: torch.Tensor) -> None:
    """Merging a state with any number of identities, on either side, does not change its results."""
    state = partial(name, row)
    numbers = MONOIDS[name].identity(BY_TORCH[row.dtype])
    identity = tuple(torch.full_like(part, number) for part, number in zip(state, numbers, strict=True))
    expected = merged(name, [state])
    for states in ([identity, state], [state, identity], [identity, identity, state, identity]):
        same(merged(name, states), expected)


@pytest.mark.parametrize(("name", "row"), CASES)
def test_an_empty_tile_is_the_identity(name: str, row: torch.Tensor) -> None:
    state = partial(name, row[:0])
    assert [part.item() for part in state] == list(MONOIDS[name].identity(BY_TORCH[row.dtype]))


@pytest.mark.parametrize(("name", "row"), CASES)
def test_states_and_results_have_their_declared_types(name: str, row: torch.Tensor) -> None:
    dtype = BY_TORCH[row.dtype]
    for suffix in ("", ".partial"):
        results = reduce(MONOIDS[name + suffix], inputs(name, row), (0,))
        assert tuple(BY_TORCH[r.dtype] for r in results) == MONOIDS[name + suffix].result_dtypes(dtype)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(FORMULAS)),
    st.lists(st.floats(-30, 30) | st.sampled_from([-inf, nan]), min_size=1, max_size=20),
    st.lists(st.integers(0, 20), max_size=6),
)
def test_any_grouping_of_any_row_matches_the_formula(name: str, numbers: list[float], cuts: list[int]) -> None:
    row = torch.tensor(numbers, dtype=torch.float64)
    for actual, expected in zip(grouped(name, row, cuts), FORMULAS[name](row), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_reductions_over_some_dimensions() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    mean, m2 = reduce(MONOIDS["welford"], (x,), (0, 2))
    torch.testing.assert_close(mean, x.mean((0, 2), keepdim=True))
    torch.testing.assert_close(m2, x.var((0, 2), correction=0, keepdim=True) * 15)
    (product,) = reduce(MONOIDS["prod"], (x,), (1, 2))
    torch.testing.assert_close(product, x.prod(2, keepdim=True).prod(1, keepdim=True))


@pytest.mark.parametrize("name", [n for n, m in MONOIDS.items() if m.join is not None])
def test_a_join_of_two_is_their_merge(name: str) -> None:
    monoid = MONOIDS[name]
    assert monoid.join is not None
    algebra = oracle._TorchAlgebra((0,), 2)
    counts = torch.tensor([[3.0, 1.0, 0.0, 5.0, 0.0], [4.0, 1.0, 2.0, 0.0, 0.0]], dtype=torch.float64)
    means = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * (counts > 0)
    spreads = torch.rand(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * (counts > 1)
    state = {
        "sum": (means,),
        "welford": (counts, means, spreads),
        "moments": (counts, means, 1e-3 * means, spreads),
        "logsumexp": (means, counts),
    }[name.partition(".")[0]]
    merged = monoid.merge(algebra, *state)
    joined = monoid.join(algebra, tuple(s[:1] for s in state), tuple(s[1:] for s in state))
    assert monoid.accumulating == tuple(k for k, part in enumerate(joined) if isinstance(part, Accumulated))
    grown = tuple(part.before * part.scale + part.by if isinstance(part, Accumulated) else part for part in joined)
    if "low" in monoid.state:  # two ways to write one number
        states = (dict(zip(monoid.state, parts, strict=True)) for parts in (merged, grown))
        merged, grown = ((s["n"], s["mean"] + s["low"], s["m2"]) for s in states)
    for one, two in zip(merged, grown, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tops", [(-1.0, 2.0), (2.0, -1.0), (-inf, 1.0), (1.0, -inf), (-inf, -inf)], ids=str)
def test_exponentials_are_joined_whichever_maximum_is_greater(tops: tuple[float, float]) -> None:
    """The partial sum is rescaled where the maximum rises, and tiles of only -inf join to an empty sum."""
    monoid, state = MONOIDS["logsumexp"], (torch.tensor(tops, dtype=torch.float64), torch.tensor([3.0, 5.0], dtype=torch.float64))
    algebra = oracle._TorchAlgebra((0,), 2)
    assert monoid.join is not None
    top, total = monoid.join(algebra, tuple(s[:1] for s in state), tuple(s[1:] for s in state))
    peak = max(tops)
    expected = sum(n * exp(own - peak) for own, n in zip(tops, (3.0, 5.0), strict=True) if own > -inf)
    assert top.item() == peak and (total.before * total.scale + total.by).item() == pytest.approx(expected)
