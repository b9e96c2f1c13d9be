"""Captured Programs compared with the functions they were captured from, both in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from onepass.capture import Captured, capture
from onepass.capture.lowering.axes import Atoms, common_factors, cut, segments
from onepass.errors import NotTraceable, OnepassError, OverlappingElements
from onepass.ir.expr import DTYPES
from onepass.ir.oracle import evaluate
from onepass.ir.program import Index, Load, Op, Reduce, Store
from onepass.ir.size import product, sym
from onepass.ir.text import parse, show
from onepass.ir.verify import verify


def named(fn: Any) -> str:
    """A short test id."""
    return f"{fn.func.__name__}({fn.keywords})" if isinstance(fn, functools.partial) else getattr(fn, "__name__", str(fn))


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def oracle_result(captured: Captured, args: tuple[Any, ...]) -> Any:
    """The oracle's result of the captured Program for a call."""
    bindings = captured.bind(args)
    assert bindings is not None, "the Program must answer the call"
    return captured.result(evaluate(captured.program, captured.tensors(args), bindings), args)


def agree(got: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Check that structure, shapes, strides of dims longer than 1, and values agree."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    leaves, spec = pytree.tree_flatten(expected)
    assert got_spec == spec
    for g, e in zip(got_leaves, leaves, strict=True):
        if not isinstance(e, torch.Tensor):
            assert type(g) is type(e) and g == e
            continue
        assert g.shape == e.shape
        assert e.numel() == 0 or all(a == b for a, b, n in zip(g.stride(), e.stride(), e.shape, strict=True) if n > 1)
        torch.testing.assert_close(g.double(), e.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        assert g.is_floating_point() == e.is_floating_point()


def check(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Captured:
    """Capture, verify, print and parse, evaluate, compare."""
    captured = capture(fn, args, dynamic=dynamic)
    verify(captured.program, "capture")
    assert parse(show(captured.program)) == captured.program
    agree(oracle_result(captured, args), fn(*args))
    return captured


def reduces(captured: Captured) -> list[str]:
    return [n.monoid for n in captured.program.nodes if isinstance(n, Reduce)]


def loads(captured: Captured, name: str) -> list[Load]:
    return [n for n in captured.program.nodes if isinstance(n, Load) and n.buffer == name]


# Elementwise ops

X, Y = rand(5, 12), rand(5, 12).roll(1)
POSITIVE = X.abs() + 0.1
INTS = torch.arange(-30, 30).reshape(5, 12)
BOOLS = X > 0

UNARY = [
    torch.neg,
    torch.abs,
    torch.reciprocal,
    torch.exp,
    torch.exp2,
    torch.expm1,
    torch.sin,
    torch.cos,
    torch.tanh,
    torch.sigmoid,
    torch.erf,
    torch.floor,
    torch.ceil,
    torch.trunc,
    torch.round,
    torch.sign,
    torch.square,
    torch.frac,
    torch.relu,
    F.silu,
    F.leaky_relu,
    F.softplus,
    F.elu,
    F.mish,
    F.hardswish,
    F.hardsigmoid,
    F.hardtanh,
    F.logsigmoid,
    F.gelu,
    functools.partial(F.gelu, approximate="tanh"),
    F.softshrink,
    F.relu6,
    torch.isnan,
    torch.isinf,
    torch.isfinite,
]


@pytest.mark.parametrize("fn", UNARY, ids=named)
def test_unary_ops(fn: Callable[..., Any]) -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 0.5, 1.5, -2.5], dtype=torch.float64)
    check(lambda x, s: (fn(x), fn(s)), X, special)


@pytest.mark.parametrize("fn", [torch.sqrt, torch.rsqrt, torch.log, torch.log2, torch.log10, torch.log1p], ids=named)
def test_ops_of_positive_numbers(fn: Callable[..., Any]) -> None:
    check(fn, POSITIVE)


BINARY = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.remainder,
    torch.fmod,
    torch.floor_divide,
    torch.eq,
    torch.ne,
    torch.lt,
    torch.le,
    torch.gt,
    torch.ge,
    functools.partial(torch.div, rounding_mode="trunc"),
    functools.partial(torch.div, rounding_mode="floor"),
    functools.partial(torch.add, alpha=3),
    functools.partial(torch.sub, alpha=2),
]


@pytest.mark.parametrize("fn", BINARY, ids=named)
def test_binary_ops(fn: Callable[..., Any]) -> None:
    check(lambda x, y: (fn(x, y), fn(x, y[0]), fn(x, 0.7)), X, Y)


