"""Shrink a failing graph: drop outputs and steps, simplify sizes, types, layouts and contents; the failure stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .graph import Graph, Input

MAX_ATTEMPTS = 400


def shrunk(graph: Graph, fails: Callable[[Graph], bool]) -> Graph:
    """The smallest graph found for which `fails` holds, in at most MAX_ATTEMPTS calls."""
    attempts, found = 0, True
    while found and attempts < MAX_ATTEMPTS:
        found = False
        for simpler in simplifications(graph):
            attempts += 1
            if attempts > MAX_ATTEMPTS:
                break
            if fails(simpler):
                graph, found = simpler, True
                break
    return graph


def simplifications(graph: Graph) -> Iterator[Graph]:
    """Slightly simpler graphs, the largest simplifications first."""
    if len(graph.outputs) > 1:
        for k in range(len(graph.outputs)):
            yield replace(graph, outputs=(graph.outputs[k],)).pruned()
        for k in range(len(graph.outputs)):
            yield replace(graph, outputs=graph.outputs[:k] + graph.outputs[k + 1 :]).pruned()
    yield from _shorter(graph)
    for k, spec in enumerate(graph.inputs):
        for simpler in _plainer(spec):
            yield replace(graph, inputs=(*graph.inputs[:k], simpler, *graph.inputs[k + 1 :]))
    yield from _smaller(graph)


def _shorter(graph: Graph) -> Iterator[Graph]:
    """Graphs with one value replaced by one of its operands, or with that operand stored instead."""
    base = len(graph.inputs)
    for k, step in enumerate(graph.steps):
        for arg in dict.fromkeys(step.args):
            renamed = {base + k: arg}
            steps = tuple(replace(s, args=tuple(renamed.get(a, a) for a in s.args)) for s in graph.steps)
            outputs = tuple(dict.fromkeys(renamed.get(o, o) for o in graph.outputs))
            shorter = replace(graph, steps=steps, outputs=outputs).pruned()
            if shorter.steps and len(shorter.steps) < len(graph.steps):
                yield shorter
    for k in range(len(graph.steps) - 1):
        yield replace(graph, outputs=(base + k,)).pruned()


def _plainer(spec: Input) -> Iterator[Input]:
    for field, plain in (("layout", "contiguous"), ("content", "normal"), ("dtype", "f32")):
        if spec.is_tensor and getattr(spec, field) != plain:
            changes: dict[str, Any] = {field: plain}
            yield replace(spec, **changes)


def _smaller(graph: Graph) -> Iterator[Graph]:
    """One extent smaller, in all inputs that have it; or one leading dim less."""
    extents = sorted({s for i in graph.inputs for s in i.shape if s > 1}, reverse=True)
    for extent in extents:
        for less in dict.fromkeys((2, extent // 2, extent - 1)):
            if 0 < less < extent:
                yield replace(
                    graph, inputs=tuple(replace(i, shape=tuple(less if s == extent else s for s in i.shape)) for i in graph.inputs)
                )
    deepest = max((len(i.shape) for i in graph.inputs), default=0)
    if deepest:
        yield replace(
            graph, inputs=tuple(replace(i, shape=i.shape[1:] if len(i.shape) == deepest else i.shape) for i in graph.inputs)
        )
