"""Run Python code in another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOREVER = 3600  # seconds after which another process counts as stuck, however busy the machine is


def run_python(
    code: str | Path, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run Python code, or a file of it, in another process until it ends, and kill the processes it left behind.

    Output goes to files, because a surviving child would keep a pipe open. Inductor compiles in this one process:
    otherwise it would start more, and at exit wait minutes for them if they are still starting.
    """
    start = [str(code)] if isinstance(code, Path) else ["-c", code]
    environment = {**(os.environ if env is None else env), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *start, *arguments],
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(FOREVER)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(process.args, process.returncode, out.read(), errors.read())
