"""Python code run in another process."""

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
FOREVER = 3600  # seconds after which another process is taken for stuck: no machine is so busy


def run_python(
    code: str | Path, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run Python code, or a file of it, in another process until that ends; then end what it left behind.

    What is printed goes to files: somebody it started, who lives on, would keep a pipe open. Inductor compiles by this one process:
    it would otherwise start more, and at its end wait minutes for them if they are still starting.
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
