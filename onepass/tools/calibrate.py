"""`onepass calibrate`: the present card's rates and latencies, measured, and kept as the facts that plans are made from.

Measuring is the business of probes.py. Here figures become facts: the best rate, the latency that makes the cost model's own
curve of rate over bytes in flight pass through the measured points, and so on. Figures that cannot be are refused.
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
from ..errors import ImplausibleMeasurement, NoGpu, CalibrationNotSaved
from ..runtime import card as cards
from ..runtime.cache import store
from ..runtime.measured import Calibration, Card, card_of, forget, keep
from .tables import as_text, human_bytes, table

# The share of a turn's loads that the cost model has in flight, on average, of a walk that waits for each turn (plan/cost.py).
# The probe is such a walk; the latency is the one that makes the model predict it.
MEAN_IN_FLIGHT_SHARE = 0.7
# What these probes find on the H200 that the cost model was fitted on (2026-11-15, driver of CUDA 13). Its constants go with the
# H200's facts in device.py, some of which are larger than a bare probe finds, because they stand for a loaded card. So the model
# gets to know another card by how its probes differ from these.
PROBED_H200 = {"l2_bandwidth": 9.31e6, "latency": 0.448, "clock": 1980.0, "launch": 3.36}
FIT_RANGE = (0.08, 0.92)  # shares of the best rate between which a point says something about latency
SUSTAINED_BYTES = 64 << 20  # bytes from which a rate counts as sustained

# What can be, for any card of the kind these kernels are written for: least, most, unit, and a Device's units in one of these.
_LIMITS = {
    "bandwidth": (0.05, 20.0, "TB/s", 1e6),
    "l2_bandwidth": (0.1, 100.0, "TB/s", 1e6),
    "latency": (0.2, 8.0, "us", 1.0),
    "clock": (300.0, 4000.0, "MHz", 1.0),
    "launch": (0.2, 30.0, "us", 1.0),
}
_NAMES = {"bandwidth": "DRAM rate", "l2_bandwidth": "L2 rate", "latency": "latency under load", "clock": "clock under load",
          "launch": "one more kernel"}


@dataclass(frozen=True, slots=True)
class Anchor:
    """A simple kernel's time after a clean flush."""

    kind: str  # "read" | "copy" | "add"
    bytes: int
    us: float

    @property
    def rate(self) -> float:
        """Bytes per microsecond."""
        return self.bytes / self.us


@dataclass(frozen=True, slots=True)
class InFlightRate:
    """The DRAM rate of a walk that has some bytes outstanding on every SM in each of its turns."""

    bytes: int
    rate: float


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """All that the probes measured. Rates are bytes per microsecond, times microseconds."""

    anchors: tuple[Anchor, ...]
    flights: tuple[InFlightRate, ...]
    l2_rate: float
    launch_us: float  # the smallest kernel, once more in a graph
    join_us: float  # a sum of partial rows, once more in a graph
    join_bytes: int
    clock: float  # cycles per microsecond


