"""Compile a kernel for a named GPU without one, and say what it costs. The work is done by a few worker processes."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

from .. import compat
from ..codegen.source import Source
from ..device import Device
from ..errors import CompileFailed
from ..knobs import knobs
from . import cache as disk
from .binary import Binary
from .counts import heard
from .job import job
from .module import Job


def compile(source: Source, device: Device, aligned: frozenset[str] | None = None) -> Binary:
    """What `source` costs on `device`. `aligned` names the buffers that start on 16 bytes (None: all do)."""
    return measure(job(source, device.target, aligned), device.name)


def compile_many(requests: Sequence[tuple[Source, Device]]) -> list[Binary]:
    """The same for several kernels at once, in order; raises the first failure once all are done."""
    with ThreadPoolExecutor(knobs().compile_workers) as threads:
        futures = [threads.submit(compile, source, device) for source, device in requests]
    return [future.result() for future in futures]


def measure(work: Job, device: str) -> Binary:
    """What a job's binary costs; answers are remembered as long as the process lives."""
    answer = _measured(work)
    if isinstance(answer, Binary):
        return answer
    raise CompileFailed(kernel=work.name, device=device, detail=answer)


@cache
def _measured(work: Job) -> Binary | str:
    """A Binary, or the compiler's complaint."""
    compat.triton("compile kernels")
    store = disk.store()
    try:
        tools = compat.triton_tools(work.target)
    except RuntimeError as error:  # there is no assembler
        return str(error)
    request = {"job": dataclasses.asdict(work), "folder": str(store.kernels) if store else None, "tools": tools}
    answer = _pool(os.getpid()).ask(request)
    for in_cache in answer.get("heard", ()):
        heard(in_cache)
    if "failure" in answer:
        return str(answer["failure"])
    fields = answer["binary"]
    for widths in ("loads", "stores"):  # JSON knows no integer keys
        fields[widths] = {int(width): count for width, count in fields[widths].items()}
    return Binary(**fields)


class _Worker:
    """One compiling process, started at its first job and again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict) -> dict:
        process = self._process = self._process or _start()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self.close()
        return {"failure": f"the compiler process ended with status {process.returncode}"}

    def close(self) -> None:
        """End the process: it leaves when its input does."""
        process, self._process = self._process, None
        if process is not None:
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Pool:
    """Workers waiting for jobs; a job takes whichever is free."""

    def __init__(self, size: int) -> None:
        self._all = [_Worker() for _ in range(size)]
        self._free: queue.LifoQueue[_Worker] = queue.LifoQueue()  # the last used first, so that one caller starts one process
        for worker in self._all:
            self._free.put(worker)
        atexit.register(self.close)

    def ask(self, request: dict) -> dict:
        worker = self._free.get()
        try:
            return worker.ask(request)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        for worker in self._all:
            worker.close()


@lru_cache(maxsize=1)
def _pool(process_id: int) -> _Pool:
    """The workers of this process; a forked child must not talk over its parent's pipes."""
    return _Pool(knobs().compile_workers)


def _start() -> subprocess.Popen[str]:
    script = Path(__file__).with_name("offline_worker.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # -P: this folder's modules must not shadow the standard library's.
    return subprocess.Popen([sys.executable, "-P", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True, env=environment)
