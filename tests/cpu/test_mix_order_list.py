"""The functions and shapes of a mix-order fusion's test list, interpreted at small sizes."""

from __future__ import annotations

import pytest
import torch

import onepass
from tests.support.correctness import assert_right, randoms
from tests.support.mix_order_functions import LIST, row_and_column_sums

ALL = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, listed in LIST.items()
    for dtype in listed.dtypes
]


@pytest.mark.parametrize("name,dtype", ALL)
def test_a_listed_function_is_right(name: str, dtype: torch.dtype) -> None:
    listed = LIST[name]
    assert_right(onepass.fuse(listed.function), listed.function, lambda seed: listed.inputs(listed.small, dtype, seed))


def test_one_capture_for_every_number_of_rows() -> None:
    fused = onepass.fuse(row_and_column_sums)
    for rows in (20, 40, 512):
        assert_right(fused, row_and_column_sums, lambda seed, rows=rows: (randoms(seed, (rows, 64)),))  # type: ignore[misc]
    assert len(fused._traces) == 1
