"""Schedules that are not understood are refused with a reason, and whatever is accepted is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from onepass.ir.program import Program
from onepass.ir.simplify import online_softmax
from onepass.ir.size import Bindings
from onepass.pipeline import generate, optimize, specialize
from onepass.plan import scoring
from onepass.plan.kernel import Kernel
from onepass.plan.legality import Illegal, Reason, families, space_of
from onepass.plan.partition import plan
from onepass.plan.plan import KernelPlan
from onepass.plan.schedule import Block, Cover, Loop, Schedule
from onepass.plan.schedule_check import check
from onepass.plan.scoring import forms
from onepass.plan.staged_rows import tma_stageable
from onepass.plan.staged_tiles import tile_stageable
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


def all_sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.float() * w
    return y.sum(), y.sum(0), y.sum(-1)


def pointwise(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() * w).to(x.dtype)


def blocks(x: Tensor, w: Tensor) -> Tensor:
    y = x.unflatten(1, (-1, 16))
    return (y / (1 + y.abs().amax(2, keepdim=True)) + (x * w).sum(1)[:, None, None]).flatten(1)


FUNCTIONS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (
    softmax, row_sums, column_sums, column_softmax, column_spread, norm_backward, spread, all_sums, pointwise, blocks)}
SHAPES = ((5, 256), (7, 512), (6, 1024), (4, 131), (4, 1027), (9, 64), (33, 48), (6, 700))


@dataclass(frozen=True)
class Subject:
    """A function as one kernel, in every form, with what the planner would weigh for it."""

    program: Program
    tensors: dict[str, Tensor]
    sizes: Bindings
    kernels: tuple[Kernel, ...]
    plans: tuple[KernelPlan, ...]


@cache
def subject(name: str, shape: tuple[int, int], dtype: torch.dtype, dynamic: bool) -> Subject | None:
    """A function as one kernel; None where it has no columns of whole blocks."""
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
    """A kernel and schedules of it that may be anything."""
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
    """The family of an accepted schedule, which was run and is right, or the name of the reason it was refused for."""
    refused = check(kernel, schedule, H200)
    if refused:
        assert isinstance(refused.reason, Reason) and len(refused.detail.split()) > 2
        return refused.reason.name
    made = planned(one.program, one.sizes, under(kernel, schedule, one.sizes))
    assert_as_oracle(made, one.tensors, one.sizes, f"{kernel.program.name} {schedule}\n{kernel.program}\n{schedule!r}")
    return schedule.family


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_what_is_accepted_is_right_and_what_is_refused_has_a_reason(seed: int) -> None:
    for one, kernel, schedule in drawn(Random(seed)):
        outcome(one, kernel, schedule)


def count(first: int, last: int) -> Counter[str]:
    """The outcomes of many draws."""
    return Counter(outcome(*one) for seed in range(first, last) for one in drawn(Random(seed)))


# ---- what the planner weighs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_everything_scored_is_legal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


# ---- schedules that nothing understands ----------------------------------------------------------------------------------------

# (function, shape, dtype, schedule, reason, a word of the detail); `staged` and `resident` loads are filled in where all there are.
ROWS, TILES, KEPT, FIRST = frozenset({-1}), frozenset({-2}), frozenset({-3}), frozenset({0})
STAGED = Schedule(Loop(1, 2), Cover((1024,) * 4), 4, 2, staged=ROWS)
ACCUMULATES = replace(STAGED, accumulates_columns=True)
SHARED = replace(ACCUMULATES, cols=Cover((1024,) * 2), ctas_per_row=2)
ROW, UNALIGNED = (40, 4096), (40, 1027)
A100 = device("a100")
ILL_FORMED: dict[str, tuple[Callable[..., Any], tuple[int, int], Schedule, Reason, str]] = {
    "a row sum without a walk": (row_sums, ROW, Schedule(Block(1), Block(64), 4), Reason.ROLES, "covered or walked"),
    "a row sum down the rows": (row_sums, ROW, Schedule(Loop(4), Block(64), 4), Reason.ROLES, "over columns"),
    "a column sum along the columns": (column_sums, ROW, Schedule(Block(1), Loop(64), 4), Reason.ROLES, "over rows"),
    "a column sum used in the loop": (column_softmax, ROW, Schedule(Loop(1), Cover((4096,)), 4), Reason.ROLES, "end with the loop"),
    "both sides walked": (row_sums, ROW, Schedule(Loop(1), Loop(64), 4), Reason.ROLES, "no kernel family"),
    "nothing to reduce": (pointwise, ROW, Schedule(Block(1), Cover((4096,)), 4), Reason.ROLES, "no reduction"),
    "three warps": (softmax, ROW, Schedule(Block(1), Loop(256), 3), Reason.SIZES, "3 warps"),
    "a tile of 96": (softmax, ROW, Schedule(Block(1), Loop(96), 4), Reason.SIZES, "power of two"),
    "a cover that is too short": (softmax, ROW, Schedule(Block(1), Cover((1024,) * 3), 4), Reason.SIZES, "do not cover"),
    "an empty tile": (softmax, ROW, Schedule(Block(1), Cover((4096, 64)), 4), Reason.SIZES, "empty"),
    "no tile": (softmax, ROW, Schedule(Block(1), Cover(()), 4), Reason.SIZES, "no columns"),
    "a tile of too many elements": (softmax, ROW, Schedule(Block(512), Cover((4096,)), 4), Reason.SIZES, "elements"),
    "no CTA": (row_sums, ROW, Schedule(Block(1), Loop(64, 0), 4), Reason.SIZES, "at least one"),
    "no stage": (softmax, ROW, Schedule(Block(1), Loop(64), 4, 0), Reason.SIZES, "at least 1"),
    "a part of a block": (blocks, ROW, Schedule(Block(1), Loop(8), 1), Reason.SIZES, "blocks of 16"),
    "a pipeline without a loop": (softmax, ROW, Schedule(Block(1), Cover((4096,)), 4, 2), Reason.FIELDS, "pipeline"),
    "prefetch without a ring": (softmax, ROW, Schedule(Block(1), Cover((4096,)), 4, prefetch=1), Reason.FIELDS, "prefetch"),
    "prefetch into a ring of two rows": (softmax, ROW, replace(STAGED, prefetch=1), Reason.FIELDS, "prefetch"),
    "too much prefetched": (softmax, ROW, replace(STAGED, stages=1, prefetch=13), Reason.SIZES, "mbarriers"),
    "a part of one copy prefetched": (softmax, (40, 1024), replace(STAGED, cols=Cover((1024,)), stages=1, prefetch=1),
                                      Reason.SIZES, "several whole copies"),
    "several CTAs a row in registers": (softmax, ROW, Schedule(Block(1), Cover((2048,)), 4, ctas_per_row=2), Reason.FIELDS, "CTAs"),
    "several CTAs a row without a loop": (row_sums, ROW, Schedule(Block(1), Loop(64), 4, ctas_per_row=2), Reason.FIELDS, "CTAs"),
    "columns that CTAs cannot share": (norm_backward, ROW, replace(SHARED, ctas_per_row=3), Reason.SIZES, "divisible"),
    "one staged row for several CTAs": (norm_backward, ROW, replace(SHARED, stages=1), Reason.STORAGE, "two rows"),
    "CTAs that cannot run at once": (norm_backward, ROW, replace(SHARED, rows=Loop(1, 600)), Reason.DEVICE, "at once"),
    "vectors twice": (norm_backward, ROW, replace(ACCUMULATES, hoisted=True, beside=True), Reason.FIELDS, "both"),
    "vectors beside a row with a rest": (norm_backward, (40, 3584), replace(ACCUMULATES, beside=True), Reason.STORAGE, "evenly"),
    "vectors without a loop": (softmax, ROW, Schedule(Block(1), Cover((4096,)), 4, hoisted=True), Reason.FIELDS, "row vectors"),
    "accumulating in registers": (norm_backward, ROW, replace(ACCUMULATES, staged=frozenset()), Reason.FIELDS, "accumulates"),
    "sectors of aligned rows": (softmax, ROW, Schedule(Block(1), Loop(256), 4, sector_elems=16), Reason.FIELDS, "no row starts"),
    "sectors of several rows": (softmax, UNALIGNED, Schedule(Block(2), Loop(256), 4, sector_elems=16), Reason.FIELDS, "sectors"),
    "a row kept while it is walked": (softmax, ROW, Schedule(Block(1), Loop(256), 4, resident=KEPT), Reason.STORAGE, "covered"),
    "a row kept that is used once": (row_sums, ROW, Schedule(Block(1), Cover((4096,)), 4, resident=ROWS), Reason.STORAGE, "phases"),
    "a row kept and staged": (softmax, ROW, replace(STAGED, resident=KEPT), Reason.STORAGE, "some are staged"),
    "staged rows in a block of two": (softmax, ROW, replace(STAGED, rows=Loop(2)), Reason.STORAGE, "one at a time"),
    "a ring of seventeen rows": (softmax, ROW, replace(STAGED, stages=17), Reason.STORAGE, "mbarriers"),
    "chunks narrower than the threads": (softmax, ROW, replace(STAGED, cols=Cover((256,) * 16), warps=16), Reason.SIZES, "threads"),
    "chunks of three widths": (softmax, ROW, replace(STAGED, cols=Cover((2048, 1024, 512, 512))), Reason.SIZES, "one width"),
    "rows TMA cannot describe": (softmax, UNALIGNED, replace(STAGED, cols=Cover((512,) * 3), staged=FIRST), Reason.STORAGE, "TMA"),
    "staged rows without their inputs": (norm_backward, ROW, replace(ACCUMULATES, staged=frozenset({99})), Reason.STORAGE, "TMA"),
    "a ring that no CTA has room for": (softmax, (40, 32768), replace(STAGED, cols=Cover((4096,) * 8), stages=4), Reason.DEVICE,
                                        "shared memory"),
    "a tile narrower than a vector": (column_sums, ROW, Schedule(Loop(64), Block(4), 1, 2, staged=TILES), Reason.SIZES, "vectors"),
    "staged tiles of what is needed twice": (column_softmax, ROW, Schedule(Loop(8), Block(64), 4, 2, staged=ROWS), Reason.STORAGE,
                                             "one pass"),
    "a split softmax": (softmax, ROW, Schedule(Block(1), Loop(256, 2), 4), Reason.SPLIT, "cannot be joined"),
    "more registers than there are": (softmax, ROW, replace(STAGED, warps=4, registers=600), Reason.DEVICE, "registers"),
    "a register cap that nothing heeds": (softmax, ROW, Schedule(Block(1), Loop(256), 4, registers=64), Reason.FIELDS, "cap"),
}


def of(function: Callable[..., Any], shape: tuple[int, int], schedule: Schedule) -> tuple[Subject, Kernel, Schedule]:
    """A kernel of a function, and a schedule whose loads are its own."""
    one = subject(function.__name__, shape, BF16, False)
    assert one
    held = isinstance(schedule.cols, Cover) or isinstance(schedule.rows, Cover)
    kernel = one.kernels[0 if held else -1]
    meant = {ROWS: tma_stageable(kernel), TILES: tile_stageable(kernel), KEPT: kernel.multi_phase}
    return one, kernel, replace(schedule, staged=frozenset(meant.get(schedule.staged, schedule.staged)),
                                resident=frozenset(meant.get(schedule.resident, schedule.resident)))


@pytest.mark.parametrize("what", ILL_FORMED)
def test_ill_formed_schedules_are_refused(what: str) -> None:
    function, shape, schedule, reason, words = ILL_FORMED[what]
    _, kernel, schedule = of(function, shape, schedule)
    refused = check(kernel, schedule, H200)
    assert refused and (refused.reason, words in refused.detail) == (reason, True), refused


@pytest.mark.parametrize(("function", "schedule"), [(softmax, STAGED), (norm_backward, ACCUMULATES), (norm_backward, SHARED)])
def test_what_they_were_made_from_is_legal(function: Callable[..., Any], schedule: Schedule) -> None:
    _, kernel, schedule = of(function, ROW, schedule)
    assert check(kernel, schedule, H200) is None
    refused = check(kernel, schedule, A100)
    assert refused and refused.reason is Reason.DEVICE and "TMA" in refused.detail


def test_a_split_kernel_must_leave_as_many_partial_states_as_ctas() -> None:
    one, kernel, schedule = of(row_sums, ROW, Schedule(Block(1), Loop(256, 2), 4))
    assert check(kernel, schedule, H200) is None
    refused = check(kernel, schedule, H200, emitted=True)
    assert refused and refused.reason is Reason.SPLIT and "leaves no" in refused.detail
    made = planned(one.program, one.sizes, under(kernel, schedule, one.sizes)).kernels[0]
    assert check(made.kernel, made.schedule, H200, emitted=True) is None
    for splits in (1, 3):
        refused = check(made.kernel, replace(made.schedule, cols=Loop(256, splits)), H200, emitted=True)
        assert refused and refused.reason is Reason.SPLIT and "leaves 2" in refused.detail


def test_an_ill_formed_schedule_is_not_written() -> None:
    one, kernel, schedule = of(softmax, ROW, Schedule(Block(1), Cover((1024,) * 3), 4))
    made = planned(one.program, one.sizes, under(kernel, schedule, one.sizes))
    with pytest.raises(IllegalSchedule, match=r"ONEPASS-205.*cover 1024\+1024\+1024.*do not cover 4096 columns.*bug in onepass"):
        generate(made)