@pytest.mark.parametrize(
    "fn",
    [
        torch.add,
        torch.mul,
        torch.remainder,
        torch.fmod,
        torch.floor_divide,
        torch.bitwise_and,
        torch.bitwise_or,
        torch.bitwise_xor,
        torch.maximum,
        torch.lt,
        torch.logical_or,
        torch.logical_xor,
    ],
    ids=named,
)
def test_integer_ops(fn: Callable[..., Any]) -> None:
    check(lambda x, y: (fn(x, y), fn(y, x)), INTS + (INTS == 0), (7 - INTS).abs() * 2 + 1)


def test_ops_of_two_tensors() -> None:
    check(
        lambda x, y: (
            torch.maximum(x, y),
            torch.minimum(x, y[0]),
            torch.logaddexp(x, y),
            torch.logical_and(x > 0, y),
            torch.true_divide(x, y),
            torch.xlogy(x, y.abs()),
        ),
        X,
        Y,
    )


def test_bools() -> None:
    check(
        lambda a, b: (
            a & b,
            a | b,
            a ^ b,
            ~a,
            a + b,
            a * b,
            torch.maximum(a, b),
            a.logical_not(),
            a.sum(0),
            a * 2.5,
            a.float().double(),
            b.to(torch.int8),
            torch.where(a, 1.0, b),
        ),
        BOOLS,
        ~BOOLS,
    )


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 5, 8, -1, -3, 0.5, -0.5, 2.5, 11])
def test_known_powers(exponent: float) -> None:
    check(lambda x: x**exponent, POSITIVE)


def test_powers_of_tensors_and_integers() -> None:
    check(lambda x, y: (x**y, 2**y, x.pow(2.0)), POSITIVE, X)
    check(lambda i: (i**2, i**3), INTS)


def test_small_powers_need_no_pow() -> None:
    assert not any(isinstance(n, Op) and n.name == "pow" for n in check(lambda x: x**3 + x**-2, POSITIVE).program.nodes)


def test_clamp_where_and_lerp() -> None:
    check(lambda x, y: (x.clamp(-0.5, 0.5), x.clamp(min=0), x.clamp(max=y), torch.clamp(x, y, y + 1), x.clamp_min(0.1)), X, Y)
    check(lambda x, y: (torch.where(x > y, x, y), torch.where(x > 0, x, 0.0), x.masked_fill(y > 0, -1.0)), X, Y)
    check(lambda x, y: (torch.addcmul(x, x, y, value=0.5), torch.addcdiv(x, y, y.abs() + 1), torch.lerp(x, y, 0.3)), X, Y)
    check(lambda x: torch.nan_to_num(x / 0, 1.0, 2.0, 3.0), X)
    check(lambda x: (x.tril(), x.triu(1)), X)


def test_the_upper_bound_wins_where_bounds_contradict_each_other() -> None:
    check(lambda x: (x.clamp(0.5, -0.5), torch.clamp(x, x * 0 + 1, x * 0 - 1)), rand(4, 6))


def test_clamp_propagates_nan() -> None:
    check(
        lambda x: (x.clamp(0, 1), x.relu(), torch.maximum(x, x * 0), x.amax(1), x.argmax(1)),
        torch.tensor([[1.0, float("nan"), 3.0], [2.0, 1.0, 0.0]], dtype=torch.float64),
    )


def test_losses() -> None:
    check(
        lambda x, y: (
            F.mse_loss(x, y),
            F.huber_loss(x, y),
            F.smooth_l1_loss(x, y, reduction="sum"),
            F.l1_loss(x, y),
            F.binary_cross_entropy_with_logits(x, y.sigmoid()),
            F.kl_div(x, y.sigmoid(), reduction="batchmean"),
        ),
        X,
        Y,
    )


# Types


def cast_pairs(captured: Captured) -> list[str]:
    return [str(n.dtype) for n in captured.program.nodes if isinstance(n, Op) and n.name == "cast"]


@pytest.mark.parametrize("name", ["bf16", "f16", "f32"])
def test_16_bit_floats_compute_in_fp32(name: str) -> None:
    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w

    dtype = DTYPES[name].torch
    captured = check_against_double(norm, rand(6, 32, dtype=dtype), rand(32, dtype=dtype))
    assert {b.dtype.name for b in captured.program.buffers} == {name}


def check_against_double(fn: Callable[..., Any], *args: torch.Tensor) -> Captured:
    """The oracle rounds nothing, so the Program of a 16-bit function is the function in float64 (up to fp32 literals)."""
    captured = capture(fn, args)
    verify(captured.program, "capture")
    exact = [a.double() if a.is_floating_point() else a for a in args]
    agree(oracle_result(captured, args), double_everywhere(fn)(*exact), tolerance=1e-6)
    return captured


