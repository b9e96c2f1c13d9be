"""Dataflow between the computing nodes of a graph. Views and constants are skipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise

import torch
from torch import fx

from ..lowering.schema import op_name
from .effects import epochs, is_ordered
from .node_kinds import MATMULS, NodeKind, classify_nodes, is_reduction, nbytes


class Dataflow:
    """The computing nodes of a graph, numbered in order, with their producers, users and sizes in bytes."""

    def __init__(self, graph: fx.Graph, device: torch.device, blocked: Mapping[fx.Node, str], epilogues: bool) -> None:
        self.kind = classify_nodes(graph, device, blocked)
        self.nodes = [n for n in graph.nodes if self.kind[n] is not NodeKind.FREE]
        self.position_of = {n: i for i, n in enumerate(self.nodes)}
        self.epilogues = epilogues
        self._behind_views: dict[fx.Node, tuple[int, ...]] = {}
        for node in graph.nodes:  # in order, so that a chain of views needs no recursion
            if self.kind[node] is NodeKind.FREE:
                self._behind_views[node] = self._through(node.all_input_nodes)
        self.producers = [self._through(n.all_input_nodes) for n in self.nodes]
        self.users: list[list[int]] = [[] for _ in self.nodes]
        for user, bases in enumerate(self.producers):
            for producer in bases:
                self.users[producer].append(user)
        self.bytes = [nbytes(n) for n in self.nodes]
        self.reduces = [is_reduction(n) for n in self.nodes]
        self.epoch = epochs(self.nodes)  # regions never span a write to existing memory

    def _through(self, sources: Iterable[fx.Node]) -> tuple[int, ...]:
        """The computing nodes that some values come from."""
        found: dict[int, None] = {}
        for source in sources:
            if self.kind[source] is not NodeKind.FREE:
                found[self.position_of[source]] = None
                continue
            found |= dict.fromkeys(self._behind_views[source])
        return tuple(found)

    @cached_property
    def successors(self) -> list[list[int]]:
        """For each node the nodes that must come after it: its users, and for an ordered op the next ordered op."""
        found = [list(users) for users in self.users]
        ordered = [i for i, node in enumerate(self.nodes) if is_ordered(node)]
        for one, other in pairwise(ordered):
            found[one].append(other)
        return found

    @cached_property
    def fusible(self) -> tuple[int, ...]:
        return tuple(i for i, n in enumerate(self.nodes) if self.kind[n] is NodeKind.FUSIBLE)

    def is_fusible(self, node: int) -> bool:
        return self.kind[self.nodes[node]] is NodeKind.FUSIBLE

    def inductor_fuses(self, node: int, region_of: Mapping[int, int]) -> bool:
        """Whether Inductor would fuse a node outside all regions into a neighboring kernel."""
        kind = self.kind[self.nodes[node]]
        if kind is NodeKind.EXTERN:
            return self.epilogues and self._is_matmul(node) and len(self.users[node]) == 1
        return node not in region_of and not self.reduces[node]

    def _is_matmul(self, node: int) -> bool:
        return op_name(self.nodes[node].target) in MATMULS

    def values(self, node: int) -> tuple[fx.Node, ...]:
        """The result of a node, or all results of a node that has several."""
        computed = self.nodes[node]
        return tuple(computed.users) if isinstance(computed.meta.get("val"), (tuple, list)) else (computed,)

    def users_of(self, value: fx.Node) -> set[int]:
        """The computing nodes that use a value, directly or through views."""
        found, worklist, seen = set[int](), [value], {value}
        while worklist:
            for user in worklist.pop().users:
                if self.kind[user] is not NodeKind.FREE:
                    found.add(self.position_of[user])
                elif user not in seen:
                    seen.add(user)
                    worklist.append(user)
        return found
