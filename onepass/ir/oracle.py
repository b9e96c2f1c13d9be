"""Interpret a Program with torch: in float64, as the reference of all tests, or in its own types, as eager torch would.

Each value is a tensor with one dimension per axis of the Program, of size 1 where the value does not vary. In float64 mode, casts
between float types do nothing, so the results have no rounding in between. Reductions run the Monoid records themselves, so every
comparison also tests the records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import torch

from ..errors import BadArgument
from .expr import BY_TORCH, OPS, DType, as_dtype, compute_dtype
from .monoid import MONOIDS, Algebra, Monoid, State, Value
from .program import Buffer, Const, Index, Load, Op, Program, Reduce, Result, Store, Strides
from .size import Bindings, value


def evaluate(
    program: Program, inputs: Mapping[str, torch.Tensor], bindings: Bindings, roundings: torch.Generator | None = None
) -> dict[str, torch.Tensor]:
    """Compute all output buffers, by name, with the shape and strides of each buffer. Float buffers are float64.

    With `roundings`, a generator of random numbers, every computed value is off by about one rounding of float64.
    """
    device = next((t.device for t in inputs.values()), torch.device("cpu"))
    memory = {b.name: _place(b, inputs, bindings, device) for b in program.buffers}
    where = (program, bindings, device, memory)
    _all_nodes(_Run(*where) if roundings is None else _Perturbed(*where, roundings))
    return {b.name: memory[b.name] for b in program.buffers if b.role == "output"}


def evaluate_into(program: Program, tensors: Mapping[str, torch.Tensor], bindings: Bindings) -> None:
    """Fill the outputs among `tensors` from the inputs, in the Program's own types and without synchronizing with the device.

    No output may share memory with an input.
    """
    _all_nodes(_Rounding(program, bindings, next(iter(tensors.values())).device, tensors))


def _all_nodes(run: "_Run") -> None:
    values: list[torch.Tensor | tuple[torch.Tensor, ...]] = []
    for i in range(len(run.program.nodes)):
        values.append(run.node(i, values))


def _exact(dtype: DType) -> torch.dtype:
    """The type in which the float64 reference keeps values of `dtype`."""
    return torch.float64 if dtype.is_float else dtype.torch


def _place(buffer: Buffer, inputs: Mapping[str, torch.Tensor], bindings: Bindings, device: torch.device) -> torch.Tensor:
    """The caller's tensor for an input, new memory for other buffers. Floats that no Store writes stay NaN."""
    if buffer.role == "input":
        return inputs[buffer.name]
    sizes = [value(s, bindings) for s in buffer.shape]
    strides = [value(s, bindings) for s in buffer.strides]
    empty = torch.empty_strided(sizes, strides, dtype=_exact(buffer.dtype), device=device)
    return empty.fill_(nan if buffer.dtype.is_float else 0)


@dataclass(frozen=True)
class _TorchAlgebra(Algebra):
    """Runs a monoid on tensors. `axes` are the folded dimensions and `count` is the number of elements in them."""

    axes: tuple[int, ...]
    count: int

    def emit(self, op: str, *args: Value) -> torch.Tensor:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        like = next((t for t in reversed(tensors) if op != "where" or t.dtype != torch.bool), None)
        device = tensors[0].device if tensors else None
        return OPS[op].reference(*(a if isinstance(a, torch.Tensor) else _number(a, like, device) for a in args))

    def fold(self, kind: str, value: Value) -> Value:
        if not isinstance(value, torch.Tensor):
            return value * self.count if kind == "sum" else value**self.count if kind == "prod" else value
        if not self.axes:
            return value
        match kind:
            case "sum":
                return value.sum(self.axes, keepdim=True, dtype=value.dtype)
            case "prod":
                for axis in self.axes:
                    value = value.prod(axis, keepdim=True, dtype=value.dtype)
                return value
            case "max":
                return value.amax(self.axes, keepdim=True)
            case _:
                return value.amin(self.axes, keepdim=True)


