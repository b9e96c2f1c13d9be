"""Compile a kernel for a local GPU, load it there, and bind everything but its arguments.

A call does no signature binding, allocation or synchronization and reads nothing from the device, so it can be captured in a
CUDA graph and used from several streams and threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from .. import compat
from ..codegen.source import ParamKind, Source
from ..errors import CompileFailed, DoesNotFit, UnsupportedDevice
from . import cache as disk
from .binary import Binary, Usage, summarize
from .card import MIN_CAPABILITY
from .compile_job import job
from .counters import count_triton_lookup
from .cubin_info import read_spills
from .module import Job, build


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor that TMA reads: address, shape and strides. Triton's launchers encode it as a hardware tensor map."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    @property
    def base(self) -> TensorMap:
        """The tensor, as Triton's launchers ask for it. They use only its address."""
        return self

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.address


@dataclass(frozen=True, slots=True)
class Launcher:
    """A kernel loaded on one CUDA device."""

    work: Job
    device: int
    launch: Callable[..., None]  # called with (grid, stream, *args) while this device is current
    _kernel: Any = field(compare=False)  # keeps the kernel alive: Triton 3.9 and later unload unreferenced kernels

    @property
    def name(self) -> str:
        return self.work.name

    @property
    def binary(self) -> Binary:
        """The kernel's resource use."""
        return _binary(self.work, self.device)

    def __call__(self, grid: int, args: tuple[int | TensorMap, ...], stream: int) -> None:
        """Launch `grid` programs on a raw stream of this device. `args` are in parameter order, pointers as addresses."""
        if grid == 0:
            return
        if torch.cuda.current_device() == self.device:
            self.launch(grid, stream, *args)
        else:
            with torch.cuda.device(self.device):
                self.launch(grid, stream, *args)


def prepare(source: Source, device: int, aligned: frozenset[str]) -> Launcher:
    """Compile `source` for CUDA device `device` and load it there. `aligned` names the buffers that are 16-byte aligned.

    Loading synchronizes, so a kernel must be prepared before a graph capture that uses it.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise UnsupportedDevice(device=f"cuda:{device} (compute capability {capability[0]}.{capability[1]})")
    misaligned = sorted({p.name for p in source.params if p.kind is ParamKind.TENSOR_MAP} - aligned)
    if misaligned:
        detail = f"TMA cannot read {', '.join(misaligned)}, which is not 16-byte aligned"
        raise CompileFailed(kernel=source.name, device=f"cuda:{device}", detail=detail)
    return _prepared(job(source, capability[0] * 10 + capability[1], aligned), device)


@cache
def _prepared(work: Job, device: int) -> Launcher:
    store = disk.store()
    try:
        with torch.cuda.device(device), compat.triton_cache_folder(str(store.kernels) if store else None, count_triton_lookup):
            kernel = build(work)
            launch = compat.triton_launcher(kernel)
    except Exception as error:  # Triton raises many unrelated types; each means that this kernel cannot run
        failure = DoesNotFit if compat.is_out_of_resources(error) else CompileFailed
        raise failure(kernel=work.name, device=f"cuda:{device}", detail=_last_line(error)) from error
    compat.touch_triton_cache(kernel)
    return Launcher(work, device, launch, kernel)


@cache
def _binary(work: Job, device: int) -> Binary:
    kernel = _prepared(work, device)._kernel
    registers, local_bytes, smem_bytes = compat.triton_usage(kernel)
    if local_bytes:  # the driver does not separate spills from other uses of local memory
        with suppress(OSError, RuntimeError):  # for example a full disk: then all local memory counts as spills
            return read_spills(kernel.asm["cubin"], kernel.asm["ptx"], smem_bytes, work.target)
    return summarize(Usage(registers, local_bytes, local_bytes), smem_bytes, kernel.asm["ptx"])


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
