"""Which nodes of a post-grad graph become one region: convex, with at least one reduction, seen through views.

Groups grow along the values between nodes, then reductions that read the same data join, then arithmetic at the rim that
Inductor would compute inside a neighbouring kernel with fewer bytes is given back, and arithmetic that costs no more bytes to
repeat than to read is repeated. Bytes decide everywhere: a value that crosses a region's rim is written once and read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from .boundary import Rim, Shares
from .dataflow import Net
from .grouping import Groups
from .node_kinds import is_reduction, tensors_of

MOST_NODES = 120  # of one region: planning stays well under a second
SMALL = 8  # a value this many times smaller than the data on both its sides does not hold them together
KINDRED = 4  # reductions that read the same data join if that data is at least 1/4 of what either moves


@dataclass(frozen=True)
class Region:
    """Nodes that become one Program, the values it reads in order of use, and the values others need of it."""

    nodes: tuple[fx.Node, ...]  # arithmetic and reductions; views and constants are found by walking back from them
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    charged_bytes: int  # moved over the rim only because Inductor can no longer compute both sides in one kernel

    @property
    def reductions(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.nodes if is_reduction(n))


def find_regions(graph: fx.Graph, device: torch.device, blocked: Mapping[fx.Node, str],
                 epilogues: bool = False) -> tuple[Region, ...]:
    """All regions of a graph. `blocked` nodes are left out; `epilogues`: matmuls take a single following op into themselves."""
    net = Net(graph, device, blocked, epilogues)
    groups = Groups(net.following)
    book = _Book(net, groups)
    for node in net.heavy:
        book.grow(node)
    book.join_kindred()
    found = book.reducing()
    shares = Shares(net, Rim(net, found).trimmed())
    return tuple(_region(net, shares, k) for k, whole in enumerate(shares.whole) if any(net.reduces[m] for m in whole))


def _region(net: Net, shares: Shares, k: int) -> Region:
    own = shares.whole[k]
    # In the order they are used, not in which they come: then equal work has equal text, in whatever block of a model.
    computed = dict.fromkeys(b for m in sorted(own) for b in net.bases[m] if b not in own)
    inputs = (v for b in computed for v in net.values(b) if v is net.nodes[b] or net.users_of(v) & own)
    outputs = tuple(v for m in sorted(own) for v in shares.written(k, m))
    tensors = tuple(v for v in inputs if tensors_of(v))
    return Region(tuple(net.nodes[m] for m in sorted(own)), tensors, outputs, shares.charge(k))


class _Book:
    """What is known of each growing group, by the node it is named after."""

    def __init__(self, net: Net, groups: Groups) -> None:
        self.net, self.groups = net, groups
        self.size = dict.fromkeys(net.heavy, 1)
        self.touched = {i: {i, *net.bases[i]} for i in net.heavy}  # values computed or read
        self.biggest = {i: max(net.bytes[t] for t in self.touched[i]) for i in net.heavy}

    def grow(self, node: int) -> None:
        """Join a node with the groups that compute what it reads, the latest first: it must wait for that one anyway."""
        for base in sorted((b for b in self.net.bases[node] if self.net.is_heavy(b)), reverse=True):
            if self._holds_together(base, node):
                self._merge(base, node)

    def _holds_together(self, base: int, node: int) -> bool:
        a, b = self.groups.of(base), self.groups.of(node)
        if a == b or self.net.epoch[base] != self.net.epoch[node]:
            return False
        enough = min(self.biggest[a], self.biggest[b]) / SMALL
        return self.net.bytes[base] >= enough or self._share(a, b, enough)

    def _share(self, a: int, b: int, enough: float) -> bool:
        return any(self.net.bytes[t] >= enough for t in self.touched[a] & self.touched[b])

    def _merge(self, x: int, y: int) -> bool:
        a, b = self.groups.of(x), self.groups.of(y)
        if a == b or self.size[a] + self.size[b] > MOST_NODES or not self.groups.merge(a, b):
            return False
        kept, gone = (a, b) if self.groups.of(a) == a else (b, a)
        self.size[kept] += self.size.pop(gone)
        self.touched[kept] |= self.touched.pop(gone)
        self.biggest[kept] = max(self.biggest[kept], self.biggest.pop(gone))
        return True

    def join_kindred(self) -> None:
        """Join groups with reductions that read the same data: three norms of one tensor, both gradients of a norm."""
        readers: dict[int, list[int]] = {}
        for group in self._with_reductions():
            for value in self.touched[group]:
                readers.setdefault(value, []).append(group)
        for value in sorted(readers):
            first, *others = readers[value]
            for other in others:
                a, b = self.groups.of(first), self.groups.of(other)
                if a != b and self.net.epoch[a] == self.net.epoch[b] and self._kindred(a, b):
                    self._merge(a, b)

    def _kindred(self, a: int, b: int) -> bool:
        """Whether most of what either moves is the other's too; merely batching small work is no reason."""
        shared = sum(self.net.bytes[t] for t in self.touched[a] & self.touched[b])
        return shared * KINDRED >= min(self._moved(a), self._moved(b))

    def _moved(self, group: int) -> int:
        own = set(self.groups.members(group))
        reads = self.touched[group] - own
        writes = {i for i in own if any(u not in own for u in self.net.after[i])}
        return sum(self.net.bytes[t] for t in reads | writes)

    def _with_reductions(self) -> list[int]:
        return sorted(g for g in self.size if any(self.net.reduces[m] for m in self.groups.members(g)))

    def reducing(self) -> list[set[int]]:
        """The groups that hold a reduction."""
        return [set(self.groups.members(g)) for g in self._with_reductions()]
