"""Text, verification and the oracle, on handwritten and random Programs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from onepass.errors import BadArgument, IllegalProgram, ParseError
from onepass.ir.expr import DTYPES, F32, I64
from onepass.ir.oracle import evaluate, evaluate_into
from onepass.ir.program import Axis, Buffer, Const, Gather, Index, Load, Node, Op, Program, Reduce, Result, Store
from onepass.ir.size import mul, sym
from onepass.ir.specialize import substitute
from onepass.ir.text import parse, show
from onepass.ir.verify import RULES, verify
from tests.support.random_programs import Case, programs, small, small_inputs

BF16 = DTYPES["bf16"]
ROWS = sym("s0")

RMS_NORM = """\
program rms_norm
  axis m = s0
  axis n = 4096
  input x: bf16 [s0, 4096] strides [4096, 1]
  input w: bf16 [4096] strides [1]
  output y: bf16 [s0, 4096] strides [4096, 1]
  %0 = load x [m:4096, n:1]                 # norm.py:12 x = x.float()
  %1 = cast f32 %0
  %2 = mul %1 %1
  %3 = reduce sum(%2) over n                # norm.py:13 x.pow(2).mean(-1)
  %4 = result %3.0
  %5 = const 1.0 * s0 : f32
  %6 = div %4 %5
  %7 = const 1e-06 : f32
  %8 = add %6 %7
  %9 = rsqrt %8
  %10 = mul %1 %9
  %11 = load w [n:1]
  %12 = cast f32 %11
  %13 = mul %10 %12
  %14 = cast bf16 %13
  store y [m:4096, n:1] = %14
"""

# Text


def test_text_of_a_hand_written_program() -> None:
    assert show(parse(RMS_NORM)) == RMS_NORM
    assert str(parse(RMS_NORM)) == RMS_NORM


def test_sources_are_kept_and_not_compared() -> None:
    program = parse(RMS_NORM)
    assert program.nodes[3].src == "norm.py:13 x.pow(2).mean(-1)"
    assert parse("\n".join(line.partition("#")[0] for line in RMS_NORM.splitlines())) == program


@settings(max_examples=150, deadline=None)
@given(programs())
def test_text_round_trip(case: Case) -> None:
    assert parse(show(case.program)) == case.program


def every_node() -> Program:
    """A Program with every syntax: literals, scales, offsets, indexed loads, several results, several axes, no dimensions."""
    nodes: tuple[Node, ...] = (
        Load("x", (("m", mul(16, ROWS)), ("n", 1)), offset=mul(3, ROWS)),
        Index(("m", "n")),
        Load("x", (("m", 16),), 3, (Gather(1, 1, 4096), Gather(1, ROWS, mul(2, ROWS)))),
        Reduce("argmax", (0, 1), ("n", "m")),
        Result(3, 0),
        Reduce("welford.partial", (0,), ()),
        Result(5, 2),
        *(Const(v, F32) for v in (0.1, 1e-300, -0.0, math.inf, -math.inf, math.nan, 1.0 + 2**-52)),
        Const(True, DTYPES["bool"]),
        Const(-7, I64),
        Const(2.5, F32, mul(6, mul(ROWS, sym("s1")))),
        Const(1, F32),
        Store("a", 4, ()),
        Store("y", 6, (("m", 16), ("n", 1)), 5),
    )
    buffers = (
        Buffer("x", F32, "input", (ROWS, 16), (16, 1)),
        Buffer("a", I64, "output"),
        Buffer("y", F32, "temp", (ROWS, 16), (16, 1)),
    )
    return Program("every node", (Axis("m", ROWS), Axis("n", 16)), buffers, nodes)


def test_every_spelling_round_trips() -> None:
    program = every_node()
    again = parse(show(program))
    assert again == program
    literals = [n.value for n in program.nodes if isinstance(n, Const)]
    assert [repr(n.value) for n in again.nodes if isinstance(n, Const)] == [repr(v) for v in literals]


@pytest.mark.parametrize(
    ("body", "line", "detail"),
    [
        ("%0 = load x [m:8, n:1]\n%1 = frobnicate %0", 11, "no op is called frobnicate"),
        ("%0 = load x [m:8, n:1]\n%2 = neg %0", 11, "the next value is %1"),
        ("%0 = load q [m:8]", 10, "no buffer is called q"),
        ("%0 = load x m:8", 10, "expected `load"),
        ("%0 = load x [m:8.5]", 10, "8.5 is not a size"),
        ("%0 = load x [m:8] gather(t)", 10, "expected `load"),
        ("%0 = const one : f32", 10, "one is not a number"),
        ("%0 = const 1 : f33", 10, "no dtype is called f33"),
        ("%0 = const 1.0 : f32\n%1 = add %0", 11, "add takes 2 operands"),
        ("%0 = const 1.0 : f32\n%1 = neg %1", 11, "%1 is not an earlier value"),
        ("%0 = const 1.0 : f32\n%1 = reduce median(%0) over n", 11, "no reduction is called median"),
        ("%0 = const 1.0 : f32\n%1 = result %0.0", 11, "%0 is not a reduce"),
        ("%0 = load x [m:8, n:1]\n%1 = reduce sum(%0) over n\n%2 = result %1.1", 12, "sum has 1 results"),
        ("store y [m:8, n:1] = %0", 10, "%0 is not an earlier value"),
        ("input z: f32", 10, "expected `ROLE"),
        ("nonsense", 10, "expected `axis`"),
    ],
)
def test_bad_text_is_refused_with_its_line(body: str, line: int, detail: str) -> None:
    with pytest.raises(ParseError) as caught:
        small(body)
    assert caught.value.fields["line"] == line
    assert detail in str(caught.value.fields["detail"])


def test_text_without_a_program_is_refused() -> None:
    for text in ("", "# nothing\n", "axis m = 1\n"):
        with pytest.raises(ParseError):
            parse(text)


# Verification

GOOD = small(
    """
  %0 = load x [m:8, n:1]
  %1 = load t [m:1]
  %2 = load x [m:8] gather(%1 * 1 < 8)
  %3 = sub %0 %2
  %4 = reduce sum(%3) over n
  %5 = result %4.0
  %6 = const 0.0 : f32
  %7 = gt %0 %6
  %8 = where %7 %0 %5
  %9 = load h [m:8, n:1]
  %10 = index (n) : i64
  store y [m:8, n:1] = %8
  store r [m:1] = %5
  store b [m:8, n:1] = %9
