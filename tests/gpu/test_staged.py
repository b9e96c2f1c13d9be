"""Kernels that stage data in shared memory, on the card: every kind, compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

import onepass
from onepass.device import device
from onepass.integration.engine import Kernels
from onepass.ir.program import Reduce, Store
from onepass.measure.captured_function import CapturedFunction
from onepass.pipeline import generate
from onepass.plan.partition import Search
from onepass.plan.plan import Plan
from onepass.plan.schedule import Block, RowVectors
from onepass.plan.staged_rows import HAS_TMA
from onepass.plan.variant import specialize
from onepass.runtime import offline
from onepass.runtime.compiled import Artifact, Compiled
from onepass.runtime.executable import aligned_of, assemble
from onepass.tools.check import as_tuple
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
from onepass.tools.workloads import workload
from tests.support.correctness import assert_right, randoms, twice
from tests.support.fixture_types import Room

H200, CARD = device("h200"), torch.device("cuda", 0)
MOST = 1 << 28  # elements of all inputs
SIDES = (256, 1024, 4096, 16384, 65536)
Make: TypeAlias = Callable[[int, str], Sequence[Tensor]]  # a seed, and where to make the arguments


@pytest.fixture(autouse=True)
def has_tma() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < HAS_TMA:
        pytest.skip("no TMA")


def plans_of(
    ours: CapturedFunction, family: str, most: int, ctas_per_row: int | None = None, smem_vectors: bool | None = None
) -> list[Plan]:
    """Plans of one kernel of this family, the one predicted best first, and whatever joins its results.

    `ctas_per_row` selects plans by that number; `smem_vectors` those that keep row vectors in shared memory, or those that do not.
    """
    program, sizes = specialize(ours.program, ours.bindings)
    search, whole = Search(program, sizes, H200, {}), frozenset(program.of(Reduce, Store))
    found = [
        s
        for s in search.others(whole)
        if s.plan.schedule.staged
        and s.plan.schedule.family.startswith(family)
        and ctas_per_row in (None, s.plan.schedule.ctas_per_row)
        and smem_vectors in (None, s.plan.schedule.row_vectors is RowVectors.SMEM)
    ]
    return [search.assemble([whole], {whole: s}) for s in sorted(found, key=lambda s: s.us)[:most]]


def compiled(ours: CapturedFunction, plans: Sequence[Plan]) -> list[Artifact]:
    """The kernels of plans that do not spill; the planner would reject the others."""
    made = []
    for plan in plans:
        sources = generate(plan, ours.wide)
        binaries = tuple(offline.compile(s, H200, aligned_of(s, ours.aligned, ours.outputs)) for s in sources)
        if not any(b.spill_bytes for b in binaries):
            made.append(Compiled(plan, sources, binaries).artifact)
    return made


def run_plans(ours: CapturedFunction, made: Sequence[Artifact]) -> Callable[..., tuple[Tensor, ...]]:
    """Run a function under several plans, one after the other, and return all results."""
    executables = [assemble(each, CARD, ours.aligned) for each in made]

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        tensors = ours.captured.tensors(given)
        return tuple(r for run in executables for r in as_tuple(ours.captured.result(run(tensors, ours.bindings), given)))

    return call


def check_plans(
    function: Callable[..., Any],
    make: Make,
    room: Room,
    family: str,
    most: int = 1,
    ctas_per_row: int | None = None,
    smem_vectors: bool | None = None,
) -> bool:
    """Check that the best plans of a family are right and deterministic. False if all of them spill."""
    shapes = CapturedFunction.of(function, make(0, "meta"))
    made = compiled(shapes, plans_of(shapes, family, most, ctas_per_row, smem_vectors))
    if made:
        with room(gib(shapes)):
            fused = run_plans(CapturedFunction.of(function, make(0, "cuda")), made)
            assert_right(fused, lambda *a: as_tuple(function(*a)) * len(made), partial(make_on, make), run=twice)
    return bool(made)


def check_default_plan(function: Callable[..., Any], make: Make, room: Room) -> None:
    """Check that the default plan of `fuse` is right and does not spill."""
    shapes = CapturedFunction.of(function, make(0, "meta"))
    made = Kernels(shapes.program, shapes.program.name).prepare(shapes.bindings, CARD, shapes.aligned).result()
    assert not any(b.spill_bytes for b in made.binaries)
    with room(gib(shapes)):
        assert_right(onepass.fuse(function), function, partial(make_on, make), run=twice)


def make_on(make: Make, seed: int) -> Sequence[Tensor]:
    return make(seed, "cuda")


def gib(ours: CapturedFunction) -> float:
    """GiB, about, that the check takes on the card: float64 copies, eager's results, references, and several of our results."""
    return 12 * ours.floor_bytes / 2**30


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
        if rows * cols * inputs <= MOST:
            make = lambda seed, where, rows=rows: _several(seed, inputs, (rows, cols), dtype, where)  # noqa: E731
            if not check_plans(function, make, room, "outer"):  # states of so many columns do not fit next to so many tiles
                check_default_plan(function, make, room)


