"""Measures kernel times with the profiler and a cold cache, and the host time of calls.

Before each call, 256 MB are written and another 256 MB read, so that L2 holds clean lines of other data: a write alone would leave
dirty lines, which the timed kernels would have to evict. A marker kernel runs before and after each call, so the recorded order
shows which kernels belong to which call.
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
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from ..codegen.source import GridDim, Param, ParamKind, Source
from ..errors import NotMeasured
from ..ir.expr import DTYPES
from ..runtime.launch import Launcher, prepare
from ..runtime.stopwatch import Flush, spread

RUNS = 20  # per call
MIN_RUNS = 5  # of a slow call
CALL_BUDGET_US = 100e3  # device time for all runs of one call
HOST_BUDGET_US = 20e3  # device time per round when timing the host
QUEUE_DEPTH = 400  # launches that the driver queues before the host blocks
MAX_SESSIONS = 3  # the profiler may lose events; then all calls are repeated
MARKER = "onepass_bench_mark"
_NO_WORK = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")  # recorded like kernels, but not work of a call

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel or copy recorded by the profiler. Times are in microseconds."""

    name: str
    start: float
    us: float


@dataclass(frozen=True, slots=True)
class Timed:
    """The measured time of one call."""

    us: float  # the median
    spread: float  # between the 20th and 80th percentile, relative to the median
    runs: int
    kernels: int


# ---- from events to times


def split_at_markers(events: Iterable[Event], launched: int) -> list[tuple[Event, ...]]:
    """The events of each call, in call order: everything between the marker before it and the marker after it."""
    ordered = sorted(events, key=lambda e: e.start)
    marks = [k for k, e in enumerate(ordered) if MARKER in e.name]
    if len(marks) != 2 * launched:
        raise NotMeasured(
            detail=f"{launched} calls were launched, but the profiler recorded {len(marks)} markers instead of {2 * launched}"
        )
    return [tuple(ordered[a + 1 : b]) for a, b in zip(marks[::2], marks[1::2], strict=True)]


def busy_us(events: Sequence[Event]) -> float:
    """The time the GPU was busy with some events: the sum of their durations, counting overlaps once."""
    total, until = 0.0, -math.inf
    for event in sorted(events, key=lambda e: e.start):
        end = event.start + event.us
        total += max(0.0, end - max(event.start, until))
        until = max(until, end)
    return total


def calls_by_name(events: Iterable[Event], launched: Sequence[str]) -> dict[str, list[tuple[Event, ...]]]:
    """The events of each call, by name. `launched` lists the names of all calls in order."""
    found: dict[str, list[tuple[Event, ...]]] = {name: [] for name in launched}
    for name, ran in zip(launched, split_at_markers(events, len(launched)), strict=True):
        found[name].append(ran)
    return found


def summarize_runs(calls: Sequence[Sequence[Event]]) -> Timed:
    """The time of a call from several runs. Runs with an unusual kernel sequence are excluded; at most 20 % may be."""
    counts = Counter(tuple(e.name for e in ran) for ran in calls)
    usual, often = counts.most_common(1)[0]
    if not usual:
        raise NotMeasured(detail="a call ran nothing on the GPU")
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
    """How often to run a call that takes about `us`."""
    return max(MIN_RUNS, min(RUNS, int(budget_us / max(us, 1.0))))


def interleaved_order(runs: Mapping[str, int]) -> tuple[str, ...]:
    """An order of all runs in rounds. Each round starts with another name, so that no call always follows the same one."""
    names = list(runs)
    order = []
    for k in range(max(runs.values(), default=0)):
        turned = names[k % len(names) :] + names[: k % len(names)]
        order += [name for name in turned if k < runs[name]]
    return tuple(order)


# ---- on the GPU

_MARKER_SOURCE = Source(
    MARKER,
    f"import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef {MARKER}(out):\n    tl.store(out, 0.0)\n",
    (Param("out", ParamKind.POINTER, "out", DTYPES["f32"]),),
    (GridDim(1),),
    warps=1,
)


