"""`onepass explain` for one function: its kernels, the merges that were refused and their costs, and bytes relative to the floor.

A Report only copies values that the pipeline stages kept. It prints as tables or JSON. A whole model gets a ModelReport
(model_report.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .. import pipeline
from ..codegen.source import Source
from ..device import Device
from ..errors import UnsupportedOp
from ..integration.fuse import Fused
from ..plan.plan import Plan
from ..plan.recost import at_sizes
from ..plan.variant import Validity, validity
from ..runtime import offline
from ..runtime.binary import Binary
from ..runtime.card import resolve_device
from ..runtime.compiled import Compiled
from ..stages import stage
from .rows import (
    KernelRow,
    RefusalRow,
    RejectedRow,
    as_json,
    kernel_rows,
    refusal_row,
    refusal_table,
    rejected_row,
    rejected_table,
    spill_text,
)
from .tables import as_text, console, counted, human_bytes, ratio, table, us
from .why import Why, why

if TYPE_CHECKING:
    from .model_report import ModelReport  # for the same reason

# fmt: off
__all__ = ["KernelRow", "RefusalRow", "RejectedRow", "Report", "as_text", "console", "explain", "explain_function",
           "human_bytes", "report"]
# fmt: on


@dataclass(frozen=True, slots=True)
class Report:
    """The report on one function at one size on one device: the plan that runs, with times and bytes at that size."""

    workload: str
    device: Device
    holds: Validity  # the sizes for which this plan runs
    floor_bytes: int
    floor_us: float
    predicted_us: float
    kernels: tuple[KernelRow, ...]
    refusals: tuple[RefusalRow, ...]
    rejected: tuple[RejectedRow, ...]
    sources: tuple[Source, ...]
    plan: Plan | None = field(default=None, repr=False)

    def why(self) -> Why:
        """The candidate schedules of each kernel, and the terms of their predicted times."""
        return why(self.plan) if self.plan else Why(())

    @property
    def dram_bytes(self) -> int:
        """Total DRAM traffic of all kernels."""
        return sum(k.dram_bytes for k in self.kernels)

    @property
    def corrections(self) -> tuple[tuple[str, float], ...]:
        """Factors from tuning on this GPU that predictions were multiplied by, for the kernel families in this report."""
        return tuple(c for c in self.device.corrections if c[0] in {k.family for k in self.kernels})

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        found = {
            "workload": self.workload,
            "device": self.device.name,
            "holds": as_json(self.holds),
            "floor_bytes": self.floor_bytes,
            "floor_us": round(self.floor_us, 3),
            "kernels": [as_json(k) for k in self.kernels],
            "refusals": [as_json(r) for r in self.refusals],
            "predicted_us": round(self.predicted_us, 3),
        }
        return found | {"corrections": dict(self.corrections)} if self.corrections else found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _header(self)
        if not self.kernels:
            return
        yield _kernel_table(self.kernels)
        yield _tensor_table(self.kernels)
        if self.refusals:
            yield refusal_table(self.refusals)
        if self.rejected:
            yield rejected_table(self.rejected)

    def __str__(self) -> str:
        return as_text(self)


def explain(
    fn: Callable[..., Any], *, device: "str | Device" = "h200", compile: bool = False
) -> "Callable[..., Report | ModelReport]":
    """Explains which kernels `fn` becomes on a device, and why: call the result with example inputs (meta tensors are enough).

    A plain function gets a Report on its kernels, which are always compiled. A module, or anything that torch.compile returned,
    gets a ModelReport on its regions, forward and backward. There `compile` selects whether kernels are compiled, to show their
    registers.
    """
    from .model_report import explain_model  # imported late: a plain function does not need torch.compile
    from .trace_model import is_model  # for the same reason

    return explain_model(fn, device=device, compile=compile) if is_model(fn) else explain_function(fn, device=device)


def explain_function(fn: Callable[..., Any], *, device: "str | Device" = "h200") -> Callable[..., Report]:
    """Explains the kernels that `fuse` runs for a function: call the result with example inputs.

    The plan is that of the inputs' row class, for tensors that start at a multiple of 16 bytes.
    """
    target = resolve_device(device)
    fused = fn if isinstance(fn, Fused) else Fused(fn)

    def measure(source: Source) -> Binary:
        return offline.compile(source, target)

    def explained(*args: Any, **kwargs: Any) -> Report:
        subject, given = fused.resolve(args, kwargs)
        try:
            made = pipeline.compile_function(subject, given, target, measure, fused.dynamic)
        except UnsupportedOp as error:
            error.add_note("To see which parts onepass can compile, explain torch.compile(f) instead of f.")
            raise
        with stage("explaining a function"):
            plan = at_sizes(made.compiled.plan, made.bindings)
            return report(made.compiled, plan, validity(made.program, made.variant, made.bindings))

    return explained


def report(compiled: Compiled, plan: Plan, holds: Validity) -> Report:
    """The report on a compiled function. `plan` is its plan with times and bytes at the sizes of the report."""
    return Report(
        workload=plan.program.name,
        device=plan.device,
        holds=holds,
        floor_bytes=plan.floor_bytes,
        floor_us=plan.floor_us,
        predicted_us=plan.predicted_us,
        kernels=kernel_rows(plan.kernels, compiled.binaries, plan.device),
        refusals=tuple(map(refusal_row, plan.refusals)),
        rejected=tuple(map(rejected_row, compiled.rejected)),
        sources=compiled.sources,
        plan=plan,
    )


def _header(r: Report) -> Text:
    ratios = f"{ratio(r.dram_bytes, r.floor_bytes)} x the bytes, {ratio(r.predicted_us, r.floor_us)} x the time"
    corrected = ", ".join(f"{family} x {factor:g}" for family, factor in r.corrections)
    return Text.assemble(
        (r.workload, "bold"),
        f" on {r.device.title}: {counted(len(r.kernels), 'kernel')}\n",
        f"  floor      {human_bytes(r.floor_bytes):>8} {r.floor_us:9.1f} us  each input read once, each output written once\n",
        f"  predicted  {human_bytes(r.dram_bytes):>8} {r.predicted_us:9.1f} us  {ratios}\n",
        f"  corrected  {corrected}, from kernels timed on this GPU\n" if corrected else "",
        f"  {r.holds}\n" if r.kernels else "  no kernel: the outputs need no arithmetic, or have no elements\n",
    )


def _kernel_table(kernels: tuple[KernelRow, ...]) -> Table:
    shown = table(
        "kernels",
        ("name", "name"),
        ("family", "name"),
        ("DRAM", "right"),
        ("regs", "right"),
        ("spill", "right"),
        ("smem", "right"),
        ("CTAs/SM", "right"),
        ("predicted", "right"),
    )
    for k in kernels:
        shown.add_row(
            escape(k.name),
            escape(k.family),
            human_bytes(k.dram_bytes),
            str(k.registers),
            spill_text(k.spill_bytes),
            "" if k.smem_bytes is None else human_bytes(k.smem_bytes),
            str(k.ctas_per_sm),
            us(k.predicted_us),
        )
    return shown


def _tensor_table(kernels: tuple[KernelRow, ...]) -> Table:
    shown = table("\ntensors", ("kernel", "name"), ("reads", "left"), ("writes", "left"))
    for k in kernels:
        shown.add_row(escape(k.name), escape("\n".join(k.loads)), escape("\n".join(k.stores)))
    return shown
