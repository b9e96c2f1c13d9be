"""Calibration: how figures become device facts, which are refused, where they are stored, who uses them. Figures are made up."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from onepass import compat, files
from onepass.__main__ import app
from onepass.capture.function.trace import capture
from onepass.device import Device, device
from onepass.errors import CalibrationNotSaved, ImplausibleMeasurement, NoGpu, OnepassError, OnepassWarning
from onepass.integration.build import KernelKey, store_key
from onepass.measure import calibrate as tool
from onepass.measure.calibrate import Anchor, InFlightRate, ProbeResults, calibrate, derive, fit_latency, forget_card
from onepass.pipeline import optimize
from onepass.plan.cost import sustained_rate
from onepass.plan.variant import Variant
from onepass.runtime import cache, card, measured
from onepass.runtime.measured import Calibration
from onepass.runtime.serialize import pack
from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
H200 = device("h200")
PROPERTIES = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0)
JOIN_BYTES = 4 * 132 * 8192

SCALED = H200.latency / tool.PROBED_H200["latency"]  # a probe's latency in the cost model's terms


def in_flight_rates(facts: Device, *kilobytes: int) -> tuple[InFlightRate, ...]:
    """The in-flight rates that a card with these facts would show."""
    return tuple(InFlightRate(kb << 10, sustained_rate(tool.MEAN_IN_FLIGHT_SHARE * (kb << 10), facts)) for kb in kilobytes)


def probe_results(bandwidth: float = 4.4e6, latency: float = 1.1, **changes: Any) -> ProbeResults:
    """Probe results of a card somewhat like an H200."""
    facts = replace(H200, bandwidth=bandwidth, latency=latency)
    anchors = tuple(
        Anchor(kind, size, size / rate)
        for kind, rate in (("read", bandwidth), ("copy", 4.2e6), ("add", 4.3e6))
        for size in (256 << 20, 1 << 30)
    )
    return replace(
        ProbeResults(anchors, in_flight_rates(facts, 2, 4, 8, 16, 32, 64, 128), 5.6e6, 1.9, 2.9, JOIN_BYTES, 1800.0), **changes
    )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A separate store for each test."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "store"))
    yield tmp_path / "store"
    card.local_device.cache_clear()


@pytest.fixture
def fake_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that reports its properties and runs nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: PROPERTIES)
    card.local_device.cache_clear()


def facts_of_a_new_process() -> Device:
    """The device facts that a new process would plan with."""
    card.local_device.cache_clear()
    cache._opened.cache_clear()
    found = card.local_device()
    assert found is not None
    return found


# ---- figures -> facts ------------------------------------------------------------------------------------------------------


def test_the_bandwidth_is_the_best_rate_of_the_large_anchors() -> None:
    small = Anchor("read", 1 << 20, 0.06)  # 17 TB/s: it was in L2
    found = derive(probe_results(anchors=(*probe_results().anchors, small)), H200, "2026-01-01")
    assert found.bandwidth == pytest.approx(4.4e6)


@pytest.mark.parametrize("latency", [0.6, 1.1, 2.0])
def test_the_latency_is_the_one_at_which_the_model_predicts_the_measured_rates(latency: float) -> None:
    facts = replace(H200, latency=latency)
    assert fit_latency(in_flight_rates(facts, 2, 4, 8, 16, 32, 64), facts.bandwidth, facts.sms) == pytest.approx(latency)


def test_points_at_full_bandwidth_do_not_count_for_the_latency() -> None:
    top = tuple(InFlightRate(kb << 10, H200.bandwidth) for kb in (128, 256))
    points = in_flight_rates(H200, 8, 16, 32)
    assert fit_latency((*points, *top), H200.bandwidth, 132) == pytest.approx(H200.latency)
    assert math.isnan(fit_latency(top, H200.bandwidth, 132))


def test_the_launch_cost_follows_from_the_measured_join() -> None:
    """A join that costs as much as on the H200 the model was fitted on gives that card's launch cost."""
    bytes_time = JOIN_BYTES / tool.PROBED_H200["l2_bandwidth"]
    same = probe_results(l2_rate=tool.PROBED_H200["l2_bandwidth"], join_us=tool.PROBED_H200["launch"] + bytes_time)
    assert derive(same, H200, "").launch == pytest.approx(H200.launch)
    dear = derive(probe_results(launch_us=6.72), H200, "").launch
    assert dear == pytest.approx(2 * H200.launch), "no less than the smallest kernel"


