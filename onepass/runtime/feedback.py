"""What compiled kernels tell the planner: spills, shared memory that does not fit, and occupancy lower than predicted.

The planner leaves out a schedule that spills or does not fit, and heavier ones too if it spills heavily. A schedule of which fewer
CTAs fit an SM is scored again with the actual number.
"""

from __future__ import annotations

from dataclasses import replace

from ..device import Device
from ..ir.size import Bindings
from ..plan.cost.model import cost
from ..plan.plan import REGISTERS_UNBOUNDED, CompileOutcome, KernelPlan
from ..plan.resources import ctas_per_sm
from ..plan.scoring import fits_one_wave
from ..plan.traffic import traffic
from .binary import Binary
from .compiled import Compiled, Rejected

MIN_SLOWDOWN = 1.03  # ratio of predicted times; a smaller slowdown is not worth compiling another plan


def misfits(made: Compiled) -> tuple[tuple[KernelPlan, Binary], ...]:
    """The kernels of a compiled plan that spill, do not fit, or reach too low an occupancy."""
    sizes, device = made.plan.bindings, made.plan.device
    return tuple(
        (k, b)
        for k, b in zip(made.plan.kernels, made.binaries, strict=True)
        if b.spill_bytes or b.smem_bytes > device.smem_per_cta or _has_low_occupancy(k, b, sizes, device)
    )


def defects(made: Compiled) -> tuple[bool, int, bool]:
    """Sort key of a compiled plan, best first: spills inside a loop, spilled bytes, lower occupancy than predicted."""
    plan = made.plan
    low_occupancy = any(
        _has_low_occupancy(k, b, plan.bindings, plan.device) for k, b in zip(plan.kernels, made.binaries, strict=True)
    )
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
    predicted, actual = (
        cost(kernel.kernel, kernel.schedule, replace(kernel.resources, ctas_per_sm=n), t, device).us
        for n in (kernel.resources.ctas_per_sm, fit)
    )
    return actual > MIN_SLOWDOWN * predicted


def _actual_ctas_per_sm(kernel: KernelPlan, binary: Binary, device: Device) -> int:
    """How many CTAs fit one SM with the registers and shared memory that the compiled kernel uses."""
    return ctas_per_sm(binary.registers, binary.smem_bytes, kernel.schedule.warps, device)


def compile_outcome(kernel: KernelPlan, binary: Binary, device: Device) -> CompileOutcome:
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


def rejected(kernel: KernelPlan, binary: Binary) -> Rejected:
    """The record of a kernel whose plan is not used."""
    return Rejected(kernel.name, kernel.schedule, binary.registers, binary.spill_bytes, binary.smem_bytes)
