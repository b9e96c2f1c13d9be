"""Topological sort of a rewritten graph that keeps the order of ordered ops, and moves nothing across a write."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import fx

from ..capture.graph.effects import is_ordered, writes
from ..errors import RewriteFailed


def sort_nodes(graph: fx.Graph) -> None:
    """Move users after their inputs, and otherwise keep the order."""
    nodes = list(graph.nodes)
    done: set[fx.Node] = set()
    last: fx.Node | None = None
    for segment in _between_writes(nodes):
        for node in _sorted(segment, done):
            if last is not None:
                last.append(node)
            last = node
    graph.lint()


def _between_writes(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Split the nodes into segments that no node may leave: a single write, or all nodes between two writes."""
    segment: list[fx.Node] = []
    for node in nodes:
        if writes(node):
            yield segment
            yield [node]
            segment = []
        else:
            segment.append(node)
    yield segment


def _sorted(segment: Sequence[fx.Node], done: set[fx.Node]) -> list[fx.Node]:
    """A segment in topological order, earliest node first. `done` holds the nodes before it; the segment's nodes are added."""
    at = {node: i for i, node in enumerate(segment)}
    follows = _following(segment)
    missing = [sum(source not in done for source in node.all_input_nodes) for node in segment]
    for following in follows.values():
        missing[following] += 1
    ready = [i for i, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    found: list[fx.Node] = []
    while ready:
        place = heapq.heappop(ready)
        node = segment[place]
        found.append(node)
        freed = [at[user] for user in node.users if user in at] + ([follows[place]] if place in follows else [])
        for k in freed:
            missing[k] -= 1
            if missing[k] == 0:
                heapq.heappush(ready, k)
    if len(found) < len(segment):
        raise RewriteFailed(detail="a region would have to run both before and after one of its users, or after a later ordered op")
    done.update(found)
    return found


def _following(segment: Sequence[fx.Node]) -> dict[int, int]:
    """Map the position of each ordered op to the position of the next one."""
    ordered = [i for i, node in enumerate(segment) if is_ordered(node)]
    return dict(pairwise(ordered))
