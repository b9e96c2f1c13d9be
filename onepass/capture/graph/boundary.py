"""Region boundaries: which ops to leave to Inductor, which to duplicate, which values to write, and the fusions Inductor loses."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ...constants import SHIPPED
from .dataflow import Dataflow

MAX_DUPLICATED_NODES = SHIPPED.claim.duplicated_nodes
MAX_KERNEL_NODES = SHIPPED.claim.fused_nodes


class Boundary:
    """Gives pointwise ops at a region's boundary back to Inductor where that reduces memory traffic."""

    def __init__(self, dataflow: Dataflow, regions: list[set[int]]) -> None:
        self.dataflow, self.regions = dataflow, regions
        self.region_of = {m: k for k, members in enumerate(regions) for m in members}

    def trimmed(self) -> list[set[int]]:
        """The regions without the ops that are better left outside."""
        for members in self.regions:
            changed = True
            while changed:
                changed = False
                for node in sorted(members, reverse=True):
                    if not self.dataflow.reduces[node] and len(members) > 1 and self._better_outside(node, members):
                        members.discard(node)
                        del self.region_of[node]
                        changed = True
        return self.regions

    def _better_outside(self, node: int, members: set[int]) -> bool:
        users = self.dataflow.users[node]
        if not any(u in members for u in users):
            return self._sink_gain(node, members) < 0
        if not any(b in members for b in self.dataflow.producers[node]):
            return self._source_gain(node, members) < 0
        return False

    def _sink_gain(self, node: int, members: set[int]) -> int:
        """Change in bytes moved if the users of a region's last op compute it themselves."""
        dataflow, users = self.dataflow, self.dataflow.users[node]
        if not users or not all(dataflow.inductor_fuses(u, self.region_of) for u in users):
            return 0
        kernel = self._inductor_kernel(users)
        change = -2 * dataflow.bytes[node]
        for producer in dataflow.producers[node]:
            already_read = any(producer in dataflow.producers[n] for n in kernel)
            if producer in members:
                exported = any(u not in members for u in dataflow.users[producer])
                change += (not exported) * dataflow.bytes[producer] + (not already_read) * dataflow.bytes[producer]
            else:
                still_read = any(u in members and u != node for u in dataflow.users[producer])
                change += (not already_read) * dataflow.bytes[producer] - (not still_read) * dataflow.bytes[producer]
        return change

    def _source_gain(self, node: int, members: set[int]) -> int:
        """Change in bytes moved if a kernel before the region computes the region's first op."""
        dataflow, producers = self.dataflow, self.dataflow.producers[node]
        before = [b for b in producers if dataflow.inductor_fuses(b, self.region_of)]
        if not before:
            return 0
        kernel = self._inductor_kernel(before)
        exported = any(u not in members for u in dataflow.users[node])
        change = dataflow.bytes[node] * (1 if exported else 2)
        for producer in producers:
            still_read = any(u in members and u != node for u in dataflow.users[producer])
            change -= (not still_read) * dataflow.bytes[producer]
            if producer in kernel:
                only_user = all(u == node for u in dataflow.users[producer])
                change -= only_user * dataflow.bytes[producer]
            else:
                already_read = any(producer in dataflow.producers[n] for n in kernel)
                change += (not already_read) * dataflow.bytes[producer]
        return change

    def _inductor_kernel(self, start: Iterable[int]) -> set[int]:
        """The nodes outside all regions that Inductor would fuse with `start`."""
        found, worklist = set[int](), list(start)
        while worklist and len(found) < MAX_KERNEL_NODES:
            node = worklist.pop()
            if node in found or not self.dataflow.inductor_fuses(node, self.region_of):
                continue
            found.add(node)
            worklist += [*self.dataflow.producers[node], *self.dataflow.users[node]]
        return found


