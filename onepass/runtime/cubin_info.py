"""Resource use of a compiled kernel, from ptxas and cuobjdump in Triton's wheel. No GPU is needed.

Worker processes import this module too, so it needs only Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from .. import compat
from .binary import Binary, Usage, parse_log, parse_resources, summarize


def read(cubin: bytes, ptx: str, smem_bytes: int, target: int) -> Binary:
    """Resource use of a kernel. The cubin gives registers and stack size; only ptxas tells which part of the stack is spills."""
    registers, stack = parse_resources(_dumped(cubin, "--dump-resource-usage")) or (0, 1)
    return summarize(Usage(registers, 0, 0), smem_bytes, ptx) if not stack else read_spills(cubin, ptx, smem_bytes, target)


def read_spills(cubin: bytes, ptx: str, smem_bytes: int, target: int) -> Binary:
    """Resource use of a kernel that uses local memory: runs ptxas again to count spills."""
    usage = _assembled(ptx, target)
    return summarize(usage, smem_bytes, ptx, _dumped(cubin, "-sass") if usage.spill_bytes else "")


def _assembled(ptx: str, target: int) -> Usage:
    """Assemble PTX with ptxas -v, with the options Triton uses, and parse its report."""
    architecture = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert architecture, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        options = ["-lineinfo", "-v", f"--gpu-name={architecture[1]}", str(source), "-o", f"{folder}/kernel.cubin"]
        done = subprocess.run([compat.ptxas(target), *options], capture_output=True, text=True, check=False)
    usage = None if done.returncode else parse_log(done.stderr + done.stdout)
    if usage is None:
        raise RuntimeError(f"ptxas reported no register count; it printed {(done.stderr + done.stdout).strip()[-300:]!r}")
    return usage


def _dumped(cubin: bytes, option: str) -> str:
    """The output of cuobjdump for a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return str(subprocess.run([compat.cuobjdump(), option, file.name], capture_output=True, text=True, check=True).stdout)
