"""Builds charts from bench results as plain data: axes, lines, bars and points. drawing.py renders them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from ..errors import BadSpec
from .results import PROVIDERS, Row, Run

MIN_WIDTHS_PER_CHART = 3
MIN_ROW_COUNTS_PER_CHART = 4
MAX_BARS_PER_CHART = 28  # more would be unreadable at page width
MIN_BAR_FLOOR_US = 2.0  # µs; below it, launch overhead dominates the time
MAX_LABEL_LENGTH = 36
CLOSE_PREDICTION = 0.15  # relative error within which a prediction is good enough to choose plans by

RATE, TIME, TIMES_FLOOR = "GB/s", "µs", "times the floor"
METRICS: Mapping[str, str] = {"gbps": RATE, "us": TIME, "floor": TIMES_FLOOR}

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Line:
    """The values of one provider at all x positions; None where it gave no right answer."""

    provider: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity of a line chart. `floor` is its value at the memory floor."""

    quantity: str
    lines: tuple[Line, ...]
    floor: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Quantities over a size on a logarithmic axis."""

    name: str
    title: str
    subtitle: str
    x_title: str
    places: tuple[int, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: the time of each provider, in multiples of the floor."""

    label: str
    values: Mapping[str, float]
    against_best_peer: float | None


@dataclass(frozen=True, slots=True)
class BarChart:
    """Rows from worst to best."""

    name: str
    title: str
    subtitle: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted and a measured time."""

    predicted_us: float
    us: float

    @property
    def error(self) -> float:
        return abs(self.predicted_us / self.us - 1)


@dataclass(frozen=True, slots=True)
class ScatterChart:
    """Predicted over measured time, for picked plans and other candidates."""

    name: str
    title: str
    subtitle: str
    picked: tuple[Prediction, ...]
    others: tuple[Prediction, ...]


Chart = LineChart | BarChart | ScatterChart


def charts(runs: Sequence[Run], metric: str = "gbps", titles: Mapping[str, str] | None = None) -> tuple[Chart, ...]:
    """Every chart that can be drawn from the runs. `metric` selects the quantity over widths; `titles` maps workloads to titles.

    All runs must come from one GPU. If two runs have the same row, the later one counts.
    """
    if metric not in METRICS:
        raise BadSpec(what="The metric", text=metric, detail=f"known are {', '.join(METRICS)}")
    cards = sorted({run.card for run in runs})
    if len(cards) > 1:
        raise BadSpec(
            what="The choice of results",
            text=", ".join(cards),
            detail="a chart shows one GPU; plot the results of each GPU separately",
        )
    ordered = sorted(runs, key=lambda run: run.date)
    named = dict(titles or {})
    rows = {row.id: row for run in ordered for row in run.rows}
    suites = {run.suite: {r.id: r for other in ordered if other.suite == run.suite for r in other.rows} for run in ordered}
    bars = (chart for suite, its in suites.items() for chart in _bars(suite, tuple(its.values()), named))
    return (
        *_widths(rows.values(), metric, named),
        *_row_counts(rows.values(), named),
        *bars,
        *_predictions(ordered, rows.values()),
    )


def footer(runs: Sequence[Run]) -> str:
    """The source of the data: GPU, versions and dates."""
    versions = {
        name: sorted({run.versions[name] for run in runs if name in run.versions})
        for name in ("torch", "triton", "onepass", "liger", "quack")
    }
    days = sorted({run.date[:10] for run in runs})
    facts = [
        *sorted({run.card for run in runs}),
        *(f"{n} {' / '.join(v)}" for n, v in versions.items() if v),
        days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
    ]
    return "  ·  ".join(facts)


# ---- lines


def _widths(rows: Iterable[Row], metric: str, titles: Mapping[str, str]) -> Iterator[LineChart]:
    """One chart for each workload that was measured at several widths."""
    for (workload, dtype), its in _grouped(rows, lambda r: (r.workload, r.dtype)):
        usual = median(r.floor_bytes for r in its)
        at = {
            n: min(same, key=lambda r: abs(math.log(r.floor_bytes / usual))) for n, same in _grouped(its, lambda r: r.shape[-1])
        }  # of several sizes with one width, the one closest to the median bytes
        if len(at) >= MIN_WIDTHS_PER_CHART:
            many = " to ".join(f"{n:,}" for n in sorted({f([r.shape[0] for r in at.values()]) for f in (min, max)}))
            yield _lines(
                f"{metric}-by-width-{workload}-{dtype}",
                _title(workload, titles),
                f"{dtype}, {many} rows",
                "columns",
                at,
                (METRICS[metric],),
            )


def _row_counts(rows: Iterable[Row], titles: Mapping[str, str]) -> Iterator[LineChart]:
    """One chart for each workload and width measured at several row counts: time (for few rows) and rate (for many)."""
    for (workload, dtype, n), its in _grouped(rows, lambda r: (r.workload, r.dtype, r.shape[-1])):
        at = {r.shape[0]: r for r in its}
        if len(at) >= MIN_ROW_COUNTS_PER_CHART:
            yield _lines(
                f"by-rows-{workload}-{n}-{dtype}", f"{_title(workload, titles)}, {n:,} columns", dtype, "rows", at, (TIME, RATE)
            )


def _lines(name: str, title: str, subtitle: str, x_title: str, at: Mapping[int, Row], quantities: Sequence[str]) -> LineChart:
    places = tuple(sorted(at))
    rows = [at[p] for p in places]
    present = [p for p in PROVIDERS if any(r.us(p) for r in rows)]

    def panel(quantity: str) -> Panel:
        lines = (Line(p, tuple(_value(quantity, r, p) for r in rows)) for p in present)
        return Panel(quantity, tuple(lines), tuple(_floor(quantity, r) for r in rows))

    return LineChart(name, title, subtitle, x_title, places, tuple(panel(q) for q in quantities))


def _value(quantity: str, row: Row, provider: str) -> float | None:
    if quantity == RATE:
        return row.gbps(provider)
    return row.us(provider) if quantity == TIME else row.times_floor(provider)


def _floor(quantity: str, row: Row) -> float:
    if quantity == RATE:
        return row.floor_bytes / row.floor_us / 1e3
    return row.floor_us if quantity == TIME else 1.0


def _grouped(rows: Iterable[Row], key: Callable[[Row], K]) -> Iterator[tuple[K, list[Row]]]:
    """Rows with a 2D shape and a floor, grouped by a key. Other shapes have no clear width."""
    groups: dict[K, list[Row]] = defaultdict(list)
    for row in rows:
        if len(row.shape) == 2 and row.floor_bytes and row.floor_us:
            groups[key(row)].append(row)
    yield from groups.items()


# ---- bars


def _bars(suite: str, rows: Sequence[Row], titles: Mapping[str, str]) -> Iterator[BarChart]:
    """Rows sorted from worst to best time of onepass, split over as many charts as necessary."""
    dtypes = {r.dtype for r in rows}
    timed = [r for r in rows if r.times_floor("onepass")]
    long = sorted((r for r in timed if r.floor_us >= MIN_BAR_FLOOR_US), key=lambda r: -(r.times_floor("onepass") or 0))
    notes = [*dtypes] * (len(dtypes) == 1) + ["lower is better", "no mark: unsupported, failed or wrong"]
    if len(timed) > len(long):
        notes.append(f"omitted: {len(timed) - len(long)} with a floor under {MIN_BAR_FLOOR_US:g} {TIME}")
    parts = math.ceil(len(long) / MAX_BARS_PER_CHART)
    size = math.ceil(len(long) / max(parts, 1))
    for part in range(parts):
        number, of = (f"-{part + 1}", f", part {part + 1} of {parts}") if parts > 1 else ("", "")
        yield BarChart(
            f"floor-{suite}{number}",
            f"Times the floor: {suite}{of}",
            "; ".join(notes),
            tuple(_bar(r, titles, len(dtypes) > 1) for r in long[part * size : (part + 1) * size]),
        )


def _bar(row: Row, titles: Mapping[str, str], with_dtype: bool) -> Bar:
    title = _title(row.workload, titles)
    title = title if len(title) <= MAX_LABEL_LENGTH else title[: MAX_LABEL_LENGTH - 1].rstrip() + "…"
    label = "  ".join([title, "×".join(map(str, row.shape)), *[row.dtype] * with_dtype])
    return Bar(label, {p: v for p in PROVIDERS if (v := row.times_floor(p))}, row.against_best_peer)


# ---- predictions


def _predictions(runs: Sequence[Run], rows: Iterable[Row]) -> Iterator[ScatterChart]:
    picked = tuple(
        Prediction(own.predicted_us, own.us)
        for r in rows
        if (own := r.results.get("onepass")) and own.ok and own.us and own.predicted_us
    )
    others = tuple(
        Prediction(c.predicted_us, c.us)
        for run in runs
        for regret in run.regret
        for c in regret.candidates
        if c.us and c.predicted_us and c.us != regret.picked_us
    )
    if picked or others:
        errors = [p.error for p in picked or others]
        within = sum(e <= CLOSE_PREDICTION for e in errors) / len(errors)
        yield ScatterChart(
            "predicted",
            "Predicted against measured time",
            f"median error {median(errors):.0%}; {within:.0%} of {len(errors)} within {CLOSE_PREDICTION:.0%}",
            picked,
            others,
        )


def _title(workload: str, titles: Mapping[str, str]) -> str:
    title = titles.get(workload, workload.replace("_", " "))
    return title[:1].upper() + title[1:]
