"""Region finding: which nodes of a post-grad graph become one region, a convex set with at least one reduction.

First, nodes join the groups that produce their inputs. Then groups whose reductions read the same data are joined. Then
pointwise ops at the boundary are given back to Inductor where it can fuse them with less traffic, and pointwise ops that are as
cheap to recompute as to read are duplicated. Memory traffic decides each step: a value that crosses a region's boundary is
written once and read once. Views and constants belong to no region; they are repeated where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ...constants import SHIPPED
from .boundary import Boundary, ExpandedRegions
from .dataflow import Dataflow
from .grouping import Groups
from .node_kinds import is_reduction, tensors_of

MAX_NODES = SHIPPED.claim.region_nodes


@dataclass(frozen=True)
class Region:
    """Nodes that become one Program, the values it reads in order of first use, and the values it must write."""

    nodes: tuple[fx.Node, ...]  # pointwise ops and reductions; views and constants are found from their uses
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    lost_fusion_bytes: int  # traffic across the boundary that Inductor, without the region, would keep inside one kernel

    @property
    def reductions(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.nodes if is_reduction(n))


def find_regions(
    graph: fx.Graph, device: torch.device, blocked: Mapping[fx.Node, str], epilogues: bool = False
) -> tuple[Region, ...]:
    """Find all regions of a graph, without `blocked` nodes. `epilogues`: Inductor fuses a single following op into matmuls."""
    dataflow = Dataflow(graph, device, blocked, epilogues)
    groups = Groups(dataflow.successors)
    grower = _RegionGrower(dataflow, groups)
    for node in dataflow.fusible:
        grower.grow(node)
    grower.join_shared_reads()
    found = grower.regions_with_reductions()
    expanded = ExpandedRegions(dataflow, Boundary(dataflow, found).trimmed())
    reducing = (k for k, members in enumerate(expanded.members) if any(dataflow.reduces[m] for m in members))
    return tuple(_region(dataflow, expanded, k) for k in reducing)


def _region(dataflow: Dataflow, expanded: ExpandedRegions, k: int) -> Region:
    own = expanded.members[k]
    # In order of first use, not of definition, so that equal layers of a model give equal text.
    computed = dict.fromkeys(b for m in sorted(own) for b in dataflow.producers[m] if b not in own)
    inputs = (v for b in computed for v in dataflow.values(b) if v is dataflow.nodes[b] or dataflow.users_of(v) & own)
    outputs = tuple(v for m in sorted(own) for v in expanded.exported_values(k, m))
    tensors = tuple(v for v in inputs if tensors_of(v))
    return Region(tuple(dataflow.nodes[m] for m in sorted(own)), tensors, outputs, expanded.lost_fusion_bytes(k))


class _RegionGrower:
    """Grows groups of nodes. Tables are keyed by each group's representative."""

    def __init__(self, dataflow: Dataflow, groups: Groups) -> None:
        self.dataflow, self.groups = dataflow, groups
        self.size = dict.fromkeys(dataflow.fusible, 1)
        self.touched = {i: {i, *dataflow.producers[i]} for i in dataflow.fusible}  # values computed or read
        self.largest_value = {i: max(dataflow.bytes[t] for t in self.touched[i]) for i in dataflow.fusible}

    def grow(self, node: int) -> None:
        """Merge a node with the groups that produce its inputs, latest producer first: the node must wait for that one anyway."""
        for producer in sorted((b for b in self.dataflow.producers[node] if self.dataflow.is_fusible(b)), reverse=True):
            if self._should_join(producer, node):
                self._merge(producer, node)

    def _should_join(self, producer: int, node: int) -> bool:
        a, b = self.groups.find(producer), self.groups.find(node)
        if a == b or self.dataflow.epoch[producer] != self.dataflow.epoch[node]:
            return False
        min_bytes = min(self.largest_value[a], self.largest_value[b]) / SHIPPED.claim.small_ratio
        return self.dataflow.bytes[producer] >= min_bytes or self._share_large(a, b, min_bytes)

    def _share_large(self, a: int, b: int, min_bytes: float) -> bool:
        return any(self.dataflow.bytes[t] >= min_bytes for t in self.touched[a] & self.touched[b])

    def _merge(self, x: int, y: int) -> bool:
        a, b = self.groups.find(x), self.groups.find(y)
        if a == b or self.size[a] + self.size[b] > MAX_NODES or not self.groups.merge(a, b):
            return False
        merged, absorbed = (a, b) if self.groups.find(a) == a else (b, a)
        self.size[merged] += self.size.pop(absorbed)
        self.touched[merged] |= self.touched.pop(absorbed)
        self.largest_value[merged] = max(self.largest_value[merged], self.largest_value.pop(absorbed))
        return True

    def join_shared_reads(self) -> None:
        """Merge groups whose reductions read the same data: several norms of one tensor, or both gradients of a norm."""
        readers: dict[int, list[int]] = {}
        for group in self._reduction_groups():
            for value in self.touched[group]:
                readers.setdefault(value, []).append(group)
        for value in sorted(readers):
            first, *others = readers[value]
            for other in others:
                a, b = self.groups.find(first), self.groups.find(other)
                if a != b and self.dataflow.epoch[a] == self.dataflow.epoch[b] and self._share_most(a, b):
                    self._merge(a, b)

    def _share_most(self, a: int, b: int) -> bool:
        """Whether the data both read is a large part of either's traffic. Batching unrelated small work is no reason to merge."""
        shared = sum(self.dataflow.bytes[t] for t in self.touched[a] & self.touched[b])
        return shared * SHIPPED.claim.shared_data_ratio >= min(self._traffic(a), self._traffic(b))

    def _traffic(self, group: int) -> int:
        own = set(self.groups.members(group))
        reads = self.touched[group] - own
        writes = {i for i in own if any(u not in own for u in self.dataflow.users[i])}
        return sum(self.dataflow.bytes[t] for t in reads | writes)

    def _reduction_groups(self) -> list[int]:
        return sorted(g for g in self.size if any(self.dataflow.reduces[m] for m in self.groups.members(g)))

    def regions_with_reductions(self) -> list[set[int]]:
        """The groups that contain a reduction."""
        return [set(self.groups.members(g)) for g in self._reduction_groups()]
