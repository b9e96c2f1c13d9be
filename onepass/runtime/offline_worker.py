"""The process that compiles: one job a line on stdin (JSON), one answer a line on stdout. Started by `offline`, by path.

It runs apart because interpreting and compiling kernels want Triton imported differently, and it imports neither torch nor
the package's front door, so that it is ready in the time Triton takes to import.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import IO, Any


def _shells() -> None:
    """Stand-ins for the packages above this file: their modules can be imported without running their __init__."""
    root = Path(__file__).resolve().parent.parent
    for name, path in (("onepass", root), ("onepass.runtime", root / "runtime"), ("onepass.codegen", root / "codegen")):
        shell = ModuleType(name)
        shell.__path__ = [str(path)]
        sys.modules[name] = shell


def measure(job: Any) -> Any:
    """Compile a job and read what it costs."""
    from onepass import compat  # after _shells
    from onepass.runtime.module import build  # after _shells
    from onepass.runtime.readout import read  # after _shells

    kernel = build(job)
    compat.triton_stub(kernel)
    return read(kernel.asm["cubin"], kernel.asm["ptx"], kernel.metadata.shared, job.target)


def _complaint(error: Exception, noise: IO[bytes]) -> str:
    """The last line of a failure that says something."""
    noise.seek(0)
    printed = noise.read().decode(errors="replace").splitlines()
    lines = [line.strip() for line in [*printed, *str(error).splitlines()]]
    useful = [line for line in lines if line and not set(line) <= set("^~= ") and not line.startswith("Repro command")]
    errors = [line for line in useful if "error" in line.lower()]
    return (errors or useful or [type(error).__name__])[-1]


def _answer(line: str, noise: IO[bytes]) -> dict[str, Any]:
    from onepass import compat  # after _shells
    from onepass.runtime.module import Job  # after _shells

    request = json.loads(line)
    heard: list[bool] = []  # of each kernel, whether Triton's cache had it
    fields = request["job"]
    fields["signature"] = tuple(tuple(pair) for pair in fields["signature"])
    fields["aligned"] = tuple(fields["aligned"])
    noise.truncate(0)
    try:
        compat.take_tools(**request["tools"])
        with compat.triton_files(request["folder"], heard.append):
            return {"binary": dataclasses.asdict(measure(Job(**fields))), "heard": heard}
    except Exception as error:  # whatever the compiler does to one job, the next one must find this process alive
        return {"failure": _complaint(error, noise), "heard": heard}


def main() -> None:
    """Serve until stdin closes."""
    _shells()
    # Compilers print to both streams; answers get a stream of their own.
    answers = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryFile() as noise:
        os.dup2(noise.fileno(), 1)
        os.dup2(noise.fileno(), 2)
        for line in sys.stdin:
            answers.write(json.dumps(_answer(line, noise)) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
