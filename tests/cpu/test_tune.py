"""Tuning: which plan is chosen, what is stored and for which calls, and corrections of the cost model. Times are made up."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import onepass
from onepass import compat
from onepass.capture.function.trace import capture
from onepass.codegen.source import Source
from onepass.device import device
from onepass.errors import BadSetting, BadSpec, CompileFailed, CompilerExited, NotWarmedUp, OnepassError, OnepassWarning
from onepass.integration import build, engine, region_op
from onepass.integration.engine import Kernels, counts
from onepass.ir.program import Program
from onepass.knobs import knobs
from onepass.pipeline import compile, optimize
from onepass.plan.partition import plan
from onepass.plan.resources import ctas_per_sm
from onepass.plan.variant import representative_sizes
from onepass.runtime import cache, executable, measured, offline, tune
from onepass.runtime.compiled import Artifact
from onepass.runtime.measured import Card, Observation
from onepass.runtime.stopwatch import Timing, timing
from onepass.tools.explain import explain_function
from tests.support.function_cases import CASES
from tests.support.region_calls import region

CARD, H200 = torch.device("cuda", 0), device("h200")
INNER = ("inner", "inner looped", "inner split", "inner staged")
NOTHING: frozenset[str] = frozenset()
HERE = Card("NVIDIA H200", 132, "13.0")
PROPERTIES = SimpleNamespace(name=HERE.name, multi_processor_count=HERE.sms)
SIZES = {"s0": 8000}

pytestmark = pytest.mark.usefixtures("empty_store")


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def program(cols: int = 1024) -> Program:
    return optimize(capture(softmax, (torch.zeros(64, cols, dtype=torch.bfloat16),)).program)


# ---- deciding --------------------------------------------------------------------------------------------------------------


def made(stage: str = "it") -> Artifact:
    """The kernels of some plan, identified by the names of their sources."""
    one = Kernels(program(40), "it").executable({"s0": 12}, torch.device("cpu"), NOTHING).artifact
    return replace(one, sources=tuple(replace(s, name=f"{s.name}_{stage}") for s in one.sources))


class Clock:
    """A clock with given times for plans, in the order of their first use: the default, then the others."""

    def __init__(self, *us: float, spread: float = 0.0, final: dict[int, float] | None = None) -> None:
        self.us, self.spread, self.final = us, spread, final or {}
        self.requests: list[tuple[int, int]] = []  # how many plans, how many runs
        self._order: list[tuple[Source, ...]] = []

    def __call__(self, plans: Sequence[Artifact], runs: int) -> list[Timing]:
        self.requests.append((len(plans), runs))
        self._order = self._order or [p.sources for p in plans]
        found = []
        for p in plans:
            k = self._order.index(p.sources)
            us = self.final.get(k, self.us[k]) if runs == tune.FINAL_RUNS else self.us[k]
            found.append(Timing(us, self.spread, runs))
        return found


def chosen_index(clock: Clock) -> int:
    """The index of the chosen plan: 0 for the default."""
    plans = [made(str(k)) for k in range(len(clock.us))]
    chosen, timed = tune.choose(plans[0], plans[1:], clock)
    assert [m.sources for m, _ in timed] == [p.sources for p in plans]
    assert [t.taken for t in chosen.trials].count(True) == 1 and len(chosen.trials) == len(plans)
    place = [p.sources for p in plans].index(chosen.sources)
    assert chosen.trials[place].taken
    return place


@pytest.mark.parametrize(
    "us, spread, expected",
    [
        ((100.0, 90.0, 80.0), 0.0, 2),
        ((100.0, 98.5, 99.0), 0.0, 0),  # faster, but not by the margin
        ((100.0, 95.0), 0.01, 1),
        ((100.0, 95.0), 0.04, 0),  # faster by the margin, but within the spread
        ((100.0,), 0.0, 0),
        ((100.0, 120.0), 0.0, 0),
        ((100.0, math.nan, 0.0, -3.0, math.inf), 0.0, 0),
        ((100.0, math.nan, 90.0), 0.0, 2),
        ((math.nan, 50.0), 0.0, 0),  # without a time to compare with, the default stays
        ((0.0, 50.0), 0.0, 0),
    ],
)
def test_the_default_stays_unless_another_plan_is_clearly_faster(us: tuple[float, ...], spread: float, expected: int) -> None:
    assert chosen_index(Clock(*us, spread=spread)) == expected


def test_the_final_round_decides() -> None:
    assert chosen_index(Clock(100.0, 60.0, 62.0, final={1: 99.5, 2: 70.0})) == 2
    assert chosen_index(Clock(100.0, 95.0, 62.0, final={2: math.nan})) == 0


def test_only_plans_near_the_best_are_timed_at_length() -> None:
    clock = Clock(100.0, 50.0, 51.0, 55.0, 56.0, 90.0)
    assert chosen_index(clock) == 1
    assert clock.requests == [(6, tune.FIRST_RUNS), (1 + tune.MAX_FINALISTS, tune.FINAL_RUNS)], "the default is always timed"
    slow = Clock(100.0, 200.0)
    assert chosen_index(slow) == 0 and slow.requests == [(2, tune.FIRST_RUNS)]


def test_the_outcome_is_described_in_one_sentence() -> None:
    plans = [made(str(k)) for k in range(3)]
    won, _ = tune.choose(plans[0], plans[1:], Clock(100.0, 70.0, 80.0))
    assert "70.0 us instead of 100.0 us for the default" in tune.describe_outcome(won) and "3 plans" in tune.describe_outcome(won)
    stayed, _ = tune.choose(plans[0], plans[1:], Clock(70.0, 71.0, 80.0))
    assert "default plan stays, 70.0 us" in tune.describe_outcome(stayed)


def test_which_plans_can_replace_the_default() -> None:
    default = replace(made(), in_place=(("out0", "x"),))
    equal, other = default, replace(made("other"), in_place=(("out0", "x"), ("out1", "x")))
    strict = replace(made("strict"), in_place=())
    assert tune.comparable(default, [equal, other, strict, other]) == (other,)


def test_timed_runs_are_summarized() -> None:
    one = timing([10.0, 11.0, 12.0, 13.0, 30.0])
    assert (one.us, one.runs) == (12.0, 5) and 0.1 < one.spread < 0.7
    assert timing([7.0]) == Timing(7.0, 0.0, 1) and timing([0.0, 0.0]).spread == 0.0


# ---- scratch tensors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cross_entropy-mean", "rms_norm-w-backward", "layer_norm-wb"])
def test_scratch_tensors_have_the_layout_of_the_program(name: str) -> None:
    inputs = CASES[name].inputs(40, 70, torch.bfloat16, "cpu")
    captured = capture(CASES[name].function, inputs)
    given, sizes, optimised = captured.tensors(inputs), captured.bind(inputs) or {}, optimize(captured.program)
    before = torch.get_rng_state()
    tensors = tune.scratch(optimised, sizes, torch.device("cpu"), frozenset(list(given)[:1]))
    assert torch.equal(before, torch.get_rng_state()), "the user's random numbers are not touched"
    for buffer in optimised.buffers:
        t = tensors[buffer.name]
        assert t.dtype == buffer.dtype.torch
        if buffer.name in given:
            assert (t.shape, t.stride()) == (given[buffer.name].shape, given[buffer.name].stride())
            assert (t.data_ptr() % 16 == 0) == (buffer.name == next(iter(given)))
            assert not t.isnan().any() and (t.dtype.is_floating_point or 0 <= int(t.min()) <= int(t.max()) < 70)
    runs = Kernels(optimised, name).executable(sizes, torch.device("cpu"), NOTHING)
    outs, ins = ([tensors[b.name] for b in each] for each in (runs.artifact.outputs, runs.artifact.inputs))
    runs.bound(sizes)(outs, ins)  # no index is out of range


# ---- in the engine ---------------------------------------------------------------------------------------------------------


class OnNoCard:
    """Replaces DeviceTimer: every plan takes its predicted time, except for a family that is set to be fast."""

    seen: list[int] = []  # noqa: RUF012, emptied by the fixture
    speed: Callable[[int, Artifact], float]
    error: Exception | None = None

    def __init__(self, program: Program, sizes: Any, where: torch.device, aligned: frozenset[str]) -> None:
        assert dict(sizes) == representative_sizes(program, dict(sizes), H200)
        if OnNoCard.error is not None:
            raise OnNoCard.error

    def __call__(self, plans: Sequence[Artifact], runs: int) -> list[Timing]:
        OnNoCard.seen.append(len(plans))
        return [Timing(OnNoCard.speed(k, p), 0.0, runs) for k, p in enumerate(plans)]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An H200 whose kernels are compiled by workers and never run. Yields whether the stream is being captured."""
    capturing = [False]

    def prepare(source: Source, index: int, aligned: frozenset[str]) -> Any:
        return SimpleNamespace(binary=offline.compile(source, H200, aligned), launch=None)

    monkeypatch.setattr(engine, "local_device", lambda index: H200)
    monkeypatch.setattr(build, "prepare", prepare)
    monkeypatch.setattr(executable, "prepare", prepare)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: PROPERTIES)
    monkeypatch.setattr(tune, "DeviceTimer", OnNoCard)
    OnNoCard.seen, OnNoCard.error = [], None
    OnNoCard.speed = staticmethod(lambda k, made: 100.0 if k == 0 else 60.0 + k)  # the first alternative is the best
    return capturing


