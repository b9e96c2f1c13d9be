"""Measurements of a GPU, kept in the store: its bandwidths and latencies, and the run times of its kernels.

Measured rates replace those of the listed Device. Run times, divided by their predictions, become corrections of the cost model:
one factor per kernel family on which enough Programs agree. Both reach planning only as fields of a Device, so plans remain
functions of their arguments, and cache keys cover the measurements.
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
from ..plan.legality import Family
from ..plan.resources import ctas_per_sm
from . import cache as disk
from .binary import Binary
from .compiled import Artifact, KernelSummary

PROBES_VERSION = 1  # version of the probes that measure a Calibration; results of other versions are not comparable
MIN_PROGRAMS = 8  # Programs needed to correct a family
MAX_LOG_IQR = 0.2  # largest interquartile range of the log ratios of those Programs
MIN_CORRECTION, MAX_CORRECTION = 0.7, 1.4  # a ratio outside this range means that the model does not fit the family at all
CORRECTION_STEP = 0.05  # corrections are rounded, so that plans and cache keys do not change with every measurement
MAX_OBSERVATIONS = 512  # the latest observations are kept
MIN_KERNEL_US = 10.0  # shorter kernels are mostly launch overhead
MIN_OCCUPANCY_MATCH = 0.74  # real CTAs per SM over predicted ones, for the prediction to apply to the kernel that ran
MAIN_KERNEL_SHARE = 0.7  # smallest share of a plan's time that its main kernel must take for the plan's time to measure it


@dataclass(frozen=True, slots=True)
class Card:
    """Identifies the GPU that measurements belong to."""

    name: str
    sms: int
    driver: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates and latencies of a GPU that `onepass calibrate` measured, in the units of a Device."""

    bandwidth: float
    l2_bandwidth: float
    latency: float
    clock: float
    launch: float
    date: str


@dataclass(frozen=True, slots=True)
class Observation:
    """The run time of the fastest kernel of a family on one Program, relative to its prediction."""

    program: str  # a digest
    family: str
    ratio: float  # measured time / time predicted by the uncorrected model


@dataclass(frozen=True, slots=True)
class _Observations:
    seen: tuple[Observation, ...]


def card_of(properties: Any) -> Card:
    """The Card with these torch device properties."""
    return Card(properties.name, properties.multi_processor_count, compat.cuda_driver_level() or "")


def with_measurements(listed: Device, card: Card) -> Device:
    """A Device with the measurements of a GPU; unchanged if there are none."""
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
    """Save a calibration. False if the store cannot be written."""
    store = disk.store()
    return store is not None and store.save_measurement(_facts_key(card), calibration)


def delete_measurements(card: Card) -> bool:
    """Delete all measurements of a GPU. False if there were none."""
    store = disk.store()
    if store is None:
        return False
    deleted = [store.delete_measurement(key) for key in (_facts_key(card), _observations_key(card))]
    return any(deleted)


# ---- times of kernels ------------------------------------------------------------------------------------------------------


def observations(card: Card) -> tuple[Observation, ...]:
    """The observations of kernels on a GPU, as compared with the current cost model."""
    store = disk.store()
    found: _Observations | None = store.load_measurement(_observations_key(card), _Observations) if store else None
    return found.seen if found else ()


def observe(card: Card, new: Iterable[Observation]) -> None:
    """Add observations. The latest one per Program and family counts. A concurrent update by another process may be lost."""
    store = disk.store()
    new = tuple(new)
    if store is None or not new:
        return
    known = {(o.program, o.family): o for o in observations(card)}
    for each in new:
        known.pop((each.program, each.family), None)  # reinsert, so that the latest is last
        known[each.program, each.family] = each
    store.save_measurement(_observations_key(card), _Observations(tuple(known.values())[-MAX_OBSERVATIONS:]))


def observations_from(program: str, timed: Sequence[tuple[Artifact, float]], device: Device) -> tuple[Observation, ...]:
    """Observations from the timed plans of one Program (`program` is a digest): one per family, from its fastest plan."""
    fastest: dict[str, float] = {}
    for artifact, us in sorted(timed, key=lambda pair: pair[1]):
        main, ratio = _main(artifact), _ratio(artifact, us, device)
        if ratio is not None:
            fastest.setdefault(main.family, ratio)
    return tuple(Observation(program, family, ratio) for family, ratio in fastest.items())


def _main(artifact: Artifact) -> KernelSummary:
    return max(artifact.summary.kernels, key=lambda k: k.predicted_us)


def _ratio(artifact: Artifact, us: float, device: Device) -> float | None:
    """Measured over predicted time of a plan's main kernel; None if the two are not comparable.

    They are not if the kernel takes too small a share of the plan, is too short, or runs with an occupancy far from the predicted
    one: that error comes from the register estimate, not from the cost model.
    """
    main = _main(artifact)
    others_us = artifact.summary.predicted_us - main.predicted_us
    binary = artifact.binaries[artifact.summary.kernels.index(main)]
    shortest_us = max(MIN_KERNEL_US, MAIN_KERNEL_SHARE * artifact.summary.predicted_us)
    if main.predicted_us < shortest_us or not _as_predicted(main, binary, device):
        return None
    ratio = (us - others_us) / (main.predicted_us / device.correction(main.family))
    return ratio if isfinite(ratio) and ratio > 0 else None


def _as_predicted(kernel: KernelSummary, binary: Binary, device: Device) -> bool:
    """Whether the compiled kernel has about the predicted occupancy and no spills."""
    fit = ctas_per_sm(binary.registers, binary.smem_bytes, kernel.schedule.warps, device)
    if binary.spill_bytes or not fit:
        return False
    if kernel.schedule.sides is Family.MIX:  # persistent grid: only needs all CTAs resident
        return fit * device.sms >= kernel.schedule.splits * kernel.schedule.ctas_per_row
    return MIN_OCCUPANCY_MATCH <= fit / max(kernel.ctas_per_sm, 1) <= 1 / MIN_OCCUPANCY_MATCH


def corrections(seen: Iterable[Observation]) -> tuple[tuple[str, float], ...]:
    """A correction factor for every family that enough Programs agree on: the geometric mean of their ratios, clamped."""
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
    """Key of a calibration. It has no package versions: rates depend only on the GPU and its driver."""
    return hashlib.sha256(json.dumps({"calibration": PROBES_VERSION, **asdict(card)}, sort_keys=True).encode()).hexdigest()


def _observations_key(card: Card) -> str:
    """Key of observations. It includes all versions: ratios are relative to the cost model of this exact package."""
    return disk.key({"observations": asdict(card)})
