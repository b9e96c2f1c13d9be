"""Fits the floor: the largest one that lies below every stored measurement.

The floor is linear in four unknowns (a start, and a time per byte read, written and held in L2), so the best one is a linear
program: maximize the mean of floor / measured, with no ratio above 1. Few measurements touch the floor. They are found by adding
the one that is violated most until none is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import floor, log10

import numpy as np
from numpy.typing import NDArray

from ..constants import FloorConstants
from ..device import Device
from ..plan.cost import floor_us
from ..plan.footprint import Footprint
from .observations import Observation

Matrix = NDArray[np.float64]
UNKNOWNS = 4
MAX_ROUNDS = 60
DIGITS = 5


@dataclass(frozen=True, slots=True)
class Fastest:
    """The fastest kernel measured that moves given bytes."""

    moved: Footprint
    us: float
    what: str


def fastest(found: Iterable[Observation]) -> tuple[Fastest, ...]:
    """The fastest measurement for each footprint."""
    best: dict[Footprint, Fastest] = {}
    for seen in found:
        moved = seen.footprint
        if moved is not None and moved.bytes and (moved not in best or seen.us < best[moved].us):
            best[moved] = Fastest(moved, seen.us, f"{seen.id} ({seen.group})")
    return tuple(best[moved] for moved in sorted(best))


def is_determined(found: Iterable[Fastest], device: Device) -> bool:
    """Whether the measurements are of enough sizes, with enough bytes read and written, to tell the constants apart."""
    parts = np.array([_parts(f.moved, device) for f in found]).reshape(-1, UNKNOWNS)
    largest = parts.max(axis=0, initial=0)
    return bool((largest > 0).all()) and int(np.linalg.matrix_rank(parts / largest)) == UNKNOWNS


def fit_floor(found: Iterable[Fastest], device: Device) -> Mapping[str, float]:
    """The constants of the floor, rounded so that it becomes lower."""
    found = tuple(found)
    parts = np.array([_parts(f.moved, device) for f in found])
    ratios: Matrix = parts / np.array([[f.us] for f in found])
    start, read, written, held = _largest(ratios)
    return {
        "start": _rounded(start / device.latency, up=False),
        "read_rate": _rounded(1 / (read * device.bandwidth), up=True),
        "write_rate": _rounded(1 / (written * device.bandwidth), up=True),
        "held_write_rate": _rounded(1 / (held * device.l2_bandwidth), up=True),
    }


def beaten(found: Iterable[Fastest], device: Device, constants: FloorConstants) -> tuple[Fastest, ...]:
    """The measurements below a floor."""
    return tuple(f for f in found if f.us < floor_us(f.moved, device, constants))


def _parts(moved: Footprint, device: Device) -> tuple[float, float, float, float]:
    """What the unknowns are multiplied with."""
    held = min(moved.written, device.l2_bytes)
    return 1.0, float(moved.read), float(moved.written - held), float(held)


def _largest(ratios: Matrix) -> Matrix:
    """The solution x >= 0 of ratios @ x <= 1 with the largest mean of ratios @ x."""
    scale = ratios.max(axis=0)
    scaled: Matrix = ratios / scale
    touching = sorted({int(k) for k in scaled.argmax(axis=0)})
    for _ in range(MAX_ROUNDS):
        x = _vertex(scaled[touching], scaled.mean(axis=0))
        reached = scaled @ x
        worst = int(reached.argmax())
        if reached[worst] <= 1 + 1e-9:
            break
        touching.append(worst)
    found: Matrix = x / scale
    return found


def _vertex(ratios: Matrix, weights: Matrix) -> Matrix:
    """The same for few rows, by trying all corners."""
    sides = np.vstack([ratios, -np.eye(UNKNOWNS)])
    limits = np.concatenate([np.ones(len(ratios)), np.zeros(UNKNOWNS)])
    best, most = np.zeros(UNKNOWNS), -1.0
    for corner in combinations(range(len(limits)), UNKNOWNS):
        chosen = list(corner)
        if abs(np.linalg.det(sides[chosen])) < 1e-12:
            continue
        x = np.linalg.solve(sides[chosen], limits[chosen])
        if (sides @ x <= limits + 1e-9).all() and weights @ x > most:
            best, most = x, float(weights @ x)
    return best


def _rounded(value: float, up: bool) -> float:
    """A value with few digits, not nearer to a higher floor."""
    unit = 10.0 ** (floor(log10(value)) + 1 - DIGITS)
    steps = floor(value / unit) + (1 if up else 0)
    return float(f"{steps * unit:.{DIGITS}g}")
