"""The criterion: what it lets pass, and what not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass.ir.criterion import FEW, check, judge

ULP = 2.0**-20  # of fp32 between 8 and 16


def off_by(ulps: float, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Results that are so far away, where eager's are exact."""
    exact = torch.full((count,), 12.0, dtype=torch.float64)
    return (exact + ulps * ULP).float(), exact.float(), exact


@pytest.mark.parametrize("count", [1, FEW - 1])
def test_a_few_numbers_may_all_be_an_ulp_away(count: int) -> None:
    assert check(*off_by(1, count)).ok
    assert not check(*off_by(2, count)).ok


@pytest.mark.parametrize("count", [FEW, 100])
def test_many_may_not(count: int) -> None:
    assert not check(*off_by(1, count)).ok
    mine, eager, exact = off_by(0, count)
    mine[0] += ULP
    assert check(mine, eager, exact).ok


def test_a_nan_is_wrong_unless_eager_has_it_too() -> None:
    exact = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert judge(exact.float(), exact.float(), exact) is None
    assert "NaNs" in str(judge(torch.tensor([float("nan"), float("nan")]), exact.float(), exact))
