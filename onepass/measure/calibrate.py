"""`onepass calibrate`: measures the rates and latencies of this machine's GPU and stores them for the cost model.

probes.py measures. This module derives the Device facts from the measurements: the best DRAM rate, the latency with which the cost
model's rate curve passes through the measured points, and so on. It rejects implausible measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isfinite
from statistics import median
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..device import Device, device
from ..errors import CalibrationNotSaved, ImplausibleMeasurement, NoGpu
from ..runtime import card as cards
from ..runtime.cache import store
from ..runtime.measured import Calibration, Card, card_of, delete_measurements, save_calibration
from ..tools.tables import as_text, human_bytes, table

# Mean share of an iteration's loads that are in flight in a loop that waits for each iteration (plan/cost). The probe kernel is
# such a loop; the derived latency is the one with which the cost model predicts its time.
MEAN_IN_FLIGHT_SHARE = 0.7
# Probe results on the H200 that the cost model was fitted on (2026-11-15, CUDA 13 driver). The model's constants assume the H200
# facts in device.py, some of which are larger than the probe results because they stand for a loaded GPU. So the facts of another
# GPU are the H200's, scaled by the ratio of its probe results to these.
PROBED_H200 = {"l2_bandwidth": 9.31e6, "latency": 0.448, "clock": 1980.0, "launch": 3.36}
FIT_RANGE = (0.08, 0.92)  # shares of the best rate between which a point determines the latency
SUSTAINED_BYTES = 64 << 20  # bytes from which a rate counts as sustained

# Plausible range of each fact: minimum, maximum, unit, and the factor from that unit to the Device's unit.
_LIMITS = {
    "bandwidth": (0.05, 20.0, "TB/s", 1e6),
    "l2_bandwidth": (0.1, 100.0, "TB/s", 1e6),
    "latency": (0.2, 8.0, "us", 1.0),
    "clock": (300.0, 4000.0, "MHz", 1.0),
    "launch": (0.2, 30.0, "us", 1.0),
}
_NAMES = {
    "bandwidth": "DRAM rate",
    "l2_bandwidth": "L2 rate",
    "latency": "latency under load",
    "clock": "clock under load",
    "launch": "one more kernel",
}


@dataclass(frozen=True, slots=True)
class Anchor:
    """The time of a simple kernel with a cold L2 that holds no dirty lines."""

    kind: str  # "read" | "copy" | "add"
    bytes: int
    us: float

    @property
    def rate(self) -> float:
        """Bytes per microsecond."""
        return self.bytes / self.us


@dataclass(frozen=True, slots=True)
class InFlightRate:
    """The DRAM rate of a loop with a fixed number of bytes in flight on every SM."""

    bytes: int
    rate: float


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """Everything the probes measured. Rates are in bytes per microsecond, times in microseconds."""

    anchors: tuple[Anchor, ...]
    flights: tuple[InFlightRate, ...]
    l2_rate: float
    launch_us: float  # of one more minimal kernel in a CUDA graph
    join_us: float  # of one more sum of partial rows in a CUDA graph
    join_bytes: int
    clock: float  # cycles per microsecond


Probe = Callable[[torch.device, Device], ProbeResults]


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The new facts, the previous Device record, the measurements, and whether the facts were stored."""

    card: Card
    before: Device
    facts: Calibration
    figures: ProbeResults
    kept: bool

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON-ready values."""
        figures = asdict(self.figures)
        for anchor, shown in zip(self.figures.anchors, figures["anchors"], strict=True):
            shown["gbps"] = round(anchor.rate / 1e3, 1)
        before = {name: getattr(self.before, name) for name in _LIMITS} | {"source": self.before.source}
        return {
            "card": asdict(self.card),
            "device": self.before.name,
            "facts": asdict(self.facts),
            "before": before,
            "figures": figures,
            "kept": self.kept,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble((self.card.name, "bold"), f", {self.card.sms} SMs, driver for CUDA {self.card.driver or 'unknown'}\n")
        anchors = table(
            "simple kernels with a cold cache", ("kernel", "name"), ("bytes", "right"), ("time", "right"), ("rate", "right")
        )
        for a in self.figures.anchors:
            anchors.add_row(a.kind, human_bytes(a.bytes), f"{a.us:.1f} us", f"{a.rate / 1e3:.0f} GB/s")
        yield anchors
        facts = table("\nfacts", ("fact", "name"), ("measured", "right"), (f"before ({self.before.source})", "right"))
        for name in _LIMITS:
            facts.add_row(_NAMES[name], _shown(name, getattr(self.facts, name)), _shown(name, getattr(self.before, name)))
        yield facts
        yield Text(
            "\nstored: new plans use these facts; `onepass calibrate --forget` removes them" if self.kept else "\nnot stored"
        )

    def __str__(self) -> str:
        return as_text(self)


def _shown(name: str, amount: float) -> str:
    _, _, unit, scale = _LIMITS[name]
    return f"{amount / scale:.4g} {unit}"


# ---- the command -----------------------------------------------------------------------------------------------------------


def calibrate(*, dry_run: bool = False, probe: Probe | None = None) -> CalibrationReport:
    """Measure this machine's GPU. Unless `dry_run`, store the facts, which all later plans use."""
    where, card, before = _present()
    if not dry_run:
        _writable()
    figures = (probe or _on_card)(where, before)
    facts = derive(figures, before, datetime.now(UTC).date().isoformat())
    if dry_run:
        return CalibrationReport(card, before, facts, figures, kept=False)
    if not save_calibration(card, facts):
        raise CalibrationNotSaved(what="The calibration", detail="cannot be written to")
    cards.local_device.cache_clear()
    return CalibrationReport(card, before, facts, figures, kept=True)


