"""Rewrites preserve meaning: golden text before and after, and the oracle's results on random Programs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings

import onepass
from onepass.capture.function.trace import capture
from onepass.ir.oracle import evaluate
from onepass.ir.program import Program, Reduce
from onepass.ir.simplify import EXACT, elide_rounding, online_softmax, simplify, two_pass
from onepass.ir.text import parse, show
from onepass.ir.verify import verify
from tests.support.random_programs import Case, programs, small, small_inputs


def nodes_of(program: Program) -> list[str]:
    return [line.strip() for line in show(program).splitlines() if line.strip().startswith(("%", "store"))]


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("rewrite", [simplify, two_pass, online_softmax], ids=lambda f: f.__name__)
@settings(max_examples=100, deadline=None)
@given(case=programs())
def test_rewrites_preserve_results(rewrite: Callable[[Program], Program], case: Case) -> None:
    inputs = case.make_inputs(0)
    rewritten = verify(rewrite(case.program), rewrite.__name__)
    expected = evaluate(case.program, inputs, case.bindings)
    # Folded constants are rounded to f32; the oracle does not round.
    torch.testing.assert_close(evaluate(rewritten, inputs, case.bindings), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(programs())
def test_simplify_is_idempotent(case: Case) -> None:
    once = simplify(case.program)
    assert simplify(once) == once


GOLDEN = {
    "drop_cast": ("%1 = cast f32 %0\nstore y [m:8, n:1] = %1", "store y [m:8, n:1] = %0"),
    "drop_widening": (
        "%1 = load h [m:8, n:1]\n%2 = cast f32 %1\n%3 = cast bf16 %2\nstore b [m:8, n:1] = %3",
        "%0 = load h [m:8, n:1]\nstore b [m:8, n:1] = %0",
    ),
    "elide_rounding": (
        "%1 = cast bf16 %0\n%2 = cast f32 %1\n%3 = neg %2\nstore y [m:8, n:1] = %3",
        "%1 = neg %0\nstore y [m:8, n:1] = %1",
    ),
    "drop_one": (
        "%1 = const 1.0 : f32\n%2 = mul %1 %0\n%3 = mul %2 %1\n%4 = div %3 %1\nstore y [m:8, n:1] = %4",
        "store y [m:8, n:1] = %0",
    ),
    "drop_zero": ("%1 = const 0.0 : f32\n%2 = sub %0 %1\nstore y [m:8, n:1] = %2", "store y [m:8, n:1] = %0"),
    "difference_from_itself": (
        "%1 = mul %0 %0\n%2 = sub %1 %1\nstore y [m:8, n:1] = %2",
        """%1 = mul %0 %0
           %2 = const 0.0 : f32
           %3 = mul %1 %2
           %4 = add %3 %2
           store y [m:8, n:1] = %4""",
    ),
    "drop_negations": ("%1 = neg %0\n%2 = neg %1\nstore y [m:8, n:1] = %2", "store y [m:8, n:1] = %0"),
    "drop_choice": (
        """%1 = isnan %0
           %2 = where %1 %0 %0
           %3 = const False : bool
           %4 = neg %0
           %5 = where %3 %4 %2
           store y [m:8, n:1] = %5""",
        "store y [m:8, n:1] = %0",
    ),
    "fold_constants": (
        "%1 = const 1.0 : f32\n%2 = const 3.0 : f32\n%3 = div %1 %2\n%4 = mul %0 %3\nstore y [m:8, n:1] = %4",
        "%1 = const 0.3333333432674408 : f32\n%2 = mul %0 %1\nstore y [m:8, n:1] = %2",
    ),
    "sum_of_one_hot": (
        """%1 = load t [m:1]
           %2 = index (n) : i64
           %3 = eq %2 %1
           %4 = const 0.5 : f32
           %5 = const 0.0 : f32
           %6 = where %3 %4 %5
           %7 = reduce sum(%6) over n
           %8 = result %7.0
           store r [m:1] = %8""",
        """%0 = load t [m:1]
           %1 = const 0.5 : f32
           %2 = const 0.0 : f32
           %3 = const 0 : i64
           %4 = const 8 : i64
           %5 = ge %0 %3
           %6 = lt %0 %4
           %7 = and %5 %6
           %8 = where %7 %1 %2
           store r [m:1] = %8""",
    ),
    "inline_single_element": (
        "%1 = reduce logsumexp(%0) over\n%2 = result %1.0\nstore y [m:8, n:1] = %2",
        "store y [m:8, n:1] = %0",
    ),
}


@pytest.mark.parametrize("rule", GOLDEN)
def test_each_rule_rewrites_as_expected(rule: str) -> None:
    before, after = GOLDEN[rule]
    program = small("%0 = load x [m:8, n:1]\n" + before)
    simplified = simplify(verify(program, "writing"))
    expected = lines(after)
    if "%0" in after and not expected[0].startswith("%0 ="):
        expected = ["%0 = load x [m:8, n:1]", *expected]
    assert nodes_of(verify(simplified, "simplify")) == expected
    inputs = small_inputs(3)
    inputs["t"][0] = -100  # not a valid index: a sum without a hit is 0
    actual, answer = (evaluate(p, inputs, {"s0": 3}) for p in (simplified, program))
    torch.testing.assert_close(actual, answer, equal_nan=True, rtol=1e-6, atol=0)


def test_every_rule_has_a_golden() -> None:
    assert {rule.__name__ for rule in (*EXACT, elide_rounding)} == set(GOLDEN)


KEPT = {
    "a stored rounding": "%1 = cast bf16 %0\n%2 = cast f32 %1\n%3 = neg %2\nstore y [m:8, n:1] = %3\nstore b [m:8, n:1] = %1",
    "a quantisation": "%1 = cast f8e4m3 %0\n%2 = cast f32 %1\nstore y [m:8, n:1] = %2",
    "adding 0.0": "%1 = const 0.0 : f32\n%2 = add %0 %1\nstore y [m:8, n:1] = %2",
    "a symbolic factor": "%1 = const 1.0 * s0 : f32\n%2 = mul %0 %1\nstore y [m:8, n:1] = %2",
    "a chain of factors": "%1 = const 3.0 : f32\n%2 = mul %0 %1\n%3 = mul %2 %1\nstore y [m:8, n:1] = %3",
    "narrowing an integer": "%1 = cast i64 %0\n%2 = cast f32 %1\nstore y [m:8, n:1] = %2",
    "a division of integers by zero": (
        "%1 = const 7 : i64\n%2 = const 0 : i64\n%3 = floordiv %1 %2\n%4 = rem %1 %2\n%5 = add %3 %4\n%6 = cast f32 %5\n"
        "%7 = add %0 %6\nstore y [m:8, n:1] = %7"
    ),
    "a hit on a varying value": (
        "%1 = index (n) : i64\n%2 = load t [m:1]\n%3 = eq %1 %2\n%4 = const 0.0 : f32\n%5 = where %3 %0 %4\n"
        "%6 = reduce sum(%5) over n\n%7 = result %6.0\nstore r [m:1] = %7"
    ),
}


@pytest.mark.parametrize("what", KEPT)
def test_what_simplify_must_keep(what: str) -> None:
    program = verify(small("%0 = load x [m:8, n:1]\n" + KEPT[what]), "writing")
    assert simplify(program) == program


def test_a_rounding_stored_under_another_name_is_kept() -> None:
    """%3 equals %1, so %1 is stored, and the user of %2 must read the rounded value."""
    program = small("""
      %0 = load x [m:8, n:1]
      %1 = cast bf16 %0
      %2 = cast f32 %1
      %3 = cast bf16 %2
      %4 = neg %2
      store b [m:8, n:1] = %3
      store y [m:8, n:1] = %4
    """)
    expected = """
      %0 = load x [m:8, n:1]
      %1 = cast bf16 %0
      %2 = cast f32 %1
      %3 = neg %2
      store b [m:8, n:1] = %1
      store y [m:8, n:1] = %3
    """
    assert nodes_of(simplify(program)) == lines(expected)


SOFTMAX = """
  %0 = load x [m:8, n:1]                    # a.py:1 top
  %1 = reduce max(%0) over n                # a.py:1 top
  %2 = result %1.0
  %3 = sub %0 %2
  %4 = exp %3
  %5 = reduce sum(%4) over n                # a.py:2 total
  %6 = result %5.0
  %7 = div %4 %6
  store y [m:8, n:1] = %7
