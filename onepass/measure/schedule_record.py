"""A schedule as result files store it: its kernel family and plain fields, which can be compared with a planner's candidates."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..plan.schedule import Block, Cover, Loop, Role, RowVectors, Schedule

CHOICES = ("packed", "early_loads", "private_states", "evict_last", "vector_limit", "unroll_copies", "folds_two_sums", "strip_rows")
VECTORS = {RowVectors.RELOAD: "", RowVectors.REGISTERS: "registers", RowVectors.SMEM: "shared memory"}


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """The fields that distinguish the schedules of one kernel. Files omit fields with their defaults."""

    family: str
    rows: tuple[int, ...]  # the rows of a tile or of a step; all tiles, if rows are covered
    cols: tuple[int, ...]
    warps: int
    split: int = 0  # CTAs, or groups of CTAs, that split a loop; 0 without a loop
    stages: int = 1
    prefetch: int = 0
    sector: int = 0
    resident: int = 0  # loads kept in registers
    staged: int = 0  # loads that TMA copies to shared memory
    row_vectors: str = ""  # where row vectors stay: "registers" or "shared memory"; empty: they are loaded for every row
    ctas_per_row: int = 1
    registers: int = 0  # register cap; 0: none
    # What planners choose by themselves. None: as chosen then, or a family without the field.
    packed: bool | None = None
    early_loads: int | None = None
    private_states: bool | None = None
    evict_last: int | None = None  # loads and stores
    vector_limit: int | None = None
    unroll_copies: bool | None = None
    folds_two_sums: bool | None = None
    strip_rows: int | None = None

    @staticmethod
    def of(schedule: Schedule) -> "ScheduleRecord":
        """The record of a schedule."""
        vectors, own = VECTORS[schedule.row_vectors], {f.name for f in fields(schedule)}
        return ScheduleRecord(
            schedule.family,
            _tiles(schedule.rows),
            _tiles(schedule.cols),
            schedule.warps,
            max(_split(schedule.rows), _split(schedule.cols)),
            schedule.stages,
            schedule.prefetch,
            schedule.sector_elems,
            len(schedule.resident),
            len(schedule.staged),
            vectors,
            schedule.ctas_per_row,
            schedule.registers,
            **{name: _choice(getattr(schedule, name)) for name in CHOICES if name in own},
        )

    def without_choices(self) -> "ScheduleRecord":
        """The record without what planners choose by themselves."""
        none: dict[str, Any] = dict.fromkeys(CHOICES)
        return replace(self, **none)

    def has_choices_of(self, other: "ScheduleRecord") -> bool:
        """Whether all recorded choices are as in another record."""
        return all(getattr(self, name) in (None, getattr(other, name)) for name in CHOICES)

    def to_json(self) -> dict[str, Any]:
        """The fields that do not have their defaults."""
        default = {f.name: f.default for f in fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items() if v != default[name]}

    def __str__(self) -> str:
        given = self.to_json()
        family = given.pop("family")
        return f"{family}: " + ", ".join(f"{k} {'+'.join(map(str, v)) if isinstance(v, list) else v}" for k, v in given.items())


def _choice(value: Any) -> Any:
    return len(value) if isinstance(value, frozenset) else value


def _tiles(role: Role) -> tuple[int, ...]:
    match role:
        case Block(size):
            return (size,)
        case Loop(step):
            return (step,)
        case Cover(tiles):
            return tiles


def _split(role: Role) -> int:
    return role.split if isinstance(role, Loop) else 0
