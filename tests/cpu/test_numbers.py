"""Values at the limits of their types match eager: smallest integers, infinities, NaN, -0.0, numbers out of range."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.capture.function.trace import capture
from onepass.device import device
from onepass.errors import IntegerDivisionByZero, NumberOutOfRange, UnsupportedOp
from onepass.ir.criterion import judge
from onepass.ir.oracle import evaluate
from onepass.ir.program import Op
from onepass.ir.text import parse, show
from onepass.pipeline import interpret, optimize
from onepass.plan.partition import plan

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 3.0, -3.5, 0.5, 1e-7, -41.0, 60000.0)


def edges(dtype: torch.dtype) -> Tensor:
    """Integers at the ends of a type and around 0."""
    info = torch.iinfo(dtype)
    found = {info.min, info.min + 1, info.max - 1, info.max, *range(max(info.min, -4), 5), info.max // 3}
    return torch.tensor(sorted(found), dtype=dtype)


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of values."""
    a, b = torch.meshgrid(values, values, indexing="ij")
    return a.contiguous(), b.contiguous()


def check_same(function: Callable[..., tuple[Tensor, ...]], *args: Tensor) -> None:
    """Check that a fused function matches eager: type, shape, NaNs, and the sign of zeros."""
    for k, (actual, eager) in enumerate(zip(onepass.fuse(function)(*args), function(*args), strict=True)):
        assert (actual.dtype, actual.shape) == (eager.dtype, eager.shape), k
        same = actual == eager
        if actual.is_floating_point():
            same = same & (actual.signbit() == eager.signbit()) | actual.isnan() & eager.isnan()
        odd = [tuple(t.expand(actual.shape)[~same][0].item() for t in args)] if not same.all() and actual.dim() else []
        assert same.all(), f"output {k}: {actual[~same][:3].tolist()}, eager {eager[~same][:3].tolist()}, first of {odd}"


# ---- division of integers --------------------------------------------------------------------------------------------------------


def divisions(a: Tensor, b: Tensor | int) -> tuple[Tensor, ...]:
    return a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"), torch.div(a, b, rounding_mode="floor")


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_divided_by_integers(dtype: torch.dtype) -> None:
    a, b = pairs(edges(dtype))
    kept = b != 0
    if dtype in ENDS:
        kept &= (b != -1) | (a != torch.iinfo(dtype).min)
    check_same(divisions, a[kept], b[kept])


ENDS = (torch.int32, torch.int64)  # for these, eager's division of the smallest one by -1 crashes the process


