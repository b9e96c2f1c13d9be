"""Every stage, in order, on one page.

    fx graph --capture--> Program --plan--> Plan --codegen--> Sources --runtime--> Executable

Each value is frozen, verified and kept, so that `explain` only reads. The one step back is from the compiler to the planner:
a kernel that spills or does not fit is remembered, and the plan is made again without it and, if it spilled much, without anything
heavier; one that fits less often than foreseen is scored again. A kernel of which every schedule spills is taken all the same: slow
is better than none.
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
from .codegen import gluon, gluon_mix_order, gluon_multi_cta, gluon_tiles, gluon_unaligned, triton
from .codegen.source import Source
from .device import Device
from .errors import NoPlan, SourcesNotKept, text_of, warn
from .ir.axes import unify_axes
from .ir.specialize import substitute, symbols_to_specialize
from .ir.program import Program
from .ir.simplify import simplify
from .ir.size import Bindings
from .ir.verify import verify
from .knobs import knobs
from .plan.cost import cost, traffic
from .plan.partition import plan
from .plan.plan import REGISTERS_UNBOUNDED, CompileOutcome, KernelPlan, Plan
from .plan.resources import ctas_per_sm
from .plan.schedule import Block, Schedule
from .plan.scoring import fits_one_wave
from .runtime.binary import Binary
from .runtime.compiled import Compiled, Rejected
from .stages import stage

CompileKernel = Callable[[Source], Binary]  # compile a source and say what the binary takes
MAX_ATTEMPTS = 16
MIN_SLOWDOWN = 1.03  # times the predicted time: what is less is not worth compiling another plan for


@stage("simplifying a Program")
def optimize(program: Program) -> Program:
    """Capture's Program, made ready to plan."""
    verify(program, "capture")
    return verify(unify_axes(simplify(program)), "simplify")


@stage("fixing sizes of a Program")
def specialize(program: Program, bindings: Bindings) -> tuple[Program, Bindings]:
    """The Program for a call, with sizes a kernel had better know put in; and the sizes that stay free."""
    known = symbols_to_specialize(program)
    fixed = substitute(program, {name: bindings[name] for name in known})
    return fixed, {name: size for name, size in bindings.items() if name not in known}


@stage("writing kernels")
def generate(chosen: Plan, wide: bool = False) -> tuple[Source, ...]:
    """The text of every kernel of a plan; `wide` indices where a tensor needs them."""
    for kernel in chosen.kernels:
        verify(kernel.program, "plan")
    return tuple(emitter(k.schedule).emit(k.kernel, k.schedule, chosen.bindings, k.name, wide) for k in chosen.kernels)


def emitter(schedule: Schedule) -> ModuleType:
    """The module that writes a schedule: one writes all but those that read from shared memory."""
    if not schedule.staged:
        return triton
    if isinstance(schedule.cols, Block):
        return gluon_tiles
    if schedule.accumulates_columns:
        return gluon_multi_cta if schedule.ctas_per_row > 1 else gluon_mix_order
    return gluon_unaligned if schedule.sector_elems else gluon


@stage("planning and writing kernels")
def plan_for_interpreter(program: Program, bindings: Bindings, device: Device, wide: bool = False) -> Compiled:
    """Plan and write kernels, without compiling them: what the interpreter needs."""
    chosen = plan(program, bindings, device)
    return Compiled(chosen, keep_sources(generate(chosen, wide)), ())


@stage("planning and compiling kernels")
def compile(program: Program, bindings: Bindings, device: Device, measure: CompileKernel, wide: bool = False) -> Compiled:
    """Plan, write and compile, until no kernel spills and all fit as foreseen; where all spill, the plan that spills least."""
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
        binaries = tuple(measure(source) for source in sources)
        pairs = tuple(zip(chosen.kernels, binaries, strict=True))
        misfits = [(k, b) for k, b in pairs
                   if b.spill_bytes or b.smem_bytes > device.smem_per_cta or _has_low_occupancy(k, b, bindings, device)]
        tried.append(Compiled(chosen, sources, binaries, tuple(_rejected(k, b) for k, b in misfits)))
        new = {k.scored_as: _learned(k, b, device) for k, b in misfits if k.scored_as not in feedback}
        if not new:  # nothing spills, or what does was known to and is the best there is
            break
        feedback |= new
    runs = [c for c in tried if all(b.smem_bytes <= device.smem_per_cta for b in c.binaries)]
    if not runs:
        raise NoPlan(what=program.name, device=device.name, detail=f"the {len(tried)} best plans do not fit one SM")
    best = min(runs, key=lambda c: _defects(c, bindings, device))
    keep_sources(best.sources)
    taken = {(k.name, k.schedule) for k in best.plan.kernels}
    rejected = {at: r for c in tried if c is not best for r in c.rejected if (at := (r.kernel, r.schedule)) not in taken}
    return replace(best, rejected=tuple(rejected.values()))


