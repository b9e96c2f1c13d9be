"""The process that compiles: questions come and answers go through a socket it is given. Started by `offline`, by path.

It runs apart because interpreting and compiling kernels want Triton imported differently, and it imports neither torch nor
the package's front door, so that it is ready in the time Triton takes to import. Whatever compilers print goes to a file of the
parent's and never between answers.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

OUTPUT_TAIL_BYTES = 1 << 20  # bytes at the end of what was printed in which to look for a complaint


class KernelRejected(Exception):
    """The compiler does not take this kernel, today or tomorrow."""


def shells() -> None:
    """Stand-ins for the packages above this file: their modules can be imported without running their __init__."""
    root = Path(__file__).resolve().parent.parent
    for name, path in (("onepass", root), ("onepass.runtime", root / "runtime"), ("onepass.codegen", root / "codegen")):
        shell = ModuleType(name)
        shell.__path__ = [str(path)]
        sys.modules[name] = shell


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a kernel takes, why the compiler refuses it, or what kept us from finding out; of each kernel, whether Triton had it."""
    heard: list[bool] = []
    try:
        found: dict[str, Any] = {"binary": dataclasses.asdict(measure(request, heard.append))}
    except KernelRejected as refused:
        found = {"failure": str(refused)}
    except Exception as error:  # whatever befalls one job, the next one must find this process alive
        found = {"trouble": f"{type(error).__name__}: {_said(error)}"}
    return {**found, "heard": heard}


def measure(request: dict[str, Any], heard: Callable[[bool], None]) -> Any:
    """Compile a job and read what it costs."""
    from onepass import compat  # after `shells`
    from onepass.runtime.cubin_info import read  # after `shells`
    from onepass.runtime.module import Job, build  # after `shells`

    fields = request["job"]
    job = Job(**{**fields, "signature": tuple(map(tuple, fields["signature"])), "aligned": tuple(fields["aligned"])})
    compat.use_toolchain(**request["tools"])
    with compat.triton_cache_folder(request["folder"], heard):
        try:
            kernel = build(job)
        except Exception as error:
            if of_the_system(error):
                raise
            raise KernelRejected(_said(error)) from error
        compat.compile_launcher_stub(kernel)
        return read(kernel.asm["cubin"], kernel.asm["ptx"], kernel.metadata.shared, job.target)


def of_the_system(error: BaseException | None) -> bool:
    """Whether an error says something about this machine at this moment, and nothing about a kernel."""
    while error is not None:
        if isinstance(error, OSError | MemoryError | ImportError):
            return True
        if isinstance(error, subprocess.CalledProcessError) and error.returncode < 0:  # an assembler that somebody killed
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _said(error: Exception) -> str:
    """The line of a failure that says most."""
    from onepass.runtime.compiler_message import error_line  # after `shells`

    with suppress(OSError, ValueError):
        sys.stdout.flush()
    size = os.fstat(2).st_size
    printed = os.pread(2, OUTPUT_TAIL_BYTES, max(0, size - OUTPUT_TAIL_BYTES)).decode(errors="replace")
    return error_line(printed, str(error)) or type(error).__name__


def serve(channel: socket.socket, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer questions until the parent has gone."""
    from onepass.runtime import frames  # after `shells`

    while (request := frames.receive(channel)) is not None:
        os.ftruncate(2, 0)
        frames.send(channel, {**answer(request), "id": request["id"]})


def prepare(handle: int) -> socket.socket:
    """Make this process one that obeys its parent alone and ends with it; `handle` is its end of their socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills us if it wants to
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it hands that on, and assemblers would seem to succeed
    faulthandler.enable()
    os.set_inheritable(handle, False)
    threading.Thread(target=_end_with_parent, args=(handle,), daemon=True).start()
    shells()
    return socket.socket(fileno=handle)


def _end_with_parent(handle: int) -> None:
    """End as soon as the parent has gone, also in the middle of a job, and take the assembler along."""
    poll = select.poll()
    poll.register(handle, getattr(select, "POLLRDHUP", 0))  # that it was closed is reported unasked
    poll.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    serve(prepare(int(sys.argv[1])), answer)
