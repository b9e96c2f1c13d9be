"""Kernels that read from shared memory what TMA brings there, on the card: every kind, held against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.device import device
from onepass.integration.engine import Kernels
from onepass.ir.program import Reduce, Store
from onepass.pipeline import generate, specialise
from onepass.plan import candidates
from onepass.plan.partition import Search
from onepass.plan.plan import Plan
from onepass.plan.schedule import Block
from onepass.runtime import offline
from onepass.runtime.compiled import Compiled
from onepass.runtime.executable import aligned_of, assemble
from onepass.tools.functions import (
    cross_entropy,
    cross_entropy_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
    softmax,
    softmax_backward,
)
from onepass.tools.ours import Ours
from onepass.tools.workloads import workload
from tests.support import assert_right, randoms, twice

H200, CARD = device("h200"), torch.device("cuda", 0)
MOST = 1 << 28  # elements of all inputs
SIDES = (256, 1024, 4096, 16384, 65536)
Room = Callable[[int], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def has_tma() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < candidates.HAS_TMA:
        pytest.skip("no TMA")


def parked(ours: Ours, family: str, most: int, share: int | None = None) -> list[Plan]:
    """Plans of one kernel of this family, the one predicted best first, and whatever joins its results; `share`: of those by which
    so many CTAs take a row together."""
    program, sizes = specialise(ours.program, ours.bindings)
    search, whole = Search(program, sizes, H200, {}), frozenset(program.of(Reduce, Store))
    found = [s for s in search.others(whole) if s.plan.schedule.parked and s.plan.schedule.family.startswith(family)
             and share in (None, s.plan.schedule.shared)]
    return [search.assembled([whole], {whole: s}) for s in sorted(found, key=lambda s: s.us)[:most]]


def run(ours: Ours, plans: Sequence[Plan]) -> Callable[..., tuple[Tensor, ...]] | None:
    """A function by several plans, one after the other: all results of all. Those that spill are left out; None where all do."""
    made = []
    for plan in plans:
        sources = generate(plan, ours.wide)
        binaries = tuple(offline.compile(s, H200, aligned_of(s, ours.aligned, ours.outputs)) for s in sources)
        if not any(b.spill_bytes for b in binaries):  # the planner would not take it
            made.append(assemble(Compiled(plan, sources, binaries).made, CARD, ours.aligned))
    if not made:
        return None

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        tensors = ours.captured.tensors(given)
        return tuple(r for executable in made for r in _as_tuple(ours.captured.result(executable(tensors, ours.bindings), given)))

    call.plans = len(made)  # type: ignore[attr-defined]
    return call


def _as_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def right(function: Callable[..., Any], make: Callable[[int], Sequence[Tensor]], family: str, most: int = 1,
          share: int | None = None) -> bool:
    """Are the best plans of a family right, and the same to the bit each time? False where there is none that does not spill."""
    ours = Ours.of(function, make(0))
    fused = run(ours, parked(ours, family, most, share))
    if fused is not None:
        count = fused.plans  # type: ignore[attr-defined]
        assert_right(fused, lambda *a: _as_tuple(function(*a)) * count, make, run=twice)
    return fused is not None


def right_by_default(function: Callable[..., Any], make: Callable[[int], Sequence[Tensor]]) -> None:
    """What `fuse` makes of it is right and spills nothing."""
    ours = Ours.of(function, make(0))
    made = Kernels(ours.program, ours.program.name).prepare(ours.bindings, CARD, ours.aligned).result()
    assert not any(b.spill_bytes for b in made.binaries)
    assert_right(onepass.fuse(function), function, make, run=twice)


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
def test_outer(function: Callable[..., Any], cols: int, inputs: int, dtype: torch.dtype, room: Room) -> None:
    for rows in SIDES:
        if (elements := rows * cols * inputs) <= MOST:
            make = lambda seed, rows=rows: _several(seed, inputs, (rows, cols), dtype)  # noqa: E731
            with room(elements):
                if not right(function, make, "outer"):  # states of so many columns do not fit beside so many tiles
                    right_by_default(function, make)


def _several(seed: int, inputs: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    made = randoms(seed, *[shape] * inputs, dtype=dtype, device="cuda")
    return made if isinstance(made, tuple) else (made,)


# ---- along rows ------------------------------------------------------------------------------------------------------------

WIDTHS = (16384, 32768, 50257, 65536, 128256, 131072, 151936, 262144)
ROWS = 300  # more than one turn of every CTA


LONG = {f.__name__: f for f in (softmax, softmax_backward, rms_norm, rms_norm_backward, layer_norm, layer_norm_backward,
                                cross_entropy, cross_entropy_backward)}


@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("name", LONG)
def test_long_rows(name: str, cols: int, sizeable: None) -> None:
    make = lambda seed: workload(name).inputs((ROWS, cols), torch.bfloat16, "cuda", seed)  # noqa: E731
    right_by_default(LONG[name], make)
    for family in ("inner parked", "mix-order parked", "mix-order shared"):
        right(LONG[name], make, family, most=4)


@pytest.mark.parametrize("name", ["softmax", "rms_norm", "layer_norm"])
def test_many_short_rows_one_a_cta(name: str) -> None:
    """CTAs that come and go quickly: what one does too early or too late is seen in some row of some launch."""
    make = lambda seed: workload(name).inputs((65536, 1024), torch.float32, "cuda", seed)  # noqa: E731
    ours = Ours.of(LONG[name], make(0))
    fused = run(ours, [p for p in parked(ours, "inner parked", 100) if isinstance(p.kernels[0].schedule.rows, Block)][:2])
    assert fused is not None
    count = fused.plans  # type: ignore[attr-defined]
    assert_right(fused, lambda *a: _as_tuple(LONG[name](*a)) * count, make, run=twice)
    inputs = make(1)
    first = fused(*inputs)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(fused(*inputs), first, strict=True))


@pytest.mark.parametrize("cols", [4096, 8192])
@pytest.mark.parametrize("name", ["rms_norm_backward", "layer_norm_backward"])
def test_rows_and_columns(name: str, cols: int, sizeable: None) -> None:
    make = lambda seed: workload(name).inputs((1000, cols), torch.bfloat16, "cuda", seed)  # noqa: E731
    assert right(LONG[name], make, "mix-order parked", most=4)


@pytest.mark.parametrize("share", [2, 4])
@pytest.mark.parametrize("rows", [300, 1001])
@pytest.mark.parametrize("name", ["rms_norm_backward", "layer_norm_backward"])
def test_rows_shared_by_several_ctas(name: str, rows: int, share: int, sizeable: None) -> None:
    make = lambda seed: workload(name).inputs((rows, 32768), torch.bfloat16, "cuda", seed)  # noqa: E731
    assert right(LONG[name], make, "mix-order shared", most=4, share=share)


def test_shared_rows_in_a_graph(sizeable: None) -> None:
    """Words are cleared in every replay: what is left of the one before would be taken for states of this one."""
    args = workload("rms_norm_backward").inputs((300, 32768), torch.bfloat16, "cuda", 0)
    ours = Ours.of(rms_norm_backward, args)
    fused = run(ours, parked(ours, "mix-order shared", 2))
    assert fused is not None
    expected = fused(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused(*args)
    other = workload("rms_norm_backward").inputs((300, 32768), torch.bfloat16, "cuda", 1)
    originals = [a.clone() for a in args]
    for given in (originals, other, originals):
        for place, value in zip(args, given, strict=True):
            place.copy_(value)
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
