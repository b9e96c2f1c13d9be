"""Replace the nodes of a region by a call of the region op. The graph stays functional and in topological order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from .. import compat
from ..capture.graph.effects import is_ordered
from ..capture.graph.region_program import RegionProgram
from ..errors import RewriteFailed
from .node_order import sort_nodes


class Rewriter:
    """Rewrites one graph: replaces its regions by calls, one after the other."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._moved: dict[fx.Node, fx.Node] = {}  # replaced node -> its replacement
        self._erased: set[fx.Node] = set()
        self._old = set(graph.nodes)

    def replace(self, part: RegionProgram, text: str, functional: bool = False) -> fx.Node:
        """Insert a call of the region op after the last node of a region, and replace the region's outputs by its results.

        `text` is the encoded region (region_spec.py). If this fails, the graph is unchanged.
        """
        inserter = _NodeInserter(self.graph, part, tuple(self._moved.get(node, node) for node in part.inputs))
        with inserter.all_or_nothing():
            call, results = inserter.functional(text) if functional else inserter.filling(text)
        for old, new in zip(part.outputs, results, strict=True):
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
            self._moved[old] = new
        self._erase(part)
        return call

    def reuse(self, part: RegionProgram, call: fx.Node, taken: Sequence[fx.Node | None]) -> None:
        """Write output k to the memory of the input `taken[k]` instead of new memory, where that is not None."""
        empties = list(call.kwargs["_all_bases"])  # type: ignore[arg-type]
        inserter = _NodeInserter(self.graph, part, tuple(call.kwargs["ins"]), before=call)  # type: ignore[arg-type]
        with inserter.all_or_nothing():
            bases = [
                inserter.shaped(node, out.meta["val"]) if node is not None else empty
                for node, out, empty in zip(taken, part.outputs, empties, strict=True)
            ]
        call.kwargs = {**call.kwargs, "_all_bases": bases}
        for k, (node, empty) in enumerate(zip(taken, empties, strict=True)):
            if node is not None:
                self.graph.erase_node(empty)
            if node is not None and node.op == "placeholder":
                self._write_back(node, call, k)

    def _write_back(self, node: fx.Node, call: fx.Node, k: int) -> None:
        """Copy output k of a call back to a graph input.

        This tells torch that the call may write to the input directly, and torch removes the copy. Otherwise the call would write
        to a clone.
        """
        result = next(user for user in call.users if user.target is operator.getitem and user.args[1] == k + 1)
        with self.graph.inserting_before(self.graph.output_node()):
            copied = self.graph.call_function(torch.ops.aten.copy_.default, (node, result))
        copied.meta["val"] = node.meta["val"]

    def _erase(self, part: RegionProgram) -> None:
        """Erase a region's nodes, and views and constants that only it used. Regions may share nodes that both compute."""
        own = [node for node in part.region.nodes if node not in self._erased]
        waiting = [user for node in own for user in node.users] + own
        while waiting:
            node = waiting.pop()
            if node in self._erased or node not in self._old or node.users or node.op != "call_function" or is_ordered(node):
                continue
            self._erased.add(node)
            waiting += node.all_input_nodes
            self.graph.erase_node(node)

    def tidy(self) -> None:
        """Restore topological order, and otherwise keep the order of nodes."""
        sort_nodes(self.graph)


def cyclic_regions(graph: fx.Graph, parts: Sequence[RegionProgram]) -> frozenset[int]:
    """Positions of regions to decline so that no region has to run both before and after one of its users."""
    out: set[int] = set()
    while (cyclic := _first_cyclic(graph, {k: part for k, part in enumerate(parts) if k not in out})) is not None:
        out.add(cyclic)
    return frozenset(out)


def _first_cyclic(graph: fx.Graph, parts: Mapping[int, RegionProgram]) -> int | None:
    """The first region whose inputs depend on its own outputs, when each region is a single call."""
    maker = {node: k for k, part in parts.items() for node in part.outputs}
    needs: dict[fx.Node | int, set[fx.Node | int]] = {node: {maker.get(n, n) for n in node.all_input_nodes} for node in graph.nodes}
    needs |= {k: {maker.get(n, n) for n in part.inputs} for k, part in parts.items()}
    users: dict[fx.Node | int, list[fx.Node | int]] = {}
    for each, needed in needs.items():
        for one in needed:
            users.setdefault(one, []).append(each)
    ready = [each for each, needed in needs.items() if not needed]
    for each in ready:  # grows
        for user in users.get(each, ()):
            needs[user].discard(each)
            if not needs[user]:
                ready.append(user)
    return next((k for k in sorted(parts) if _depends_on_itself(k, needs)), None)


def _depends_on_itself(each: fx.Node | int, needs: Mapping[fx.Node | int, set[fx.Node | int]]) -> bool:
    seen, waiting = set[fx.Node | int](), [*needs[each]]
    for one in waiting:  # grows
        if one not in seen:
            seen.add(one)
            waiting += needs[one]
    return each in seen


