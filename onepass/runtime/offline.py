"""Offline compilation: compile kernels for a named GPU without having one, in worker processes, and report their resource use."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from .. import compat
from ..codegen.source import Source
from ..device import Device
from ..errors import CompileFailed, CompilerProtocolError, CompilerUnavailable
from ..knobs import knobs
from . import cache as disk
from .background import DaemonExecutor
from .binary import Binary
from .compile_job import job
from .counters import count_triton_lookup
from .module import Job
from .workers import Pool, WorkerFailure

WORKER = Path(__file__).with_name("offline_worker.py")


def compile(source: Source, device: Device, aligned: frozenset[str] | None = None) -> Binary:
    """Resource use of `source` compiled for `device`. `aligned` names the buffers that are 16-byte aligned (None: all)."""
    return measure(job(source, device.target, aligned), device.name)


def compile_many(requests: Sequence[tuple[Source, Device]]) -> list[Binary]:
    """Compile several kernels in parallel. Results are in order; raises the first failure."""
    with DaemonExecutor(knobs().compile_workers, "onepass-compile") as threads:
        return list(threads.map(compile, *zip(*requests, strict=True)))


def measure(work: Job, device: str) -> Binary:
    """Resource use of a job's binary. Results and compile errors are cached in this process; worker failures are not."""
    try:
        answer = _measured(work)
    except WorkerFailure as worker_failure:
        raise worker_failure.failure(kernel=work.name, device=device, **worker_failure.fields) from None
    if isinstance(answer, Binary):
        return answer
    raise CompileFailed(kernel=work.name, device=device, detail=answer)


@cache
def _measured(work: Job) -> Binary | str:
    """A Binary, or the compiler's error message."""
    compat.triton("compile kernels")
    store = disk.store()
    request = {"job": dataclasses.asdict(work), "folder": str(store.kernels) if store else None, "tools": _tools(work.target)}
    answer = _pool(os.getpid()).ask(request, knobs().compile_timeout)
    for in_cache in answer.get("heard", ()):
        count_triton_lookup(in_cache)
    match answer:
        case {"binary": dict() as fields}:
            return _binary(fields)
        case {"failure": str() as message}:
            return message
        case {"trouble": str() as detail}:
            raise WorkerFailure(CompilerUnavailable, detail=detail)
    raise WorkerFailure(CompilerProtocolError, detail=f"the reply has the keys {', '.join(sorted(answer))}")


def _tools(target: int) -> dict[str, Any]:
    """The tools that workers must compile with."""
    try:
        return compat.triton_toolchain(target)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # ptxas is missing or does not run
        raise WorkerFailure(CompilerUnavailable, detail=str(error)) from None


def _binary(fields: Mapping[str, Any]) -> Binary:
    try:
        widths = {name: {int(width): count for width, count in fields[name].items()} for name in ("loads", "stores")}
        found = Binary(**{**fields, **widths})  # JSON has no integer keys
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise WorkerFailure(CompilerProtocolError, detail=f"the reply is not a Binary: {error}") from None
    counts = [v for v in dataclasses.asdict(found).values() if not isinstance(v, dict)]
    if not all(isinstance(n, int) for n in (*counts, *found.loads.values(), *found.stores.values())):
        raise WorkerFailure(CompilerProtocolError, detail="the reply is not a Binary: a field is not a number")
    return found


@lru_cache(maxsize=1)
def _pool(process_id: int) -> Pool:
    """The workers of this process. A forked child has its own."""
    # -P: modules in this folder must not shadow the standard library.
    return Pool(knobs().compile_workers, [sys.executable, "-P", str(WORKER)])
