"""`onepass explain` for a whole model: every claimed region with its kernels, bytes and times, and what is left to Inductor.

Identical regions share a row with a count. Each region shows the plan that runs. Times are predictions for one
device and the sizes of the example inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .. import pipeline
from ..capture.graph.recompute import Recomputed
from ..device import Device
from ..integration.claim import ClaimedRegion, Declined
from ..integration.failure import describe_error
from ..knobs import knobs
from ..plan.access import needs_wide_index
from ..plan.plan import Plan
from ..plan.recost import at_sizes
from ..plan.variant import Validity, validity
from ..runtime import offline
from ..runtime.background import DaemonExecutor
from ..runtime.card import resolve_device
from ..runtime.compiled import Compiled
from .rows import KernelRow, RefusalRow, RejectedRow, as_json, json_key, kernel_rows, refusal_row, rejected_row, rounded, spill_text
from .tables import as_text, counted, human_bytes, places, ratio, table, us
from .trace_model import name_of, trace

PHASES = ("forward", "backward", "inference")
MAX_REFUSALS_SHOWN = 20  # in tables; JSON has all


class Graph(Protocol):
    """The claimed regions and declined reductions of one graph, from a trace or from the journal."""

    @property
    def phase(self) -> str: ...
    @property
    def regions(self) -> tuple[ClaimedRegion, ...]: ...
    @property
    def declined(self) -> tuple[Declined, ...]: ...


@dataclass(frozen=True, slots=True)
class RegionRow:
    """A region that occurs `count` times in one phase. Bytes and times are per occurrence."""

    id: str
    phase: str
    count: int
    lines: tuple[str, ...]
    name: str
    reductions: int
    kernels: tuple[KernelRow, ...]
    refusals: tuple[RefusalRow, ...]
    rejected: tuple[RejectedRow, ...]
    floor_bytes: int
    dram_bytes: int
    floor_us: float
    predicted_us: float
    inductor_us: float  # predicted time of the same region under Inductor
    charged_us: float  # for values that cross memory only because of the claim
    in_place: int  # outputs that reuse the memory of an input, summed over all occurrences
    holds: Validity  # the sizes for which this plan runs
    plan: Plan = field(repr=False, compare=False)  # what runs

    def to_json(self) -> dict[str, Any]:
        """The row as JSON-ready values."""
        plain = {
            json_key(name): rounded(getattr(self, name))
            for name in (
                "id",
                "phase",
                "count",
                "lines",
                "name",
                "reductions",
                "floor_bytes",
                "dram_bytes",
                "floor_us",
                "predicted_us",
                "inductor_us",
                "charged_us",
                "in_place",
            )
        }
        nested = {"kernels": self.kernels, "refusals": self.refusals, "rejected": self.rejected}
        plain["holds"] = as_json(self.holds)
        return plain | {name: [as_json(row) for row in rows] for name, rows in nested.items()}


@dataclass(frozen=True, slots=True)
class DeclinedRow:
    """Reductions that are left to Inductor, and why. Times are per occurrence, and None if there was no plan."""

    phase: str
    count: int
    ops: tuple[str, ...]
    lines: tuple[str, ...]
    reason: str
    id: str
    predicted_us: float | None
    inductor_us: float | None


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over all occurrences of the regions of a phase."""

    phase: str
    regions: int
    distinct: int
    reductions: int
    reductions_declined: int
    kernels: int
    floor_bytes: int
    dram_bytes: int
    floor_us: float
    predicted_us: float
    charged_us: float
    inductor_us: float


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The report on one model at one size on one device."""

    model: str
    device: Device
    graphs: tuple[str, ...]  # the phase of each
    regions: tuple[RegionRow, ...]
    declined: tuple[DeclinedRow, ...]
    recomputed: tuple[Recomputed, ...] = ()  # values that the backward recomputes instead of loading

    @property
    def totals(self) -> tuple[Total, ...]:
        """The totals of each phase, and of all phases."""
        return totals(self.regions, self.declined)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "model": self.model,
            "device": self.device.name,
            "graphs": list(self.graphs),
            "regions": [r.to_json() for r in self.regions],
            "left": [as_json(r) for r in self.declined],
            "recomputed": [as_json(r) for r in self.recomputed],
            "totals": {t.phase: {k: v for k, v in as_json(t).items() if k != "phase"} for t in self.totals},
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        claimed = counted(sum(r.count for r in self.regions), "region")
        yield Text.assemble(
            (self.model, "bold"),
            f" on {self.device.title}: {claimed} claimed in "
            f"{counted(len(self.graphs), 'graph')}, {len({r.id for r in self.regions})} of them distinct\n",
            saved_text(self.recomputed),
            holds_text(self.regions),
        )
        yield total_table(self.totals)
        if self.regions:
            yield region_table(self.regions)
            yield line_table(self.regions)
        if any(r.refusals for r in self.regions):
            yield model_refusal_table(self.regions)
        if self.declined:
            yield declined_table(self.declined)

    def __str__(self) -> str:
        return as_text(self)


def saved_text(recomputed: Sequence[Recomputed]) -> str:
    """One line about recomputed values; empty if there are none."""
    if not recomputed:
        return ""
    total, moved = (sum(each) for each in zip(*((r.nbytes, r.traffic_saved) for r in recomputed), strict=True))
    return (
        f"{counted(len(recomputed), 'value')} ({human_bytes(total)}) recomputed in the backward instead of saved: "
        f"{human_bytes(moved)} less traffic\n"
    )


def holds_text(regions: Sequence[RegionRow]) -> str:
    """The sizes that plans hold for: one line if all hold for the same, else one for each region that differs."""
    by_text: dict[str, list[str]] = {}
    for region in regions:
        by_text.setdefault(str(region.holds), []).append(region.id)
    who = {text: "every plan is" if len(by_text) == 1 else ", ".join(dict.fromkeys(ids)) + ":" for text, ids in by_text.items()}
    return "".join(f"{name} {text}\n" for text, name in who.items())


def explain_model(
    model: Callable[..., Any], *, device: "str | Device" = "h200", compile: bool = False
) -> Callable[..., ModelReport]:
    """Explains a whole model: call the result with example inputs, on any device or on "meta". Nothing is run.

    Under torch.no_grad(), the report is on the inference graph. `compile` compiles every distinct region for the device.
    """
    target = resolve_device(device)

    def explained(*args: Any, **kwargs: Any) -> ModelReport:
        traced = trace(model, args, kwargs, target)
        graphs = traced.graphs
        compiled = _compiled([r for g in graphs for r in g.regions], target) if compile else {}
        phases = tuple(g.phase for g in graphs)
        return ModelReport(name_of(model), target, phases, region_rows(graphs, compiled), declined_rows(graphs), traced.recomputed)

    return explained


def _compiled(regions: Iterable[ClaimedRegion], target: Device) -> dict[str, Compiled]:
    """Compile every distinct region in worker processes, a few at a time."""
    distinct = {r.id: r for r in regions}

    def compile(region: ClaimedRegion) -> Compiled:
        wide = needs_wide_index(region.optimized, region.bindings)
        return pipeline.compile(region.plan, lambda source: offline.compile(source, target), wide)

    with DaemonExecutor(knobs().compile_workers, "onepass-report") as threads:
        return dict(zip(distinct, threads.map(compile, distinct.values()), strict=True))


# ---- rows --------------------------------------------------------------------------------------------------------------------


def region_rows(graphs: Sequence[Graph], compiled: Mapping[str, Compiled]) -> tuple[RegionRow, ...]:
    """Rows of claimed regions. Equal regions of a phase share a row; rows are ordered by first occurrence."""
    found: dict[tuple[str, str], list[ClaimedRegion]] = {}
    for graph in graphs:
        for region in graph.regions:
            found.setdefault((graph.phase, region.id), []).append(region)
    return tuple(_region_row(phase, same, compiled.get(name)) for (phase, name), same in found.items())


def _region_row(phase: str, same: list[ClaimedRegion], compiled: Compiled | None) -> RegionRow:
    first = same[0]
    chosen = compiled.plan if compiled else first.plan
    plan = at_sizes(chosen, first.bindings)
    return RegionRow(
        id=first.id,
        phase=phase,
        count=len(same),
        lines=tuple(dict.fromkeys(line for r in same for line in r.lines)),
        name=first.program.name,
        reductions=first.reductions,
        kernels=kernel_rows(plan.kernels, compiled.binaries if compiled else (), plan.device),
        refusals=tuple(map(refusal_row, plan.refusals)),
        rejected=tuple(map(rejected_row, compiled.rejected)) if compiled else (),
        floor_bytes=plan.floor_bytes,
        dram_bytes=plan.dram_bytes,
        floor_us=plan.floor_us,
        predicted_us=plan.predicted_us,
        inductor_us=first.inductor_us,
        charged_us=max(r.charged_us for r in same),
        in_place=sum(r.in_place for r in same),
        holds=validity(first.optimized, first.variant, first.bindings),
        plan=chosen,
    )


def declined_rows(graphs: Sequence[Graph]) -> tuple[DeclinedRow, ...]:
    """Rows of reductions left to Inductor. Equal ones of a phase share a row."""
    found: dict[tuple[str, str, tuple[str, ...], str], list[Declined]] = {}
    for graph in graphs:
        for declined in graph.declined:
            reason = declined.reason if declined.error is None else f"{declined.reason}: {describe_error(declined.error)}"
            found.setdefault((graph.phase, reason, declined.ops, declined.id), []).append(declined)
    return tuple(
        DeclinedRow(
            phase,
            len(same),
            ops,
            tuple(dict.fromkeys(line for one in same for line in one.lines)),
            reason,
            name,
            same[0].predicted_us,
            same[0].inductor_us,
        )
        for (phase, reason, ops, name), same in found.items()
    )


def totals(regions: Sequence[RegionRow], declined: Sequence[DeclinedRow]) -> tuple[Total, ...]:
    """The total of each phase that occurs, and of all if there are several."""
    occurring = [p for p in PHASES if p in {*(r.phase for r in regions), *(r.phase for r in declined)}]
    each = [_total(p, [r for r in regions if r.phase == p], [r for r in declined if r.phase == p]) for p in occurring]
    return (*each, _total("all", regions, declined)) if len(each) != 1 else tuple(each)


def _total(phase: str, regions: Sequence[RegionRow], declined: Sequence[DeclinedRow]) -> Total:
    def add(each: Callable[[RegionRow], Any]) -> Any:
        return sum(r.count * each(r) for r in regions)

    return Total(
        phase=phase,
        regions=sum(r.count for r in regions),
        distinct=len({r.id for r in regions}),
        reductions=add(lambda r: r.reductions),
        reductions_declined=sum(r.count * len(r.ops) for r in declined),
        kernels=add(lambda r: len(r.kernels)),
        floor_bytes=add(lambda r: r.floor_bytes),
        dram_bytes=add(lambda r: r.dram_bytes),
        floor_us=add(lambda r: r.floor_us),
        predicted_us=add(lambda r: r.predicted_us),
        charged_us=add(lambda r: r.charged_us),
        inductor_us=add(lambda r: r.inductor_us),
    )


# ---- tables ------------------------------------------------------------------------------------------------------------------


def total_table(each: Sequence[Total]) -> Table:
    """The table of totals, one row per phase."""
    shown = table(
        "claimed",
        ("phase", "name"),
        ("regions", "right"),
        ("kernels", "right"),
        ("reductions", "right"),
        ("declined", "right"),
        ("DRAM", "right"),
        ("x floor", "right"),
        ("floor", "right"),
        ("predicted", "right"),
        ("by Inductor", "right"),
    )
    for t in each:
        shown.add_row(
            t.phase,
            str(t.regions),
            str(t.kernels),
            str(t.reductions),
            str(t.reductions_declined),
            human_bytes(t.dram_bytes),
            ratio(t.dram_bytes, t.floor_bytes),
            us(t.floor_us),
            us(t.predicted_us + t.charged_us),
            us(t.inductor_us),
        )
    return shown


def region_table(regions: Sequence[RegionRow]) -> Table:
    """The table of regions. Columns with values per kernel have one line per kernel."""
    compiled = any(k.registers is not None for r in regions for k in r.kernels)
    used = (("regs", "right"), ("spill", "right")) if compiled else ()
    shown = table(
        "\nregions",
        ("id", "name"),
        ("phase", "name"),
        ("times", "right"),
        ("computes", "left"),
        ("kernels", "name"),
        *used,
        ("DRAM", "right"),
        ("x floor", "right"),
        ("predicted", "right"),
        ("by Inductor", "right"),
    )
    for r in regions:
        own = ["\n".join(k.family for k in r.kernels)]
        if compiled:
            own += ["\n".join(str(k.registers) for k in r.kernels), "\n".join(spill_text(k.spill_bytes) for k in r.kernels)]
        shown.add_row(
            r.id,
            r.phase,
            f"{r.count} x",
            escape(r.name),
            *own,
            human_bytes(r.dram_bytes),
            ratio(r.dram_bytes, r.floor_bytes),
            us(r.predicted_us + r.charged_us),
            us(r.inductor_us),
        )
    return shown


def line_table(regions: Sequence[RegionRow]) -> Table:
    """The table of source lines of each region."""
    shown = table("\nlines of code", ("region", "name"), ("lines", "left"))
    for r in regions:
        shown.add_row(r.id, escape("\n".join(r.lines)) or "unknown")
    return shown


def model_refusal_table(regions: Sequence[RegionRow]) -> Table:
    """The table of refused merges inside regions."""
    rows = [(r.id, refusal) for r in regions for refusal in r.refusals]
    more = f", {MAX_REFUSALS_SHOWN} of {len(rows)}" if len(rows) > MAX_REFUSALS_SHOWN else ""
    shown = table(
        f"\nnot merged inside a region{more}",
        ("region", "name"),
        ("reason", "left"),
        ("fused", "right"),
        ("separate", "right"),
        ("detail", "left"),
    )
    for name, r in rows[:MAX_REFUSALS_SHOWN]:
        shown.add_row(name, escape(r.reason), us(r.cost_fused_us), us(r.cost_apart_us), escape(r.detail))
    return shown


def declined_table(declined: Sequence[DeclinedRow]) -> Table:
    """The table of reductions left to Inductor."""
    shown = table(
        "\nleft to Inductor", ("phase", "name"), ("times", "right"), ("reductions", "left"), ("lines", "left"), ("reason", "left")
    )
    for r in declined:
        shown.add_row(
            r.phase,
            f"{r.count} x",
            escape(", ".join(dict.fromkeys(op.removeprefix("aten.") for op in r.ops))),
            escape(places(r.lines)),
            escape(r.reason),
        )
    return shown
