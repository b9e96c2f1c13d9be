"""onepass.report(): what torch.compile(backend="onepass") did in this process: claimed regions, calls, fallbacks, compilations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..capture.graph.recompute import Recomputed
from ..integration import journal
from ..integration.engine import counts
from ..integration.journal import Fallback, GraphRecord, RegionRecord, Snapshot
from ..runtime.counters import Counts
from .model_report import DeclinedRow, RegionRow, declined_rows, declined_table, region_rows, saved_text, total_table, totals
from .rows import KernelRow, as_json, kernel_rows, spill_text
from .tables import as_text, counted, human_bytes, places, table, us


@dataclass(frozen=True, slots=True)
class CalledRow:
    """A region that was claimed in this process, or called from a graph that an earlier process cached."""

    id: str
    name: str
    lines: tuple[str, ...]
    claimed: int  # occurrences in this process's graphs
    calls: int
    sizes: tuple[tuple[int, ...], ...]  # values of its symbolic sizes in calls
    runs_as: str  # "onepass" | "inductor" | "torch, op by op" | "" if it was never called
    kernels: tuple[KernelRow, ...]  # for the sizes of the last call; as planned if it was not called


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The report on torch.compile(backend="onepass") in this process."""

    graphs: tuple[GraphRecord, ...]
    claimed: tuple[RegionRow, ...]
    called: tuple[CalledRow, ...]
    declined: tuple[DeclinedRow, ...]
    fallbacks: tuple[Fallback, ...]
    fallbacks_by_code: dict[str, int]
    work: Counts
    recomputed: tuple[Recomputed, ...] = ()  # values that backward graphs recompute instead of loading

    @property
    def calls(self) -> int:
        """The number of calls of all regions."""
        return sum(r.calls for r in self.called)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "graphs": [
                {
                    "phase": g.phase,
                    "device": g.device,
                    "regions": len(g.regions),
                    "left": len(g.declined),
                    "seconds": round(g.seconds, 3),
                    "error": g.error,
                }
                for g in self.graphs
            ],
            "regions": [as_json(r) | {"kernels": [as_json(k) for k in r.kernels]} for r in self.called],
            "left": [as_json(r) for r in self.declined],
            "fallbacks": [asdict(f) for f in self.fallbacks],
            "fallbacks_by_code": self.fallbacks_by_code,
            "totals": {t.phase: {k: v for k, v in as_json(t).items() if k != "phase"} for t in totals(self.claimed, self.declined)},
            "calls": self.calls,
            "work": asdict(self.work),
            "recomputed": [as_json(r) for r in self.recomputed],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _header(self)
        if self.graphs:
            yield total_table(totals(self.claimed, self.declined))
        if self.called:
            yield _called_table(self.called)
        if self.fallbacks:
            yield _fallback_table(self.fallbacks)
        if any(g.error for g in self.graphs):
            yield _error_table(self.graphs)
        if self.declined:
            yield declined_table(self.declined)

    def __str__(self) -> str:
        return as_text(self)


def report() -> ProcessReport:
    """What torch.compile(backend="onepass") did in this process so far."""
    snapshot = journal.snapshot()
    claimed = region_rows(snapshot.graphs, {})
    return ProcessReport(
        snapshot.graphs,
        claimed,
        _called(snapshot, claimed),
        declined_rows(snapshot.graphs),
        snapshot.fallbacks,
        dict(snapshot.fallbacks_by_code),
        counts(),
        snapshot.recomputed,
    )


def _called(snapshot: Snapshot, claimed: Sequence[RegionRow]) -> tuple[CalledRow, ...]:
    """One row for each region that was claimed or called."""
    calls = {r.region: r for r in snapshot.regions}
    by_id: dict[str, list[RegionRow]] = {}
    for row in claimed:
        by_id.setdefault(row.id, []).append(row)
    fallback_by_region = {f.region: f.runs_as for f in snapshot.fallbacks}
    names = [*by_id, *(name for name in calls if name not in by_id)]
    return tuple(_called_row(name, by_id.get(name, []), calls.get(name), fallback_by_region.get(name)) for name in names)


def _called_row(name: str, rows: list[RegionRow], record: RegionRecord | None, fallback: str | None) -> CalledRow:
    artifact = record.artifact if record else None
    kernels = kernel_rows(artifact.summary.kernels, artifact.binaries, None) if artifact else rows[0].kernels if rows else ()
    runs_as = "" if record is None else "onepass" if artifact is not None else fallback or "torch, op by op"
    lines = tuple(dict.fromkeys(line for row in rows for line in row.lines))
    return CalledRow(
        name,
        rows[0].name if rows else "",
        lines,
        sum(r.count for r in rows),
        record.calls if record else 0,
        record.sizes if record else (),
        runs_as,
        kernels,
    )


# ---- tables ------------------------------------------------------------------------------------------------------------------


def _header(r: ProcessReport) -> Text:
    work, seconds = r.work, sum(g.seconds for g in r.graphs)
    lookups = work.hits + work.misses
    return Text.assemble(
        ("onepass in this process", "bold"),
        f": {counted(len(r.graphs), 'graph')}, {counted(r.calls, 'region call')}, "
        f"{counted(len(r.fallbacks), 'fallback')}, {seconds:.1f} s in the graph pass\n",
        f"  cache      {work.hits} of {counted(lookups, 'Program')} found; {work.optimized} optimized, {work.plans} planned\n",
        f"  compiler   {counted(work.compilations, 'kernel')} compiled, {work.found} loaded from the cache\n",
        f"  saved      {text}" if (text := saved_text(r.recomputed)) else "",
    )


def _called_table(called: Sequence[CalledRow]) -> Table:
    shown = table(
        "\nregions",
        ("id", "name"),
        ("calls", "right"),
        ("uses", "right"),
        ("runs as", "left"),
        ("computes", "left"),
        ("kernels", "name"),
        ("regs", "right"),
        ("spill", "right"),
        ("DRAM", "right"),
        ("predicted", "right"),
        ("lines", "left"),
    )
    for r in called:
        moved, time = sum(k.dram_bytes for k in r.kernels), sum(k.predicted_us for k in r.kernels)
        registers = "\n".join("-" if k.registers is None else str(k.registers) for k in r.kernels)
        shown.add_row(
            r.id,
            str(r.calls),
            str(r.claimed),
            r.runs_as or "not called",
            escape(r.name),
            "\n".join(k.family for k in r.kernels),
            registers,
            "\n".join(spill_text(k.spill_bytes) for k in r.kernels),
            human_bytes(moved),
            us(time),
            escape(places(r.lines)),
        )
    return shown


def _fallback_table(fallbacks: Sequence[Fallback]) -> Table:
    shown = table("\nfallbacks", ("region", "name"), ("code", "name"), ("what happened", "left"))
    for f in fallbacks:
        happened = f"could not be {f.stage}; {f.runs_as} computes it: {f.error}\nreproducer: {f.repro}"
        shown.add_row(f.region, f.code, escape(happened))
    return shown


def _error_table(graphs: Sequence[GraphRecord]) -> Table:
    shown = table("\ngraphs left to Inductor entirely", ("phase", "name"), ("error", "left"))
    for g in graphs:
        if g.error:
            shown.add_row(g.phase, escape(g.error))
    return shown