def _defects(made: Compiled, bindings: Bindings, device: Device) -> tuple[bool, int, bool]:
    """How bad a plan's kernels are: whether they spill in a loop, how many bytes, and whether CTAs that were counted on wait."""
    wait = any(_has_low_occupancy(k, b, bindings, device) for k, b in zip(made.plan.kernels, made.binaries, strict=True))
    return any(b.spills_in_loop for b in made.binaries), sum(b.spill_bytes for b in made.binaries), wait


def _has_low_occupancy(kernel: KernelPlan, binary: Binary, bindings: Bindings, device: Device) -> bool:
    """Whether CTAs that were to run at once do not, by the registers they really take: of a loop over rows any, else every second,
    where that costs time.

    H200, RMSNorm backward 98304 x 768 by 528 CTAs, of which 148 registers a thread let 396 run at once: 130 us; LayerNorm backward
    by 528 that fit: 118. Log-softmax 8192 x 32768 by CTAs of 16 warps, two of which were to fit an SM, with 80 registers a thread:
    321 us; by CTAs of 8 warps: 260.
    """
    fit = _fit(kernel, binary, device)
    if not fits_one_wave(kernel.schedule, fit, device):
        return True
    if not 0 < 2 * fit <= kernel.resources.ctas_per_sm:
        return False
    t = traffic(kernel.kernel, bindings)
    foreseen, real = (cost(kernel.kernel, kernel.schedule, replace(kernel.resources, ctas_per_sm=n), t, device).us
                      for n in (kernel.resources.ctas_per_sm, fit))
    return real > MIN_SLOWDOWN * foreseen


def _fit(kernel: KernelPlan, binary: Binary, device: Device) -> int:
    """How many CTAs of a kernel an SM really has room for."""
    return ctas_per_sm(binary.registers, binary.smem_bytes, kernel.schedule.warps, device)


def _learned(kernel: KernelPlan, binary: Binary, device: Device) -> CompileOutcome:
    """What a kernel that spills or does not fit teaches. One that spilled few words was not too heavy: estimates are not that good.

    LayerNorm backward with a residual, 5120 columns by tiles of 2048, 2048 and 1024, takes 255 registers and spills two words; by
    4096 and 1024, estimated at 10 registers more, it takes 168 (H200: 165 us, and 223 by the plan that is left without it).
    """
    if binary.smem_bytes > device.smem_per_cta:
        return CompileOutcome(REGISTERS_UNBOUNDED)
    if not binary.spill_bytes:
        fit = _fit(kernel, binary, device)
        return CompileOutcome(REGISTERS_UNBOUNDED, (False, 0), fit if fits_one_wave(kernel.schedule, fit, device) else None)
    most = kernel.schedule.registers or min(device.registers_per_thread, device.registers_per_sm // (32 * kernel.schedule.warps))
    wanted = binary.registers + binary.spill_bytes // 8  # a word that is stored once and loaded once is a register that was missing
    heavy = wanted > most + 8  # they are handed out by eights
    return CompileOutcome(kernel.resources.registers if heavy else REGISTERS_UNBOUNDED, (binary.spills_in_loop, binary.spill_bytes))


def _rejected(kernel: KernelPlan, binary: Binary) -> Rejected:
    return Rejected(kernel.name, kernel.schedule, binary.registers, binary.spill_bytes, binary.smem_bytes)


def keep_sources(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """Leave a copy of generated text where the user asked for one; where that cannot be done, say so and go on."""
    folder = knobs().keep_sources
    try:
        for source in sources if folder else ():
            files.write_user_file(Path(folder or ".") / f"{files.slug(source.name)}.py", source.text.encode(errors="backslashreplace"))
    except OSError as error:
        _not_kept(str(folder), error.strerror or text_of(error))
    return sources


@cache
def _not_kept(folder: str, detail: str) -> None:
    """Say so once; a model has many kernels."""
    warn(SourcesNotKept(folder=folder, detail=detail))


# ---- row classes: one captured Program serves every row count --------------------------------------------------------------


# Rows an SM up to which a class of row counts goes, and those it is planned for. A call has at most twice as many rows as its plan
# is for, but in the last class, where waves no longer matter; of very few rows, not more.
ROW_CLASSES = ((1 / 8, 1 / 8), (1, 1 / 2), (4, 2), (16, 8), (64, 32), (256, 128), (inf, 512))


def row_class_bounds(device: Device) -> tuple[int, ...]:
    """Row counts between which one plan serves."""
    return tuple(int(end * device.sms) for end, _ in ROW_CLASSES[:-1])


def row_class(bindings: Bindings, device: Device) -> int:
    """Which of the classes some sizes fall into."""
    return bisect_left(row_class_bounds(device), prod(bindings.values()))


def representative_sizes(program: Program, bindings: Bindings, device: Device) -> dict[str, int]:
    """The sizes a class is planned for, the same whichever of its members comes first."""
    if not program.symbols:
        return {}
    _, rows = ROW_CLASSES[row_class(bindings, device)]
    each = max(2, round((rows * device.sms) ** (1 / len(program.symbols))))
    return dict.fromkeys(program.symbols, each)
