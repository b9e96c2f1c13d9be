"""Compiles Inductor's kernels of a suite in advance, in several processes.

Inductor compiles graphs one by one, some seconds each. Here worker processes fill the disk caches that the measuring process then
reads. Autotuning results of the workers are not cached, because other workers use the GPU at the same time; the measuring process
tunes again, alone.
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

WORKERS = 8  # each holds the tensors of a workload on the GPU
WORKER_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_AUTOTUNE_LOCAL_CACHE": "0"}


def compiles_slowly(provider: str) -> bool:
    """Whether a provider compiles for seconds, with results that can be cached."""
    return provider.startswith("inductor") and provider != MAX_AUTOTUNE


@contextmanager
def prewarm_inductor(
    jobs: Sequence[Job], providers: Sequence[str], where: torch.device, workers: int = WORKERS, limit: float | None = None
) -> Iterator[None]:
    """Compile the kernels that `providers` need for some jobs in the background; on exit, wait until `limit` seconds have passed.

    Errors are ignored: they occur again, and are reported, in the measurement. All processes are ended on every exit path.
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
    """Start a worker. It reads its jobs from a file, because writing to a pipe could block until the worker has started."""
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps([astuple(job) for job in jobs]).encode())
        given.seek(0)
        command = [sys.executable, "-W", "ignore", "-m", __name__, str(where), ",".join(names)]
        return subprocess.Popen(
            command, stdin=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **WORKER_ENVIRONMENT}
        )


def main(where: str, providers: str) -> None:
    """Entry point of a worker: read jobs and call each once."""
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
