"""Kernel times of calls, each with a cold cache, from the profiler; and what a call costs the host.

Before each call 256 MB are written and another 256 MB read, so that L2 holds clean lines of neither inputs nor outputs: a
write alone would leave dirty lines that the timed kernels must evict. A kernel with a name of its own marks where a call begins and
ends, so which kernels belong to it is read off the recorded order and guessed from nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ..codegen.source import GridDim, Param, ParamKind, Source
from ..errors import NotMeasured
from ..ir.expr import DTYPES
from ..runtime.launch import Launcher, prepare
from ..runtime.stopwatch import Flush, spread

RUNS = 20  # of each call
MIN_RUNS = 5  # of one that takes long
CALL_BUDGET_US = 100e3  # of device time for all runs of one call
HOST_BUDGET_US = 20e3  # of device time for a round of calls that times the host
QUEUE_DEPTH = 400  # launches that a driver takes without making the host wait
MAX_SESSIONS = 3  # a profiler may lose events; then all calls are repeated
MARKER = "onepass_bench_mark"
_NO_WORK = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")  # recorded beside kernels, and no work of a call

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Event:
    """Something the card did. Times are microseconds."""

    name: str
    start: float
    us: float


@dataclass(frozen=True, slots=True)
class Timed:
    """What the runs of one call took."""

    us: float  # the median
    spread: float  # between the 20th and 80th percentile, relative to the median
    runs: int
    kernels: int


# ---- from events to times: plain functions of lists


def split_at_markers(events: Iterable[Event], launched: int) -> list[tuple[Event, ...]]:
    """What ran in each call, in the order of the calls: all between a mark before it and a mark after it."""
    ordered = sorted(events, key=lambda e: e.start)
    marks = [k for k, e in enumerate(ordered) if MARKER in e.name]
    if len(marks) != 2 * launched:
        raise NotMeasured(detail=f"{launched} calls were launched between marks, and {len(marks)} marks were recorded instead "
                                 f"of {2 * launched}")
    return [tuple(ordered[a + 1:b]) for a, b in zip(marks[::2], marks[1::2], strict=True)]


def busy_us(events: Sequence[Event]) -> float:
    """How long the card worked on some events: the sum of their durations, where two overlap counted once."""
    total, until = 0.0, -math.inf
    for event in sorted(events, key=lambda e: e.start):
        end = event.start + event.us
        total += max(0.0, end - max(event.start, until))
        until = max(until, end)
    return total


def calls_by_name(events: Iterable[Event], launched: Sequence[str]) -> dict[str, list[tuple[Event, ...]]]:
    """The calls of each name; `launched` names every call in the order it was made."""
    found: dict[str, list[tuple[Event, ...]]] = {name: [] for name in launched}
    for name, ran in zip(launched, split_at_markers(events, len(launched)), strict=True):
        found[name].append(ran)
    return found


def summarize_runs(calls: Sequence[Sequence[Event]]) -> Timed:
    """The time of a call from several of its runs. Runs that ran other kernels than most are left out; few may."""
    counts = Counter(tuple(e.name for e in ran) for ran in calls)
    usual, often = counts.most_common(1)[0]
    if not usual:
        raise NotMeasured(detail="a call ran nothing on the card")
    if often < 0.8 * len(calls):
        raise NotMeasured(detail=f"a call does not always run the same kernels: {len(counts)} sequences in {len(calls)} runs")
    times = [busy_us(ran) for ran in calls if tuple(e.name for e in ran) == usual]
    middle = statistics.median(times)
    return Timed(middle, spread(times), len(times), len(usual))


def _summary_or_error(calls: Sequence[Sequence[Event]]) -> "Timed | NotMeasured":
    try:
        return summarize_runs(calls)
    except NotMeasured as error:
        return error


def run_count(us: float, budget_us: float = CALL_BUDGET_US) -> int:
    """How often to run a call that takes about so long."""
    return max(MIN_RUNS, min(RUNS, int(budget_us / max(us, 1.0))))


def interleaved_order(runs: Mapping[str, int]) -> tuple[str, ...]:
    """Every name as often as asked, in rounds, each round beginning with another: no call always follows the same one."""
    names = list(runs)
    order = []
    for k in range(max(runs.values(), default=0)):
        turned = names[k % len(names):] + names[:k % len(names)]
        order += [name for name in turned if k < runs[name]]
    return tuple(order)


# ---- on the card

_MARKER_SOURCE = Source(
    MARKER, f'import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef {MARKER}(out):\n    tl.store(out, 0.0)\n',
    (Param("out", ParamKind.POINTER, "out", DTYPES["f32"]),), (GridDim(1),), warps=1)


def reserve_memory(wanted: int, where: torch.device) -> None:
    """Take so many bytes from the driver, or half of what is free, and leave them to torch's allocator for good.

    What is given back to the driver and taken again may be slower for every kernel: H200, `torch.neg` of 0.8 GB takes 424 us
    instead of 381 then, at the same addresses. A program that trains or serves gives nothing back either.
    """
    free, _ = torch.cuda.mem_get_info(where)
    torch.empty(min(wanted, free // 2), dtype=torch.uint8, device=where)


class Clock:
    """What timing needs on a card: two buffers to flush L2 with, and the marks."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.flush = Flush(self.device)
        self._marker_target = torch.zeros(64, device=self.device)
        self._marker: Launcher = prepare(_MARKER_SOURCE, index, frozenset({"out"}))

    def record_marker(self) -> None:
        """Leave a mark in the order of kernels."""
        self._marker(1, (self._marker_target.data_ptr(),), torch.cuda.current_stream(self.device).cuda_stream)

    def synchronize(self) -> None:
        """Wait for the card. After a fault of the card nothing more can be measured, and this raises."""
        torch.cuda.synchronize(self.device)

    def times(self, calls: Mapping[str, Call], most: int = RUNS) -> dict[str, "Timed | NotMeasured"]:
        """The kernel time of each call, measured in turn in one profiler session, or why it has none. Calls must have run before.
        """
        runs = {name: min(most, run_count(self._rough_us(call))) for name, call in calls.items()}
        order = interleaved_order(runs)
        for attempts_left in reversed(range(MAX_SESSIONS)):
            try:
                return {name: _summary_or_error(ran) for name, ran in calls_by_name(self._recorded(calls, order), order).items()}
            except NotMeasured:
                if not attempts_left:
                    raise
        raise AssertionError("the last session returns or raises")

    def _recorded(self, calls: Mapping[str, Call], order: Sequence[str]) -> list[Event]:
        self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self.flush()  # whatever a session loses at its beginning, it is not a call
            for name in order:
                self.flush()
                self.record_marker()
                calls[name]()
                self.record_marker()
            self.synchronize()
        return [Event(e.name, e.time_range.start, e.time_range.elapsed_us()) for e in profiled.events() or ()
                if e.device_type == torch.autograd.DeviceType.CUDA and e.name not in _NO_WORK
                and not getattr(e, "is_user_annotation", False)]

    def _rough_us(self, call: Call) -> float:
        """The time of a call, to decide how often to run it; what the host takes may be in it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end)

    def host_us(self, call: Call, of: Timed) -> float:
        """What a call takes the host: the best of a few rounds, none so long that a full queue makes the host wait."""
        calls = max(5, min(200, int(HOST_BUDGET_US / of.us), QUEUE_DEPTH // of.kernels))
        best = math.inf
        for _ in range(3):
            self.synchronize()
            began = perf_counter()
            for _ in range(calls):
                call()
            best = min(best, (perf_counter() - began) / calls * 1e6)
        self.synchronize()
        return best

    def graph_us(self, function: Callable[..., Any], inputs: Sequence[Tensor], copies: int, replays: int = 10) -> float:
        """The time of a call replayed from a CUDA graph over several sets of buffers, gaps between kernels included.

        Inputs and outputs of all sets together exceed L2, so each call finds a cold cache, though one with dirty lines.
        """
        sets = [tuple(inputs), *(tuple(t.clone() for t in inputs) for _ in range(copies - 1))]
        for given in sets[:2]:
            function(*given)
        self.synchronize()
        graph, kept = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for given in sets:
                kept.append(function(*given))  # noqa: PERF401, held so that no two calls share memory for outputs
        times = []
        for _ in range(replays + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / copies)
        return statistics.median(times[1:])


def copies_for(moved: int, l2_bytes: int, most: int = 64) -> int | None:
    """How many sets of buffers a graph needs for a cold cache; None where it would be too many."""
    wanted = max(2, math.ceil(4 * l2_bytes / max(moved, 1)))
    return wanted if wanted <= most else None


# ---- anchors: what the card gives to kernels that do nothing but move bytes


def anchor_bytes(floors: Iterable[int]) -> tuple[int, ...]:
    """The amounts to measure anchors at: every other power of two around the floors of a suite, 1 MiB to 4 GiB."""
    exact = list(floors)
    if not exact:
        return ()
    low, high = (min(32, max(20, round(math.log2(max(n, 1))))) for n in (min(exact), max(exact)))
    return tuple(1 << k for k in sorted({*range(low, high, 2), high}))


def anchor_calls(moved: int, device: torch.device) -> dict[str, Call]:
    """A read, a copy and an add that move so many bytes in all."""
    def bf16(share: int) -> Tensor:
        return torch.zeros(moved // share // 2, dtype=torch.bfloat16, device=device)

    whole = bf16(1).view(torch.float32)  # sums of fp32 are torch's fastest reads
    source, target = bf16(2), bf16(2)
    a, b, c = bf16(3), bf16(3), bf16(3)
    return {"read": lambda: whole.sum(), "copy": lambda: target.copy_(source), "add": lambda: torch.add(a, b, out=c)}
