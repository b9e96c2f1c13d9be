"""Random schedules: candidates of the planner with some fields changed, and schedules of random fields in a random family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields, replace
from random import Random
from typing import Any, get_args

from onepass.ir.program import Load, Store
from onepass.ir.size import Bindings, value
from onepass.plan.kernel import Kernel
from onepass.plan.schedule import (
    MultiCtaMixOrder,
    Ring,
    RowVectors,
    Schedule,
    StagedMixOrder,
    StagedRows,
    StagedTiles,
    WholeColumns,
    cover,
)
from onepass.plan.staged_rows import chunk_cover, chunk_cover_unaligned, must_stage, tma_stageable, tma_stageable_unaligned
from onepass.plan.staging.tiles import rows_at_once, tile_stageable
from onepass.plan.thread_layout import explicit_vector

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FAMILIES: tuple[type[Any], ...] = get_args(Schedule)
WALKS_ROWS = ("Outer", "MixOrder", "StagedTiles")  # families whose `step` is along the rows
NUMBERS: dict[str, tuple[int, ...]] = {
    "warps": (1, 1, 2, 4, 8, 3, 64),
    "stages": (1, 2, 3, 4, 17, 0),
    "split": (1, 1, 2, 3, 5, 0),
    "groups": (1, 2, 3, 0),
    "sector_elems": (0, 4, 8, 16, 64, 3),
    "ctas_per_row": (2, 2, 3, 4, 1),
    "strip_rows": (1, 2, 4, 8, 16, 32, 3, 0),
    "registers": (0, 64, 255, 4),
    "vector_limit": (0, 4, 8, 1, 2, 16, 3),
}
ODD = (0, 3, 12, 48)  # sizes that no tile can have
MOST_STEPS = 40  # steps of a drawn loop, or CTAs along a side, so that the interpreter is not slow
MOST_TILES = 12  # of a drawn cover, so that the text stays short


class Draw:
    """Random fields of schedules of one kernel."""

    def __init__(self, rng: Random, kernel: Kernel, sizes: Bindings) -> None:
        self.rng, self.kernel = rng, kernel
        self.extents = {side: value(kernel.extent(getattr(kernel.space, side)), sizes) for side in ("rows", "cols")}

    def _size(self, side: str) -> int:
        """The size of a tile, not so small that there are very many tiles."""
        fitting = [size for size in SIZES if MOST_STEPS * size >= self.extents[side]] or SIZES[-1:]
        return self.rng.choice(fitting if self.rng.random() < 0.95 else ODD)

    def _tiles(self, side: str) -> tuple[int, ...]:
        rng, extent = self.rng, self.extents[side]
        widest = max(rng.choice(SIZES), 1 << (max(1, extent // MOST_TILES) - 1).bit_length())
        kinds: list[Callable[[], tuple[int, ...]]] = [
            lambda: cover(extent, widest),
            lambda: chunk_cover(extent, widest, rng.choice(SIZES)).tiles,
            lambda: (widest,) * max(1, -(-extent // widest) // rng.choice((1, 1, 1, 2, 4))),
            lambda: tuple(self._size(side) for _ in range(rng.randint(0, 4))),
        ]
        return rng.choices(kinds, (4, 4, 3, 1))[0]()

    def _nodes(self, kinds: tuple[type[Any], ...], likely: "list[frozenset[int]]") -> frozenset[int]:
        """Some nodes of these kinds, mostly likely ones."""
        everything = [i for i, node in enumerate(self.kernel.program.nodes) if isinstance(node, kinds)]
        return self.rng.choice([*likely, *likely, frozenset(i for i in everything if self.rng.random() < 0.5)])

    def _ring(self) -> Ring:
        return Ring(self.rng.choice(NUMBERS["split"]), self.rng.choice(NUMBERS["stages"]), self.rng.choice((0, 0, 1, 2, 3, 9, 20)))

    def field(self, family: type[Any], name: str) -> Any:
        """A value of a field."""
        kernel, rng = self.kernel, self.rng
        match name:
            case "height" | "width":
                return 1 if name == "height" and rng.random() < 0.3 else self._size("rows" if name == "height" else "cols")
            case "step":
                return self._size("rows" if family.__name__ in WALKS_ROWS else "cols")
            case "tiles":
                return self._tiles("rows" if family is WholeColumns else "cols")
            case "ring":
                return None if family is StagedRows and rng.random() < 0.3 else self._ring()
            case "row_vectors":
                return rng.choice(list(RowVectors))
            case "resident":
                return self._nodes((Load,), [frozenset(), frozenset(kernel.multi_phase)])
            case "early_loads":
                return self._nodes((Load,), [frozenset(), frozenset(kernel.after_reduction)])
            case "evict_last":
                return self._nodes((object,) if rng.random() < 0.1 else (Load, Store), [])
            case "staged":
                return self._nodes(
                    (Load,),
                    [
                        must_stage(kernel),
                        *(frozenset(able(kernel)) for able in (tma_stageable, tma_stageable_unaligned, tile_stageable)),
                    ],
                )
        if name in NUMBERS:
            return rng.choice(NUMBERS[name])
        default = next(f.default for f in own(family) if f.name == name)
        return rng.random() < 0.5 if isinstance(default, bool) else rng.choice((1, 2, 4, 3, 0))

    def free(self) -> Schedule:
        """A random family with random sizes, and mostly default values in other fields."""
        return self._of(self.rng.choice(FAMILIES), 0.2)

    def _of(self, family: type[Any], chance: float, **given: Any) -> Schedule:
        """A schedule of a family with some given fields; others are random with some chance, else the default."""
        drawn = {
            f.name: self.field(family, f.name)
            for f in own(family)
            if f.name not in given and (f.default is MISSING or self.rng.random() < chance)
        }
        made: Schedule = family(**drawn, **given)
        return made

    def staged(self) -> Schedule:
        """A schedule that is likely to stage rows or tiles in shared memory."""
        rng, kernel, cols = self.rng, self.kernel, self.extents["cols"]
        ring, warps = Ring(rng.choice((1, 2, 3)), rng.choice((1, 2, 3))), rng.choice((1, 2, 4))
        aligned, pieces = frozenset(tma_stageable(kernel)), frozenset(tma_stageable_unaligned(kernel))
        given: dict[str, Any] = {"warps": warps, "staged": aligned}
        family = rng.choice((StagedRows, StagedRows, StagedMixOrder, StagedTiles, StagedTiles, MultiCtaMixOrder))
        if family is StagedTiles:
            width = self._size("cols")
            least = rows_at_once(max(1, width), explicit_vector(kernel), warps)
            given |= {
                "step": least * rng.choice((1, 2, 4)),
                "width": width,
                "strip_rows": least,
                "split": ring.split,
                "staged": frozenset(tile_stageable(kernel)),
            }
        elif family is MultiCtaMixOrder:
            given |= {"tiles": (256,) * max(1, cols // 512), "ctas_per_row": 2, "groups": ring.split, "warps": 1}
        elif family is StagedMixOrder:
            given |= {"tiles": self._tiles("cols"), "ring": ring}
        elif pieces and (covered := chunk_cover_unaligned(cols, 256, 64)):
            given |= {
                "tiles": covered.tiles,
                "warps": rng.choice((1, 2)),
                "ring": rng.choice((ring, ring, None)),
                "unaligned": True,
                "staged": pieces,
            }
        else:
            given |= {"tiles": self._tiles("cols"), "ring": rng.choice((ring, ring, None))}
        return self._of(family, 0.08, **given)

    def changed(self, schedule: Schedule, count: int) -> Schedule:
        """A schedule with some fields changed."""
        family = type(schedule)
        names = self.rng.sample([f.name for f in own(family)], count)
        new: dict[str, Any] = {name: self.field(family, name) for name in names}
        return replace(schedule, **new)


def own(family: type[Any]) -> list[Field[Any]]:
    """The fields of a family that are not derived from others."""
    return [f for f in fields(family) if f.init]