Probe = Callable[[torch.device, Device], ProbeResults]


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The outcome: what was measured, what it was taken for before, whether it is kept."""

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
        return {"card": asdict(self.card), "device": self.before.name, "facts": asdict(self.facts), "before": before,
                "figures": figures, "kept": self.kept}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble((self.card.name, "bold"), f", {self.card.sms} SMs, driver for CUDA {self.card.driver or 'unknown'}\n")
        anchors = table("simple kernels after a clean flush", ("kernel", "name"), ("moves", "right"), ("took", "right"),
                        ("rate", "right"))
        for a in self.figures.anchors:
            anchors.add_row(a.kind, human_bytes(a.bytes), f"{a.us:.1f} us", f"{a.rate / 1e3:.0f} GB/s")
        yield anchors
        facts = table("\nfacts", ("fact", "name"), ("measured", "right"), (f"before ({self.before.source})", "right"))
        for name in _LIMITS:
            facts.add_row(_NAMES[name], _shown(name, getattr(self.facts, name)), _shown(name, getattr(self.before, name)))
        yield facts
        yield Text("\nkept: plans made from now on use these facts; `onepass calibrate --forget` undoes it" if self.kept
                   else "\nnothing was kept")

    def __str__(self) -> str:
        return as_text(self)


def _shown(name: str, amount: float) -> str:
    _, _, unit, scale = _LIMITS[name]
    return f"{amount / scale:.4g} {unit}"


# ---- the command -----------------------------------------------------------------------------------------------------------


def calibrate(*, dry_run: bool = False, probe: Probe | None = None) -> CalibrationReport:
    """Measure the present card; unless `dry_run`, its facts are kept and used from then on."""
    where, card, before = _present()
    if not dry_run:
        _writable()
    figures = (probe or _on_card)(where, before)
    facts = derive(figures, before, datetime.now(UTC).date().isoformat())
    if dry_run:
        return CalibrationReport(card, before, facts, figures, kept=False)
    if not keep(card, facts):
        raise CalibrationNotSaved(what="The calibration", detail="cannot be written to")
    cards.present.cache_clear()
    return CalibrationReport(card, before, facts, figures, kept=True)


def _on_card(where: torch.device, card: Device) -> ProbeResults:
    from . import probes  # which imports triton

    return probes.measure(where, card)


def forget_card() -> bool:
    """Go back to the facts that came with the package, and forget what tuning learned; whether there was anything."""
    _, card, _ = _present()
    gone = forget(card)
    cards.present.cache_clear()
    return gone


def _present() -> tuple[torch.device, Card, Device]:
    trouble = cards.launch_trouble()
    if trouble is not None:
        raise NoGpu(what="Calibrating", detail=trouble)
    index = torch.cuda.current_device()
    found = cards.present(index)
    assert found is not None
    return torch.device("cuda", index), card_of(torch.cuda.get_device_properties(index)), found


def _writable() -> None:
    """Refuse before a minute is spent, not after."""
    if store() is None:
        raise CalibrationNotSaved(what="A calibration", detail="is turned off or cannot be used")


# ---- figures -> facts ------------------------------------------------------------------------------------------------------


def derive(figures: ProbeResults, card: Device, date: str) -> Calibration:
    """The facts that some figures amount to; figures that cannot be are refused."""
    bandwidth = _checked("bandwidth", best_rate(figures.anchors))
    l2 = _checked("l2_bandwidth", figures.l2_rate)
    if l2 < bandwidth / 2:
        raise ImplausibleMeasurement(what="L2 rate", value=_shown("l2_bandwidth", l2), expected="at least the DRAM rate")
    latency = _checked("latency", fit_latency(figures.flights, bandwidth, card.sms))
    # What the cost model's join_cost takes a join for: a launch, and partial results at L2's rate.
    launch = _checked("launch", max(_checked("launch", figures.launch_us), figures.join_us - figures.join_bytes / l2))
    seen = {"l2_bandwidth": l2, "latency": latency, "clock": _checked("clock", figures.clock), "launch": launch}
    fitted_on = device("h200")
    return Calibration(bandwidth=bandwidth, date=date,
                       **{name: getattr(fitted_on, name) * amount / PROBED_H200[name] for name, amount in seen.items()})


def best_rate(anchors: Sequence[Anchor]) -> float:
    """The best rate a simple kernel sustains; every single one must be one that can be."""
    for anchor in anchors:
        if not (isfinite(anchor.us) and anchor.us > 0):
            raise ImplausibleMeasurement(what=f"The time of a {anchor.kind}", value=f"{anchor.us} us", expected="a positive time")
    rates = [_checked("bandwidth", a.rate) for a in anchors if a.bytes >= SUSTAINED_BYTES]
    return max(rates, default=float("nan"))


def fit_latency(flights: Sequence[InFlightRate], bandwidth: float, sms: int) -> float:
    """The latency with which the cost model's curve, rate = bandwidth * y / (1 + y^4)^(1/4), passes through the points.

    y is bytes in flight over those that keep DRAM busy, bandwidth * latency / sms. Solved for latency at each point that is
    neither in the noise nor at the top; the median of all.
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
        raise ImplausibleMeasurement(what=_NAMES[name], value=f"{amount / scale:.4g} {unit}", expected=f"{least:g} to {most:g} {unit}")
    return amount
