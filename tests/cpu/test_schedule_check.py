"""Invalid schedules are refused with a reason, and kernels of accepted ones are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onepass.capture import capture
from onepass.device import device
from onepass.errors import IllegalSchedule
from onepass.ir.program import Load, Program, Store
from onepass.ir.simplify import online_softmax
from onepass.ir.size import Bindings
from onepass.pipeline import generate, optimize
from onepass.plan import scoring
from onepass.plan.kernel import Kernel
from onepass.plan.legality import Illegal, Reason, families, space_of
from onepass.plan.partition import plan
from onepass.plan.plan import KernelPlan
from onepass.plan.schedule import (
    Cover,
    LoopedRows,
    MixOrder,
    MultiCtaMixOrder,
    Outer,
    Pointwise,
    ResidentRows,
    Ring,
    RowVectors,
    Schedule,
    SplitRows,
    StagedMixOrder,
    StagedRows,
    StagedTiles,
)
from onepass.plan.schedule.check import check
from onepass.plan.schedule.families import NODE_FIELDS
from onepass.plan.scoring import forms
from onepass.plan.staged_rows import tma_stageable
from onepass.plan.staging.tiles import tile_stageable
from onepass.plan.variant import specialize
from onepass.tools.workloads import WORKLOADS
from tests.support.forced_schedules import H200, assert_as_oracle, candidates, planned, under
from tests.support.random_schedules import Draw

BF16, F32 = torch.bfloat16, torch.float32


def softmax(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x.float() + w, -1).to(x.dtype)


def row_sums(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() * w).sum(-1)


def column_sums(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() * w).sum(0)


def column_softmax(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x.float() * w, 0)


def column_spread(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.float().var(0), torch.logsumexp(x.float(), 0) * w


def norm_backward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Both reductions of a norm's backward pass."""
    y = x.float()
    return (y - w * (y * y).mean(-1, keepdim=True)).to(x.dtype), (y * (y * y).mean(-1, keepdim=True)).sum(0)


def spread(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.float().var(-1), torch.logsumexp(x.float() * w, -1)


def variance(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() * w).var(-1)


def no_vectors(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Both reductions of a norm's backward pass without a weight."""
    y = x.float()
    return (y - (y * y).mean(-1, keepdim=True)).to(x.dtype), (y * (y * y).mean(-1, keepdim=True)).sum(0)


def all_sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.float() * w
    return y.sum(), y.sum(0), y.sum(-1)


def pointwise(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() * w).to(x.dtype)


def blocks(x: Tensor, w: Tensor) -> Tensor:
    y = x.unflatten(1, (-1, 16))
    return (y / (1 + y.abs().amax(2, keepdim=True)) + (x * w).sum(1)[:, None, None]).flatten(1)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        softmax,
        row_sums,
        column_sums,
        column_softmax,
        column_spread,
        norm_backward,
        no_vectors,
        spread,
        variance,
        all_sums,
        pointwise,
        blocks,
    )
}
SHAPES = ((5, 256), (7, 512), (6, 1024), (4, 131), (4, 1027), (9, 64), (33, 48), (6, 700))


@dataclass(frozen=True)
class Subject:
    """A function as one kernel, in every form, with the planner's candidates for it."""

    program: Program
    tensors: dict[str, Tensor]
    sizes: Bindings
    kernels: tuple[Kernel, ...]
    plans: tuple[KernelPlan, ...]


@cache
def subject(name: str, shape: tuple[int, int], dtype: torch.dtype, dynamic: bool) -> Subject | None:
    """A function as one kernel; None if its columns are not whole blocks."""
    rows, cols = shape
    if name == "blocks" and cols % 16:
        return None
    generator = torch.Generator().manual_seed(rows * cols)
    inputs = torch.randn(shape, generator=generator).to(dtype), torch.randn(cols, generator=generator).to(dtype)
    captured = capture(FUNCTIONS[name], inputs, dynamic=None if dynamic else False)
    program, sizes = specialize(optimize(captured.program), captured.bind(inputs) or {})
    space = space_of(program, sizes)
    assert not isinstance(space, Illegal)
    kinds = families(Kernel(program, space), Kernel(online_softmax(program), space))
    assert not isinstance(kinds, Illegal)
    kernels = tuple(form.kernel for family in kinds for form in forms(program, space, family))
    plans = tuple(one for _, found in candidates(program, sizes) for one in found)
    return Subject(program, captured.tensors(inputs), sizes, kernels, plans)


