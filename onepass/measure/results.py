"""Results of a bench run as frozen values and as JSON: written by bench, read by plot and compare.

Only measured values are stored. Rates, ratios and summaries are derived: the JSON contains them for human readers, and parsing
recomputes them, so a file cannot contradict itself.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from .. import files
from ..errors import BadResults, BadSpec, printable
from .bounded import OutOfBounds, in_bounds, load_json, truncated
from .schedule_record import ScheduleRecord

SCHEMA = 2
ONEPASS_PROVIDERS = ("onepass", "onepass-tuned")
PROVIDERS = (*ONEPASS_PROVIDERS, "eager", "inductor", "inductor-nonstrict", "inductor-max", "liger", "quack")
ANCHORS = ("read", "copy", "add")
MAX_DIMS = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Anchor:
    """A plain read, copy or add, measured in the same run: the memory rate that a trivial kernel reaches on this GPU."""

    kind: str
    bytes: int
    us: float

    def __post_init__(self) -> None:
        _require(self.kind in ANCHORS, f"an anchor's kind is one of {', '.join(ANCHORS)}, not {self.kind!r}")
        _require(self.bytes > 0 and self.us > 0, "the bytes and the time of an anchor are above 0")

    @property
    def gbps(self) -> float:
        return self.bytes / self.us / 1e3


@dataclass(frozen=True, slots=True)
class Result:
    """One provider on one row: a time, or the reason why there is none. The time of a wrong answer is not used."""

    us: float | None = None  # the median
    spread: float | None = None  # between the 20th and 80th percentile, relative to the median
    runs: int = 0
    kernels: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    predicted_us: float | None = None
    host_us: float | None = None
    graph_us: float | None = None
    error: str | None = None
    wrong: str | None = None

    def __post_init__(self) -> None:
        _require(self.us is None or self.us > 0, "a time is above 0; a provider without a time has us = null and an error")
        _require(self.us is not None or bool(self.error or self.wrong), "a result without a time needs a reason in error or wrong")
        _require(self.spread is None or self.spread >= 0, "a spread is 0 or more")

    @property
    def ok(self) -> bool:
        """Whether the answer is right and has a time."""
        return self.us is not None and not self.error and not self.wrong


@dataclass(frozen=True, slots=True)
class Row:
    """One workload at one size, and the result of each provider."""

    workload: str
    shape: tuple[int, ...]
    dtype: str
    id: str
    floor_bytes: int
    floor_us: float
    results: Mapping[str, Result]

    def __post_init__(self) -> None:
        unknown = [p for p in self.results if p not in PROVIDERS]
        _require(not unknown, f"providers are {', '.join(PROVIDERS)}, not {', '.join(unknown)}")
        _require(self.floor_bytes >= 0 and self.floor_us >= 0, "a floor is 0 or more")
        _require(len(self.shape) <= MAX_DIMS and all(n > 0 for n in self.shape), f"a shape has at most {MAX_DIMS} sizes, above 0")

    def us(self, provider: str) -> float | None:
        """The time of a provider; None unless its answer is right."""
        result = self.results.get(provider)
        return result.us if result is not None and result.ok else None

    def gbps(self, provider: str) -> float | None:
        """The floor bytes of the workload divided by the time of a provider."""
        us = self.us(provider)
        return self.floor_bytes / us / 1e3 if us else None

    def times_floor(self, provider: str) -> float | None:
        us = self.us(provider)
        return us / self.floor_us if us and self.floor_us else None

    @property
    def best_peer(self) -> str | None:
        """The fastest provider other than onepass."""
        peers = (p for p in self.results if p not in ONEPASS_PROVIDERS and self.us(p))
        return min(peers, key=lambda p: self.us(p) or math.inf, default=None)

    def against(self, peer: str | None, ours: str = "onepass") -> float | None:
        """The time of a peer divided by that of onepass: above 1, onepass is faster."""
        ours_us, peer_us = self.us(ours), self.us(peer) if peer else None
        return peer_us / ours_us if ours_us and peer_us else None

    @property
    def against_best_peer(self) -> float | None:
        return self.against(self.best_peer)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate plan of a workload. `us` is None if it could not be run."""

    schedules: tuple[ScheduleRecord, ...]  # of its kernels, without those that only join partial results
    family: str
    predicted_us: float | None
    us: float | None
    registers: int | None = None
    spill_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Regret:
    """The time of the default plan compared with the best of the measured plans."""

    id: str
    picked_us: float
    best_us: float
    predicted_us: float | None
    candidates: tuple[Candidate, ...]

    def __post_init__(self) -> None:
        _require(self.picked_us > 0 and self.best_us > 0, "picked_us and best_us are above 0")

    @property
    def regret(self) -> float:
        """0 if the picked plan is the best, 0.1 if it takes 10 % longer."""
        return self.picked_us / self.best_us - 1


