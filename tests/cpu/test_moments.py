"""Means and variances far from zero, of equal values, of infinities, of few elements, and with every correction."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import onepass
from onepass.capture.function.trace import capture
from onepass.ir.criterion import judge
from onepass.ir.program import Reduce
from onepass.ir.simplify import two_pass
from onepass.pipeline import optimize
from tests.support.correctness import randoms

# One of each form: a row in registers, a looped row, split rows with a join, columns in tiles and in loops.
FORMS = (((16, 1000), -1), ((2, 40000), -1), ((16, 300), 0), ((1000, 40), 0), ((9000, 3), 0), ((6, 7, 40), (0, 2)))


def far(shape: tuple[int, ...], mean: float, std: float) -> Tensor:
    return (mean + std * randoms(0, shape, dtype=torch.float64)).float()


@pytest.mark.parametrize("shape,dim", FORMS, ids=str)
@pytest.mark.parametrize("mean,std", [(1e5, 1.0), (1e4, 0.01)])
def test_variances_far_from_zero(shape: tuple[int, ...], dim: int, mean: float, std: float) -> None:
    """Eager's CPU kernels accumulate in float64; ours must be as accurate, although the mean is 1e6 times the deviation."""

    def function(x: Tensor) -> Tensor:
        return x.var(dim)

    x = far(shape, mean, std)
    assert judge(onepass.fuse(function)(x), function(x), function(x.double())) is None


def test_a_variance_keeps_full_precision_next_to_a_16_bit_tensor() -> None:
    x, h = far((500, 64), 1e5, 1.0), torch.ones(500, 64, dtype=torch.bfloat16)
    var, _ = onepass.fuse(lambda x, h: (x.var(0), (h + 1).sum(0)))(x, h)
    assert judge(var, x.var(0), x.double().var(0)) is None


@pytest.mark.parametrize("shape,dim", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_equal_values_have_zero_variance(dtype: torch.dtype, shape: tuple[int, ...], dim: int | tuple[int, ...]) -> None:
    values = torch.tensor([1000.0, 0.1, -777.7, 0.0])[:, None].expand(4, math.prod(shape)).reshape(4, *shape).to(dtype)
    axes = tuple(d if d < 0 else d + 1 for d in (dim if isinstance(dim, tuple) else (dim,)))
    assert not onepass.fuse(lambda x: x.float().var(axes, correction=0))(values).any()


@pytest.mark.parametrize("dynamic", [None, False])
def test_a_mean_of_16_bit_data_may_be_infinite(dynamic: bool | None) -> None:
    """Its division is corrected by a remainder, which is NaN of an infinite sum."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.float().mean(0), x + x.float().argmin(0)  # reading the rows again fixes the row count of the kernel

    x = torch.ones(65, 3, dtype=torch.bfloat16)
    x[14], x[20, 2], x[40, 1] = torch.tensor([math.inf, -math.inf, math.inf]), -math.inf, 3e38
    actual, _ = onepass.fuse(function, dynamic=dynamic)(x)
    torch.testing.assert_close(actual, torch.tensor([math.inf, -math.inf, math.nan]), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cols", [41, 64, 768])
def test_layer_norm_of_a_constant_row_is_its_bias(dtype: torch.dtype, cols: int) -> None:
    x = torch.tensor([[1000.1], [0.3], [-55.5]], dtype=dtype).expand(3, cols).contiguous()
    bias = randoms(1, (cols,), dtype=dtype)
    actual = onepass.fuse(lambda x, b: torch.nn.functional.layer_norm(x, (cols,), bias=b))(x, bias)
    assert torch.equal(actual, bias.expand(3, cols))


@pytest.mark.parametrize("shape,dim", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_mean_of_var_mean_is_nan_if_there_is_an_infinity(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    """As in eager's recurrence, but wherever the infinity is. A mean without a variance is infinite."""
    x = randoms(0, shape).to(dtype)
    x.view(-1)[3] = math.inf
    var, mean, alone = onepass.fuse(lambda x: (*torch.var_mean(x, dim), x.mean(dim)))(x)
    hit = x.isinf().any(-1) if dim == -1 else x.isinf().amax(dim)
    assert torch.equal(var.isnan(), hit) and torch.equal(mean.isnan(), hit) and torch.equal(alone.isinf(), hit)


def test_merging_with_an_empty_state_does_not_overflow() -> None:
    """The square of 1e20 is infinite, but an empty state has 0 elements."""
    x = torch.full((5000, 3), 1e20)
    assert not onepass.fuse(lambda x: x.var(0))(x).any()


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_every_correction_matches_eager(rows: int) -> None:
    x = randoms(0, (rows, 5))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        each = tuple(f(x, 0, correction=c) for f in (torch.var, torch.std) for c in (0, 1, 2, 3, 0.5, 7))
        return *each, *torch.var_mean(x, 0, correction=5), x.var(1, correction=5), x.std(1, correction=6)

    for actual, eager in zip(onepass.fuse(function)(x), function(x), strict=True):
        torch.testing.assert_close(actual, eager, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_norms_of_16_bit_rows_use_one_plain_sum_of_squares() -> None:
    """Compensation for fp32 data costs an addition per element. 16-bit data does not need it, and does not pay for it."""

    def reductions(dtype: torch.dtype) -> list[str]:
        x = torch.empty(64, 5120, dtype=dtype)
        program = two_pass(optimize(capture(lambda x: torch.nn.functional.layer_norm(x, (5120,)), (x,)).program))
        return [node.monoid for node in program.nodes if isinstance(node, Reduce)]

    assert reductions(torch.bfloat16) == ["sum"] * 2 and reductions(torch.float32) == ["sum"] * 3
