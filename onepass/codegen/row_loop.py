"""The prologue and epilogue of a loop over rows: loads of row vectors before it, read-out of column reductions after it.

Triton and Gluon mix-order kernels share this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.program import Reduce, operands
from ..plan.kernel import Across
from .folds import Folds, Running
from .kernel_ir import Expr
from .memory import Env
from .steps import Steps
from .tile_refs import TileRef
from .values import Values


def zero_of_row(row: Expr, walk: int) -> Expr:
    """A zero that differs by walk, and that the compiler cannot compute before it knows the row."""
    return f"zero & ({row} + {walk})" if walk else f"zero & {row}"


class RowLoop:
    """Emits what comes before and after a loop over rows."""

    def __init__(self, steps: Steps, values: Values, folds: Folds) -> None:
        self.steps, self.values, self.folds = steps, values, folds
        self.kernel, self.program = values.kernel, values.program

    def load_row_vectors(self, tiles: Sequence[TileRef], env: Env) -> None:
        """Load row vectors into registers before the loop, shaped like the tiles they are combined with."""
        for i in self.steps.vectors_in_registers:
            for tile in tiles:
                self.values.preload(i, tile, env)

    def start(self, tiles: Sequence[TileRef]) -> dict[int, Running]:
        """The reductions over rows, with states initialized for every tile."""
        folds = [f for walk in self.steps.walks for f in walk.accumulated] + list(self.steps.row_folds)
        accumulated = {f.node: self.folds.running(f) for f in folds}
        for state in accumulated.values():
            self.folds.start(state, tiles)
        return accumulated

    def close(self, tiles: Sequence[TileRef], env: Env, accumulated: dict[int, Running]) -> None:
        """Read out the reductions over rows after the loop, per tile where they vary along the columns."""
        self.values.held = {}  # held values have the height of the loop's tiles; the epilogue has one row
        by_tile = [s for s in accumulated.values() if not s.fold.cols and s.across is not Across.NONE]
        for state in accumulated.values():
            if state not in by_tile:
                self.folds.finish(state, tiles[0])
        flat = [i for i in self.steps.epilogue if self.kernel.by_col[i] is Across.NONE]
        for i in flat:
            self.values.node(i, TileRef(), env)
        for tile in tiles:
            ref = replace(tile, height=1)
            for state in by_tile:
                lost = state.compensation.get(tile.tag, {})
                own = replace(state, states={tile.tag: state.states[tile.tag]}, compensation={tile.tag: lost})
                self.folds.finish(own, ref)
            tile_env = dict(env)
            rest = [i for i in self.steps.epilogue if i not in flat]
            for i in (*self._sources(rest, tile_env), *rest):
                self.values.node(i, ref, tile_env)

    def _sources(self, nodes: list[int], known: Env) -> list[int]:
        """Values that the epilogue reads and the row loop computed."""
        found: set[int] = set()
        todo = list(nodes)
        while todo:
            for o in operands(self.program.nodes[todo.pop()]):
                seen = o in known or o in found or o in self.steps.epilogue
                if not seen and not isinstance(self.program.nodes[o], Reduce):
                    found.add(o)
                    todo.append(o)
        return sorted(found)
