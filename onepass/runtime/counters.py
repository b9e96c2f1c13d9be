"""Counters of plans, compilations and cache hits in this process, for reports and for tests that forbid recompilation."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Counts:
    """Work since the process started (or since `reset`), including work in compile workers."""

    optimized: int = 0  # Programs that were simplified
    plans: int = 0  # plans made, one for each Program and Variant
    replans: int = 0  # plans made again because compiled kernels spilled or reached too low an occupancy
    compilations: int = 0  # kernels that Triton compiled (misses in its cache)
    found: int = 0  # kernels that Triton's cache had
    hits: int = 0  # store entries that were used
    misses: int = 0  # store entries that were missing or invalid

    def __sub__(self, before: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


_lock = threading.Lock()
_now = Counts()


def counts() -> Counts:
    """The current counts."""
    return _now


def reset() -> None:
    """Set all counts to zero."""
    global _now
    with _lock:
        _now = Counts()


def count(**more: int) -> None:
    """Add to the counts, by field."""
    global _now
    with _lock:
        _now = replace(_now, **{name: getattr(_now, name) + number for name, number in more.items()})


def count_triton_lookup(in_cache: bool) -> None:
    """Count one kernel requested from Triton: a cache hit or a compilation."""
    count(found=1) if in_cache else count(compilations=1)