def test_facts_are_relative_to_the_card_the_model_was_fitted_on() -> None:
    probed = tool.PROBED_H200
    found = derive(probe_results(4.5e6, probed["latency"], l2_rate=2 * probed["l2_bandwidth"], clock=probed["clock"] / 2), H200, "")
    assert found.latency == pytest.approx(H200.latency) and found.bandwidth == pytest.approx(4.5e6)
    assert (found.l2_bandwidth, found.clock) == pytest.approx((2 * H200.l2_bandwidth, H200.clock / 2))


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"anchors": (Anchor("read", 1 << 30, 40.0),)}, "DRAM rate was measured as 26.84 TB/s"),
        ({"anchors": (Anchor("read", 1 << 30, math.nan),)}, "nan us"),
        ({"anchors": (Anchor("copy", 1 << 30, -5.0),)}, "The time of a copy was measured as -5.0 us"),
        ({"anchors": (Anchor("copy", 1 << 30, 0.0),)}, "0.0 us"),
        ({"anchors": ()}, "DRAM rate was measured as nan"),
        ({"flights": ()}, "latency under load was measured as nan"),
        ({"flights": (InFlightRate(64 << 10, 5e5),)}, "latency"),
        ({"l2_rate": math.nan}, "L2 rate"),
        ({"l2_rate": 1e6}, "at least the DRAM rate"),
        ({"l2_rate": -1.0}, "L2 rate"),
        ({"clock": 0.0}, "clock under load was measured as 0 MHz"),
        ({"clock": math.inf}, "clock"),
        ({"launch_us": -0.5}, "one more kernel"),
        ({"join_us": 500.0}, "one more kernel"),
    ],
)
def test_implausible_figures_are_refused_and_not_stored(fake_card: None, folder: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ImplausibleMeasurement, match=re.escape(what)):
        calibrate(probe=lambda where, facts: probe_results(**changes))
    assert not (folder / "cards").exists() and facts_of_a_new_process() is H200


# ---- keeping ---------------------------------------------------------------------------------------------------------------


def test_facts_are_stored_used_and_forgotten(fake_card: None, folder: Path) -> None:
    assert facts_of_a_new_process() is H200
    found = calibrate(probe=lambda where, facts: probe_results())
    assert found.kept and found.before is H200
    known = facts_of_a_new_process()
    assert (known.bandwidth, known.clock, known.source) == (4.4e6, found.facts.clock, f"calibrated {found.facts.date}")
    assert replace(known, **{k: getattr(H200, k) for k in (*tool._LIMITS, "source")}) == H200, "all else is the driver's"
    [path] = (folder / "cards").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE((folder / "cards").stat().st_mode) == 0o700
    assert forget_card() and facts_of_a_new_process() is H200 and not forget_card()


def test_a_second_calibration_replaces_the_first(fake_card: None) -> None:
    for rate in (4.3e6, 4.6e6):
        found = calibrate(probe=lambda where, facts, rate=rate: probe_results(rate))  # type: ignore[misc]  # no lambda with a default is inferred
    assert found.before.bandwidth == 4.3e6 and facts_of_a_new_process().bandwidth == 4.6e6


