"""The rim of regions: what is better computed outside, what is better computed twice, and what a claim is charged for."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from .dataflow import Dataflow

MAX_DUPLICATED_NODES = 16  # nodes computed again instead of read
SMALL_RATIO = 8  # a value this many times smaller than another is no reason to do without it
MAX_KERNEL_NODES = 120  # nodes looked at to guess a kernel of Inductor's


class Boundary:
    """Gives arithmetic at the rim of regions back to Inductor's kernels where that moves fewer bytes."""

    def __init__(self, dataflow: Dataflow, regions: list[set[int]]) -> None:
        self.dataflow, self.regions = dataflow, regions
        self.region_of = {m: k for k, members in enumerate(regions) for m in members}

    def trimmed(self) -> list[set[int]]:
        """The regions without what is better left outside."""
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
        """Bytes more (or fewer) if the users of a region's last op compute it themselves."""
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
        """Bytes more (or fewer) if a kernel before the region computes the region's first op."""
        dataflow, bases = self.dataflow, self.dataflow.producers[node]
        before = [b for b in bases if dataflow.inductor_fuses(b, self.region_of)]
        if not before:
            return 0
        kernel = self._inductor_kernel(before)
        exported = any(u not in members for u in dataflow.users[node])
        change = dataflow.bytes[node] * (1 if exported else 2)
        for producer in bases:
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
        """The nodes outside that Inductor would compute together with some."""
        found, waiting = set[int](), list(start)
        while waiting and len(found) < MAX_KERNEL_NODES:
            node = waiting.pop()
            if node in found or not self.dataflow.inductor_fuses(node, self.region_of):
                continue
            found.add(node)
            waiting += [*self.dataflow.producers[node], *self.dataflow.users[node]]
        return found


class ExpandedRegions:
    """Regions with the arithmetic they compute again rather than read from each other, and what each must write."""

    def __init__(self, dataflow: Dataflow, regions: list[set[int]]) -> None:
        self.dataflow = dataflow
        self.region_of = {m: k for k, members in enumerate(regions) for m in members}
        self.members = [self._with_duplicates(members) for members in regions]
        self._prune()

    def _with_duplicates(self, members: set[int]) -> set[int]:
        """A region with what it had better compute itself than read."""
        expanded = set(members)
        for value in sorted({b for m in members for b in self.dataflow.producers[m]} - members, reverse=True):
            same_epoch = self.dataflow.epoch[value] == self.dataflow.epoch[min(members)]  # what it is computed from has not been written since
            if same_epoch and self._is_arithmetic(value) and not self._is_written_anyway(value):
                expanded |= self._cone(value, expanded) or set()
        return expanded

    def _is_written_anyway(self, value: int) -> bool:
        """Whether a value of a region goes to memory whatever other regions do."""
        users = {u for v in self.dataflow.values(value) for u in self.dataflow.users_of(v)}
        return value in self.region_of and any(u not in self.region_of and not self.dataflow.inductor_fuses(u, self.region_of) for u in users)

    def _cone(self, value: int, expanded: set[int]) -> set[int] | None:
        """The nodes to compute a value from hardly more bytes than it has itself; None if there is no such set."""
        read = {b for m in expanded for b in self.dataflow.producers[m]} - expanded - {value}
        cone, best = {value}, None
        for _ in range(MAX_DUPLICATED_NODES):
            behind = {b for c in cone for b in self.dataflow.producers[c]} - cone - expanded
            fresh = sum(self.dataflow.bytes[b] for b in behind - read)
            if fresh <= self.dataflow.bytes[value] * (1 + 1 / SMALL_RATIO) and not self._adds_outputs(behind - expanded, value):
                best = set(cone)
            deeper = [b for b in behind if self._is_arithmetic(b) and self.dataflow.epoch[b] == self.dataflow.epoch[value]]
            if not deeper:
                break
            cone.add(max(deeper))
        return best

    def _adds_outputs(self, behind: set[int], value: int) -> bool:
        """Whether another region would have to write something large that it keeps to itself as things are."""
        return any(b in self.region_of and self.dataflow.bytes[b] * SMALL_RATIO > self.dataflow.bytes[value] for b in behind)

    def _is_arithmetic(self, node: int) -> bool:
        return self.dataflow.is_fusible(node) and not self.dataflow.reduces[node]

    def exported_values(self, region: int, node: int) -> tuple[fx.Node, ...]:
        """What of a node's results a region must write: it is the one to, and someone needs it who cannot as well compute it."""
        if self.region_of.get(node) != region:
            return ()
        return tuple(v for v in self.dataflow.values(node) if self._is_needed(region, node, self.dataflow.users_of(v)))

    def is_exported(self, region: int, node: int) -> bool:
        """Whether a region writes anything of a node."""
        return bool(self.exported_values(region, node))

    def _is_needed(self, region: int, node: int, users: set[int]) -> bool:
        others = [expanded for k, expanded in enumerate(self.members) if k != region]
        if any(users & expanded and node not in expanded for expanded in others):
            return True
        outside = users - self.members[region].union(*others)
        return any(self._user_needs(u, region, node) for u in outside)

    def _user_needs(self, user: int, region: int, node: int) -> bool:
        """Whether someone outside all regions needs a value written."""
        if user not in self.region_of and not self.dataflow.inductor_fuses(user, self.region_of):
            return True
        return not self._is_arithmetic(node) or self._cone(node, set()) is None or bool(self._cone_inputs(node) & self.members[region])

    def _cone_inputs(self, node: int) -> set[int]:
        """What a value's best cone is computed from."""
        cone = self._cone(node, set()) or {node}
        return {b for c in cone for b in self.dataflow.producers[c]} - cone

    def _prune(self) -> None:
        """Drop members whose value nobody needs from this region any more."""
        for k, expanded in enumerate(self.members):
            for node in sorted(expanded, reverse=True):
                if not any(u in expanded for u in self.dataflow.users[node]) and not self.is_exported(k, node):
                    expanded.discard(node)

    def lost_fusion_bytes(self, region: int) -> int:
        """Bytes that cross the rim though Inductor, left alone, would have kept them inside one of its kernels."""
        dataflow, members, total = self.dataflow, self.members[region], 0
        for producer in {b for m in members for b in dataflow.producers[m]} - members:
            only_user = all(u in members for u in dataflow.users[producer])
            total += 2 * dataflow.bytes[producer] * (only_user and dataflow.inductor_fuses(producer, self.region_of))
        separated = self._after_other_kernels(members)
        for member in (m for m in members if self.is_exported(region, m)):
            outside = [u for u in dataflow.users[member] if u not in members]
            fused_outside = bool(outside) and all(dataflow.inductor_fuses(u, self.region_of) and u not in separated for u in outside)
            total += 2 * dataflow.bytes[member] * fused_outside
        return total

    def _after_other_kernels(self, members: set[int]) -> set[int]:
        """What comes after a region by way of another kernel: it cannot be in one kernel with the region, whoever compiles."""
        after, found = set(members), set[int]()
        for node in range(min(members), len(self.dataflow.nodes)):
            bases = self.dataflow.producers[node]
            if node in members or not any(b in after for b in bases):
                continue
            after.add(node)
            if any(b in found or b not in members and b in after and not self.dataflow.inductor_fuses(b, self.region_of) for b in bases):
                found.add(node)
        return found