"""
)


def with_node(at: int, node: Node) -> Program:
    return replace(GOOD, nodes=(*GOOD.nodes[:at], node, *GOOD.nodes[at + 1 :]))


def with_last(*nodes: Node) -> Program:
    return replace(GOOD, nodes=(*GOOD.nodes, *nodes))


def resized(name: str, extent: int) -> tuple[Buffer, ...]:
    return tuple(replace(b, shape=(extent,)) if b.name == name else b for b in GOOD.buffers)


AT = len(GOOD.nodes)
BROKEN = [
    ("names_are_unique", replace(GOOD, axes=(*GOOD.axes, Axis("m", 3)))),
    ("names_are_unique", replace(GOOD, buffers=(*GOOD.buffers, Buffer("x", F32, "temp")))),
    ("buffers_are_sound", replace(GOOD, buffers=(*GOOD.buffers, Buffer("z", F32, "scratch")))),
    ("buffers_are_sound", replace(GOOD, buffers=(*GOOD.buffers, Buffer("z", F32, "temp", (2,), ())))),
    ("operands_come_first", with_node(3, Op("sub", (0, 7), F32))),
    ("operands_come_first", with_node(3, Op("sub", (3, 0), F32))),
    ("operands_come_first", with_node(3, Op("sub", (0, -1), F32))),
    ("operands_come_first", with_last(Op("neg", (AT - 1,), BF16))),
    ("axes_are_known", with_node(4, Reduce("sum", (3,), ("k",)))),
    ("axes_are_known", with_node(4, Reduce("sum", (3,), ("n", "n")))),
    ("axes_are_known", with_node(0, Load("x", (("m", 8), ("n", 0))))),
    ("axes_are_known", with_node(10, Index(("k",)))),
    ("buffers_are_known", with_node(0, Load("q", (("m", 8), ("n", 1))))),
    ("tables_are_known", with_node(3, Op("minus", (0, 2), F32))),
    ("tables_are_known", with_node(3, Op("sub", (0,), F32))),
    ("tables_are_known", with_node(4, Reduce("median", (3,), ("n",)))),
    ("tables_are_known", with_node(4, Reduce("argmax", (3,), ("n",)))),
    ("reductions_are_read_by_results", with_last(Op("neg", (4,), F32))),
    ("reductions_are_read_by_results", with_node(5, Result(4, 1))),
    ("reductions_are_read_by_results", with_node(5, Result(3, 0))),
    ("loads_read_what_exists", with_last(Load("y", (("m", 8),)))),
    (
        "loads_read_what_exists",
        replace(with_last(Load("z", ()), Store("z", AT, ())), buffers=(*GOOD.buffers, Buffer("z", F32, "temp"))),
    ),
    ("loads_read_what_exists", with_node(2, Load("x", (("m", 8),), 0, (Gather(0, 1, 8),)))),
    ("constants_are_plain", with_last(Const(1.0, BF16))),
    ("constants_are_plain", with_last(Const(float("nan"), F32))),
    ("op_types_agree", with_node(3, Op("sub", (0, 1), F32))),
    ("op_types_agree", with_last(Op("add", (9, 9), BF16))),
    ("op_types_agree", with_last(Op("exp", (1,), I64))),
    ("op_types_agree", with_last(Op("and", (0, 0), F32))),
    ("op_types_agree", with_last(Op("add", (7, 7), DTYPES["bool"]))),
    ("op_types_agree", with_last(Op("floordiv", (0, 0), F32))),
    ("op_types_agree", with_node(8, Op("where", (0, 0, 5), F32))),
    ("op_types_agree", with_last(Op("neg", (0,), I64))),
    ("reduction_types_agree", with_last(Reduce("sum", (9,), ("n",)))),
    ("reduction_types_agree", with_last(Reduce("sum", (7,), ("n",)))),
    ("reduction_types_agree", with_last(Reduce("welford", (1,), ("n",)))),
    ("reduction_types_agree", with_last(Reduce("logsumexp", (1,), ("n",)))),
    ("reduction_types_agree", with_last(Reduce("argmax", (0, 0), ("n",)))),
    ("reduction_types_agree", with_last(Reduce("any.merge", (7,), ("n",)))),
    ("stores_have_the_buffers_type", with_last(Store("b", 0, (("m", 8), ("n", 1))))),
    ("stores_have_the_buffers_type", with_last(Store("x", 0, (("m", 8), ("n", 1))))),
    ("stores_write_each_address_once", with_last(Store("r", 0, (("m", 1),)))),
    ("stores_write_each_address_once", replace(with_last(Store("y", 0, (("m", 1), ("n", 1)))), axes=(Axis("m", 4), Axis("n", 8)))),
    ("stores_stay_inside", replace(GOOD, axes=(Axis("m", 4), Axis("n", 8)), buffers=resized("r", 0))),
    ("stores_stay_inside", replace(GOOD, axes=(Axis("m", 4), Axis("n", 8)), buffers=resized("r", 3))),
]


def test_the_good_program_is_legal() -> None:
    assert verify(GOOD, "writing") is GOOD


@pytest.mark.parametrize(("rule", "broken"), BROKEN, ids=[f"{i}-{name}" for i, (name, _) in enumerate(BROKEN)])
def test_broken_programs_are_refused_by_their_rule(rule: str, broken: Program) -> None:
    first = next(r.__name__ for r in RULES if any(True for _ in r(broken)))
    assert first == rule
    with pytest.raises(IllegalProgram, match="invalid after breaking: small: "):
        verify(broken, "breaking")


def test_every_rule_has_a_program_that_breaks_it() -> None:
    assert {name for name, _ in BROKEN} == {rule.__name__ for rule in RULES}


@settings(max_examples=150, deadline=None)
@given(programs())
def test_random_programs_are_legal(case: Case) -> None:
    verify(case.program, "making")


# The oracle


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[0] + 1e-6) * w.double()


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_oracle_computes_in_float64(rows: int) -> None:
    x, w = torch.randn(rows, 4096).bfloat16(), torch.randn(4096).bfloat16()
    out = evaluate(parse(RMS_NORM), {"x": x, "w": w}, {"s0": rows})
    assert out.keys() == {"y"}
    torch.testing.assert_close(out["y"], rms_norm(x, w), rtol=1e-12, atol=1e-12)


def test_oracle_gathers() -> None:
    inputs = small_inputs(5)
    out = evaluate(GOOD, inputs, {"s0": 5})
    x, t = inputs["x"].double(), inputs["t"]
    torch.testing.assert_close(out["r"], (x - x.gather(1, t[:, None])).sum(1))
    assert out["b"].dtype == torch.float64
    with pytest.raises(BadArgument, match="outside"):
        evaluate(GOOD, {**inputs, "t": t + 8}, {"s0": 5})


def test_oracle_reads_views_and_fills_slices() -> None:
    """A transposed input with an offset; two Stores into the halves of one transposed output."""
    program = parse("""\