def tuned(level: str, cols: int = 1024) -> Artifact:
    return Kernels(program(cols), "it", level).executable(SIZES, CARD, NOTHING).artifact


def test_the_winner_is_stored_separately_from_the_default(card: list[bool]) -> None:
    default, winner = tuned("off"), tuned("on")
    assert not default.trials and winner.trials and winner.sources != default.sources
    assert OnNoCard.seen[0] > 2 and len(OnNoCard.seen) == 2
    for level, expected in (("off", default), ("on", winner)):
        engine.forget()
        before = counts()
        again = tuned(level)
        assert again == expected and counts().plans == before.plans
    assert len(OnNoCard.seen) == 2, "nothing is timed again"


def test_tuning_results_survive_calibration_and_corrections(card: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    winner = tuned("on")
    known = replace(H200, bandwidth=4.4e6, source="calibrated 2026-01-01", corrections=(("inner", 1.1),))
    monkeypatch.setattr(engine, "local_device", lambda index: known)
    engine.forget()
    assert tuned("on") == winner and len(OnNoCard.seen) == 2


def test_another_card_or_version_is_tuned_anew(card: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    tuned("on")
    engine.forget()
    with monkeypatch.context() as patch:
        patch.setattr(cache, "versions", lambda: {"onepass": "other"})
        tuned("on")
    assert len(OnNoCard.seen) == 4
    monkeypatch.setattr(engine, "local_device", lambda index: replace(H200, title="another H200"))
    engine.forget()
    tuned("on")
    assert len(OnNoCard.seen) == 6


def test_a_full_search_serves_a_short_one_and_not_the_other_way(card: list[bool]) -> None:
    tuned("on")
    few = OnNoCard.seen[0]
    engine.forget()
    full = tuned("full")
    assert OnNoCard.seen[2] > few
    engine.forget()
    assert tuned("on") == full and len(OnNoCard.seen) == 4


def test_a_damaged_winner_is_tuned_again(card: list[bool], tmp_path: Path) -> None:
    tuned("on")
    for path in (tmp_path / "store" / "entries").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    engine.forget()
    with pytest.warns(OnepassWarning, match="ONEPASS-502"):
        again = tuned("on")
    assert again.trials and len(OnNoCard.seen) == 4


def test_without_a_store_every_process_tunes(card: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_CACHE", "0")
    assert tuned("on") == tuned("on") and len(OnNoCard.seen) == 2
    engine.forget()
    assert tuned("on").trials and len(OnNoCard.seen) == 4


def test_a_plan_that_was_not_faster_is_not_chosen(card: list[bool]) -> None:
    OnNoCard.speed = staticmethod(lambda k, made: 100.0 - 0.5 * (k > 0))
    assert tuned("on").sources == tuned("off").sources


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), CompileFailed(kernel="k", device="d", detail="no")])
def test_the_default_is_used_if_nothing_can_be_timed(card: list[bool], error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    OnNoCard.error = error
    with caplog.at_level(logging.WARNING, "onepass"):
        assert tuned("on") == tuned("off")
    assert "using the default plan" in caplog.text
    OnNoCard.error = None
    engine.forget()
    assert tuned("on").trials, "it was not remembered as tuned"


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (CompilerExited(kernel="k", device="d", how="was killed by SIGKILL"), False),
        (CompileFailed(kernel="k", device="d", detail="too many elements"), True),
    ],
)
def test_a_winner_is_stored_unless_a_plan_was_missed_for_a_transient_failure(
    card: list[bool], error: OnepassError, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, default = offline.compile, tuned("off")

    def failing(source: Source, *how: Any) -> Any:
        if source not in default.sources:
            raise error
        return compiled(source, *how)

    with monkeypatch.context() as patch:
        patch.setattr(offline, "compile", failing)
        assert tuned("on").sources == default.sources
    engine.forget()
    timed = len(OnNoCard.seen)
    tuned("on")
    assert (len(OnNoCard.seen) == timed) is kept


def test_nothing_is_timed_while_a_graph_is_captured(card: list[bool], caplog: pytest.LogCaptureFixture) -> None:
    card[0] = True
    with pytest.raises(NotWarmedUp):
        tuned("on")
    card[0] = False
    default = tuned("off")
    card[0] = True
    with caplog.at_level(logging.WARNING, "onepass"):
        assert tuned("on") is default and not OnNoCard.seen
    assert "captured" in caplog.text
    card[0] = False
    winner = tuned("on")
    assert winner.trials, "the stand-in did not stay"
    card[0] = True
    assert tuned("on") is winner


def test_interpreted_kernels_are_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "DeviceTimer", None)
    x = torch.randn(6, 40)
    torch.testing.assert_close(onepass.fuse(softmax, tune="full")(x), x.softmax(-1))