def test_a_dry_run_stores_nothing(fake_card: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not calibrate(dry_run=True, probe=lambda where, facts: probe_results()).kept
    monkeypatch.setenv("ONEPASS_CACHE", "0")
    assert not calibrate(dry_run=True, probe=lambda where, facts: probe_results()).kept
    assert not (folder / "cards").exists()


def test_facts_belong_to_one_kind_of_card_and_driver(fake_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate(probe=lambda where, facts: probe_results())
    other = SimpleNamespace(**{**vars(PROPERTIES), "name": "NVIDIA H200 NVL"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: other)
    assert facts_of_a_new_process() is H200
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: PROPERTIES)
    assert facts_of_a_new_process() is not H200
    monkeypatch.setattr(compat, "cuda_driver_level", lambda: "99.0")
    assert facts_of_a_new_process() is H200


def test_facts_outlast_a_new_version_of_the_package(fake_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate(probe=lambda where, facts: probe_results())
    monkeypatch.setattr(cache, "versions", lambda: {"onepass": "other"})
    assert facts_of_a_new_process().bandwidth == 4.4e6


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"4400000.0", b"9400000.0"))


def _open_to_others(path: Path) -> None:
    path.chmod(0o622)


def _other_kind(path: Path) -> None:
    key = path.name.removesuffix(".json")
    path.write_bytes(pack(key, measured.Card("it", 1, "")))


@pytest.mark.parametrize("damage", [_cut, _changed, _open_to_others, _other_kind])
def test_damaged_facts_are_not_used(fake_card: None, folder: Path, damage: Any) -> None:
    calibrate(probe=lambda where, facts: probe_results())
    [path] = (folder / "cards").iterdir()
    damage(path)
    with pytest.warns(OnepassWarning, match="ONEPASS-502"):
        assert facts_of_a_new_process() is H200
    assert facts_of_a_new_process() is H200, "warned once: the file was set aside"


def test_nothing_is_measured_if_nothing_can_be_stored(fake_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_CACHE", "0")
    with pytest.raises(CalibrationNotSaved, match="ONEPASS_CACHE=1"):
        calibrate(probe=lambda where, facts: pytest.fail("measured"))


def test_a_full_disk_is_an_error(fake_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    with pytest.warns(OnepassWarning), pytest.raises(CalibrationNotSaved):
        calibrate(probe=lambda where, facts: probe_results())


def test_calibrating_without_a_card_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for action in (calibrate, forget_card, lambda: card.resolve_device("here")):
        with pytest.raises(NoGpu, match="ONEPASS-401"):
            action()


def test_calibrating_an_unsupported_card_is_an_error(fake_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (7, 5))
    with pytest.raises(NoGpu, match=r"7\.5"):
        calibrate()


# ---- what uses them --------------------------------------------------------------------------------------------------------


def test_plans_for_different_facts_have_different_keys() -> None:
    program = optimize(capture(lambda x: x.softmax(-1), (torch.zeros(6, 40),)).program)
    base = Variant((), (("s0", 66),), frozenset(), H200)
    key = KernelKey(base, False, False)
    known = replace(H200, **{k: v for k, v in asdict(derive(probe_results(), H200, "")).items() if k != "date"})
    same_card, other_card = (replace(base, device=each) for each in (known, replace(known, sms=78)))
    assert store_key(program, key) != store_key(program, replace(key, variant=same_card))
    kept = replace(key, tune="on")
    assert store_key(program, kept) == store_key(program, replace(kept, variant=same_card)), "measured on the card itself"
    assert store_key(program, kept) != store_key(program, replace(kept, variant=other_card))


def test_here_names_the_card_of_this_machine(fake_card: None) -> None:
    assert card.resolve_device("here") is H200 and card.resolve_device("H100").name == "h100" and card.resolve_device(H200) is H200
    calibrate(probe=lambda where, facts: probe_results())
    assert card.resolve_device("here").source.startswith("calibrated")
    with pytest.raises(OnepassError, match="ONEPASS-801"):
        card.resolve_device("h201")


# ---- the command -----------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["calibrate", *arguments])


def test_the_command(fake_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "_on_card", lambda where, facts: probe_results())
    shown = run("--json", "--dry-run")
    assert shown.exit_code == 0
    found = json.loads(shown.stdout)
    assert (found["kept"], found["device"], found["before"]["source"]) == (False, "h200", "measured")
    assert Calibration(**found["facts"]).latency == pytest.approx(1.1 * SCALED)
    assert found["figures"]["anchors"][0]["gbps"] == 4400.0 and len(found["figures"]["flights"]) == 7
    text = run().stdout
    for part in ("NVIDIA H200, 132 SMs", "4.4 TB/s", "4.5 TB/s", "latency under load", f"{1.1 * SCALED:.4g} us", "stored:"):
        assert part in text
    assert facts_of_a_new_process().source.startswith("calibrated")
    assert run("--forget").stdout == "deleted\n" and run("--forget").stdout == "nothing was stored for this GPU\n"


# ---- the kernels that measure ----------------------------------------------------------------------------------------------


@pytest.fixture
def kernels() -> Any:
    from onepass.measure import probe_kernels

    return probe_kernels


def compiled(function: Any, pointers: dict[str, str], warps: int, **constants: int) -> str:
    """The PTX of a kernel for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    source = ASTSource(
        function,
        signature,
        {(names.index(n),): v for n, v in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in pointers},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 1}).asm["ptx"]


@pytest.mark.parametrize("warps", [1, 4, 8, 16, 32])
def test_the_read_probe_keeps_the_stated_number_of_loads_in_flight(kernels: Any, warps: int) -> None:
    from onepass.measure.probes import LOADS

    ptx = compiled(kernels.walk, {"data": "*fp32", "sums": "*fp32"}, warps, HEIGHT=LOADS, WIDTH=128 * warps)
    assert len(re.findall(r"ld\.global\S*\.v4", ptx)) == LOADS == len(re.findall(r"ld\.global", ptx)), "wide, and not unrolled"


def test_the_other_probe_kernels_compile(kernels: Any) -> None:
    assert compiled(kernels.touch, {"sums": "*fp32"}, 4)
    assert compiled(kernels.fill, {"partials": "*fp32"}, 4, WIDTH=1024)
    assert compiled(kernels.join, {"partials": "*fp32", "results": "*fp32"}, 4, HEIGHT=32, WIDTH=64)
    ticks = compiled(kernels.ticks, {"found": "*i64"}, 1)
    assert ticks.count("%clock64") == 2 == ticks.count("%globaltimer")
    chain = ticks.index("fma") if "fma" in ticks else ticks.index("mul")
    assert ticks.index("%clock64") < chain < ticks.rindex("%clock64")


def test_the_shapes_of_the_read_probe_are_valid_in_triton() -> None:
    from onepass.measure import probes

    assert all(warps & (warps - 1) == 0 and warps <= 32 for _, warps in (*probes.IN_FLIGHT_SHAPES, probes.SATURATING_SHAPE))
    assert probes.MAX_TENSOR_BYTES // 4 < 2**31
    assert probes.PARTIAL_COLUMNS % probes.JOIN_COLUMNS == 0 and probes.PARTIAL_COLUMNS % 1024 == 0


INTERPRETED = """
import torch
from onepass.measure import probe_kernels as k

data = torch.arange(5 * 512, dtype=torch.float32)
sums = torch.zeros(8)
k.walk[(3,)](data, sums, 5, 4, HEIGHT=4, WIDTH=128)
assert sums.sum() == 4 * data.sum(), "every tile once a pass"
partials, results = torch.full((7 * 1024,), 9.0), torch.zeros(1024)
k.fill[(7,)](partials, 1024, WIDTH=512)
assert (partials == 1).all()
k.join[(16,)](partials * 2, results, 7, 1024, HEIGHT=32, WIDTH=64)
assert (results == 14).all()
print("right")
"""


def test_the_probe_kernels_access_the_stated_bytes() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = run_python(INTERPRETED, env=environment)
    assert done.stdout == "right\n", done.stderr


# ---- all probes on a simulated card ----------------------------------------------------------------------------------------


class Card:
    """A simulated card: each launch adds its duration to a clock that the events read."""

    def __init__(self) -> None:
        self.now = 0.0  # us
        self.graph: list[float] | None = None  # what is being captured

    def spend(self, us: float) -> None:
        if self.graph is not None:
            self.graph.append(us)
        else:
            self.now += us


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Card:
    from onepass.measure import probes
    from onepass.runtime import stopwatch

    card = Card()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = card.now

        def elapsed_time(self, end: Any) -> float:
            return (end.at - self.at) / 1e3 + 3e-3  # ms; events have a cost of their own

    class Graph:
        def __init__(self) -> None:
            self.kernels: list[float] = []

        def replay(self) -> None:
            card.spend(sum(self.kernels) + 0.5)

    @contextmanager
    def capturing(graph: Graph) -> Iterator[None]:
        card.graph = graph.kernels
        yield
        card.graph = None

    def kernel(us: Any) -> Any:
        class Launched:
            def __getitem__(self, grid: tuple[int]) -> Any:
                return lambda *args, **kwargs: card.spend(us(grid[0], *args, **kwargs))

        return Launched()

    def walk(grid: int, data: Any, sums: Any, tiles: int, passes: int, **shape: int) -> float:
        moved = 4 * tiles * shape["HEIGHT"] * shape["WIDTH"]
        in_flight = 4 * shape["HEIGHT"] * shape["WIDTH"] * grid / 132
        assert moved <= 4 * data.numel() and shape["WIDTH"] == 128 * shape["num_warps"]
        return moved / sustained_rate(tool.MEAN_IN_FLIGHT_SHARE * in_flight, H200) + (passes - 1) * moved / 5.5e6

    def ticks(grid: int, found: torch.Tensor, turns: int, **_: int) -> float:
        found.copy_(torch.tensor([1_830_000, 1_000_000, 0]))
        return 2000.0

    stream = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda other: None)
    add, zero, copy = torch.add, torch.Tensor.zero_, torch.Tensor.copy_
    monkeypatch.setattr(stopwatch, "FLUSH_BYTES", 1 << 12)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda where: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda where: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (8 * (64 << 20), 0))
    monkeypatch.setattr(
        torch.Tensor, "zero_", lambda t: (card.spend(stopwatch.SMALLEST_KERNEL_US if t.numel() == 1 else 9.0), zero(t))[1]
    )
    monkeypatch.setattr(torch.Tensor, "copy_", lambda t, u: (card.spend(8 * t.numel() / 4.3e6), copy(t, u))[1])
    monkeypatch.setattr(torch, "add", lambda a, b, out: (card.spend(12 * a.numel() / 4.45e6), add(a, b, out=out))[1])
    monkeypatch.setattr(
        probes,
        "kernels",
        SimpleNamespace(
            walk=kernel(walk),
            ticks=kernel(ticks),
            touch=kernel(lambda *_, **__: 1.9),
            fill=kernel(lambda *_, **__: 2.5),
            join=kernel(lambda *_, **__: 2.9),
        ),
    )
    return card


def test_the_probes_recover_the_facts_of_a_simulated_card(pretended: Card) -> None:
    from onepass.measure.probes import measure

    found = measure(torch.device("cpu"), H200)
    assert found.launch_us == pytest.approx(1.9) and found.join_us == pytest.approx(2.9) and found.join_bytes == JOIN_BYTES
    assert (found.l2_rate, found.clock) == pytest.approx((5.5e6, 1830.0))
    facts = derive(found, H200, "2026-01-01")
    assert facts.bandwidth == pytest.approx(4.5e6, rel=0.02) and facts.latency == pytest.approx(1.25 * SCALED, rel=0.05)
    assert {a.kind for a in found.anchors} == {"read", "copy", "add"} and len(found.anchors) == 6
