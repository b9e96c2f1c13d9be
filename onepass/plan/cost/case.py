"""What the formulas of the cost model are evaluated for, and quantities that several of them use."""

from __future__ import annotations

from math import exp, log2
from typing import NamedTuple

from ...constants import CostConstants
from ...device import Device
from ..kernel import Kernel
from ..resources import Resources, tile_of
from ..schedule import Block, Cover, Loop, RowVectors, Schedule
from ..thread_layout import allows_private_states
from ..traffic import Traffic, monoid_of

LINE = 128  # bytes of a cache line
# What issue slots depend on, for the sources of terms.
SLOTS = (
    "tile_slots, still_tile_slots, several_tiles_slots, merge_slots, unaligned_slots, unaligned_edge_slots, "
    "unaligned_vector_slots, smem_vector_slots"
)


class Case(NamedTuple):
    """A kernel under one schedule on one device, and the constants of the model."""

    kernel: Kernel
    schedule: Schedule
    resources: Resources
    t: Traffic
    device: Device
    c: CostConstants


# ---- memory


def sustained_rate(in_flight: float, device: Device) -> float:
    """The DRAM rate that `in_flight` bytes per SM sustain."""
    saturation = in_flight / device.bytes_in_flight
    return device.bandwidth * saturation / float((1 + saturation**4) ** 0.25)


def congestion(outstanding: float, c: CostConstants) -> float:
    """Slowdown of transfers with `outstanding` bytes per SM."""
    return 1 + c.congestion * max(0.0, outstanding / c.congestion_from - 1)


def outstanding_penalty(case: Case) -> float:
    """Slowdown of whole rows by the bytes each thread has outstanding."""
    schedule, t, device, c = case.schedule, case.t, case.device, case.c
    tile = tile_of(schedule)
    outstanding = tile.resident_height * tile.resident_width * t.input_bytes_per_elem / (32 * schedule.warps)
    within = min(max(outstanding, c.outstanding_from), c.outstanding_up_to)
    doublings = log2(within / c.outstanding_from) if t.full_out else 0.0
    return 1 + c.outstanding_penalty * doublings * max(0.0, 1 - c.outstanding_l2 * device.l2_bytes / max(t.once, 1.0))


def narrow_tile_penalty(case: Case) -> float:
    """Slowdown of a walk down columns with narrow staged tiles: two CTAs read each line and drift apart, and lines are written in
    halves. It only shows if tensors are much larger than L2.
    """
    schedule, t, c = case.schedule, case.t, case.c
    if not schedule.staged or not isinstance(schedule.cols, Block):
        return 1.0
    run_bytes = schedule.cols.size * t.input_bytes_per_elem / max(case.kernel.full_loads, 1)
    read = 0.0 if run_bytes >= LINE else c.narrow_read if schedule.splits == 1 else c.narrow_read_split
    written = 0.0 if not t.full_out or run_bytes >= 2 * LINE else c.one_line_write if run_bytes >= LINE else c.narrow_write
    return 1 + (read + written) * max(0.0, 1 - c.narrow_l2 * case.device.l2_bytes / max(t.once, 1.0))


def l1_us(case: Case, sms: float) -> float:
    """L1 time: all full-size tensors, and row vectors once per row unless one load serves several rows."""
    schedule, t = case.schedule, case.t
    rows = 1.0
    if isinstance(schedule.rows, Block) and isinstance(schedule.cols, Cover):
        covers = t.after_reduction and min(schedule.cols.tiles) >= t.after_reduction[-1].once_from_cols * schedule.warps
        rows = float(schedule.rows.size) if covers else 1.0
    full = (t.full_in + t.full_out) / max(t.elements, 1.0)
    vectors = 0.0 if schedule.row_vectors is RowVectors.REGISTERS else t.vector_bytes_per_elem / rows
    return t.elements * (full + vectors) / (case.c.l1_rate * sms * case.device.clock)


# ---- arithmetic