# ---- settings --------------------------------------------------------------------------------------------------------------


def level_of(fused: Any) -> str:
    fused(torch.randn(6, 40))
    return fused._traces[0].kernels.tune


def test_sources_of_the_tune_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert level_of(onepass.fuse(softmax)) == "off"
    monkeypatch.setenv("ONEPASS_TUNE", "on")
    assert level_of(onepass.fuse(softmax)) == "on"
    with onepass.settings(tune="full"):
        assert level_of(onepass.fuse(softmax)) == "full"
        assert level_of(onepass.fuse(softmax, tune="off")) == "off"


def test_a_region_has_its_own_tune_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_TUNE", "on")
    x = torch.randn(6, 40)
    text = str(capture(softmax, (x,)).program)
    assert region_op._Region(region("f", text)).settings.tune == "on", "the environment decides what is not set"
    own = region_op._Region(region("f", text, tune="full"))
    out = torch.empty_like(x)
    own([out], [x], [6])
    assert own._kernels is not None and own._kernels.tune == "full"
    torch.testing.assert_close(out, x.softmax(-1))


def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadSetting, match="off, on, full"):
        onepass.fuse(softmax, tune="max")
    with pytest.raises(BadSetting, match="off, on, full"), onepass.settings(tune=True):
        pass
    with pytest.raises(BadSpec, match="ONEPASS_TUNE"):
        knobs({"ONEPASS_TUNE": "yes"})


