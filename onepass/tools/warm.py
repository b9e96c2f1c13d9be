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
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from time import monotonic

import torch

from .providers import MAX_AUTOTUNE, make_provider
from .suites import Job

WORKERS = 8  # each holds the tensors of a workload on the card
WORKER_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_AUTOTUNE_LOCAL_CACHE": "0"}


def compiles_slowly(provider: str) -> bool:
    """Whether a provider compiles for seconds what a cache can hold."""
    return provider.startswith("inductor") and provider != MAX_AUTOTUNE


@contextmanager
def prewarm_inductor(jobs: Sequence[Job], providers: Sequence[str], where: torch.device, workers: int = WORKERS,
            limit: float | None = None) -> Iterator[None]:
    """Have what `providers` will need for some jobs compiled meanwhile; at the end, wait for it until `limit` seconds have passed.

    What fails will fail again, and be told. No process is left behind, however this is left.
    """
    names = [name for name in providers if compiles_slowly(name)]
    count = min(workers, len(jobs)) if names else 0
    began = monotonic()
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.extend(_start_worker(jobs[k::count], names, where) for k in range(count if count > 1 else 0))
        yield
        for worker in started:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(None if limit is None else max(0.0, began + limit - monotonic()))
    finally:
        for worker in started:
            worker.kill()
        for worker in started:
            worker.wait()


def _start_worker(jobs: Sequence[Job], names: Sequence[str], where: torch.device) -> subprocess.Popen[bytes]:
    """A process that is given jobs in a file: a pipe would have to be filled while that process starts."""
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps([astuple(job) for job in jobs]).encode())
        given.seek(0)
        command = [sys.executable, "-W", "ignore", "-m", __name__, str(where), ",".join(names)]
        return subprocess.Popen(command, stdin=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                env={**os.environ, **WORKER_ENVIRONMENT})


def main(where: str, providers: str) -> None:
    """What a worker does: read jobs, and call each once."""
    for workload, shape, dtype in json.load(sys.stdin):
        job = Job(workload, tuple(shape), dtype)
        for name in providers.split(","):
            with suppress(Exception), torch.no_grad():
                make_provider(name, job, job.inputs(where)).call()
            torch.compiler.reset()
            if where.startswith("cuda"):
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
