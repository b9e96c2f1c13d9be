"""The criterion: what it accepts and what it rejects."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass.ir.criterion import MIN_RMS_ELEMENTS, check, judge

BF16, ULP = torch.bfloat16, 2.0**-4  # of bfloat16 between 8 and 16


def off_by(ulps: float, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Results that are `ulps` off, where eager's are exact."""
    exact = torch.full((count,), 12.0, dtype=torch.float64)
    return (exact + ulps * ULP).to(BF16), exact.to(BF16), exact


@pytest.mark.parametrize("count", [1, MIN_RMS_ELEMENTS - 1])
def test_a_few_numbers_may_all_be_one_ulp_off(count: int) -> None:
    assert check(*off_by(1, count)).ok
    assert not check(*off_by(2, count)).ok


@pytest.mark.parametrize("count", [MIN_RMS_ELEMENTS, 100])
def test_many_numbers_may_not_all_be_one_ulp_off(count: int) -> None:
    assert not check(*off_by(1, count)).ok
    actual, eager, exact = off_by(0, count)
    actual[0] += ULP
    assert check(actual, eager, exact).ok


def test_fp32_on_a_cpu_may_be_one_more_ulp_off() -> None:
    exact = torch.full((100,), 12.0, dtype=torch.float64)
    actual = exact.float()
    actual[0] += 2 * 2.0**-20
    assert check(actual, exact.float(), exact).ok
    actual[0] += 2.0**-20
    assert not check(actual, exact.float(), exact).ok


def softmax(dtype: torch.dtype, rows: int = 64, cols: int = 512) -> tuple[Tensor, Tensor]:
    """Exact rows with a few large values among many small ones, and the same rows rounded."""
    x = 4 * torch.randn(rows, cols, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    exact = x.softmax(-1)
    return exact, exact.to(dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_a_large_value_does_not_hide_the_errors_of_small_ones(dtype: torch.dtype) -> None:
    exact, eager = softmax(dtype)
    assert judge(eager, eager, exact) is None
    ulp = torch.finfo(dtype).eps * exact.amax() / 2  # at the largest value
    off = torch.where(exact < exact.amax(-1, keepdim=True) / 64, exact + ulp / 2, exact).to(dtype)
    assert float((off.double() - exact).abs().max()) <= ulp
    if dtype == torch.float32:  # whose operands, themselves fp32, have errors
        off = torch.where(exact < exact.amax(-1, keepdim=True) / 64, exact + 4 * ulp, exact).to(dtype)
    assert "below" in str(judge(off, eager, exact))


def test_a_large_row_does_not_hide_the_errors_of_others() -> None:
    """As in the gradient of an embedding, where a frequent token has a large row."""
    exact, _ = softmax(torch.float32)
    exact[3] *= 1e5
    eager = exact.float()
    off = eager.clone()
    off[5] += 2.0**-10 * exact[5].amax()  # much less than an ulp of row 3
    assert judge(eager, eager, exact) is None and judge(off, eager, exact) is not None


def test_a_row_that_cancels_does_not_set_its_own_scale() -> None:
    exact, eager = softmax(torch.float32)
    exact[3], eager[3] = 0.0, 0.0
    actual = eager.clone()
    actual[3] = 2.0**-25 * exact.amax()
    assert judge(actual, eager, exact) is None


def test_eagers_error_is_allowed_only_in_the_band_where_it_occurs() -> None:
    exact, actual = softmax(BF16)
    eager = torch.where(exact < exact.amax(-1, keepdim=True) * 2.0**-10, exact * 1.5, exact).to(BF16)
    assert judge(eager, eager, exact) is None
    off = torch.where(exact > exact.amax(-1, keepdim=True) / 16, exact * 1.05, exact).to(BF16)
    assert judge(actual, eager, exact) is None and judge(off, eager, exact) is not None


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (), (1,), (40, 1), (1, 40), (2, 20, 3)])
def test_any_shape_can_be_checked(shape: tuple[int, ...]) -> None:
    exact = torch.randn(shape, dtype=torch.float64)
    assert judge(exact.float(), exact.float(), exact) is None
    if exact.numel():
        assert judge(exact.float() + 0.1, exact.float(), exact) is not None


@pytest.mark.parametrize("value", [0.0, 1e-40, 3e38])
def test_any_magnitude_can_be_checked(value: float) -> None:
    exact = torch.full((100,), value, dtype=torch.float64)
    actual = exact.float()
    assert judge(actual, actual, exact.float().double()) is None
    assert judge(actual + 2.0**-20, actual, exact) is not None or value > 1e38


def test_a_nan_is_wrong_unless_eager_has_it_too() -> None:
    exact = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert judge(exact.float(), exact.float(), exact) is None
    assert "NaNs" in str(judge(torch.tensor([float("nan"), float("nan")]), exact.float(), exact))


def test_an_infinity_is_wrong_unless_eager_has_it_too() -> None:
    inf = float("inf")
    exact = torch.tensor([1.0, inf, -inf], dtype=torch.float64)
    assert judge(exact.float(), exact.float(), exact) is None
    for wrong in ([inf, inf, -inf], [1.0, -inf, -inf], [1.0, inf, 3e38]):
        assert "infinities" in str(judge(torch.tensor(wrong), exact.float(), exact))


def test_integers_are_compared_exactly() -> None:
    eager = torch.tensor([3, 4, 5])
    assert judge(eager.clone(), eager, eager.double()) is None
    for wrong in (2, 4):
        assert judge(torch.tensor([wrong, 4, 5]), eager, eager.double()) == "1 of 3 elements differ from eager's"


def test_eagers_error_on_small_values_is_not_allowed_on_large_ones() -> None:
    """Relative to a row's largest value, eager may have larger errors on small values than are allowed elsewhere."""
    exact, actual = softmax(BF16)
    middling = (exact < exact.amax(-1, keepdim=True) * 2.0**-4) & (exact > exact.amax(-1, keepdim=True) * 2.0**-6)
    small = (exact < exact.amax(-1, keepdim=True) * 2.0**-8).nonzero()[0].tolist()
    eager, off = torch.where(middling, exact * 1.5, exact).to(BF16), actual.clone()
    off[*small] *= 1.05  # one element, which does not show in the RMS
    assert judge(eager, eager, exact) is None and judge(actual, eager, exact) is None
    assert judge(off, actual, exact) is not None and judge(off, eager, exact) is not None
