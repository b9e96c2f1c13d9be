"""(kernel, schedule) -> what is computed when. The same for every language a kernel can be written in.

A kernel walks one side of its space once per phase (columns where whole rows are wanted, else rows). Values that do not vary
along the walked side are computed once between walks; the rest are computed anew in each walk from what is resident or read
again, so nothing full-size is ever held but inputs. In a mix-order kernel the walks over columns happen inside a loop over
rows, and reductions over rows are gathered across that loop: by the first walk that can, or where rows are parked by the last, so
that one walk alone has to be written out tile by tile.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.program import Load, Reduce, Result, Store, operands
from ..plan.kernel import Across, Fold, Kernel
from ..plan.schedule import Block, Cover, Loop, Schedule


@dataclass(frozen=True, slots=True)
class Walk:
    """One walk over the data: `uniform` values first, then `body` per tile; `folds` are complete when it ends."""

    uniform: tuple[int, ...]
    body: tuple[int, ...]
    folds: tuple[Fold, ...]
    accumulated: tuple[Fold, ...]  # reductions over the loop around the walk, fed by this walk's tiles


@dataclass(frozen=True, slots=True)
class Steps:
    """All of a kernel, in order."""

    over_cols: bool  # the walked side
    row_loop: bool  # the walks happen inside a loop over rows
    constants: tuple[int, ...]  # values that vary with nothing looped: computed first
    vectors_in_registers: tuple[int, ...]  # row vectors loaded before the row loop, into registers
    vectors_in_smem: tuple[int, ...]  # the same, into shared memory
    walks: tuple[Walk, ...]
    trailing: tuple[int, ...]  # uniform values and stores after the last walk
    row_folds: tuple[Fold, ...]  # gathered over the row loop, fed by values that do not vary along the columns
    epilogue: tuple[int, ...]  # after the row loop: what depends on gathered reductions


def steps(kernel: Kernel, schedule: Schedule) -> Steps:
    """Order a kernel's nodes for a schedule."""
    program = kernel.program
    over_cols = isinstance(schedule.cols, (Cover, Loop))
    row_loop = over_cols and isinstance(schedule.rows, Loop)
    accumulated = {f.node for f in kernel.folds if row_loop and f.rows}
    epilogue = _descendants(kernel, accumulated)
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
    in_registers, in_smem = vectors if schedule.hoisted else (), vectors if schedule.beside else ()
    return Steps(over_cols, row_loop, tuple(constants), in_registers, in_smem, tuple(walks), trailing, row_folds,
                 tuple(sorted(epilogue)))


def _tiled(kernel: Kernel, i: int, over_cols: bool, schedule: Schedule) -> bool:
    """Does a value change from tile to tile of a walk?"""
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
    """All that some nodes are computed from, back to reductions of earlier walks."""
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


def _descendants(kernel: Kernel, roots: set[int]) -> set[int]:
    found: set[int] = set()
    for i, node in enumerate(kernel.program.nodes):
        if any(o in roots or o in found for o in operands(node)):
            found.add(i)
    return found
