"""What is known of a Program on a device once its kernels are written and compiled: with its plan, and without.

`Compiled` holds the plan itself, for `explain`. `Made` is what outlives planning: kernels that can run, and a summary. It
goes to the store and comes back equal, so that nobody can tell whether it was planned in this process or in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..codegen.source import Source
from ..ir.program import Buffer
from ..plan.inplace import safe_inplace_pairs
from ..plan.legality import Refusal
from ..plan.plan import KernelPlan, Plan
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


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """One kernel as a report shows it."""

    name: str
    family: str
    schedule: Schedule
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    dram_bytes: int
    predicted_us: float
    ops: tuple[str, ...]
    ctas_per_sm: int  # that the prediction counts on


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan that was timed on the card."""

    plan: str
    family: str  # of the kernel predicted to take longest
    predicted_us: float
    us: float
    spread: float  # of single runs: (80th - 20th percentile) / median
    registers: int  # of the heaviest kernel
    spill_bytes: int
    taken: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """A plan as a report shows it. Bytes and times hold for `sizes`, which a class of row counts is planned for."""

    sizes: tuple[tuple[str, int], ...]
    floor_bytes: int
    predicted_us: float
    kernels: tuple[KernelSummary, ...]
    refusals: tuple[Refusal, ...]

    @property
    def dram_bytes(self) -> int:
        """What all kernels together move to and from DRAM."""
        return sum(k.dram_bytes for k in self.kernels)


@dataclass(frozen=True)
class Artifact:
    """Kernels ready to run: their text, what the compiler made of it (nothing, where it is only interpreted), and a summary."""

    buffers: tuple[Buffer, ...]  # the Program's own, in its order, then temporaries
    sources: tuple[Source, ...]
    binaries: tuple[Binary, ...]
    rejected: tuple[Rejected, ...]
    summary: Summary
    in_place: tuple[tuple[str, str], ...]  # (output, input) that may be one piece of memory
    trials: tuple[Trial, ...] = ()  # what was timed before these kernels were taken, the default first

    @cached_property
    def inputs(self) -> tuple[Buffer, ...]:
        return self._of("input")

    @cached_property
    def outputs(self) -> tuple[Buffer, ...]:
        return self._of("output")

    @cached_property
    def temporaries(self) -> tuple[Buffer, ...]:
        """Buffers that live only between kernels."""
        return self._of("temp")

    @cached_property
    def cleared(self) -> tuple[Buffer, ...]:
        """Memory of single kernels that must be 0 when they start."""
        return tuple(b for source in self.sources for b in source.cleared)

    def _of(self, role: str) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.role == role)


@dataclass(frozen=True)
class Compiled:
    """A plan, its kernels' text, and what the compiler made of them (nothing, where they are only interpreted)."""

    plan: Plan
    sources: tuple[Source, ...]
    binaries: tuple[Binary, ...]
    rejected: tuple[Rejected, ...] = ()

    @cached_property
    def artifact(self) -> Artifact:
        """All of it but the plan, which is summed up."""
        plan = self.plan
        summary = Summary(tuple(plan.bindings.items()), plan.floor_bytes, plan.predicted_us,
                          tuple(_summary(k) for k in plan.kernels), plan.refusals)
        own = tuple(b for b in plan.program.buffers if b.role != "temp")
        return Artifact((*own, *plan.temporaries), self.sources, self.binaries, self.rejected, summary, safe_inplace_pairs(plan))


def _summary(kernel: KernelPlan) -> KernelSummary:
    return KernelSummary(kernel.name, kernel.family, kernel.schedule, kernel.loads, kernel.stores, kernel.dram_bytes,
                         kernel.predicted_us, kernel.ops, kernel.resources.ctas_per_sm)
