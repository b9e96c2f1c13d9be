"""Compiles a workload stage by stage: the same kernels that `onepass.fuse` runs, with access to plans and binaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import pipeline
from ..capture import Captured, capture
from ..device import Device
from ..integration.engine import Kernels
from ..ir.program import Program
from ..ir.size import Bindings
from ..plan.access import needs_wide_index
from ..plan.alternatives import alternatives
from ..plan.footprint import floor_bytes as least_bytes
from ..plan.plan import Plan
from ..plan.schedule import Schedule
from ..plan.variant import specialize
from ..runtime.compiled import Artifact
from ..runtime.executable import Executable
from ..runtime.promise import Promise
from .timing import Call

ALL_PLANS = 10_000  # more than any Program has


@dataclass(frozen=True)
class CapturedFunction:
    """A function captured for given arguments. All are assumed 16-byte aligned, as torch allocates them."""

    captured: Captured
    program: Program
    bindings: Bindings

    @staticmethod
    def of(function: Callable[..., Any], args: Sequence[Tensor]) -> "CapturedFunction":
        """Capture a function. Meta tensors are enough."""
        captured = capture(function, tuple(args))
        bindings = captured.bind(tuple(args))
        assert bindings is not None, "a capture applies to the arguments it was made from"
        return CapturedFunction(captured, pipeline.optimize(captured.program), bindings)

    @property
    def aligned(self) -> frozenset[str]:
        return frozenset(self.program.buffer)

    @property
    def floor_bytes(self) -> int:
        """Least DRAM traffic: every input read once, every output written once."""
        return least_bytes(self.program, self.bindings)

    @property
    def wide(self) -> bool:
        return needs_wide_index(self.program, self.bindings)

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset(b.name for b in self.program.buffers if b.role == "output")

    def start_compiling(self, where: torch.device) -> Promise[Artifact]:
        """Plan and compile in the background; `executable` then finds the result."""
        return Kernels(self.program, self.program.name).prepare(self.bindings, where, self.aligned)

    def executable(self, where: torch.device) -> Executable:
        """The kernels that `onepass.fuse` would run."""
        return Kernels(self.program, self.program.name).executable(self.bindings, where, self.aligned)

    def call(self, executable: Executable, args: Sequence[Tensor]) -> Call:
        """A callable that runs an executable of this function on the arguments."""
        tensors, bindings = self.captured.tensors(tuple(args)), self.bindings
        return lambda: executable(tensors, bindings)

    def plans(self, device: Device, most: int, varied: int = 0) -> tuple[Plan, ...]:
        """Different plans for exactly these sizes, sorted by predicted time, and then some with one field changed."""
        return alternatives(*specialize(self.program, self.bindings), device, most, varied=varied)

    def predicted_us(self, made: Artifact, device: Device) -> float:
        """Predicted time at these sizes of kernels that were planned for a class of row counts."""
        if all(self.bindings.get(name) == size for name, size in made.summary.sizes):
            return made.summary.predicted_us
        wanted = schedules(made)
        for plan in self.plans(device, ALL_PLANS):
            if schedules(plan) == wanted:
                return plan.predicted_us
        return made.summary.predicted_us * self.floor_bytes / made.summary.floor_bytes


def schedules(of: "Plan | Artifact") -> tuple[Schedule, ...]:
    """The schedules of a plan's kernels, without the kernels that only join partial results."""
    kernels: Sequence[Any] = of.kernels if isinstance(of, Plan) else of.summary.kernels
    return tuple(k.schedule for k in kernels if not k.name.endswith("_join"))
