"""Counters of plans, compilations and cache hits in this process, for reports and for tests that forbid recompilation."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Counts:
    """Work since the process started (or since `reset`), including work in compile workers."""

    plans: int = 0  # Programs that were planned and generated
    compilations: int = 0  # kernels that Triton compiled (misses in its cache)
    found: int = 0  # kernels that Triton's cache had
    hits: int = 0  # store entries that were used
    misses: int = 0  # store entries that were missing or invalid

    def __sub__(self, before: Counts) -> Counts:
        return Counts(self.plans - before.plans, self.compilations - before.compilations, self.found - before.found,
                      self.hits - before.hits, self.misses - before.misses)


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


def count(*, plans: int = 0, compilations: int = 0, found: int = 0, hits: int = 0, misses: int = 0) -> None:
    """Add to the counts."""
    global _now
    with _lock:
        _now = replace(_now, plans=_now.plans + plans, compilations=_now.compilations + compilations, found=_now.found + found,
                       hits=_now.hits + hits, misses=_now.misses + misses)


def count_triton_lookup(in_cache: bool) -> None:
    """Count one kernel requested from Triton: a cache hit or a compilation."""
    count(found=1) if in_cache else count(compilations=1)
