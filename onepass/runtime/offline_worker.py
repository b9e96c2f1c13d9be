"""The compile worker process: reads requests from a socket and sends replies. `offline` starts it by path.

It is a separate process because interpreting and compiling kernels need Triton imported differently. It imports neither torch nor
the package's __init__, so it starts as fast as Triton can be imported. Compiler output goes to a file of the parent, so it never
mixes with replies.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

OUTPUT_TAIL_BYTES = 1 << 20  # the end of the compiler's output, searched for an error message


class KernelRejected(Exception):
    """The compiler rejects this kernel. Retrying cannot help."""


def stub_packages() -> None:
    """Register empty stand-ins for the parent packages, so that their modules can be imported without running __init__."""
    root = Path(__file__).resolve().parent.parent
    for name, path in (("onepass", root), ("onepass.runtime", root / "runtime")):
        package = ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request: resource use, the compiler's error message, or a failure of the machine; and Triton's cache hits."""
    lookups: list[bool] = []
    try:
        found: dict[str, Any] = {"binary": dataclasses.asdict(measure(request, lookups.append))}
    except KernelRejected as rejected:
        found = {"failure": str(rejected)}
    except Exception as error:  # no job may end this process
        found = {"trouble": f"{type(error).__name__}: {_message(error)}"}
    return {**found, "heard": lookups}


def measure(request: dict[str, Any], on_lookup: Callable[[bool], None]) -> Any:
    """Compile a job and read the kernel's resource use."""
    from onepass import compat  # after `stub_packages`
    from onepass.runtime.cubin_info import read  # after `stub_packages`
    from onepass.runtime.module import Job, build  # after `stub_packages`

    fields = request["job"]
    job = Job(**{**fields, "signature": tuple(map(tuple, fields["signature"])), "aligned": tuple(fields["aligned"])})
    compat.use_toolchain(**request["tools"])
    with compat.triton_cache_folder(request["folder"], on_lookup):
        try:
            kernel = build(job)
        except Exception as error:
            if is_system_error(error):
                raise
            raise KernelRejected(_message(error)) from error
        compat.compile_launcher_stub(kernel)
        return read(kernel.asm["cubin"], kernel.asm["ptx"], kernel.metadata.shared, job.target)


def is_system_error(error: BaseException | None) -> bool:
    """Whether an error comes from the state of this machine, not from the kernel."""
    while error is not None:
        if isinstance(error, OSError | MemoryError | ImportError):
            return True
        if isinstance(error, subprocess.CalledProcessError) and error.returncode < 0:  # ptxas was killed by a signal
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _message(error: Exception) -> str:
    """The most informative line about a failure, from the compiler's output or the exception."""
    from onepass.runtime.compiler_message import error_line  # after `stub_packages`

    with suppress(OSError, ValueError):
        sys.stdout.flush()
    size = os.fstat(2).st_size
    printed = os.pread(2, OUTPUT_TAIL_BYTES, max(0, size - OUTPUT_TAIL_BYTES)).decode(errors="replace")
    return error_line(printed, str(error)) or type(error).__name__


def serve(channel: socket.socket, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Serve requests until the parent closes the connection, or is gone before it received its reply."""
    from onepass.runtime import frames  # after `stub_packages`

    with suppress(ConnectionError):
        while (request := frames.receive(channel)) is not None:
            os.ftruncate(2, 0)
            frames.send(channel, {**answer(request), "id": request["id"]})


def prepare(handle: int, scratch: str) -> socket.socket:
    """Set up this process so that only its parent controls it and it ends with the parent.

    `handle` is its end of the socket, `scratch` the folder for its temporary files.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills this process if needed
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, exit codes are lost and every ptxas seems to succeed
    faulthandler.enable()
    os.set_inheritable(handle, False)
    threading.Thread(target=_end_with_parent, args=(handle, scratch), daemon=True).start()
    stub_packages()
    return socket.socket(fileno=handle)


def _end_with_parent(handle: int, scratch: str) -> None:
    """Exit as soon as the parent is gone, even in the middle of a job. Kill ptxas too, and leave no temporary files."""
    poll = select.poll()
    poll.register(handle, getattr(select, "POLLRDHUP", 0))  # POLLHUP is always reported
    poll.poll()
    leave(scratch)


def leave(scratch: str) -> NoReturn:
    """End this process and ptxas without temporary files. Threads are not waited for."""
    shutil.rmtree(scratch, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    serve(prepare(int(sys.argv[1]), sys.argv[2]), answer)
    leave(sys.argv[2])  # the thread that ends this process with its parent may not get to it before the interpreter exits
