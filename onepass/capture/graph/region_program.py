"""Lowers a region of a graph to a Program, and records where the Program's inputs come from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ... import compat
from ...errors import OverlappingElements, SymbolicAxis
from ...ir.expr import BY_TORCH
from ...ir.program import Buffer, Load, Program
from ...ir.size import Bindings, Size, product, sym
from ...ir.text import show
from ...stages import stage
from ..lowering.layout import check_layout
from ..lowering.lower import Blocked, Output, lower_subgraph
from ..lowering.schema import short_name
from ..lowering.source import UNKNOWN, user_line
from .regions import Region

MAX_NAMES = 3  # most op names in a region's name
MIN_DIGITS = 6  # fewest digits in the name of a symbol that stands for an expression


@dataclass(frozen=True)
class RegionProgram:
    """A lowered region. Buffers are named in0, in1, ..., out0, ... in the order of `inputs` and `outputs`."""

    region: Region
    program: Program  # keeps the lines of user code
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    expressions: Mapping[str, Any]  # each symbol of the Program as torch's expression
    hints: Bindings  # the symbols' values at trace time

    @cached_property
    def text(self) -> str:
        """The Program without lines of user code, so that equal regions of a model have equal text."""
        nodes = tuple(replace(n, src="") for n in self.program.nodes)
        return show(replace(self.program, nodes=nodes))

    @cached_property
    def key(self) -> str:
        """A hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]

    @property
    def id(self) -> str:
        """A short id for reports, the same in every process."""
        return self.key[:10]

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines of user code the region came from, each as `file.py:12` and its text."""
        found = (user_line(n.stack_trace) for n in self.region.nodes)
        return tuple(dict.fromkeys(line for line in found if line != UNKNOWN))


@stage("capturing a region", Blocked)
def lower_region(graph: fx.Graph, region: Region) -> RegionProgram:
    """Lower a region. Raises Blocked with nodes that cannot be part of a Program."""
    sizes = _Sizes()
    inputs = {node: _buffer(f"in{k}", node, "input", sizes) for k, node in enumerate(region.inputs)}
    outputs = tuple(Output(node, _buffer(f"out{k}", node, "output", sizes)) for k, node in enumerate(region.outputs))
    program = lower_subgraph(graph, _name(region), inputs, outputs, sizes.to_size)
    read = {n.buffer for n in program.nodes if isinstance(n, Load)}
    inputs_read = tuple(node for node, buffer in inputs.items() if buffer.name in read)
    names = {inputs[node].name: f"in{k}" for k, node in enumerate(inputs_read)}
    program = _renamed(program, names)
    free = {name: sizes.factors[name] for name in program.symbols}
    return RegionProgram(
        region,
        program,
        inputs_read,
        region.outputs,
        {name: f.expression for name, f in free.items()},
        {name: f.hint for name, f in free.items()},
    )


class _Sizes:
    """Converts torch's symbolic sizes to products of symbols. Each sum, quotient or maximum in them becomes one symbol."""

    def __init__(self) -> None:
        self.factors: dict[str, compat.SizeFactor] = {}

    def to_size(self, size: Any) -> Size | None:
        """A size as a product of symbols; None if it depends on data."""
        return self._named(compat.factored_size(size))

    def to_stride(self, size: Any) -> Size | None:
        """A stride as a product of symbols, assuming that the tensor has elements."""
        return self._named(compat.factored_size(size, nonempty=True))

    def _named(self, factored: tuple[int, tuple[compat.SizeFactor, ...]] | None) -> Size | None:
        if factored is None:
            return None
        coefficient, factors = factored
        return product([coefficient, *(sym(self._name(factor)) for factor in factors)])

    def _name(self, factor: compat.SizeFactor) -> str:
        """torch's name of a symbol. For an expression, the shortest unique prefix of its hash."""
        digest = hashlib.sha256(str(factor).encode()).hexdigest()
        candidates = (f"e{digest[:digits]}" for digits in range(MIN_DIGITS, len(digest) + 1))
        names = [str(factor)] if factor.is_symbol else candidates
        name = next(n for n in names if self.factors.get(n, factor) == factor)
        self.factors[name] = factor
        return name


def _buffer(name: str, node: fx.Node, role: str, sizes: _Sizes) -> Buffer:
    val: torch.Tensor = node.meta["val"]
    shape, strides = [sizes.to_size(s) for s in val.shape], [sizes.to_stride(s) for s in val.stride()]
    known = [s for s in (*shape, *strides) if s is not None]
    if len(known) < len(shape) + len(strides):
        raise Blocked((node,), SymbolicAxis(op=str(node.target), axis=str(tuple(val.shape)), where=user_line(node.stack_trace)))
    if role == "output":
        try:
            check_layout(node)
        except OverlappingElements as error:
            raise Blocked((node,), error) from error
    return Buffer(name, BY_TORCH[val.dtype], role, tuple(known[: len(shape)]), tuple(known[len(shape) :]))


def _renamed(program: Program, names: Mapping[str, str]) -> Program:
    """Rename the input buffers that are read and drop the others."""
    buffers = tuple(replace(b, name=names.get(b.name, b.name)) for b in program.buffers)
    nodes = tuple(replace(n, buffer=names[n.buffer]) if isinstance(n, Load) else n for n in program.nodes)
    return replace(program, buffers=buffers, nodes=nodes)


def _name(region: Region) -> str:
    """A name made of the ops the user called, as far as the graph records them."""
    found: dict[str, None] = {}
    for node in region.reductions:
        op = short_name(node.meta.get("original_aten") or node.target).removeprefix("aten.").removeprefix("prims.")
        found[re.sub(r"^(_fused_|native_|_)|_data$", "", re.sub(r"\W", "_", op))] = None
    return "_".join([*found][:MAX_NAMES]) or "region"
