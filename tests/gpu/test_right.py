"""Every case on the card, at every number of rows and columns: poisoned outputs, twice with bitwise equal results.

One fused function serves all row counts of a width, as it does for users. Plain reductions take the widths in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.tools.check import as_tuple
from tests.support.correctness import assert_right, randoms, twice
from tests.support.function_cases import CASES, DIMS, LAYOUTS, REDUCTIONS, SIZES, Case, with_specials
from tests.support.mix_order_functions import LIST, concatenated, modulated_backward, one_more, poison_row, row_and_column_sums

MOST = 1 << 26  # elements of all arguments together
PLAIN = {f"{name}-{dims}" for name in REDUCTIONS for dims in DIMS}
TURN = 4


def check_right(fused: Callable[..., Any], function: Callable[..., Any], make: Callable[[int], Sequence[Tensor]]) -> None:
    assert_right(fused, function, make, run=twice)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def widths() -> list[Any]:
    """(case, columns, dtype): every width, the dtypes in turn."""
    found = []
    for case in CASES.values():
        for k, cols in enumerate(SIZES):
            if cols % case.multiple or (case.name in PLAIN and (k + case.number()) % TURN):
                continue
            # A norm of one or two fp32 columns is ill-conditioned: the largest errors are a matter of chance.
            narrow = cols <= 2 and case.name not in PLAIN
            dtype = case.dtypes[0 if narrow else (k + case.number() // TURN) % len(case.dtypes)]
            found.append(pytest.param(case, cols, dtype, id=f"{case.name}-{cols}-{short(dtype)}"))
    return found


def elements(case: Case, rows: int, cols: int) -> int:
    return sum(t.numel() for t in case.inputs(rows, cols, torch.float32, "meta"))


@pytest.mark.parametrize("case,cols,dtype", widths())
def test_sizes(case: Case, cols: int, dtype: torch.dtype) -> None:
    fused, failed = onepass.fuse(case.function), []
    for rows in SIZES:
        if elements(case, rows, cols) > MOST:
            continue
        try:
            check_right(fused, case.function, lambda seed, rows=rows: case.inputs(rows, cols, dtype, "cuda", seed))  # type: ignore[misc]
        except AssertionError as error:
            failed.append(f"{rows} rows: {error}")
    assert not failed, "\n".join(failed)


# With rows that are all equal, eager adds them one by one and finds exactly zero; the sum of a tile of them is rounded, so that
# the variance is the square of a rounding error: below any tolerance, but not below one ulp of zero.
SPREADS_OF_ROWS = ("var-0", "moments-cols")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layouts(case: Case, layout: str) -> None:
    cols = 2304 if case.multiple > 1 else (1027, 1000, 127)[case.number() % 3]
    dtype = case.dtypes[case.number() % len(case.dtypes)]
    make = lambda seed: tuple(LAYOUTS[layout](t) for t in case.inputs(1000, cols, dtype, "cuda", seed))  # noqa: E731
    if layout == "expanded" and case.name in SPREADS_OF_ROWS:
        torch.testing.assert_close(twice(onepass.fuse(case.function), make(0)), as_tuple(case.function(*make(0))))
        return
    check_right(onepass.fuse(case.function), case.function, make)


SPECIAL = {name: case for name, case in CASES.items() if case.special}


@pytest.mark.parametrize("cols", [5, 1027, 5120])
@pytest.mark.parametrize("case", SPECIAL.values(), ids=SPECIAL)
def test_infinities_and_nans(case: Case, cols: int) -> None:
    make = lambda seed: tuple(with_specials(t) for t in case.inputs(127, cols, case.dtypes[-1], "cuda", seed))  # noqa: E731
    check_right(onepass.fuse(case.function), case.formula or case.function, make)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_rows(case: Case) -> None:
    inputs = case.inputs(0, 128, case.dtypes[0], "cuda")
    try:
        eager = case.function(*inputs)
    except (RuntimeError, IndexError):
        with pytest.raises((RuntimeError, IndexError)):
            onepass.fuse(case.function)(*inputs)
        return
    torch.testing.assert_close(onepass.fuse(case.function)(*inputs), eager, rtol=0, atol=0, equal_nan=True)


# ---- bugs of another compiler's mix-order fusion, and its test list, at full size ------------------------------------------


@pytest.mark.parametrize("rows", [32768, 32769, 32770, 32771])
def test_rows_past_the_end_add_nothing(rows: int) -> None:
    check_right(onepass.fuse(one_more), one_more, lambda seed: (randoms(seed, (rows, 512), device="cuda"),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_the_row_after_the_last_is_not_read(dtype: torch.dtype) -> None:
    make = lambda seed: (poison_row(seed, 33791, 768, dtype, "cuda"),)  # noqa: E731
    check_right(onepass.fuse(row_and_column_sums), row_and_column_sums, make)


def test_outputs_that_are_slices_of_a_concatenation() -> None:
    make = lambda seed: randoms(seed, (32768, 768), (32768, 768), device="cuda")  # noqa: E731
    check_right(onepass.fuse(concatenated), concatenated, make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_chained_modulated_layer_norms_that_share_scale_and_shift(dtype: torch.dtype) -> None:
    shapes = ((8, 4096, 768), (8, 4096, 768), (8, 1, 768), (8, 1, 768))
    make = lambda seed: randoms(seed, *shapes, dtype=dtype, device="cuda")  # noqa: E731
    check_right(onepass.fuse(modulated_backward), modulated_backward, make)


LISTED = [pytest.param(name, dtype, id=f"{name}-{short(dtype)}") for name, listed in LIST.items() for dtype in listed.dtypes]


@pytest.mark.parametrize("name,dtype", LISTED)
def test_a_listed_function_is_right(name: str, dtype: torch.dtype) -> None:
    listed = LIST[name]
    check_right(onepass.fuse(listed.function), listed.function, lambda seed: listed.inputs(listed.full, dtype, seed, "cuda"))
