"""Traces a function on example arguments to a Captured Program.

The function runs once on fake tensors. The ops it ran, decomposed to a small set, are lowered to the ir. Anything a trace would
freeze into the kernel (a tensor from outside, a random draw, a value read on the host) is refused when its op runs.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from keyword import iskeyword
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx

from ... import compat
from ...errors import (
    ChangesState,
    ClosureTensor,
    DataDependent,
    Mutation,
    NotTraceable,
    Randomness,
    SymbolicAxis,
    UnsupportedReturn,
)
from ...ir.expr import BY_TORCH
from ...ir.program import Buffer
from ...ir.size import Size, Sym, product, sym
from ...stages import external_code, stage
from ..lowering.foreach import per_tensor_calls
from ..lowering.lower import lower
from ..lowering.source import user_frame, user_line
from .arguments import Arguments, Layout, Layouts, candidate_layouts, check, flatten
from .captured import Captured, Leaf, PlainLeaf, TensorLeaf
from .known_functions import is_immutable
from .outputs import plan_outputs
from .state import State
from .state_walk import state_of


@stage("capturing a function")
def capture(fn: Callable[..., Any], args: tuple[Any, ...], *, dynamic: bool | None = None, state: State | None = None) -> Captured:
    """Trace `fn(*args)` and lower it to a Program.

    By default, row counts become symbols if the whole function allows it. `dynamic=False` fixes every size; `dynamic=True` requires
    symbols. `state` is what the function reads besides its arguments, if already known.
    """
    compat.warm_up_tracing()
    arguments = flatten(fn, args)
    check(arguments)
    roots = (fn, *arguments.objects)
    known = state is not None and len(roots) == 1 and state.unchanged()
    found = state if known and state is not None else state_of(roots)
    for _ in range(2):  # the first run may store values for later runs (a cache); that alone is no reason to refuse
        captured = _traced(fn, arguments, dynamic, found)
        if found.unchanged():
            return captured
        change, found = found.first_change(), state_of(roots)
    raise ChangesState(where=change.where if change else "a torch mode")


def _traced(fn: Callable[..., Any], arguments: Arguments, dynamic: bool | None, state: State) -> Captured:
    """Capture with as many symbols as the function allows."""
    *symbolic, fixed = candidate_layouts([t for _, t in arguments.tensors])
    if dynamic and not symbolic:
        raise SymbolicAxis(op="the function", axis="every axis of its arguments", where=_name(fn))
    for layouts in symbolic if dynamic is not False else ():
        try:
            return _captured(fn, arguments, layouts, state)
        except Exception:
            # Whatever failed with these symbols, the trace with fewer symbols decides.
            if dynamic and layouts is symbolic[-1]:
                raise
    return _captured(fn, arguments, fixed, state)


def _captured(fn: Callable[..., Any], arguments: Arguments, layouts: Layouts, state: State) -> Captured:
    trace = _trace(fn, arguments, layouts, state.may_set_data)
    placeholders = [n for n in trace.graph.nodes if n.op == "placeholder"]
    buffers = {
        node: _buffer(arguments.names[position], tensor, layout)
        for node, (position, tensor), layout in zip(placeholders, arguments.tensors, trace.layouts, strict=True)
    }
    positions = {node: position for node, (position, _) in zip(placeholders, arguments.tensors, strict=True)}
    outputs = plan_outputs(trace.leaves, positions, frozenset(arguments.names), trace.to_size)
    program = lower(trace.graph, _name(fn), buffers, outputs.stored, trace.to_size)
    return Captured(
        fn, program, _leaves(arguments, trace.layouts), arguments.spec, state, trace.guards, outputs.recipes, trace.result_spec
    )


def _name(fn: Callable[..., Any]) -> str:
    """The function's name, made an identifier."""
    name = re.sub(r"\W+", "_", getattr(fn, "__name__", type(fn).__name__)).strip("_")
    return name if name.isidentifier() and not iskeyword(name) else "fused"


def _buffer(name: str, tensor: torch.Tensor, layout: Layout) -> Buffer:
    return Buffer(name, BY_TORCH[tensor.dtype], "input", layout.shape, layout.strides)


def _leaves(arguments: Arguments, layouts: Sequence[Layout]) -> tuple[Leaf, ...]:
    """The guards on the leaves of the arguments."""
    found: list[Leaf] = [PlainLeaf(leaf) for leaf in arguments.leaves]
    for (position, t), layout in zip(arguments.tensors, layouts, strict=True):
        name = arguments.names[position]
        found[position] = TensorLeaf(name, t.dtype, t.device, layout.shape, layout.strides, t.requires_grad)
    return tuple(found)