def _on_card(where: torch.device, card: Device) -> ProbeResults:
    from . import probes  # imported late because it imports triton

    return probes.measure(where, card)


def forget_card() -> bool:
    """Delete the stored facts and tuning results of this GPU. Returns whether there were any."""
    _, card, _ = _present()
    gone = delete_measurements(card)
    cards.local_device.cache_clear()
    return gone


def _present() -> tuple[torch.device, Card, Device]:
    trouble = cards.launch_unavailable_reason()
    if trouble is not None:
        raise NoGpu(what="Calibrating", detail=trouble)
    index = torch.cuda.current_device()
    found = cards.local_device(index)
    assert found is not None
    return torch.device("cuda", index), card_of(torch.cuda.get_device_properties(index)), found


def _writable() -> None:
    """Raise before the measurement, not after it, if nothing could be stored."""
    if store() is None:
        raise CalibrationNotSaved(what="A calibration", detail="is turned off or cannot be used")


# ---- measurements -> facts ------------------------------------------------------------------------------------------------------


def derive(figures: ProbeResults, card: Device, date: str) -> Calibration:
    """The facts that follow from the measurements. Implausible measurements raise AbsurdMeasurement."""
    bandwidth = _checked("bandwidth", best_rate(figures.anchors))
    l2 = _checked("l2_bandwidth", figures.l2_rate)
    if l2 < bandwidth / 2:
        raise ImplausibleMeasurement(what="L2 rate", value=_shown("l2_bandwidth", l2), expected="at least the DRAM rate")
    latency = _checked("latency", fit_latency(figures.flights, bandwidth, card.sms))
    # The cost model's join_cost assumes one launch plus reading the partial results at the L2 rate.
    launch = _checked("launch", max(_checked("launch", figures.launch_us), figures.join_us - figures.join_bytes / l2))
    seen = {"l2_bandwidth": l2, "latency": latency, "clock": _checked("clock", figures.clock), "launch": launch}
    fitted_on = device("h200")
    return Calibration(
        bandwidth=bandwidth,
        date=date,
        **{name: getattr(fitted_on, name) * amount / PROBED_H200[name] for name, amount in seen.items()},
    )


def best_rate(anchors: Sequence[Anchor]) -> float:
    """The best rate of a simple kernel. Every measured time must be positive."""
    for anchor in anchors:
        if not (isfinite(anchor.us) and anchor.us > 0):
            raise ImplausibleMeasurement(what=f"The time of a {anchor.kind}", value=f"{anchor.us} us", expected="a positive time")
    rates = [_checked("bandwidth", a.rate) for a in anchors if a.bytes >= SUSTAINED_BYTES]
    return max(rates, default=float("nan"))


def fit_latency(flights: Sequence[InFlightRate], bandwidth: float, sms: int) -> float:
    """The latency with which the cost model's curve, rate = bandwidth * y / (1 + y^4)^(1/4), passes through the points.

    y is bytes in flight divided by those that saturate DRAM, bandwidth * latency / sms. The equation is solved for latency at each
    point within FIT_RANGE; the result is the median.
    """
    found = []
    for flight in flights:
        share = flight.rate / bandwidth
        if isfinite(share) and FIT_RANGE[0] <= share <= FIT_RANGE[1]:
            y = (share**4 / (1 - share**4)) ** 0.25
            found.append(MEAN_IN_FLIGHT_SHARE * flight.bytes * sms / (bandwidth * y))
    return median(found) if found else float("nan")


def _checked(name: str, amount: float) -> float:
    least, most, unit, scale = _LIMITS[name]
    if not (isfinite(amount) and least <= amount / scale <= most):
        raise ImplausibleMeasurement(
            what=_NAMES[name], value=f"{amount / scale:.4g} {unit}", expected=f"{least:g} to {most:g} {unit}"
        )
    return amount
