"""Executable: kernels bound to a device. Allocates, computes grids, launches; decides nothing.

What depends on sizes alone is computed once for each set of sizes (`bound`); a call then takes addresses, memory for
temporaries and the current stream, and launches. No synchronisation, no host reads: safe in graphs and on several streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter

import torch
from torch import Tensor

from .. import compat
from ..codegen.source import ParamKind, Source
from ..ir.program import Buffer
from ..ir.size import Bindings, symbols, value
from . import gluon_model, interpret
from .compiled import Artifact
from .launch import Launcher, TensorMap, prepare

Tensors = Mapping[str, Tensor]
Bound = Callable[[Sequence[Tensor], Sequence[Tensor]], None]  # (outputs, inputs), in the order of the Program's buffers

ALIGNMENT = 256  # bytes: every temporary starts on such a boundary of the block they share
MAX_BOUND_SIZES = 1024  # sets of sizes whose launches are remembered


@dataclass(frozen=True, slots=True)
class Layout:
    """An uninitialised tensor to be."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Executable:
    """Runs a plan's kernels in order."""

    artifact: Artifact
    device: torch.device
    launchers: tuple[Launcher, ...]  # none on CPU: there the text is interpreted
    _bound: dict[tuple[int, ...], Bound] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, inputs: Tensors, bindings: Bindings) -> dict[str, Tensor]:
        """Compute into fresh outputs."""
        outputs = [allocate(layout(b, bindings), self.device) for b in self.artifact.outputs]
        self.bound(bindings)(outputs, [inputs[name] for name in self._input_names])
        return dict(zip(self._output_names, outputs))

    def run_into(self, tensors: Tensors, bindings: Bindings) -> None:
        """Compute into outputs that the caller allocated; an output may share memory with an input only if plans allow it."""
        self.bound(bindings)([tensors[n] for n in self._output_names], [tensors[n] for n in self._input_names])

    def bound(self, bindings: Bindings) -> Bound:
        """The kernels for given sizes, with all that follows from sizes computed beforehand."""
        key = tuple([bindings[name] for name in self._symbols])
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= MAX_BOUND_SIZES:
                self._bound.clear()
            bind = _bind_launches if self.launchers else _bind_interpreter
            found = self._bound[key] = bind(self, dict(zip(self._symbols, key)))
        return found

    @cached_property
    def _symbols(self) -> tuple[str, ...]:
        """What kernels, grids and layouts depend on."""
        sizes = [s for b in (*self.artifact.buffers, *self.artifact.cleared) for s in (*b.shape, *b.strides)]
        sizes += [dim.extent for source in self.artifact.sources for dim in source.grid]
        arguments = {p.name for s in self.artifact.sources for p in s.params if p.kind is ParamKind.SIZE}
        return tuple(sorted(arguments.union(*(symbols(size) for size in sizes))))

    @cached_property
    def _input_names(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.artifact.inputs)

    @cached_property
    def _output_names(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.artifact.outputs)


def layout(buffer: Buffer, bindings: Bindings) -> Layout:
    """A buffer's layout once its symbols are bound."""
    shape, strides = (tuple(value(s, bindings) for s in sizes) for sizes in (buffer.shape, buffer.strides))
    return Layout(shape, strides, buffer.dtype.torch)


def allocate(wanted: Layout, device: torch.device) -> Tensor:
    """An uninitialised tensor. All memory that kernels write and callers did not bring comes from here."""
    return torch.empty_strided(wanted.shape, wanted.strides, dtype=wanted.dtype, device=device)


def assemble(artifact: Artifact, device: torch.device, aligned: frozenset[str]) -> Executable:
    """Bind kernels to a device: loaded on a GPU, interpreted on CPU. `aligned` names the inputs and outputs that are."""
    if device.type != "cuda":
        return Executable(artifact, device, ())
    index = device.index if device.index is not None else torch.cuda.current_device()
    caller_allocated = frozenset(b.name for b in artifact.outputs)
    launchers = tuple(prepare(s, index, aligned_of(s, aligned, caller_allocated)) for s in artifact.sources)
    return Executable(artifact, torch.device("cuda", index), launchers)


def aligned_of(source: Source, aligned: frozenset[str], caller_allocated: frozenset[str] = frozenset()) -> frozenset[str]:
    """The pointers of a kernel that start on 16 bytes.

    Memory from here always does; inputs, and outputs that are `brought` by the caller, only where `aligned` names them.
    """
    pointers = {p.name for p in source.params if p.kind in (ParamKind.POINTER, ParamKind.TENSOR_MAP)}
    return frozenset(pointers & (aligned | (source.fresh - caller_allocated)))


