"""Kernels that read from shared memory what TMA brings there, on the card: every kind, held against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.device import device
from onepass.pipeline import generate
from onepass.plan import candidates
from onepass.plan.plan import Plan
from onepass.runtime import offline
from onepass.runtime.compiled import Compiled
from onepass.runtime.executable import aligned_of, assemble
from onepass.tools.functions import (
    cross_entropy,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
    softmax,
    softmax_backward,
)
from onepass.tools.ours import EVERY, Ours
from onepass.tools.workloads import workload
from tests.support import assert_right, randoms, twice

H200, CARD = device("h200"), torch.device("cuda", 0)
MOST = 1 << 28  # elements of all inputs
SIDES = (256, 1024, 4096, 16384, 65536)


@pytest.fixture(autouse=True)
def has_tma() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < candidates.HAS_TMA:
        pytest.skip("no TMA")


def parked(ours: Ours, family: str) -> list[Plan]:
    """Plans with a kernel of this family, the one predicted best first; kernels beside it may be of any."""
    return [p for p in ours.plans(H200, EVERY)
            if any(k.schedule.parked and k.schedule.family.startswith(family) for k in p.kernels)]


def run(function: Callable[..., Any], args: Sequence[Tensor], family: str, most: int = 1) -> Callable[..., Any]:
    """The function by the best plans of a family, one after the other; results must be the same to the bit each time."""
    ours = Ours.of(function, args)
    plans = parked(ours, family)[:most]
    assert plans, f"nothing is parked ({family})"
    made = []
    for plan in plans:
        sources = generate(plan, ours.wide)
        binaries = tuple(offline.compile(s, H200, aligned_of(s, ours.aligned, ours.outputs)) for s in sources)
        made.append(assemble(Compiled(plan, sources, binaries).made, CARD, ours.aligned))

    def call(*given: Tensor) -> Any:
        tensors = ours.captured.tensors(given)
        return tuple(r for executable in made for r in _as_tuple(ours.captured.result(executable(tensors, ours.bindings), given)))

    call.plans = len(made)  # type: ignore[attr-defined]
    return call


def _as_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def right(function: Callable[..., Any], make: Callable[[int], Sequence[Tensor]], family: str, most: int = 1) -> None:
    fused = run(function, make(0), family, most)
    count = fused.plans  # type: ignore[attr-defined]
    assert_right(fused, lambda *a: _as_tuple(function(*a)) * count, make, run=twice)


# ---- down columns ----------------------------------------------------------------------------------------------------------


def sums(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.float().sum(0) for x in xs)


def greatest(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.float().amax(0) for x in xs)


def moments(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple(r for x in xs for r in torch.var_mean(x.float(), 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("inputs", [1, 2, 3, 5, 7, 8, 14])
@pytest.mark.parametrize("cols", SIDES)
@pytest.mark.parametrize("function", [sums, greatest, moments])
def test_outer(function: Callable[..., Any], cols: int, inputs: int, dtype: torch.dtype, sizeable: None) -> None:
    for rows in SIDES:
        if rows * cols * inputs <= MOST:
            right(function, lambda seed, rows=rows: _several(seed, inputs, (rows, cols), dtype), "outer")  # type: ignore[misc]


def _several(seed: int, inputs: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    made = randoms(seed, *[shape] * inputs, dtype=dtype, device="cuda")
    return made if isinstance(made, tuple) else (made,)


# ---- along rows ------------------------------------------------------------------------------------------------------------

WIDTHS = (16384, 32768, 50257, 65536, 128256, 131072, 151936, 262144)
ROWS = 300  # more than one turn of every CTA


@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("function,name", [(softmax, "softmax"), (softmax_backward, "softmax_backward"), (rms_norm, "rms_norm"),
                                           (layer_norm, "layer_norm"), (cross_entropy, "cross_entropy")])
def test_rows(function: Callable[..., Any], name: str, cols: int, sizeable: None) -> None:
    make = lambda seed: workload(name).inputs((ROWS, cols), torch.bfloat16, "cuda", seed)  # noqa: E731
    if not parked(Ours.of(function, make(0)), "inner parked"):
        pytest.skip("a row does not fit one SM, or is needed once")
    right(function, make, "inner parked", most=4)


@pytest.mark.parametrize("cols", [4096, 8192, 16384, 32768])
@pytest.mark.parametrize("function,name", [(rms_norm_backward, "rms_norm_backward"), (layer_norm_backward, "layer_norm_backward")])
def test_rows_and_columns(function: Callable[..., Any], name: str, cols: int, sizeable: None) -> None:
    make = lambda seed: workload(name).inputs((1000, cols), torch.bfloat16, "cuda", seed)  # noqa: E731
    if not parked(Ours.of(function, make(0)), "mix-order parked"):
        pytest.skip("states of all columns do not fit registers")
    right(function, make, "mix-order parked", most=4)
