"""`onepass bench` without a card: suites, providers, resuming, tables, errors. Times are made up."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from onepass.__main__ import main
from onepass.errors import BadArgument, BadResults, BadSpec, CannotResume
from onepass.measure import bench as benches
from onepass.measure import peers, regret, verdict
from onepass.measure.bench import Options, bench, is_unfinished, one_line_error, previous_run
from onepass.measure.bench_tables import fits, line, tables
from onepass.measure.captured_function import CapturedFunction, schedules
from onepass.measure.providers import copy_function, default_providers, make_provider, parse_providers, supported_providers
from onepass.measure.results import PROVIDERS, Result, Row, Run, load, to_json
from onepass.measure.suites import SUITES, Job, rows_at, suite
from onepass.measure.warm import compiles_slowly, prewarm_inductor
from onepass.plan.partition import plan
from onepass.plan.plan import Plan
from onepass.plan.variant import representative_sizes, specialize
from onepass.runtime.binary import Binary
from onepass.runtime.compiled import Compiled
from onepass.tools import functions as f
from onepass.tools.tables import as_text
from tests.support import fake_bench
from tests.support.fake_bench import PLACE, SMALL, FakeClock
from tests.support.processes import run_python

QUIET = Console(file=io.StringIO())


def measured(options: Options, clock: FakeClock | None = None, **more: Any) -> Run:
    fake: Any = clock or FakeClock()
    return bench(options, QUIET, PLACE, lambda: fake, **more)


@pytest.fixture(autouse=True)
def no_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anchors are large tensors."""
    monkeypatch.setattr(benches, "anchor_bytes", lambda floors: ())


# ---- suites


@pytest.mark.parametrize("name", SUITES)
def test_suites_list_each_job_once_at_a_valid_shape(name: str) -> None:
    jobs = suite(name).jobs
    assert len({job.id for job in jobs}) == len(jobs)
    for job in jobs:
        job.inputs()


def test_floors_are_inputs_once_and_outputs_once() -> None:
    assert Job("rms_norm", (8192, 8192)).floor_bytes == 2 * 2 * 8192 * 8192 + 2 * 8192
    assert Job("outer_sum_5", (4096, 1024), "f16").floor_bytes == 5 * 2 * 4096 * 1024 + 4 * 1024
    assert Job("rms_norm_backward", (1, 4096)).floor_bytes > 3 * 2 * 4096


def test_rows_keep_the_number_of_elements() -> None:
    assert rows_at(1024) == 65536 and rows_at(50257) == 1024 and rows_at(131072) == 512
    assert all(job.shape[0] * job.shape[1] <= 1 << 26 for job in SUITES["widths"].jobs)


# ---- providers


def test_lists_of_providers_are_parsed() -> None:
    assert parse_providers(" onepass, eager,onepass", "norms") == ("onepass", "eager")
    assert parse_providers(None, "norms") == default_providers() and default_providers()[0] == "onepass"
    assert parse_providers("onepass,inductor-max", "table") == ("onepass", "inductor-max")
    for text, says in (("onepas", "onepass-tuned"), ("", "onepass-tuned"), ("inductor-max", "suite table")):
        with pytest.raises(BadSpec, match=says):
            parse_providers(text, "norms")


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "importable", lambda name: False)
    with pytest.raises(BadSpec, match="pip install liger-kernel"):
        parse_providers("liger", "norms")
    assert set(default_providers()) == {"onepass", "eager", "inductor", "inductor-nonstrict"}


def test_libraries_run_only_workloads_they_implement() -> None:
    both = ("onepass", "liger", "quack")
    assert supported_providers(both, Job("rms_norm", (8, 64))) == both
    assert supported_providers(both, Job("cross_entropy", (8, 64))) == ("onepass", "quack")
    assert supported_providers(both, Job("sum_both", (8, 64))) == ("onepass",)


def test_dynamo_treats_a_copied_function_as_a_new_one() -> None:
    copy = copy_function(f.rms_norm)
    assert copy is not f.rms_norm and copy.__code__ is not f.rms_norm.__code__  # type: ignore[attr-defined]
    x, w = torch.randn(4, 8), torch.rand(8)
    assert torch.equal(copy(x, w), f.rms_norm(x, w))


def test_inductor_settings_exist_in_the_installed_torch() -> None:
    for name in ("inductor", "inductor-nonstrict", "inductor-max"):
        make_provider(name, SMALL.jobs[0], SMALL.jobs[0].inputs("cpu"))