def issue_slots(case: Case) -> float:
    """Issue slots per element under a schedule."""
    schedule, t, c = case.schedule, case.t, case.c
    tile = tile_of(schedule)
    per_thread = tile.height * tile.width / (32 * schedule.warps)
    walks = not schedule.staged and (isinstance(schedule.rows, Loop) or isinstance(schedule.cols, Loop))
    kept = bool(schedule.resident) and not schedule.packed
    slots = t.issue_slots_resident if kept else t.issue_slots
    per_tile = c.tile_slots if walks else c.still_tile_slots
    per_tile += c.merge_slots * t.composite_folds if isinstance(schedule.cols, Loop) else 0.0
    if schedule.ctas_per_row == 1:  # if CTAs share a row, tiles of 4 to 32 elements per thread cost the same
        slots += per_tile / max(per_thread, 1.0) * (1 if tile.count == 1 else c.several_tiles_slots)
    slots += c.smem_vector_slots * t.vector_loads_per_elem if schedule.row_vectors is RowVectors.SMEM else 0.0
    if not schedule.sector_elems:
        return slots + c.unaligned_slots * t.unaligned
    if schedule.staged and isinstance(schedule.cols, Cover):
        slots += c.unaligned_edge_slots * (schedule.cols.tiles[0] + schedule.cols.tiles[-1]) / schedule.cols.width
    return slots + c.unaligned_vector_slots * t.vector_loads_per_elem


def issue_rate(warps_per_sm: float, c: CostConstants) -> float:
    """Warp instructions per cycle that an SM issues with this many warps."""
    return c.issue_rate * (1 - exp(-max(warps_per_sm, 1.0) / c.warps_to_issue))


def issue_rate_one_cta(schedule: Schedule, c: CostConstants) -> float:
    """Warp instructions per cycle that an SM issues for one CTA."""
    few_warps = c.issue_few_warps_staged if schedule.staged else c.issue_few_warps
    return max(issue_rate(schedule.warps, c), min(c.issue_one_warp * schedule.warps, few_warps))


def issue_and_special_us(case: Case, warps_per_sm: float, sms: float) -> tuple[float, float]:
    """Time to issue all instructions, and time of all special functions."""
    t, device, c = case.t, case.device, case.c
    issue = t.elements / 32 * issue_slots(case) / (sms * issue_rate(warps_per_sm, c) * device.clock)
    special = t.elements * t.mufu / (sms * c.special_rate * device.clock)
    return issue, special


# ---- exchanges and waits


def reduction_us(warps_per_row: float, c: CostConstants) -> float:
    """Time of one reduction across the threads that share a row."""
    return c.reduction_in_warp_us if warps_per_row <= 1 else c.reduction_us + c.reduction_warp_us * warps_per_row


def warps_along(schedule: Schedule, t: Traffic) -> int:
    """The number of warps that share a row. Triton lays warps along the columns first."""
    return max(1, min(schedule.warps, tile_of(schedule).width // (32 * t.vector)))


def row_vector_wait_us(case: Case) -> float:
    """Time that walks over a staged row wait for row vectors: their loops are not unrolled, and shared memory leaves L1 no room for
    them. Column-accumulating walks are unrolled and do not wait.
    """
    kernel, schedule, c = case.kernel, case.schedule, case.c
    if schedule.accumulates_columns:
        return 0.0
    wait = c.unaligned_vector_chunk_us if schedule.sector_elems else c.vector_chunk_us
    return wait * len({p for i in kernel.row_vectors for p in kernel.use_phases(i)}) * tile_of(schedule).count


def merges_per_tile(kernel: Kernel, schedule: Schedule) -> int:
    """Exchanges between threads per tile of a walk."""
    if schedule.staged:
        return 0  # every thread keeps its own states
    monoids = [monoid_of(kernel, f) for f in kernel.folds if not f.block]
    return sum(2 for m in monoids if not m.primitive and not (schedule.private_states and allows_private_states(m)))
