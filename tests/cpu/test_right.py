"""Every case, interpreted: a thinned product of sizes, every layout, and rows of infinities and NaNs.

The product is thinned by case: each gets every STRIDE-th shape from a start of its own, so that together the cases meet
every shape, and each meets long, short and odd rows.
"""

from __future__ import annotations

import pytest
import torch

import onepass
from tests.cases import CASES, Case, shapes
from tests.support import assert_right

MOST = 1 << 16
STRIDE = 9
ODD = (13, 1027)  # rows that start anywhere in a sector


def thinned(case: Case) -> list[tuple[int, int]]:
    """A few shapes for a case, other ones for the next."""
    return shapes(case, MOST)[case.number() % STRIDE :: STRIDE]


def sized() -> list:
    """(case, rows, cols, dtype) of the thinned product, dtypes in turn."""
    found = []
    for case in CASES.values():
        for k, (rows, cols) in enumerate(thinned(case)):
            dtype = case.dtypes[(k + case.number()) % len(case.dtypes)]
            found.append(pytest.param(case, rows, cols, dtype, id=f"{case.name}-{rows}x{cols}-{name(dtype)}"))
    return found


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("case,rows,cols,dtype", sized())
def test_sizes(case: Case, rows: int, cols: int, dtype: torch.dtype) -> None:
    assert_right(onepass.fuse(case.function), case.function, case.inputs(rows, cols, dtype))
