"""The rim of regions: what is better computed outside, what is better computed twice, and what a claim is charged for."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from .dataflow import Net

MOST_PULLED = 16  # nodes computed again instead of read
SMALL = 8  # a value this many times smaller than another is no reason to do without it
MOST_NEARBY = 120  # nodes looked at to guess a kernel of Inductor's


class Rim:
    """Gives arithmetic at the rim of regions back to Inductor's kernels where that moves fewer bytes."""

    def __init__(self, net: Net, regions: list[set[int]]) -> None:
        self.net, self.regions = net, regions
        self.taken = {m: k for k, members in enumerate(regions) for m in members}

    def trimmed(self) -> list[set[int]]:
        """The regions without what is better left outside."""
        for members in self.regions:
            changed = True
            while changed:
                changed = False
                for node in sorted(members, reverse=True):
                    if not self.net.reduces[node] and len(members) > 1 and self._better_outside(node, members):
                        members.discard(node)
                        del self.taken[node]
                        changed = True
        return self.regions

    def _better_outside(self, node: int, members: set[int]) -> bool:
        users = self.net.after[node]
        if not any(u in members for u in users):
            return self._sink_gain(node, members) < 0
        if not any(b in members for b in self.net.bases[node]):
            return self._source_gain(node, members) < 0
        return False

    def _sink_gain(self, node: int, members: set[int]) -> int:
        """Bytes more (or fewer) if the users of a region's last op compute it themselves."""
        net, users = self.net, self.net.after[node]
        if not users or not all(net.fuses(u, self.taken) for u in users):
            return 0
        nearby = self._kernel(users)
        change = -2 * net.bytes[node]
        for base in net.bases[node]:
            known = any(base in net.bases[n] for n in nearby)
            if base in members:
                exported = any(u not in members for u in net.after[base])
                change += (not exported) * net.bytes[base] + (not known) * net.bytes[base]
            else:
                still_read = any(u in members and u != node for u in net.after[base])
                change += (not known) * net.bytes[base] - (not still_read) * net.bytes[base]
        return change

    def _source_gain(self, node: int, members: set[int]) -> int:
        """Bytes more (or fewer) if a kernel before the region computes the region's first op."""
        net, bases = self.net, self.net.bases[node]
        before = [b for b in bases if net.fuses(b, self.taken)]
        if not before:
            return 0
        nearby = self._kernel(before)
        exported = any(u not in members for u in net.after[node])
        change = net.bytes[node] * (1 if exported else 2)
        for base in bases:
            still_read = any(u in members and u != node for u in net.after[base])
            change -= (not still_read) * net.bytes[base]
            if base in nearby:
                alone = all(u == node for u in net.after[base])
                change -= alone * net.bytes[base]
            else:
                known = any(base in net.bases[n] for n in nearby)
                change += (not known) * net.bytes[base]
        return change

    def _kernel(self, start: Iterable[int]) -> set[int]:
        """The nodes outside that Inductor would compute together with some."""
        found, waiting = set[int](), list(start)
        while waiting and len(found) < MOST_NEARBY:
            node = waiting.pop()
            if node in found or not self.net.fuses(node, self.taken):
                continue
            found.add(node)
            waiting += [*self.net.bases[node], *self.net.after[node]]
        return found


