"""Cases in which another compiler's fusion of row and column reductions gave wrong answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.capture.function.trace import capture
from onepass.pipeline import optimize
from onepass.plan.legality import Family
from onepass.plan.schedule import MixOrder, cover
from onepass.tools.check import as_tuple
from tests.support.correctness import assert_right, randoms
from tests.support.forced_schedules import chosen, planned, run
from tests.support.mix_order_functions import concatenated, modulated_backward, one_more, poison_row, row_and_column_sums


@pytest.mark.parametrize("rows", [129, 130, 131])
@pytest.mark.parametrize("height", [1, 2, 4, 16])
def test_rows_past_the_end_add_nothing(rows: int, height: int) -> None:
    """f(0) = 1, so three rows past the end of a four-row step would add 3 to every column sum."""
    x = randoms(0, (rows, 64))
    captured = capture(one_more, (x,))
    program, bindings = optimize(captured.program), captured.bind((x,))
    assert bindings is not None
    schedule = MixOrder(height, 5, cover(64, 64), 2)
    plan = planned(program, bindings, chosen(program, bindings, Family.MIX, schedule))

    def as_forced(x: Tensor) -> tuple[Tensor, Tensor]:
        return captured.result(run(plan, captured.tensors((x,)), bindings), (x,))

    assert_right(as_forced, one_more, lambda seed: (randoms(seed, (rows, 64)),))


@pytest.mark.parametrize("rows", [127, 129, 1027])
def test_rows_past_the_end_add_nothing_under_the_default_plan(rows: int) -> None:
    assert_right(onepass.fuse(one_more), one_more, lambda seed: (randoms(seed, (rows, 16)),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("rows,cols", [(127, 96), (131, 128), (13, 768)])
def test_the_row_after_the_last_is_not_read(rows: int, cols: int, dtype: torch.dtype) -> None:
    assert_right(onepass.fuse(row_and_column_sums), row_and_column_sums, lambda seed: (poison_row(seed, rows, cols, dtype),))


@pytest.mark.parametrize("rows,cols", [(128, 96), (131, 33), (2, 768)])
def test_outputs_that_are_slices_of_a_concatenation(rows: int, cols: int) -> None:
    assert_right(onepass.fuse(concatenated), concatenated, lambda seed: randoms(seed, (rows, cols), (rows, cols)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_chained_modulated_layer_norms_that_share_scale_and_shift(dtype: torch.dtype) -> None:
    def make(seed: int) -> tuple[Tensor, ...]:
        return randoms(seed, (4, 16, 96), (4, 16, 96), (4, 1, 96), (4, 1, 96), dtype=dtype)

    assert_right(onepass.fuse(modulated_backward), modulated_backward, make)


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.var_mean(x, 0), lambda x: x.var(), lambda x: (x.sum(0), x.sum(1), x.mean(0)), lambda x: x.logsumexp(0)],
    ids=["var_mean", "var", "sums", "logsumexp"],
)
@pytest.mark.parametrize("rows", [0, 1])
def test_reductions_of_no_rows_and_of_one(function: Callable[..., Any], rows: int) -> None:
    x = randoms(0, (rows, 5))
    for actual, eager in zip(as_tuple(onepass.fuse(function)(x)), as_tuple(function(x)), strict=True):
        torch.testing.assert_close(actual, eager, rtol=1e-6, atol=1e-6, equal_nan=True)
