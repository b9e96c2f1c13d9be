"""The report on this process so far: what was claimed, left and called, what fell back and why, what was compiled or found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..capture.recompute import Recomputed
from ..integration import journal
from ..integration.engine import counts
from ..integration.journal import Fallback, GraphRecord, RegionRecord, Snapshot
from ..runtime.counters import Counts
from .model_report import DeclinedRow, RegionRow, declined_rows, declined_table, region_rows, saved_text, total_table, totals
from .rows import KernelRow, as_json, kernel_rows, spill_text
from .tables import as_text, counted, human_bytes, places, table, us


@dataclass(frozen=True, slots=True)
class CalledRow:
    """A region that was claimed in this process, or called from a graph that an earlier one cached."""

    id: str
    name: str
    lines: tuple[str, ...]
    claimed: int  # places in this process's graphs
    calls: int
    sizes: tuple[tuple[int, ...], ...]  # of its symbolic sizes, met in calls
    runs_as: str  # "onepass" | "inductor" | "torch, op by op" | "" where it was never called
    kernels: tuple[KernelRow, ...]  # of the latest sizes called; as planned where it was not called


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """All there is to say about torch.compile(backend="onepass") in this process."""

    graphs: tuple[GraphRecord, ...]
    claimed: tuple[RegionRow, ...]
    called: tuple[CalledRow, ...]
    declined: tuple[DeclinedRow, ...]
    fallbacks: tuple[Fallback, ...]
    fallbacks_by_code: dict[str, int]
    work: Counts
    recomputed: tuple[Recomputed, ...] = ()  # what backward graphs compute again instead of having it saved

    @property
    def calls(self) -> int:
        """Of all regions together."""
        return sum(r.calls for r in self.called)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "graphs": [{"phase": g.phase, "device": g.device, "regions": len(g.regions), "left": len(g.declined),
                        "seconds": round(g.seconds, 3), "error": g.error} for g in self.graphs],
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
    seen = journal.snapshot()
    claimed = region_rows(seen.graphs, {})
    return ProcessReport(seen.graphs, claimed, _called(seen, claimed), declined_rows(seen.graphs), seen.fallbacks,
                         dict(seen.fallbacks_by_code), counts(), seen.recomputed)


def _called(seen: Snapshot, claimed: Sequence[RegionRow]) -> tuple[CalledRow, ...]:
    """Claimed regions and called ones, each once."""
    calls = {r.region: r for r in seen.regions}
    by_id: dict[str, list[RegionRow]] = {}
    for row in claimed:
        by_id.setdefault(row.id, []).append(row)
    instead = {f.region: f.runs_as for f in seen.fallbacks}
    names = [*by_id, *(name for name in calls if name not in by_id)]
    return tuple(_called_row(name, by_id.get(name, []), calls.get(name), instead.get(name)) for name in names)


def _called_row(name: str, rows: list[RegionRow], seen: RegionRecord | None, instead: str | None) -> CalledRow:
    made = seen.artifact if seen else None
    kernels = kernel_rows(made.summary.kernels, made.binaries, None) if made else rows[0].kernels if rows else ()
    runs_as = "" if seen is None else "onepass" if made is not None else instead or "torch, op by op"
    lines = tuple(dict.fromkeys(line for row in rows for line in row.lines))
    return CalledRow(name, rows[0].name if rows else "", lines, sum(r.count for r in rows), seen.calls if seen else 0,
                     seen.sizes if seen else (), runs_as, kernels)


# ---- tables ------------------------------------------------------------------------------------------------------------------


def _header(r: ProcessReport) -> Text:
    work, took = r.work, sum(g.seconds for g in r.graphs)
    asked = work.hits + work.misses
    return Text.assemble(
        ("onepass in this process", "bold"), f": {counted(len(r.graphs), 'graph')}, {counted(r.calls, 'region call')}, "
        f"{counted(len(r.fallbacks), 'fallback')}, {took:.1f} s spent on graphs\n",
        f"  store      had {work.hits} of {counted(asked, 'Program')} asked for; {work.plans} planned\n",
        f"  compiler   {counted(work.compilations, 'kernel')} compiled, {work.found} found compiled\n",
        f"  saved      {text}" if (text := saved_text(r.recomputed)) else "",
    )


def _called_table(called: Sequence[CalledRow]) -> Table:
    shown = table("\nregions", ("id", "name"), ("calls", "right"), ("places", "right"), ("runs as", "left"), ("computes", "left"),
                  ("kernels", "name"), ("regs", "right"), ("spill", "right"), ("DRAM", "right"), ("predicted", "right"),
                  ("lines", "left"))
    for r in called:
        moved, time = sum(k.dram_bytes for k in r.kernels), sum(k.predicted_us for k in r.kernels)
        registers = "\n".join("-" if k.registers is None else str(k.registers) for k in r.kernels)
        shown.add_row(r.id, str(r.calls), str(r.claimed), r.runs_as or "not called", escape(r.name),
                      "\n".join(k.family for k in r.kernels), registers, "\n".join(spill_text(k.spill_bytes) for k in r.kernels),
                      human_bytes(moved), us(time), escape(places(r.lines)))
    return shown


def _fallback_table(fallbacks: Sequence[Fallback]) -> Table:
    shown = table("\nfallbacks", ("region", "name"), ("code", "name"), ("what happened", "left"))
    for f in fallbacks:
        happened = f"could not be {f.stage}; {f.runs_as} computes it: {f.error}\nreproducer: {f.repro}"
        shown.add_row(f.region, f.code, escape(happened))
    return shown


def _error_table(graphs: Sequence[GraphRecord]) -> Table:
    shown = table("\ngraphs left whole", ("phase", "name"), ("error", "left"))
    for g in graphs:
        if g.error:
            shown.add_row(g.phase, escape(g.error))
    return shown