class _Norm(torch.autograd.Function):
    """A stand-in for a library's norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float, *rest: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        return f.rms_norm(x, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return (*f.rms_norm_backward(x, w, f.row_rstd(x), dy), None, None, None, None)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules = {name: ModuleType(name) for name in ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.rms_norm")}
    modules["liger_kernel.ops.rms_norm"].LigerRMSNormFunction = _Norm  # type: ignore[attr-defined]
    modules["liger_kernel"].__version__ = "9.9"  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "importable", lambda name: name == "liger")
    yield


def test_a_library_runs_forward_and_backward_next_to_onepass(library: None) -> None:
    few = replace(SMALL, jobs=SMALL.jobs[:2])
    run = measured(Options(few, ("onepass", "eager", "liger")), FakeClock({"onepass": 4.0, "liger": 8.0}))
    assert [tuple(r.results) for r in run.rows] == [("onepass", "eager", "liger")] * 2
    assert all(result.ok for row in run.rows for result in row.results.values())
    assert [(r.best_peer, r.against_best_peer) for r in run.rows] == [("eager", 1.25)] * 2
    assert benches.versions()["liger"] == "9.9"


# ---- checking results


def test_large_row_wise_workloads_are_checked_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "WHOLE_ELEMENTS", 100)
    monkeypatch.setattr(verdict, "PART_ELEMENTS", 48)
    job = Job("cross_entropy_backward", (8, 16), "f32")
    inputs = job.inputs("cpu")
    assert list(verdict.parts(job.workload, inputs)) == [slice(0, 3), slice(3, 6), slice(6, 8)]
    judge = verdict.Judge(job.workload, job.subject.function, inputs)
    answer = job.subject.function(*inputs)
    assert judge.wrong(answer, 1.0) is None
    answer[7, 3] += 0.1
    assert "largest error" in str(judge.wrong(answer, verdict.SLACK))
    norm = Job("rms_norm", (16, 16), "f32")  # as many columns as rows: the weight has no rows
    judge = verdict.Judge(norm.workload, norm.subject.function, norm.inputs("cpu"))
    assert judge.wrong(norm.subject.function(*norm.inputs("cpu")), 1.0) is None
    assert list(verdict.parts("softmax_dim0", inputs)) == [None]


def test_other_providers_may_round_once_more_but_onepass_may_not() -> None:
    job = Job("softmax", (64, 64), "bf16")
    inputs = job.inputs("cpu")
    answer = (job.subject.function(*inputs).double() * (1 + 2.0**-6)).bfloat16()
    judge = verdict.Judge(job.workload, job.subject.function, inputs)
    assert judge.wrong(answer, 1.0) and judge.wrong(answer, verdict.SLACK) is None
    assert judge.wrong(answer * 1.2, verdict.SLACK)
    assert "shape" in str(judge.wrong(answer[:3], 1.0)) and "2 results" in str(judge.wrong((answer, answer), 1.0))


def test_every_workload_of_a_suite_can_be_checked() -> None:
    """At a small size: the function itself passes its own check in every result type."""
    sizes = {2: (8, 256), 3: (2, 64, 8), 4: (2, 4, 2, 64)}
    for name, dtype in sorted({(job.workload, job.dtype) for found in SUITES.values() for job in found.jobs}):
        job = Job(name, sizes[len(suite_shape(name))], dtype)
        inputs = job.inputs("cpu")
        judge = verdict.Judge(name, job.subject.function, inputs)
        assert judge.wrong(job.subject.function(*inputs), verdict.SLACK) is None, job.id


def suite_shape(name: str) -> tuple[int, ...]:
    return next(job.shape for found in SUITES.values() for job in found.jobs if job.workload == name)


def test_wrong_and_failing_providers_are_shown_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    good = make_provider

    def broken(name: str, job: Job, inputs: Sequence[Tensor]) -> Any:
        if name == "inductor":
            raise RuntimeError("it broke\nat length")
        made = good("eager", job, inputs)
        return replace(made, call=lambda: made.call() * 2) if name == "onepass" else made

    monkeypatch.setattr(benches, "make_provider", broken)
    clock = FakeClock()
    run = measured(Options(replace(SMALL, jobs=SMALL.jobs[:1]), ("onepass", "eager", "inductor")), clock)
    (row,) = run.rows
    assert clock.sessions == [("eager",)]
    assert "largest error" in str(row.results["onepass"].wrong) and row.results["inductor"].error == "RuntimeError: it broke"
    assert "onepass wrong, eager 5.0, inductor failed" in line(row)
    text = as_text(*tables(run))
    assert "not timed" in text and "it broke" in text and "onepass has no valid time" in text


# ---- a run


def test_a_run_measures_all_providers_of_a_workload_in_one_session(tmp_path: Path) -> None:
    out = tmp_path / "small.json"
    clock = FakeClock({"onepass": 2.0, "eager": 8.0})
    run = measured(Options(SMALL, ("onepass", "eager"), out, graphs=True), clock)
    assert clock.sessions == [("onepass", "eager")] * 3
    assert [r.id for r in load(out).rows] == [r.id for r in run.rows] == [job.id for job in SMALL.jobs]
    result = run.rows[1].results["onepass"]
    assert (result.us, result.host_us, result.graph_us, result.kernels) == (
        2.0,
        3.0,
        None,
        1,
    )  # too small for a graph with a cold cache
    assert result.predicted_us and result.spill_bytes == 0
    assert run.summary.geomean_against_best_peer == 4.0


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "small.json"
    ticks = iter(range(0, 1000, 10))
    part = measured(Options(SMALL, ("onepass", "eager"), out, time_limit=45.0), now=lambda: float(next(ticks)))
    assert [r.id for r in part.rows] == [r.id for r in load(out).rows] == [SMALL.jobs[0].id]
    clock = FakeClock({"onepass": 1.0})
    whole = measured(Options(SMALL, ("onepass", "eager"), out), clock)
    assert len(clock.sessions) == 2 and len(whole.rows) == 3
    assert whole.rows[0].results == load(out).rows[0].results and whole.rows[1].us("onepass") == 1.0
    clock = FakeClock()
    assert len(measured(Options(SMALL, ("onepass",), out), clock).rows) == 3 and not clock.sessions
    measured(Options(SMALL, ("onepass",), out, fresh=True), clock)
    assert len(clock.sessions) == 3


def test_a_row_that_lacks_a_requested_provider_is_measured_again() -> None:
    row = Row("rms_norm", (8, 64), "bf16", SMALL.jobs[0].id, 10, 1.0, {"onepass": Result(us=1.0)})
    run = Run("small", "2026-01-31", "a card", "h200", {}, (), (row,))
    assert not is_unfinished(SMALL.jobs[0], run, Options(SMALL, ("onepass",)))
    assert is_unfinished(SMALL.jobs[0], run, Options(SMALL, ("onepass", "eager")))
    assert is_unfinished(SMALL.jobs[0], run, Options(SMALL, ("onepass",), regret=True))
    assert is_unfinished(SMALL.jobs[1], run, Options(SMALL, ("onepass",)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"suite": "norms"}, "to the suite norms"),
        ({"card": "another"}, "measured on another"),
        ({"versions": {"torch": "2.10"}}, r"torch 2.10 \(here 2.11\)"),
    ],
)
def test_a_run_of_another_suite_card_or_version_is_not_resumed(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    earlier = Run("small", "2026-01-31", "a card", "h200", {"torch": "2.11"})
    out.write_text(json.dumps(to_json(replace(earlier, **change))))
    with pytest.raises(CannotResume, match=says):
        previous_run(Options(SMALL, (), out), PLACE)
    assert previous_run(Options(SMALL, (), out, fresh=True), PLACE).rows == ()
    out.write_text("{")
    with pytest.raises(BadResults, match="not JSON"):
        previous_run(Options(SMALL, (), out), PLACE)


def test_only_selects_workloads_by_name() -> None:
    assert [r.workload for r in measured(Options(SMALL, ("eager",), only="backward")).rows] == ["rms_norm_backward"]
    with pytest.raises(BadArgument, match="outer_sum_2"):
        measured(Options(SMALL, ("eager",), only="softmax"))


def test_failures_are_reported_on_one_line() -> None:
    assert one_line_error(ValueError("\n  first\nsecond")) == "ValueError: first"
    assert one_line_error(KeyError()) == "KeyError: no message"
    assert len(one_line_error(ValueError("x" * 9999))) == benches.MAX_ERROR_LENGTH


# ---- regret


def tried(ours: CapturedFunction, plan: Plan, spill: int = 0) -> regret.CompiledCandidate:
    return regret.CompiledCandidate(plan, (), tuple(Binary(64, spill, 0, 0, 0, {}, {}) for _ in plan.kernels))


def test_regret_is_the_time_of_the_chosen_plan_over_the_best() -> None:
    job = Job("rms_norm_backward", (8192, 8192))
    ours = CapturedFunction.of(job.subject.function, job.inputs())
    plans = ours.plans(PLACE.device, 4)
    picked = Compiled(plans[0], (), tuple(Binary(80, 0, 0, 0, 0, {}, {}) for _ in plans[0].kernels)).artifact
    found = regret.regret_from_times(
        job.id,
        100.0,
        picked,
        [tried(ours, p, 8 * (k == 3)) for k, p in enumerate(plans)],
        {"picked": 110.0, "0": 110.0, "1": 100.0, "2": 130.0},
    )
    assert found.regret == pytest.approx(0.1) and len(found.candidates) == 4
    assert [c.us for c in found.candidates] == [110.0, 100.0, 130.0, None]
    assert (found.candidates[0].registers, found.candidates[3].spill_bytes) == (80, 8 * len(plans[3].kernels))
    summary = regret.summarize_regret([found, replace(found, id="other", picked_us=101.0)])
    assert summary.good == 0.5 and summary.worst is not None
    assert summary.worst[0] == job.id and summary.worst[1] == pytest.approx(0.1)
    assert summary.pick_error == pytest.approx(1 / 22, rel=0.2)
    assert regret.summarize_regret([]).worst is None


def test_plans_that_spill_or_do_not_fit_are_not_run() -> None:
    job = Job("rms_norm", (8192, 8192))
    ours = CapturedFunction.of(job.subject.function, job.inputs())
    (plan,) = ours.plans(PLACE.device, 1)
    assert tried(ours, plan).runs_on(PLACE.device) and not tried(ours, plan, 4).runs_on(PLACE.device)
    assert not regret.CompiledCandidate(plan, (), None).runs_on(PLACE.device)
    large = regret.CompiledCandidate(plan, (), (Binary(64, 0, 0, 1 << 20, 0, {}, {}),))
    assert not large.runs_on(PLACE.device)


def test_a_plan_for_a_row_class_is_predicted_at_the_measured_sizes() -> None:
    from onepass import pipeline  # only here

    job = Job("rms_norm_backward", (32768, 2048))
    ours = CapturedFunction.of(job.subject.function, job.inputs())
    fixed, free = specialize(ours.program, ours.bindings)
    made = pipeline.interpret(plan(fixed, representative_sizes(fixed, free, PLACE.device), PLACE.device)).artifact
    same = next(p for p in ours.plans(PLACE.device, 10_000) if schedules(p) == schedules(made))
    assert made.summary.predicted_us != same.predicted_us == ours.predicted_us(made, PLACE.device)


def test_candidates_are_measured_together_with_the_chosen_plan() -> None:
    few = replace(SMALL, jobs=SMALL.jobs[1:2])
    clock = FakeClock({"picked": 6.0, "1": 4.0})
    run = measured(Options(few, ("onepass",), regret=True, max_candidates=3), clock)
    (found,) = run.regret
    assert clock.sessions[1][0] == "picked" and len(clock.sessions[1]) <= 4 + regret.VARIED
    assert found.picked_us == 6.0 and found.best_us <= 6.0 and len(found.candidates) >= 2
    assert "regret of the default plan" in as_text(*tables(run))


def test_plans_with_different_results_are_reported() -> None:
    a = {"y": torch.tensor([1.0, 100.0])}
    assert regret.same_results({"y": torch.tensor([1.5, 100.0])}, a)
    assert not regret.same_results({"y": torch.tensor([1.0, 110.0])}, a)
    assert not regret.same_results({"y": torch.tensor([1.0, float("nan")])}, a)


# ---- tables


def test_tables_show_everything_and_fit_their_width() -> None:
    text = as_text(*tables(fake_bench.norms()))
    assert all(len(row) <= 118 for row in text.splitlines())
    for expected in (
        "rms_norm_backward 8192x8192 bf16",
        "x floor",
        "wrong: dw is off by 3",
        "N must be even",
        "plain reads",
        "speedup over best peer",
        "within 5 % of the best candidate",
        "prediction: median error",
    ):
        assert expected in text, expected


def test_time_over_rows_is_fitted_by_a_line() -> None:
    rows = []
    for m in (1, 8192, 16384, 65536, 131072):
        base = fake_bench.row("softmax", (m, 4096), {"onepass": 1.0}, tensors=2)
        rows.append(replace(base, results={"onepass": Result(us=2.0 + 1.05 * base.floor_us)}))
    (fit,) = fits(rows)
    assert fit.what == "softmax 4096 bf16" and fit.start_us == pytest.approx(2.0, rel=0.05) and fit.worst < 0.001
    assert fit.row_us / fit.floor_row_us == pytest.approx(1.05, rel=0.001)
    assert fits(rows[:3]) == ()


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bench",), "ONEPASS-806"),
        (("bench", "norms", "--out", "x.json"), "onepass doctor"),
        (("bench", "nroms"), "known are table"),
        (("bench", "norms", "--providers", "onepas"), "inductor-nonstrict"),
        (("bench", "norms", "--only", "softmax"), "rms_norm_backward"),
        (("bench", "norms", "--time-limit", "nan"), "above 0"),
        (("bench", "norms", "--time-limit=-1"), "above 0"),
        (("bench", "models"), "--out FILE"),
        (("bench", "models", "--out", "x.json", "--regret"), "--regret cannot be used"),
        (("bench", "models", "--out", "x.json"), "ONEPASS-806"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a card")
def test_user_errors_are_reported_on_one_line(
    arguments: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["onepass", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    printed = capsys.readouterr().err
    assert exit.value.code == 2 and says in printed and printed.count("\n") == 1 and not list(tmp_path.iterdir())


def test_suites_are_listed_without_a_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["onepass", "bench", "--list"])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 0 and "rms_norm_backward 98304x512 bf16" in capsys.readouterr().out


def test_suites_are_listed_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["onepass", "bench", "--list", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capsys.readouterr().out)["table"]["workloads"] == [job.id for job in suite("table").jobs]


# ---- compiling Inductor's part in advance ----------------------------------------------------------------------------------

COUNTED = """
import torch
from torch._dynamo.utils import counters
from onepass.measure.providers import provide
from onepass.measure.suites import Job
for shape in ((8, 64), (8, 96)):
    job = Job("rms_norm", shape, "f32")
    with torch.no_grad():
        provide("inductor", job, job.inputs("cpu")).call()
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ to compile for CPU tensors")
def test_warm_up_workers_compile_what_inductor_needs_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    jobs = [Job("rms_norm", (8, 64), "f32"), Job("rms_norm", (8, 96), "f32")]
    with prewarm_inductor(jobs, ("eager", "inductor"), torch.device("cpu")):
        pass
    done = run_python(COUNTED)
    assert done.stdout.split() == ["2", "0"], done.stderr


