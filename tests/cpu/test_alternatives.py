"""Alternative plans of one Program: distinct, the default first, and all with the same results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch

from onepass.capture import capture
from onepass.device import device
from onepass.pipeline import generate, optimize
from onepass.plan.alternatives import alternatives, schedule_kind
from onepass.plan.cost.model import cost
from onepass.plan.partition import plan
from onepass.plan.schedule import Schedule
from onepass.plan.schedule.check import check
from onepass.plan.scoring import Scored
from onepass.plan.traffic import traffic
from onepass.plan.variations import VARIED, variations
from onepass.runtime.compiled import Compiled
from onepass.runtime.executable import Executable, assemble
from onepass.tools.workloads import workload
from tests.support.correctness import assert_right
from tests.support.forced_schedules import scored

H200 = device("h200")
CPU = torch.device("cpu")
# Among them: rows shorter than a loop step, unaligned rows, one row, reductions both ways, states kept per thread.
SUBJECTS = [
    ("rms_norm", (7, 1024), torch.bfloat16),
    ("layer_norm_backward", (9, 768), torch.float32),
    ("softmax", (5, 1027), torch.float16),
    ("cross_entropy", (6, 1000), torch.float32),
    ("cross_entropy", (3, 8192), torch.bfloat16),
    ("logsumexp", (1, 5120), torch.float32),
    ("sum_both", (33, 256), torch.float32),
    ("add_rms_norm_backward", (16, 512), torch.bfloat16),
    ("outer_sum_3", (40, 96), torch.float16),
    ("gelu_backward_bias", (12, 512), torch.bfloat16),
    ("qk_norm", (2, 4, 3, 64), torch.bfloat16),
]


def plans_of(name: str, shape: tuple[int, ...], dtype: torch.dtype, most: int, varied: int = 0) -> tuple[Any, ...]:
    args = workload(name).inputs(shape, dtype, "cpu")
    captured = capture(workload(name).function, args, dynamic=False)
    program, bindings = optimize(captured.program), captured.bind(args)
    assert bindings is not None
    return args, captured, program, bindings, alternatives(program, bindings, H200, most, varied=varied)


@pytest.mark.parametrize("name,shape,dtype", SUBJECTS, ids=[f"{name}-{'x'.join(map(str, s))}" for name, s, _ in SUBJECTS])
def test_every_alternative_plan_gives_the_same_results(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _, captured, _, bindings, plans = plans_of(name, shape, dtype, 32, varied=8)
    for chosen in plans:
        run = assemble(Compiled(chosen, generate(chosen), ()).artifact, CPU, frozenset())

        def planned(*args: torch.Tensor, run: Executable = run) -> Any:
            return captured.result(run(captured.tensors(args), bindings), args)

        try:
            assert_right(planned, workload(name).function, lambda seed: workload(name).inputs(shape, dtype, "cpu", seed))
        except AssertionError as error:
            raise AssertionError(f"{error} with {[str(k.schedule) for k in chosen.kernels]}") from None


@pytest.mark.parametrize("name", ["rms_norm_backward", "softmax", "outer_sum_5"])
def test_the_default_plan_comes_first_and_no_plan_is_listed_twice(name: str) -> None:
    _, _, program, bindings, plans = plans_of(name, (64, 2048), torch.bfloat16, 12)
    assert plans[0] == plan(program, bindings, H200)
    texts = [tuple((k.family, str(k.schedule)) for k in p.kernels) for p in plans]
    assert 3 <= len(plans) <= 12 and len(set(texts)) == len(texts)
    times = [p.predicted_us for p in plans[1:]]
    assert times == sorted(times)


def test_other_families_are_tried_before_neighboring_schedules() -> None:
    *_, plans = plans_of("rms_norm", (64, 4096), torch.bfloat16, 6)
    assert len({schedule_kind(p.kernels[0].schedule) for p in plans}) == len(plans)


# ---- one field at a time

# Between them, every family, and every field that is varied with several values.
VARIED_SUBJECTS = [
    ("rms_norm", (65536, 1024), torch.float32),
    ("rms_norm_backward", (4096, 32768), torch.bfloat16),
    ("layer_norm_backward", (8192, 16384), torch.bfloat16),
    ("softmax_dim0", (512, 4096), torch.bfloat16),
    ("gelu_backward_bias", (8192, 1024), torch.bfloat16),
    ("cross_entropy", (64, 50264), torch.bfloat16),
    ("logsumexp", (1, 65536), torch.bfloat16),
]
CHARGED = {"packed", "early_loads", "private_states"}  # by the predicted time, as docs/tuning.md says; the others are not


@cache
def varied() -> tuple[tuple[Scored, tuple[Scored, ...]], ...]:
    """Schedules of every family with their variations: of each workload, the predicted best of each family and of few that differ
    in what is varied."""
    found: list[tuple[Scored, tuple[Scored, ...]]] = []
    for name, shape, dtype in VARIED_SUBJECTS:
        args = workload(name).inputs(shape, dtype, "meta")
        captured = capture(workload(name).function, args, dynamic=False)
        bindings = captured.bind(args) or {}
        first: dict[Any, Scored] = {}
        for one in sorted(scored(optimize(captured.program), bindings), key=lambda s: s.us):
            schedule = one.plan.schedule
            first.setdefault((schedule.family, schedule.packed, schedule.private_states, bool(schedule.prefetch)), one)
        found += [(one, tuple(variations(one, bindings, H200))) for one in first.values()]
    return tuple(found)


def changed_fields(one: Schedule, other: Schedule) -> Iterator[str]:
    yield from (f.name for f in fields(one) if f.compare and getattr(one, f.name) != getattr(other, f.name))


def test_every_family_has_variations_and_every_varied_field_some() -> None:
    families = {of.plan.family for of, found in varied() if found}
    assert families >= {"inner", "inner staged", "inner looped", "inner split", "column", "outer", "outer split", "outer staged",
                        "outer staged split", "mix-order", "mix-order staged", "mix-order multi-CTA"}  # fmt: skip
    seen = {name for of, found in varied() for v in found for name in changed_fields(of.plan.schedule, v.plan.schedule)}
    assert seen == set(VARIED)


def test_a_variation_is_legal_and_differs_in_one_field() -> None:
    for of, found in varied():
        schedules = [of.plan.schedule, *(v.plan.schedule for v in found)]
        assert len(set(schedules)) == len(schedules)
        for v in found:
            assert check(v.plan.kernel, v.plan.schedule, H200) is None
            assert len([*changed_fields(of.plan.schedule, v.plan.schedule)]) == 1 and v.plan.scored_as[1] == v.plan.schedule


def test_what_is_charged_changes_the_predicted_time_and_what_is_neutral_does_not() -> None:
    """Where as many CTAs fit an SM: that depends on the registers and the shared memory that a choice needs."""
    moved: set[str] = set()
    for of, found in varied():
        for v in found:
            same_room = replace(v.plan.resources, ctas_per_sm=of.plan.resources.ctas_per_sm)
            us = cost(v.plan.kernel, v.plan.schedule, same_room, traffic(v.plan.kernel, {}), H200).us
            if us != of.plan.cost.us:
                moved |= {*changed_fields(of.plan.schedule, v.plan.schedule)}
    assert moved == CHARGED


def test_variations_come_after_the_plans_there_were_before() -> None:
    *_, before = plans_of("rms_norm_backward", (64, 2048), torch.bfloat16, 6)
    *_, after = plans_of("rms_norm_backward", (64, 2048), torch.bfloat16, 6, varied=5)
    assert after[: len(before)] == before and len(after) == len(before) + 5
    assert len({tuple(str(k.schedule) for k in p.kernels) for p in after}) == len(after)
    assert len({tuple(s.text for s in generate(p)) for p in after}) == len(after)
    (own,) = {p.kernels[0].schedule.family for p in after[len(before) : len(before) + 2]}
    assert own == before[0].kernels[0].schedule.family  # of the default first
