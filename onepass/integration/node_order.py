"""The order of a rewritten graph: users behind what they use, ordered ops as they were, and nothing moved across a write."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import fx

from ..capture.effects import is_ordered, writes
from ..errors import RewriteFailed


def sort_nodes(graph: fx.Graph) -> None:
    """Put users behind what they use, otherwise leaving the order as it is."""
    nodes = list(graph.nodes)
    done: set[fx.Node] = set()
    last: fx.Node | None = None
    for stretch in _between_writes(nodes):
        for node in _sorted(stretch, done):
            if last is not None:
                last.append(node)
            last = node
    graph.lint()


def _between_writes(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """The nodes in stretches that nothing leaves: a write alone, or all that stand between two."""
    stretch: list[fx.Node] = []
    for node in nodes:
        if writes(node):
            yield stretch
            yield [node]
            stretch = []
        else:
            stretch.append(node)
    yield stretch


def _sorted(stretch: Sequence[fx.Node], done: set[fx.Node]) -> list[fx.Node]:
    """A stretch in an order that works, the earliest node first; `done` are those before it, and then those in it as well."""
    at = {node: i for i, node in enumerate(stretch)}
    follows = _following(stretch)
    missing = [sum(source not in done for source in node.all_input_nodes) for node in stretch]
    for nexts in follows.values():
        missing[nexts] += 1
    ready = [i for i, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    found: list[fx.Node] = []
    while ready:
        place = heapq.heappop(ready)
        node = stretch[place]
        found.append(node)
        freed = [at[user] for user in node.users if user in at] + ([follows[place]] if place in follows else [])
        for k in freed:
            missing[k] -= 1
            if missing[k] == 0:
                heapq.heappush(ready, k)
    if len(found) < len(stretch):
        raise RewriteFailed(detail="a region lies both before and after one of its users, or of two ops whose order counts")
    done.update(found)
    return found


def _following(stretch: Sequence[fx.Node]) -> dict[int, int]:
    """Which ordered op comes next after each, by their places."""
    ordered = [i for i, node in enumerate(stretch) if is_ordered(node)]
    return dict(pairwise(ordered))
