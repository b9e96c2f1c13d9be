"""Random schedules: candidates of the planner with some fields changed, and schedules of random fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from random import Random
from typing import Any

from onepass.ir.program import Load
from onepass.ir.size import Bindings, value
from onepass.plan.kernel import Kernel
from onepass.plan.schedule import Block, Cover, Loop, Role, Schedule, cover
from onepass.plan.staged_rows import chunk_cover, chunk_cover_unaligned, must_stage, tma_stageable, tma_stageable_unaligned
from onepass.plan.staged_tiles import tile_stageable

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FIELDS = tuple(field.name for field in fields(Schedule))
ODD = (0, 3, 12, 48)  # what no tile can have
MOST_STEPS = 40  # of a drawn walk, or CTAs along a side, so that the interpreter is not slow
MOST_TILES = 12  # of a drawn cover, so that the text stays short


class Draw:
    """Random fields of schedules of one kernel."""

    def __init__(self, rng: Random, kernel: Kernel, sizes: Bindings) -> None:
        self.rng, self.kernel = rng, kernel
        self.extents = {side: value(kernel.extent(getattr(kernel.space, side)), sizes) for side in ("rows", "cols")}

    def _size(self, side: str) -> int:
        """A size of a tile, not so small that there are very many of them."""
        fitting = [size for size in SIZES if MOST_STEPS * size >= self.extents[side]] or SIZES[-1:]
        return self.rng.choice(fitting if self.rng.random() < 0.95 else ODD)

    def _cover(self, side: str) -> Cover:
        rng, extent = self.rng, self.extents[side]
        widest = max(rng.choice(SIZES), 1 << (max(1, extent // MOST_TILES) - 1).bit_length())
        kinds: list[Callable[[], Cover]] = [
            lambda: Cover(cover(extent, widest)), lambda: chunk_cover(extent, widest, rng.choice(SIZES)),
            lambda: Cover((widest,) * max(1, -(-extent // widest) // rng.choice((1, 1, 1, 2, 4)))),
            lambda: Cover(tuple(self._size(side) for _ in range(rng.randint(0, 4))))]
        return rng.choices(kinds, (4, 4, 3, 1))[0]()

    def role(self, side: str) -> Role:
        """A role of a side."""
        split = self.rng.choice((1, 1, 2, 3, 5, 0))
        return self.rng.choice((Block(self._size(side)), self._cover(side), Loop(self._size(side), split), *(
            (Block(1), Loop(1, split)) if side == "rows" else ())))

    def loads(self, more: "list[frozenset[int]]") -> frozenset[int]:
        """Some loads."""
        everything = [i for i, node in enumerate(self.kernel.program.nodes) if isinstance(node, Load)]
        return self.rng.choice([*more, *more, frozenset(i for i in everything if self.rng.random() < 0.5)])

    def field(self, name: str) -> Any:
        """A value of a field."""
        kernel, rng = self.kernel, self.rng
        match name:
            case "rows" | "cols":
                return self.role(name)
            case "resident":
                return self.loads([frozenset(), frozenset(kernel.multi_phase)])
            case "staged":
                return self.loads([must_stage(kernel), *(frozenset(able(kernel)) for able in (
                    tma_stageable, tma_stageable_unaligned, tile_stageable))])
            case "hoisted" | "beside" | "accumulates_columns":
                return rng.random() < 0.5
        return rng.choice({"warps": (1, 1, 2, 4, 8, 3, 64), "stages": (1, 2, 3, 4, 17, 0), "prefetch": (0, 1, 2, 3, 9, 20),
                           "sector_elems": (0, 4, 8, 16, 64, 3), "ctas_per_row": (1, 2, 3, 4), "registers": (0, 64, 255, 4)}[name])

    def free(self) -> Schedule:
        """Roles at random, and other fields at their default more often than not."""
        others = {name: self.field(name) for name in FIELDS[3:] if self.rng.random() < 0.2}
        return Schedule(self.role("rows"), self.role("cols"), self.field("warps"), **others)

    def staged(self) -> Schedule:
        """What may well be a loop over staged rows, or over staged tiles."""
        split = self.rng.choice((1, 2, 3))
        accumulates, unaligned = self.rng.random() < 0.5, tma_stageable_unaligned(self.kernel)
        staged = frozenset(unaligned or tma_stageable(self.kernel))
        rows: Role = Loop(1, split) if accumulates or self.rng.random() < 0.7 else Block(1)
        one = Schedule(rows, self._cover("cols"), self.rng.choice((1, 2, 4)), self.rng.choice((1, 2, 3)), staged=staged,
                       accumulates_columns=accumulates, sector_elems=64 if unaligned else 0)
        tiles = replace(one, rows=Loop(self._size("rows"), split), cols=Block(self._size("cols")), accumulates_columns=False,
                        staged=frozenset(tile_stageable(self.kernel)), sector_elems=0)
        shared = replace(one, cols=Cover((256,) * max(1, self.extents["cols"] // 512)), warps=1, stages=2, ctas_per_row=2)
        rest = chunk_cover_unaligned(self.extents["cols"], 256, 64) if unaligned else None
        found = replace(one, cols=rest, warps=self.rng.choice((1, 2)), accumulates_columns=False) if rest else one
        found = self.rng.choices((found, tiles, shared if accumulates else found), (4, 3, 3))[0]
        return self.changed(found, self.rng.choice((0, 0, 1, 2)))

    def changed(self, schedule: Schedule, count: int) -> Schedule:
        """A schedule with some fields changed."""
        names = self.rng.sample(FIELDS, count)
        return replace(schedule, **{name: self.field(name) for name in names})