program halves
  axis m = 3
  axis n = 4
  input x: i64 [3, 4] strides [1, 3]
  output y: i64 [3, 8] strides [1, 3]
  %0 = load x [m:1, n:3]
  %1 = neg %0
  store y [m:1, n:3] = %0
  store y [m:1, n:3] + 12 = %1
""")
    x = torch.arange(13)[1:].reshape(4, 3).t()
    y = evaluate(verify(program, "writing"), {"x": x}, {})["y"]
    assert y.stride() == (1, 3)
    assert torch.equal(y, torch.cat([x, -x], 1))


def test_oracle_reads_back_temporaries() -> None:
    program = parse("""\
program through_memory
  axis m = 2
  axis n = 3
  input x: f32 [2, 3] strides [3, 1]
  temp p: f32 [2] strides [1]
  output y: f32 [] strides []
  %0 = load x [m:3, n:1]
  %1 = reduce sum.partial(%0) over n
  %2 = result %1.0
  store p [m:1] = %2
  %4 = load p [m:1]
  %5 = reduce sum.merge(%4) over m
  %6 = result %5.0
  store y [] = %6
""")
    x = torch.randn(2, 3)
    out = evaluate(verify(program, "writing"), {"x": x}, {})
    torch.testing.assert_close(out, {"y": x.double().sum()})


def test_oracle_repeats_a_value_along_a_folded_axis() -> None:
    program = small("%0 = load t [m:1]\n%1 = cast f32 %0\n%2 = reduce sum(%1) over n\n%3 = result %2.0\nstore r [m:1] = %3\n")
    inputs = small_inputs(4)
    torch.testing.assert_close(evaluate(program, inputs, {"s0": 4})["r"], inputs["t"].double() * 8)


def test_oracle_counts_row_major_in_the_order_named() -> None:
    program = parse("""\
