"""Walks over staged rows, and loops over the rows of a CTA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from .folds import Running
from .gluon_mix_order import Accumulation
from .kernel_ir import CtaBarrier, For, Name
from .memory import Env
from .names import SPLIT
from .rings import Ring
from .row_access import RowAccess
from .staged_values import RowParts
from .steps import Walk
from .tile_refs import Segment, TileRef

Finish = Callable[[dict[int, Running], TileRef], None]  # reads out the reductions of a walk


class Rows(Protocol):
    """The order in which a CTA processes its rows."""

    def open(self, env: Env, tiles: list[Segment]) -> None:
        """Before the loop over rows, whose first turn is counted already."""

    def row(self, env: Env, tiles: list[Segment]) -> None:
        """One iteration of the loop."""


class RowWalks:
    """Walks over one row. Made of parts that know nothing of each other's kinds."""

    def __init__(self, parts: RowParts, ring: Ring, access: RowAccess, accumulation: Accumulation | None) -> None:
        self.scope, self.builder, self.at, self.steps = parts.scope, parts.scope.builder, parts.at, parts.steps
        self.values, self.folds, self.ring, self.access = parts.values, parts.folds, ring, access
        self.accumulation = accumulation

    def loop(self, rows: Rows, env: Env, tiles: list[Segment]) -> None:
        """All rows of a CTA, one after another."""
        if self.accumulation:
            self.accumulation.open(tiles, env)
        self.values.in_row_loop = self.accumulation is not None
        self.ring.start()
        rows.open(env, tiles)
        with self.builder.block(For(Name("row"), SPLIT, "row_count", self.at.split)):
            rows.row(env, tiles)
        self.values.in_row_loop = False
        if self.accumulation:
            self.accumulation.close(env)

    def row(self, outside: Env, tiles: list[Segment]) -> None:
        """One row: its walks in order, each after its uniform values."""
        last, values = len(self.steps.walks) - 1, self.values
        if self.accumulation:
            self.accumulation.zeros(range(last + 1), Name("row"))
        self.ring.enter_row()
        at = self.name_row("")
        self.access.enter_row()
        env = dict(outside)
        for p, walk in enumerate(self.steps.walks):
            values.walk = p
            self.uniform(walk, at, env)
            if p == 0:  # issue the per-row loads before waiting for the row
                self.ring.arrive()
                self.access.patch_tail()
                self.builder.add(CtaBarrier())  # without this barrier Triton inserts one per chunk
            self.walk(walk, env, at, tiles, first=p == 0, last=p == last)
        self.ring.leave_row()
        self.ring.advance()
        for i in self.steps.trailing:
            values.node(i, at, env)
        if self.accumulation:
            self.accumulation.feed(self.steps.row_folds, at, env)

    def name_row(self, tag: str) -> TileRef:
        """Name the index of a row."""
        self.builder.set(f"row_index{tag}", f"row{tag}.to(gl.int64)" if self.scope.wide else f"row{tag}")
        self.builder.set(f"rows{tag}", f"row_index{tag} + gl.arange(0, 1, layout=gl.SliceLayout(1, TILE))[:, None]")
        return TileRef(row=f"rows{tag}")

    def uniform(self, walk: Walk, at: TileRef, env: Env) -> None:
        """The values that do not vary along a row, except those in scope already."""
        for i in walk.uniform:
            if i not in env:
                self.values.node(i, at, env)

    def walk(
        self, walk: Walk, env: Env, at: TileRef, tiles: list[Segment], first: bool, last: bool, finish: Finish | None = None
    ) -> None:
        """One walk over a row, the `first` to read it, the `last`, or another."""
        chosen = self.accumulation.tiles_of(walk, tiles) if self.accumulation else tiles
        here = [replace(t, ref=t.ref.at_rows(at)) for t in chosen]
        self.access.enter_walk(self.values.walk)
        running = {f.node: self.folds.running(f) for f in walk.folds}
        for state in running.values():
            self.folds.start(state, [t.ref for t in here if t.loop is not None])
        self.ring.visit(here, lambda tile: self._chunk(walk, dict(env), tile, running), first, last)
        (finish or self._finish)(running, here[0].ref)

    def _finish(self, running: dict[int, Running], ref: TileRef) -> None:
        for state in running.values():
            self.folds.finish(state, ref)

    def _chunk(self, walk: Walk, env: Env, tile: Segment, running: dict[int, Running]) -> None:
        self.builder.add(*tile.prepare)
        for i in walk.body:
            self.values.node(i, tile.ref, env)
        for fold in walk.folds:
            self.folds.feed(running[fold.node], tile.ref, env, unrolled=tile.loop is None)
        if self.accumulation:
            self.accumulation.feed(walk.accumulated, tile.ref, env)


class EachRow:
    """A CTA processes its rows on its own, each from the first walk to the last."""

    def __init__(self, walks: RowWalks) -> None:
        self._walks = walks

    def open(self, env: Env, tiles: list[Segment]) -> None:
        """Nothing precedes the first row."""

    def row(self, env: Env, tiles: list[Segment]) -> None:
        """All walks over a row."""
        self._walks.row(env, tiles)