class ExpandedRegions:
    """Regions with the pointwise ops they duplicate instead of reading their results, and the values each region must write."""

    def __init__(self, dataflow: Dataflow, regions: list[set[int]]) -> None:
        self.dataflow = dataflow
        self.region_of = {m: k for k, members in enumerate(regions) for m in members}
        self.members = [self._with_duplicates(members) for members in regions]
        self._prune()

    def _with_duplicates(self, members: set[int]) -> set[int]:
        """The region's nodes plus the nodes that are cheaper to recompute than to read."""
        expanded = set(members)
        for value in sorted({b for m in members for b in self.dataflow.producers[m]} - members, reverse=True):
            # Inputs of the value must not have been written to since.
            same_epoch = self.dataflow.epoch[value] == self.dataflow.epoch[min(members)]
            if same_epoch and self._is_arithmetic(value) and not self._is_written_anyway(value):
                expanded |= self._cone(value, expanded) or set()
        return expanded

    def _is_written_anyway(self, value: int) -> bool:
        """Whether a value of a region is written to memory regardless of what other regions do."""
        users = {u for v in self.dataflow.values(value) for u in self.dataflow.users_of(v)}
        outside = (u for u in users if u not in self.region_of)
        return value in self.region_of and any(not self.dataflow.inductor_fuses(u, self.region_of) for u in outside)

    def _cone(self, value: int, expanded: set[int]) -> set[int] | None:
        """The nodes that compute a value from inputs hardly larger than the value itself, or None."""
        read = {b for m in expanded for b in self.dataflow.producers[m]} - expanded - {value}
        cone, best = {value}, None
        for _ in range(MAX_DUPLICATED_NODES):
            inputs = {b for c in cone for b in self.dataflow.producers[c]} - cone - expanded
            extra_bytes = sum(self.dataflow.bytes[b] for b in inputs - read)
            is_cheap = extra_bytes <= self.dataflow.bytes[value] * (1 + 1 / SHIPPED.claim.small_ratio)
            if is_cheap and not self._adds_outputs(inputs - expanded, value):
                best = set(cone)
            deeper = [b for b in inputs if self._is_arithmetic(b) and self.dataflow.epoch[b] == self.dataflow.epoch[value]]
            if not deeper:
                break
            cone.add(max(deeper))
        return best

    def _adds_outputs(self, inputs: set[int], value: int) -> bool:
        """Whether another region would have to write a large value that it does not write now."""
        bytes_of, ratio = self.dataflow.bytes, SHIPPED.claim.small_ratio
        return any(b in self.region_of and bytes_of[b] * ratio > bytes_of[value] for b in inputs)

    def _is_arithmetic(self, node: int) -> bool:
        return self.dataflow.is_fusible(node) and not self.dataflow.reduces[node]

    def exported_values(self, region: int, node: int) -> tuple[fx.Node, ...]:
        """The results of a node that its region must write, because a user cannot cheaply recompute them. () for other regions."""
        if self.region_of.get(node) != region:
            return ()
        return tuple(v for v in self.dataflow.values(node) if self._is_needed(region, node, self.dataflow.users_of(v)))

    def is_exported(self, region: int, node: int) -> bool:
        """Whether a region writes any result of a node."""
        return bool(self.exported_values(region, node))

    def _is_needed(self, region: int, node: int, users: set[int]) -> bool:
        others = [expanded for k, expanded in enumerate(self.members) if k != region]
        if any(users & expanded and node not in expanded for expanded in others):
            return True
        outside = users - self.members[region].union(*others)
        return any(self._user_needs(u, region, node) for u in outside)

    def _user_needs(self, user: int, region: int, node: int) -> bool:
        """Whether a user outside all regions needs the value in memory."""
        if user not in self.region_of and not self.dataflow.inductor_fuses(user, self.region_of):
            return True
        if not self._is_arithmetic(node) or self._cone(node, set()) is None:
            return True
        return bool(self._cone_inputs(node) & self.members[region])

    def _cone_inputs(self, node: int) -> set[int]:
        """The inputs of a value's best cone."""
        cone = self._cone(node, set()) or {node}
        return {b for c in cone for b in self.dataflow.producers[c]} - cone

    def _prune(self) -> None:
        """Drop members whose results are no longer needed from this region."""
        for k, expanded in enumerate(self.members):
            for node in sorted(expanded, reverse=True):
                if not any(u in expanded for u in self.dataflow.users[node]) and not self.is_exported(k, node):
                    expanded.discard(node)

    def lost_fusion_bytes(self, region: int) -> int:
        """Bytes moved across the region's boundary that Inductor, without the region, would have kept inside one kernel."""
        dataflow, members, total = self.dataflow, self.members[region], 0
        for producer in {b for m in members for b in dataflow.producers[m]} - members:
            only_user = all(u in members for u in dataflow.users[producer])
            total += 2 * dataflow.bytes[producer] * (only_user and dataflow.inductor_fuses(producer, self.region_of))
        separated = self._after_other_kernels(members)
        for member in (m for m in members if self.is_exported(region, m)):
            outside = [u for u in dataflow.users[member] if u not in members]
            fusible = all(dataflow.inductor_fuses(u, self.region_of) and u not in separated for u in outside)
            total += 2 * dataflow.bytes[member] * (bool(outside) and fusible)
        return total

    def _after_other_kernels(self, members: set[int]) -> set[int]:
        """Nodes that depend on a region through another kernel. No compiler can put them into one kernel with the region."""
        after, found = set(members), set[int]()
        for node in range(min(members), len(self.dataflow.nodes)):
            dependencies = [b for b in self.dataflow.producers[node] if b in after]
            if node in members or not dependencies:
                continue
            after.add(node)
            if any(b in found or b not in members and not self.dataflow.inductor_fuses(b, self.region_of) for b in dependencies):
                found.add(node)
        return found