def drawn(rng: Random) -> Iterator[tuple[Subject, Kernel, Schedule]]:
    """A kernel and arbitrary schedules for it."""
    one = None
    while one is None:
        one = subject(rng.choice(sorted(FUNCTIONS)), rng.choice(SHAPES), rng.choice((BF16, F32)), rng.random() < 0.3)
    for _ in range(12):
        if one.plans and rng.random() < 0.5:
            start = rng.choice(one.plans)
            yield one, start.kernel, Draw(rng, start.kernel, one.sizes).changed(start.schedule, rng.choice((1, 1, 2)))
        else:
            kernel = rng.choice(one.kernels)
            draw = Draw(rng, kernel, one.sizes)
            yield one, kernel, draw.free() if rng.random() < 0.5 else draw.staged()


def outcome(one: Subject, kernel: Kernel, schedule: Schedule) -> str:
    """The family of a schedule that was accepted, run and found right, or the name of the reason for its refusal."""
    refused = check(kernel, schedule, H200)
    if refused:
        assert isinstance(refused.reason, Reason) and len(refused.detail.split()) > 2
        return refused.reason.name
    made = planned(one.program, one.sizes, under(kernel, schedule, one.sizes))
    assert_as_oracle(made, one.tensors, one.sizes, f"{kernel.program.name} {schedule}\n{kernel.program}\n{schedule!r}")
    return schedule.family


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_accepted_schedules_are_right_and_refused_ones_have_a_reason(seed: int) -> None:
    for one, kernel, schedule in drawn(Random(seed)):
        outcome(one, kernel, schedule)


def count(first: int, last: int) -> Counter[str]:
    """Count the outcomes of many draws."""
    return Counter(outcome(*one) for seed in range(first, last) for one in drawn(Random(seed)))


# ---- candidates of the planner -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_scored_schedule_is_legal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, found, scored = WORKLOADS[name], [0], scoring.scored_forms

    def checked(*args: Any) -> list[scoring.Scored]:
        made = scored(*args)
        refused = [(str(s.plan.schedule), why) for s in made if (why := check(s.plan.kernel, s.plan.schedule, args[3]))]
        assert not refused
        found[0] += len(made)
        return made

    monkeypatch.setattr(scoring, "scored_forms", checked)
    inputs = one.inputs()
    captured = capture(one.function, inputs)
    program, sizes = specialize(optimize(captured.program), captured.bind(inputs) or {})
    generate(plan(program, sizes, H200))
    assert found[0]


# ---- ill-formed schedules ------------------------------------------------------------------------------------------------------

