"""What a compiled kernel takes, asked of the assembler and the cubin reader in Triton's wheel. No card is needed.

Worker processes import this module too, so it needs nothing but Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from .. import compat
from .binary import Binary, Usage, parse_log, parse_resources, summarize


def read(cubin: bytes, ptx: str, smem_bytes: int, target: int) -> Binary:
    """What a kernel takes. The cubin tells registers and stack; what of the stack are spills, only the assembler does."""
    registers, stack = parse_resources(_dumped(cubin, "--dump-resource-usage")) or (0, 1)
    return summarize(Usage(registers, 0, 0), smem_bytes, ptx) if not stack else read_spills(cubin, ptx, smem_bytes, target)


def read_spills(cubin: bytes, ptx: str, smem_bytes: int, target: int) -> Binary:
    """The same of a kernel that is known to use local memory."""
    usage = _assembled(ptx, target)
    return summarize(usage, smem_bytes, ptx, _dumped(cubin, "-sass") if usage.spill_bytes else "")


def _assembled(ptx: str, target: int) -> Usage:
    """What the assembler says of a kernel, given as Triton gives it."""
    architecture = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert architecture, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        options = ["-lineinfo", "-v", f"--gpu-name={architecture[1]}", str(source), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run([compat.ptxas(target), *options], capture_output=True, text=True, check=False)
    usage = None if said.returncode else parse_log(said.stderr + said.stdout)
    if usage is None:
        raise RuntimeError(f"ptxas said nothing about registers, but this: {(said.stderr + said.stdout).strip()[-300:]!r}")
    return usage


def _dumped(cubin: bytes, option: str) -> str:
    """What cuobjdump says of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([compat.cuobjdump(), option, file.name], capture_output=True, text=True, check=True).stdout
