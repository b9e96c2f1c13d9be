"""`onepass explain --why`: candidates in order, the chosen one among them, and the terms of its time."""

from __future__ import annotations

import json
from functools import cache

import pytest
from typer.testing import CliRunner

from onepass.__main__ import app
from onepass.device import device
from onepass.measure.captured_function import CapturedFunction
from onepass.measure.suites import Job
from onepass.plan.partition import plan
from onepass.plan.plan import Plan
from onepass.plan.variant import specialize
from onepass.tools.why import Why, why

TWO_KERNELS = Job("softmax_dim0", (4096, 4096))
SPLIT = Job("outer_sum_2", (4096, 1024), "f16")


@cache
def planned(job: Job) -> Plan:
    captured = CapturedFunction.of(job.subject.function, job.inputs())
    return plan(*specialize(captured.program, captured.bindings), device("h200"))


@cache
def reasons(job: Job) -> Why:
    return why(planned(job))


def test_candidates_are_ranked_by_time_and_the_chosen_one_is_within_a_tie() -> None:
    (kernel,) = reasons(SPLIT).kernels
    times = [c.predicted_us for c in kernel.candidates]
    assert len(times) > 20 and times == sorted(times)
    assert kernel.chosen is not None and kernel.chosen.schedule == str(planned(SPLIT).kernels[0].schedule)
    assert kernel.chosen.predicted_us <= 1.03 * times[0]
    assert sum(c.chosen for c in kernel.candidates) == 1


def test_every_kernel_but_joins_is_explained() -> None:
    assert len(planned(SPLIT).kernels) == 2 and len(reasons(SPLIT).kernels) == 1
    kernels = planned(TWO_KERNELS).kernels
    assert [k.kernel for k in reasons(TWO_KERNELS).kernels] == [k.name for k in kernels if not k.name.endswith("_join")]


def test_a_split_reduction_has_its_join_among_the_terms() -> None:
    (kernel,) = reasons(SPLIT).kernels
    for candidate in kernel.candidates:
        joins = [t for t in candidate.terms if t.name == "join of partial results"]
        assert bool(joins) == (" split " in candidate.schedule) and all(t.us > 2 for t in joins), candidate.schedule


def test_the_printed_text_fits_80_columns() -> None:
    for job in (SPLIT, TWO_KERNELS):
        text = str(reasons(job))
        assert max(map(len, text.splitlines())) <= 80
        assert "candidate schedules" in text and "terms of the predicted time" in text and "launch_us" in text
        assert "within 3% of the best are ties" in " ".join(text.split()) and "adds, us" in text


def test_the_command_prints_or_gives_json() -> None:
    shown = CliRunner().invoke(app, ["explain", "rms_norm", "--shape", "4096x1024", "--why"])
    assert shown.exit_code == 0 and "candidate schedules, number" in shown.output
    found = json.loads(CliRunner().invoke(app, ["explain", "rms_norm", "--shape", "4096x1024", "--why", "--json"]).output)
    (kernel,) = found["why"]
    chosen = next(c for c in kernel["candidates"] if c["chosen"])
    assert chosen["limit"] in chosen["limits"] and {"name", "us", "adds_us", "source"} == set(chosen["terms"][0])
    assert chosen["predicted_us"] == pytest.approx(found["predicted_us"], abs=0.01)
