"""The custom op of a region: right results, kernels kept by sizes, and correct schema and fake results for torch."""

from __future__ import annotations

import contextvars
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass.errors import BadSetting, BadSpec, InternalError, OnepassWarning, UnknownSetting, WrongAnswer
from onepass.integration import failure, journal, region_op, settings
from onepass.integration.engine import Kernels
from onepass.integration.region_spec import RegionSpec, decode, digest_of, encode
from onepass.ir.text import parse
from onepass.pipeline import optimize
from onepass.runtime.executable import Executable
from tests.support.region_calls import ROWS, assert_filled, inputs, outputs, region

BAD_SHARES = ["1/0", "0/5", "2/3", "1/x", "1/-3", "1/1.5", "1/", "/3", "0.001", "-1", "often", "1/" + "9" * 5000, "9" * 5000]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    region_op.forget()
    journal.reset()
    failure.reset_warnings()
    yield
    region_op.forget()


def test_one_region_serves_many_sizes_and_counts_its_calls() -> None:
    for rows in (1, 5, 5, 40):
        ins, outs = inputs(rows), outputs(rows)
        torch.ops.onepass.region(outs, ins, [rows], region("0123456789", verify=9))
        assert_filled(outs, ins)
    seen = journal.snapshot()
    assert seen.calls == {"0123456789": 4}
    assert seen.regions[0].sizes == ((1,), (5,), (40,)) and seen.regions[0].artifact is not None
    assert not seen.fallbacks


def test_the_functional_form_allocates_what_the_fake_promises() -> None:
    ins = inputs(6)
    outs = torch.ops.onepass.region_out(ins, [6], region("a"))
    assert_filled(outs, ins)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = torch.ops.onepass.region_out([mode.from_tensor(t) for t in ins], [6], region("a"))
    assert [(f.shape, f.stride(), f.dtype) for f in fakes] == [(o.shape, o.stride(), o.dtype) for o in outs]


def test_the_op_passes_opcheck() -> None:
    ins = inputs(3)
    torch.library.opcheck(torch.ops.onepass.region_out.default, (ins, [3], region("b")))
    torch.library.opcheck(torch.ops.onepass.region.default, (outputs(3), ins, [3], region("b")))


def test_unaligned_tensors_get_kernels_of_their_own() -> None:
    ins, outs = inputs(4), outputs(4)
    region_op.run(outs, ins, [4], region("c", verify=2))
    shifted = torch.empty(4 * 24 + 1, dtype=torch.bfloat16)[1:].view(4, 24).copy_(ins[0])
    region_op.run(outs, [shifted, ins[1]], [4], region("c", verify=2))
    assert_filled(outs, ins)