@dataclass(frozen=True, slots=True)
class Worst:
    """The row with the worst value of a metric."""

    id: str
    value: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary metrics of a suite, for onepass with default settings."""

    geomean_times_floor: float | None
    worst_times_floor: Worst | None
    geomean_against_best_peer: float | None
    worst_against_best_peer: Worst | None
    geomean_against_inductor: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a suite on one card."""

    suite: str
    date: str
    card: str  # name from the driver
    device: str  # name in `onepass.device`
    versions: Mapping[str, str]
    anchors: tuple[Anchor, ...] = ()
    rows: tuple[Row, ...] = ()
    regret: tuple[Regret, ...] = ()

    def __post_init__(self) -> None:
        try:
            datetime.fromisoformat(self.date)
        except ValueError:
            _require(False, f"the date {self.date!r} is not in ISO form, such as 2026-01-31T12:00:00")
        twice = sorted(i for i, n in Counter(r.id for r in self.rows).items() if n > 1)
        _require(not twice, f"several rows have the same id: {', '.join(twice)}")

    @property
    def summary(self) -> Summary:
        """Summary metrics of the rows."""
        return summarize(self.rows)


def row_id(workload: str, shape: Iterable[int], dtype: str) -> str:
    """The id of a row, such as `rms_norm_backward 8192x8192 bf16`."""
    return f"{workload} {'x'.join(map(str, shape))} {dtype}"