# ---- interpreted -----------------------------------------------------------------------------------------------------------


def _bind_interpreter(executable: Executable, bindings: Bindings) -> Bound:
    artifact, device = executable.artifact, executable.device
    names = (*executable._output_names, *executable._input_names)
    temporaries, cleared = ([(b.name, layout(b, bindings)) for b in some] for some in (artifact.temporaries, artifact.cleared))

    def run(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        tensors = dict(zip(names, (*outputs, *inputs), strict=True))
        tensors.update((name, allocate(wanted, device)) for name, wanted in temporaries)
        tensors.update((name, allocate(wanted, device).zero_()) for name, wanted in cleared)
        for source in artifact.sources:
            if source.gluon:
                gluon_model.run_source(source, tensors, bindings)
            else:
                interpret.run(source, tensors, bindings)

    return run


# ---- launched --------------------------------------------------------------------------------------------------------------


def _bind_launches(executable: Executable, bindings: Bindings) -> Bound:
    """Launches with grids and size arguments computed; a call only adds addresses and the stream.

    Every argument is picked from one list: addresses of outputs, inputs and temporaries, then sizes and the unknown zero. Memory
    that must be 0 comes first among the temporaries, so that one small kernel clears all of it.
    """
    artifact, device, index = executable.artifact, executable.device, executable.device.index
    temporaries = (*artifact.cleared, *artifact.temporaries)
    words, offsets = _pack(temporaries, bindings)
    zeros, _ = _pack(artifact.cleared, bindings)
    block = Layout((words,), (1,), torch.float32)  # partial results are fp32
    constants = [*bindings.values(), 0]
    positions = {name: i for i, name in enumerate((*executable._output_names, *executable._input_names))}
    positions |= {b.name: len(positions) + i for i, b in enumerate(temporaries)}
    positions |= {f"size {name}": len(positions) + i for i, name in enumerate((*bindings, ""))}
    launches = tuple(
        (launcher.launch, source.programs(bindings), _argument_picker(source, positions, bindings))
        for source, launcher in zip(artifact.sources, executable.launchers, strict=True) if source.programs(bindings))
    stream_of, current_device = compat.raw_stream(), torch.cuda.current_device

    def queue(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        values = [t.data_ptr() for t in outputs]
        values += [t.data_ptr() for t in inputs]
        if words:
            memory = allocate(block, device)  # given back at the end: the stream's later users wait for these kernels
            if zeros:
                memory[:zeros].zero_()
            start = memory.data_ptr()
            values += [start + offset for offset in offsets]
        values += constants
        stream = stream_of(index)
        for launch, grid, pick in launches:
            launch(grid, stream, *pick(values))

    def run(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        if current_device() == index:
            queue(outputs, inputs)
        else:
            with torch.cuda.device(index):
                queue(outputs, inputs)

    return run


def _pack(temporaries: Sequence[Buffer], bindings: Bindings) -> tuple[int, tuple[int, ...]]:
    """One block for all temporaries: its length in 4-byte words, and where each starts, in bytes."""
    offsets, end = [], 0
    for buffer in temporaries:
        offsets.append(end)
        wanted = layout(buffer, bindings)
        last = sum((n - 1) * step for n, step in zip(wanted.shape, wanted.strides)) + 1 if 0 not in wanted.shape else 0
        end += -(-last * buffer.dtype.size // ALIGNMENT) * ALIGNMENT
    return end // 4, tuple(offsets)


def _argument_picker(source: Source, positions: Mapping[str, int], bindings: Bindings) -> Callable[[list[int]], Sequence[int | TensorMap]]:
    """From the list of all values, a kernel's arguments in parameter order."""
    zero = positions["size "]
    positions = []
    for param in source.params:
        match param.kind:
            case ParamKind.POINTER | ParamKind.TENSOR_MAP:
                positions.append(positions[param.name])
            case ParamKind.SIZE:
                positions.append(positions[f"size {param.name}"])
            case ParamKind.ZERO:
                positions.append(zero)
    if source.gluon:
        views = [None if p.view is None else p.view.resolved(bindings) for p in source.params]
        return lambda values: [values[at] if view is None else TensorMap(values[at], *view)
                               for at, view in zip(positions, views)]
    if len(positions) == 1:
        only = positions[0]
        return lambda values: (values[only],)
    return itemgetter(*positions)
