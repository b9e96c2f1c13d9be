"""How much work this process did, and how much it was spared: for reports, and for tests that forbid work."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Counts:
    """Work since the process started (or since `reset`), compiling processes included."""

    plans: int = 0  # Programs planned and written as kernels
    compilations: int = 0  # kernels that went through Triton, not counting those its cache had
    found: int = 0  # kernels that Triton's cache had
    hits: int = 0  # entries of the store that were used
    misses: int = 0  # entries that were not there, or not fit to be used

    def __sub__(self, before: Counts) -> Counts:
        return Counts(self.plans - before.plans, self.compilations - before.compilations, self.found - before.found,
                      self.hits - before.hits, self.misses - before.misses)


_lock = threading.Lock()
_now = Counts()


def counts() -> Counts:
    """The counts so far."""
    return _now


def reset() -> None:
    """Count from nothing again."""
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
    """Triton was asked for a kernel."""
    count(found=1) if in_cache else count(compilations=1)