def _several(seed: int, inputs: int, shape: tuple[int, int], dtype: torch.dtype, where: str) -> tuple[Tensor, ...]:
    if where == "meta":
        return tuple(torch.empty(shape, dtype=dtype, device=where) for _ in range(inputs))
    made = randoms(seed, *[shape] * inputs, dtype=dtype, device=where)
    return made if isinstance(made, tuple) else (made,)


# ---- along rows ------------------------------------------------------------------------------------------------------------

WIDTHS = (16384, 32768, 50257, 65536, 128256, 131072, 151936, 262144)
ROWS = 300  # more than one row for every CTA


LONG = {
    f.__name__: f
    for f in (
        softmax,
        softmax_backward,
        rms_norm,
        rms_norm_backward,
        layer_norm,
        layer_norm_backward,
        cross_entropy,
        cross_entropy_backward,
    )
}


@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("name", LONG)
def test_long_rows(name: str, cols: int, room: Room) -> None:
    make = lambda seed, where: workload(name).inputs((ROWS, cols), torch.bfloat16, where, seed)  # noqa: E731
    check_default_plan(LONG[name], make, room)
    for family in ("inner staged", "mix-order staged", "mix-order multi-CTA"):
        check_plans(LONG[name], make, room, family, most=4)


@pytest.mark.parametrize("name", ["softmax", "rms_norm", "layer_norm"])
def test_many_short_rows_with_one_row_per_cta(name: str) -> None:
    """CTAs that start and end quickly: a missing synchronization would show in some row of some launch."""
    make = lambda seed, where: workload(name).inputs((65536, 1024), torch.float32, where, seed)  # noqa: E731
    ours = CapturedFunction.of(LONG[name], make(0, "cuda"))
    made = compiled(ours, [p for p in plans_of(ours, "inner staged", 100) if isinstance(p.kernels[0].schedule.rows, Block)][:2])
    assert made
    fused = run_plans(ours, made)
    assert_right(fused, lambda *a: as_tuple(LONG[name](*a)) * len(made), partial(make_on, make), run=twice)
    inputs = make(1, "cuda")
    first = fused(*inputs)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(fused(*inputs), first, strict=True))


@pytest.mark.parametrize("cols", [4096, 8192])
@pytest.mark.parametrize("name", ["rms_norm_backward", "layer_norm_backward"])
def test_rows_and_columns(name: str, cols: int, room: Room) -> None:
    make = lambda seed, where: workload(name).inputs((1000, cols), torch.bfloat16, where, seed)  # noqa: E731
    assert check_plans(LONG[name], make, room, "mix-order staged", most=4)


@pytest.mark.parametrize("ctas_per_row", [2, 4])
@pytest.mark.parametrize("smem_vectors", [False, True])
@pytest.mark.parametrize("rows", [300, 1001])
@pytest.mark.parametrize("name", ["rms_norm_backward", "layer_norm_backward"])
def test_rows_with_several_ctas(name: str, rows: int, smem_vectors: bool, ctas_per_row: int, room: Room) -> None:
    make = lambda seed, where: workload(name).inputs((rows, 32768), torch.bfloat16, where, seed)  # noqa: E731
    assert check_plans(LONG[name], make, room, "mix-order multi-CTA", most=4, ctas_per_row=ctas_per_row, smem_vectors=smem_vectors)


def test_rows_with_several_ctas_in_a_cuda_graph(sizeable: None) -> None:
    """Mailboxes are cleared in every replay; otherwise those of the previous one would be taken for states of this one."""
    args = workload("rms_norm_backward").inputs((300, 32768), torch.bfloat16, "cuda", 0)
    ours = CapturedFunction.of(rms_norm_backward, args)
    made = compiled(ours, plans_of(ours, "mix-order multi-CTA", 2))
    assert made
    fused = run_plans(ours, made)
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
