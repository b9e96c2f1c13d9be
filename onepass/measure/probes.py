"""The measurements of `onepass calibrate`, one method each. Imports triton, so it is imported only when needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..device import Device
from ..runtime.stopwatch import Stopwatch, Work
from . import probe_kernels as kernels
from .calibrate import Anchor, InFlightRate, ProbeResults

MAX_TENSOR_BYTES = 512 << 20  # of one tensor, if the GPU has enough memory
LOADS = 4  # 16-byte loads in flight per thread of the walk kernel; ptxas does not keep more of them separate
RUNS = 12
SATURATING_SHAPE = 4, 8  # CTAs per SM, warps per CTA; enough to saturate any rate
# CTAs per SM and warps per CTA, from few bytes in flight to many.
IN_FLIGHT_SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (3, 4), (1, 16), (3, 8), (1, 32), (2, 32))
L2_WORKING_SET = 16 << 20  # bytes that are read repeatedly
L2_PASSES = 4, 24
GRAPH_REPEATS = 33  # copies of a kernel in a graph, compared with one
PARTIAL_COLUMNS, JOIN_COLUMNS, JOIN_ROWS = 8192, 64, 32  # columns of partial rows; columns per join program, and rows per step
CHAIN_LENGTH = 1 << 20  # operations for the clock probe; about 2 ms


def measure(where: torch.device, card: Device) -> ProbeResults:
    """Run all probes on a GPU. Takes a few seconds plus compilation."""
    with torch.no_grad(), torch.cuda.device(where):
        probes = _Probes(where, card)
        join_us, join_bytes = probes.join()
        return ProbeResults(
            probes.anchors(), probes.flights(), probes.l2_rate(), probes.launch(), join_us, join_bytes, probes.clock()
        )


class _Probes:
    """The probes, and the tensors they share."""

    def __init__(self, where: torch.device, card: Device) -> None:
        self.where, self.card = where, card
        self.watch = Stopwatch(where)
        free, _ = torch.cuda.mem_get_info(where)
        count = min(MAX_TENSOR_BYTES, free // 8) // (1 << 20) * (1 << 18)  # float32 values, in whole MiB
        self.a, self.b, self.c = (torch.zeros(count, dtype=torch.float32, device=where) for _ in range(3))
        self.sums = torch.zeros(4096, dtype=torch.float32, device=where)

    def anchors(self) -> tuple[Anchor, ...]:
        """Times of a read, copy and add at two sizes."""
        kinds: list[tuple[str, int]] = []
        works: list[Work] = []
        for count in (self.a.numel() // 4, self.a.numel()):
            a, b, c = self.a[:count], self.b[:count], self.c[:count]
            tiles = count // self._tile(SATURATING_SHAPE[1])
            kinds += [("read", 4 * tiles * self._tile(SATURATING_SHAPE[1])), ("copy", 8 * count), ("add", 12 * count)]
            works += [partial(self._walk, tiles, 1, *SATURATING_SHAPE), partial(c.copy_, a), partial(torch.add, a, b, out=c)]
        timed = self.watch(works, RUNS)
        return tuple(Anchor(kind, moved, t.us) for (kind, moved), t in zip(kinds, timed, strict=True))

    def flights(self) -> tuple[InFlightRate, ...]:
        """DRAM rates of the walk kernel with increasing bytes in flight."""
        counts = [min(self.a.numel(), 32 << 20) // self._tile(warps) for _, warps in IN_FLIGHT_SHAPES]
        works = [partial(self._walk, tiles, 1, *shape) for tiles, shape in zip(counts, IN_FLIGHT_SHAPES, strict=True)]
        timed = self.watch(works, RUNS)
        return tuple(
            InFlightRate(4 * ctas * self._tile(warps), 4 * tiles * self._tile(warps) / t.us if t.us else 0.0)
            for (ctas, warps), tiles, t in zip(IN_FLIGHT_SHAPES, counts, timed, strict=True)
        )

    def l2_rate(self) -> float:
        """The L2 read rate: the difference between many and few passes, so that the first pass and the launch cancel."""
        ctas, warps = SATURATING_SHAPE
        ctas_on_gpu = ctas * self.card.sms
        working_set = min(L2_WORKING_SET, self.card.l2_bytes // 3, 4 * self.a.numel())
        tiles = max(1, working_set // (4 * self._tile(warps) * ctas_on_gpu)) * ctas_on_gpu  # whole iterations of all programs
        few, many = self.watch([partial(self._walk, tiles, passes, ctas, warps) for passes in L2_PASSES], RUNS)
        moved = 4 * tiles * self._tile(warps) * (L2_PASSES[1] - L2_PASSES[0])
        return moved / (many.us - few.us) if many.us > few.us else float("nan")

    def launch(self) -> float:
        """Time that a minimal kernel on every SM adds to a graph."""
        return self._each(lambda: kernels.touch[(self.card.sms,)](self.sums, num_warps=4))

    def join(self) -> tuple[float, int]:
        """Time that a sum of one partial row per SM adds to a graph, and the bytes of these rows."""
        rows = self.card.sms
        partials = torch.zeros(rows * PARTIAL_COLUMNS, dtype=torch.float32, device=self.where)
        results = torch.zeros(PARTIAL_COLUMNS, dtype=torch.float32, device=self.where)

        def fill() -> None:
            kernels.fill[(rows,)](partials, PARTIAL_COLUMNS, WIDTH=1024, num_warps=4)

        def fill_and_join() -> None:
            fill()
            kernels.join[(PARTIAL_COLUMNS // JOIN_COLUMNS,)](
                partials, results, rows, PARTIAL_COLUMNS, HEIGHT=JOIN_ROWS, WIDTH=JOIN_COLUMNS, num_warps=4
            )

        return self._each(fill_and_join) - self._each(fill), 4 * rows * PARTIAL_COLUMNS

    def clock(self) -> float:
        """Clock rate in cycles per microsecond while memory is busy."""
        found = torch.zeros(3, dtype=torch.int64, device=self.where)
        side = torch.cuda.Stream(self.where)
        kernels.ticks[(1,)](found, 16, num_warps=1)  # compile before measuring
        self._keep_busy(100)  # until clocks are stable
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kernels.ticks[(1,)](found, CHAIN_LENGTH, num_warps=1)
        self._keep_busy(40)
        torch.cuda.synchronize(self.where)
        cycles, nanoseconds, _ = found.tolist()
        return 1e3 * cycles / nanoseconds if nanoseconds > 0 else float("nan")

    def _keep_busy(self, times: int) -> None:
        for _ in range(times):
            torch.add(self.a, self.b, out=self.c)

    def _each(self, body: Callable[[], object]) -> float:
        """Time that one more `body` adds to a graph."""
        one, many = self.watch([_graph(body, times).replay for times in (1, GRAPH_REPEATS)], RUNS)
        return (many.us - one.us) / (GRAPH_REPEATS - 1)

    def _tile(self, warps: int) -> int:
        """Values that a CTA of the walk kernel reads per iteration: LOADS times four per thread."""
        return LOADS * 4 * 32 * warps

    def _walk(self, tiles: int, passes: int, ctas: int, warps: int) -> Tensor:
        kernels.walk[(ctas * self.card.sms,)](
            self.a, self.sums, tiles, passes, HEIGHT=LOADS, WIDTH=128 * warps, num_warps=warps, num_stages=1
        )
        return self.sums


def _graph(body: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    body()  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            body()
    return graph