"""


def test_online_softmax() -> None:
    expected = """
      %0 = load x [m:8, n:1]                    # a.py:1 top
      %1 = reduce logsumexp(%0) over n          # a.py:1 top
      %2 = result %1.0
      %3 = sub %0 %2
      %4 = exp %3
      %5 = result %1.1
      %6 = div %4 %5
      store y [m:8, n:1] = %6
    """
    assert nodes_of(online_softmax(small(SOFTMAX))) == lines(expected)


def test_online_softmax_wants_the_maximum_of_the_same_value_over_the_same_axes() -> None:
    other_axes = small(SOFTMAX.replace("reduce max(%0) over n", "reduce max(%0) over m"))
    other_value = small(SOFTMAX.replace("%3 = sub %0 %2", "%3 = sub %2 %0"))
    of_another = small("""
      %0 = load x [m:8, n:1]
      %1 = neg %0
      %2 = reduce max(%1) over n
      %3 = result %2.0
      %4 = sub %0 %3
      %5 = exp %4
      %6 = reduce sum(%5) over n
      %7 = result %6.0
      store r [m:1] = %7
    """)
    for program in (other_axes, other_value, of_another):
        assert online_softmax(program) == program


@pytest.mark.parametrize("row", [-math.inf, math.inf, math.nan], ids=str)
def test_softmax_forms_agree_on_rows_of_infinities_and_nans(row: float) -> None:
    program, inputs = small(SOFTMAX), small_inputs(3)
    inputs["x"][1] = row
    expected = evaluate(program, inputs, {"s0": 3})
    assert expected["y"][1].isnan().all()
    assert expected["y"][0].isfinite().all()
    for form in (online_softmax(program), two_pass(online_softmax(program))):
        torch.testing.assert_close(evaluate(form, inputs, {"s0": 3})["y"], expected["y"], equal_nan=True)


def test_two_pass_variance() -> None:
    program = small("""
      %0 = load x [m:8, n:1]
      %1 = reduce welford(%0) over m            # a.py:1 var
      %2 = result %1.1
      store r [n:1] = %2
    """)
    expected = """
      %0 = load x [m:8, n:1]
      %1 = const 1.0 * s0 : f32                 # a.py:1 var
      %2 = const 1.0 : f32                      # a.py:1 var
      %3 = maximum %1 %2                        # a.py:1 var
      %4 = reduce sum(%0) over m                # a.py:1 var
      %5 = result %4.0                          # a.py:1 var
      %6 = div %5 %3                            # a.py:1 var
      %7 = sub %0 %6                            # a.py:1 var
      %8 = mul %7 %7                            # a.py:1 var
      %9 = reduce sum(%8) over m                # a.py:1 var
      %10 = result %9.0                         # a.py:1 var
      store r [n:1] = %10
    """
    assert nodes_of(two_pass(program)) == lines(expected)


def test_two_pass_leaves_split_reductions_alone() -> None:
    program = small("%0 = load x [m:8, n:1]\n%1 = reduce welford.partial(%0) over n\n%2 = result %1.1\nstore r [m:1] = %2")
    assert two_pass(program) == program


def test_a_scaled_one_hot_and_a_constant_need_no_reduction() -> None:
    """The row sums in the gradient of a smoothed cross-entropy: one class has a larger weight than all others."""
    before = small(
        """%0 = load x [m:8, n:1]
           %1 = load t [m:1]
           %2 = index (n) : i64
           %3 = eq %2 %1
           %4 = const -1.0 : f32
           %5 = const 0.0 : f32
           %6 = where %3 %4 %5
           %7 = cast f32 %1
           %8 = mul %6 %7
           %9 = const 0.25 : f32
           %10 = add %9 %8
           %11 = reduce sum(%10) over n
           %12 = result %11.0
           store r [m:1] = %12"""
    )
    after = simplify(before)
    assert not list(after.of(Reduce))
    inputs = small_inputs(5)
    for name, expected in evaluate(before, inputs, {"s0": 5}).items():
        torch.testing.assert_close(evaluate(after, inputs, {"s0": 5})[name], expected, equal_nan=True)


# ---- special values --------------------------------------------------------------------------------------------------------

EDGES = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 1e-42, 3e38, -2.5)
TEMPTING = (
    lambda x: x * 1.0,
    lambda x: 1.0 * x,
    lambda x: x / 1.0,
    lambda x: x * 0.0,
    lambda x: x * -0.0,
    lambda x: x * -1.0,
    lambda x: x + 0.0,
    lambda x: 0.0 + x,
    lambda x: x + -0.0,
    lambda x: x - 0.0,
    lambda x: x - -0.0,
    lambda x: 0.0 - x,
    lambda x: x - x,
    lambda x: x / x,
    lambda x: (x == x) * x,
    lambda x: 0.0 / x,
    lambda x: x / 0.0,
    lambda x: x / -0.0,
    lambda x: x / math.inf,
    lambda x: x / 3e38,
    lambda x: x / 1e-42,
    lambda x: x / 2.0,
    lambda x: torch.neg(-x),
    lambda x: x.double().float(),
    lambda x: torch.where(x.isnan(), x, x),
    lambda x: x * -torch.zeros_like(x),
    lambda x: x * (torch.full_like(x, 0.1) == torch.full_like(x, 0.10000000149011612)),
)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())


@pytest.mark.parametrize("function", TEMPTING)
def test_rules_hold_for_infinities_nans_and_zeros_of_both_signs(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.tensor(EDGES)
    program = capture(function, (x,), dynamic=False).program
    expected, found = (next(iter(evaluate(p, {"x": x}, {}).values())) for p in (program, simplify(program)))
    assert same_bits(found, expected), (found, expected)


@pytest.mark.parametrize("added", ["", "\n%9 = add %8 %0"], ids=["scaled", "and a constant"])
def test_the_one_hot_rule_holds_for_infinities_and_nans(added: str) -> None:
    program = small(
        f"""%0 = load x [m:8]
           %1 = load t [m:1]
           %2 = index (n) : i64
           %3 = eq %2 %1
           %4 = const 1.5 : f32
           %5 = const 0.0 : f32
           %6 = where %3 %4 %5
           %7 = load x [m:8] + 1
           %8 = mul %6 %7{added}
           %{10 if added else 9} = reduce sum(%{9 if added else 8}) over n
           %{11 if added else 10} = result %{10 if added else 9}.0
           store r [m:1] = %{11 if added else 10}"""
    )
    simple = simplify(program)
    assert not list(simple.of(Reduce))
    c, r = torch.meshgrid(torch.tensor((0.0, 2.0, math.inf, -math.inf, math.nan)), torch.tensor(EDGES), indexing="ij")
    x = torch.zeros(c.numel(), 8)
    x[:, 0], x[:, 1] = c.reshape(-1), r.reshape(-1)
    for t in (0, 7, 8, -1):
        inputs = {"x": x, "h": x, "t": torch.full((len(x),), t)}
        expected, found = (evaluate(p, inputs, {"s0": len(x)})["r"] for p in (program, simple))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)


def test_the_one_hot_rule_holds_for_an_axis_of_one_element() -> None:
    program = parse(
        "program p; axis m = 2; axis n = 1; input t: i64 [2] strides [1]; input x: f32 [2] strides [1]; "
        "output r: f32 [2] strides [1]; %0 = index (n) : i64; %1 = load t [m:1]; %2 = eq %0 %1; %3 = const 1.5 : f32; "
        "%4 = const 0.0 : f32; %5 = where %2 %3 %4; %6 = load x [m:1]; %7 = mul %5 %6; %8 = reduce sum(%7) over n; "
        "%9 = result %8.0; store r [m:1] = %9"
    )
    inputs = {"t": torch.tensor([0, 0]), "x": torch.tensor([math.inf, 2.0])}
    for each in (program, simplify(program)):
        assert evaluate(each, inputs, {})["r"].tolist() == [math.inf, 3.0]


def test_a_one_hot_sum_over_one_class_is_right() -> None:
    """Where there is nothing but the hit, no other position adds 0 * r."""

    def function(t: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return (torch.where(torch.arange(1)[None] == t[:, None], 1.0, 0.0) * r[:, None]).sum(1)

    t, r = torch.tensor([0, 0, 1]), torch.tensor([math.inf, 2.0, math.inf])
    torch.testing.assert_close(onepass.fuse(function)(t, r), function(t, r), equal_nan=True)
