"""Whether a call gives the same bits each time: repeated, on several streams, in a graph, after other work, in other processes.

Everything works on any device, so that the checks themselves are tested without a card: there, streams are threads, and a graph is
the call itself.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

import onepass
from onepass.measure.suites import Job
from onepass.tools.check import as_tuple
from tests.support.processes import ROOT, run_python

Call: TypeAlias = Callable[[], tuple[Tensor, ...]]
STREAMS = 3
DIRT = 1 << 26  # fp32 numbers that are written to dirty the caches: several times the size of L2


def bits(tensor: Tensor) -> Tensor:
    """A tensor's elements as integers of their width."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Bitwise."""
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


def digest(results: Sequence[Tensor]) -> str:
    """A digest for comparing results across processes."""
    found = hashlib.sha256()
    for result in results:
        found.update(f"{result.dtype} {tuple(result.shape)}".encode() + bits(result).cpu().numpy().tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Machine:
    """A device, and other work on it."""

    device: torch.device

    @property
    def is_card(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until all work is done."""
        if self.is_card:
            torch.cuda.synchronize(self.device)

    def stream(self) -> AbstractContextManager[Any]:
        """A new stream, after all queued work is done."""
        return torch.cuda.stream(torch.cuda.Stream(self.device)) if self.is_card else nullcontext()

    def replayed(self, call: Call) -> Call:
        """The call, captured once; each replay writes the same memory, so results are copies."""
        if not self.is_card:
            return call
        graph = torch.cuda.CUDAGraph()
        self.wait()
        with torch.cuda.graph(graph):
            static = call()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return tuple(t.clone() for t in static)

        return replay

    def disturb(self, turn: int) -> None:
        """Leave dirty lines in the caches and freed memory behind, and keep SMs busy on another stream meanwhile."""
        size = DIRT if self.is_card else 1 << 12
        torch.full((size >> turn % 3,), float(turn), device=self.device).add_(1.0)
        with self.stream():
            side = 64 << turn % 5 if self.is_card else 8
            a = torch.ones(side, side, device=self.device)
            for _ in range(4):
                a = torch.tanh(a @ a)


def changing(call: Call, times: int, machine: Machine) -> dict[str, int]:
    """How many of `times` runs, in four ways in turn, differ bitwise from the first, by way; empty if none."""
    first = tuple(t.clone() for t in call())
    replay = machine.replayed(call)
    ways: dict[str, Callable[[int], bool]] = {
        "again": lambda turn: same(call(), first),
        "on several streams": lambda turn: _on_streams(call, first, machine),
        "from a graph": lambda turn: same(replay(), first),
        "after other work": lambda turn: (machine.disturb(turn), same(call(), first))[1],
    }
    found: dict[str, int] = {}
    for turn in range(times):
        name = list(ways)[turn % len(ways)]
        if not ways[name](turn):
            found[name] = found.get(name, 0) + 1
    machine.wait()
    return found


def _on_streams(call: Call, first: Sequence[Tensor], machine: Machine) -> bool:
    """Calls on several streams at once: queued by one thread on a card, made by several elsewhere."""
    machine.wait()
    results: list[tuple[Tensor, ...]] = []

    def one() -> None:
        with machine.stream():
            results.append(call())

    if machine.is_card:
        for _ in range(STREAMS):
            one()
    else:
        threads = [threading.Thread(target=one) for _ in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    machine.wait()
    return len(results) == STREAMS and all(same(result, first) for result in results)


def calling(job: Job, device: torch.device) -> Call:
    """A workload, fused, on its arguments, which are the same in every process."""
    fused, inputs = onepass.fuse(job.subject.function), job.inputs(device)
    return lambda: as_tuple(fused(*inputs))


ELSEWHERE = """
import sys, torch
from onepass.measure.suites import Job
from tests.support.determinism import calling, digest

device, *jobs = sys.argv[1:]
for text in jobs:
    name, shape, dtype = text.split()
    job = Job(name, tuple(map(int, shape.split("x"))), dtype)
    print(digest(calling(job, torch.device(device))()), flush=True)
"""


def digests_elsewhere(jobs: Sequence[Job], device: torch.device, **environment: str) -> list[str]:
    """The digests of workloads' results in a fresh process."""
    named = [f"{job.workload} {'x'.join(map(str, job.shape))} {job.dtype}" for job in jobs]
    done = run_python(ELSEWHERE, str(device), *named, env={**os.environ, "PYTHONPATH": str(ROOT), **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()