@dataclass(frozen=True)
class _Trace:
    """A functional graph and what tracing found out."""

    graph: fx.Graph
    leaves: tuple[Any, ...]  # of the result: graph nodes, or plain values
    result_spec: Any
    layouts: tuple[Layout, ...]  # of the tensor arguments, after symbols found equal were unified
    guards: tuple[str, ...]
    to_size: Callable[[Any], Size | None]


def _trace(fn: Callable[..., Any], arguments: Arguments, layouts: Layouts, may_set_data: bool) -> _Trace:
    mode = compat.fake_mode()
    symbols = {name: compat.fake_symbol(mode, hint) for name, hint in layouts.hints.items()}
    fakes = _fakes(arguments, layouts.each, symbols, mode)
    traced = _Traced(fn, arguments, may_set_data)
    module = _functional(_graph_of(traced, fakes, mode), fakes, mode)
    names = {str(s.node.expr): name for name, s in symbols.items() if not isinstance(s.node.expr, int)}

    def to_size(size: Any) -> Size | None:
        factors = compat.size_factors(size)
        return None if factors is None else product([factors[0], *(sym(names[n]) for n in factors[1])])

    written = set(re.findall(r"\w+", traced.text()))
    if "FakeTensor" in written:
        raise DataDependent(detail="the text of a tensor is part of the result")
    for name, symbol in symbols.items():
        if not isinstance(to_size(symbol), Sym) or str(symbol.node.expr) in written:
            raise SymbolicAxis(op="the function", axis=f"{name} ({layouts.hints[name]} here)", where=_name(fn))
    final = tuple(_final_layout(fake, to_size) for fake in fakes)
    nodes = iter(next(n for n in module.graph.nodes if n.op == "output").args[0])
    leaves = tuple(next(nodes) if _is_traced(leaf) else leaf for leaf in traced.leaves)
    return _Trace(module.graph, leaves, traced.spec, final, compat.shape_guards(mode, names), to_size)


def _final_layout(fake: torch.Tensor, to_size: Callable[[Any], Size | None]) -> Layout:
    shape, strides = [to_size(s) for s in fake.shape], [to_size(s) for s in fake.stride()]
    sizes = [s for s in (*shape, *strides) if s is not None]
    if len(sizes) < len(shape) + len(strides):
        raise SymbolicAxis(op="the function", axis=str(tuple(fake.shape)), where="its arguments")
    return Layout(tuple(sizes[: len(shape)]), tuple(sizes[len(shape) :]))


def _fakes(arguments: Arguments, layouts: Sequence[Layout], symbols: dict[str, Any], mode: Any) -> list[torch.Tensor]:
    """A fake tensor for each tensor argument. Each has its own memory, because the Program must hold for any arguments."""

    def torch_size(size: Size) -> Any:
        if isinstance(size, int):
            return size
        total = size.coef
        for name in size.names:
            total = total * symbols[name]
        return total

    fakes = []
    with mode:
        for (_, tensor), layout in zip(arguments.tensors, layouts, strict=True):
            shape, strides = ([torch_size(s) for s in sizes] for sizes in (layout.shape, layout.strides))
            fake = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
            fakes.append(fake.requires_grad_(tensor.requires_grad))
    return fakes


_RETURNABLE = (type, FunctionType, BuiltinFunctionType, enum.Enum)  # may be returned: shared by everyone anyway


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat))


