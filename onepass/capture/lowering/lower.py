"""Lowering of an fx graph to a Program: the table of op handlers and the walk that applies it.

The table maps the exact name of an overload to a handler, which turns a Call into values of the Draft. Entries are defined in
pointwise, reductions, views and indexing; to add an op, add an entry there. Arguments that a handler does not read must hold
the schema's defaults, and results must have torch's dtype, rank and sizes. Otherwise the op is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ... import compat
from ...errors import ClosureTensor, IgnoredArgument, MetadataMismatch, OnepassError, UnsupportedOp, UnsupportedView
from ...ir.expr import BY_TORCH
from ...ir.program import Buffer, Program, Store
from ...ir.size import Size, Sym, mul, product
from .axes import Inexpressible
from .call import Call, Concat, Handler, Lowered, ToSize
from .draft import Draft, Tensor
from .indexing import INDEXING_OPS, materialized, piece_offsets
from .pointwise import POINTWISE
from .reductions import REDUCTIONS
from .schema import BoundArguments, bind_arguments, op_name
from .source import UNKNOWN, user_line
from .views import VIEWS

LOWERINGS: Mapping[str, Handler] = {**POINTWISE, **REDUCTIONS, **VIEWS, **INDEXING_OPS}


@dataclass(frozen=True)
class Output:
    """A tensor to store: the node that computes it and its output buffer."""

    node: fx.Node
    buffer: Buffer


class Blocked(Exception):
    """Nodes cannot be part of a Program; `error` says why."""

    def __init__(self, nodes: tuple[fx.Node, ...], error: OnepassError) -> None:
        super().__init__(f"{', '.join(map(str, nodes))}: {error}")
        self.nodes, self.error = nodes, error


def lower(graph: fx.Graph, name: str, inputs: Mapping[fx.Node, Buffer], outputs: tuple[Output, ...], to_size: ToSize) -> Program:
    """Lower a functional graph to the Program that computes `outputs` from `inputs`. `to_size` converts torch's symbolic ints."""
    try:
        return lower_subgraph(graph, name, inputs, outputs, to_size)
    except Blocked as blocked:
        raise blocked.error from None


def lower_subgraph(
    graph: fx.Graph, name: str, inputs: Mapping[fx.Node, Buffer], outputs: tuple[Output, ...], to_size: ToSize
) -> Program:
    """`lower` for part of a larger graph. Raises Blocked with the nodes that the caller can leave out to make it work."""
    walk = _Walk(graph, inputs, to_size)
    try:
        for output in outputs:
            walk.store(output)
        return walk.draft.finish(name, (*inputs.values(), *(o.buffer for o in outputs)))
    except OnepassError as error:
        raise Blocked(walk.blamed(), error) from error


class _Walk:
    """Lowers nodes on demand, each once."""

    def __init__(self, graph: fx.Graph, inputs: Mapping[fx.Node, Buffer], to_size: ToSize) -> None:
        self.draft = Draft()
        self.to_size = to_size
        self.env: dict[fx.Node, Any] = {node: self._input(buffer) for node, buffer in inputs.items()}
        self.owner = graph.owning_module
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.current = next(iter(graph.nodes))  # the node being lowered
        self.required: set[fx.Node] = set()  # what the value being lowered depends on

    def _input(self, buffer: Buffer) -> Tensor:
        dims = tuple(self.draft.atoms.dim(size) for size in buffer.shape)
        return self.draft.tensor(self.draft.load(buffer, self.draft.strides(dims, buffer.strides)), dims)

    def value(self, target: fx.Node) -> Any:
        """The lowered value of a node. The nodes it depends on are lowered first, in graph order."""
        self.required = required = set[fx.Node]()
        worklist = [target]
        while worklist:
            node = worklist.pop()
            if node not in self.env and node not in required:
                required.add(node)
                if self._size(node) is None:
                    worklist += node.all_input_nodes
        for node in sorted(required, key=self.order.__getitem__):
            self.env[node] = self._lower(node)
        return self.env[target]

    def blamed(self) -> tuple[fx.Node, ...]:
        """The nodes to leave out because the current one cannot be lowered: itself or, if it computes a number, or what a number
        comes from, the tensor ops that read the number."""
        found: dict[fx.Node, None] = {}
        seen = {self.current: None}
        worklist = [self.current]
        for node in worklist:  # grows
            if node.op == "call_function" and isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
                found[node] = None
                continue
            users = [user for user in node.users if user in self.required and user not in seen]
            seen |= dict.fromkeys(users)
            worklist += users
        return tuple(found) or (self.current,)

    def _lower(self, node: fx.Node) -> Any:
        """Lower one node. Nodes that are sizes become torch's own Size."""
        where = self._set_source_line(node)
        result_fake = node.meta.get("val")
        if node.op == "get_attr":
            return self._constant(node)
        if (size := self._size(node)) is not None:
            return size
        if node.target is operator.getitem:
            several, position = node.args
            return self.env[several][position]  # type: ignore[index]
        name = op_name(node.target)
        handler = LOWERINGS.get(name)
        if handler is None:
            raise UnsupportedOp(op=str(node.target), where=where)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        first = node.args[0] if node.args else None
        input_fake = first.meta.get("val") if isinstance(first, fx.Node) else None
        given = bind_arguments(node.target, args, kwargs)
        fakes = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
        torch_args = bind_arguments(node.target, *fakes).values
        call = Call(self.draft, name, str(node.target), where, given, input_fake, result_fake, self.to_size, torch_args)
        result = _apply(handler, call)
        _check_arguments(call)
        _check_form(call, result)
        return result

    def _size(self, node: fx.Node) -> Size | None:
        """The Size of a node that computes an int; None for other nodes."""
        result_fake = node.meta.get("val")
        return self.to_size(result_fake) if isinstance(result_fake, (int, torch.SymInt)) else None

    def _set_source_line(self, node: fx.Node) -> str:
        """Record the node's line of user code: for error messages, and for the Draft nodes added next."""
        self.current = node
        where = user_line(node.stack_trace)
        self.draft.src = "" if where == UNKNOWN else where
        return where

    def _constant(self, node: fx.Node) -> Tensor:
        """A scalar constant of the graph. Larger tensors come from outside the function and are refused."""
        tensor = compat.constant_tensor(operator.attrgetter(str(node.target))(self.owner))
        if tensor is None or tensor.dim() or tensor.dtype not in BY_TORCH:
            raise ClosureTensor(shape=list(node.meta["val"].shape))
        return Tensor(self.draft.const(tensor.item(), BY_TORCH[tensor.dtype]), ())

    def store(self, output: Output) -> None:
        """Store a value to its buffer; a concatenation piece by piece."""
        value = self.value(output.node)
        where = self._set_source_line(output.node)
        result = output.node.meta["val"]
        call = Call(self.draft, "store", "storing an output", where, BoundArguments({}), None, result, self.to_size)
        if isinstance(value, Concat):
            stride = output.buffer.strides[value.dim]
            for piece, start in zip(value.pieces, piece_offsets(call, value), strict=True):
                self._store(output.buffer, piece, mul(start, stride))
        else:
            self._store(output.buffer, value, 0)

    def _store(self, buffer: Buffer, tensor: Tensor, offset: Size) -> None:
        draft = self.draft
        strides = draft.strides(draft.dims(tensor), _nonzero_strides(buffer) if 0 in buffer.shape else buffer.strides)
        draft.add(Store(buffer.name, draft.cast(tensor.node, buffer.dtype), strides, offset), buffer.dtype)