def _number(number: float | int, like: torch.Tensor | None, device: torch.device | None) -> torch.Tensor:
    """A Python number of a monoid definition as a tensor, in the type of the other operand."""
    if like is not None:
        return torch.tensor(number, dtype=like.dtype, device=device)
    return torch.tensor(number, dtype=torch.int32 if isinstance(number, int) else torch.float64, device=device)


def reduce(monoid: Monoid, args: tuple[torch.Tensor, ...], dims: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Reduce `args` (all of one shape) over some dimensions with a monoid. The dimensions stay, with size 1."""
    count = 1
    for dim in dims:
        count *= args[0].shape[dim]
    algebra = _TorchAlgebra(dims, count)
    shape = [1 if d in dims else n for d, n in enumerate(args[0].shape)]
    state = monoid.merge(algebra, *monoid.lift(algebra, *args)) if count else _empty_state(monoid, args[0], shape)
    return tuple(_as_result(r, like=args[0], shape=shape) for r in monoid.finalize(algebra, *state))


def _empty_state(monoid: Monoid, like: torch.Tensor, shape: list[int]) -> State:
    """The state of a reduction over no elements."""
    dtype = BY_TORCH[like.dtype]
    numbers = zip(monoid.identity(dtype), monoid.state_dtypes(dtype), strict=True)
    return tuple(torch.full(shape, number, dtype=d.torch, device=like.device) for number, d in numbers)


def _as_result(result: Value, like: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """A result as a tensor, even if the monoid computed a Python number (such as an element count)."""
    tensor = result if isinstance(result, torch.Tensor) else torch.tensor(result, dtype=like.dtype, device=like.device)
    return tensor.expand(shape)


@dataclass(frozen=True)
class _Run:
    """One evaluation in float64: the context that nodes need besides their operands."""

    program: Program
    bindings: Bindings
    device: torch.device
    memory: Mapping[str, torch.Tensor]

    def node(self, i: int, values: list[Any]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The value of node `i`; a tuple for a Reduce."""
        match self.program.nodes[i]:
            case Load() as load:
                return self.load(load, values)
            case Const(value=number, dtype=dtype, scale=scale):
                scaled = number if scale == 1 else number * value(scale, self.bindings)
                shape = [1] * len(self.program.axes)
                return torch.full(shape, as_dtype(scaled, dtype), dtype=dtype.torch, device=self.device).to(self.held(dtype))
            case Index(axes=axes, dtype=dtype):
                return self.index(axes).to(self.held(dtype))
            case Op(name="cast", args=(arg,), dtype=dtype):
                return self.cast(values[arg], dtype)
            case Op(name=name, args=args):
                return OPS[name].reference(*(values[a] for a in args))
            case Reduce() as node:
                return self.reduce(node, values)
            case Result(reduce=owner, k=k):
                results: tuple[torch.Tensor, ...] = values[owner]
                return results[k]
            case Store(buffer=name, value=stored, strides=strides, offset=offset):
                target = self.window(self.memory[name], strides, value(offset, self.bindings))
                return target.copy_(values[stored])

    def held(self, dtype: DType) -> torch.dtype:
        """The torch type in which values of `dtype` are kept."""
        return _exact(dtype)

    def cast(self, arg: torch.Tensor, dtype: DType) -> torch.Tensor:
        return arg.to(self.held(dtype))

    def extent(self, axis: str) -> int:
        return value(self.program.axis[axis].extent, self.bindings)

    def sizes(self, axes: frozenset[str]) -> list[int]:
        """The shape of a value that varies over `axes`."""
        return [self.extent(a.name) if a.name in axes else 1 for a in self.program.axes]

    def window(self, tensor: torch.Tensor, strides: Strides, offset: int) -> torch.Tensor:
        """A view of the tensor's memory with one dimension per axis of the Program."""
        step = dict(strides)
        steps = [value(step.get(a.name, 0), self.bindings) for a in self.program.axes]
        return torch.as_strided(tensor, self.sizes(frozenset(step)), steps, tensor.storage_offset() + offset)

    def load(self, load: Load, values: list[Any]) -> torch.Tensor:
        """The value of a Load, including loads with looked-up coordinates."""
        tensor, offset = self.memory[load.buffer], value(load.offset, self.bindings)
        exact = self.held(self.program.buffer[load.buffer].dtype)
        if not tensor.numel():  # no result depends on it
            return torch.zeros(self.sizes(frozenset(axis for axis, _ in load.strides)), dtype=exact, device=self.device)
        if not load.indexed:
            return self.window(tensor, load.strides, offset).to(exact)
        at = torch.full([1] * len(self.program.axes), offset, dtype=torch.int64, device=self.device)
        reach = offset + 1
        for axis, stride in load.strides:
            at = at + self.index((axis,)) * value(stride, self.bindings)
            reach += (self.extent(axis) - 1) * value(stride, self.bindings)
        for gather in load.indexed:
            found, extent = values[gather.index].to(torch.int64), value(gather.extent, self.bindings)
            self.check_range(load, found, extent)
            at = at + found * value(gather.stride, self.bindings)
            reach += (extent - 1) * value(gather.stride, self.bindings)
        return torch.as_strided(tensor, (max(reach, 0),), (1,), tensor.storage_offset())[at].to(exact)

    def check_range(self, load: Load, found: torch.Tensor, extent: int) -> None:
        """Raise if an index lies outside its dimension, where the load would read unrelated memory."""
        if bool(((found < 0) | (found >= extent)).any()):
            raise BadArgument(detail=f"An index into {load.buffer} lies outside [0, {extent}). Clamp or mask the index first.")

    def index(self, axes: tuple[str, ...]) -> torch.Tensor:
        """Row-major positions over `axes`."""
        sizes = [self.extent(a) for a in axes]
        count = torch.arange(torch.Size(sizes).numel(), device=self.device).reshape(sizes)
        order = [a.name for a in self.program.axes if a.name in axes]
        return count.permute([axes.index(a) for a in order]).reshape(self.sizes(frozenset(axes)))

    def reduce(self, node: Reduce, values: list[Any]) -> tuple[torch.Tensor, ...]:
        """All results of a Reduce. Arguments that do not vary over a reduced axis are broadcast along it."""
        varied = frozenset(node.axes).union(*(self.program.dims[a] for a in node.args))
        args = tuple(values[a].expand(self.sizes(varied)) for a in node.args)
        dims = tuple(d for d, a in enumerate(self.program.axes) if a.name in node.axes)
        return reduce(MONOIDS[node.monoid], args, dims)


@dataclass(frozen=True)
class _Perturbed(_Run):
    """One evaluation in float64 in which results of ops, and both arguments and results of reductions, are rounded otherwise."""

    random: torch.Generator

    def node(self, i: int, values: list[Any]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        result = super().node(i, values)
        if isinstance(result, tuple):
            return tuple(map(self.off, result))
        return self.off(result) if isinstance(self.program.nodes[i], Op) else result

    def reduce(self, node: Reduce, values: list[Any]) -> tuple[torch.Tensor, ...]:
        return super().reduce(node, [self.off(v) if i in node.args else v for i, v in enumerate(values)])

    def off(self, exact: torch.Tensor) -> torch.Tensor:
        """A float64 value with each element changed by one rounding, up or down. Other values are returned as they are."""
        if exact.dtype != torch.float64:
            return exact
        sign = torch.randint(0, 2, exact.shape, generator=self.random).to(exact) * 2 - 1
        return exact * (1 + torch.finfo(torch.float64).eps * sign)


@dataclass(frozen=True)
class _Rounding(_Run):
    """One evaluation in the types that eager would use, with the rounding of every cast."""

    def held(self, dtype: DType) -> torch.dtype:
        return compute_dtype(dtype).torch

    def cast(self, arg: torch.Tensor, dtype: DType) -> torch.Tensor:
        return arg.to(dtype.torch).to(self.held(dtype))

    def check_range(self, load: Load, found: torch.Tensor, extent: int) -> None:
        """Skip the check: reading values on the host would synchronize the stream."""