class _NodeInserter:
    """Inserts new nodes after a region, in order, each with its fake value."""

    def __init__(self, graph: fx.Graph, part: RegionProgram, inputs: tuple[fx.Node, ...], before: fx.Node | None = None) -> None:
        self.graph, self.part, self.inputs = graph, part, inputs
        self.first: fx.Node = before.prev if before is not None else part.region.nodes[-1]  # nodes are inserted after it
        self.last = self.first
        self.trace = (before or self.last).stack_trace or ""
        self._sizes: dict[str, fx.Node] = {}  # by the text of torch's expression

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Remove all added nodes if adding one fails."""
        try:
            yield
        except Exception:
            for node in reversed(self._added()):
                self.graph.erase_node(node)
            raise

    def _added(self) -> list[fx.Node]:
        found, node = [], self.first
        while node is not self.last:
            node = node.next
            found.append(node)
        return found

    def filling(self, text: str) -> tuple[fx.Node, list[fx.Node]]:
        """Call an auto-functionalized op that fills empty tensors, so that Inductor plans their memory."""
        op = torch.ops.onepass.region.default
        bases = [self.empty(node.meta["val"]) for node in self.part.outputs]
        vals = tuple(node.meta["val"] for node in self.part.outputs)
        target, kwargs = compat.auto_functionalized_call("outs", bases)
        call = self.add(target, (op,), {**kwargs, **self.arguments(text)}, (None, *vals))
        return call, [self.add(operator.getitem, (call, k + 1), {}, val) for k, val in enumerate(vals)]

    def functional(self, text: str) -> tuple[fx.Node, list[fx.Node]]:
        """Call an op that returns new tensors."""
        vals = [node.meta["val"] for node in self.part.outputs]
        call = self.add(torch.ops.onepass.region_out.default, (), self.arguments(text), vals)
        return call, [self.add(operator.getitem, (call, k), {}, val) for k, val in enumerate(vals)]

    def arguments(self, text: str) -> dict[str, Any]:
        """The arguments of the call, except the outputs."""
        sizes = [self.size(self.part.expressions[name]) for name in self.part.program.symbols]
        return {"ins": list(self.inputs), "sizes": sizes, "region": text}

    def empty(self, val: torch.Tensor) -> fx.Node:
        """Allocate an output in the layout that the graph specifies."""
        shape, strides = ([self.extent(s) for s in sizes] for sizes in (val.shape, val.stride()))
        return self.add(torch.ops.aten.empty_strided.default, (shape, strides), {"dtype": val.dtype, "device": val.device}, val)

    def shaped(self, node: fx.Node, val: torch.Tensor) -> fx.Node:
        """View a contiguous value in the shape of `val`, which has as many elements."""
        own = node.meta["val"]
        if [*map(str, own.shape)] == [*map(str, val.shape)]:
            return node
        shape = [self.extent(s) for s in val.shape]
        return self.add(torch.ops.aten.view.default, (node, shape), {}, own.view(val.shape))

    def extent(self, size: Any) -> fx.Node | int:
        """A node for a (symbolic) size."""
        return size if isinstance(size, int) else self.size(size.node.expr)

    def size(self, expression: Any) -> fx.Node:
        """A node for a size expression: an existing node, or arithmetic on the nodes of its symbols."""
        text = str(expression)
        if text not in self._sizes:
            self._sizes[text] = self._find(text) or self._computed(expression)
        return self._sizes[text]

    def _computed(self, expression: Any) -> fx.Node:
        if expression.is_Symbol:
            raise RewriteFailed(detail=f"no node of the graph has the value of the size {expression}")
        known = {str(symbol): self.size(symbol) for symbol in sorted(expression.free_symbols, key=str)}
        end = self.last.next
        try:
            with self.graph.inserting_before(end):
                made: fx.Node = compat.emit_size(self.graph, expression, known.__getitem__)
        except NotImplementedError as error:
            raise RewriteFailed(detail=f"torch cannot compute a size with graph nodes ({error})") from error
        finally:
            self.last = end.prev
        return made

    def _find(self, expression: str) -> fx.Node | None:
        """A graph input that is this size, or a dim of an input tensor of the region or the graph."""
        placeholders = self.graph.find_nodes(op="placeholder")
        node: fx.Node
        for node in placeholders:
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt) and compat.size_expression(val) == expression:
                return node
        for tensor in (*self.inputs, *placeholders):
            val = tensor.meta.get("val")
            for dim, size in enumerate(val.shape if isinstance(val, torch.Tensor) else ()):
                if compat.size_expression(size) == expression:
                    return self.add(torch.ops.aten.sym_size.int, (tensor, dim), {}, size)
        return None

    def add(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> fx.Node:
        """Insert a call after the last added node."""
        with self.graph.inserting_after(self.last):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        node.meta["stack_trace"] = self.trace
        self.last = node
        return node
