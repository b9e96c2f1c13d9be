"""Groups of graph nodes, merged pairwise without ever creating a cycle.

Nodes are numbered in topological order, and each starts in a group of its own. Groups are kept in a topological order. A merge
only visits the groups between the two in that order, so growing regions stays cheap in graphs with thousands of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

EMPTY = -1  # position of a group that was merged into another


class Groups:
    """A partition of the nodes `0 .. n-1` whose quotient graph is acyclic (a union-find with a maintained topological order)."""

    def __init__(self, after: Sequence[Iterable[int]]) -> None:
        """`after[n]` are the users of node n; all are numbered higher than n."""
        count = len(after)
        self._root = list(range(count))
        self._next = [set(users) for users in after]
        self._before: list[set[int]] = [set() for _ in range(count)]
        for node, users in enumerate(self._next):
            for user in users:
                self._before[user].add(node)
        self._members: list[list[int]] = [[n] for n in range(count)]
        self._order = list(range(count))  # groups in topological order
        self._position = list(range(count))

    def find(self, node: int) -> int:
        """The representative of the group that a node is in."""
        while self._root[node] != node:
            self._root[node] = self._root[self._root[node]]
            node = self._root[node]
        return node

    def members(self, group: int) -> tuple[int, ...]:
        """The nodes of a group, in order."""
        return tuple(sorted(self._members[self.find(group)]))

    def users(self, group: int) -> Iterator[int]:
        """The groups that use a group."""
        own = self.find(group)
        return iter({self.find(u) for u in self._next[own]} - {own})

    def merge(self, a: int, b: int) -> bool:
        """Merge two groups. Returns False, and changes nothing, if that would create a cycle."""
        a, b = sorted((self.find(a), self.find(b)), key=self._position.__getitem__)
        if a == b:
            return True
        dependents = self._successors_between(a, b)
        if dependents is None:
            return False
        self._reorder(a, b, dependents)
        self._root[b] = a
        self._members[a] += self._members[b]
        self._next[a] |= self._next[b]
        self._before[a] |= self._before[b]
        return True

    def _successors_between(self, a: int, b: int) -> set[int] | None:
        """The groups after a and before b that depend on a; None if b depends on one of them."""
        last, found = self._position[b], set[int]()
        worklist = [u for u in self.users(a) if u != b and self._position[u] < last]
        while worklist:
            group = worklist.pop()
            if group in found:
                continue
            found.add(group)
            for user in self.users(group):
                if user == b:
                    return None
                if self._position[user] < last:
                    worklist.append(user)
        return found

    def _reorder(self, a: int, b: int, dependents: set[int]) -> None:
        """Move a and b to one position: groups between them that depend on a go behind it, the others go before it."""
        first, last = self._position[a], self._position[b]
        span = [g for g in self._order[first : last + 1] if g not in (a, b, EMPTY)]
        reordered = [g for g in span if g not in dependents] + [a] + [g for g in span if g in dependents]
        reordered += [EMPTY] * (last + 1 - first - len(reordered))
        self._order[first : last + 1] = reordered
        for position, group in enumerate(reordered, first):
            if group != EMPTY:
                self._position[group] = position
