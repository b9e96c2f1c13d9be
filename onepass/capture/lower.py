"""Graph -> Program: the table of ops, and the walk that applies it.

A row is an aten or prims name (overloads share a row) and a handler from a Call to values of the Draft. Rows live by
kind in pointwise, reductions, views and lookups; adding an op is adding a row there.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .. import compat
from ..errors import ClosureTensor, OnepassError, UnsupportedOp, UnsupportedView
from ..ir.expr import BY_TORCH
from ..ir.program import Buffer, Program, Store
from ..ir.size import Size, mul
from .call import Call, Concat, Handler, Lowered, ToSize
from .draft import Draft, Tensor
from .lookups import LOOKUPS, joined, starts
from .pointwise import POINTWISE
from .reductions import REDUCTIONS
from .source import UNKNOWN, user_line
from .substitute import Inexpressible
from .views import VIEWS

TABLE: Mapping[str, Handler] = {**POINTWISE, **REDUCTIONS, **VIEWS, **LOOKUPS}


def op_name(target: Any) -> str:
    """`aten.add` for any overload of it; the plain name of a Python function."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(target, "__name__", str(target))


@dataclass(frozen=True)
class Output:
    """A tensor to be stored: the node that computes it and the buffer it goes to."""

    node: fx.Node
    buffer: Buffer


class Blocked(Exception):
    """A node that cannot be part of a Program, and why."""

    def __init__(self, node: fx.Node, error: OnepassError) -> None:
        super().__init__(f"{node}: {error}")
        self.node, self.error = node, error


def lower(graph: fx.Graph, name: str, inputs: Mapping[fx.Node, Buffer], outputs: tuple[Output, ...],
          to_size: ToSize) -> Program:
    """The Program that computes some nodes of a functional graph from its inputs. `to_size` reads torch's symbolic ints."""
    try:
        return lower_part(graph, name, inputs, outputs, to_size)
    except Blocked as blocked:
        raise blocked.error from None


def lower_part(graph: fx.Graph, name: str, inputs: Mapping[fx.Node, Buffer], outputs: tuple[Output, ...],
               to_size: ToSize) -> Program:
    """The same for a part of a larger graph, which may do without a node: what cannot be lowered is Blocked."""
    walk = _Walk(graph, inputs, to_size)
    try:
        for output in outputs:
            walk.store(output)
        return walk.draft.finish(name, (*inputs.values(), *(o.buffer for o in outputs)))
    except OnepassError as error:
        raise Blocked(walk.current, error) from error


class _Walk:
    """Lowers nodes as they are asked for, each once."""

    def __init__(self, graph: fx.Graph, inputs: Mapping[fx.Node, Buffer], to_size: ToSize) -> None:
        self.draft = Draft()
        self.to_size = to_size
        self.env: dict[fx.Node, Any] = {node: self._input(buffer) for node, buffer in inputs.items()}
        self.owner = graph.owning_module
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.current = next(iter(graph.nodes))  # the node being lowered

    def _input(self, buffer: Buffer) -> Tensor:
        dims = tuple(self.draft.atoms.dim(size) for size in buffer.shape)
        return self.draft.tensor(self.draft.load(buffer, self.draft.strides(dims, buffer.strides)), dims)

    def value(self, wanted: fx.Node) -> Any:
        """The lowered value of a node; what it needs is lowered first, in the graph's order."""
        needed, waiting = set[fx.Node](), [wanted]
        while waiting:
            node = waiting.pop()
            if node not in self.env and node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        for node in sorted(needed, key=self.order.__getitem__):
            self.env[node] = self._lower(node)
        return self.env[wanted]

    def _lower(self, node: fx.Node) -> Any:
        """One node. Sizes need no lowering: they are what torch says they are."""
        where = self._at(node)
        gives = node.meta.get("val")
        if node.op == "get_attr":
            return self._constant(node)
        if isinstance(gives, (int, torch.SymInt)) and (size := self.to_size(gives)) is not None:
            return size
        if node.target is operator.getitem:
            several, position = node.args
            return self.env[several][position]  # type: ignore[index]
        name = op_name(node.target)
        handler = TABLE.get(name)
        if handler is None:
            raise UnsupportedOp(op=str(node.target), where=where)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        first = node.args[0] if node.args else None
        takes = first.meta.get("val") if isinstance(first, fx.Node) else None
        call = Call(self.draft, name, str(node.target), where, tuple(args), dict(kwargs), takes, gives, self.to_size)
        return _applied(handler, call)

    def _at(self, node: fx.Node) -> str:
        """The line of user code a node came from; what is drafted next says so, if it is known."""
        self.current = node
        where = user_line(node.stack_trace)
        self.draft.src = "" if where == UNKNOWN else where
        return where

    def _constant(self, node: fx.Node) -> Tensor:
        """A number written in the function as a tensor; anything larger was not written there."""
        tensor = compat.constant_tensor(operator.attrgetter(str(node.target))(self.owner))
        if tensor is None or tensor.dim() or tensor.dtype not in BY_TORCH:
            raise ClosureTensor(shape=list(node.meta["val"].shape))
        return Tensor(self.draft.const(tensor.item(), BY_TORCH[tensor.dtype]), ())

    def store(self, output: Output) -> None:
        """Write a value to its buffer, a concatenation piece by piece."""
        value = self.value(output.node)
        where = self._at(output.node)
        call = Call(self.draft, "store", "storing an output", where, (), {}, None, output.node.meta["val"], self.to_size)
        if isinstance(value, Concat):
            stride = output.buffer.strides[value.dim]
            for piece, start in zip(value.pieces, starts(call, value), strict=True):
                self._store(output.buffer, piece, mul(start, stride))
        else:
            self._store(output.buffer, value, 0)

    def _store(self, buffer: Buffer, tensor: Tensor, offset: Size) -> None:
        draft = self.draft
        strides = draft.strides(draft.dims(tensor), buffer.strides)
        draft.add(Store(buffer.name, draft.cast(tensor.node, buffer.dtype), strides, offset), buffer.dtype)


def _applied(handler: Handler, call: Call) -> Any:
    """The handler's result; a value that has no form at the coordinates it needs is refused."""
    try:
        if _is_piecewise(call):
            return _by_pieces(handler, call)
        whole = fx.node.map_aggregate((call.args, call.kwargs), lambda a: joined(call, a) if isinstance(a, Concat) else a)
        return handler(replace(call, args=tuple(whole[0]), kwargs=dict(whole[1])))
    except Inexpressible:
        raise UnsupportedView(op=call.op, where=call.where, detail="it regroups elements that lie apart") from None


_COPIES = ("aten.clone", "aten.contiguous", "aten.alias", "aten.detach")


def _is_piecewise(call: Call) -> bool:
    """Whether the op treats each element of one concatenation alone, so that its pieces may stay apart."""
    tensors = [a for a in call.args if isinstance(a, (Tensor, Concat))]
    alone = len(tensors) == 1 and isinstance(tensors[0], Concat)
    return alone and (call.name in POINTWISE or call.name in _COPIES)


def _by_pieces(handler: Handler, call: Call) -> Lowered:
    concat = next(a for a in call.args if isinstance(a, Concat))
    pieces = (handler(replace(call, args=tuple(p if a is concat else a for a in call.args))) for p in concat.pieces)
    return Concat(concat.dim, tuple(pieces))