def test_warm_up_workers_that_take_too_long_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("sleep"))
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", partial(_sleeping, subprocess.Popen, started))
    with prewarm_inductor([Job("rms_norm", (8, 64)), Job("rms_norm", (8, 96))], ("inductor",), torch.device("cpu"), limit=0.2):
        pass
    assert [worker.returncode for worker in started] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize("starting", [True, False])
def test_warm_up_workers_end_with_the_run_that_started_them(starting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while they start, or later, reaches the main thread, and no one waits for them to finish."""
    monkeypatch.setattr(sys, "executable", shutil.which("sleep"))
    started: list[Any] = []

    def interrupted(*command: Any, **how: Any) -> Any:
        if starting and started:
            raise KeyboardInterrupt
        return _sleeping(popen, started, *command, **how)

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    jobs = [Job("rms_norm", (8, 64)), Job("rms_norm", (8, 96))]
    with pytest.raises(KeyboardInterrupt), prewarm_inductor(jobs, ("inductor",), torch.device("cpu")):
        raise KeyboardInterrupt
    assert [worker.returncode for worker in started] == [-signal.SIGKILL] * (1 if starting else 2)


def _sleeping(popen: Any, started: list[Any], command: list[str], **how: Any) -> Any:
    started.append(popen([command[0], "3600"], **how))
    return started[-1]


def test_only_what_the_cache_can_hold_is_compiled_in_advance() -> None:
    assert [name for name in PROVIDERS if compiles_slowly(name)] == ["inductor", "inductor-nonstrict"]
