"""Kernel times by CUDA events, each run with a cold and clean L2. The only thing here that touches a card is the Stopwatch.

Before every run 256 MB are written and another 256 MB read: a write alone leaves dirty lines in L2 that the timed kernels would
have to evict. The flush also keeps the card busy while the host queues the run, so that the host's share does not count; what
two events and one launch take in themselves is measured and subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeAlias

import torch

Work: TypeAlias = Callable[[], object]  # queues kernels on the current stream

FLUSH_BYTES = 256 << 20  # bytes
SMALLEST_KERNEL_US = 1.2  # us that the smallest kernel takes from its first instruction to its last; H200
MAX_OVERHEAD_US = 6.0  # us; more would be a hiccup, not what events cost


@dataclass(frozen=True, slots=True)
class Timing:
    """Several runs of the same work."""

    us: float  # the median
    spread: float  # (80th - 20th percentile) / median
    runs: int


def timing(each_us: Sequence[float]) -> Timing:
    """Runs, summed up."""
    return Timing(median(each_us), spread(each_us), len(each_us))


def spread(times: Sequence[float]) -> float:
    """How far the 20th and 80th percentile are apart, relative to the median."""
    middle = median(times)
    if len(times) < 2 or middle <= 0:
        return 0.0
    low, *_, high = quantiles(times, n=5, method="inclusive")
    return (high - low) / middle


class Flush:
    """Leaves nothing of earlier work in L2, and no dirty line: as many bytes are written, and as many others read."""

    def __init__(self, where: torch.device) -> None:
        self._written, self._read = (torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=where) for _ in range(2))
        self._one = torch.zeros((1,), dtype=torch.float32, device=where)

    def __call__(self) -> None:
        """Queue both."""
        self._written.zero_()
        torch.sum(self._read, 0, keepdim=True, out=self._one)


class Stopwatch:
    """Times work on one CUDA device, on its current stream. Not for use while a graph is being captured."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self._flush = Flush(where)
        one = torch.zeros((1,), dtype=torch.float32, device=where)
        self._overhead = 0.0
        torch.cuda.synchronize(where)  # what others queued before is not to run beside what is timed
        (smallest,) = self([one.zero_], 20)
        self._overhead = min(max(smallest.us - SMALLEST_KERNEL_US, 0.0), MAX_OVERHEAD_US)

    def __call__(self, works: Sequence[Work], runs: int) -> tuple[Timing, ...]:
        """Time each work, all in turn, `runs` times: what drifts meanwhile drifts for all of them."""
        pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in works]
        with torch.no_grad(), torch.cuda.device(self.where):
            for work in works:  # load, allocate, compile
                work()
            for _ in range(runs):
                for work, mine in zip(works, pairs, strict=True):
                    self._flush()
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    work()
                    end.record()
                    mine.append((begin, end))
            torch.cuda.current_stream().synchronize()
        return tuple(timing([self._us(begin, end) for begin, end in mine]) for mine in pairs)

    def _us(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return max(1e3 * begin.elapsed_time(end) - self._overhead, 0.0)
