"""Executable: kernels bound to a device. It allocates, computes grids and launches; it makes no decisions.

Everything that depends only on sizes is computed once per set of sizes (`bound`). A call then collects addresses, allocates
temporaries, reads the current stream, and launches. It never synchronizes or reads from the device, so it is safe in CUDA graphs
and on several streams.
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
from .compiled import Artifact
from .interpreter import gluon_model, interpret
from .launch import Launcher, TensorMap, prepare

Tensors = Mapping[str, Tensor]
Bound = Callable[[Sequence[Tensor], Sequence[Tensor]], None]  # (outputs, inputs), in the order of the Program's buffers

ALIGNMENT = 256  # bytes, of every temporary within the block they share
MAX_BOUND_SIZES = 1024  # sets of sizes whose launches are cached


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides and dtype of a tensor to allocate."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Executable:
    """Runs a plan's kernels in order."""

    artifact: Artifact
    device: torch.device
    launchers: tuple[Launcher, ...]  # empty on CPU, where kernels are interpreted
    _bound: dict[tuple[int, ...], Bound] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, inputs: Tensors, bindings: Bindings) -> dict[str, Tensor]:
        """Compute into fresh outputs."""
        outputs = [allocate(layout(b, bindings), self.device) for b in self.artifact.outputs]
        self.bound(bindings)(outputs, [inputs[name] for name in self._input_names])
        return dict(zip(self._output_names, outputs))

    def run_into(self, tensors: Tensors, bindings: Bindings) -> None:
        """Compute into outputs that the caller allocated. An output may alias an input only if `Artifact.in_place` allows it."""
        self.bound(bindings)([tensors[n] for n in self._output_names], [tensors[n] for n in self._input_names])

    def bound(self, bindings: Bindings) -> Bound:
        """A function that launches the kernels for the given sizes. Cached per set of sizes."""
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
        """The size symbols that kernels, grids and layouts depend on."""
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
    """A buffer's layout for given values of its symbols."""
    shape, strides = (tuple(value(s, bindings) for s in sizes) for sizes in (buffer.shape, buffer.strides))
    return Layout(shape, strides, buffer.dtype.torch)


def allocate(layout: Layout, device: torch.device) -> Tensor:
    """An uninitialized tensor. All memory that kernels write is allocated here, unless the caller allocated it."""
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=device)


def assemble(artifact: Artifact, device: torch.device, aligned: frozenset[str]) -> Executable:
    """Bind kernels to a device: loaded on a GPU, interpreted on CPU. `aligned` names the 16-byte aligned inputs and outputs."""
    if device.type != "cuda":
        return Executable(artifact, device, ())
    index = device.index if device.index is not None else torch.cuda.current_device()
    caller_allocated = frozenset(b.name for b in artifact.outputs)
    launchers = tuple(prepare(s, index, aligned_of(s, aligned, caller_allocated)) for s in artifact.sources)
    return Executable(artifact, torch.device("cuda", index), launchers)


def aligned_of(source: Source, aligned: frozenset[str], caller_allocated: frozenset[str] = frozenset()) -> frozenset[str]:
    """The pointer parameters of a kernel that are 16-byte aligned.

    Memory allocated here always is; inputs and `caller_allocated` outputs only if `aligned` names them.
    """
    pointers = {p.name for p in source.params if p.kind in (ParamKind.POINTER, ParamKind.TENSOR_MAP)}
    return frozenset(pointers & (aligned | (source.fresh - caller_allocated)))


# ---- interpreted -----------------------------------------------------------------------------------------------------------


def _bind_interpreter(executable: Executable, bindings: Bindings) -> Bound:
    artifact, device = executable.artifact, executable.device
    names = (*executable._output_names, *executable._input_names)
    temporaries, cleared = (
        [(b.name, layout(b, bindings)) for b in buffers] for buffers in (artifact.temporaries, artifact.cleared)
    )

    def run(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        tensors = dict(zip(names, (*outputs, *inputs), strict=True))
        tensors.update((name, allocate(shape, device)) for name, shape in temporaries)
        tensors.update((name, allocate(shape, device).zero_()) for name, shape in cleared)
        for source in artifact.sources:
            if source.gluon:
                gluon_model.run_source(source, tensors, bindings)
            else:
                interpret.run(source, tensors, bindings)

    return run


# ---- launched --------------------------------------------------------------------------------------------------------------


def _bind_launches(executable: Executable, bindings: Bindings) -> Bound:
    """Compute grids and size arguments ahead of time, so that a call only adds addresses and the stream.

    Every kernel argument is picked from one list of values: addresses of outputs, inputs and temporaries, then sizes, then the
    run-time zero argument. Buffers that must be zero come first among the temporaries, so that one small kernel clears all of them.
    """
    artifact, device, index = executable.artifact, executable.device, executable.device.index
    temporaries = (*artifact.cleared, *artifact.temporaries)
    words, offsets = pack_temporaries(temporaries, bindings)
    zeros, _ = pack_temporaries(artifact.cleared, bindings)
    block = Layout((words,), (1,), torch.float32)  # partial results are fp32
    constants = [*bindings.values(), 0]
    places = {name: i for i, name in enumerate((*executable._output_names, *executable._input_names))}
    places |= {b.name: len(places) + i for i, b in enumerate(temporaries)}
    places |= {f"size {name}": len(places) + i for i, name in enumerate((*bindings, ""))}
    launches = tuple(
        (launcher.launch, source.programs(bindings), argument_picker(source, places, bindings))
        for source, launcher in zip(artifact.sources, executable.launchers, strict=True)
        if source.programs(bindings)
    )
    stream_of, current_device = compat.raw_stream(), torch.cuda.current_device

    def queue(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        values = [t.data_ptr() for t in outputs]
        values += [t.data_ptr() for t in inputs]
        if words:
            memory = allocate(block, device)  # freed on return: later users of the memory are on this stream, behind the kernels
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


def pack_temporaries(temporaries: Sequence[Buffer], bindings: Bindings) -> tuple[int, tuple[int, ...]]:
    """Pack all temporaries into one block: its length in 4-byte words, and the byte offset of each buffer."""
    offsets, end = [], 0
    for buffer in temporaries:
        offsets.append(end)
        place = layout(buffer, bindings)
        length = sum((n - 1) * step for n, step in zip(place.shape, place.strides)) + 1 if 0 not in place.shape else 0
        end += -(-length * buffer.dtype.size // ALIGNMENT) * ALIGNMENT
    return end // 4, tuple(offsets)


def argument_picker(
    source: Source, places: Mapping[str, int], bindings: Bindings
) -> Callable[[list[int]], Sequence[int | TensorMap]]:
    """A function that picks a kernel's arguments, in parameter order, from the list of all values."""
    zero = places["size "]
    positions = []
    for param in source.params:
        match param.kind:
            case ParamKind.POINTER | ParamKind.TENSOR_MAP:
                positions.append(places[param.name])
            case ParamKind.SIZE:
                positions.append(places[f"size {param.name}"])
            case ParamKind.ZERO:
                positions.append(zero)
    if source.gluon:
        views = [None if p.view is None else p.view.resolved(bindings) for p in source.params]
        return lambda values: [values[at] if view is None else TensorMap(values[at], *view) for at, view in zip(positions, views)]
    if len(positions) == 1:
        only = positions[0]
        return lambda values: (values[only],)
    return itemgetter(*positions)