# ---- corrections of the cost model -----------------------------------------------------------------------------------------


def seen(family: str, *ratios: float) -> list[Observation]:
    return [Observation(f"{family} {k}", family, r) for k, r in enumerate(ratios)]


@pytest.mark.parametrize(
    "ratios, expected",
    [
        ((1.1,) * 8, (("inner", 1.1),)),
        ((1.1,) * 7, ()),
        ((1.01,) * 20, ()),  # rounded to nothing
        ((3.0,) * 8, (("inner", 1.4),)),
        ((0.1,) * 8, (("inner", 0.7),)),
        ((0.5, 0.6, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0), ()),  # no agreement
        ((1.18, 1.2, 1.21, 1.2, 1.19, 1.22, 1.2, 1.2, math.nan, -1.0), (("inner", 1.2),)),
    ],
)
def test_corrections_need_agreement(ratios: tuple[float, ...], expected: tuple[tuple[str, float], ...]) -> None:
    assert measured.corrections(seen("inner", *ratios)) == expected


def test_families_are_corrected_separately() -> None:
    both = seen("outer", *(1.2,) * 8) + seen("inner", *(0.9,) * 9) + seen("column", 1.3)
    assert measured.corrections(both) == (("inner", 0.9), ("outer", 1.2))


def test_observations_are_kept_once_per_program_and_family() -> None:
    measured.observe(HERE, seen("inner", 1.1, 1.2))
    measured.observe(HERE, [Observation("inner 0", "inner", 1.3), Observation("inner 0", "outer", 0.8)])
    assert {(o.program, o.family): o.ratio for o in measured.observations(HERE)} == {
        ("inner 0", "inner"): 1.3,
        ("inner 1", "inner"): 1.2,
        ("inner 0", "outer"): 0.8,
    }
    assert measured.observations(replace(HERE, sms=78)) == ()
    measured.observe(HERE, [Observation(str(k), "inner", 1.0) for k in range(measured.MAX_OBSERVATIONS)])
    assert {o.program for o in measured.observations(HERE)} == {str(k) for k in range(measured.MAX_OBSERVATIONS)}, "the latest"


