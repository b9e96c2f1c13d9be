"""Compiled: all that is known of a Program on a device once its kernels have been through the compiler."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.source import Source
from ..plan.plan import Plan
from ..plan.schedule import Schedule
from .binary import Binary


@dataclass(frozen=True)
class Rejected:
    """A plan that was compiled, spilled or did not fit, and was thrown away."""

    kernel: str
    schedule: Schedule
    registers: int
    spill_bytes: int
    smem_bytes: int = 0


@dataclass(frozen=True)
class Compiled:
    """A plan, its kernels' text, and what the compiler made of them (nothing, where they are only interpreted)."""

    plan: Plan
    sources: tuple[Source, ...]
    binaries: tuple[Binary, ...]
    rejected: tuple[Rejected, ...] = ()
