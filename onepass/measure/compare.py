"""Compares two bench runs: what became faster or slower beyond noise, and what limits the comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table

from ..errors import printable
from ..tools.tables import as_text, counted, table
from .results import ONEPASS_PROVIDERS, PROVIDERS, Result, Row, Run, geomean

MIN_NOISE = 0.02  # repeated measurements differ by this much because of clocks and DRAM refresh
RIGHT = "right"


@dataclass(frozen=True, slots=True)
class Change:
    """One provider on one row, timed in both runs."""

    id: str
    provider: str
    before_us: float
    after_us: float
    noise: float  # the relative change that may be due to chance

    @property
    def ratio(self) -> float:
        """Time after / time before: above 1, it became slower."""
        return self.after_us / self.before_us

    @property
    def slower(self) -> bool:
        return self.ratio > 1 + self.noise

    @property
    def faster(self) -> bool:
        return 1 / self.ratio > 1 + self.noise  # symmetric: reverting a change shows up exactly when the change does

    @property
    def verdict(self) -> str:
        return "slower" if self.slower else "faster" if self.faster else "same"


@dataclass(frozen=True, slots=True)
class StatusChange:
    """A provider that gave a right answer in only one of the runs."""

    id: str
    provider: str
    before: str  # "right", or the error
    after: str

    @property
    def broke(self) -> bool:
        return self.before == RIGHT


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of comparing run `after` with run `before`."""

    before: str
    after: str
    warnings: tuple[str, ...]  # differences of the environment that may explain different times
    changes: tuple[Change, ...]  # sorted from largest slowdown to largest speedup
    status_changes: tuple[StatusChange, ...]
    only_before: tuple[str, ...]  # row ids
    only_after: tuple[str, ...]
    show_all: bool = False  # also list changes within noise

    @property
    def got_slower(self) -> bool:
        """Whether onepass became slower beyond noise, or no longer gives a right answer."""
        return any(c.slower for c in self.changes if c.provider in ONEPASS_PROVIDERS) or any(
            t.broke for t in self.status_changes if t.provider in ONEPASS_PROVIDERS
        )

    @property
    def shown(self) -> tuple[Change, ...]:
        """The changes to list."""
        return tuple(c for c in self.changes if self.show_all or c.verdict != "same")

    def geomean(self, provider: str) -> float | None:
        """The geometric mean change of a provider over all rows that both runs timed, including changes within noise."""
        return geomean(c.ratio for c in self.changes if c.provider == provider)

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON-ready values."""
        return {
            "before": self.before,
            "after": self.after,
            "warnings": list(self.warnings),
            "got_slower": self.got_slower,
            "geomean": {p: round(v, 4) for p in PROVIDERS if (v := self.geomean(p))},
            "changes": [
                {
                    "id": c.id,
                    "provider": c.provider,
                    "before_us": c.before_us,
                    "after_us": c.after_us,
                    "ratio": round(c.ratio, 4),
                    "noise": round(c.noise, 4),
                    "verdict": c.verdict,
                }
                for c in self.shown
            ],
            "turns": [{"id": t.id, "provider": t.provider, "before": t.before, "after": t.after} for t in self.status_changes],
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield f"[bold]{escape(self.after)}[/] against [bold]{escape(self.before)}[/]"
        yield from (f"[yellow]warning:[/] {escape(w)}" for w in self.warnings)
        if self.status_changes:
            yield _status_table(self.status_changes)
        if self.shown:
            yield _change_table(self.shown)
        elif self.changes:
            yield f"No time changed beyond noise, in {counted(len(self.changes), 'comparison')}."
        if self.changes:
            yield _summary_table(self)
        else:
            yield "No row was timed in both runs, so there is nothing to compare."
        for file, ids in ((self.before, self.only_before), (self.after, self.only_after)):
            if ids:
                yield f"Only in {escape(file)}: {escape(', '.join(ids))}"

    def __str__(self) -> str:
        return as_text(self)


def compare(before: Run, after: Run, names: tuple[str, str] = ("before", "after"), show_all: bool = False) -> Comparison:
    """What changed from one run to another. `names` are their names in the output."""
    old, new = ({r.id: r for r in run.rows} for run in (before, after))
    both = [(old[i], new[i]) for i in old if i in new]
    comparable = [(a, b) for a, b in both if a.floor_bytes == b.floor_bytes]
    changes = [c for a, b in comparable for c in _changes(a, b)]
    return Comparison(
        printable(names[0]),
        printable(names[1]),
        (*_warnings(before, after), *_other_work(both)),
        tuple(sorted(changes, key=lambda c: (-c.ratio, c.id, c.provider))),
        tuple(t for a, b in comparable for t in _status_changes(a, b)),
        tuple(i for i in old if i not in new),
        tuple(i for i in new if i not in old),
        show_all,
    )


def _changes(before: Row, after: Row) -> Iterator[Change]:
    for provider, a in before.results.items():
        b = after.results.get(provider)
        if b is not None and a.ok and b.ok and a.us and b.us:
            yield Change(before.id, provider, a.us, b.us, max(MIN_NOISE, (a.spread or 0) + (b.spread or 0)))


def _status_changes(before: Row, after: Row) -> Iterator[StatusChange]:
    for provider, a in before.results.items():
        b = after.results.get(provider)
        if b is not None and a.ok != b.ok:
            yield StatusChange(before.id, provider, _state(a), _state(b))


def _state(result: Result) -> str:
    if result.ok:
        return RIGHT
    return f"wrong: {result.wrong}" if result.wrong else f"fails: {result.error}"


def _warnings(before: Run, after: Run) -> Iterator[str]:
    """Differences between the environments of the runs."""
    for what, a, b in (("suites", before.suite, after.suite), ("cards", before.card, after.card)):
        if a != b:
            yield f"the {what} differ: {a}, then {b}"
    names = sorted(before.versions.keys() | after.versions.keys())
    for name in names:
        a, b = (run.versions.get(name, "absent") for run in (before, after))
        if a != b:
            yield f"{name} differs: {a}, then {b}"
    if before.card == after.card:
        yield from _drift(before, after)
    for a_run, b_run, word in ((before, after, "lost"), (after, before, "new")):
        gone = sorted({p for r in a_run.rows for p in r.results} - {p for r in b_run.rows for p in r.results})
        if gone and b_run.rows:
            yield f"{'these providers are' if len(gone) > 1 else 'this provider is'} {word}: {', '.join(gone)}"


def _drift(before: Run, after: Run) -> Iterator[str]:
    """A warning if the plain reads and copies changed too: then the GPU itself ran faster or slower."""
    old = {(a.kind, a.bytes): a for a in before.anchors}
    ratios = [b.us / old[b.kind, b.bytes].us for b in after.anchors if (b.kind, b.bytes) in old]
    if (whole := geomean(ratios)) and abs(whole - 1) > MIN_NOISE:
        yield f"the GPU itself was {_percent(whole)} {'slower' if whole > 1 else 'faster'} (plain reads, copies and adds)"


def _other_work(rows: Iterable[tuple[Row, Row]]) -> Iterator[str]:
    """A warning about rows with equal ids that move different bytes."""
    other = [a.id for a, b in rows if a.floor_bytes != b.floor_bytes]
    if other:
        yield f"these rows move different bytes in the two runs and are excluded: {', '.join(other)}"


def _percent(ratio: float) -> str:
    return f"{abs(ratio - 1):.1%}"


def _signed(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


_COLORS = {"slower": "red", "faster": "green", "same": "dim"}


def _change_table(changes: Iterable[Change]) -> Table:
    made = table(
        "Times",
        ("row", "name"),
        ("provider", "name"),
        ("before us", "right"),
        ("after us", "right"),
        ("change", "right"),
        ("noise", "right"),
    )
    for c in changes:
        color = _COLORS[c.verdict]
        made.add_row(
            escape(c.id), c.provider, f"{c.before_us:.1f}", f"{c.after_us:.1f}", f"[{color}]{_signed(c.ratio)}[/]", f"{c.noise:.1%}"
        )
    return made


def _status_table(status_changes: Iterable[StatusChange]) -> Table:
    made = table("Answers", ("row", "name"), ("provider", "name"), ("before", "left"), ("after", "left"))
    for t in status_changes:
        made.add_row(escape(t.id), t.provider, escape(t.before), f"[{'red' if t.broke else 'green'}]{escape(t.after)}[/]")
    return made


def _summary_table(comparison: Comparison) -> Table:
    made = table(
        "All rows", ("provider", "name"), ("geomean change", "right"), ("slower", "right"), ("same", "right"), ("faster", "right")
    )
    for provider in PROVIDERS:
        mean = comparison.geomean(provider)
        if mean is not None:
            verdicts = Counter(c.verdict for c in comparison.changes if c.provider == provider)
            made.add_row(provider, _signed(mean), *(str(verdicts[v]) for v in ("slower", "same", "faster")))
    return made