@pytest.mark.parametrize("dtype", ENDS, ids=str)
def test_the_least_integer_divided_by_minus_one_wraps_around(dtype: torch.dtype) -> None:
    a, b = torch.tensor([torch.iinfo(dtype).min], dtype=dtype), torch.tensor([-1], dtype=dtype)
    found = (*onepass.fuse(divisions)(a, b), *onepass.fuse(lambda a: divisions(a, -1))(a))
    assert torch.equal(torch.cat(found), torch.cat([a, 0 * a, 0 * a, a, a] * 2))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_divided_by_numbers(dtype: torch.dtype) -> None:
    by = (1, 3, 7) if dtype == torch.uint8 else (1, 3, -1, -3)

    def function(a: Tensor) -> tuple[Tensor, ...]:
        return tuple(out for n in by for out in (a // n, a % n, torch.fmod(a, n)))

    a = edges(dtype)
    check_same(function, a[1:] if dtype in ENDS else a)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_divided_by_zero_match_the_card_without_a_division_by_zero(dtype: torch.dtype) -> None:
    a = edges(dtype)
    b = torch.zeros_like(a)
    quotient, rem, guarded = onepass.fuse(
        lambda a, b: (torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b), torch.where(b == 0, 7, a // b))
    )(a, b)
    assert torch.equal(quotient, ~b) and torch.equal(rem, a) and torch.equal(guarded, b + 7)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_the_oracle_divides_integers_as_kernels_do(dtype: torch.dtype) -> None:
    """Including division by 0 and by -1, which crash eager."""
    given = pairs(edges(dtype))
    captured = capture(divisions, given)
    exact = captured.result(evaluate(captured.program, captured.tensors(given), captured.bind(given) or {}), given)
    for actual, reference in zip(onepass.fuse(divisions)(*given), exact, strict=True):
        assert torch.equal(actual, reference)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a // 0,
        lambda a: a % 0,
        lambda a: torch.fmod(a, 0),
        lambda a: a.sum(-1) // 0,
        lambda a: torch.div(a, 0, rounding_mode="trunc"),
        lambda a: a.to(torch.int8) // 256,
    ],
)
def test_a_division_of_integers_by_the_number_0_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(IntegerDivisionByZero):
        onepass.fuse(function)(torch.arange(6).reshape(2, 3))


# ---- division of floats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_divided_by_floats(dtype: torch.dtype) -> None:
    check_same(divisions, *pairs(torch.tensor(SPECIAL, dtype=dtype)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_divided_by_numbers(dtype: torch.dtype) -> None:
    by = (3.0, -2.5, math.inf, -math.inf, 0.0, -0.0)

    def function(a: Tensor) -> tuple[Tensor, ...]:
        return tuple(out for n in by for out in (a // n, a % n, torch.fmod(a, n)))

    check_same(function, torch.tensor(SPECIAL, dtype=dtype))


# ---- numbers that a type does not hold -------------------------------------------------------------------------------------------


def arithmetic(n: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda x: (
        x + n,
        x - n,
        n - x,
        x * n,
        x & n,
        x | n,
        x ^ n,
        x == n,
        x != n,
        x < n,
        x <= n,
        x > n,
        x >= n,
        x % n,
        x // n,
        x / n,
    )


@pytest.mark.parametrize("number", [300, -1, -129, 2**31, -(2**40) - 5, 2**63 - 1, 70000])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_numbers_wrap_around_in_arithmetic_and_comparisons(dtype: torch.dtype, number: int) -> None:
    wrapped = torch.zeros((), dtype=dtype) + number
    if wrapped and not (dtype in ENDS and wrapped == -1):
        check_same(arithmetic(number), edges(dtype))


def test_zero_dim_tensors_wrap_around_too() -> None:
    x, wide = edges(torch.int8), torch.tensor(300)
    check_same(lambda x, n: (x + n, x == n, x > n, torch.maximum(x, n), x // n, torch.where(x > 0, x, n)), x, wide)


FILLS = {
    "full_like": lambda x, n: torch.full_like(x, n),
    "new_full": lambda x, n: x.new_full((2, 3), n) + x,
    "masked_fill": lambda x, n: x.masked_fill(x > 1, n),
    "where": lambda x, n: torch.where(x > 1, x, n),
    "clamp": lambda x, n: x.clamp(max=n),
    "clamp_min": lambda x, n: x.clamp_min(n),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "value": lambda x, n: torch.addcmul(x, x, x, value=n),
    "pad": lambda x, n: torch.nn.functional.pad(x, (1, 0), value=n),
    "scatter": lambda x, n: x.scatter(1, torch.zeros_like(x[:, :1], dtype=torch.int64), n),
}


@pytest.mark.parametrize("name", FILLS)
def test_fills_and_bounds_are_refused_where_eager_refuses_them(name: str) -> None:
    """Float fills are infinite if a narrow type cannot represent them, as in torch.where."""
    fill = FILLS[name]
    for dtype, number in (
        (torch.int8, 300),
        (torch.uint8, -256),
        (torch.uint8, -1),
        (torch.int32, 2**31),
        (torch.float32, 1e39),
        (torch.uint8, 255),
        (torch.float16, math.inf),
    ):
        x = torch.arange(6).reshape(2, 3).to(dtype)
        try:
            expected = fill(x, number)
        except RuntimeError:
            with pytest.raises(NumberOutOfRange):
                onepass.fuse(fill)(x, number)
            continue
        actual = onepass.fuse(fill)(x, number)
        assert actual.dtype == expected.dtype and torch.equal(actual.nan_to_num(7), expected.nan_to_num(7)), (name, dtype, number)


# ---- bools -----------------------------------------------------------------------------------------------------------------------

BOOLS = torch.tensor([True, False, True, False]), torch.tensor([True, True, False, False])


def test_bools_are_added_multiplied_and_compared_as_eager_does() -> None:
    check_same(
        lambda a, b: (
            a + b,
            a * b,
            torch.add(a, b, alpha=2),
            torch.add(a, b, alpha=0),
            torch.maximum(a, b),
            torch.minimum(a, b),
            a < b,
            a >= b,
            a == 2,
            a > -1,
            a == 0.5,
            a + 2,
            a * 2.5,
            a // 2,
            a % 2,
            a / b,
            a**2,
            ~a,
            a & 1,
            a ^ b,
            a.sign(),
            a.isnan(),
            a.clamp(0, 1),
            torch.where(a, b, 2),
            a.sum(),
            torch.full_like(a, 2),
            a.masked_fill(b, 0.5),
            a.sqrt(),
        ),
        *BOOLS,
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a // b,
        lambda a, b: a % b,
        lambda a, b: torch.fmod(a, b),
        lambda a, b: torch.addcmul(a, a, b),
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        lambda a, b: a**b,
        lambda a, b: a.clamp(a, b),
    ],
)
def test_ops_that_eager_refuses_on_bools_are_refused(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(NotImplementedError):
        function(*BOOLS)
    with pytest.raises((UnsupportedOp, RuntimeError)):  # or torch itself, while tracing
        onepass.fuse(function)(*BOOLS)


# ---- comparisons -----------------------------------------------------------------------------------------------------------------


def comparisons(a: Tensor, b: Tensor | float) -> tuple[Tensor, ...]:
    return a == b, a < b, a >= b


@pytest.mark.parametrize("wide", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8], ids=str)
def test_comparisons_are_made_in_the_common_type(dtype: torch.dtype, wide: torch.dtype) -> None:
    """A zero-dim tensor is rounded to the type of one with dims; numbers to that of any tensor."""
    values = torch.tensor([0.1, 0.2, 0.1 + 2e-9, 257.0, 256.0, 0.10009765625, 1.0000001, 1.0, 16777217.0, 44.0]).to(dtype)
    singles = torch.tensor([0.1, 257.0, 16777217.0, 300.0], dtype=torch.float64).to(wide)

    def function(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        pairs: list[tuple[Any, Any]] = [pair for one in others for pair in ((x, one), (one, x), (x[3], one))]
        pairs += [(y, n) for n in (0.1, 1.00000001, 300) for y in (x, x.amin(), others[0])]
        return tuple(found for pair in pairs for found in comparisons(*pair))

    check_same(function, values, *singles)
    check_same(comparisons, values[:, None], singles)


def test_operands_of_comparisons_are_rounded_as_in_eager() -> None:
    """The same holds for floor, rounding, conversion to integers and positions of extremes."""
    x = torch.linspace(-3, 3, 1001, dtype=torch.bfloat16)
    third = torch.tensor(1 / 3, dtype=torch.float32)

    def function(x: Tensor, third: Tensor) -> tuple[Tensor, ...]:
        y = x * third
        return y == x / 3, y < third, y > -x, torch.floor(y * 3), (y * 6).round(), (y * 3).to(torch.int32), (y * x).argmax()

    check_same(function, x, third)


# ---- literals --------------------------------------------------------------------------------------------------------------------

LITERALS = (-0.0, 0.0, 1e-40, -1e-45, 1e-46, math.inf, -math.inf, 3.5e38, 1.1754943508222875e-38, 5e-324)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_literals_keep_their_sign_and_subnormal_values(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([0.0, -0.0, 1e-40, -1e-45, tiny, -tiny, 1.0, math.inf, math.nan], dtype=torch.float64).to(dtype)

    numbers = [n for n in LITERALS if n != 3.5e38 or dtype != torch.float32]
    if dtype == torch.bfloat16:  # eager rounds the smallest ones to zero before it adds them
        numbers = [n for n in numbers if n == 0 or abs(n) >= 1e-40]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        each = [(x < n, x == n, x + n, x * n, torch.where(x > 0, x, n)) for n in numbers]
        return tuple(out for found in each for out in found)

    check_same(function, x)
    check_same(lambda x: (x / -0.0, -x, x * -0.0, torch.full_like(x, -0.0), x[:0].sum() * -0.0, (-x).sum(), 0.0 - x), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_negation_flips_the_sign_of_zeros(dtype: torch.dtype) -> None:
    """Next to other multiples of the same value, it is written as one of them."""
    check_same(lambda x: (-x,), torch.tensor([0.0, -0.0, 1.0, math.inf, math.nan]).to(dtype))


@pytest.mark.parametrize("number", LITERALS)
def test_the_oracle_and_the_text_represent_literals_as_kernels_do(number: float) -> None:
    program = parse(
        "program p; axis n = 2; input x: f32 [2] strides [1]; output y: f32 [2] strides [1]; %0 = load x [n:1]; "
        f"%1 = const {number!r} : f32; %2 = mul %0 %1; store y [n:1] = %2"
    )
    assert parse(show(program)) == program
    found = evaluate(program, {"x": torch.ones(2)}, {})["y"]
    expected = torch.tensor(number, dtype=torch.float32).double()
    assert torch.equal(found, expected.expand(2)) and torch.equal(found.signbit(), expected.signbit().expand(2))


def test_a_size_takes_the_type_of_the_value_it_is_combined_with() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        return x + n, x * n, x > n, x // n, (x + n).sum(1), (x * n).float()

    check_same(function, (torch.arange(300 * 3) % 251 - 120).reshape(300, 3).to(torch.int8))


# ---- quotients -------------------------------------------------------------------------------------------------------------------


def test_other_inputs_do_not_make_a_quotient_approximate() -> None:
    """41 * (1 / 41) is less than 1."""
    x, narrow = 41.0 * torch.arange(1, 65).reshape(2, 32), torch.ones(2, 32, dtype=torch.float16)
    check_same(lambda x, h: (torch.floor(x / 41.0), h + 1, x / 41.0, (x.sum(1) / 41.0), torch.floor(x[:, 0] / 41.0)), x, narrow)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_quotient_is_exact_where_its_last_digit_decides(dtype: torch.dtype) -> None:
    x = 41.0 * torch.arange(1, 7).reshape(2, 3).to(dtype)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.float() / 41.0
        return torch.floor(x / 41.0), torch.floor(y), y == y.round(), (2 * y).to(torch.int32), torch.floor(x[0] / 41.0)

    check_same(function, x)
    check_same(lambda x: ((x > 0).float().mean(), (x > 0).float().mean() == 1.0, x[0].float().mean() == 82), x.expand(41, 2, 3))


def test_the_reciprocal_of_a_tiny_divisor_is_not_infinite() -> None:
    """0 / 1e-42 is 0, where 0 times its reciprocal would be NaN."""
    x = torch.tensor([0.0, -0.0, 1.0, -2.0, math.inf, math.nan], dtype=torch.bfloat16)
    check_same(lambda x: (x.float() / 1e-42, (x.float() / -1e-42).bfloat16()), x)


DECIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "ceil": lambda y: torch.ceil(-y),
    "trunc": torch.trunc,
    "fmod": lambda y: torch.fmod(y, 1.0),
    "int": lambda y: y.to(torch.int32),
    "bool": lambda y: (y - 1).to(torch.bool),
    "eq": lambda y: y == 1,
    "ne": lambda y: y != 1,
    "lt": lambda y: y < 1,
    "le": lambda y: -y <= -1,
    "gt": lambda y: -y > -1,
    "ge": lambda y: y >= 1,
    "argmin": lambda y: torch.minimum(y, y * 0 + 1).argmin(-1),
    "argmax": lambda y: torch.maximum(-y, y * 0 - 1).argmax(-1),
}


@pytest.mark.parametrize("name", DECIDING)
def test_ops_with_discrete_results_read_exact_values(name: str) -> None:
    """41 * (1 / 41) is less than 1, and each of these ops distinguishes the two."""
    x = torch.tensor([[82.0, 41.0], [41.0, 123.0]], dtype=torch.bfloat16)
    check_same(lambda x: (DECIDING[name](x.float() / 41.0),), x)


def test_fp32_data_keeps_full_precision_next_to_16_bit_data_of_its_size() -> None:
    x, ones = 41.0 * torch.arange(1, 65).reshape(2, 32), torch.ones(2, 32, dtype=torch.bfloat16)
    check_same(lambda x, h: (x / 41.0 * h,), x, ones)
    check_same(lambda x, h: ((x / 41.0).amax(1) * h[:, 0],), x, ones)


def test_kernels_divide_by_the_instructions_that_a_value_needs() -> None:
    """They may differ within a kernel: values that come from fp32 alone are divided exactly, those from 16 bits need not be."""

    def function(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, 0] / x[:, 1], (h.float() / h.float().sum(1, keepdim=True)).to(torch.bfloat16)

    inputs = torch.empty(64, 2), torch.empty(64, 96, dtype=torch.bfloat16)
    text = "".join(s.text for s in interpret(plan(optimize(capture(function, inputs).program), {"s0": 64}, device("h200"))).sources)
    assert text.count("libdevice.div_rn(") == 1 and text.count(" / ") >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_exponentials_of_fp32_data_have_full_precision(dtype: torch.dtype) -> None:
    """The approximate exponential is biased, which shows in a long sum, unless its result has 16 bits."""
    program = optimize(capture(lambda x: x.logsumexp(-1), (torch.empty(64, 200000, dtype=dtype),)).program)
    text = "".join(s.text for s in interpret(plan(program, {"s0": 64}, device("h200"))).sources)
    assert "logsumexp" in text and ("fast_exp(" in text) is (dtype is torch.bfloat16)


def test_quotients_of_16_bit_data_are_exact_where_they_decide() -> None:
    """Other quotients in the kernel stay approximate."""
    x, y = torch.empty(2, 64, 96, dtype=torch.bfloat16).unbind()
    fn = lambda x, y: ((x.float() / y.float()).floor().to(torch.int32), torch.softmax(x.float(), -1).to(x.dtype))  # noqa: E731
    text = "".join(s.text for s in interpret(plan(optimize(capture(fn, (x, y)).program), {"s0": 64}, device("h200"))).sources)
    assert text.count("libdevice.div_rn(") == 1 and "fast_exp(" in text


@pytest.mark.parametrize("function", [torch.tanh, torch.sigmoid, torch.erf, torch.exp], ids=lambda f: f.__name__)
def test_approximate_functions_are_right_to_16_bits(function: Callable[[Tensor], Tensor]) -> None:
    """Including the range where a series replaces a difference."""
    x = torch.linspace(-4, 4, 8001, dtype=torch.float16)
    assert judge(onepass.fuse(lambda x: function(x))(x), function(x), function(x.double())) is None


EXACTLY: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "exp": (torch.exp, "libdevice.exp("),
    "exp2": (torch.exp2, "libdevice.exp2("),
    "tanh": (torch.tanh, "libdevice.tanh("),
    "sigmoid": (torch.sigmoid, "libdevice.rcp_rn("),
    "erf": (torch.erf, "tl.erf("),
}


@pytest.mark.parametrize("name", EXACTLY)
def test_fp32_data_uses_exact_functions_and_16_bit_data_fast_ones(name: str) -> None:
    function, exactly = EXACTLY[name]
    for dtype in (torch.float32, torch.bfloat16):
        program = optimize(capture(function, (torch.empty(64, 96, dtype=dtype),)).program)
        text = "".join(s.text for s in interpret(plan(program, {"s0": 64}, device("h200"))).sources)
        assert (exactly in text) == (dtype is torch.float32)


def test_generated_max_and_min_propagate_nan() -> None:
    """In the interpreter they always do."""
    program = optimize(capture(lambda x: (x.clamp(-1, 1), x.amax(-1), x.amin(-1)), (torch.empty(64, 96),)).program)
    text = "".join(s.text for s in interpret(plan(program, {"s0": 64}, device("h200"))).sources)
    extremes = [line for line in text.splitlines() if "maximum(" in line or "minimum(" in line]
    assert extremes and all(line.count("propagate_nan=tl.PropagateNan.ALL") == line.count("imum(") for line in extremes)


def test_quotients_of_16_bit_data_stay_multiplications() -> None:
    """One multiplication per element, whose error 16 bits do not show: also next to fp32 vectors and scalars that scale them."""

    def function(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return x.float() / 41.0 * w + scale / 41.0, torch.softmax(x, -1), x.float().square().mean(-1, keepdim=True) * x

    x = torch.empty(64, 96, dtype=torch.bfloat16)
    ops = [n.name for n in optimize(capture(function, (x, torch.empty(96), torch.empty(()))).program).nodes if isinstance(n, Op)]
    assert "div" not in ops and ops.count("reciprocal") == 1


@pytest.mark.parametrize(
    "function",
    [lambda a, x: (a > 0) | (x > 0), lambda a, x: (x > 0) & (a > 0), lambda a, x: (x.amax() > 0) ^ (x.amax(-1) > 0)],
    ids=["or", "and", "xor"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_booleans_of_zero_dim_tensors_combine_with_others(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    a, x = torch.tensor(1.0).to(dtype), (3 * torch.randn(8, 16, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert torch.equal(onepass.fuse(function)(a, x), function(a, x))