def reserve_memory(wanted: int, where: torch.device) -> None:
    """Allocate `wanted` bytes, or half of the free memory, and keep them in torch's caching allocator.

    Memory that is returned to the driver and allocated again can be slower (H200: `torch.neg` of 0.8 GB takes 424 us instead of
    381 us at the same addresses). Programs that train or serve return nothing to the driver either.
    """
    free, _ = torch.cuda.mem_get_info(where)
    torch.empty(min(wanted, free // 2), dtype=torch.uint8, device=where)


class Clock:
    """Times calls on one GPU. Holds the buffers that flush L2, and the marker kernel."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.flush = Flush(self.device)
        self._marker_target = torch.zeros(64, device=self.device)
        self._marker: Launcher = prepare(_MARKER_SOURCE, index, frozenset({"out"}))

    def record_marker(self) -> None:
        """Launch the marker kernel."""
        self._marker(1, (self._marker_target.data_ptr(),), torch.cuda.current_stream(self.device).cuda_stream)

    def synchronize(self) -> None:
        """Wait for the GPU. Raises after a device fault, since nothing can be measured then."""
        torch.cuda.synchronize(self.device)

    def times(self, calls: Mapping[str, Call], most: int = RUNS) -> dict[str, "Timed | NotMeasured"]:
        """The kernel time of each call, or the reason why it has none, from interleaved runs in one profiler session.

        Every call must have run once before.
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
            self.flush()  # if the session loses its first events, they are not those of a call
            for name in order:
                self.flush()
                self.record_marker()
                calls[name]()
                self.record_marker()
            self.synchronize()
        return [
            Event(e.name, e.time_range.start, e.time_range.elapsed_us())
            for e in profiled.events() or ()
            if e.device_type == DeviceType.CUDA and e.name not in _NO_WORK and not getattr(e, "is_user_annotation", False)
        ]

    def _rough_us(self, call: Call) -> float:
        """A rough time of a call, to choose the number of runs. May include host time."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return 1e3 * float(begin.elapsed_time(end))

    def host_us(self, call: Call, of: Timed) -> float:
        """Host time of a call: the best of a few rounds, each short enough that the launch queue does not fill up."""
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
        """Time of a call replayed from a CUDA graph over several sets of buffers, including gaps between kernels.

        All sets together exceed L2, so each call starts with a cold cache, although one with dirty lines.
        """
        sets = [tuple(inputs), *(tuple(t.clone() for t in inputs) for _ in range(copies - 1))]
        for given in sets[:2]:
            function(*given)
        self.synchronize()
        graph, kept = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for given in sets:
                kept.append(function(*given))  # noqa: PERF401, kept so that no two calls share output memory
        times: list[float] = []
        for _ in range(replays + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * float(begin.elapsed_time(end)) / copies)
        return statistics.median(times[1:])


def copies_for(moved: int, l2_bytes: int, most: int = 64) -> int | None:
    """How many sets of buffers a graph needs for a cold cache; None if that exceeds `most`."""
    wanted = max(2, math.ceil(4 * l2_bytes / max(moved, 1)))
    return wanted if wanted <= most else None


# ---- anchors: plain reads, copies and adds


def anchor_bytes(floors: Iterable[int]) -> tuple[int, ...]:
    """The sizes at which to measure anchors: every other power of two around the floors of a suite, 1 MiB to 4 GiB."""
    exact = list(floors)
    if not exact:
        return ()
    low, high = (min(32, max(20, round(math.log2(max(n, 1))))) for n in (min(exact), max(exact)))
    return tuple(1 << k for k in sorted({*range(low, high, 2), high}))


def anchor_calls(moved: int, device: torch.device) -> dict[str, Call]:
    """A read, a copy and an add that move `moved` bytes each."""

    def bf16(share: int) -> Tensor:
        return torch.zeros(moved // share // 2, dtype=torch.bfloat16, device=device)

    whole = bf16(1).view(torch.float32)  # torch reads fastest in sums of fp32
    source, target = bf16(2), bf16(2)
    a, b, c = bf16(3), bf16(3), bf16(3)
    return {"read": lambda: whole.sum(), "copy": lambda: target.copy_(source), "add": lambda: torch.add(a, b, out=c)}