@pytest.mark.parametrize("elements", [1, 4, 8])
def test_kernels_are_told_which_tensors_start_on_16_bytes(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card reads aligned tensors by 16 bytes, so an 8-byte offset is not enough."""
    alignments: list[frozenset[str]] = []
    executable = Kernels.executable
    monkeypatch.setattr(
        Kernels,
        "executable",
        lambda self, bindings, where, aligned: alignments.append(aligned) or executable(self, bindings, where, aligned),
    )
    ins, outs = inputs(4), outputs(4)
    for k in (0, elements):
        shifted = torch.empty(4 * 24 + k, dtype=torch.bfloat16)[k:].view(4, 24).copy_(ins[0])
        region_op.run(outs, [shifted, ins[1]], [4], region("c"))
        region_op.run([outs[0], torch.empty(4 + k)[k:]], ins, [4], region("c"))
    every = frozenset({"in0", "in1", "out0", "out1"})
    expected = {1: [every, every - {"in0"}, every - {"out1"}], 4: [every, every - {"in0"}], 8: [every]}[elements]
    assert alignments == expected


def test_the_state_kept_per_region_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_op, "MAX_CACHED_SIZES", 2)
    for rows in range(1, 6):
        ins, outs = inputs(rows), outputs(rows)
        region_op.run(outs, ins, [rows], region("c"))
        assert_filled(outs, ins)
        assert len(region_op._REGIONS[digest_of(region("c"))]._fills) <= 2


def test_torch_must_keep_strides() -> None:
    for op in (torch.ops.onepass.region.default, torch.ops.onepass.region_out.default):
        assert torch.Tag.needs_exact_strides in op.tags


def test_no_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Kernels, "executable")
    ins, outs = inputs(0), outputs(0)
    region_op.run(outs, ins, [0], region("d", verify=1, on_error="raise"))
    column_sums = ROWS.replace("over n", "over m").replace("output out1: f32 [s0] strides [1]", "output out1: f32 [24] strides [1]")
    column_sums = column_sums.replace("store out1 [m:1]", "store out1 [n:1]")
    outs = [torch.empty(0, 24, dtype=torch.bfloat16), torch.empty(24)]
    region_op.run(outs, ins, [0], region("e", column_sums, on_error="raise"))
    assert torch.equal(outs[1], torch.ones(24)), "a sum over nothing is zero"


def test_an_output_may_overwrite_an_input_even_while_verified() -> None:
    ins = inputs(5)
    kept = [t.clone() for t in ins]
    outs = [ins[0], torch.empty(5)]
    region_op.run(outs, ins, [5], region("f", verify=1))
    assert_filled(outs, kept)


def test_threads_share_a_region() -> None:
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for rows in (2, 3):
                ins, outs = inputs(rows, seed), outputs(rows)
                region_op.run(outs, ins, [rows], region("g"))
                assert_filled(outs, ins)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert journal.snapshot().calls == {"g": 8}


def checked_calls(monkeypatch: pytest.MonkeyPatch, text: str, sizes: list[int]) -> list[int]:
    """The indices of the calls that were compared with float64."""
    found: list[int] = []
    made: list[int] = []
    monkeypatch.setattr(region_op._Region, "_verify", lambda self, outs, ins, kept, bindings: found.append(len(made)))
    for rows in sizes:
        region_op.run(outputs(rows), inputs(rows), [rows], text)
        made.append(rows)
    return found


@pytest.mark.parametrize(
    ("verify", "expected"),
    [(0, []), (2, [0, 1]), ("1/1", [0, 1, 2, 3, 4, 5, 6]), ("1/3", [0, 3, 6]), ("1/5", [0, 5]), ("1/1000", [0])],
)
def test_which_calls_are_checked(monkeypatch: pytest.MonkeyPatch, verify: int | str, expected: list[int]) -> None:
    assert checked_calls(monkeypatch, region("h", verify=verify), [4, 4, 5, 4, 4, 5, 6]) == expected, "new sizes count like others"
    monkeypatch.setenv("ONEPASS_VERIFY", str(verify))
    assert checked_calls(monkeypatch, region("i"), [4] * 7) == expected, "so says the environment, and regions count for themselves"


def test_a_check_that_cannot_be_made_is_postponed(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = iter([True, True, False, False])
    monkeypatch.setattr(region_op, "_capturing", lambda tensor: next(capturing, False))
    assert checked_calls(monkeypatch, region("j", verify="1/3"), [4] * 7) == [2, 5]


def test_a_sampled_call_that_is_wrong_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONEPASS_REPRO_DIR", str(tmp_path))
    bound = Executable.bound
    wrong: list[bool] = []

    def sometimes_wrong(self: Executable, bindings: Any) -> Any:
        fill = bound(self, bindings)
        return lambda outs, ins: (fill(outs, ins), outs[1].mul_(1.01) if wrong else None)

    monkeypatch.setattr(Executable, "bound", sometimes_wrong)
    call = lambda: region_op.run(outputs(4), inputs(4), [4], region("k", verify="1/3"))  # noqa: E731
    call()
    wrong.append(True)
    call()
    call()
    with pytest.raises(WrongAnswer, match="ONEPASS-703"):
        call()


def test_a_wrong_checked_call_raises_even_if_it_overwrites_an_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reference is computed from the overwritten input, not from the output in its place."""
    monkeypatch.setenv("ONEPASS_REPRO_DIR", str(tmp_path))
    bound = Executable.bound

    def wrong(self: Executable, bindings: Any) -> Any:
        fill = bound(self, bindings)
        return lambda outs, ins: (fill(outs, ins), outs[0].mul_(1.1))

    monkeypatch.setattr(Executable, "bound", wrong)
    ins = inputs(4)
    with pytest.raises(WrongAnswer, match="ONEPASS-703"):
        region_op.run([ins[0], torch.empty(4)], ins, [4], region("k", verify=1))


def test_a_right_checked_call_passes_even_if_it_overwrites_an_input() -> None:
    ins = inputs(4)
    region_op.run([ins[0], torch.empty(4)], ins, [4], region("k", verify=1))


def test_bad_shares_in_the_environment_are_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in BAD_SHARES:
        monkeypatch.setenv("ONEPASS_VERIFY", bad)
        with pytest.raises(BadSpec, match=r"ONEPASS-803.*ONEPASS_VERIFY.*1/1000"):
            settings.resolve({})


# ---- settings ----------------------------------------------------------------------------------------------------------------


def test_later_sources_of_settings_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_VERIFY", "3")
    monkeypatch.setenv("ONEPASS_ON_ERROR", "raise")
    assert settings.resolved().verify == 3
    with settings.settings(verify=2, skip=["model.py:4"]):
        with settings.settings(interpret=True):
            now = settings.resolved({"verify": 1})
        assert (now.verify, now.on_error, now.interpret, now.skip) == (1, "raise", True, ("model.py:4",))
        assert not settings.resolved().interpret
    assert settings.resolved() == settings.resolve({})


def test_settings_for_calls_travel_with_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings.resolve({"on_error": "raise", "interpret": True}).for_calls
    assert given.given == {"on_error": "raise"}
    monkeypatch.setenv("ONEPASS_VERIFY", "7")
    assert settings.resolve({"on_error": "raise"}).for_calls == given, "the environment is that of the process that calls"
    found = region_op._Region(region("a", on_error="raise"))
    assert (found.settings.on_error, found.settings.verify) == ("raise", 7), "it decides what was not given"


def test_settings_that_differ_from_their_defaults() -> None:
    given = {"skip": ("a.py:3",), "in_place": False, "verify": "1/3"}
    assert settings.resolve({**given, "rest": "inductor"}).changed == given
    assert settings.resolve(settings.resolve(given).changed) == settings.resolve(given)


@pytest.mark.parametrize("verify", [None, 0, 2, "1/1000"])
def test_a_region_round_trips_through_its_text(verify: int | str | None) -> None:
    captured = parse(ROWS.replace("const 1.0", "const nan"))
    for lines in ((), ("a@b?on_error=raise.py:3", 'ä"; x.py:4')):
        spec = RegionSpec("0123456789", captured, optimize(captured), lines, settings.CallSettings(verify=verify, tune="on"))
        text = encode(spec)
        assert decode(text) == spec and text.isascii() and "\n" not in text
        assert digest_of(text) != digest_of(encode(replace(spec, lines=(*lines, "c.py:5"))))


def test_text_that_is_not_a_region_is_refused() -> None:
    with pytest.raises(InternalError, match=r"ONEPASS-900.*reading a region"):
        region_op.run(outputs(4), inputs(4), [4], "0123456789")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("rest", "nothing", "inductor, eager"),
        ("verify", -1, "whole number"),
        ("skip", "model.py:3", "list"),
        ("interpret", 1, "True"),
        *(("verify", bad, "1/1000") for bad in (*BAD_SHARES, "3", 0.001, True, None)),
    ],
)
def test_bad_settings_name_the_allowed_values(name: str, value: object, says: str) -> None:
    with pytest.raises(BadSetting, match=says), settings.settings(**{name: value}):
        pass


