"""What was measured on a card and is kept in the store: its rates and latencies, and how long its kernels really take.

Rates replace those of the listed Device from then on. Times of kernels, each divided by its prediction, become corrections of
the cost model: one factor for every family of kernels on which enough Programs agree. Both reach planning only as fields of a
Device, so that plans stay functions of their arguments and every key names what it follows from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, isfinite, log
from statistics import fmean, quantiles
from typing import Any

from .. import compat
from ..device import Device
from ..plan.resources import ctas_per_sm
from . import cache as disk
from .binary import Binary
from .compiled import Artifact, KernelSummary

PROBES_VERSION = 1  # which probes measured a Calibration; others would not mean the same
MIN_PROGRAMS = 8  # Programs that must agree on a family before it is corrected
MAX_LOG_IQR = 0.2  # between the quartiles of the logarithms of their ratios
MIN_CORRECTION, MAX_CORRECTION = 0.7, 1.4  # a correction beyond these would say that the model does not describe the family at all
CORRECTION_STEP = 0.05  # corrections are rounded, so that plans and keys do not change with every measurement
MAX_OBSERVATIONS = 512  # observations that are kept, the latest
MIN_KERNEL_US = 10.0  # us: of shorter kernels most is launching
MIN_OCCUPANCY_MATCH = 0.74  # CTAs on an SM, real over predicted, for a prediction to be about the kernel that ran
MAIN_KERNEL_SHARE = 0.7  # of a plan's time that one kernel must take for the plan's time to be about that kernel


@dataclass(frozen=True, slots=True)
class Card:
    """Whose measurements they are."""

    name: str
    sms: int
    driver: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """Facts of a card that `onepass calibrate` measured; in the units of a Device."""

    bandwidth: float
    l2_bandwidth: float
    latency: float
    clock: float
    launch: float
    date: str


@dataclass(frozen=True, slots=True)
class Observation:
    """How the fastest kernel of a family did on one Program."""

    program: str  # a digest
    family: str
    ratio: float  # measured / predicted by the uncorrected model


@dataclass(frozen=True, slots=True)
class _Observations:
    seen: tuple[Observation, ...]


def card_of(properties: Any) -> Card:
    """The card that some properties, as torch gives them, belong to."""
    return Card(properties.name, properties.multi_processor_count, compat.cuda_driver_level() or "")


def with_measurements(listed: Device, card: Card) -> Device:
    """A Device with all that was measured on the card; itself where nothing was."""
    store = disk.store()
    if store is None:
        return listed
    found: Calibration | None = store.load_measurement(_facts_key(card), Calibration)
    if found is not None:
        facts = {name: value for name, value in asdict(found).items() if name != "date"}
        listed = replace(listed, **facts, source=f"calibrated {found.date}")
    factors = corrections(observations(card))
    return replace(listed, corrections=factors) if factors else listed


def save_calibration(card: Card, calibration: Calibration) -> bool:
    """Remember a calibration; whether the store could."""
    store = disk.store()
    return store is not None and store.save_measurement(_facts_key(card), calibration)


def delete_measurements(card: Card) -> bool:
    """Forget all that was measured on a card; whether there was anything."""
    store = disk.store()
    return store is not None and any([store.delete_measurement(_facts_key(card)), store.delete_measurement(_observations_key(card))])


# ---- times of kernels ------------------------------------------------------------------------------------------------------


def observations(card: Card) -> tuple[Observation, ...]:
    """What was seen of kernels on a card by the present cost model."""
    store = disk.store()
    found: _Observations | None = store.load_measurement(_observations_key(card), _Observations) if store else None
    return found.seen if found else ()


def observe(card: Card, new: Iterable[Observation]) -> None:
    """Add observations; of one Program and family the latest counts. What another process adds meanwhile may be lost."""
    store = disk.store()
    new = tuple(new)
    if store is None or not new:
        return
    known = {(o.program, o.family): o for o in observations(card)}
    for each in new:
        known.pop((each.program, each.family), None)  # the latest last
        known[each.program, each.family] = each
    store.save_measurement(_observations_key(card), _Observations(tuple(known.values())[-MAX_OBSERVATIONS:]))


def observations_from(program: str, timed: Sequence[tuple[Artifact, float]], device: Device) -> tuple[Observation, ...]:
    """What timed plans of one Program (`program` is a digest) say about families: of each the fastest plan."""
    fastest: dict[str, float] = {}
    for made, us in sorted(timed, key=lambda pair: pair[1]):
        main, ratio = _main(made), _ratio(made, us, device)
        if ratio is not None:
            fastest.setdefault(main.family, ratio)
    return tuple(Observation(program, family, ratio) for family, ratio in fastest.items())


def _main(made: Artifact) -> KernelSummary:
    return max(made.summary.kernels, key=lambda k: k.predicted_us)


def _ratio(made: Artifact, us: float, device: Device) -> float | None:
    """Measured over modelled time of a plan's main kernel; None where the prediction is about something else.

    It is if the kernel is but a part of the plan, too short, or was predicted with quite another number of CTAs on an SM than
    its real registers allow: that error is the register estimate's.
    """
    main = _main(made)
    beside = made.summary.predicted_us - main.predicted_us
    binary = made.binaries[made.summary.kernels.index(main)]
    if main.predicted_us < max(MIN_KERNEL_US, MAIN_KERNEL_SHARE * made.summary.predicted_us) or not _as_predicted(main, binary, device):
        return None
    ratio = (us - beside) / (main.predicted_us / device.correction(main.family))
    return ratio if isfinite(ratio) and ratio > 0 else None


def _as_predicted(kernel: KernelSummary, binary: Binary, device: Device) -> bool:
    fit = ctas_per_sm(binary.registers, binary.smem_bytes, kernel.schedule.warps, device)
    if binary.spill_bytes or not fit:
        return False
    if kernel.family.startswith("mix-order"):  # as many as the grid has, if they fit
        return fit * device.sms >= kernel.schedule.splits * kernel.schedule.ctas_per_row
    return MIN_OCCUPANCY_MATCH <= fit / max(kernel.ctas_per_sm, 1) <= 1 / MIN_OCCUPANCY_MATCH


def corrections(seen: Iterable[Observation]) -> tuple[tuple[str, float], ...]:
    """A factor for every family that enough Programs agree on: the geometric mean of their ratios, within bounds."""
    logs: dict[str, list[float]] = {}
    for each in seen:
        if isfinite(each.ratio) and each.ratio > 0:
            logs.setdefault(each.family, []).append(log(each.ratio))
    found = []
    for family, each_log in sorted(logs.items()):
        if len(each_log) < MIN_PROGRAMS:
            continue
        low, _, high = quantiles(each_log, n=4)
        if high - low > MAX_LOG_IQR:
            continue
        factor = round(round(min(max(exp(fmean(each_log)), MIN_CORRECTION), MAX_CORRECTION) / CORRECTION_STEP) * CORRECTION_STEP, 2)
        if factor != 1.0:
            found.append((family, factor))
    return tuple(found)


# ---- keys ------------------------------------------------------------------------------------------------------------------


def _facts_key(card: Card) -> str:
    """A card's rates do not depend on the release of anything above its driver."""
    return hashlib.sha256(json.dumps({"calibration": PROBES_VERSION, **asdict(card)}, sort_keys=True).encode()).hexdigest()


def _observations_key(card: Card) -> str:
    """Ratios belong to the cost model they were taken with, so to this very version of the package."""
    return disk.key({"observations": asdict(card)})
