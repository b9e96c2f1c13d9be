"""The compiler pipeline: every stage from capture to launch, in order.

    function or fx graph --capture--> Program --optimize, plan--> Plan --generate--> Sources --compile--> Artifact --> Executable

Each value is frozen, verified and kept, so `explain` only reads. `compile_function` calls the stages one after the other. Calls of
kernels (integration/build.py, integration/engine.py) go through the same functions with a cache before each: a region is optimized
once, and planned once for each Variant.

The only feedback goes from the compiler to the planner. If a kernel spills or needs too much shared memory, the planner plans again
without that schedule. If it spills heavily, schedules with a higher register estimate are excluded too. If fewer CTAs fit an SM
than predicted, the schedule is scored again with the actual number. If all schedules of a kernel spill, the one that spills least
is used, because a slow kernel is better than none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .capture import Captured, capture
from .capture.graph.region_program import lower_region
from .codegen.emit import emit
from .codegen.source import Source
from .device import Device
from .errors import NoPlan
from .ir.axes import unify_axes
from .ir.program import Program
from .ir.simplify import simplify
from .ir.size import Bindings
from .ir.verify import verify
from .plan.access import needs_wide_index
from .plan.partition import plan as search
from .plan.plan import CompileOutcome, Plan
from .plan.schedule import Schedule
from .plan.variant import Variant, specialized, variant_of
from .runtime.binary import Binary
from .runtime.compiled import Compiled
from .runtime.counters import count
from .runtime.executable import assemble
from .runtime.feedback import compile_outcome, defects, misfits, rejected
from .runtime.keep_sources import keep_sources
from .stages import stage

# fmt: off
__all__ = ["Compilation", "CompileKernel", "assemble", "capture", "compile", "compile_function", "generate", "interpret",
           "lower_region", "make_plan", "optimize", "variant_of"]
# fmt: on

CompileKernel = Callable[[Source], Binary]  # returns the binary with its registers, spills and shared memory
MAX_ATTEMPTS = 16  # plans that are compiled for one Variant


@dataclass(frozen=True)
class Compilation:
    """What each stage made of a function called with some arguments."""

    captured: Captured
    bindings: Bindings
    program: Program
    variant: Variant
    plan: Plan  # as first made; `compiled` holds the one that runs
    compiled: Compiled


@stage("compiling a function")
def compile_function(
    fn: Callable[..., Any], args: tuple[Any, ...], device: Device, compile_kernel: CompileKernel, dynamic: bool | None = None
) -> Compilation:
    """Every stage but the launch, in order, for a function and the sizes of a call."""
    captured = capture(fn, args, dynamic=dynamic)  # torch ops -> Program, and the guards under which it holds
    bindings = captured.bind(args) or {}
    program = optimize(captured.program)  # algebra, shared axes
    variant = variant_of(program, bindings, device)  # row class, specialized sizes, alignment
    if program.is_empty(bindings):  # torch computes such a call
        nothing = Plan(program, device, bindings, (), ())
        return Compilation(captured, bindings, program, variant, nothing, Compiled(nothing, (), ()))
    chosen = make_plan(program, variant)  # kernels and schedules, by cost; refusals kept
    wide = needs_wide_index(program, bindings)
    compiled = compile(chosen, compile_kernel, wide)  # text and binaries; spills feed back into the search
    return Compilation(captured, bindings, program, variant, chosen, compiled)  # `assemble` binds its Artifact to a device


# ---- capture: `capture` for a function, `lower_region` for a region of a graph. Both give a Program. -------------------------


@stage("simplifying a Program")
def optimize(program: Program) -> Program:
    """Verify and simplify a captured Program, ready for planning."""
    count(optimized=1)
    verify(program, "capture")
    return verify(unify_axes(simplify(program)), "simplify")


# ---- Program -> Plan: `variant_of` says for which sizes. ---------------------------------------------------------------------


@stage("planning kernels")
def make_plan(program: Program, variant: Variant) -> Plan:
    """Choose the kernels of an optimized Program and their schedules, for the sizes of a Variant."""
    count(plans=1)
    return search(specialized(program, variant), dict(variant.sizes), variant.device)


# ---- Plan -> Sources ---------------------------------------------------------------------------------------------------------


@stage("writing kernels")
def generate(chosen: Plan, wide: bool = False) -> tuple[Source, ...]:
    """The source text of every kernel of a plan. `wide` uses 64-bit indices for tensors that need them."""
    for kernel in chosen.kernels:
        verify(kernel.program, "plan")
    return tuple(emit(k.kernel, k.schedule, chosen.bindings, k.name, chosen.device, wide) for k in chosen.kernels)


# ---- Plan -> Compiled: sources and binaries ----------------------------------------------------------------------------------


@stage("writing kernels for the interpreter")
def interpret(chosen: Plan, wide: bool = False) -> Compiled:
    """The sources of a plan for the interpreter, which needs no binaries."""
    return Compiled(chosen, keep_sources(generate(chosen, wide)), ())


@stage("compiling kernels")
def compile(chosen: Plan, compile_kernel: CompileKernel, wide: bool = False) -> Compiled:
    """Generate and compile; plan again until no kernel spills and occupancy is as predicted. Returns the best plan of these."""
    feedback: dict[tuple[Program, Schedule], CompileOutcome] = {}
    tried: list[Compiled] = []
    while True:
        sources = generate(chosen, wide)
        made = Compiled(chosen, sources, tuple(compile_kernel(source) for source in sources))
        unfit = misfits(made)
        tried.append(replace(made, rejected=tuple(rejected(k, b) for k, b in unfit)))
        new = {k.scored_as: compile_outcome(k, b, chosen.device) for k, b in unfit if k.scored_as not in feedback}
        if not new or len(tried) == MAX_ATTEMPTS:  # all is fine, or the planner knew of these problems and has nothing better
            return _best(tried)
        feedback |= new
        try:
            count(replans=1)
            chosen = search(chosen.program, chosen.bindings, chosen.device, feedback)
        except NoPlan:
            return _best(tried)


def _best(tried: list[Compiled]) -> Compiled:
    """The best of several compiled plans, with the schedules that were rejected on the way."""
    first = tried[0].plan
    runs = [c for c in tried if all(b.smem_bytes <= first.device.smem_per_cta for b in c.binaries)]
    if not runs:
        detail = f"the {len(tried)} best plans need more shared memory than a CTA can have"
        raise NoPlan(what=first.program.name, device=first.device.name, detail=detail)
    best = min(runs, key=defects)
    keep_sources(best.sources)
    taken = {(k.name, k.schedule) for k in best.plan.kernels}
    others = {at: r for c in tried if c is not best for r in c.rejected if (at := (r.kernel, r.schedule)) not in taken}
    return replace(best, rejected=tuple(others.values()))


# ---- Artifact -> Executable: `assemble` loads it for a device; calling the Executable launches it. ---------------------------