class Shares:
    """Regions with the arithmetic they compute again rather than read from each other, and what each must write."""

    def __init__(self, net: Net, regions: list[set[int]]) -> None:
        self.net = net
        self.taken = {m: k for k, members in enumerate(regions) for m in members}
        self.whole = [self._pulled(members) for members in regions]
        self._prune()

    def _pulled(self, members: set[int]) -> set[int]:
        """A region with what it had better compute itself than read."""
        whole = set(members)
        for value in sorted({b for m in members for b in self.net.bases[m]} - members, reverse=True):
            here = self.net.epoch[value] == self.net.epoch[min(members)]  # what it is computed from has not been written since
            if here and self._is_arithmetic(value) and not self._is_written_anyway(value):
                whole |= self._cone(value, whole) or set()
        return whole

    def _is_written_anyway(self, value: int) -> bool:
        """Whether a value of a region goes to memory whatever other regions do."""
        users = {u for v in self.net.values(value) for u in self.net.users_of(v)}
        return value in self.taken and any(u not in self.taken and not self.net.fuses(u, self.taken) for u in users)

    def _cone(self, value: int, whole: set[int]) -> set[int] | None:
        """The nodes to compute a value from hardly more bytes than it has itself; None if there is no such set."""
        read = {b for m in whole for b in self.net.bases[m]} - whole - {value}
        cone, best = {value}, None
        for _ in range(MOST_PULLED):
            behind = {b for c in cone for b in self.net.bases[c]} - cone - whole
            fresh = sum(self.net.bytes[b] for b in behind - read)
            if fresh <= self.net.bytes[value] * (1 + 1 / SMALL) and not self._asks_more(behind - whole, value):
                best = set(cone)
            deeper = [b for b in behind if self._is_arithmetic(b) and self.net.epoch[b] == self.net.epoch[value]]
            if not deeper:
                break
            cone.add(max(deeper))
        return best

    def _asks_more(self, behind: set[int], value: int) -> bool:
        """Whether another region would have to write something large that it keeps to itself as things are."""
        return any(b in self.taken and self.net.bytes[b] * SMALL > self.net.bytes[value] for b in behind)

    def _is_arithmetic(self, node: int) -> bool:
        return self.net.is_heavy(node) and not self.net.reduces[node]

    def written(self, region: int, node: int) -> tuple[fx.Node, ...]:
        """What of a node's results a region must write: it is the one to, and someone needs it who cannot as well compute it."""
        if self.taken.get(node) != region:
            return ()
        return tuple(v for v in self.net.values(node) if self._is_needed(region, node, self.net.users_of(v)))

    def exported(self, region: int, node: int) -> bool:
        """Whether a region writes anything of a node."""
        return bool(self.written(region, node))

    def _is_needed(self, region: int, node: int, users: set[int]) -> bool:
        others = [whole for k, whole in enumerate(self.whole) if k != region]
        if any(users & whole and node not in whole for whole in others):
            return True
        outside = users - self.whole[region].union(*others)
        return any(self._needs(u, region, node) for u in outside)

    def _needs(self, user: int, region: int, node: int) -> bool:
        """Whether someone outside all regions needs a value written."""
        if user not in self.taken and not self.net.fuses(user, self.taken):
            return True
        return not self._is_arithmetic(node) or self._cone(node, set()) is None or bool(self._behind(node) & self.whole[region])

    def _behind(self, node: int) -> set[int]:
        """What a value's best cone is computed from."""
        cone = self._cone(node, set()) or {node}
        return {b for c in cone for b in self.net.bases[c]} - cone

    def _prune(self) -> None:
        """Drop members whose value nobody needs from this region any more."""
        for k, whole in enumerate(self.whole):
            for node in sorted(whole, reverse=True):
                if not any(u in whole for u in self.net.after[node]) and not self.exported(k, node):
                    whole.discard(node)

    def charge(self, region: int) -> int:
        """Bytes that cross the rim though Inductor, left alone, would have kept them inside one of its kernels."""
        net, members, total = self.net, self.whole[region], 0
        for base in {b for m in members for b in net.bases[m]} - members:
            alone = all(u in members for u in net.after[base])
            total += 2 * net.bytes[base] * (alone and net.fuses(base, self.taken))
        apart = self._behind_kernels(members)
        for member in (m for m in members if self.exported(region, m)):
            outside = [u for u in net.after[member] if u not in members]
            kept = bool(outside) and all(net.fuses(u, self.taken) and u not in apart for u in outside)
            total += 2 * net.bytes[member] * kept
        return total

    def _behind_kernels(self, members: set[int]) -> set[int]:
        """What comes after a region by way of another kernel: it cannot be in one kernel with the region, whoever compiles."""
        after, found = set(members), set[int]()
        for node in range(min(members), len(self.net.nodes)):
            bases = self.net.bases[node]
            if node in members or not any(b in after for b in bases):
                continue
            after.add(node)
            if any(b in found or b not in members and b in after and not self.net.fuses(b, self.taken) for b in bases):
                found.add(node)
        return found