class _Traced:
    """The function over a flat list of tensors. Records the structure of the result."""

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, may_set_data: bool) -> None:
        self.fn, self.arguments, self.may_set_data = fn, arguments, may_set_data
        self.leaves: list[Any] = []
        self.spec: Any = None

    def __call__(self, *tensors: torch.Tensor) -> list[Any]:
        leaves = list(self.arguments.leaves)
        for (position, _), tensor in zip(self.arguments.tensors, tensors, strict=True):
            leaves[position] = tensor
        args = compat.pytree_unflatten(leaves, self.arguments.spec)
        with_data = compat.forbid_data_assignment(_refuse_data) if self.may_set_data else nullcontext()
        with compat.intercept_ops(_check_op, per_tensor_calls), with_data, external_code():
            result = self.fn(*args)
        self.check_arguments(args, leaves)
        self.leaves, self.spec = compat.pytree_flatten(result)
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor) and not compat.is_fake(leaf):
                raise ClosureTensor(shape=list(leaf.shape))
            if not _is_traced(leaf) and not is_immutable(leaf) and not isinstance(leaf, _RETURNABLE):
                raise UnsupportedReturn(kind=type(leaf).__name__)
        return [leaf for leaf in self.leaves if _is_traced(leaf)]

    def text(self) -> str:
        """The strings in the result. Where the function wrote a size or a tensor into one, it shows what tracing calls it."""
        return " ".join([repr(self.spec), *(leaf for leaf in self.leaves if isinstance(leaf, str))])

    def runs_in_eager(self) -> bool:
        """Whether the function works in eager mode although tracing failed. Exceptions it raises there propagate.

        It runs on copies of the arguments, if they are small. Real tensors are needed because fake ones raise other errors."""
        if sum(tensor.numel() for _, tensor in self.arguments.tensors) > MAX_EAGER_ELEMENTS:
            return False
        leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.arguments.leaves]
        with torch.no_grad(), external_code():
            self.fn(*compat.pytree_unflatten(leaves, self.arguments.spec))
        return True

    def check_arguments(self, args: Any, leaves: list[Any]) -> None:
        """Refuse a function that changed its arguments without an op."""
        now, spec = compat.pytree_flatten(args)
        if spec != self.arguments.spec or any(a is not b for a, b in zip(now, leaves, strict=True)):
            raise Mutation(op=_name(self.fn), what="a list or dict among its arguments", where="its own code")
        if any(leaves[position].requires_grad != given.requires_grad for position, given in self.arguments.tensors):
            raise Mutation(op="requires_grad_", what="an argument", where=_name(self.fn))


def _refuse_data() -> None:
    raise Mutation(op="Setting .data", what="a tensor", where=user_line(user_frame()))


@stage("checking the ops of a function")
def _check_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Refuse ops whose result a trace would freeze. Returns the line of user code otherwise."""
    frame = user_frame()
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise Randomness(op=str(op), where=user_line(frame))
    leaves, _ = compat.pytree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if _needs_values(op, tensors):
        raise DataDependent(detail=f"{op} at {user_line(frame)}")
    outside = next((t for t in tensors if not compat.is_fake(t)), None)
    if outside is not None and op is not torch.ops.aten.lift_fresh.default:  # lift_fresh: torch.tensor(1.0) inside the function
        raise ClosureTensor(shape=list(outside.shape))
    return frame


def _needs_values(op: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an op's result or shape depends on the values of its arguments. For indexing, only masks do."""
    if torch.Tag.dynamic_output_shape in op.tags:
        return op is not torch.ops.aten.index.Tensor or any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])
    return torch.Tag.data_dependent_output in op.tags


# torch's messages when the values of a fake tensor are read without an op: .numpy(), .tolist(), tensor_split by a tensor.
MAX_EAGER_ELEMENTS = 1 << 16  # most elements of the arguments for which a failed trace is retried in eager mode
_NO_VALUES = ("not supported for tensor subclasses", "data is not allocated yet")


def _graph_of(traced: _Traced, fakes: list[torch.Tensor], mode: Any) -> fx.GraphModule:
    try:
        graph: fx.GraphModule = compat.trace_graph(traced, fakes, mode)
        return graph
    except compat.data_dependent_errors() as error:
        raise DataDependent(detail=str(error).splitlines()[0]) from error
    except RecursionError:  # eager would recurse as well, and trace again at every level
        raise
    except (RuntimeError, IndexError, ValueError) as error:
        runs_eagerly = traced.runs_in_eager()
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        if any(words in str(error) for words in _NO_VALUES):
            raise DataDependent(detail=detail) from error
        if runs_eagerly:
            raise NotTraceable(detail=detail.rstrip(".") + ".") from error
        raise


def _functional(module: fx.GraphModule, fakes: list[torch.Tensor], mode: Any) -> fx.GraphModule:
    """The graph without in-place ops. Writes to inputs are refused; writes to the function's own values are rewritten."""
    inputs = {compat.storage_key(node.meta["val"]) for node in module.graph.nodes if node.op == "placeholder"}
    writes = [(node, target) for node in module.graph.nodes for target in _written(node)]
    for node, target in writes:
        if isinstance(target.meta.get("val"), torch.Tensor) and compat.storage_key(target.meta["val"]) in inputs:
            raise Mutation(op=str(node.target), what="a tensor", where=user_line(node.stack_trace))
    return compat.functionalized(module, fakes, mode) if writes else module


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node modifies in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    flat = [n for each in written for n in (each if isinstance(each, list | tuple) else [each])]
    return [n for n in flat if isinstance(n, fx.Node)]
