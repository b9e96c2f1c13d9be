"""Every case, interpreted: a sample of the product of sizes, every layout, and rows of infinities and NaNs.

The product is sampled by case: each gets every STRIDE-th shape with a different start, so that together the cases cover
every shape, and each has long, short and odd rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onepass
from onepass.runtime.interpreter import interpret
from onepass.tools.check import as_tuple
from tests.support.correctness import assert_right, twice
from tests.support.function_cases import CASES, LAYOUTS, Case, shapes, with_specials

MOST = 1 << 16
MOST_ROWS = 2100  # at worst interpreted one at a time; a few cases have more
STRIDE = 9
ODD = (13, 1027)  # unaligned rows


def sampled_shapes(case: Case) -> list[tuple[int, int]]:
    """A few shapes for a case, different from those of the next case."""
    fitting = [shape for shape in shapes(case, MOST) if shape[0] * case.copies <= MOST_ROWS]
    return fitting[case.number() % STRIDE :: STRIDE]


def size_params() -> list[Any]:
    """(case, rows, cols, dtype) of the sampled product, dtypes in turn."""
    found = []
    for case in CASES.values():
        for k, (rows, cols) in enumerate(sampled_shapes(case)):
            dtype = case.dtypes[(k + case.number()) % len(case.dtypes)]
            found.append(pytest.param(case, rows, cols, dtype, id=f"{case.name}-{rows}x{cols}-{name(dtype)}"))
    return found


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("case,rows,cols,dtype", size_params())
def test_sizes(case: Case, rows: int, cols: int, dtype: torch.dtype) -> None:
    assert_right(onepass.fuse(case.function), case.function, lambda seed: case.inputs(rows, cols, dtype, seed=seed))


@pytest.mark.parametrize("rows", [2304, 5120, 8472, 50257])
@pytest.mark.parametrize(
    "name", ["rms_norm-w", "layer_norm-wb-backward", "softmax-first", "gelu-bias-backward", "sum-both", "argmax-0"]
)
def test_many_rows(name: str, rows: int) -> None:
    case = CASES[name]
    assert_right(onepass.fuse(case.function), case.function, lambda seed: case.inputs(rows, 1, torch.bfloat16, seed=seed))


@pytest.mark.parametrize("name", ["var-0", "moments-cols", "logsumexp-first"])
def test_long_fp32_reductions_keep_their_last_bits(name: str) -> None:
    """Running means, variances and sums of exponentials are compensated for the rounding of hundreds of steps."""
    case = CASES[name]
    assert_right(onepass.fuse(case.function), case.function, lambda seed: case.inputs(50257, 2, torch.float32, seed=seed))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_rows(case: Case) -> None:
    """Results match eager: zeros, NaNs or an error."""
    inputs = case.inputs(0, 128, case.dtypes[0])
    try:
        eager = as_tuple(case.function(*inputs))
    except (RuntimeError, IndexError):
        with pytest.raises((RuntimeError, IndexError)):
            onepass.fuse(case.function)(*inputs)
        return
    for actual, expected in zip(as_tuple(onepass.fuse(case.function)(*inputs)), eager, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def layout_params() -> list[Any]:
    """Every case in two of the layouts, in turn."""
    found = []
    for case in CASES.values():
        for k in range(2):
            layout = list(LAYOUTS)[(case.number() + k) % len(LAYOUTS)]
            found.append(pytest.param(case, layout, id=f"{case.name}-{layout}"))
    return found


@pytest.mark.parametrize("case,layout", layout_params())
def test_layouts(case: Case, layout: str) -> None:
    rows, cols = (13, 256) if case.multiple > 1 or case.copies > 1 else ODD
    dtype = case.dtypes[case.number() % len(case.dtypes)]
    make = lambda seed: tuple(LAYOUTS[layout](t) for t in case.inputs(rows, cols, dtype, seed=seed))  # noqa: E731
    assert_right(onepass.fuse(case.function), case.function, make)


SPECIAL = {name: case for name, case in CASES.items() if case.special}


@pytest.mark.parametrize("cols", [5, 1027])
@pytest.mark.parametrize("case", SPECIAL.values(), ids=SPECIAL)
def test_infinities_and_nans(case: Case, cols: int) -> None:
    make = lambda seed: tuple(with_specials(t) for t in case.inputs(7, cols, case.dtypes[-1], seed=seed))  # noqa: E731
    assert_right(onepass.fuse(case.function), case.function, make, run=twice)


@pytest.mark.parametrize("name", ["softmax-last", "log_softmax-last", "logsumexp-last", "cross_entropy-none", "argmax-2"])
def test_two_long_rows(name: str) -> None:
    """The largest case: a vocabulary of 50257."""
    case = CASES[name]
    assert_right(onepass.fuse(case.function), case.function, lambda seed: case.inputs(2, 50257, torch.bfloat16, seed=seed))


UNORDERED = [
    ("rms_norm-w-backward", 2, "misaligned"),
    ("layer_norm-wb-backward", 5, "expanded"),
    ("rms_norm-w-backward", 5, "expanded"),
    ("softmax-last-backward", 5, "expanded"),
    ("layer_norm-wb", 13, "sliced"),
]


@pytest.mark.parametrize("name,rows,layout", UNORDERED)
def test_the_order_of_ctas_changes_no_bit(name: str, rows: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CTAs of all rows compute a value that all rows share, possibly with different rounding, and one of them writes it."""
    case = CASES[name]
    inputs = tuple(LAYOUTS[layout](t) for t in case.inputs(rows, 1027, torch.float32))
    forwards = as_tuple(onepass.fuse(case.function)(*inputs))
    monkeypatch.setattr(interpret, "program_order", lambda programs: reversed(range(programs)))
    backwards = as_tuple(onepass.fuse(case.function)(*inputs))
    assert all(torch.equal(one, two) for one, two in zip(forwards, backwards, strict=True))
