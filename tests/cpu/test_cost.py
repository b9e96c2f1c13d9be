"""Predicted times: terms that add up, one formula, and the source of each term."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import TypeAlias

import pytest

from onepass.constants import SHIPPED
from onepass.device import device
from onepass.measure.captured_function import CapturedFunction
from onepass.measure.suites import Job
from onepass.plan.cost.looped import LoopedTerms
from onepass.plan.cost.mix_order import MixOrderTerms
from onepass.plan.cost.model import cost, join_us
from onepass.plan.cost.resident import ResidentTerms
from onepass.plan.cost.staged_rows import StagedRowsTerms
from onepass.plan.cost.terms import labels, soft_max
from onepass.plan.plan import KernelPlan
from onepass.plan.traffic import Traffic, traffic
from onepass.plan.variant import specialize
from tests.support.forced_schedules import candidates

H200 = device("h200")
RECORDS = (ResidentTerms, StagedRowsTerms, MixOrderTerms, LoopedTerms)
JOBS = (
    Job("rms_norm", (8192, 8192)),
    Job("rms_norm_backward", (4096, 8192)),
    Job("rms_norm_backward", (8192, 32768)),
    Job("softmax", (8192, 50257)),
    Job("outer_sum_2", (4096, 1024), "f16"),
    Job("cross_entropy", (8192, 50264)),
)


Costed: TypeAlias = tuple[KernelPlan, Traffic]


@cache
def planned(job: Job) -> tuple[Costed, ...]:
    """Every candidate of a workload as one kernel, with its memory traffic."""
    captured = CapturedFunction.of(job.subject.function, job.inputs())
    program, bindings = specialize(captured.program, captured.bindings)
    return tuple((kernel, traffic(kernel.kernel, bindings)) for _, found in candidates(program, bindings) for kernel in found)


def every() -> Iterator[KernelPlan]:
    yield from (kernel for job in JOBS for kernel, _ in planned(job))


def test_all_families_are_covered() -> None:
    assert {type(k.cost.record) for k in every()} == set(RECORDS)
    assert {k.family for k in every()} >= {
        "inner",
        "inner staged",
        "inner looped",
        "mix-order",
        "mix-order staged",
        "outer",
        "mix-order multi-CTA",
        "outer staged",
        "outer split",
        "outer staged split",
    }


def test_terms_add_up_to_the_predicted_time() -> None:
    """All predicted time belongs to a term, and no term makes a kernel faster."""
    for kernel in every():
        found = kernel.cost
        assert found.us == found.record.us and found.limit in dict(found.limits)
        slowest = max(us for _, us in found.limits)
        assert slowest <= found.us * (1 + 1e-9) or kernel.family == "mix-order", str(kernel.schedule)
        assert all(t.us >= 0 and -1e-9 <= t.adds_us <= found.us for t in found.terms), str(kernel.schedule)
        assert {t.name for t in found.terms} >= {"launch"} and len(found.terms) >= 5


def test_without_terms_the_predicted_time_is_zero() -> None:
    for kernel in every():
        found = labels(type(kernel.cost.record))
        nothing = {
            name: value if found[name].hidden else 1.0 if found[name].factor else 0.0
            for name, value in kernel.cost.record._asdict().items()
        }
        assert type(kernel.cost.record)(**nothing).us == 0.0


def test_a_hidden_limit_adds_less_than_its_own_time() -> None:
    kernel, _ = planned(Job("rms_norm", (8192, 8192)))[0]
    issue = next(t for t in kernel.cost.terms if t.name == "issue")
    assert 0 < issue.adds_us < issue.us < kernel.cost.us


def test_a_correction_multiplies_the_time_and_is_listed() -> None:
    kernel, t = planned(Job("rms_norm", (8192, 8192)))[0]
    tuned = replace(H200, corrections=((kernel.family, 1.1),))
    found = cost(kernel.kernel, kernel.schedule, kernel.resources, t, tuned)
    assert found.us == kernel.cost.us * 1.1 and found.correction == 1.1 and found.terms == kernel.cost.terms


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+|\bcongestion\b|\bsharpness\b", text))


@pytest.mark.parametrize("record", RECORDS)
def test_sources_name_constants_that_exist(record: type) -> None:
    known = {f.name for f in fields(SHIPPED.cost)}
    for name, label in labels(record).items():
        assert (label.name or label.hidden) and label.source, name
        assert words(label.source) <= known, f"{record.__name__}.{name}"


def test_every_constant_is_the_source_of_a_term() -> None:
    named = {word for record in RECORDS for label in labels(record).values() for word in words(label.source)}
    elsewhere = {
        "join_part_us",
        "last_block_rate",
        "tie",
        "one_slot_in_flight",
        "narrow_l2",
        "special_rate",
        "tiles_in_flight_2",
        "tiles_in_flight_3",
        "tiles_in_flight_4",
    }
    assert {f.name for f in fields(SHIPPED.cost)} - named <= elsewhere


def test_only_split_reductions_are_charged_for_a_join() -> None:
    for kernel, t in planned(Job("outer_sum_2", (4096, 1024), "f16")):
        assert (join_us(kernel.schedule, t, H200) > 0) == (kernel.schedule.splits > 1)


def test_soft_maximum() -> None:
    assert soft_max(3.0, 0.0, sharpness=4) == pytest.approx(3.0)
    assert soft_max(1.0, 1.0, sharpness=4) == pytest.approx(2**0.25)
