"""The journal of this process: graphs compiled, regions claimed and declined, calls, fallbacks.

The backend only appends to it, and only reports read it. So a report needs no run of its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..capture.graph.recompute import Recomputed
from ..runtime.compiled import Artifact


@dataclass(frozen=True)
class GraphRecord:
    """One graph that went through the pass, with its claimed regions and declined reductions."""

    phase: str  # "forward" | "backward" | "inference"
    device: str
    regions: tuple[Any, ...]
    declined: tuple[Any, ...]
    seconds: float
    error: str | None = None  # the error, if the pass failed on this graph


@dataclass(frozen=True)
class Fallback:
    """A claimed region that fell back to Inductor or torch."""

    region: str
    code: str
    stage: str  # what failed: "planned and compiled" | "launched"
    error: str
    repro: str
    runs_as: str = "inductor"


@dataclass(frozen=True)
class RegionRecord:
    """Calls of one region: their number, their sizes, and the latest kernels."""

    region: str
    calls: int
    artifact: Artifact | None  # None if a fallback computes the region
    sizes: tuple[tuple[int, ...], ...]  # distinct sizes so far
    copied: int = 0  # outputs computed in scratch memory because they alias an input, over all sizes


@dataclass(frozen=True)
class Snapshot:
    """The journal at one point in time."""

    graphs: tuple[GraphRecord, ...]
    regions: tuple[RegionRecord, ...]
    fallbacks: tuple[Fallback, ...]
    recomputed: tuple[Recomputed, ...] = ()  # values that backward graphs recompute instead of saving

    @property
    def fallbacks_by_code(self) -> Mapping[str, int]:
        return MappingProxyType(Counter(f.code for f in self.fallbacks))

    @property
    def calls(self) -> Mapping[str, int]:
        return MappingProxyType({r.region: r.calls for r in self.regions})


@dataclass
class Tally:
    """The running counts of one region. Locked, so that no call is lost when threads count at the same time."""

    region: str
    artifact: Artifact | None = None
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    copied: int = 0
    calls: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self) -> None:
        with self.lock:
            self.calls += 1


MAX_SIZES = 64  # distinct sizes recorded per region


class _Journal:
    """The journal's state; one instance per process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.graphs: list[GraphRecord] = []
        self.fallbacks: list[Fallback] = []
        self.recomputed: list[Recomputed] = []
        self.tallies: list[Tally] = []

    def clear(self) -> None:
        self.graphs, self.fallbacks, self.recomputed = [], [], []
        for tally in self.tallies:  # the regions still exist and keep counting
            with tally.lock:
                tally.calls = 0


_JOURNAL = _Journal()


def graph(seen: GraphRecord) -> None:
    """Record a graph."""
    with _JOURNAL.lock:
        _JOURNAL.graphs.append(seen)


def fallback(happened: Fallback) -> None:
    """Record a fallback."""
    with _JOURNAL.lock:
        _JOURNAL.fallbacks.append(happened)


def recomputed(values: tuple[Recomputed, ...]) -> None:
    """Record values that a training graph recomputes instead of saving."""
    with _JOURNAL.lock:
        _JOURNAL.recomputed += values


def tally(region: str) -> Tally:
    """A new call counter for a region."""
    made = Tally(region)
    with _JOURNAL.lock:
        _JOURNAL.tallies.append(made)
    return made


def drop(counter: Tally) -> None:
    """Remove the counts of a region that no longer exists."""
    with _JOURNAL.lock:
        _JOURNAL.tallies = [each for each in _JOURNAL.tallies if each is not counter]


def bound(counter: Tally, sizes: tuple[int, ...], made: Artifact | None, copied: int = 0) -> None:
    """Record kernels for new sizes of a region, and how many outputs are computed in scratch memory."""
    with counter.lock:
        counter.artifact = made
        counter.copied += copied
        if len(counter.sizes) < MAX_SIZES and sizes not in counter.sizes:
            counter.sizes.append(sizes)


def snapshot() -> Snapshot:
    """A copy of everything recorded so far."""
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
    """Clear the journal. Regions count their calls from zero."""
    with _JOURNAL.lock:
        _JOURNAL.clear()
