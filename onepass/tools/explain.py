"""The report on a compiled function: what was fused, what was refused and at what cost, bytes against the floor.

A Report only copies what the stages kept. It prints as tables, and as JSON for tools.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..capture import capture
from ..codegen.source import Source
from ..device import Device
from ..device import device as named_device
from ..pipeline import compile, optimise, specialise
from ..plan.legality import Refusal
from ..plan.plan import KernelPlan
from ..plan.resources import ctas_per_sm
from ..runtime import offline
from ..runtime.binary import Binary
from ..runtime.compiled import Compiled

WIDTH = 118  # of the report where no terminal sets one


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel: what it moves, and what the compiled binary uses."""

    name: str
    family: str
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    dram_bytes: int
    registers: int
    spill_bytes: int
    smem_bytes: int
    ctas_per_sm: int
    predicted_us: float
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefusalRow:
    """A merge that was not made. A cost of None: that form cannot exist."""

    reason: str
    cost_fused_us: float | None
    cost_apart_us: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A plan that was compiled and thrown away."""

    kernel: str
    plan: str
    registers: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """All there is to say about one function at one size on one device."""

    workload: str
    device: Device
    floor_bytes: int
    floor_us: float
    predicted_us: float
    kernels: tuple[KernelRow, ...]
    refusals: tuple[RefusalRow, ...]
    rejected: tuple[RejectedRow, ...]
    sources: tuple[Source, ...]

    @property
    def dram_bytes(self) -> int:
        """What all kernels together move to and from DRAM."""
        return sum(k.dram_bytes for k in self.kernels)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "workload": self.workload,
            "device": self.device.name,
            "floor_bytes": self.floor_bytes,
            "floor_us": round(self.floor_us, 3),
            "kernels": [_rounded(asdict(k)) for k in self.kernels],
            "refusals": [_rounded(asdict(r)) for r in self.refusals],
            "predicted_us": round(self.predicted_us, 3),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _header(self)
        yield _kernel_table(self.kernels)
        yield _tensor_table(self.kernels)
        if self.refusals:
            yield _refusal_table(self.refusals)
        if self.rejected:
            yield _rejected_table(self.rejected)

    def __str__(self) -> str:
        return as_text(self)


def explain(fn: Callable[..., Any], *, device: "str | Device" = "h200") -> Callable[..., Report]:
    """What would run for `fn` on a device, and why: call it with example inputs (meta tensors will do)."""
    target = named_device(device)

    def measure(source: Source) -> Binary:
        return offline.compile(source, target)

    def explained(*args: Any) -> Report:
        captured = capture(fn, args)
        program, bindings = specialise(optimise(captured.program), captured.bind(args) or {})
        return report(compile(program, bindings, target, measure))

    return explained


def report(compiled: Compiled, workload: str | None = None) -> Report:
    """Gather the report from what the stages kept."""
    plan = compiled.plan
    return Report(
        workload=workload or plan.program.name,
        device=plan.device,
        floor_bytes=plan.floor_bytes,
        floor_us=plan.floor_us,
        predicted_us=plan.predicted_us,
        kernels=tuple(_kernel_row(k, b, plan.device) for k, b in zip(plan.kernels, compiled.binaries, strict=True)),
        refusals=tuple(_refusal_row(r) for r in plan.refusals),
        rejected=tuple(RejectedRow(r.kernel, str(r.schedule), r.registers, r.spill_bytes) for r in compiled.rejected),
        sources=compiled.sources,
    )


def _kernel_row(kernel: KernelPlan, binary: Binary, device: Device) -> KernelRow:
    return KernelRow(
        name=kernel.name,
        family=kernel.family,
        loads=kernel.loads,
        stores=kernel.stores,
        dram_bytes=kernel.dram_bytes,
        registers=binary.registers,
        spill_bytes=binary.spill_bytes,
        smem_bytes=binary.smem_bytes,
        ctas_per_sm=ctas_per_sm(binary.registers, binary.smem_bytes, kernel.schedule.warps, device),
        predicted_us=kernel.predicted_us,
        ops=kernel.ops,
    )


def _refusal_row(refusal: Refusal) -> RefusalRow:
    detail = f"{' + '.join(refusal.between)}: {refusal.detail}" if refusal.detail else " + ".join(refusal.between)
    return RefusalRow(refusal.reason.value, refusal.cost_fused_us, refusal.cost_apart_us, detail)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 3) if isinstance(v, float) else list(v) if isinstance(v, tuple) else v for k, v in row.items()}


def console() -> Console:
    """Where the command line prints: as wide as the terminal, or as the report where there is none."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def as_text(*parts: RenderableType) -> str:
    """What rich would print, without colour."""
    page = StringIO()
    console = Console(file=page, width=WIDTH, color_system=None, highlight=False)
    for part in parts:
        console.print(part)
    return page.getvalue().rstrip("\n")