def double_everywhere(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function with .float() made a no-op, so that no intermediate result is rounded."""

    def run(*args: torch.Tensor) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return fn(*args)

    return run


def test_every_rounding_torch_makes_is_in_the_program() -> None:
    captured = capture(lambda x: (x * 2 + 1).sum(0), (rand(4, 8, dtype=torch.bfloat16),))
    assert cast_pairs(captured) == ["f32", "bf16", "f32", "bf16", "f32", "bf16"]


def test_promotion_follows_torch() -> None:
    def mixed(b: torch.Tensor, f: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return b + f, b * i, b + 1, i + 1.5, i / 2, b > i, (b > 0) * b, i.sum()

    args = rand(3, 4, dtype=torch.bfloat16), rand(3, 4, dtype=torch.float32), torch.arange(12, dtype=torch.int32).view(3, 4)
    captured = check_against_double(mixed, *args)
    types = [b.dtype.name for b in captured.program.buffers if b.role == "output"]
    assert types == ["f32", "bf16", "bf16", "f32", "f32", "bool", "bf16", "i64"]


def test_numbers_compared_with_16_bit_floats_are_rounded_first() -> None:
    x = torch.full((2, 3), 0.1, dtype=torch.bfloat16)
    assert bool((x == 0.1).all())
    agree(oracle_result(capture(lambda x: x == 0.1, (x,)), (x,)), x == 0.1)


def test_blockwise_amax_and_fp8() -> None:
    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x.float().view(x.shape[0], -1, 128)
        scale = blocks.abs().amax(-1) / 448.0
        return (blocks / scale[..., None]).to(torch.float8_e4m3fn).view(x.shape), scale

    x = rand(5, 256, dtype=torch.bfloat16)
    captured = capture(quantize, (x,))
    verify(captured.program, "capture")
    quantized, scale = oracle_result(captured, (x,))
    blocks = x.double().view(5, 2, 128)
    agree(scale, blocks.abs().amax(-1) / 448)
    agree(quantized, (blocks / (blocks.abs().amax(-1) / 448)[..., None]).view(5, 256))
    assert [str(b.dtype) for b in captured.program.buffers] == ["bf16", "f8e4m3", "f32"]
    assert sorted(str(a.extent) for a in captured.program.axes) == ["128", "2", "s0"]


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_every_type_loads_and_stores(dtype: Any) -> None:
    x = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype.torch)
    agree(oracle_result(capture(lambda x: (x.to(torch.float32), x.t()), (x,)), (x,)), (x.double(), x.t()))


# Reductions

DIMS = [0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2), -1]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_reductions_over_any_dims(dims: Any) -> None:
    x = rand(3, 4, 5)
    check(
        lambda x: (
            x.sum(dims),
            x.mean(dims, keepdim=True),
            x.amax(dims),
            x.amin(dims, keepdim=True),
            x.var(dims),
            x.std(dims),
            torch.var_mean(x, dims, correction=0),
            x.logsumexp(dims),
            (x > 0).any(dims),
            (x > 0).all(dims),
        ),
        x,
    )


def test_reductions_over_all_dims_and_over_none() -> None:
    check(
        lambda x: (
            x.sum(),
            x.mean(),
            x.prod(),
            x.max(),
            x.min(),
            x.argmax(),
            x.argmin(),
            x.var(),
            x.std(),
            (x > 0).any(),
            (x > 9).all(),
            x.norm(),
            torch.count_nonzero(x > 0),
        ),
        rand(3, 4),
    )
    check(
        lambda x: (
            x.sum(1),
            x.mean(1),
            x.amax(1),
            x.var(1, correction=0),
            x.logsumexp(1),
            x.argmax(1),
            (x > 0).any(1),
            x.prod(1),
            x.softmax(1),
        ),
        rand(4, 1),
    )


def test_argmax_and_argmin() -> None:
    check(lambda x: (x.argmax(0), x.argmin(1), x.argmax(1, keepdim=True), x.max(0), x.min(1), x.t().argmax()), rand(4, 5))


def test_integer_sums_accumulate_in_64_bits() -> None:
    check(lambda x: (x.sum(0), x.sum(), x.prod(1), x.amax(0), (x > 0).sum(1)), INTS.to(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.bool], ids=str)
def test_sums_and_products_converted_to_bool(dtype: torch.dtype) -> None:
    """The elements are converted to bool first: halves count, and 1 - 1 is true."""
    x = torch.tensor([[1.0, -1.0, 0.5], [0.0, 0.0, 0.0], [0.5, 2.0, math.nan]]).nan_to_num(3.0 if dtype == torch.int8 else math.nan)
    captured = check(
        lambda x: (
            x.sum(1, dtype=torch.bool),
            x.prod(1, dtype=torch.bool),
            x.sum(0, keepdim=True, dtype=torch.bool),
            x.sum(dtype=torch.bool),
            x.prod(dtype=torch.bool),
            x[:, :1].sum(1, dtype=torch.bool),
        ),
        x.to(dtype),
    )
    assert set(reduces(captured)) == {"any", "all"}


def test_variance_is_one_reduction() -> None:
    """The mean is kept in two parts, except for 16-bit values, which would not show the difference."""
    captured = check(lambda x: torch.var_mean(x, (0, 2, 3), correction=0), rand(2, 3, 4, 5))
    assert reduces(captured) == ["moments"]
    for function in (lambda x: x.var(1), lambda x: x.float().var(1)):
        assert reduces(check_against_double(function, rand(3, 40, dtype=torch.bfloat16))) == ["welford"]


def test_sum_of_a_broadcast_axis() -> None:
    check(lambda x: (x.expand(4, 3, 5).sum(0), x[:, :1].expand(3, 7).sum(), torch.full((3, 5), 2.0).sum(1)), rand(3, 5))


def test_infinite_rows() -> None:
    x = rand(3, 4)
    x[0], x[1, 1], x[2, 2] = float("-inf"), float("inf"), float("nan")
    check(lambda x: (x.logsumexp(1), x.softmax(1), x.log_softmax(1), x.amax(1), x.mean(1)), x)
    check(lambda x: (x.isfinite(), x.isinf(), x.isnan(), x.sign()), x)


def test_empty_tensors() -> None:
    check(lambda x: (x.sum(0), x.mean(1), x * 2, x.view(4, 0), x.prod(0)), torch.empty(0, 4, dtype=torch.float64))
    check(lambda x: (x.reshape(2, 0, 3).sum(2), x.sum()), torch.empty(2, 0, dtype=torch.float64))


# Views and axes

SQUARE = rand(6, 6)


def test_a_square_matrix_and_its_transpose() -> None:
    captured = check(lambda x: x + x.t(), SQUARE)
    assert len(loads(captured, "x")) == 2 and len(captured.program.axes) == 2
    check(
        lambda x: (x.t().sum(0), x.sum(0) + x.sum(1), x + x.sum(0)[:, None], x * x.sum(1), x.softmax(0) - x.softmax(1).t()), SQUARE
    )


def test_outer_products() -> None:
    check(lambda v: (v[:, None] * v[None, :], (v[:, None] - v).abs().sum(0), v[:, None, None] + v[:, None] * v), rand(5))


def test_rows_and_columns_of_one_load() -> None:
    captured = check(lambda x: (x.sum(0), x.sum(1), x.sum()), rand(4, 6))
    assert len(loads(captured, "x")) == 1 and len(captured.program.axes) == 2


def test_reshapes_split_axes_everywhere() -> None:
    captured = check(lambda x, w: ((x * w).view(x.shape[0], 3, 2).sum(1), x + 1), rand(4, 6), rand(6))
    assert [str(a.extent) for a in captured.program.axes] == ["s0", "3", "2"]
    check(
        lambda x: (x.view(-1), x.reshape(3, 8).sum(1), x.t().reshape(-1).sum(), x.flatten().view(2, 2, 6).permute(2, 0, 1) * 2),
        rand(4, 6),
    )


def test_a_reshape_without_common_factors_loads_again() -> None:
    check(lambda x: (x.view(4, 6).sum(0), x.view(6, 4).sum(0), x.view(8, 3) * 2), rand(24))
    check(lambda x: x.view(2, 12).sum(0) + x.view(12, 2).sum(1), rand(24))


def test_views_of_all_kinds() -> None:
    x = rand(4, 6, 5)
    check(
        lambda x: (
            x.permute(2, 0, 1) * 2,
            x.transpose(0, 1).sum(0),
            x.unsqueeze(1).squeeze(1) + 1,
            x.movedim(0, -1).contiguous(),
            x.expand(2, 4, 6, 5) * 2,
            x.flatten(1).sum(0),
            x.unflatten(1, (2, 3)).amax(1),
            x.repeat(2, 1, 3) + 1,
            x.clone().detach() * 3,
            x.mT + 1,
            x.squeeze() * 1.5,
            x.unbind(1)[2] * 2,
        ),
        x,
    )
    check(lambda x: tuple(p.sum(-1) for p in (*x.split(2), *x.chunk(2, 1), *x.split([1, 4], 2), x.narrow(1, 2, 3))), x)


def test_slices_of_inputs_and_of_computed_values() -> None:
    check(lambda x: (x[1:, ::2] * 2, x[:, -3:].sum(0), x[2], x[:, 1] + x[:, -1], x[-1, 2:4].sum(), x[1:1].sum(0)), rand(5, 8))
    check(lambda x: ((x * 2)[1:, ::3], x.softmax(-1)[:, 2], (x - x.mean(0))[:2].sum(1), x.exp()[3]), rand(5, 8))
    check(lambda x: torch.arange(8)[2:6].double() + x[:, 2:6] + (x.sum(0, keepdim=True) * x)[:, 4:], rand(5, 8))


def test_the_halves_of_swiglu_share_axes() -> None:
    captured = check(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], rand(5, 16))
    assert len(captured.program.axes) == 2 and [n.offset for n in loads(captured, "x")] == [0, 8]


@pytest.mark.parametrize(
    "make",
    [
        lambda: rand(8, 6).t(),
        lambda: rand(12, 12)[::2, 1:9],
        lambda: rand(8).expand(6, 8),
        lambda: rand(100).as_strided((6, 8), (3, 2)),
        lambda: rand(6, 9)[:, 1:],
        lambda: rand(1, 8),
        lambda: rand(6, 1),
    ],
    ids=["transposed", "sliced", "expanded", "overlapping", "misaligned", "one row", "one column"],
)
def test_inputs_of_any_layout(make: Callable[[], torch.Tensor]) -> None:
    check(lambda x: (x.sum(0), x.softmax(-1), x * 2, x), make())


def test_concatenations_are_stored_piece_by_piece() -> None:
    captured = check(lambda x, y: torch.cat([(x * y).sum(0), x.sum(0)]), rand(4, 6), rand(4, 6))
    assert [n.offset for n in captured.program.nodes if isinstance(n, Store)] == [0, 6]
    check(lambda x, y: (torch.cat([x, y * 2], 1).mul(0.5).t(), torch.stack([x.sum(1), y.amax(1)], -1)), rand(4, 6), rand(4, 6))


def test_concatenations_that_are_used_further() -> None:
    check(lambda x, y: torch.cat([x, y], 1) * 2 + torch.cat([y, x], 1), rand(4, 6), rand(4, 6))
    check(lambda x: (torch.cat([-x[:, 3:], x[:, :3]], -1) * x).sum(-1), rand(4, 6))
    check(lambda x: (torch.stack([x, x.exp()]).sum(0), F.pad(x, (1, 2)).sum(0)), rand(4, 6))


def test_indexed_loads() -> None:
    at = torch.tensor([[2], [0], [5], [3]])
    check(
        lambda x, at: (x.gather(1, at), x.log_softmax(1).gather(1, at), x.gather(1, at.expand(4, 3)), x.scatter(1, at, 7.0)),
        rand(4, 6),
        at,
    )
    check(lambda x: x.gather(1, x.argmax(1, keepdim=True)), rand(4, 6))


def test_indices_as_values() -> None:
    captured = check(
        lambda x: (
            x + torch.arange(6),
            torch.arange(2, 14, 2) * x,
            torch.eye(4, 6) + x,
            torch.ones_like(x) * 3,
            torch.zeros(4, 1) + x,
            x.new_full((6,), 2.5) * x,
        ),
        rand(4, 6),
    )
    assert any(isinstance(n, Index) for n in captured.program.nodes)


# Functions of models, forward and backward


def vjp(fn: Callable[..., Any]) -> Callable[..., Any]:
    """(incoming gradient, *inputs) -> gradients."""
    return lambda dy, *args: torch.func.vjp(fn, *args)[1](dy)


FORWARD: dict[str, Any] = {
    "rms_norm": (lambda x, w: F.rms_norm(x, (16,), w), rand(6, 16), rand(16)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (16,), w, b), rand(6, 16), rand(16), rand(16) * 2),
    "layer_norm_plain": (lambda x: F.layer_norm(x, (16,)), rand(6, 16)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), rand(2, 8, 3, 3), rand(8), rand(8) * 2),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), rand(4, 5, 3), rand(5), rand(5) * 2),
    "softmax": (lambda x: x.softmax(-1), rand(6, 16)),
    "softmax_columns": (lambda x: x.softmax(0), rand(6, 16)),
    "log_softmax": (lambda x: x.log_softmax(-1), rand(6, 16)),
    "logsumexp": (lambda x: x.logsumexp(0), rand(6, 16)),
    "gelu_bias": (lambda x, b: F.gelu(x + b), rand(6, 16), rand(16)),
    "gelu_tanh_bias": (lambda x, b: F.gelu(x + b, approximate="tanh"), rand(6, 16), rand(16)),
    "silu": (F.silu, rand(6, 16)),
    "swiglu": (lambda a, b: F.silu(a) * b, rand(6, 16), rand(6, 16) * 2),
    "swiglu_packed": (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], rand(6, 16)),
    "glu": (F.glu, rand(6, 16)),
    "leaky_relu": (F.leaky_relu, rand(6, 16)),
    "normalize": (F.normalize, rand(6, 16)),
    "qk_norm": (lambda q, w: F.rms_norm(q.permute(0, 2, 1, 3), (8,), w), rand(2, 5, 3, 8), rand(8)),
    "residual_rms_norm": (lambda x, r, w: F.rms_norm(x + r, (16,), w), rand(6, 16), rand(6, 16) * 2, rand(16)),
    "variance": (lambda x: x.var(-1), rand(6, 16)),
    "sliced": (lambda x: x[1:, 2:9].exp(), rand(6, 16)),
    "selected": (lambda x: x[:, 3].exp(), rand(6, 16)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str) -> None:
    fn, *args = FORWARD[name]
    check(fn, *args)


@pytest.mark.parametrize("name", FORWARD)
def test_backward(name: str) -> None:
    fn, *args = FORWARD[name]
    check(vjp(fn), torch.ones_like(fn(*args)) * 0.5 + fn(*args).detach().sin(), *args)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ignore_index": 2},
        {"label_smoothing": 0.1},
        {"ignore_index": 2, "label_smoothing": 0.1},
        {"reduction": "sum"},
        {"reduction": "none"},
    ],
    ids=str,
)
def test_cross_entropy(options: dict[str, Any]) -> None:
    logits, target = rand(6, 10), torch.tensor([1, 2, 9, 0, 2, 5])

    def loss_and_gradient(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, back = torch.func.vjp(lambda x: F.cross_entropy(x, target, **options), x)  # type: ignore[misc]
        return loss, *back(torch.ones_like(loss))

    check(loss_and_gradient, logits, target)


def test_gradients_by_autograd() -> None:
    def gradient(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(F.layer_norm(leaf, (16,), w).softmax(-1).square().sum(), leaf)

    check(gradient, rand(6, 16), rand(16))


def test_fused_norms_of_cuda_graphs() -> None:
    def norms(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Any:
        y, rstd = torch.ops.aten._fused_rms_norm(x, [16], w, 1e-6)
        return y, rstd, torch.ops.aten._fused_rms_norm_backward(dy, x, [16], rstd, w, [True, True])

    x, w, dy = rand(6, 16), rand(16), rand(6, 16) * 2
    rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    y, back = torch.func.vjp(lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w, x, w)  # type: ignore[misc]
    agree(oracle_result(capture(norms, (x, w, dy)), (x, w, dy)), (y, rstd, back(dy)))


def test_online_softmax_and_fma_of_cuda_graphs() -> None:
    pytest.importorskip("torch._inductor.inductor_prims")  # registers the two ops

    def online(x: torch.Tensor, y: torch.Tensor) -> Any:
        top, total = torch.ops.prims.prepare_softmax_online(x, 1)
        return torch.ops.prims.fma(x, y, top), total

    x, y = rand(6, 16), rand(6, 16) * 2
    captured = capture(online, (x, y))
    assert reduces(captured) == ["logsumexp"]
    top = x.amax(1, keepdim=True)
    agree(oracle_result(captured, (x, y)), (x * y + top, (x - top).exp().sum(1, keepdim=True)))


def test_mean_of_symbolic_rows() -> None:
    captured = check(lambda x: (x.mean(0), x.var(0), x / x.shape[0], x * (1.0 / x.shape[0])), rand(6, 16), dynamic=True)
    other = (rand(9, 16),)
    agree(oracle_result(captured, other), captured.fn(*other))


# Outputs


def test_outputs_that_are_inputs_views_numbers_and_nothing() -> None:
    def fn(x: torch.Tensor, k: int) -> dict[str, Any]:
        y = x * k
        return {"x": x, "view": x.t()[1:], "y": y, "yt": y.t(), "row": y[1], "again": y, "size": x.shape[0], "k": k, "none": None}

    x = rand(4, 6)
    captured = check(fn, x, 3)
    result = oracle_result(captured, (x, 3))
    assert result["x"] is x and result["view"].data_ptr() == x.t()[1:].data_ptr()
    assert result["yt"].data_ptr() == result["y"].data_ptr() and result["again"] is result["y"]
    assert [b.name for b in captured.program.buffers if b.role == "output"] == ["out0"]


def test_views_of_an_argument_start_where_it_does() -> None:
    x = rand(6, 6)[2:, 1:]
    captured = check(lambda x: (x.t()[1:], x[1], x * 2), x)
    view, row, _ = oracle_result(captured, (x,))
    assert view.data_ptr() == x.t()[1:].data_ptr() and row.data_ptr() == x[1].data_ptr()


def test_only_the_returned_slice_is_stored() -> None:
    captured = check(lambda x: (x * 2)[:, :3].clone(), rand(4, 6))
    assert captured.program.buffer["out0"].shape == (sym("s0"), 3)


def test_overlapping_windows_are_views_of_the_stored_result() -> None:
    check(lambda x: (x + 1).unfold(-1, 3, 1), rand(4, 9))


def test_a_result_with_overlapping_elements_is_refused() -> None:
    """Eager's result has the overlapping layout of its argument, so that a write to one element changes others."""
    windows = rand(10).as_strided((3, 1, 2), (1, 1, 1))
    with pytest.raises(OverlappingElements):
        capture(lambda x: torch.slice_scatter(x, torch.zeros_like(x[:1]), 0, 0, 1), (windows,))
    check(lambda x: x * 2, windows)


def test_expanded_outputs_are_stored_once() -> None:
    captured = check(lambda x: x.sum(0).expand(5, 6), rand(4, 6))
    assert captured.program.buffer["out0"].shape == (6,)


def test_in_place_ops_on_local_values() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y += 1
        y[:, 0] = 3
        y[1:3].mul_(0.5)
        return y

    check(fn, rand(4, 6))


def test_copies_into_local_values() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole, rows = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x)
        whole.copy_(x)
        rows.copy_(x[0])
        return whole, rows

    check(fn, rand(4, 6))


