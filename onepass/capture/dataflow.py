"""A graph with views and constants looked through: who computes, who uses, how many bytes lie between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise

import torch
from torch import fx

from .effects import epochs, is_ordered
from .node_kinds import MATMULS, Kind, is_reduction, kinds, nbytes
from .schema import op_name


class Net:
    """The computing nodes of a graph, by number, in order."""

    def __init__(self, graph: fx.Graph, device: torch.device, blocked: Mapping[fx.Node, str], epilogues: bool) -> None:
        self.kind = kinds(graph, device, blocked)
        self.nodes = [n for n in graph.nodes if self.kind[n] is not Kind.LIGHT]
        self.at = {n: i for i, n in enumerate(self.nodes)}
        self.epilogues = epilogues
        self._seen: dict[fx.Node, tuple[int, ...]] = {}
        for node in graph.nodes:  # in order, so that a chain of views is not followed node by node
            if self.kind[node] is Kind.LIGHT:
                self._seen[node] = self._through(node.all_input_nodes)
        self.bases = [self._through(n.all_input_nodes) for n in self.nodes]
        self.after: list[list[int]] = [[] for _ in self.nodes]
        for user, bases in enumerate(self.bases):
            for base in bases:
                self.after[base].append(user)
        self.bytes = [nbytes(n) for n in self.nodes]
        self.reduces = [is_reduction(n) for n in self.nodes]
        self.epoch = epochs(self.nodes)  # regions do not reach across a write to existing memory

    def _through(self, sources: Iterable[fx.Node]) -> tuple[int, ...]:
        """The computing nodes behind some values."""
        found: dict[int, None] = {}
        for source in sources:
            if self.kind[source] is not Kind.LIGHT:
                found[self.at[source]] = None
                continue
            found |= dict.fromkeys(self._seen[source])
        return tuple(found)

    @cached_property
    def following(self) -> list[list[int]]:
        """Who must come after each node: its users, and behind an ordered op the next one."""
        found = [list(users) for users in self.after]
        ordered = [i for i, node in enumerate(self.nodes) if is_ordered(node)]
        for one, other in pairwise(ordered):
            found[one].append(other)
        return found

    @cached_property
    def heavy(self) -> tuple[int, ...]:
        return tuple(i for i, n in enumerate(self.nodes) if self.kind[n] is Kind.HEAVY)

    def is_heavy(self, node: int) -> bool:
        return self.kind[self.nodes[node]] is Kind.HEAVY

    def fuses(self, node: int, taken: Mapping[int, int]) -> bool:
        """Whether Inductor would compute a node outside all regions inside a kernel of its neighbours."""
        kind = self.kind[self.nodes[node]]
        if kind is Kind.HARD:
            return self.epilogues and self._is_matmul(node) and len(self.after[node]) == 1
        return node not in taken and not self.reduces[node]

    def _is_matmul(self, node: int) -> bool:
        return op_name(self.nodes[node].target) in MATMULS

    def values(self, node: int) -> tuple[fx.Node, ...]:
        """A node, or the results of one that has several."""
        computed = self.nodes[node]
        return tuple(computed.users) if isinstance(computed.meta.get("val"), (tuple, list)) else (computed,)

    def users_of(self, value: fx.Node) -> set[int]:
        """Who uses a value, directly or through views."""
        found, waiting, seen = set[int](), [value], {value}
        while waiting:
            for user in waiting.pop().users:
                if self.kind[user] is not Kind.LIGHT:
                    found.add(self.at[user])
                elif user not in seen:
                    seen.add(user)
                    waiting.append(user)
        return found