def human_bytes(n: float) -> str:
    """Bytes with three figures: 402 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def _us(cost: float | None) -> str:
    return "impossible" if cost is None else f"{cost:.1f} us"


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.3f}" if b else "-"


def _header(r: Report) -> Text:
    count = f"{len(r.kernels)} kernel{'s' * (len(r.kernels) != 1)}"
    ratios = f"{_ratio(r.dram_bytes, r.floor_bytes)} x the bytes, {_ratio(r.predicted_us, r.floor_us)} x the time"
    return Text.assemble(
        (r.workload, "bold"), f" on {r.device.title}: {count}\n",
        f"  floor      {human_bytes(r.floor_bytes):>8} {r.floor_us:9.1f} us  each input read once, each output written once\n",
        f"  predicted  {human_bytes(r.dram_bytes):>8} {r.predicted_us:9.1f} us  {ratios}\n",
    )


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, align in columns:
        table.add_column(name, justify="right" if align == "right" else "left", overflow="fold", no_wrap=align == "name")
    return table


def _kernel_table(kernels: tuple[KernelRow, ...]) -> Table:
    table = _table("kernels", ("name", "name"), ("family", "name"), ("DRAM", "right"), ("regs", "right"), ("spill", "right"),
                   ("CTAs/SM", "right"), ("predicted", "right"))
    for k in kernels:
        spill = f"[red]{k.spill_bytes} B[/red]" if k.spill_bytes else "0"
        table.add_row(escape(k.name), escape(k.family), human_bytes(k.dram_bytes), str(k.registers), spill, str(k.ctas_per_sm),
                      _us(k.predicted_us))
    return table


def _tensor_table(kernels: tuple[KernelRow, ...]) -> Table:
    table = _table("\ntensors", ("kernel", "name"), ("reads", "left"), ("writes", "left"))
    for k in kernels:
        table.add_row(escape(k.name), escape("\n".join(k.loads)), escape("\n".join(k.stores)))
    return table


def _refusal_table(refusals: tuple[RefusalRow, ...]) -> Table:
    table = _table("\nnot merged", ("reason", "left"), ("fused", "right"), ("apart", "right"), ("detail", "left"))
    for r in refusals:
        table.add_row(escape(r.reason), _us(r.cost_fused_us), _us(r.cost_apart_us), escape(r.detail))
    return table


def _rejected_table(rejected: tuple[RejectedRow, ...]) -> Table:
    table = _table("\ncompiled and thrown away", ("kernel", "name"), ("plan", "left"), ("regs", "right"), ("spill", "right"))
    for r in rejected:
        table.add_row(escape(r.kernel), escape(r.plan), str(r.registers), f"{r.spill_bytes} B")
    return table


def source_listing(r: Report) -> Iterator[str]:
    """The text of each kernel, headed by its name."""
    for source in r.sources:
        yield f"# {'-' * 10} {source.name}\n{source.text.rstrip()}\n"
