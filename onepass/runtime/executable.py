"""Executable: a compiled plan bound to a device. Allocates, computes grids, launches; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ..codegen.source import GridDim, Param, ParamKind, Source
from ..ir.program import Buffer
from ..ir.size import Bindings, value
from . import interpret
from .compiled import Compiled
from .launch import Launcher, prepare

Tensors = Mapping[str, torch.Tensor]
Run = Callable[[Tensors, Bindings], None]


@dataclass(frozen=True)
class Executable:
    """Runs a plan's kernels in order on fresh outputs and temporaries."""

    compiled: Compiled
    device: torch.device
    fresh: tuple[Buffer, ...]  # outputs and temporaries
    runs: tuple[Run, ...]

    def __call__(self, inputs: Tensors, bindings: Bindings) -> dict[str, torch.Tensor]:
        """Compute the outputs. No synchronisation, no host reads: safe in graphs and on several streams."""
        tensors = dict(inputs)
        for buffer in self.fresh:
            tensors[buffer.name] = allocate(buffer, bindings, self.device)
        for run in self.runs:
            run(tensors, bindings)
        return {b.name: tensors[b.name] for b in self.fresh if b.role == "output"}


def allocate(buffer: Buffer, bindings: Bindings, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor with the layout a buffer promises."""
    shape = [value(s, bindings) for s in buffer.shape]
    strides = [value(s, bindings) for s in buffer.strides]
    return torch.empty_strided(shape, strides, dtype=buffer.dtype.torch, device=device)


def assemble(compiled: Compiled, device: torch.device, aligned: frozenset[str]) -> Executable:
    """Bind a compiled plan to a device: launchers on a GPU, the interpreter on CPU."""
    outputs = tuple(b for b in compiled.plan.program.buffers if b.role == "output")
    runs: tuple[Run, ...]
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        runs = tuple(_launching(s, prepare(s, index, aligned_of(s, aligned)), index) for s in compiled.sources)
    else:
        runs = tuple(partial(interpret.run, s) for s in compiled.sources)
    return Executable(compiled, device, (*outputs, *compiled.plan.temporaries), runs)


def aligned_of(source: Source, aligned_inputs: frozenset[str]) -> frozenset[str]:
    """The pointers of a kernel that start on 16 bytes: fresh tensors always do, inputs as the caller has them."""
    pointers = {p.name for p in source.params if p.kind is ParamKind.POINTER}
    return frozenset(pointers & (aligned_inputs | source.fresh))


def _launching(source: Source, launcher: Launcher, index: int) -> Run:
    """A closure over everything a launch needs but addresses and sizes."""
    getters = tuple(_getter(p) for p in source.params)
    grid = _grid(source.grid)
    stream_of = torch.cuda.current_stream

    def run(tensors: Tensors, bindings: Bindings) -> None:
        launcher(grid(bindings), tuple(get(tensors, bindings) for get in getters), stream_of(index).cuda_stream)

    return run


def _getter(param: Param) -> Callable[[Tensors, Bindings], int]:
    name = param.name
    match param.kind:
        case ParamKind.POINTER:
            return lambda tensors, _: tensors[name].data_ptr()
        case ParamKind.SIZE:
            return lambda _, bindings: bindings[name]
        case ParamKind.ZERO:
            return lambda *_: 0


def _grid(dims: tuple[GridDim, ...]) -> Callable[[Bindings], int]:
    """The launch grid; a constant where nothing varies."""
    try:
        constant = 1
        for dim in dims:
            constant *= dim.count({})
        return lambda _: constant
    except KeyError:
        return lambda bindings: _product(dims, bindings)


def _product(dims: tuple[GridDim, ...], bindings: Bindings) -> int:
    total = 1
    for dim in dims:
        total *= dim.count(bindings)
    return total
