"""What happened in this process: graphs seen, regions claimed and left, calls, fallbacks.

Everything that works appends here and nothing that works reads it, so that reports need no run of their own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..capture.recompute import Recomputed
from ..runtime.compiled import Artifact


@dataclass(frozen=True)
class GraphRecord:
    """One graph that went through the pass. `regions` and `left` are what claiming returned."""

    phase: str  # "forward" | "backward" | "inference"
    device: str
    regions: tuple[Any, ...]
    declined: tuple[Any, ...]
    seconds: float
    error: str | None = None  # why nothing was claimed


@dataclass(frozen=True)
class Fallback:
    """A region that is computed by Inductor or by torch after all."""

    region: str
    code: str
    stage: str  # what could not be done: "planned and compiled" | "launched"
    error: str
    repro: str
    runs_as: str = "inductor"


@dataclass(frozen=True)
class RegionRecord:
    """A region that was called: how often, with which sizes, and what the kernels of the latest are."""

    region: str
    calls: int
    artifact: Artifact | None  # None where a fallback or torch computes
    sizes: tuple[tuple[int, ...], ...]  # sizes met so far
    copied: int = 0  # outputs that kernels could not write over an input, for all sizes together


@dataclass(frozen=True)
class Snapshot:
    """All of it, as it stood when asked."""

    graphs: tuple[GraphRecord, ...]
    regions: tuple[RegionRecord, ...]
    fallbacks: tuple[Fallback, ...]
    recomputed: tuple[Recomputed, ...] = ()  # what backward graphs compute again instead of having it saved

    @property
    def fallbacks_by_code(self) -> Mapping[str, int]:
        return MappingProxyType(Counter(f.code for f in self.fallbacks))

    @property
    def calls(self) -> Mapping[str, int]:
        return MappingProxyType({r.region: r.calls for r in self.regions})


@dataclass
class Tally:
    """The running counts of one region. Its owner counts calls; a lost count under two threads would be a wrong report."""

    region: str
    artifact: Artifact | None = None
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    copied: int = 0
    calls: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self) -> None:
        with self.lock:
            self.calls += 1


MAX_SIZES = 64  # remembered a region


class _Journal:
    """The process's only one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.graphs: list[GraphRecord] = []
        self.fallbacks: list[Fallback] = []
        self.recomputed: list[Recomputed] = []
        self.tallies: list[Tally] = []

    def clear(self) -> None:
        self.graphs, self.fallbacks, self.recomputed = [], [], []
        for tally in self.tallies:  # their regions live on, and go on counting
            with tally.lock:
                tally.calls = 0


_JOURNAL = _Journal()


def graph(seen: GraphRecord) -> None:
    """Note a graph."""
    with _JOURNAL.lock:
        _JOURNAL.graphs.append(seen)


def fallback(happened: Fallback) -> None:
    """Note a fallback."""
    with _JOURNAL.lock:
        _JOURNAL.fallbacks.append(happened)


def recomputed(values: tuple[Recomputed, ...]) -> None:
    """Note what a training graph no longer saves."""
    with _JOURNAL.lock:
        _JOURNAL.recomputed += values


def tally(region: str) -> Tally:
    """A counter for a region that is about to be called."""
    made = Tally(region)
    with _JOURNAL.lock:
        _JOURNAL.tallies.append(made)
    return made


def drop(counter: Tally) -> None:
    """The region is gone; what was counted of it goes with it."""
    with _JOURNAL.lock:
        _JOURNAL.tallies = [each for each in _JOURNAL.tallies if each is not counter]


def bound(counter: Tally, sizes: tuple[int, ...], made: Artifact | None, copied: int = 0) -> None:
    """Note that a region met new sizes, what computes them, and how many outputs have to be copied to their places."""
    with counter.lock:
        counter.artifact = made
        counter.copied += copied
        if len(counter.sizes) < MAX_SIZES and sizes not in counter.sizes:
            counter.sizes.append(sizes)


def snapshot() -> Snapshot:
    """Everything so far."""
    with _JOURNAL.lock:
        counted: dict[str, RegionRecord] = {}
        for each in _JOURNAL.tallies:
            with each.lock:
                before = counted.get(each.region)
                calls = each.calls + (before.calls if before else 0)
                sizes = tuple(dict.fromkeys((*(before.sizes if before else ()), *each.sizes)))
                made = each.artifact or (before.artifact if before else None)
                copied = each.copied + (before.copied if before else 0)
                counted[each.region] = RegionRecord(each.region, calls, made, sizes, copied)
        called = tuple(r for r in counted.values() if r.calls)
        return Snapshot(tuple(_JOURNAL.graphs), called, tuple(_JOURNAL.fallbacks), tuple(_JOURNAL.recomputed))


def reset() -> None:
    """Forget all of it; regions count from zero."""
    with _JOURNAL.lock:
        _JOURNAL.clear()
