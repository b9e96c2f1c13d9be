"""A kernel before scheduling: a sub-Program, its axes grouped into batch, rows and columns, and its phases.

Columns are the axes that are contiguous in memory. Rows are all other axes that are walked or reduced. Batch axes are only
spread over the grid. The grouping is per kernel, not per tensor, because GroupNorm, BatchNorm and blockwise maxima group the
same axes differently.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from ..ir.precision import depends_on_fp32
from ..ir.program import Load, Program, Reduce, Result, Store, operands
from ..ir.size import Bindings, Size, value


class Across(Enum):
    """How a value varies along the columns: not at all, once per block of columns, or with every column."""

    NONE = 0
    BLOCK = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class Space:
    """The iteration space: ordered batch, row and column axes, and the trailing column axes that block reductions fold."""

    batch: tuple[str, ...]
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    block: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fold:
    """One Reduce of a kernel and the sides it reduces over."""

    node: int
    rows: bool
    cols: bool
    block: bool


@dataclass(frozen=True)
class Kernel:
    """A sub-Program over a Space, with the derived properties that schedules must respect."""

    program: Program
    space: Space

    @cached_property
    def by_row(self) -> tuple[bool, ...]:
        """For each node: whether its value varies along the rows."""
        rows = set(self.space.rows)
        return tuple(bool(d & rows) for d in self.program.dims)

    @cached_property
    def by_col(self) -> tuple[Across, ...]:
        """For each node: how its value varies along the columns."""
        cols, block = set(self.space.cols), set(self.space.block)
        found = []
        for dims in self.program.dims:
            varying = dims & cols
            if not varying:
                found.append(Across.NONE)
            elif block and not varying & block:
                found.append(Across.BLOCK)
            else:
                found.append(Across.FULL)
        return tuple(found)

    @cached_property
    def folds(self) -> tuple[Fold, ...]:
        """The reductions, each with the sides it reduces over."""
        rows, cols, block = (frozenset(s) for s in (self.space.rows, self.space.cols, self.space.block))
        found = []
        for i in self.program.of(Reduce):
            node = self.program.nodes[i]
            assert isinstance(node, Reduce)
            axes = frozenset(node.axes)
            only_block = bool(block) and axes == block
            found.append(Fold(i, bool(axes & rows), bool(axes & cols) and not only_block, only_block))
        return tuple(found)

    @cached_property
    def phase(self) -> tuple[int, ...]:
        """For each node: the number of reductions on the longest path to it. Block reductions do not count; a tile completes
        them itself.
        """
        found: list[int] = []
        for node in self.program.nodes:
            level = max((found[o] for o in operands(node)), default=0)
            if isinstance(node, Result) and node.reduce not in self.within_blocks:
                level += 1
            found.append(level)
        return tuple(found)

    @cached_property
    def is_full(self) -> tuple[bool, ...]:
        """For each node: whether its value is full-size, that is, varies along both rows and columns."""
        return tuple(r and c is Across.FULL for r, c in zip(self.by_row, self.by_col))

    @cached_property
    def wide_data(self) -> bool:
        """Whether no input is stored in 16 or 8 bits, so that results can show the last bits of fp32."""
        return not any(self.program.dtypes[i].is_narrow_float for i in self.program.of(Load))

    @cached_property
    def is_full_precision(self) -> tuple[bool, ...]:
        """For each node: whether fp32 data reaches it with all its digits."""
        return (True,) * len(self.program.nodes) if self.wide_data else depends_on_fp32(self.program)

    def use_phases(self, i: int) -> frozenset[int]:
        """The phases in which a loaded value is used, directly or through values that vary as it does."""
        return frozenset(self.phase[use] for use in self.uses(i))

    def uses(self, i: int) -> frozenset[int]:
        """The reductions and stores that a loaded value reaches through values that vary as it does."""
        found: set[int] = set()
        seen: set[int] = set()
        todo = [i]
        while todo:
            at = todo.pop()
            for user in self.program.users[at]:
                if user in seen:
                    continue
                seen.add(user)
                node = self.program.nodes[user]
                if isinstance(node, (Reduce, Store)):
                    found.add(user)
                if not isinstance(node, Reduce) or self.phase[user] == self.phase[at] and user in self.within_blocks:
                    todo.append(user)
        return frozenset(found)

    def computed_from(self, roots: set[int]) -> set[int]:
        """All nodes computed from some nodes."""
        found: set[int] = set()
        for i, node in enumerate(self.program.nodes):
            if any(o in roots or o in found for o in operands(node)):
                found.add(i)
        return found

    @cached_property
    def within_blocks(self) -> frozenset[int]:
        """The block reductions, which a tile completes by itself."""
        return frozenset(f.node for f in self.folds if f.block)

    @cached_property
    def multi_phase(self) -> tuple[int, ...]:
        """Full-size loads needed both before and after a reduction."""
        return tuple(i for i in self.program.of(Load) if self.is_full[i] and len(self.use_phases(i)) > 1)

    @cached_property
    def full_loads(self) -> int:
        """The number of full-size tensors read; at least 1."""
        return max(1, sum(1 for i in self.program.of(Load) if self.is_full[i]))

    @cached_property
    def row_vectors(self) -> tuple[int, ...]:
        """Row vectors: loads of one element per column, shared by all rows (weight, bias)."""
        return tuple(i for i in self.program.of(Load) if not self.by_row[i] and self.by_col[i] is Across.FULL)

    @cached_property
    def full_walks(self) -> int:
        """The number of walks that read a full-size tensor. Work after the last reduction may be small."""
        return len({p for i in self.program.of(Load) if self.is_full[i] for p in self.use_phases(i)}) or 1

    @cached_property
    def after_reduction(self) -> tuple[int, ...]:
        """Other loads along the columns that are used after a reduction, full-size ones first. Excludes `multi_phase` loads."""
        found = [
            i
            for i, node in enumerate(self.program.nodes)
            if isinstance(node, Load)
            and not node.indexed
            and self.by_col[i] is Across.FULL
            and i not in self.multi_phase
            and max(self.use_phases(i), default=0) > 0
        ]
        return tuple(sorted(found, key=lambda i: not self.is_full[i]))

    @cached_property
    def passes(self) -> int:
        """How many times a kernel walks its data."""
        return 1 + max((self.phase[i] for i in range(len(self.program.nodes)) if self._walks(i)), default=0)

    def _walks(self, i: int) -> bool:
        node = self.program.nodes[i]
        return isinstance(node, Reduce) or (isinstance(node, Store) and (self.by_row[i] or self.by_col[i] is not Across.NONE))

    def extent(self, axes: tuple[str, ...]) -> Size:
        return self.program.extent(axes)

    def counts(self, bindings: Bindings) -> tuple[int, int, int]:
        """(batch, rows, columns) as numbers."""
        s = self.space
        return tuple(value(self.extent(a), bindings) for a in (s.batch, s.rows, s.cols))  # type: ignore[return-value]


def contiguous_axis(program: Program, bindings: Bindings) -> str | None:
    """The axis that the most bytes are contiguous along: stride 1 in the accesses that move the most."""
    votes: Counter[str] = Counter()
    for node in program.nodes:
        if isinstance(node, (Load, Store)):
            moved = program.points(frozenset(a for a, _ in node.strides), bindings) * program.buffer[node.buffer].dtype.size
            for axis, stride in node.strides:
                if stride == 1:
                    votes[axis] += moved
    ordered = sorted(votes.items(), key=lambda kv: (-kv[1], kv[0]))
    return ordered[0][0] if ordered else (program.axes[-1].name if program.axes else None)


def memory_order(program: Program, bindings: Bindings) -> dict[str, int]:
    """Rank the axes from slowest to fastest in memory, by the strides of the largest access. Axes it lacks come first."""
    best: dict[str, int] = {}
    most = -1
    for node in program.nodes:
        if isinstance(node, (Load, Store)):
            moved = program.points(frozenset(a for a, _ in node.strides), bindings)
            if moved > most:
                most, best = moved, {a: value(s, bindings) for a, s in node.strides}
    ranked = sorted((a.name for a in program.axes), key=lambda a: (a in best, -best.get(a, 0), a))
    return {a: i for i, a in enumerate(ranked)}
