"""Kernel text -> a @triton.jit function, and that function compiled for one GPU.

Worker processes import this module by itself, so it needs only Triton.
"""

from __future__ import annotations

import hashlib
import linecache
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from .. import compat

if TYPE_CHECKING:
    from ..codegen.source import Source


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that determines a binary: equal jobs give equal binaries."""

    name: str
    text: str
    signature: tuple[tuple[str, str], ...]  # (parameter, Triton type)
    aligned: tuple[int, ...]  # positions of pointers that are 16-byte aligned
    warps: int
    stages: int
    max_registers: int | None
    target: int  # 90 for sm_90


def load(source: Source) -> Any:
    """The @triton.jit function of a Source. Nothing is written to disk, and equal text gives the same function."""
    return load_text(source.name, source.text)


@cache
def load_text(name: str, text: str) -> Any:
    """The function called `name` that `text` defines."""
    compat.triton("build kernels")
    # Triton reads a kernel's source with `inspect`, which looks up such file names in linecache.
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    filename = f"<onepass:{name}-{digest}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"onepass.generated.{name}"}
    exec(compile(text, filename, "exec", dont_inherit=True), namespace)
    return namespace[name]


def build(job: Job) -> Any:
    """Compile a job with Triton. No GPU is needed."""
    options = {"num_warps": job.warps, "num_stages": job.stages, "enable_fp_fusion": True}
    if job.max_registers is not None:
        options["maxnreg"] = job.max_registers
    return compat.triton_compile(load_text(job.name, job.text), dict(job.signature), job.aligned, job.target, options)