def test_unknown_settings_name_the_known_ones() -> None:
    with pytest.raises(UnknownSetting, match="interpret"), settings.settings(interprete=True):
        pass


def test_setting_names_do_not_clash_with_inductors() -> None:
    from torch._inductor import config

    assert not settings.NAMES & set(config.get_config_copy())


def test_warnings_are_shown_once(recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")  # else Python itself would show a repeated warning only once
    for _ in range(2):
        failure.report_fallback("r", ["m.py:1 x"], "planned", ValueError("no"), lambda: "nowhere")
    assert len([w for w in recwarn if w.category is OnepassWarning]) == 1
    assert len(journal.snapshot().fallbacks) == 2


# ---- settings and threads ----------------------------------------------------------------------------------------------------


def settings_seen_by(run: Callable[[Callable[[], None]], None]) -> dict[str, object]:
    """The settings in effect where `run` calls its argument."""
    found: dict[str, object] = {}
    run(lambda: found.update(settings.resolved().changed))
    return found


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.skipif(bool(getattr(sys.flags, "thread_inherit_context", False)), reason="this Python hands contexts on to threads")
def test_settings_are_local_to_a_context() -> None:
    with settings.settings(verify=3):
        assert settings_seen_by(lambda work: work()) == {"verify": 3}
        assert settings_seen_by(in_a_thread) == {}
        assert settings_seen_by(lambda work: in_a_thread(partial(contextvars.copy_context().run, work))) == {"verify": 3}
    assert settings_seen_by(lambda work: work()) == {}


def test_settings_of_two_threads_do_not_mix() -> None:
    inside, found = threading.Barrier(2), {}

    def work(k: int) -> None:
        with settings.settings(verify=k):
            inside.wait()
            found[k] = settings.resolved().verify
            inside.wait()

    threads = [threading.Thread(target=work, args=(k,)) for k in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: 1, 2: 2} and settings.resolved() == settings.resolve({})