def test_constants_in_the_function() -> None:
    check(lambda x: (x * torch.tensor(3.0) + torch.tensor(2), torch.ones(3), torch.full((2, 2), 7)), rand(4, 6))


def test_names_and_lines() -> None:
    def scaled_sum(data: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        scaled = data * 2
        return scaled.sum(0) + parts[0] + parts[1]

    program = capture(scaled_sum, (rand(4, 6), [rand(6), rand(6) * 2])).program
    assert program.name == "scaled_sum"
    assert [b.name for b in program.buffers] == ["data", "parts_0", "parts_1", "out0"]
    line = scaled_sum.__code__.co_firstlineno + 1
    assert next(n.src for n in program.nodes if isinstance(n, Op)) == f"test_capture.py:{line} scaled = data * 2"
    assert capture(lambda x: x + 1, (rand(3, 3),)).program.name == "fused"


def test_arguments_may_have_the_names_of_results() -> None:
    captured = check(lambda out0, out1: (out0 * 2, out1 - out0, out0 + 1), rand(4, 6), rand(4, 6))
    assert [b.name for b in captured.program.buffers] == ["out0", "out1", "out0_", "out1_", "out2"]


def test_the_same_tensor_twice_is_two_arguments() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - 2 * b

    x, y = rand(3, 4), rand(3, 4) * 3
    agree(oracle_result(capture(fn, (x, x)), (x, y)), fn(x, y))


def test_meta_tensors() -> None:
    x, w = torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta"), torch.empty(8192, device="meta", dtype=torch.bfloat16)
    program = capture(lambda x, w: F.rms_norm(x, (8192,), w), (x, w)).program
    assert program.buffer["x"].shape == (sym("s0"), 8192)
    assert [str(b.dtype) for b in program.buffers] == ["bf16"] * 3


# Axes alone

SIZES = st.lists(st.sampled_from([2, 3, 4, 6, sym("s0")]), max_size=5)


@given(SIZES, st.randoms())
def test_common_factors_refine_both_sides(factors: list[Any], random: Any) -> None:
    def grouped() -> list[Any]:
        groups: list[list[Any]] = []
        for factor in factors:
            if groups and random.random() < 0.5:
                groups[-1].append(factor)
            else:
                groups.append([factor])
        return [product(g) for g in groups]

    left, right = grouped(), grouped()
    common = common_factors(left, right)
    assert common is not None and product(list(common)) == product(factors)
    for side in (left, right):
        runs = cut([str(i) for i in range(len(common))], common, side)
        assert [product([common[int(i)] for i in run]) for run in runs] == side


def test_misaligned_factors_have_no_common_refinement() -> None:
    assert common_factors((2, 3), (3, 2)) is None
    assert common_factors((6, 4), (2, 12)) == (2, 3, 4)
    assert common_factors((sym("s0"), 8), (sym("s0"), 2, 4)) == (sym("s0"), 2, 4)
    assert [(s.left, s.right) for s in segments((4, 2, 3), (4, 3, 2))] == [((0, 1), (0, 1)), ((1, 3), (1, 3))]


def test_atoms_split_and_unify_everywhere() -> None:
    atoms = Atoms()
    a, b, c = atoms.fresh(6), atoms.fresh(6), atoms.fresh(4)
    atoms.keep_distinct((a, c))
    atoms.unify(a, b)
    parts = atoms.split((a,), (2, 3))
    assert atoms.final(b) == parts and [atoms.extent(p) for p in parts] == [2, 3]
    assert all(atoms.are_distinct(p, c) for p in parts) and atoms.are_distinct(*parts)
    one, other, beside = atoms.fresh(5), atoms.fresh(5), atoms.fresh(7)
    atoms.keep_distinct((other, beside))
    atoms.unify(one, other)
    assert atoms.are_distinct(one, beside) and atoms.are_distinct(beside, one)


# Random functions: whatever is captured is right

STEPS = ["scale", "add", "add", "sum", "centre", "permute", "reshape", "slice", "select", "cat", "flatten", "max", "mask"]


def random_function(steps: list[tuple[str, int, int]]) -> Callable[..., Any]:
    def fn(*inputs: torch.Tensor) -> Any:
        values = list(inputs)
        for step, which, how in steps:
            v = values[which % len(values)]
            if v.dim() and v.numel() <= 500:
                values.append(one_step(step, v, values[how % len(values)], how))
        return tuple(values[-2:])

    return fn


def one_step(step: str, v: torch.Tensor, other: torch.Tensor, how: int) -> torch.Tensor:
    dim = how % v.dim()
    match step:
        case "add" if v.shape == other.shape or other.dim() == 0 or (v.dim() and other.shape == v.shape[-1:]):
            return v + 0.5 * other
        case "add" if v.dim() + other.dim() <= 4 and v.numel() * other.numel() <= 500:
            return v.reshape(v.shape + (1,) * other.dim()) * other
        case "sum":
            return v.sum(dim, keepdim=how % 2 == 0)
        case "centre":
            return v - v.mean(dim, keepdim=True)
        case "permute":
            return v.movedim(0, dim)
        case "reshape":
            divisors = [d for d in range(1, v.numel() + 1) if v.numel() % d == 0]
            return v.reshape(divisors[how % len(divisors)], -1)
        case "slice":
            return v.narrow(dim, how % v.shape[dim], 1 + (how // 7) % (v.shape[dim] - how % v.shape[dim]))
        case "select":
            return v.select(dim, how % v.shape[dim])
        case "cat":
            return torch.cat([v, v * 2], dim)
        case "flatten":
            return v.reshape(-1)
        case "max":
            return v.amax(dim, keepdim=True)
        case "mask":
            return torch.where(torch.arange(v.shape[-1]) % 2 == 0, v, -v)
        case _:
            return v * 1.5


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 60)), min_size=2, max_size=8),
    st.lists(st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=3), min_size=1, max_size=2),
)
def test_random_functions(steps: list[tuple[str, int, int]], shapes: list[list[int]]) -> None:
    fn, args = random_function(steps), [rand(*shape) for shape in shapes]
    try:
        check(fn, *args)
    except OnepassError as error:  # a refusal is fine, an illegal Program is not
        assert error.code in ("ONEPASS-101", "ONEPASS-103")


def test_ops_torch_cannot_trace_are_refused_with_a_code() -> None:
    greatest = lambda x: torch.linalg.vector_norm(x[:, :, 5:], float("inf"), dim=(-2,))  # noqa: E731
    x = torch.ones(1, 1, 1)
    assert greatest(x).shape == (1, 0)
    with pytest.raises(NotTraceable, match="ONEPASS-118"):
        capture(greatest, (x,))
    with pytest.raises(RuntimeError, match="size of tensor a"):  # errors of eager are passed on
        capture(lambda x: x + x.new_ones(2), (torch.ones(3, 3, 3),))


def test_a_failed_trace_leaves_its_arguments_unchanged() -> None:
    def grows(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x @ x.new_ones(7, 7)

    x = torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        capture(grows, (x,))
    assert torch.equal(x, torch.zeros(2, 3))
