"""The kernel families, one record each, with only the fields that have a meaning in the family. A Schedule is one of them.

    record             rows     columns   known elsewhere as
    ResidentRows       Block    Cover     persistent inner reduction: whole rows in registers
    StagedRows         Block    Cover     the same in shared memory, one row per CTA
                       Loop     Cover     or one row after another, through a ring buffer
    LoopedRows         Block    Loop      looped inner reduction, peeled
    SplitRows          Block    Loop      the same, with several CTAs per row
    WholeColumns       Cover    Block     a whole column on chip: an outer result is used on the data
    Outer              Loop     Block     outer reduction; several CTAs may share the rows
    StagedTiles        Loop     Block     the same, with every full-size input passing through shared memory, one tile at a time
    MixOrder           Loop     Cover     inner and outer reductions in one pass over whole rows
    StagedMixOrder     Loop     Cover     the same over rows in a ring buffer
    MultiCtaMixOrder   Loop     Cover     the same with several CTAs per row, a range of columns each
    Pointwise          Block    Block     no reduction

Everything that the text of a kernel depends on is here: `plan/candidates.py` sets the sizes and `plan/choices.py` the rest,
`plan/staging/` both of families that stage inputs, and code generation decides nothing. Loads, stores and reductions are named by
their node in the kernel's Program.

`rows`, `cols` and the properties of `Common` say the same of all families, for code that asks only about geometry or storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

from ..legality import Family
from .base import NONE, Common, Ring, RowVectors
from .roles import PIECE_ELEMS, Block, Cover, Loop

# Roles that many schedules share are made once, because planning makes thousands of schedules.
_block, _cover, _loop = lru_cache(maxsize=4096)(Block), lru_cache(maxsize=4096)(Cover), lru_cache(maxsize=4096)(Loop)


@dataclass(frozen=True, slots=True)
class ResidentRows(Common):
    """Each CTA holds some whole rows in registers, as unrolled tiles."""

    height: int  # rows per CTA
    tiles: tuple[int, ...]  # widths
    warps: int
    sector_elems: int = 0  # elements per sector if rows start inside a sector and are read from its start; 0: aligned rows
    resident: frozenset[int] = NONE  # multi-phase loads kept in registers
    packed: bool = False  # in their storage type, widened again in each walk; else widened once
    early_loads: frozenset[int] = NONE  # loads that only later walks need, issued with those of the first walk
    name: ClassVar[str] = "inner"
    sides: ClassVar[Family] = Family.INNER

    def __post_init__(self) -> None:
        self._derive(_block(self.height), _cover(self.tiles))


@dataclass(frozen=True, slots=True)
class LoopedRows(Common):
    """Each CTA walks some rows in steps along the columns. Also runs kernels without reductions whose rows are unaligned."""

    height: int  # rows per CTA
    step: int  # columns
    warps: int
    stages: int = 1  # of the walk's software pipeline
    sector_elems: int = 0  # as in ResidentRows
    private_states: bool = False  # each thread keeps a state of its own, and threads exchange states once, after the walk
    name: ClassVar[str] = "inner looped"
    sides: ClassVar[Family] = Family.INNER

    def __post_init__(self) -> None:
        self._derive(_block(self.height), _loop(self.step))


@dataclass(frozen=True, slots=True)
class SplitRows(Common):
    """Several CTAs walk each row, in interleaved steps."""

    height: int  # rows per CTA
    step: int  # columns
    split: int  # CTAs per row
    warps: int
    stages: int = 1  # of the walk's software pipeline
    private_states: bool = False  # as in LoopedRows
    name: ClassVar[str] = "inner split"
    sides: ClassVar[Family] = Family.INNER

    def __post_init__(self) -> None:
        self._derive(_block(self.height), _loop(self.step, self.split))


@dataclass(frozen=True, slots=True)
class WholeColumns(Common):
    """Each CTA holds some whole columns in registers, as unrolled tiles."""

    tiles: tuple[int, ...]  # heights
    width: int  # columns per CTA
    warps: int
    resident: frozenset[int] = NONE  # as in ResidentRows
    packed: bool = False
    name: ClassVar[str] = "column"
    sides: ClassVar[Family] = Family.OUTER

    def __post_init__(self) -> None:
        self._derive(_cover(self.tiles), _block(self.width))


@dataclass(frozen=True, slots=True)
class Outer(Common):
    """Each CTA walks down the rows of some columns."""

    step: int  # rows
    width: int  # columns per CTA
    warps: int
    split: int = 1  # CTAs that share the rows of a column, interleaved
    stages: int = 1  # of the walk's software pipeline
    name: ClassVar[str] = "outer"
    sides: ClassVar[Family] = Family.OUTER

    def __post_init__(self) -> None:
        self._derive(_loop(self.step, self.split), _block(self.width))

    @property
    def family(self) -> str:
        return "outer split" if self.split > 1 else "outer"


@dataclass(frozen=True, slots=True)
class MixOrder(Common):
    """Each CTA walks down the rows, some whole rows at a time, and accumulates reductions over rows."""

    step: int  # rows
    split: int  # CTAs that share the rows, interleaved
    tiles: tuple[int, ...]  # widths
    warps: int
    stages: int = 1  # of the walk's software pipeline
    resident: frozenset[int] = NONE  # as in ResidentRows
    packed: bool = False
    row_vectors: RowVectors = RowVectors.RELOAD  # or in registers
    name: ClassVar[str] = "mix-order"
    sides: ClassVar[Family] = Family.MIX

    def __post_init__(self) -> None:
        self._derive(_loop(self.step, self.split), _cover(self.tiles))


@dataclass(frozen=True, slots=True)
class StagedRows(Common):
    """Each CTA reads rows that TMA copies to shared memory: a single row, or with a ring one row after another."""

    tiles: tuple[int, ...]  # widths of a row's chunks
    warps: int
    ring: Ring | None = None  # None: one row per CTA
    unaligned: bool = False  # rows start anywhere, so TMA copies pieces of the flat tensor
    staged: frozenset[int] = NONE  # full-size loads that TMA copies
    registers: int = 0  # cap per thread; 0: none
    cols: Cover = field(init=False, repr=False, compare=False)
    name: ClassVar[str] = "inner staged"
    sides: ClassVar[Family] = Family.INNER

    def __post_init__(self) -> None:
        self._derive(_loop(1, self.ring.split) if self.ring else _block(1), _cover(self.tiles))

    @property
    def stages(self) -> int:
        return self.ring.stages if self.ring else 1

    @property
    def prefetch(self) -> int:
        return self.ring.prefetch if self.ring else 0

    @property
    def splits(self) -> int:
        return 1  # every row has one CTA

    @property
    def sector_elems(self) -> int:
        return PIECE_ELEMS if self.unaligned else 0


@dataclass(frozen=True, slots=True)
class StagedMixOrder(Common):
    """Each CTA reads one row after another from a ring, and accumulates reductions over rows in registers."""

    tiles: tuple[int, ...]  # widths of a row's chunks
    warps: int
    ring: Ring
    row_vectors: RowVectors = RowVectors.RELOAD
    unroll_copies: bool = False  # a walk over copies that are prefetched may be unrolled: the compiler knows its trip count
    staged: frozenset[int] = NONE  # as in StagedRows
    registers: int = 0
    cols: Cover = field(init=False, repr=False, compare=False)
    name: ClassVar[str] = "mix-order staged"
    sides: ClassVar[Family] = Family.MIX

    def __post_init__(self) -> None:
        self._derive(_loop(1, self.ring.split), _cover(self.tiles))

    @property
    def stages(self) -> int:
        return self.ring.stages

    @property
    def prefetch(self) -> int:
        return self.ring.prefetch


@dataclass(frozen=True, slots=True)
class MultiCtaMixOrder(Common):
    """Each CTA reads its part of the columns of one row after another, as one of a group, and accumulates reductions over rows."""

    tiles: tuple[int, ...]  # widths of the chunks of one CTA's columns
    ctas_per_row: int = field()  # explicit, because the base class has a property of this name
    groups: int = field()  # of CTAs; they share the rows, interleaved
    warps: int = field()
    stages: int = 2  # rows a ring has slots for
    row_vectors: RowVectors = RowVectors.RELOAD
    folds_two_sums: bool = False  # the two sums along a row are exchanged together between threads
    staged: frozenset[int] = NONE  # as in StagedRows
    registers: int = 0
    cols: Cover = field(init=False, repr=False, compare=False)
    name: ClassVar[str] = "mix-order multi-CTA"
    sides: ClassVar[Family] = Family.MIX

    def __post_init__(self) -> None:
        self._derive(_loop(1, self.groups), _cover(self.tiles))


@dataclass(frozen=True, slots=True)
class StagedTiles(Common):
    """Each CTA walks down the rows of some columns, in tiles that TMA copies to a ring in shared memory."""

    step: int  # rows per tile
    width: int  # columns per CTA
    warps: int
    stages: int = 2  # tiles a ring has slots for
    split: int = 1  # CTAs that share the rows of a column, interleaved
    strip_rows: int = 1  # rows of a tile that threads read at once
    staged: frozenset[int] = NONE  # as in StagedRows
    registers: int = 0
    name: ClassVar[str] = "outer staged"
    sides: ClassVar[Family] = Family.OUTER

    def __post_init__(self) -> None:
        self._derive(_loop(self.step, self.split), _block(self.width))

    @property
    def family(self) -> str:
        return "outer staged split" if self.split > 1 else "outer staged"


@dataclass(frozen=True, slots=True)
class Pointwise(Common):
    """Each CTA computes one tile."""

    height: int
    width: int
    warps: int
    name: ClassVar[str] = "pointwise"
    sides: ClassVar[Family] = Family.POINTWISE

    def __post_init__(self) -> None:
        self._derive(_block(self.height), _block(self.width))


Schedule: TypeAlias = (
    ResidentRows
    | LoopedRows
    | SplitRows
    | WholeColumns
    | Outer
    | MixOrder
    | StagedRows
    | StagedMixOrder
    | MultiCtaMixOrder
    | StagedTiles
    | Pointwise
)

# fmt: off
__all__ = ["LoopedRows", "MixOrder", "MultiCtaMixOrder", "Outer", "Pointwise", "ResidentRows", "Schedule", "SplitRows",
           "StagedMixOrder", "StagedRows", "StagedTiles", "WholeColumns", "renumbered"]
# fmt: on
NODE_FIELDS = ("resident", "early_loads", "staged", "evict_last")  # fields that name nodes of the kernel


def renumbered(schedule: Schedule, moved: dict[int, int]) -> Schedule:
    """The schedule of a kernel whose nodes were renumbered. Nodes that are gone are dropped."""
    own = {f.name for f in fields(schedule)}.intersection(NODE_FIELDS)
    found: dict[str, Any] = {name: frozenset(moved[i] for i in getattr(schedule, name) if i in moved) for name in own}
    return replace(schedule, **found)