def geomean(values: Iterable[float]) -> float | None:
    """The geometric mean; None for no values."""
    logs = [math.log(v) for v in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def summarize(rows: Iterable[Row]) -> Summary:
    """Summary metrics of some rows. Rows without a time of onepass are ignored here; the tables list them."""
    rows = tuple(rows)
    floors = {r.id: v for r in rows if (v := r.times_floor("onepass"))}
    peers = {r.id: v for r in rows if (v := r.against_best_peer)}
    slowest, closest = max(floors, key=floors.__getitem__, default=None), min(peers, key=peers.__getitem__, default=None)
    return Summary(
        geomean(floors.values()),
        Worst(slowest, floors[slowest]) if slowest else None,
        geomean(peers.values()),
        Worst(closest, peers[closest]) if closest else None,
        geomean(v for r in rows if (v := r.against("inductor"))),
    )


# ---- to JSON


def to_json(run: Run) -> dict[str, Any]:
    """The run as JSON-ready values, including derived ones."""
    plain = _plain(run)
    found = {
        "schema": SCHEMA,
        **{k: v for k, v in plain.items() if k != "regret"},
        "anchors": [{**_plain(a), "gbps": _rounded(a.gbps)} for a in run.anchors],
        "rows": [_row_json(r) for r in run.rows],
    }
    if run.regret:
        found["regret"] = [{**_plain(r), "regret": _rounded(r.regret)} for r in run.regret]
    return {**found, "summary": _plain(run.summary)}


def save(run: Run, path: Path) -> None:
    """Write a run atomically: a concurrent reader or a crash sees the old file or the new one."""
    write_atomically(path, (json.dumps(to_json(run), indent=1, allow_nan=False) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file in the same folder, sync it to disk, then rename it."""
    try:
        files.write_user_file(path, content, sync=True)
    except OSError as error:
        raise BadSpec(what="The output file", text=str(path), detail=error.strerror or str(error)) from None


def _row_json(row: Row) -> dict[str, Any]:
    results = {
        p: {**_plain(r), "gbps": _rounded(row.gbps(p)), "times_floor": _rounded(row.times_floor(p))} for p, r in row.results.items()
    }
    return {**_plain(row), "results": results, "best_peer": row.best_peer, "against_best_peer": _rounded(row.against_best_peer)}


def _plain(value: Any) -> Any:
    match value:
        case float():
            return _rounded(value)
        case ScheduleRecord():
            return value.to_json()
        case Mapping():
            return {k: _plain(v) for k, v in value.items()}
        case tuple():
            return [_plain(v) for v in value]
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)} if is_dataclass(value) else value


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")  # more digits are noise


# ---- from JSON

# Derived fields: written, and ignored when reading.
_DERIVED: Mapping[type, frozenset[str]] = {
    Run: frozenset({"schema", "summary"}),
    Row: frozenset({"best_peer", "against_best_peer"}),
    Anchor: frozenset({"gbps"}),
    Result: frozenset({"gbps", "times_floor"}),
    Regret: frozenset({"regret"}),
}


class _Mismatch(ValueError):
    """A value does not match the schema. The message says which and where."""


def load(path: Path) -> Run:
    """Read a run from a file."""
    return parse(load_values(path), str(path))


def load_values(path: Path) -> Any:
    """Read the JSON of a result file, within bounds."""
    try:
        return load_json(path)
    except OSError as error:
        raise BadResults(file=printable(str(path)), detail=error.strerror or str(error)) from None
    except OutOfBounds as error:
        raise BadResults(file=printable(str(path)), detail=str(error)) from None


def parse(value: object, file: str = "the run") -> Run:
    """A run from parsed JSON. `file` names it in errors."""
    try:
        _require(isinstance(value, dict), f"it contains {_kind(value)}, but a run is an object")
        assert isinstance(value, dict)
        _require("schema" in value, "it has no field schema, which the JSON of `onepass bench` has")
        schema = value["schema"]
        _require(type(schema) is int and schema == SCHEMA, f"its schema is {_kind(schema)}, but this onepass reads {SCHEMA}")
        run: Run = _decode(Run, value, "")
        return run
    except _Mismatch as error:
        raise BadResults(file=printable(file), detail=truncated(str(error))) from None


def _require(condition: bool, detail: str) -> None:
    if not condition:
        raise _Mismatch(detail)


def _decode(kind: Any, value: object, at: str) -> Any:
    """Convert a value to the annotated type of its field. `at` is its path in the file."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _decode(arguments[0], value, at)
    if origin is tuple:
        _require(isinstance(value, list), f"{at} is {_kind(value)}, expected a list")
        return tuple(_decode(arguments[0], v, f"{at}[{i}]") for i, v in enumerate(typing.cast(list[object], value)))
    if origin is Mapping:
        _require(isinstance(value, dict), f"{at} is {_kind(value)} where an object belongs")
        return {printable(k): _decode(arguments[1], v, f"{at}.{k}") for k, v in typing.cast(dict[str, object], value).items()}
    if is_dataclass(kind):
        return _decode_record(typing.cast(type, kind), value, at)
    _require(_fits(kind, value), f"{at} is {_kind(value)}, expected {_NOUNS[kind]}")
    return printable(typing.cast(str, value)) if kind is str else kind(value)


def _decode_record(kind: type[T], value: object, at: str) -> T:
    _require(isinstance(value, dict), f"{at} is {_kind(value)} where an object belongs")
    given = typing.cast(dict[str, object], value)
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # always a dataclass
    unknown = sorted(given.keys() - known.keys() - _DERIVED.get(kind, frozenset()))
    _require(not unknown, f"{at or 'the run'} has a field {', '.join(unknown)} that schema {SCHEMA} does not know")
    absent = [n for n, f in known.items() if n not in given and f.default is MISSING]
    _require(not absent, f"{at or 'the run'} has no field {', '.join(absent)}")
    decoded = {n: _decode(hints[n], given[n], f"{at}.{n}".lstrip(".")) for n in known if n in given}
    build: Callable[..., T] = kind
    try:
        return build(**decoded)
    except _Mismatch as error:
        raise _Mismatch(f"{at or 'the run'}: {error}") from None


_NOUNS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _fits(kind: type, value: object) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and in_bounds(value)
    return isinstance(value, kind) and (kind is not int or in_bounds(typing.cast(int, value)))


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            return f"the text {value[:40]!r}"
        case int() if not in_bounds(value):
            return "a whole number that is too large"
        case float() if not in_bounds(value) and value == value:
            return "a number that is too large or too small"
    return repr(value)
