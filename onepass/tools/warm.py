"""Inductor's kernels of a suite, compiled beforehand by several processes.

Inductor compiles one graph after another, some seconds each. Here worker processes compile what a run is going to ask for, into the
caches on disk that the measuring process then reads. Which configuration of a kernel a worker found fastest is not kept: it found
that out in company, and the measuring process does it again, alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from time import monotonic

import torch

from .providers import MAX, provide
from .suites import Job

WORKERS = 8  # each holds the tensors of a workload on the card
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_AUTOTUNE_LOCAL_CACHE": "0"}


def is_slow(provider: str) -> bool:
    """Whether a provider compiles for seconds what a cache can hold."""
    return provider.startswith("inductor") and provider != MAX


def warm(jobs: Sequence[Job], providers: Sequence[str], where: torch.device, workers: int = WORKERS,
         limit: float | None = None) -> None:
    """Compile what `providers` will need for some jobs, for at most `limit` seconds. What fails will fail again, and be told."""
    names = [name for name in providers if is_slow(name)]
    count = min(workers, len(jobs))
    if not names or count < 2:
        return
    began = monotonic()
    command = [sys.executable, "-W", "ignore", "-m", __name__, str(where), ",".join(names)]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
                                env={**os.environ, **ALONE}) for _ in range(count)]
    for k, worker in enumerate(started):
        assert worker.stdin is not None
        with worker.stdin as pipe:
            json.dump([astuple(job) for job in jobs[k::count]], pipe)
    for worker in started:
        try:
            worker.wait(None if limit is None else max(0.0, began + limit - monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def main(where: str, providers: str) -> None:
    """What a worker does: read jobs, and call each once."""
    for workload, shape, dtype in json.load(sys.stdin):
        job = Job(workload, tuple(shape), dtype)
        for name in providers.split(","):
            with suppress(Exception), torch.no_grad():
                provide(name, job, job.inputs(where)).call()
            torch.compiler.reset()
            if where.startswith("cuda"):
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
