"""The result of compiling a Program for a device.

`Compiled` includes the plan, for `explain`. `Artifact` is the part that is cached and run: kernels and a summary of the plan. An
artifact read back from the store equals the one written, so it does not matter which process planned it.
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
    """A schedule that was compiled and rejected because it spilled or did not fit."""

    kernel: str
    schedule: Schedule
    registers: int
    spill_bytes: int
    smem_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """Summary of one kernel, for reports."""

    name: str
    family: str
    schedule: Schedule
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    dram_bytes: int
    predicted_us: float
    ops: tuple[str, ...]
    ctas_per_sm: int  # assumed by the prediction


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan that tuning timed on the GPU."""

    plan: str
    family: str  # of the kernel with the longest predicted time
    predicted_us: float
    us: float
    spread: float  # of single runs: (80th - 20th percentile) / median
    registers: int  # of the kernel that uses the most
    spill_bytes: int
    taken: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a plan, for reports. Bytes and times are for `sizes`, the sizes that the row class is planned for."""

    sizes: tuple[tuple[str, int], ...]
    floor_bytes: int
    predicted_us: float
    kernels: tuple[KernelSummary, ...]
    refusals: tuple[Refusal, ...]

    @property
    def dram_bytes(self) -> int:
        """DRAM traffic of all kernels together."""
        return sum(k.dram_bytes for k in self.kernels)


@dataclass(frozen=True)
class Artifact:
    """Kernels ready to run: sources, resource use of the binaries (empty if only interpreted), and a summary of the plan."""

    buffers: tuple[Buffer, ...]  # the Program's buffers in order, then temporaries
    sources: tuple[Source, ...]
    binaries: tuple[Binary, ...]
    rejected: tuple[Rejected, ...]
    summary: Summary
    in_place: tuple[tuple[str, str], ...]  # (output, input) pairs that may alias
    trials: tuple[Trial, ...] = ()  # plans that tuning timed, the default first

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
        """Buffers that must be zero when a kernel starts."""
        return tuple(b for source in self.sources for b in source.cleared)

    def _of(self, role: str) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.role == role)


@dataclass(frozen=True)
class Compiled:
    """A plan, its kernel sources, and the resource use of their binaries (empty if only interpreted)."""

    plan: Plan
    sources: tuple[Source, ...]
    binaries: tuple[Binary, ...]
    rejected: tuple[Rejected, ...] = ()

    @cached_property
    def artifact(self) -> Artifact:
        """The part without the plan, which is replaced by a summary."""
        plan = self.plan
        summary = Summary(
            tuple(plan.bindings.items()),
            plan.floor_bytes,
            plan.predicted_us,
            tuple(_summary(k) for k in plan.kernels),
            plan.refusals,
        )
        own = tuple(b for b in plan.program.buffers if b.role != "temp")
        return Artifact((*own, *plan.temporaries), self.sources, self.binaries, self.rejected, summary, safe_inplace_pairs(plan))


def _summary(kernel: KernelPlan) -> KernelSummary:
    return KernelSummary(
        kernel.name,
        kernel.family,
        kernel.schedule,
        kernel.loads,
        kernel.stores,
        kernel.dram_bytes,
        kernel.predicted_us,
        kernel.ops,
        kernel.resources.ctas_per_sm,
    )
