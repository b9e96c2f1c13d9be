"""The compiler pipeline: every stage, in order.

    fx graph --capture--> Program --plan--> Plan --codegen--> Sources --runtime--> Executable

Each value is frozen, verified and kept, so `explain` only reads. The only feedback goes from the compiler to the planner. If a
kernel spills or needs too much shared memory, the planner plans again without that schedule. If it spills heavily, schedules with a
higher register estimate are excluded too. If fewer CTAs fit an SM than predicted, the schedule is scored again with the actual
number. If all schedules of a kernel spill, the one that spills least is used, because a slow kernel is better than none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf, prod
from pathlib import Path
from types import ModuleType

from . import files
from .codegen import gluon, gluon_tiles, triton
from .codegen.source import Source
from .device import Device
from .errors import IllegalSchedule, NoPlan, SourcesNotKept, text_of, warn
from .ir.axes import unify_axes
from .ir.program import Program
from .ir.simplify import simplify
from .ir.size import Bindings
from .ir.specialize import substitute, symbols_to_specialize
from .ir.verify import verify
from .knobs import knobs
from .plan.cost import cost, traffic
from .plan.partition import plan
from .plan.plan import REGISTERS_UNBOUNDED, CompileOutcome, KernelPlan, Plan
from .plan.resources import ctas_per_sm
from .plan.schedule import Block, Schedule
from .plan.schedule_check import check
from .plan.scoring import fits_one_wave
from .runtime.binary import Binary
from .runtime.compiled import Compiled, Rejected
from .stages import stage

CompileKernel = Callable[[Source], Binary]  # returns the binary with its registers, spills and shared memory
MAX_ATTEMPTS = 16
MIN_SLOWDOWN = 1.03  # ratio of predicted times; a smaller slowdown is not worth compiling another plan


@stage("simplifying a Program")
def optimize(program: Program) -> Program:
    """Verify and simplify a captured Program, ready for planning."""
    verify(program, "capture")
    return verify(unify_axes(simplify(program)), "simplify")


@stage("fixing sizes of a Program")
def specialize(program: Program, bindings: Bindings) -> tuple[Program, Bindings]:
    """Replace the sizes that kernels need at compile time by their values. Returns the Program and the remaining bindings."""
    static = symbols_to_specialize(program)
    specialized = substitute(program, {name: bindings[name] for name in static})
    return specialized, {name: size for name, size in bindings.items() if name not in static}


@stage("writing kernels")
def generate(chosen: Plan, wide: bool = False) -> tuple[Source, ...]:
    """The source text of every kernel of a plan. `wide` uses 64-bit indices for tensors that need them."""
    for kernel in chosen.kernels:
        verify(kernel.program, "plan")
        _verify_schedule(kernel, chosen.device)
    return tuple(emitter(k.schedule).emit(k.kernel, k.schedule, chosen.bindings, k.name, wide) for k in chosen.kernels)


def _verify_schedule(kernel: KernelPlan, device: Device) -> None:
    if refused := check(kernel.kernel, kernel.schedule, device, emitted=True):
        raise IllegalSchedule(kernel=kernel.name, schedule=kernel.schedule, device=device.title, reason=refused.reason.value,
                              detail=refused.detail)


def emitter(schedule: Schedule) -> ModuleType:
    """The code generator for a schedule: Triton, unless it stages inputs in shared memory."""
    if not schedule.staged:
        return triton
    return gluon_tiles if isinstance(schedule.cols, Block) else gluon


@stage("planning and writing kernels")
def plan_for_interpreter(program: Program, bindings: Bindings, device: Device, wide: bool = False) -> Compiled:
    """Plan and generate kernels without compiling them, for the interpreter."""
    chosen = plan(program, bindings, device)
    return Compiled(chosen, keep_sources(generate(chosen, wide)), ())


@stage("planning and compiling kernels")
def compile(program: Program, bindings: Bindings, device: Device, compile_kernel: CompileKernel, wide: bool = False) -> Compiled:
    """Plan, generate and compile until no kernel spills and occupancy is as predicted. Returns the best plan that was compiled."""
    feedback: dict[tuple[Program, Schedule], CompileOutcome] = {}
    tried: list[Compiled] = []
    for _ in range(MAX_ATTEMPTS):
        try:
            chosen = plan(program, bindings, device, feedback)
        except NoPlan:
            if not tried:
                raise
            break
        sources = generate(chosen, wide)
        binaries = tuple(compile_kernel(source) for source in sources)
        pairs = tuple(zip(chosen.kernels, binaries, strict=True))
        misfits = [(k, b) for k, b in pairs
                   if b.spill_bytes or b.smem_bytes > device.smem_per_cta or _has_low_occupancy(k, b, bindings, device)]
        tried.append(Compiled(chosen, sources, binaries, tuple(_rejected(k, b) for k, b in misfits)))
        new = {k.scored_as: _compile_outcome(k, b, device) for k, b in misfits if k.scored_as not in feedback}
        if not new:  # all kernels are fine, or the planner already knew of their problems and has nothing better
            break
        feedback |= new
    runs = [c for c in tried if all(b.smem_bytes <= device.smem_per_cta for b in c.binaries)]
    if not runs:
        detail = f"the {len(tried)} best plans need more shared memory than a CTA can have"
        raise NoPlan(what=program.name, device=device.name, detail=detail)
    best = min(runs, key=lambda c: _defects(c, bindings, device))
    keep_sources(best.sources)
    taken = {(k.name, k.schedule) for k in best.plan.kernels}
    rejected = {at: r for c in tried if c is not best for r in c.rejected if (at := (r.kernel, r.schedule)) not in taken}
    return replace(best, rejected=tuple(rejected.values()))


def _defects(made: Compiled, bindings: Bindings, device: Device) -> tuple[bool, int, bool]:
    """Sort key of a compiled plan, best first: spills inside a loop, spilled bytes, lower occupancy than predicted."""
    low_occupancy = any(_has_low_occupancy(k, b, bindings, device) for k, b in zip(made.plan.kernels, made.binaries, strict=True))
    return any(b.spills_in_loop for b in made.binaries), sum(b.spill_bytes for b in made.binaries), low_occupancy


def _has_low_occupancy(kernel: KernelPlan, binary: Binary, bindings: Bindings, device: Device) -> bool:
    """Whether a kernel's actual register use lets fewer CTAs run at once than the planner predicted, at a cost in time.

    A loop over rows assumes one wave of CTAs, so there a single missing CTA counts. Other kernels count only from half the
    predicted CTAs per SM on, and if the cost model predicts a slowdown. H200: RMSNorm backward 98304 x 768 takes 130 us when 396 of
    528 CTAs fit, and LayerNorm backward 118 us when all fit. Log-softmax 8192 x 32768 takes 321 us with 16 warps at 80 registers
    per thread, where one CTA fits instead of two, and 260 us with 8 warps.
    """
    fit = _actual_ctas_per_sm(kernel, binary, device)
    if not fits_one_wave(kernel.schedule, fit, device):
        return True
    if not 0 < 2 * fit <= kernel.resources.ctas_per_sm:
        return False
    t = traffic(kernel.kernel, bindings)
    predicted, actual = (cost(kernel.kernel, kernel.schedule, replace(kernel.resources, ctas_per_sm=n), t, device).us
                         for n in (kernel.resources.ctas_per_sm, fit))
    return actual > MIN_SLOWDOWN * predicted


def _actual_ctas_per_sm(kernel: KernelPlan, binary: Binary, device: Device) -> int:
    """How many CTAs fit one SM with the registers and shared memory that the compiled kernel uses."""
    return ctas_per_sm(binary.registers, binary.smem_bytes, kernel.schedule.warps, device)


def _compile_outcome(kernel: KernelPlan, binary: Binary, device: Device) -> CompileOutcome:
    """Feedback for the planner on a kernel that spills, needs too much shared memory or has low occupancy.

    Heavier schedules are excluded only after a heavy spill, because register estimates are not exact. H200: LayerNorm backward with
    a residual spills two words in tiles of 2048, 2048 and 1024 columns (255 registers). In tiles of 4096 and 1024 it needs only 168
    registers, though the estimate is 10 higher: 165 us, and 223 us for the best plan without that schedule.
    """
    if binary.smem_bytes > device.smem_per_cta:
        return CompileOutcome(REGISTERS_UNBOUNDED)
    if not binary.spill_bytes:
        fit = _actual_ctas_per_sm(kernel, binary, device)
        return CompileOutcome(REGISTERS_UNBOUNDED, (False, 0), fit if fits_one_wave(kernel.schedule, fit, device) else None)
    limit = kernel.schedule.registers or min(device.registers_per_thread, device.registers_per_sm // (32 * kernel.schedule.warps))
    needed = binary.registers + binary.spill_bytes // 8  # a spilled register costs 8 bytes: a 4-byte store and a 4-byte load
    heavy = needed > limit + 8  # registers are allocated in units of 8
    return CompileOutcome(kernel.resources.registers if heavy else REGISTERS_UNBOUNDED, (binary.spills_in_loop, binary.spill_bytes))


def _rejected(kernel: KernelPlan, binary: Binary) -> Rejected:
    return Rejected(kernel.name, kernel.schedule, binary.registers, binary.spill_bytes, binary.smem_bytes)


def keep_sources(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """Write generated sources to the folder of ONEPASS_KEEP_SOURCES, if set. If that fails, warn and continue."""
    folder = knobs().keep_sources
    try:
        for source in sources if folder else ():
            path = Path(folder or ".") / f"{files.slug(source.name)}.py"
            files.write_user_file(path, source.text.encode(errors="backslashreplace"))
    except OSError as error:
        _warn_not_kept(str(folder), error.strerror or text_of(error))
    return sources


@cache
def _warn_not_kept(folder: str, detail: str) -> None:
    """Warn once per folder and reason, because a model has many kernels."""
    warn(SourcesNotKept(folder=folder, detail=detail))


# ---- row classes: which row counts share a plan --------------------------------------------------------------


# (upper bound, representative) of each class of row counts, in rows per SM. A call has at most twice as many rows as its class is
# planned for. Exceptions: the first class is planned for its bound, and the last has none, because waves no longer matter there.
ROW_CLASSES = ((1 / 8, 1 / 8), (1, 1 / 2), (4, 2), (16, 8), (64, 32), (256, 128), (inf, 512))


def row_class_bounds(device: Device) -> tuple[int, ...]:
    """Upper bounds of the row classes of a device, in rows, except for the last."""
    return tuple(int(end * device.sms) for end, _ in ROW_CLASSES[:-1])


def row_class(bindings: Bindings, device: Device) -> int:
    """The index of the row class of some sizes."""
    return bisect_left(row_class_bounds(device), prod(bindings.values()))


def representative_sizes(program: Program, bindings: Bindings, device: Device) -> dict[str, int]:
    """The sizes that a row class is planned for. They depend only on the class, not on which call came first."""
    if not program.symbols:
        return {}
    _, rows = ROW_CLASSES[row_class(bindings, device)]
    each = max(2, round((rows * device.sms) ** (1 / len(program.symbols))))
    return dict.fromkeys(program.symbols, each)
