"""What all kernel families have in common: fields, derived geometry, the answers of families that lack a field, and text."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

from ..legality import Family
from .roles import Block, Cover, Loop, Role

NONE: frozenset[int] = frozenset()  # no nodes


class RowVectors(Enum):
    """Where a loop over rows reads row vectors (weight, bias) from."""

    RELOAD = "reloaded for every row"
    REGISTERS = "row vectors in registers"  # loaded once, before the loop
    SMEM = "row vectors in smem"  # copied to shared memory once, before the loop


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring buffer of rows in shared memory, and the CTAs that loop over rows with one each."""

    split: int  # CTAs that share the rows, interleaved
    stages: int = 1  # rows it has slots for
    prefetch: int = 0  # copies of the next row that a ring of one row also has room for

    def __str__(self) -> str:
        parts = [f"{self.stages} stages"] if self.stages > 1 else []
        return ", ".join(parts + ([f"prefetch {self.prefetch}"] if self.prefetch else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What all families have, and the answers of families that lack a field."""

    evict_last: frozenset[int] = NONE  # loads and stores whose lines L2 evicts last
    vector_limit: int = 0  # adjacent columns per thread and access, at most; 0: 16 bytes of the narrowest full-size tensor
    rows: Role = field(init=False, repr=False, compare=False)
    cols: Role = field(init=False, repr=False, compare=False)
    name: ClassVar[str]
    sides: ClassVar[Family]  # which reductions it computes

    def __str__(self) -> str:
        own: list[str] = []
        common: list[str] = []
        for f in fields(self):
            if f.name not in _SIZES and (text := _text(f.name, getattr(self, f.name))):
                (common if f.name in Common.__slots__ else own).append(text)
        return f"{self.family}: rows {_role(self.rows)}, cols {_role(self.cols)}, " + ", ".join(own + common)

    @property
    def family(self) -> str:
        """The kernel family's name, in the field's terms."""
        return self.name

    @property
    def splits(self) -> int:
        """The number of CTAs, or groups of CTAs, that share one result. Above 1, a second kernel joins their partial states."""
        return max(role.split if isinstance(role, Loop) else 1 for role in (self.rows, self.cols))

    @property
    def ctas_per_row(self) -> int:
        return 1

    @property
    def accumulates_columns(self) -> bool:
        """Whether a loop over staged rows also accumulates reductions over rows."""
        return bool(self.staged) and self.sides is Family.MIX

    @property
    def stages(self) -> int:
        """Pipeline stages of a loop, or slots of a ring."""
        return 1

    @property
    def prefetch(self) -> int:
        return 0

    @property
    def sector_elems(self) -> int:
        """Elements that unaligned rows are read in: per sector, or per piece; 0: aligned rows."""
        return 0

    @property
    def resident(self) -> frozenset[int]:
        """Multi-phase loads kept in registers."""
        return NONE

    @property
    def packed(self) -> bool:
        return False

    @property
    def early_loads(self) -> frozenset[int]:
        return NONE

    @property
    def private_states(self) -> bool:
        return False

    @property
    def row_vectors(self) -> RowVectors:
        return RowVectors.RELOAD

    @property
    def reloads_vectors(self) -> bool:
        """Whether a loop over rows reads row vectors again for every row."""
        return self.row_vectors is RowVectors.RELOAD

    @property
    def staged(self) -> frozenset[int]:
        """Full-size loads that TMA copies to shared memory."""
        return NONE

    @property
    def registers(self) -> int:
        """The register cap per thread; 0: no cap."""
        return 0

    def _derive(self, rows: Role, cols: Role) -> None:
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "cols", cols)


# How fields read whose name and value would not say it. Others are printed by name. Sizes are printed with the side they belong to.
_SIZES = frozenset({"rows", "cols", "height", "width", "step", "tiles", "split", "groups"})
_WORDS: dict[str, Any] = {
    "ctas_per_row": lambda n: f"{n} CTAs per row",
    "warps": lambda n: f"{n} warp{'s' * (n > 1)}",
    "stages": lambda n: f"{n} stages" if n > 1 else "",
    "ring": lambda ring: str(ring or ""),
    "sector_elems": lambda n: f"sector {n}" if n else "",
    "early_loads": lambda nodes: f"{len(nodes)} loaded early" if nodes else "",
    "row_vectors": lambda where: "" if where is RowVectors.RELOAD else where.value,
    "strip_rows": lambda n: f"strips of {n} rows",
    "registers": lambda n: f"at most {n} registers" if n else "",
    "vector_limit": lambda n: f"vectors of {n}" if n else "",
    "evict_last": lambda nodes: f"{len(nodes)} evicted last" if nodes else "",
}


def _text(name: str, value: Any) -> str:
    """A field in words; empty for a default that is not worth a word."""
    if name in _WORDS:
        return str(_WORDS[name](value))
    words = name.replace("_", " ")
    match value:
        case bool():
            return words if value else ""
        case frozenset():
            return f"{len(value)} {words}" if value else ""
        case _:
            return f"{words} {value}"


def _role(role: Role) -> str:
    match role:
        case Block(size):
            return f"block {size}"
        case Cover(tiles):
            return "cover " + "+".join(map(str, tiles))
        case Loop(step, split):
            return f"loop {step}" + (f" split {split}" if split > 1 else "")
