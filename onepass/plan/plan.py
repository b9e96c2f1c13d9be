"""Plan: the kernels of a Program in execution order, each with schedule, cost and resources, and the merges that were
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from ..device import Device
from ..ir.program import Buffer, Load, Op, Program, Reduce, Store
from ..ir.size import Bindings
from .cost import Cost, floor_us
from .cost.model import extra_kernel_us
from .footprint import Footprint, footprint
from .kernel import Across, Kernel
from .legality import Refusal
from .resources import Resources, tile_of
from .schedule import Cover, RowVectors, Schedule
from .staged_rows import prefetched_columns
from .staging.multi_cta import state_words

REGISTERS_UNBOUNDED = 1024  # above any register estimate


@dataclass(frozen=True, slots=True)
class CompileOutcome:
    """What compiling a schedule revealed: that it spills, or that fewer CTAs fit per SM than predicted."""

    registers: int  # schedules of this kernel estimated to need as many registers are not tried
    spilled: tuple[bool, int] | None = None  # (spills inside a loop, spilled bytes); None: the kernel cannot run at all
    ctas_per_sm: int | None = None  # only this many CTAs fit; score the schedule again with that number


CompileFeedback: TypeAlias = Mapping[tuple[Program, Schedule], CompileOutcome]  # keyed by (kernel as scored, schedule)


@dataclass(frozen=True)
class KernelPlan:
    """One kernel with its chosen schedule."""

    name: str
    kernel: Kernel
    schedule: Schedule
    resources: Resources
    cost: Cost
    scored_as: tuple[Program, Schedule]  # as scored, before a split reduction became partial states

    @property
    def program(self) -> Program:
        return self.kernel.program

    @property
    def family(self) -> str:
        return self.schedule.family

    @property
    def predicted_us(self) -> float:
        return self.cost.us

    @property
    def dram_bytes(self) -> int:
        return round(self.cost.dram_bytes)

    @cached_property
    def loads(self) -> tuple[str, ...]:
        """Each tensor read, how often, where it is kept, and what is special about its loads."""
        found = (self._described(i, n) + self._hints(i) for i, n in enumerate(self.program.nodes) if isinstance(n, Load))
        return (*found, *self._exchanged)

    @cached_property
    def stores(self) -> tuple[str, ...]:
        """Each tensor written, and what is special about its stores."""
        return tuple(
            f"{n.buffer} {self.program.buffer[n.buffer].dtype}{self._hints(i)}"
            for i, n in enumerate(self.program.nodes)
            if isinstance(n, Store)
        )

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """What the kernel computes, as the user's source lines where known."""
        lines = dict.fromkeys(n.src for n in self.program.nodes if n.src and isinstance(n, (Op, Reduce)))
        if lines:
            return tuple(lines)
        return tuple(
            dict.fromkeys(n.monoid if isinstance(n, Reduce) else n.name for n in self.program.nodes if isinstance(n, (Op, Reduce)))
        )

    def _hints(self, i: int) -> str:
        """The schedule's choices about one load or store."""
        early = ", loaded early" if i in self.schedule.early_loads else ""
        return early + (", evicted last" if i in self.schedule.evict_last else "")

    @property
    def _exchanged(self) -> tuple[str, ...]:
        """The mailbox of CTAs that share a row."""
        ctas = self.schedule.ctas_per_row
        if ctas == 1:
            return ()
        shape = f"[rows, {ctas * state_words(self.kernel)}]"
        return (f"mailbox i64{shape}: partial row results exchanged between the {ctas} CTAs of a row",)

    def _described(self, i: int, node: Load) -> str:
        text = f"{node.buffer} {self.program.buffer[node.buffer].dtype}"
        if not self.kernel.is_full[i]:
            if self.kernel.by_col[i] is Across.FULL:
                kept = self.schedule.cols.width * self.program.dtypes[i].size if isinstance(self.schedule.cols, Cover) else 0
                in_smem = self.schedule.row_vectors is RowVectors.SMEM
                return f"{text} per column" + (f", kept in shared memory ({kept / 1024:.1f} KiB)" if in_smem else "")
            return f"{text} per row" if self.kernel.by_row[i] else f"{text} once"
        tile, size = tile_of(self.schedule), self.program.dtypes[i].size
        if i in self.schedule.resident:
            held = tile.resident_height * tile.resident_width * size / (4 * 32 * self.schedule.warps)
            return f"{text} once, kept in registers ({held:g} per thread)"
        if i in self.schedule.staged:
            cols, prefetch = self.schedule.cols, self.schedule.prefetch
            elements = self.schedule.stages * tile.resident_height * tile.resident_width
            elements += prefetched_columns(cols, prefetch) if isinstance(cols, Cover) else 0
            part = f", 1/{self.schedule.ctas_per_row} of a row per CTA" if self.schedule.ctas_per_row > 1 else ""
            return f"{text} once, staged in shared memory ({elements * size / 1024:.1f} KiB){part}"
        times = len(self.kernel.use_phases(i)) if i in self.kernel.multi_phase else 1
        return f"{text} once" if times == 1 else f"{text} {times} times"


@dataclass(frozen=True)
class Plan:
    """A Program's kernels in execution order."""

    program: Program
    device: Device
    bindings: Bindings
    kernels: tuple[KernelPlan, ...]
    refusals: tuple[Refusal, ...]

    @cached_property
    def footprint(self) -> Footprint:
        """The fewest bytes the Program can move: every input once, every output once."""
        return footprint(self.program, self.bindings)

    @property
    def floor_bytes(self) -> int:
        return self.footprint.bytes

    @property
    def floor_us(self) -> float:
        """The time that no plan can beat."""
        return floor_us(self.footprint, self.device)

    @property
    def predicted_us(self) -> float:
        """The sum of kernel times, plus the launch cost of each further kernel."""
        return sum(k.predicted_us for k in self.kernels) + extra_kernel_us(self.device) * max(0, len(self.kernels) - 1)

    @property
    def dram_bytes(self) -> int:
        return sum(k.dram_bytes for k in self.kernels)

    @cached_property
    def temporaries(self) -> tuple[Buffer, ...]:
        """Buffers that exist only between kernels."""
        return tuple({b.name: b for k in self.kernels for b in k.program.buffers if b.role == "temp"}.values())
