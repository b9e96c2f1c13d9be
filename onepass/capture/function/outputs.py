"""What a traced function returns, as recipes: stored buffers, views of buffers or inputs, sizes and plain values."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from ...errors import InvalidShape, ResultOnOtherDevice, SymbolicAxis, UnsupportedDtype
from ...ir.expr import BY_TORCH, DTYPES
from ...ir.program import Buffer
from ...ir.size import Size, product
from ..lowering.call import ToSize
from ..lowering.layout import check_layout, shares_elements
from ..lowering.lower import Output
from ..lowering.source import user_line


@dataclass(frozen=True, slots=True)
class Stored:
    """An output buffer of the Program."""

    buffer: str


@dataclass(frozen=True, slots=True)
class PassThrough:
    """An input, returned unchanged."""

    leaf: int


@dataclass(frozen=True, slots=True)
class View:
    """A view of an output buffer or of an input."""

    base: Stored | PassThrough
    read_as: torch.dtype | None  # another dtype of the same width to reinterpret the elements as
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size


@dataclass(frozen=True, slots=True)
class Number:
    """A size of an input."""

    size: Size


@dataclass(frozen=True, slots=True)
class Literal:
    """Any value that is not a tensor."""

    value: Any


Recipe: TypeAlias = Stored | PassThrough | View | Number | Literal

MAX_NUMEL = 2**62
MAX_RANK = 20


def _viewed(node: fx.Node) -> fx.Node | None:
    """The argument that a node is a view of, None if the node has memory of its own."""
    if node.op != "call_function":
        return None
    source = node.args[0] if node.args else None
    if node.target is operator.getitem:
        assert isinstance(source, fx.Node)
        return source if _viewed(source) is not None else None  # one of several results of an op that is no view
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and schema.returns and schema.returns[0].alias_info is not None
    return source if is_view and isinstance(source, fx.Node) else None


def storage_root(leaf: fx.Node) -> fx.Node:
    """The first node of a chain of views whose memory holds the same bits: equal element width, negation and conjugation."""
    root, node = leaf, _viewed(leaf)
    while node is not None and (not _is_tensor(node) or _same_bits(leaf.meta["val"], node.meta["val"])):
        root = node if _is_tensor(node) else root
        node = _viewed(node)
    return root


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.element_size(), a.is_neg(), a.is_conj()) == (b.element_size(), b.is_neg(), b.is_conj())


@dataclass(frozen=True)
class OutputPlan:
    """What to store, and how to build each leaf of the result from it."""

    stored: tuple[Output, ...]
    recipes: tuple[Recipe, ...]


def plan_outputs(leaves: Sequence[Any], inputs: Mapping[fx.Node, int], reserved: frozenset[str], to_size: ToSize) -> OutputPlan:
    """Plan the outputs for the leaves of a result. `inputs` maps placeholders to positions among the argument leaves."""
    planner = _Planner(inputs, reserved, to_size, Counter(storage_root(n) for n in leaves if _is_tensor(n)), _device(inputs))
    recipes = tuple(planner.recipe(leaf) for leaf in leaves)
    return OutputPlan(tuple(planner.stored.values()), recipes)


def _device(inputs: Mapping[fx.Node, int]) -> torch.device:
    return next((node.meta["val"].device for node in inputs), torch.device("cpu"))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor)


@dataclass
class _Planner:
    inputs: Mapping[fx.Node, int]
    reserved: frozenset[str]
    to_size: ToSize
    leaf_count: Counter[fx.Node]  # number of result leaves that are views of each node
    device: torch.device  # the device of the arguments
    stored: dict[fx.Node, Output] = field(default_factory=dict)

    def recipe(self, leaf: Any) -> Recipe:
        if not isinstance(leaf, fx.Node):
            return Literal(leaf)
        if not _is_tensor(leaf):
            return Number(self.size(leaf.meta["val"], leaf))
        root = storage_root(leaf)
        if root in self.inputs:
            return self.view(leaf, root, PassThrough(self.inputs[root]))
        if leaf.meta["val"].dtype == root.meta["val"].dtype and self.is_slice(leaf, root):
            return self.store(leaf)
        return self.view(leaf, root, self.store(root))

    def is_slice(self, leaf: fx.Node, root: fx.Node) -> bool:
        """Whether to store only a slice, because no other leaf sees the rest. Expanded values keep the view: an output
        buffer cannot have stride 0."""
        fewer = product(list(self.shape(leaf))) != product(list(self.shape(root)))
        repeats = any(stride == 0 and size != 1 for size, stride in zip(self.shape(leaf), self.strides(leaf), strict=True))
        return fewer and not repeats and self.leaf_count[root] == 1 and not shares_elements(leaf.meta["val"])

    def view(self, leaf: fx.Node, root: fx.Node, base: Stored | PassThrough) -> Recipe:
        if leaf is root:
            return base
        start = leaf.meta["val"].storage_offset() - root.meta["val"].storage_offset()
        own, theirs = leaf.meta["val"].dtype, root.meta["val"].dtype
        return View(base, None if own == theirs else own, self.shape(leaf), self.strides(leaf), self.size(start, leaf))

    def store(self, node: fx.Node) -> Stored:
        if node not in self.stored:
            name = f"out{len(self.stored)}"
            while name in self.reserved:
                name += "_"
            dtype, shape = node.meta["val"].dtype, self.shape(node)
            if dtype not in BY_TORCH:
                where = user_line(node.stack_trace)
                raise UnsupportedDtype(what="An output", dtype=dtype, where=where, supported=", ".join(DTYPES))
            if node.meta["val"].device != self.device:
                raise ResultOnOtherDevice(device=node.meta["val"].device, expected=self.device, where=user_line(node.stack_trace))
            check_shape("An output", shape)
            check_layout(node)
            buffer = Buffer(name, BY_TORCH[dtype], "output", shape, self.strides(node))
            self.stored[node] = Output(node, buffer)
        return Stored(self.stored[node].buffer.name)

    def shape(self, node: fx.Node) -> tuple[Size, ...]:
        return tuple(self.size(s, node) for s in node.meta["val"].shape)

    def strides(self, node: fx.Node) -> tuple[Size, ...]:
        return tuple(self.size(s, node) for s in node.meta["val"].stride())

    def size(self, size: Any, node: fx.Node) -> Size:
        found = self.to_size(size) if isinstance(size, (int, torch.SymInt)) else None
        if found is None:
            raise SymbolicAxis(op="an output", axis=str(size), where=user_line(node.stack_trace))
        return found


def check_shape(what: str, shape: Sequence[Size]) -> None:
    """Refuse shapes with too many dims or elements."""
    if len(shape) > MAX_RANK:
        raise InvalidShape(what=what, shape=list(shape), detail=f"at most {MAX_RANK} dims are supported; reshape it first")
    total = product(list(shape))
    if isinstance(total, int) and total >= MAX_NUMEL:
        raise InvalidShape(what=what, shape=list(shape), detail=f"at most {MAX_NUMEL - 1} elements are supported")