# (function, shape, schedule, reason, a word of the detail). A negative node stands for all nodes of a kind; `of` replaces it.
ROWS, TILES, KEPT, COMPUTED, FIRST = (frozenset({i}) for i in (-1, -2, -3, -4, 0))
STAGED = StagedRows((1024,) * 4, 4, Ring(2, 2), staged=ROWS)
ACCUMULATES = StagedMixOrder((1024,) * 4, 4, Ring(2, 2), staged=ROWS)
MULTI_CTA = MultiCtaMixOrder((1024,) * 2, 2, 2, 4, staged=ROWS)
IN_TILES = StagedTiles(64, 64, 4, staged=TILES, strip_rows=16)
ROW, UNALIGNED = (40, 4096), (40, 1027)
A100 = device("a100")
ILL_FORMED: dict[str, tuple[Callable[..., Any], tuple[int, int], Schedule, Reason, str]] = {
    # families and sizes
    "a row sum without a walk": (row_sums, ROW, Pointwise(1, 64, 4), Reason.FAMILY, "covered or walked"),
    "a row sum down the rows": (row_sums, ROW, Outer(4, 64, 4), Reason.FAMILY, "over columns"),
    "a column sum along the columns": (column_sums, ROW, LoopedRows(1, 64, 4), Reason.FAMILY, "over rows"),
    "a column sum used in the loop": (column_softmax, ROW, MixOrder(1, 1, (4096,), 4), Reason.FAMILY, "end with the loop"),
    "nothing to reduce": (pointwise, ROW, ResidentRows(1, (4096,), 4), Reason.FAMILY, "no reduction"),
    "three warps": (softmax, ROW, LoopedRows(1, 256, 3), Reason.SIZES, "3 warps"),
    "a tile of 96": (softmax, ROW, LoopedRows(1, 96, 4), Reason.SIZES, "power of two"),
    "a cover that is too short": (softmax, ROW, ResidentRows(1, (1024,) * 3, 4), Reason.SIZES, "do not cover"),
    "an empty tile": (softmax, ROW, ResidentRows(1, (4096, 64), 4), Reason.SIZES, "empty"),
    "no tile": (softmax, ROW, ResidentRows(1, (), 4), Reason.SIZES, "no columns"),
    "a tile of too many elements": (softmax, ROW, ResidentRows(512, (4096,), 4), Reason.SIZES, "elements"),
    "no CTA": (row_sums, ROW, SplitRows(1, 64, 0, 4), Reason.SIZES, "at least one"),
    "rows split among one CTA": (row_sums, ROW, SplitRows(1, 64, 1, 4), Reason.SIZES, "at least two"),
    "rows shared by one CTA": (norm_backward, ROW, replace(MULTI_CTA, ctas_per_row=1), Reason.SIZES, "at least two"),
    "no stage": (softmax, ROW, LoopedRows(1, 64, 4, stages=0), Reason.SIZES, "at least 1"),
    "a part of a block": (blocks, ROW, LoopedRows(1, 8, 1), Reason.SIZES, "blocks of 16"),
    "sectors of aligned rows": (softmax, ROW, LoopedRows(1, 256, 4, sector_elems=16), Reason.FIELDS, "no row starts"),
    "sectors of several rows": (softmax, UNALIGNED, LoopedRows(2, 256, 4, sector_elems=16), Reason.FIELDS, "sectors"),
    "a split softmax": (softmax, ROW, SplitRows(1, 256, 2, 4), Reason.SPLIT, "cannot be joined"),
    # choices
    "accesses of three": (softmax, ROW, LoopedRows(1, 256, 4, vector_limit=3), Reason.SIZES, "accesses of 3"),
    "accesses of 32 bytes": (softmax, ROW, LoopedRows(1, 256, 4, vector_limit=16), Reason.SIZES, "up to 8"),
    "a computed value to be evicted": (softmax, ROW, LoopedRows(1, 256, 4, evict_last=COMPUTED), Reason.STORAGE, "eviction"),
    "a staged load to be evicted": (softmax, ROW, replace(STAGED, evict_last=ROWS), Reason.STORAGE, "eviction"),
    "a row kept that is used once": (row_sums, ROW, ResidentRows(1, (4096,), 4, resident=ROWS), Reason.STORAGE, "phases"),
    "nothing packed": (softmax, ROW, ResidentRows(1, (4096,), 4, packed=True), Reason.FIELDS, "packed"),
    "an early computed value": (softmax, ROW, ResidentRows(1, (4096,), 4, early_loads=COMPUTED), Reason.STORAGE, "early"),
    "an early load of the first walk": (row_sums, ROW, ResidentRows(1, (4096,), 4, early_loads=ROWS), Reason.STORAGE, "early"),
    "private sums": (row_sums, ROW, LoopedRows(1, 1024, 4, private_states=True), Reason.FIELDS, "one fold"),
    "private states that count": (variance, ROW, LoopedRows(1, 1024, 4, private_states=True), Reason.FIELDS, "counts"),
    "private states of half a vector": (softmax, ROW, LoopedRows(1, 512, 4, private_states=True), Reason.SIZES, "whole vectors"),
    "private states of two rows": (softmax, ROW, LoopedRows(2, 1024, 4, private_states=True), Reason.SIZES, "one row"),
    "vectors in smem with resident rows": (
        norm_backward,
        ROW,
        MixOrder(1, 2, (4096,), 4, row_vectors=RowVectors.SMEM),
        Reason.STORAGE,
        "in registers",
    ),
    "vectors in smem with a tail": (
        norm_backward,
        (40, 1280),
        replace(ACCUMULATES, tiles=(1024,) * 2, row_vectors=RowVectors.SMEM),
        Reason.STORAGE,
        "without a rest",
    ),
    "two sums where there is one": (norm_backward, ROW, replace(MULTI_CTA, folds_two_sums=True), Reason.FIELDS, "two sums"),
    "a walk over no copies": (norm_backward, ROW, replace(ACCUMULATES, unroll_copies=True), Reason.FIELDS, "copies"),
    # staged rows and tiles
    "prefetch into a ring of two rows": (softmax, ROW, replace(STAGED, ring=Ring(2, 2, 1)), Reason.FIELDS, "prefetch"),
    "prefetch of unaligned rows": (
        softmax,
        (40, 1089),
        StagedRows((512, 512, 256), 1, Ring(2, 1, 1), True, staged=FIRST),
        Reason.FIELDS,
        "unaligned",
    ),
    "too much prefetched": (softmax, ROW, replace(STAGED, ring=Ring(2, 1, 13)), Reason.SIZES, "mbarriers"),
    "a part of one copy prefetched": (
        softmax,
        (40, 1024),
        StagedRows((1024,), 4, Ring(2, 1, 1), staged=ROWS),
        Reason.SIZES,
        "several whole copies",
    ),
    "columns that CTAs cannot share": (norm_backward, ROW, replace(MULTI_CTA, ctas_per_row=3), Reason.SIZES, "divisible"),
    "one staged row for several CTAs": (norm_backward, ROW, replace(MULTI_CTA, stages=1), Reason.STORAGE, "two rows"),
    "CTAs that cannot run at once": (norm_backward, ROW, replace(MULTI_CTA, groups=600), Reason.DEVICE, "at once"),
    "nothing staged": (norm_backward, ROW, replace(ACCUMULATES, staged=frozenset()), Reason.STORAGE, "nothing is staged"),
    "a ring of seventeen rows": (softmax, ROW, replace(STAGED, ring=Ring(2, 17)), Reason.STORAGE, "mbarriers"),
    "chunks narrower than the threads": (softmax, ROW, replace(STAGED, tiles=(256,) * 16, warps=16), Reason.SIZES, "threads"),
    "chunks of three widths": (softmax, ROW, replace(STAGED, tiles=(2048, 1024, 512, 512)), Reason.SIZES, "one width"),
    "rows TMA cannot describe": (softmax, UNALIGNED, replace(STAGED, tiles=(512,) * 3, staged=FIRST), Reason.STORAGE, "TMA"),
    "staged rows without their inputs": (norm_backward, ROW, replace(ACCUMULATES, staged=frozenset({99})), Reason.STORAGE, "TMA"),
    "a ring that no CTA has room for": (
        softmax,
        (40, 32768),
        replace(STAGED, tiles=(4096,) * 8, ring=Ring(2, 4)),
        Reason.DEVICE,
        "shared memory",
    ),
    "a tile narrower than a vector": (column_sums, ROW, replace(IN_TILES, width=4, warps=1), Reason.SIZES, "vectors"),
    "strips of three rows": (column_sums, ROW, replace(IN_TILES, strip_rows=3), Reason.SIZES, "strips of 3"),
    "strips taller than their tile": (column_sums, ROW, replace(IN_TILES, strip_rows=128), Reason.SIZES, "strips of 128"),
    "strips of a part of the threads": (column_sums, ROW, replace(IN_TILES, strip_rows=8), Reason.SIZES, "strips of 8"),
    "staged tiles of what is needed twice": (column_softmax, ROW, replace(IN_TILES, staged=ROWS), Reason.STORAGE, "one pass"),
    "more registers than there are": (softmax, ROW, replace(STAGED, registers=600), Reason.DEVICE, "registers"),
}


