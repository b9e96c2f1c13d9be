"""(kernel, schedule) -> the order of computation, for Triton and Gluon alike.

A kernel walks one side of its space once per phase: columns if the schedule covers or loops over them, else rows. Values that do
not vary along that side (uniform values) are computed once between walks. All others are recomputed in each walk from resident or
reloaded inputs, so inputs are the only full-size values that are kept. A mix-order kernel walks the columns inside a loop over rows
and accumulates reductions over rows across that loop: in the first walk that can, or, where rows are staged, in the last walk, so
that only one walk has to be unrolled.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.program import Load, Reduce, Result, Store, operands
from ..plan.kernel import Across, Fold, Kernel
from ..plan.schedule import Block, Cover, Loop, RowVectors, Schedule


@dataclass(frozen=True, slots=True)
class Walk:
    """One walk over the data: `uniform` values first, then `body` per tile. `folds` are complete at its end."""

    uniform: tuple[int, ...]
    body: tuple[int, ...]
    folds: tuple[Fold, ...]
    accumulated: tuple[Fold, ...]  # reductions over the surrounding row loop that this walk updates


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a kernel, in order."""

    over_cols: bool  # walks go along the columns, else along the rows
    row_loop: bool  # the walks are inside a loop over rows
    constants: tuple[int, ...]  # loop-invariant values, computed first
    vectors_in_registers: tuple[int, ...]  # row vectors loaded into registers before the row loop
    vectors_in_smem: tuple[int, ...]  # row vectors loaded into shared memory before the row loop
    walks: tuple[Walk, ...]
    trailing: tuple[int, ...]  # uniform values and stores after the last walk
    row_folds: tuple[Fold, ...]  # reductions over the row loop of values that do not vary along the columns
    epilogue: tuple[int, ...]  # nodes after the row loop, which depend on reductions over rows


def steps(kernel: Kernel, schedule: Schedule) -> Steps:
    """Order a kernel's nodes for a schedule."""
    program = kernel.program
    over_cols = isinstance(schedule.cols, (Cover, Loop))
    row_loop = over_cols and isinstance(schedule.rows, Loop)
    accumulated = {f.node for f in kernel.folds if row_loop and f.rows}
    epilogue = kernel.computed_from(accumulated)
    tiled = [_tiled(kernel, i, over_cols, schedule) for i in range(len(program.nodes))]
    live = [i for i in range(len(program.nodes)) if i not in epilogue]
    within = {f.node for f in kernel.folds if f.block}
    uniform = [i for i in live if not tiled[i] and (i in within or not isinstance(program.nodes[i], Reduce))]
    constants = [i for i in uniform if row_loop and kernel.phase[i] == 0 and not kernel.by_row[i]] if row_loop else []
    done = set(constants)
    walks = []
    count = _count(kernel, tiled, epilogue)
    for p in range(count):
        first = [i for i in uniform if i not in done and kernel.phase[i] <= p and not isinstance(program.nodes[i], Store)]
        done |= set(first)
        folds = [f for f in kernel.folds if not f.block and kernel.phase[f.node] == p and f.node not in epilogue]
        here = [f for f in folds if f.node not in accumulated]
        fed = (kernel.folds if p == count - 1 else ()) if schedule.staged else folds
        across = [f for f in fed if f.node in accumulated and (f.cols or tiled[f.node])]
        roots = [f.node for f in here + across]
        roots += [i for i in live if isinstance(program.nodes[i], Store) and tiled[i] and kernel.phase[i] == p]
        body = [i for i in _ancestors(kernel, roots) if tiled[i] and (not isinstance(program.nodes[i], Reduce) or i in within)]
        walks.append(Walk(tuple(first), tuple(body), tuple(here), tuple(across)))
    trailing = tuple(i for i in uniform if i not in done)
    row_folds = tuple(f for f in kernel.folds if f.node in accumulated and not f.cols and not tiled[f.node])
    vectors = tuple(i for i in live if row_loop and isinstance(program.nodes[i], Load) and tiled[i] and not kernel.by_row[i])
    in_registers = vectors if schedule.row_vectors is RowVectors.REGISTERS else ()
    in_smem = vectors if schedule.row_vectors is RowVectors.SMEM else ()
    return Steps(
        over_cols, row_loop, tuple(constants), in_registers, in_smem, tuple(walks), trailing, row_folds, tuple(sorted(epilogue))
    )


def _tiled(kernel: Kernel, i: int, over_cols: bool, schedule: Schedule) -> bool:
    """Whether a value varies from tile to tile of a walk."""
    node = kernel.program.nodes[i]
    if isinstance(node, Reduce):
        args = node.args
        return any(_tiled(kernel, a, over_cols, schedule) for a in args)
    if isinstance(schedule.rows, Block) and isinstance(schedule.cols, Block):
        return False
    return kernel.by_col[i] is not Across.NONE if over_cols else kernel.by_row[i]


def _count(kernel: Kernel, tiled: list[bool], epilogue: set[int]) -> int:
    phases = [kernel.phase[f.node] for f in kernel.folds if not f.block and f.node not in epilogue]
    phases += [kernel.phase[i] for i in kernel.program.of(Store) if tiled[i] and i not in epilogue]
    return 1 + max(phases, default=-1)


def _ancestors(kernel: Kernel, roots: list[int]) -> list[int]:
    """All nodes that some nodes are computed from, up to reductions of earlier walks."""
    within = {f.node for f in kernel.folds if f.block}
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        i = todo.pop()
        node = kernel.program.nodes[i]
        if i not in seen:
            seen.add(i)
            if not isinstance(node, Result) or node.reduce in within:
                todo.extend(operands(node))
    return sorted(seen)
