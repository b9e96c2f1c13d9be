"""Indices out of range: nothing is read there, and results that depend on them are NaN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.capture.function.trace import capture
from onepass.errors import BadArgument
from onepass.ir.oracle import evaluate
from tests.support.correctness import randoms

FLOATS = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def surrounded(dtype: torch.dtype, rows: int, cols: int) -> Tensor:
    """A tensor inside a larger one, whose values an out-of-range read would find."""
    around = torch.full((rows + 2, cols), 100.0)
    around[1:-1] = randoms(0, (rows, cols))
    return around.to(dtype)[1:-1]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cols", [1, 6, 2000])
def test_elements_at_out_of_range_indices_are_nan(dtype: torch.dtype, cols: int) -> None:
    x = surrounded(dtype, 5, cols)
    index = torch.tensor([0, cols - 1, cols, -1, 10**9])[:, None]
    found = onepass.fuse(lambda x, i: x.float().gather(1, i))(x, index)
    assert torch.equal(found[:2], x.float().gather(1, index.clamp(0, cols - 1))[:2]) and found[2:].isnan().all()


def test_integer_elements_at_out_of_range_indices_are_zero() -> None:
    x, index = torch.arange(1, 31).reshape(5, 6), torch.tensor([0, 5, 6, -1, 1 << 40])[:, None]
    found = onepass.fuse(lambda x, i: x.gather(1, i))(x, index)
    assert found[:, 0].tolist() == [1, 12, 0, 0, 0]
    x, index = torch.arange(1, 4)[:, None], torch.tensor([0, 1, -1])[:, None]
    fused = onepass.fuse(lambda x, i: (x.gather(1, i), (x > 0).gather(1, i)))
    assert [found[:, 0].tolist() for found in fused(x, index)] == [[1, 0, 0], [True, False, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows,cols", [(7, 6), (7, 1027), (1, 50257)])
def test_the_loss_of_a_class_that_does_not_exist_is_nan(dtype: torch.dtype, rows: int, cols: int) -> None:
    """Only the loss of its row, and so the mean, is NaN. Ignored rows need no valid class."""
    x, target = surrounded(dtype, rows, cols), torch.arange(rows) % cols
    target[0] = -100
    expected = F.cross_entropy(x.float(), target, reduction="none")
    target[-1] = cols
    fused = onepass.fuse(lambda x, t: (F.cross_entropy(x, t, reduction="none"), F.cross_entropy(x, t)))
    each, mean = fused(x, target)
    assert each[-1].isnan() and mean.isnan()
    torch.testing.assert_close(each[:-1].float(), expected[:-1], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("outside", [6, -1])
def test_the_oracle_names_the_index_that_is_out_of_range(outside: int) -> None:
    """So do calls that are verified against it (ONEPASS_VERIFY)."""
    x, index = randoms(0, (5, 6)), torch.full((5, 1), outside)
    captured = capture(lambda x, i: x.gather(1, i), (x, index))
    with pytest.raises(BadArgument, match=r"outside \[0, 6\)"):
        evaluate(captured.program, captured.tensors((x, index)), captured.bind((x, index)) or {})


@pytest.mark.parametrize("pad", [(0, 0), (1, 2), (0, 0, 1, 1), (1, 0, 0, 0, 2, 0)])
@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 4, 0), (0, 4, 3), (2, 4, 3)])
def test_padding_of_empty_tensors_and_by_zero(shape: tuple[int, ...], pad: tuple[int, ...]) -> None:
    x = randoms(0, shape)
    actual = onepass.fuse(lambda x: F.pad(x, pad, value=7.0))(x)
    assert torch.equal(actual, F.pad(x, pad, value=7.0))
