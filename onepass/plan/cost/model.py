"""The predicted time of (kernel, schedule, device).

Pure arithmetic. Times are microseconds, rates are bytes per microsecond. A kernel takes as long as its slowest resource: DRAM
traffic at the rate its bytes in flight sustain, L2, L1, instruction issue, special functions, or the serial chain of one CTA, in
whole waves.
"""

from __future__ import annotations

from math import ceil

from ...constants import SHIPPED, CostConstants
from ...device import Device
from ..kernel import Kernel
from ..resources import Resources
from ..schedule import Block, Cover, Loop, Schedule
from ..staging import staged_family
from ..traffic import Traffic
from .case import Case
from .looped import looped
from .mix_order import mix_order
from .resident import resident
from .terms import Cost


def lower_bound(t: Traffic, device: Device) -> float:
    """A lower bound for every schedule of a kernel: its bytes at the best DRAM rate."""
    return t.once / device.bandwidth


def cost(
    kernel: Kernel, schedule: Schedule, resources: Resources, t: Traffic, device: Device, constants: CostConstants = SHIPPED.cost
) -> Cost:
    """Predict the time of one schedule: the model's, times the device's measured correction for the kernel family."""
    found = _modeled(Case(kernel, schedule, resources, t, device, constants))
    return found.corrected(device.correction(schedule.family)) if device.corrections else found


def _modeled(case: Case) -> Cost:
    schedule, t = case.schedule, case.t
    if family := staged_family(schedule):
        return family.cost(case)
    match schedule.rows, schedule.cols:
        case Loop(), Cover():
            return mix_order(case)
        case Block(height), Cover():
            return resident(case, t.rows * t.batch, t.cols, height)
        case Cover(), Block(width):
            return resident(case, t.cols * t.batch, t.rows, width)
        case Block(height), Block(width):
            return resident(case, ceil(t.rows / height) * ceil(t.cols / width) * t.batch, height * width, 1)
        case _:
            return looped(case)


def extra_kernel_us(device: Device, constants: CostConstants = SHIPPED.cost) -> float:
    """Cost of one more kernel in a plan, beyond its own time, which includes its launch and first wait."""
    return max(0.0, device.launch - constants.launch_us - device.latency / 2)


def join_us(schedule: Schedule, t: Traffic, device: Device, constants: CostConstants = SHIPPED.cost) -> float:
    """Time of the second kernel, spread over the GPU, that joins the partial results of a split reduction; 0 without one.

    The join reads partial rows one after another. That is not charged if rows are reduced as well: there many small CTAs gain
    more than this, which the model does not predict.
    """
    if schedule.splits <= 1:
        return 0.0
    length = t.cols * t.batch if isinstance(schedule.rows, Loop) else t.rows * t.batch
    part = 0.0 if t.inner_folds else constants.join_part_us
    states = 4.0 * max(t.outer_states, 1) * schedule.splits * length / device.l2_bandwidth
    return device.launch + states + part * schedule.splits


def last_block_cost(states: float, splits: int, length: int, constants: CostConstants = SHIPPED.cost) -> float:
    """Time if the last CTA to finish reads all partial states instead."""
    return 4.0 * states * splits * length / constants.last_block_rate
