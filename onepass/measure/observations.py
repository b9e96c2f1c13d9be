"""Every stored measurement as one type, to fit the cost model and the floor to.

`bench/results/<card>` holds runs of `onepass bench` (results.py) and files measured by hand, whose groups list runs of workloads
under schedules. Both become Observations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import BadResults, OnepassError, printable
from ..plan.footprint import Footprint
from .bounded import in_bounds, truncated
from .results import ANCHORS, Run, load_values, parse
from .schedule_record import ScheduleRecord
from .suites import Job

MIB = 1 << 20
# The share of a plain kernel's bytes that it reads.
READ_SHARE = {"read": 1.0, "copy": 1 / 2, "add": 2 / 3}


@dataclass(frozen=True, slots=True)
class Observation:
    """The measured time of one workload, under known schedules or by another provider."""

    workload: str  # of a suite, a captured graph, or a plain read, copy or add of a number of bytes
    shape: tuple[int, ...]
    dtype: str
    kernel: str  # which kernel, if not all of the workload: a part of it, or the region of a graph
    schedules: tuple[ScheduleRecord, ...]  # of the kernels in turn, first the one that reads the data; empty if unknown
    us: float
    registers: int | None  # of the kernel that takes the most
    spill_bytes: int
    variant: str  # how its kernels differ from those the schedules give, or the provider; empty: they do not
    current: bool  # whether the same schedules give the same kernels today
    group: str  # of observations that were made together
    card: str
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        texts = (self.workload, self.dtype, self.kernel, self.variant, self.group, self.card, *self.versions.values())
        counts = (*self.shape, self.spill_bytes, *([] if self.registers is None else [self.registers]))
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a name or a version is not a text")
        if not all(type(n) is int and n >= 0 and in_bounds(n) for n in counts):
            raise TypeError("a size or a count is not a whole number within bounds")
        if type(self.us) not in (int, float) or not (in_bounds(self.us) and self.us > 0):
            raise ValueError("a time is not a number above 0 and within bounds")

    @property
    def id(self) -> str:
        """The workload at its size."""
        parts = [self.workload, "x".join(map(str, self.shape)), self.dtype, self.kernel]
        return " ".join(p for p in parts if p)

    @property
    def footprint(self) -> Footprint | None:
        """The least bytes it moves; None if its Program is not known here."""
        if self.workload in READ_SHARE:
            read = round(READ_SHARE[self.workload] * self.shape[0])
            return Footprint(read, self.shape[0] - read)
        return None if self.kernel else _footprint(self.workload, self.shape, self.dtype)


@cache
def _footprint(workload: str, shape: tuple[int, ...], dtype: str) -> Footprint | None:
    try:
        return Job(workload, shape, dtype).footprint
    except (OnepassError, RuntimeError):  # no such workload, or not of such a shape or type
        return None


def observations(folder: Path) -> tuple[Observation, ...]:
    """All measurements in a folder of results, in the order of their files."""
    found: list[Observation] = []
    for path in sorted(folder.glob("*.json")):
        raw = load_values(path)
        try:
            if "schema" in raw:
                found += _of_run(path.name, parse(raw, str(path)))
            elif "groups" in raw or "copies" in raw:
                found += _of_groups(path.name, raw)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise BadResults(file=printable(path.name), detail=truncated(f"{type(error).__name__}: {error}")) from None
    return tuple(found)


def _of_run(file: str, run: Run) -> Iterator[Observation]:
    def one(
        workload: str,
        shape: tuple[int, ...],
        dtype: str,
        us: float,
        provider: str = "",
        schedules: tuple[ScheduleRecord, ...] = (),
        registers: int | None = None,
        spill_bytes: int = 0,
    ) -> Observation:
        return Observation(
            workload, shape, dtype, "", schedules, us, registers, spill_bytes, provider, True, file, run.card, run.versions
        )

    for anchor in run.anchors:
        yield one(anchor.kind, (anchor.bytes,), "", anchor.us, "torch")
    for row in run.rows:
        for provider in row.results:
            if us := row.us(provider):
                yield one(row.workload, row.shape, row.dtype, us, provider)
    for regret in run.regret:
        workload, shape, dtype = regret.id.split(" ")
        for candidate in regret.candidates:
            if candidate.us:
                yield one(
                    workload,
                    tuple(map(int, shape.split("x"))),
                    dtype,
                    candidate.us,
                    "",
                    candidate.schedules,
                    candidate.registers,
                    candidate.spill_bytes or 0,
                )


def _of_groups(file: str, raw: Mapping[str, Any]) -> Iterator[Observation]:
    def one(workload: str, shape: tuple[int, ...], dtype: str, us: float, variant: str) -> Observation:
        return Observation(workload, shape, dtype, "", (), us, None, 0, variant, False, file, raw["card"], raw["versions"])

    for group in raw.get("groups", []):
        for workload in group["workloads"]:
            yield from (_of_group(file, raw, group, workload, run) for run in workload["runs"] if run["us"])
    for kind, sizes in raw.get("copies", {}).items():
        for size, us in sizes.items():
            yield one("copy", (2 * MIB * int(size.split()[0]),), "", us, kind)
    for anchor in raw.get("anchors", []):
        assert anchor["kind"] in ANCHORS
        yield one(anchor["kind"], (anchor["bytes"],), "", anchor["us"], "torch")


def _of_group(
    file: str, raw: Mapping[str, Any], group: Mapping[str, Any], workload: Mapping[str, Any], run: Mapping[str, Any]
) -> Observation:
    return Observation(
        workload["workload"],
        tuple(workload["shape"]),
        workload["dtype"],
        workload.get("kernel", ""),
        tuple(map(_record, run.get("schedules", []))),
        run["us"],
        run.get("registers"),
        run.get("spill_bytes") or 0,
        run.get("variant", ""),
        group["current"],
        f"{file}: {group['about']}",
        raw["card"],
        raw["versions"],
    )


def _record(fields: Mapping[str, Any]) -> ScheduleRecord:
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return ScheduleRecord(**given)
