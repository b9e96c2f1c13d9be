"""Kernel times by CUDA events, with a cold and clean L2 before each run. Only Flush and Stopwatch use the GPU.

Before every run, 256 MiB are written and another 256 MiB are read: a write alone leaves dirty lines in L2 that the timed kernels
would have to evict. The flush also keeps the GPU busy while the host queues the run, so host time does not count. The overhead of
two events and one launch is measured and subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeAlias

import torch

Work: TypeAlias = Callable[[], object]  # queues kernels on the current stream

FLUSH_BYTES = 256 << 20
SMALLEST_KERNEL_US = 1.2  # run time of the smallest kernel, from its first instruction to its last (H200)
MAX_OVERHEAD_US = 6.0  # a larger measured overhead is an outlier, not the cost of events


@dataclass(frozen=True, slots=True)
class Timing:
    """Summary of several timed runs of the same work."""

    us: float  # the median
    spread: float  # (80th - 20th percentile) / median
    runs: int


def timing(each_us: Sequence[float]) -> Timing:
    """Summarize the times of several runs."""
    return Timing(median(each_us), spread(each_us), len(each_us))


def spread(times: Sequence[float]) -> float:
    """The distance between the 20th and 80th percentile, relative to the median."""
    middle = median(times)
    if len(times) < 2 or middle <= 0:
        return 0.0
    low, *_, high = quantiles(times, n=5, method="inclusive")
    return (high - low) / middle


class Flush:
    """Evicts earlier data from L2 and leaves no dirty lines: writes FLUSH_BYTES, then reads as many other bytes."""

    def __init__(self, where: torch.device) -> None:
        self._written, self._read = (torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=where) for _ in range(2))
        self._one = torch.zeros((1,), dtype=torch.float32, device=where)

    def __call__(self) -> None:
        """Queue the write and the read."""
        self._written.zero_()
        torch.sum(self._read, 0, keepdim=True, out=self._one)


class Stopwatch:
    """Times work on one CUDA device, on its current stream. Not for use while a graph is being captured."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self._flush = Flush(where)
        one = torch.zeros((1,), dtype=torch.float32, device=where)
        self._overhead = 0.0
        torch.cuda.synchronize(where)  # earlier work must not overlap the timed runs
        (smallest,) = self([one.zero_], 20)
        self._overhead = min(max(smallest.us - SMALLEST_KERNEL_US, 0.0), MAX_OVERHEAD_US)

    def __call__(self, works: Sequence[Work], runs: int) -> tuple[Timing, ...]:
        """Time every work `runs` times, round-robin, so that drift affects all of them alike."""
        events_per_work: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in works]
        with torch.no_grad(), torch.cuda.device(self.where):
            for work in works:  # warm up: load, allocate, compile
                work()
            for _ in range(runs):
                for work, events in zip(works, events_per_work, strict=True):
                    self._flush()
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    begin.record()
                    work()
                    end.record()
                    events.append((begin, end))
            torch.cuda.current_stream().synchronize()
        return tuple(timing([self._us(begin, end) for begin, end in events]) for events in events_per_work)

    def _us(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return max(1e3 * float(begin.elapsed_time(end)) - self._overhead, 0.0)