def with_own_nodes(function: Callable[..., Any], shape: tuple[int, int], schedule: Schedule) -> tuple[Subject, Kernel, Schedule]:
    """A kernel of a function, and the schedule with the kernel's own nodes."""
    one = subject(function.__name__, shape, BF16, False)
    assert one
    held = isinstance(schedule.cols, Cover) or isinstance(schedule.rows, Cover)
    kernel = one.kernels[0 if held else -1]
    computed = [i for i, node in enumerate(kernel.program.nodes) if not isinstance(node, (Load, Store))]
    kinds = {ROWS: tma_stageable(kernel), TILES: tile_stageable(kernel), KEPT: kernel.multi_phase, COMPUTED: computed}
    meant: dict[str, Any] = {
        f.name: frozenset(kinds[nodes])
        for f in fields(schedule)
        if f.name in NODE_FIELDS and (nodes := getattr(schedule, f.name)) in kinds
    }
    return one, kernel, replace(schedule, **meant)


@pytest.mark.parametrize("what", ILL_FORMED)
def test_ill_formed_schedules_are_refused(what: str) -> None:
    function, shape, schedule, reason, words = ILL_FORMED[what]
    _, kernel, schedule = with_own_nodes(function, shape, schedule)
    refused = check(kernel, schedule, H200)
    assert refused and (refused.reason, words in refused.detail) == (reason, True), refused


