"""Report rows: one kernel, one refused merge, one rejected plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.markup import escape
from rich.table import Table

from ..device import Device
from ..plan.legality import Refusal
from ..plan.resources import ctas_per_sm
from ..plan.schedule import Schedule
from ..runtime.binary import Binary
from ..runtime.compiled import Rejected
from .tables import table, us


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel: its traffic, and the resources of its binary (None if it was not compiled)."""

    name: str
    family: str
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    dram_bytes: int
    registers: int | None
    spill_bytes: int | None
    smem_bytes: int | None
    ctas_per_sm: int | None
    predicted_us: float
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefusalRow:
    """A refused merge. A cost of None means that this form is impossible."""

    reason: str
    cost_fused_us: float | None
    cost_apart_us: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A plan that was compiled and rejected."""

    kernel: str
    plan: str
    registers: int
    spill_bytes: int


class Planned(Protocol):
    """A kernel as its plan or the plan's summary describes it."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def loads(self) -> tuple[str, ...]: ...
    @property
    def stores(self) -> tuple[str, ...]: ...
    @property
    def dram_bytes(self) -> int: ...
    @property
    def predicted_us(self) -> float: ...
    @property
    def ops(self) -> tuple[str, ...]: ...


def kernel_rows(kernels: Iterable[Planned], binaries: tuple[Binary, ...], device: Device | None) -> tuple[KernelRow, ...]:
    """The rows of a plan's kernels. Fields that need binaries or a device are None without them."""
    planned = tuple(kernels)
    return tuple(_kernel_row(k, b, device) for k, b in zip(planned, binaries or (None,) * len(planned), strict=True))


def _kernel_row(kernel: Planned, binary: Binary | None, device: Device | None) -> KernelRow:
    fit = ctas_per_sm(binary.registers, binary.smem_bytes, kernel.schedule.warps, device) if binary and device else None
    return KernelRow(
        name=kernel.name,
        family=kernel.family,
        loads=kernel.loads,
        stores=kernel.stores,
        dram_bytes=kernel.dram_bytes,
        registers=binary.registers if binary else None,
        spill_bytes=binary.spill_bytes if binary else None,
        smem_bytes=binary.smem_bytes if binary else None,
        ctas_per_sm=fit,
        predicted_us=kernel.predicted_us,
        ops=kernel.ops,
    )


def refusal_row(refusal: Refusal) -> RefusalRow:
    """The row of a Refusal."""
    detail = f"{' + '.join(refusal.between)}: {refusal.detail}" if refusal.detail else " + ".join(refusal.between)
    return RefusalRow(refusal.reason.value, refusal.cost_fused_us, refusal.cost_apart_us, detail)


def rejected_row(rejected: Rejected) -> RejectedRow:
    """The row of a rejected plan."""
    return RejectedRow(rejected.kernel, str(rejected.schedule), rejected.registers, rejected.spill_bytes)


def as_json(row: Any) -> dict[str, Any]:
    """A row as JSON-ready values. A kernel that was not compiled omits the fields of its binary."""
    unknown = isinstance(row, KernelRow) and row.registers is None
    absent = ("registers", "spill_bytes", "smem_bytes", "ctas_per_sm") if unknown else ()
    return {json_key(k): rounded(v) for k, v in asdict(row).items() if k not in absent}


def json_key(name: str) -> str:
    """The JSON key of a field. Some keys keep older names, for readers of existing reports."""
    return {"inductor_us": "left_us", "reductions_declined": "reductions_left"}.get(name, name)


def rounded(value: Any) -> Any:
    """Round floats to three decimals and convert tuples to lists."""
    if isinstance(value, tuple):
        return [rounded(v) for v in value]
    return round(value, 3) if isinstance(value, float) else value


def refusal_table(refusals: tuple[RefusalRow, ...]) -> Table:
    """The table of refused merges, with both costs."""
    shown = table("\nnot merged", ("reason", "left"), ("fused", "right"), ("separate", "right"), ("detail", "left"))
    for r in refusals:
        shown.add_row(escape(r.reason), us(r.cost_fused_us), us(r.cost_apart_us), escape(r.detail))
    return shown


def rejected_table(rejected: tuple[RejectedRow, ...]) -> Table:
    """The table of plans that were compiled and rejected."""
    shown = table("\ncompiled and rejected", ("kernel", "name"), ("plan", "left"), ("regs", "right"), ("spill", "right"))
    for r in rejected:
        spill = f"{r.spill_bytes} B" if r.spill_bytes else "0, but too few CTAs fit"
        shown.add_row(escape(r.kernel), escape(r.plan), str(r.registers), spill)
    return shown


def spill_text(spilled: int | None) -> str:
    """Bytes spilled, in red if not 0."""
    return "-" if spilled is None else f"[red]{spilled} B[/red]" if spilled else "0"