def test_observations_belong_to_a_version_of_the_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    measured.observe(HERE, seen("inner", 1.1))
    monkeypatch.setattr(cache, "versions", lambda: {"onepass": "other"})
    assert measured.observations(HERE) == ()


def test_a_device_includes_its_measured_corrections() -> None:
    assert measured.with_measurements(H200, HERE) is H200
    measured.observe(HERE, seen("inner", *(1.2,) * 8))
    found = measured.with_measurements(H200, HERE)
    assert found == replace(H200, corrections=(("inner", 1.2),))
    assert (found.correction("inner"), found.correction("outer")) == (1.2, 1.0)
    assert measured.delete_measurements(HERE) and not measured.delete_measurements(HERE)
    assert measured.with_measurements(H200, HERE) is H200
    assert measured.save_calibration(HERE, measured.Calibration(1.0, 2.0, 3.0, 4.0, 5.0, "2026-01-31"))
    measured.observe(HERE, seen("inner", *(1.2,) * 8))
    assert measured.delete_measurements(HERE) and measured.with_measurements(H200, HERE) is H200, "both are forgotten at once"


def on_h200(program: Program, facts: Any = H200) -> Artifact:
    sizes = representative_sizes(program, SIZES, H200)
    return compile(plan(program, sizes, facts), lambda source: offline.compile(source, H200)).artifact