def _nonzero_strides(buffer: Buffer) -> tuple[Size, ...]:
    """Strides for an empty buffer, whose own may be 0. A store drops axes with stride 0, and then would not look empty."""
    return tuple(product([size or 1 for size in buffer.shape[dim + 1 :]]) for dim in range(len(buffer.shape)))


def _apply(handler: Handler, call: Call) -> Any:
    """Call the handler. Values that cannot be written at the coordinates they need are refused."""
    try:
        if _is_piecewise(call):
            return _apply_to_pieces(handler, call)
        return handler(replace(call, args=call.args.mapped(lambda a: materialized(call, a) if isinstance(a, Concat) else a)))
    except Inexpressible:
        raise UnsupportedView(op=call.op, where=call.where, detail="it groups axes that are not contiguous in memory") from None


def _check_arguments(call: Call) -> None:
    """Refuse a call if its handler ignored an argument that matters."""
    for name in call.args.ignored():
        raise IgnoredArgument(op=call.op, argument=name, value=call.args.values[name], where=call.where)


def _check_form(call: Call, result: Any) -> None:
    """Refuse a result whose dtype, rank or known sizes differ from torch's."""
    several = isinstance(call.result_fake, (tuple, list))
    for fake, value in zip(call.result_fake, result, strict=True) if several else [(call.result_fake, result)]:
        if isinstance(fake, torch.Tensor):
            theirs = [fake.dtype, *(call.to_size(size) for size in fake.shape)]
            ours = [call.draft.dtype(_first(value).node).torch, *_shape(call, value)]
            unlike = (a != b for a, b in zip(theirs, ours, strict=False) if not (_is_dynamic(a) or _is_dynamic(b)))
            if len(theirs) != len(ours) or any(unlike):
                raise MetadataMismatch(op=call.op, theirs=theirs, ours=ours, where=call.where)


def _first(value: Lowered) -> Tensor:
    return value.pieces[0] if isinstance(value, Concat) else value


def _is_dynamic(size: object) -> bool:
    """Whether a size is symbolic or unknown. Equal symbolic sizes may be written in several ways, so they cannot be compared."""
    return size is None or isinstance(size, Sym)


def _shape(call: Call, value: Lowered) -> Iterator[Size | None]:
    pieces = value.pieces if isinstance(value, Concat) else (value,)
    for d in range(len(pieces[0].dims)):
        sizes = [call.draft.atoms.size(piece.dims[d]) for piece in pieces]
        if not (isinstance(value, Concat) and d == value.dim):
            yield sizes[0]
        else:
            yield None if any(map(_is_dynamic, sizes)) else sum(s for s in sizes if isinstance(s, int))


_COPIES = ("aten.clone.default", "aten.contiguous.default", "aten.alias.default", "aten.detach.default")


def _is_piecewise(call: Call) -> bool:
    """Whether an op treats the elements of one concatenation separately, so that the pieces can stay separate."""
    tensors = [a for a in call.args.values.values() if isinstance(a, (Tensor, Concat))]
    alone = len(tensors) == 1 and isinstance(tensors[0], Concat)
    return alone and (call.name in POINTWISE or call.name in _COPIES)


def _apply_to_pieces(handler: Handler, call: Call) -> Lowered:
    concat = next(a for a in call.args.values.values() if isinstance(a, Concat))

    def of(piece: Tensor) -> Tensor:
        result: Tensor = handler(replace(call, args=call.args.mapped(lambda a: piece if a is concat else a)))
        return result

    return Concat(concat.dim, tuple(map(of, concat.pieces)))