@pytest.mark.parametrize(
    ("function", "schedule"), [(softmax, STAGED), (norm_backward, ACCUMULATES), (norm_backward, MULTI_CTA), (column_sums, IN_TILES)]
)
def test_the_schedules_that_ill_formed_ones_are_made_from_are_legal(function: Callable[..., Any], schedule: Schedule) -> None:
    _, kernel, schedule = with_own_nodes(function, ROW, schedule)
    assert check(kernel, schedule, H200) is None
    refused = check(kernel, schedule, A100)
    assert refused and refused.reason is Reason.DEVICE and "TMA" in refused.detail


def test_a_split_kernel_must_store_one_partial_state_per_cta() -> None:
    one, kernel, schedule = with_own_nodes(row_sums, ROW, SplitRows(1, 256, 2, 4))
    assert check(kernel, schedule, H200) is None
    refused = check(kernel, schedule, H200, emitted=True)
    assert refused and refused.reason is Reason.SPLIT and "leaves no" in refused.detail
    made = planned(one.program, one.sizes, under(kernel, schedule, one.sizes)).kernels[0]
    assert check(made.kernel, made.schedule, H200, emitted=True) is None
    for other in (LoopedRows(1, 256, 4), SplitRows(1, 256, 3, 4)):
        refused = check(made.kernel, other, H200, emitted=True)
        assert refused and refused.reason is Reason.SPLIT and "leaves 2" in refused.detail


def test_an_ill_formed_schedule_is_not_emitted() -> None:
    one, kernel, schedule = with_own_nodes(softmax, ROW, ResidentRows(1, (1024,) * 3, 4))
    made = planned(one.program, one.sizes, under(kernel, schedule, one.sizes))
    with pytest.raises(IllegalSchedule, match=r"ONEPASS-205.*cover 1024\+1024\+1024.*do not cover 4096 columns.*bug in onepass"):
        generate(made)