def test_ratios_are_of_the_uncorrected_model() -> None:
    one = on_h200(program(8192))
    [kernel] = one.summary.kernels
    assert kernel.ctas_per_sm > 0
    [plain] = measured.observations_from("p", [(one, 1.2 * kernel.predicted_us)], H200)
    corrected = replace(H200, corrections=tuple((family, 1.25) for family in INNER))
    [again] = measured.observations_from("p", [(on_h200(program(8192), corrected), 1.2 * kernel.predicted_us)], corrected)
    assert plain.ratio == pytest.approx(1.2) == again.ratio


def test_only_the_fastest_plan_of_a_family_that_runs_as_predicted_is_observed() -> None:
    one = on_h200(program(8192))
    [kernel], [binary] = one.summary.kernels, one.binaries
    fit = replace(one, binaries=(replace(binary, spill_bytes=0),))
    as_is = replace(
        fit,
        summary=replace(
            one.summary,
            kernels=(replace(kernel, ctas_per_sm=ctas_per_sm(binary.registers, binary.smem_bytes, kernel.schedule.warps, H200)),),
        ),
    )
    us = kernel.predicted_us
    assert [o.ratio for o in measured.observations_from("p", [(as_is, 2 * us), (as_is, us)], H200)] == [pytest.approx(1.0)]
    spilled = replace(as_is, binaries=(replace(binary, spill_bytes=8),))
    other = replace(as_is, summary=replace(as_is.summary, kernels=(replace(as_is.summary.kernels[0], ctas_per_sm=77),)))
    half = replace(as_is, summary=replace(as_is.summary, predicted_us=2 * us))
    short = replace(
        as_is, summary=replace(as_is.summary, predicted_us=5.0, kernels=(replace(as_is.summary.kernels[0], predicted_us=5.0),))
    )
    assert not measured.observations_from("p", [(spilled, us), (other, us), (half, us), (short, 5.0), (as_is, math.nan)], H200)


def test_tuning_records_observations(card: list[bool]) -> None:
    for cols in (4096, 8192):
        tuned("on", cols)
    found = measured.observations(replace(HERE, driver=compat.cuda_driver_level() or ""))
    assert len({o.program for o in found}) == 2 and all(o.ratio > 0 for o in found)


def test_a_correction_multiplies_predictions_and_explain_says_so() -> None:
    captured = program(8192)
    before = plan(captured, {"s0": 4096}, H200)
    [kernel] = before.kernels
    slower = replace(H200, corrections=tuple((family, 1.3) for family in INNER))
    [after] = plan(captured, {"s0": 4096}, slower).kernels
    assert after.schedule == kernel.schedule and after.predicted_us == pytest.approx(1.3 * kernel.predicted_us)
    x = torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta")
    report = explain_function(softmax, device=slower)(x)
    assert f"corrected  {kernel.family} x 1.3" in str(report) and report.to_json()["corrections"] == {kernel.family: 1.3}
    plain = explain_function(softmax)(x)
    assert "corrected" not in str(plain) and "corrections" not in plain.to_json()


def test_plans_are_timed_on_scratch_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that DeviceTimer gives to the stopwatch run each plan's kernels, which are interpreted here."""
    ran: list[int] = []

    def watch(where: torch.device) -> Any:
        def run(works: Sequence[Callable[[], object]], runs: int) -> list[Timing]:
            for work in works:
                work()
                ran.append(runs)
            return [Timing(1.0, 0.0, runs) for _ in works]

        return run

    monkeypatch.setattr(tune, "Stopwatch", watch)
    captured = program(40)
    plan_of = Kernels(captured, "it").executable({"s0": 12}, torch.device("cpu"), NOTHING).artifact
    timer = tune.DeviceTimer(captured, {"s0": 12}, torch.device("cpu"), NOTHING)
    assert len(timer([plan_of, plan_of], 3)) == 2 and ran == [3, 3]
    torch.testing.assert_close(timer._tensors["out0"], timer._tensors["x"].softmax(-1), rtol=1e-2, atol=1e-2)