program count
  axis m = 2
  axis n = 3
  output a: i64 [2, 3] strides [3, 1]
  output b: i64 [2, 3] strides [3, 1]
  %0 = index (m, n) : i64
  %1 = index (n, m) : i64
  store a [m:3, n:1] = %0
  store b [m:3, n:1] = %1
""")
    out = evaluate(program, {}, {})
    assert out["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert out["b"].tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (4, 0), (0, 0)])
def test_oracle_of_empty_tensors(rows: int, columns: int) -> None:
    program = parse("""\
program nothing
  axis m = s0
  axis n = s1
  input x: f32 [s0, s1] strides [s1, 1]
  output y: f32 [s0] strides [1]
  output z: bool [s1] strides [1]
  %0 = load x [m:s1, n:1]
  %1 = reduce sum(%0) over n
  %2 = result %1.0
  store y [m:1] = %2
  %4 = reduce any(%0) over m
  %5 = result %4.0
  store z [n:1] = %5
""")
    x = torch.ones(rows, columns)
    out = evaluate(verify(program, "writing"), {"x": x}, {"s0": rows, "s1": columns})
    assert torch.equal(out["y"], torch.zeros(rows, dtype=torch.float64))
    assert torch.equal(out["z"], torch.zeros(columns, dtype=torch.bool))


def test_the_op_by_op_fallback_rounds_where_casts_do() -> None:
    """It uses eager's types and roundings, whereas the oracle computes in float64 without rounding."""
    program = small("%0 = load x [m:8, n:1]\n%1 = cast bf16 %0\n%2 = cast f32 %1\nstore y [m:8, n:1] = %2")
    x, y = torch.full((2, 8), 1 + 2.0**-12), torch.empty(2, 8)
    inputs = {**small_inputs(2), "x": x}
    evaluate_into(program, {**inputs, "y": y}, {"s0": 2})
    assert (y == 1).all() and (evaluate(program, inputs, {"s0": 2})["y"] == 1 + 2.0**-12).all()


# Sizes


def test_every_symbol_that_a_program_mentions_is_listed() -> None:
    """Each symbol occurs in one place, and all places differ."""
    s = [sym(f"s{k}") for k in range(10)]
    nodes: tuple[Node, ...] = (
        Index((), I64),
        Load("x", (("m", s[4]),), s[3], (Gather(0, s[5], s[6]),)),
        Const(1.0, F32, s[9]),
        Store("y", 1, (("m", s[7]),), s[8]),
    )
    buffers = (Buffer("x", F32, "input", (s[1],), (s[2],)), Buffer("y", F32, "output"))
    program = Program("p", (Axis("m", s[0]),), buffers, nodes)
    assert program.symbols == tuple(f"s{k}" for k in range(10))
    assert substitute(program, {f"s{k}": k + 2 for k in range(10)}).symbols == () and substitute(program, {}) == program


def test_the_order_of_symbols_does_not_matter() -> None:
    assert mul(sym("s0"), sym("s1")) == mul(sym("s1"), sym("s0"))


@settings(max_examples=100, deadline=None)
@given(programs())
def test_substituting_numbers_for_symbols_changes_no_result(case: Case) -> None:
    fixed, inputs = verify(substitute(case.program, case.bindings), "fix"), case.make_inputs(0)
    assert not fixed.symbols and fixed.is_empty({}) == case.program.is_empty(case.bindings)
    expected = evaluate(case.program, inputs, case.bindings)
    for name, found in evaluate(fixed, inputs, {}).items():
        torch.testing.assert_close(found, expected[name], equal_nan=True, rtol=0, atol=0)
