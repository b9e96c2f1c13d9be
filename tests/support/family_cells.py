"""Every kernel family with every class of types: small functions, each under some of the planner's candidate schedules.

A cell is a family (`Schedule.family`) and a class of types. Its members come from the planner's own candidates, so that
a new kind of schedule is included automatically, and a family that no function uses any more leaves its cell empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from onepass.capture.function.captured import Captured
from onepass.capture.function.trace import capture
from onepass.device import Device
from onepass.ir.program import Program
from onepass.ir.size import Bindings
from onepass.pipeline import generate, optimize
from onepass.plan.plan import KernelPlan
from onepass.plan.variant import specialize
from onepass.runtime import offline
from onepass.runtime.compiled import Artifact, Compiled
from onepass.runtime.executable import aligned_of, assemble
from onepass.tools.check import as_tuple
from tests.support import forced_schedules as forced

Function: TypeAlias = Callable[[Tensor], Any]
CLASSES: dict[str, tuple[torch.dtype, ...]] = {
    "f64": (torch.float64,),
    "f32": (torch.float32,),
    "half": (torch.bfloat16, torch.float16),
    "fp8": (torch.float8_e4m3fn, torch.float8_e5m2),
    "int": (torch.int64, torch.int32),
    "small int": (torch.int16, torch.int8, torch.uint8),
    "bool": (torch.bool,),
}
IN_REGISTERS = ("pointwise", "inner", "inner looped", "inner split", "column", "outer", "outer split", "mix-order")
# Rows and tiles in shared memory: only fp32 and 16-bit types.
IN_SHARED_MEMORY = ("inner staged", "outer staged", "outer staged split", "mix-order staged", "mix-order multi-CTA")
FAMILIES = (*IN_REGISTERS, *IN_SHARED_MEMORY)
SHARING = ("f32", "half")
EACH = 2  # schedules of a cell, a function and a type


def cells() -> tuple[tuple[str, str], ...]:
    """(family, class of types): all that exist."""
    return tuple((family, kind) for family in FAMILIES for kind in CLASSES if family in IN_REGISTERS or kind in SHARING)


def wide(x: Tensor) -> Tensor:
    """Convert types without arithmetic in torch to fp32."""
    return x.float() if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


def scaled(x: Tensor) -> Tensor:
    return ~x if x.dtype == torch.bool else wide(x) * 3


def summed(x: Tensor, dim: int) -> Tensor:
    return x.any(dim) if x.dtype == torch.bool else wide(x).sum(dim)


def less_greatest(x: Tensor, dim: int) -> Tensor:
    return x ^ x.all(dim, keepdim=True) if x.dtype == torch.bool else wide(x) - wide(x).amax(dim, keepdim=True)


# Small and usual sizes. Usual ones have more rows than all rings on a card have slots, so that slots are refilled.
FUNCTIONS: dict[str, tuple[Function, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]] = {
    "scaled": (scaled, ((5, 40),), ((700, 513),)),
    "less the greatest of rows": (lambda x: less_greatest(x, -1), ((7, 96), (6, 128)), ((700, 4096), (700, 1027))),
    "sums of rows": (lambda x: summed(x, -1), ((2, 40000),), ((3, 65536),)),
    "both": (lambda x: (less_greatest(x, -1), summed(x, 0)), ((9, 64), (9, 8192)), ((700, 4096), (700, 16384))),
    "sums of columns": (lambda x: summed(x, 0), ((130, 32),), ((2100, 512), (2100, 515))),
    "less the greatest of columns": (lambda x: less_greatest(x, 0), ((12, 40),), ((64, 515),)),
}


@dataclass(frozen=True)
class Forced:
    """A function of one tensor as a single kernel under a given schedule."""

    name: str
    function: Function
    shape: tuple[int, int]
    dtype: torch.dtype
    captured: Captured
    program: Program
    sizes: Bindings
    kernel: KernelPlan

    def inputs(self, seed: int, device: "str | torch.device" = "cpu") -> tuple[Tensor]:
        """Random numbers of the type, small enough to be summed; the same on every device."""
        numbers = torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))
        return ((numbers > 0.5 if self.dtype == torch.bool else numbers.mul(3).abs().to(self.dtype)).to(device),)

    @cached_property
    def artifact(self) -> Artifact:
        """Its kernel, and the join of its partial results, as sources."""
        plan = forced.planned(self.program, self.sizes, self.kernel)
        return Compiled(plan, generate(plan), ()).artifact

    @property
    def aligned(self) -> frozenset[str]:
        """Arguments and results, all of which start on 16 bytes on a card."""
        return frozenset(b.name for b in (*self.artifact.inputs, *self.artifact.outputs))

    def compile(self, on: Device) -> None:
        """Compile for a card, which need not be present. Several threads may do this in advance."""
        outputs = frozenset(b.name for b in self.artifact.outputs)
        for source in self.artifact.sources:
            offline.compile(source, on, aligned_of(source, self.aligned, outputs))

    def call(self, device: torch.device) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """The function, computed by that kernel alone."""
        executable = assemble(self.artifact, device, self.aligned if device.type == "cuda" else frozenset())
        return lambda x: as_tuple(self.captured.result(executable(self.captured.tensors((x,)), self.sizes), (x,)))


@cache
def _written(
    name: str, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[Captured, Program, Bindings, dict[str, list[KernelPlan]]]:
    """A function as one kernel, and all of the planner's candidates, by family."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    captured = capture(FUNCTIONS[name][0], (x,), dynamic=False)
    program, sizes = specialize(optimize(captured.program), captured.bind((x,)) or {})
    found: dict[str, list[KernelPlan]] = {}
    for _, plans in forced.candidates(program, sizes):
        for plan in plans:
            found.setdefault(plan.schedule.family, []).append(plan)
    return captured, program, sizes, found


def weighed() -> set[str]:
    """The families of all candidates for these functions."""
    return {
        family
        for name, (_, small, usual) in FUNCTIONS.items()
        for shape in (*small, *usual)
        for kind in CLASSES.values()
        for dtype in kind
        for family in _written(name, shape, dtype)[3]
    }


def members(family: str, kind: str, small: bool = False, few: bool = False) -> Iterator[Forced]:
    """The members of a cell: for every function, shape and type, some schedules that are far apart in the planner's list.

    With `few`, one schedule of each function, at its first shape for which the family is a candidate, and one type.
    """
    for name, (function, *shapes) in FUNCTIONS.items():
        reached = False
        for shape in shapes[0 if small else 1]:
            for dtype in CLASSES[kind][: 1 if few else None]:
                if few and reached:
                    continue
                captured, program, sizes, found = _written(name, shape, dtype)
                plans = found.get(family, [])
                reached = reached or bool(plans)
                for plan in plans[:: max(1, len(plans) if few else -(-len(plans) // EACH))]:
                    yield Forced(name, function, shape, dtype, captured, program, sizes, plan)
