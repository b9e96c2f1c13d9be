"""Cost model: predicted time of (kernel, schedule, device).

Pure arithmetic. Times are microseconds, rates are bytes per microsecond. A kernel takes as long as its slowest resource: DRAM
traffic at the rate its bytes in flight sustain, L2, L1, instruction issue, special functions, or the serial chain of one CTA,
in whole waves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, exp, log2

from ..device import Device
from ..ir.program import Load
from .kernel import Kernel
from .resources import Resources, tile_of
from .schedule import SECTOR, Block, Cover, Loop, RowVectors, Schedule
from .staged_rows import TMA_BOX, Chunks, prefetched_columns
from .thread_layout import allows_private_states
from .traffic import Traffic as Traffic
from .traffic import monoid_of
from .traffic import traffic as traffic


@dataclass(frozen=True, slots=True)
class Cost:
    """A predicted time and its components."""

    us: float
    dram_bytes: float
    in_flight: float  # bytes outstanding per SM
    limit: str  # the limiting resource


def lower_bound(t: Traffic, device: Device) -> float:
    """A lower bound for every schedule of a kernel: its bytes at the best DRAM rate."""
    return t.once / device.bandwidth


def cost(kernel: Kernel, schedule: Schedule, resources: Resources, t: Traffic, device: Device) -> Cost:
    """Predict the time of one schedule: the model's, times the device's measured correction for the kernel family."""
    found = _modeled(kernel, schedule, resources, t, device)
    correction = device.correction(schedule.family)
    return found if correction == 1.0 else replace(found, us=found.us * correction)


def _modeled(kernel: Kernel, schedule: Schedule, resources: Resources, t: Traffic, device: Device) -> Cost:
    if schedule.staged and isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Cover):
        return _staged_rows(kernel, schedule, t, device)
    match schedule.rows, schedule.cols:
        case Block(), Cover():
            return _resident(kernel, schedule, resources, t, device, t.rows * t.batch, t.cols, schedule.rows.size)
        case Cover(), Block():
            return _resident(kernel, schedule, resources, t, device, t.cols * t.batch, t.rows, schedule.cols.size)
        case Loop(), Cover():
            return _mix_order(kernel, schedule, resources, t, device)
        case Block(height), Block(width):
            tiles = ceil(t.rows / height) * ceil(t.cols / width) * t.batch
            return _resident(kernel, schedule, resources, t, device, tiles, height * width, 1)
        case _:
            return _looped(kernel, schedule, resources, t, device)


# The constants below were fitted together for the least regret and error over 2036 schedules of 117 kernels (H200, 2026-11;
# bench/results/h200/schedules.json; method in docs/decisions/0011), starting from direct measurements. The measurements in
# the comments show what each constant stands for.
RAMP = 0.1  # us from launch to the first bytes and from the last bytes to the end, beyond the loaded memory latency
VECTOR_SHARE = 0.016  # fraction of repeated row vector reads that reach L2; the rest hit L1
# Fraction of L2 that rows read twice may occupy so that all re-reads hit, and so that none do. H200, softmax and RMSNorm
# 4096x65536 with 35 to 70 of 50 MB in flight: 374 and 379 us, the time of reading everything twice.
REREAD_ALL_HITS, REREAD_NO_HITS = 0.5, 0.8
TILES_IN_FLIGHT = {1: 0.62, 2: 0.65, 3: 2.1, 4: 2.2}  # tiles in flight of a row loop, by pipeline stages; H200, RMSNorm backward
# Prefetched bytes per SM beyond which requests delay each other, and the slowdown per further such amount. H200, norm
# backward: 147 KB (four stages) 2.5-4 % slower than 98 KB (three), 98 KB as fast as 65 KB; one staged row per CTA: 192 KB
# 97.7 us, 128 KB 93.6 us.
CONGESTION_FROM, CONGESTION = 98304, 0.045
# Slowdown of walks down columns whose tiles are narrower than a cache line, presumably because two CTAs read each line and
# drift apart (more so if rows are split among CTAs) and because lines are written in halves. It only shows if tensors are
# much larger than L2, so it is scaled by 1 - 2 L2 / bytes. H200, tiles of 64 bytes vs wider: sum of fp32 65536x4096 255-275
# us (334 split) vs 242. Fitted: docs/decisions/0018.
LINE = 128
NARROW_READ, NARROW_READ_SPLIT, NARROW_WRITE, ONE_LINE_WRITE = 0.06, 0.2, 0.3, 0.05
# Slowdown of whole rows that are read and written, per doubling of the bytes a thread has outstanding, between these limits,
# in tensors much larger than L2: scaled by 1 - 4 L2 / bytes. H200, RMSNorm 65536x4096 with 32, 64, 128, 256 bytes: 246.7 to
# 252.5 us.
OUTSTANDING_PENALTY, OUTSTANDING_FROM, OUTSTANDING_UP_TO = 0.014, 32, 256
# Exponent of the soft maximum between DRAM time and the serial time of CTAs for whole rows. H200, RMSNorm 65536x4096, DRAM
# 239 us: 254 us with CTAs that serially need 191 us, the same with 104 us. Fitted with the rest (docs/decisions/0021).
RESIDENT_SHARPNESS = 5
LAST_STORES_US = 0.1  # until a CTA's last stores are issued
# us of SM time per CTA, for each warp beyond two, to reduce rows that lie in different warps. H200, column sums of 256x65536
# by CTAs of 2, 4, 8, 16 and 32 warps: 16.5, 17.1, 20.1, 24.2, 30.9 us.
WARP_FOLD_US = 0.19
RING_SLOT_US = 0.15  # us per slot of a tile ring; H200, sums over rows of one input: 8 slots 0.5-0.8 us slower than 4
# us a CTA spends between walked rows, only partly hidden by other CTAs; more if lanes hold states to merge, and if rows start
# inside a sector. H200, cross-entropy over 50264 columns with 3, 6, 12 CTAs per SM: 1.35, 1.16, 1.09 of the DRAM time.
ROW_TURNAROUND_US, MERGE_TURNAROUND_US, UNALIGNED_EDGE_US = 0.4, 0.5, 1.0
AFTER_REDUCTION_WAIT = 0.35  # fraction of the latency that a CTA waits for loads issued after a reduction
UNPIPELINED_WAIT = 0.3  # fraction of the latency that an unpipelined walk waits in each step but the first
# us to start a software pipeline. H200, RMSNorm backward 16x65536, sums of rows by CTAs of one step: 0.1 to 0.6 us slower.
PIPELINE_START_US = 0.3
# us from launch until TMA delivers the first row: mbarriers, fence, descriptor. H200, softmax 16x4096 and 256x4096: 2.4 and
# 3.1 us staged, 2.0 and 2.7 us in registers.
TMA_START_US = 0.4
# Fraction of a CTA's math still to do when its last tile arrives (fitted: docs/decisions/0011).
UNOVERLAPPED_MATH = 0.6
# us that each tile of a resident row delays its CTA. H200, RMSNorm 4096x65536, one CTA of 16 warps per SM, in 4, 8, 16 tiles:
# 264, 281, 348 us.
TILE_US = 0.15
# Bytes per cycle from L2 to one SM. While some SMs reduce, others load at up to this rate, 3.4 times their share of DRAM, so
# only all SMs together are DRAM-bound. Fitted: 57.
FILL_RATE = 64.0
ISSUE_RATE = 3.5  # warp instructions per cycle that an SM full of warps sustains
WARPS_TO_ISSUE = 8.0  # warps at which an SM issues 63 % of that
# Warp instructions per cycle: the most one warp issues with much instruction-level parallelism, and the most a single CTA
# issues. Walks over staged rows hold few registers, wait for nothing and issue many more.
ISSUE_ONE_WARP, ISSUE_FEW_WARPS, ISSUE_FEW_WARPS_STAGED = 0.6, 0.8, 3.0
UNALIGNED_SLOTS = 12.0  # issue slots per element that is read or written element-wise
# Issue slots per element of the first and last chunk of an unaligned staged row, where every walk masks every element.
# Includes wide chunks taking more registers than predicted. H200, RMSNorm 8192x50257, 16 warps, chunks of 4096, 8192, 16384:
# 473, 580, 619 us.
UNALIGNED_EDGE_SLOTS = 40.0
# Issue slots per row vector element if rows are unaligned and row vectors are aligned. H200, 8192x50257: LayerNorm 633 us,
# RMSNorm 438, softmax 400.
UNALIGNED_VECTOR_SLOTS = 6.0
SMEM_VECTOR_SLOTS = 0.75  # issue slots to read a row vector element from shared memory; fitted with VECTOR_RELOAD_US
TILE_SLOTS = 17.0  # issue slots per thread and tile of any size: addresses, waits, barriers
MERGE_SLOTS = 35.0  # issue slots per thread to merge a walked tile's states; H200, cross-entropy: 8 elements per thread cost 12 %
# us that a walk over a staged row waits for each chunk's row vectors: its loop is not unrolled, and shared memory leaves L1
# no room for them. H200, RMSNorm 4096x65536, 8, 16, 32 chunks: 371, 453, 599 us; unaligned 8192x50257, 7, 13, 25 chunks: 447,
# 474, 707 us.
VECTOR_CHUNK_US, UNALIGNED_VECTOR_CHUNK_US = 0.33, 0.4
# Slowdown of statically assigned rows if all traffic were stores: SMs are not equally fast. H200, softmax, half stores, as
# many CTAs as fit vs one per row: 284 vs 258 us. Sums of rows show no such loss.
STATIC_ROWS_PENALTY = 0.2


def _soft_max(*limits: float, sharpness: int = 4) -> float:
    """Soft maximum: limits close to each other add up. H200, cross-entropy over 128256 columns: within 12 % at 4, 8, 16
    warps.
    """
    return float(sum(t**sharpness for t in limits) ** (1 / sharpness))


def _sustained_rate(in_flight: float, device: Device) -> float:
    """The DRAM rate that `in_flight` bytes per SM sustain."""
    saturation = in_flight / device.bytes_in_flight
    return device.bandwidth * saturation / float((1 + saturation**4) ** 0.25)


def _congestion(outstanding: float) -> float:
    """Slowdown of transfers with `outstanding` bytes per SM."""
    return 1 + CONGESTION * max(0.0, outstanding / CONGESTION_FROM - 1)


def _outstanding_penalty(schedule: Schedule, t: Traffic, device: Device) -> float:
    """Slowdown of whole rows by the bytes each thread has outstanding."""
    tile = tile_of(schedule)
    outstanding = tile.resident_height * tile.resident_width * t.input_bytes_per_elem / (32 * schedule.warps)
    doublings = log2(min(max(outstanding, OUTSTANDING_FROM), OUTSTANDING_UP_TO) / OUTSTANDING_FROM) if t.full_out else 0.0
    return 1 + OUTSTANDING_PENALTY * doublings * max(0.0, 1 - 4 * device.l2_bytes / max(t.once, 1.0))


def _narrow_tile_penalty(kernel: Kernel, schedule: Schedule, t: Traffic, device: Device) -> float:
    """Slowdown of a walk down columns with narrow staged tiles."""
    if not schedule.staged or not isinstance(schedule.cols, Block):
        return 1.0
    run_bytes = schedule.cols.size * t.input_bytes_per_elem / max(kernel.full_loads, 1)
    read = 0.0 if run_bytes >= LINE else NARROW_READ if schedule.splits == 1 else NARROW_READ_SPLIT
    written = 0.0 if not t.full_out or run_bytes >= 2 * LINE else ONE_LINE_WRITE if run_bytes >= LINE else NARROW_WRITE
    return 1 + (read + written) * max(0.0, 1 - 2 * device.l2_bytes / max(t.once, 1.0))


def _reduction_us(warps_per_row: float) -> float:
    """Time of one reduction across the threads that share a row."""
    return 0.12 if warps_per_row <= 1 else 0.35 + 0.02 * warps_per_row


def _warps_along(schedule: Schedule, t: Traffic) -> int:
    """The number of warps that share a row. Triton lays warps along the columns first."""
    return max(1, min(schedule.warps, tile_of(schedule).width // (32 * t.vector)))


def _issue_slots(t: Traffic, schedule: Schedule) -> float:
    """Issue slots per element under a schedule."""
    tile = tile_of(schedule)
    per_thread = tile.height * tile.width / (32 * schedule.warps)
    walks = not schedule.staged and (isinstance(schedule.rows, Loop) or isinstance(schedule.cols, Loop))
    kept = bool(schedule.resident) and not schedule.packed
    issue_slots = t.issue_slots_resident if kept else t.issue_slots
    per_tile = TILE_SLOTS if walks else TILE_SLOTS / 4
    per_tile += MERGE_SLOTS * t.composite_folds if isinstance(schedule.cols, Loop) else 0.0
    if schedule.ctas_per_row == 1:  # if CTAs share a row, tiles of 4 to 32 elements per thread cost the same
        issue_slots += per_tile / max(per_thread, 1.0) * (1 if tile.count == 1 else 1.3)
    issue_slots += SMEM_VECTOR_SLOTS * t.vector_loads_per_elem if schedule.row_vectors is RowVectors.SMEM else 0.0
    if not schedule.sector_elems:
        return issue_slots + UNALIGNED_SLOTS * t.unaligned
    if schedule.staged and isinstance(schedule.cols, Cover):
        issue_slots += UNALIGNED_EDGE_SLOTS * (schedule.cols.tiles[0] + schedule.cols.tiles[-1]) / schedule.cols.width
    return issue_slots + UNALIGNED_VECTOR_SLOTS * t.vector_loads_per_elem


def _issue_rate(warps_per_sm: float) -> float:
    """Warp instructions per cycle that an SM issues with this many warps. H200, GELU backward: 8, 16, 32 warps 117, 77, 66
    us.
    """
    return ISSUE_RATE * (1 - exp(-max(warps_per_sm, 1.0) / WARPS_TO_ISSUE))


def _issue_rate_one_cta(schedule: Schedule) -> float:
    """Warp instructions per cycle that an SM issues for one CTA."""
    few_warps = ISSUE_FEW_WARPS_STAGED if schedule.staged else ISSUE_FEW_WARPS
    return max(_issue_rate(schedule.warps), min(ISSUE_ONE_WARP * schedule.warps, few_warps))


def _row_vector_waits(kernel: Kernel, schedule: Schedule) -> float:
    """Time that walks over a staged row wait for row vectors. Column-accumulating walks are unrolled and do not wait."""
    if schedule.accumulates_columns:
        return 0.0
    wait = UNALIGNED_VECTOR_CHUNK_US if schedule.sector_elems else VECTOR_CHUNK_US
    return wait * len({p for i in kernel.row_vectors for p in kernel.use_phases(i)}) * tile_of(schedule).count


L1_RATE = 110.0  # bytes per cycle that an SM's L1 delivers


def _l1(t: Traffic, schedule: Schedule, device: Device, sms: float) -> float:
    """L1 time: all full-size tensors, and row vectors once per row unless one load serves several rows."""
    rows = 1.0
    if isinstance(schedule.rows, Block) and isinstance(schedule.cols, Cover):
        covers = t.after_reduction and min(schedule.cols.tiles) >= t.after_reduction[-1].once_from_cols * schedule.warps
        rows = float(schedule.rows.size) if covers else 1.0
    full = (t.full_in + t.full_out) / max(t.elements, 1.0)
    vectors = 0.0 if schedule.row_vectors is RowVectors.REGISTERS else t.vector_bytes_per_elem / rows
    return t.elements * (full + vectors) / (L1_RATE * sms * device.clock)


def _compute(t: Traffic, schedule: Schedule, warps_per_sm: float, device: Device, sms: float) -> tuple[float, float]:
    issue = t.elements / 32 * _issue_slots(t, schedule) / (sms * _issue_rate(warps_per_sm) * device.clock)
    special = t.elements * t.mufu / (sms * 16 * device.clock)
    return issue, special


def _resident(kernel: Kernel, schedule: Schedule, r: Resources, t: Traffic, device: Device, pieces: int, length: int,
              block: int) -> Cost:
    """Time with whole rows (or columns) on chip, in registers or shared memory, one tile of them per CTA.

    A CTA waits for its loads, reduces, and issues its stores, at the speed it would have alone on the GPU. DRAM bounds all
    CTAs together.
    """
    ctas = ceil(pieces / block)
    resident_ctas = device.sms * r.ctas_per_sm
    co_resident, sms = min(r.ctas_per_sm, ceil(ctas / device.sms)), min(device.sms, ctas)
    reread = 0.0 if schedule.resident | schedule.staged >= set(kernel.multi_phase) else t.multi_phase
    sm_bandwidth = device.bandwidth / device.sms
    cta_bytes = block * length * t.input_bytes_per_elem
    load = cta_bytes / sm_bandwidth
    store = block * length * (t.full_out / max(t.elements, 1)) / sm_bandwidth
    folds = sum(1 for f in kernel.folds if not f.block)
    across_rows = isinstance(schedule.rows, Block)
    t_reduce = folds * _reduction_us(_warps_along(schedule, t) if across_rows else schedule.warps)
    if not across_rows:  # every row of a short run is its own request of at least two sectors
        run = block * t.input_bytes_per_elem / max(1, sum(1 for i in kernel.program.of(Load) if kernel.is_full[i]))
        load *= max(1.0, 2 * SECTOR / run)
    # Exponentials favor small tiles, with fewer live values. Rows of a resident column are loaded all at once.
    tiles = tile_of(schedule).count if t.mufu == 0 and across_rows else 1
    math = block * length / 32 * _issue_slots(t, schedule) / (_issue_rate_one_cta(schedule) * device.clock)
    prefetches_all = len(schedule.early_loads) == len(t.after_reduction)
    wait = 0.0 if prefetches_all else AFTER_REDUCTION_WAIT * device.latency
    wait = _row_vector_waits(kernel, schedule) if schedule.staged else wait + TILE_US * tiles
    first = device.latency if t.full_in else device.latency / 2  # partial results are in L2
    if across_rows and kernel.full_loads > 1 and not schedule.staged and tile_of(schedule).count > 1:
        math *= UNOVERLAPPED_MATH
    cta_us = first + cta_bytes / (FILL_RATE * device.clock) + wait + t_reduce + math
    l2 = reread + t.temps + VECTOR_SHARE * t.vectors * ctas
    dram, serial = ctas / sms * (load + store), ceil(ctas / resident_ctas) * cta_us
    memory = _soft_max(dram, serial, sharpness=RESIDENT_SHARPNESS) + l2 / device.l2_bandwidth
    memory *= _congestion(co_resident * cta_bytes) if schedule.staged and not schedule.sector_elems else 1.0
    memory *= _outstanding_penalty(schedule, t, device) if across_rows and not schedule.staged else 1.0
    memory = max(memory, t.once / device.bandwidth)
    issue, special = _compute(t, schedule, co_resident * schedule.warps, device, sms)
    us = RAMP + max(_soft_max(memory, issue, special, _l1(t, schedule, device, sms)), cta_us + LAST_STORES_US)
    us += 0.0 if across_rows else WARP_FOLD_US * max(0, schedule.warps - 2) * ctas / sms
    us += TMA_START_US if schedule.staged else 0.0
    return Cost(us, t.once + reread, co_resident * cta_bytes, _limit(memory, issue, special, cta_us))


# Constants for staged rows with column accumulation, fitted together to 368 schedules of norm backward passes (H200, 2026-11;
# docs/decisions/0023). us per row for every row vector element a thread reloads: LayerNorm 8192x16384, 8 warps, 201 us with
# the weight in registers vs 276. If CTAs share rows: warps at which an SM issues 63 % of its rate, and us per row that CTAs
# wait for each other, per warp and ctas_per_row^1.5; the rest is hidden by the walk over the next row.
VECTOR_RELOAD_US, WARPS_TO_ISSUE_UNROLLED, CTA_EXCHANGE_US = 0.04, 4.0, 0.0015
# us per row and tile that such CTAs wait for full-size tensors that are not staged. H200, residual + RMSNorm backward
# 8192x32768, two CTAs per row in 2, 4, 8 tiles: 580, 657, 825 us; four CTAs in 2, 4 tiles: 548, 613; all staged: 505.
UNSTAGED_LOAD_US = 0.2
# us per row for each TMA copy of a row beyond the first, because a box has a power-of-two number of chunks. H200, RMSNorm and
# LayerNorm backward 8192x20480, two CTAs per row, five copies per input: 0.6 us per row. Fitted with the rest.
EXTRA_COPY_US = 0.03
MAILBOX_CLEAR_US = 2.0  # one more kernel, which clears the mailboxes; H200, handwritten kernels of the same shape
SLOT_REFILL_US = 0.25  # us between the last read of a ring slot and its next TMA request: fence, barrier, copies


def _unrolled_walk_us(schedule: Schedule, t: Traffic, cols: int, co_resident: float, device: Device) -> float:
    """Time per row of the CTAs on an SM for walks that accumulate columns, including reloads of row vectors."""
    full = WARPS_TO_ISSUE_UNROLLED if schedule.ctas_per_row > 1 else WARPS_TO_ISSUE
    issue_rate = ISSUE_RATE * (1 - exp(-co_resident * schedule.warps / full))
    reload = VECTOR_RELOAD_US * cols / (32 * schedule.warps) if t.vectors and schedule.reloads_vectors else 0.0
    return co_resident * cols / 32 * _issue_slots(t, schedule) / (issue_rate * device.clock) + reload


def _exposed_per_row_us(kernel: Kernel, schedule: Schedule) -> float:
    """Unhidden time per row of CTAs that accumulate columns: full-size tensors that are not staged, rows in many copies."""
    assert isinstance(schedule.cols, Cover)
    pieces = Chunks(schedule.cols.tiles[0], len(schedule.cols.tiles), 0)
    copies = (pieces.count // pieces.chunks_per_box(TMA_BOX) - 1) * len(schedule.staged)
    return EXTRA_COPY_US * copies + UNSTAGED_LOAD_US * pieces.count * (len(schedule.staged) < kernel.full_loads)


def _staged_rows(kernel: Kernel, schedule: Schedule, t: Traffic, device: Device) -> Cost:
    """Time with whole rows in shared memory: each CTA loops over rows while further rows arrive in its ring.

    A ring slot is requested, filled, read and freed again. A CTA has as many rows or copies in flight as its ring has slots,
    but reads one at a time. With a single slot it waits for each row, as in `_resident`. With column accumulation, partial
    results and row vectors cost what they do in `_mix_order`. If CTAs share rows, each handles its part of the columns.
    """
    assert isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Cover)
    groups = min(schedule.rows.split, max(t.rows, 1))
    ctas, cols = groups * schedule.ctas_per_row, t.cols // schedule.ctas_per_row
    sms, rows_per_cta = min(device.sms, ctas), ceil(t.rows / groups)
    co_resident, imbalance = ctas / sms, rows_per_cta * groups / max(t.rows, 1)
    sm_bandwidth, row = device.bandwidth / device.sms, float(cols * t.input_bytes_per_elem)
    reread = sum(kernel.program.dtypes[i].size * (len(kernel.use_phases(i)) - 1) for i in kernel.multi_phase
                if i not in schedule.staged) * t.elements
    ring_rows = schedule.stages + prefetched_columns(schedule.cols, schedule.prefetch) / cols
    in_flight = co_resident * row * max(ring_rows - 1, 0.5)
    static_penalty = 1 + (STATIC_ROWS_PENALTY * t.full_out / max(t.full_in + t.full_out, 1.0)
                          / (co_resident if schedule.accumulates_columns else 1.0))
    transfer = co_resident * (row + cols * t.full_out / max(t.elements, 1.0)) / sm_bandwidth
    math = cols / 32 * _issue_slots(t, schedule) / (_issue_rate_one_cta(schedule) * device.clock)
    row_us = t.inner_folds * _reduction_us(schedule.warps) + math + _row_vector_waits(kernel, schedule) + SLOT_REFILL_US
    row_us -= math if schedule.accumulates_columns else 0.0  # its walks are counted in `issue`
    ring_rows -= 1 if schedule.ctas_per_row > 1 else 0  # one slot waits for the last walk while another is in the first
    cycle = _soft_max(transfer * static_penalty, row_us, (device.latency + row / (FILL_RATE * device.clock) + row_us) / ring_rows)
    partials = 4.0 * schedule.rows.split * t.cols * t.outer_states
    spilled = partials if partials > device.l2_bytes / 2 else 0.0
    l2 = reread + 2 * partials + t.temps + (VECTOR_SHARE * t.rows if schedule.reloads_vectors else 1.0) * t.vectors
    memory = max(rows_per_cta * cycle + l2 / device.l2_bandwidth, t.once / device.bandwidth * static_penalty)
    issue, special = _compute(t, schedule, co_resident * schedule.warps, device, sms)
    if schedule.accumulates_columns:
        issue = rows_per_cta * _unrolled_walk_us(schedule, t, cols, co_resident, device)
    else:
        issue = issue * imbalance
    l1 = _l1(t, schedule, device, sms) + t.full_in * kernel.full_walks / (L1_RATE * sms * device.clock)
    first = device.latency + row / sm_bandwidth
    us = RAMP + first + _soft_max(memory, issue, special * imbalance, l1) + LAST_STORES_US + spilled / device.bandwidth
    us += rows_per_cta * _exposed_per_row_us(kernel, schedule) if schedule.accumulates_columns else 0.0
    if schedule.ctas_per_row > 1:
        us += MAILBOX_CLEAR_US + rows_per_cta * CTA_EXCHANGE_US * schedule.ctas_per_row**1.5 * schedule.warps
    return Cost(us, t.once + reread + 2 * spilled, in_flight, _limit(memory, issue, special, rows_per_cta * row_us))


def _mix_order(kernel: Kernel, schedule: Schedule, r: Resources, t: Traffic, device: Device) -> Cost:
    """Time of both orders in one pass: a loop over rows with partial column results per CTA."""
    assert isinstance(schedule.rows, Loop)
    height, ctas = schedule.rows.step, schedule.rows.split * t.batch
    per_sm = ctas / device.sms
    co_resident = min(per_sm, float(max(r.ctas_per_sm, 1)))
    iterations = ceil(t.rows / (schedule.rows.split * height))
    in_flight = co_resident * height * t.cols * t.input_bytes_per_elem * TILES_IN_FLIGHT[min(schedule.stages, 4)]
    imbalance = iterations * schedule.rows.split * height / max(t.rows, 1)
    partials = 4.0 * ctas * t.cols * t.outer_states
    vector_loads = 1.0 if schedule.row_vectors is RowVectors.REGISTERS else VECTOR_SHARE * t.rows / height
    l2 = 2 * partials + t.temps + vector_loads * t.vectors
    congestion = _congestion(co_resident * height * t.cols * t.input_bytes_per_elem * (schedule.stages - 1))
    memory = t.once / _sustained_rate(in_flight, device) * imbalance * congestion + l2 / device.l2_bandwidth
    issue, special = _compute(t, schedule, co_resident * schedule.warps, device, min(device.sms, ctas))
    tiles = schedule.cols.tiles if isinstance(schedule.cols, Cover) else ()
    # Tiles of equal width are added before threads exchange anything; each other width is exchanged separately. H200,
    # LayerNorm backward 16384x12288: three tiles of 4096 290 us; 8192 + 4096 329 us.
    reduce = t.inner_folds * len(set(tiles)) * _reduction_us(_warps_along(schedule, t))
    # CTAs on the same SM hide each other's reductions.
    load_wait = 0.0 if schedule.stages > 1 else 0.8 * device.latency
    chain = iterations * (reduce + load_wait) / max(1.0, co_resident) * per_sm / co_resident
    # An indexed load waits for its index in every iteration, and no pipeline prefetches it. H200, cross-entropy 65536x4096 by
    # 264 CTAs: 262 us, 2.1 us per iteration; a norm of as many rows 0.9 us.
    chain += iterations * device.latency * any(n.indexed for n in kernel.program.nodes if isinstance(n, Load))
    spilled = partials if partials > device.l2_bytes / 2 else 0.0
    # H200, RMSNorm backward, two or four rows at once: two tiles 4-8 % slower than one; one row at a time: no slower.
    tile_penalty = 1.0 if len(tiles) == 1 or height == 1 else 1.03 + 0.01 * len(tiles)
    no_warp_folds = len(tiles) == 1 and _warps_along(schedule, t) >= schedule.warps or height == 1
    fold_us = 0.0 if no_warp_folds else WARP_FOLD_US * max(0, schedule.warps - 2) * per_sm * t.outer_states
    # The wait for the first iteration is not hidden. H200, sums of 2, 3, 5 inputs of 4096x1024: without this term 1.1 to 1.9
    # us more than predicted, excluding the join.
    us = RAMP + device.latency + _soft_max(memory * tile_penalty, issue * imbalance, special, chain) + fold_us
    us += spilled / device.bandwidth
    return Cost(us, t.once + 2 * spilled, in_flight, _limit(memory, issue, special, chain))


def _looped(kernel: Kernel, schedule: Schedule, r: Resources, t: Traffic, device: Device) -> Cost:
    """Time of a walk in steps: looped inner, outer, pointwise."""
    tile = tile_of(schedule)
    over_cols, over_rows = isinstance(schedule.cols, Loop), isinstance(schedule.rows, Loop)
    row_blocks = ceil(t.rows / schedule.rows.size) if isinstance(schedule.rows, Block) else 1
    col_blocks = ceil(t.cols / schedule.cols.size) if isinstance(schedule.cols, Block) else 1
    ctas = row_blocks * col_blocks * t.batch * schedule.splits
    resident_ctas = device.sms * max(r.ctas_per_sm, 1)
    co_resident, sms = min(r.ctas_per_sm, ceil(ctas / device.sms)), min(device.sms, ctas)
    unpipelined = 0.7 if _merges_per_tile(kernel, schedule) else 1.2  # without exchanges, threads go on to their next loads
    # Ring slots are refilled as soon as they are read, so the whole ring is in flight.
    tiles_in_flight = schedule.stages if schedule.staged else unpipelined if schedule.stages == 1 else schedule.stages - 1
    in_flight = co_resident * tile.height * tile.width * t.input_bytes_per_elem * tiles_in_flight
    walked = t.cols * tile.height if over_cols else t.rows * tile.width
    live = min(ctas, resident_ctas) * walked * t.input_bytes_per_elem / schedule.splits
    hit = min(1.0, max(0.0, (REREAD_NO_HITS - live / device.l2_bytes) / (REREAD_NO_HITS - REREAD_ALL_HITS)))
    dram = t.once + t.multi_phase * (1 - hit)
    length = t.cols if over_rows else t.rows
    partials = 8.0 * max(t.outer_states, t.inner_folds) * schedule.splits * length if schedule.splits > 1 else 0.0
    vectors = VECTOR_SHARE * t.vectors * (row_blocks if over_cols else 0)
    # TMA loads 64-byte rows at full rate (but see `_narrow_tile_penalty`); other loads need whole lines.
    full_line = (64 if schedule.staged else 128) * kernel.full_loads
    narrow = min(1.0, tile.width * t.input_bytes_per_elem / full_line) if isinstance(schedule.cols, Block) else 1.0
    rate = _sustained_rate(in_flight, device) * narrow * min(1.0, 1.15 * sms / device.sms)
    # Re-reads come from L2 while other CTAs' rows come from DRAM.
    l2 = (t.full_in + t.multi_phase * hit) / device.l2_bandwidth if t.multi_phase else 0.0
    narrow_penalty = _narrow_tile_penalty(kernel, schedule, t, device)
    memory = _soft_max(dram / rate * narrow_penalty, l2) + (partials + vectors + t.temps) / device.l2_bandwidth
    if over_cols:
        row = walked * t.input_bytes_per_elem / schedule.splits * device.sms / device.bandwidth
        turnaround = _row_turnaround_us(kernel, schedule, t)
        memory *= 1 + turnaround / max(co_resident * row, turnaround)
    issue, special = _compute(t, schedule, co_resident * schedule.warps, device, sms)
    chain = ceil(ctas / resident_ctas) * _walk_us(kernel, schedule, t, device)
    fold_us = WARP_FOLD_US * max(0, schedule.warps - 2) * ctas / sms if over_rows and kernel.folds else 0.0
    ring_us = RING_SLOT_US * schedule.stages if schedule.staged else 0.0
    us = RAMP + _soft_max(memory, issue, special, chain) + fold_us + ring_us
    return Cost(us, dram, in_flight, _limit(memory, issue, special, chain))


def _row_turnaround_us(kernel: Kernel, schedule: Schedule, t: Traffic) -> float:
    """Time a CTA spends between two rows that it walks."""
    if not kernel.folds:
        return 0.0
    edges = UNALIGNED_EDGE_US if schedule.sector_elems else 0.0
    return ROW_TURNAROUND_US + MERGE_TURNAROUND_US * t.composite_folds + edges


def _walk_us(kernel: Kernel, schedule: Schedule, t: Traffic, device: Device) -> float:
    """Time of one CTA's walks without contention."""
    tile = tile_of(schedule)
    match schedule.rows, schedule.cols:
        case _, Loop(step, split):
            steps = ceil(t.cols / (step * split))
        case Loop(step, split), _:
            steps = ceil(t.rows / (step * split))
        case _:
            steps = 1
    merges = _merges_per_tile(kernel, schedule)
    folds = sum(1 for f in kernel.folds if not f.block)
    across = max(1.0, schedule.warps / tile.height) if isinstance(schedule.cols, Loop) else schedule.warps
    step_wait = device.latency * UNPIPELINED_WAIT if schedule.stages == 1 else 0.0
    fill = tile.height * tile.width * t.input_bytes_per_elem / (FILL_RATE * device.clock)
    walk = fill + (steps - 1) * max(step_wait, fill) + device.latency + (PIPELINE_START_US if schedule.stages > 1 else 0.0)
    return kernel.full_walks * walk + (steps * merges + folds) * _reduction_us(across)


def _merges_per_tile(kernel: Kernel, schedule: Schedule) -> int:
    """Exchanges between threads per tile of a walk."""
    if schedule.staged:
        return 0  # every thread keeps its own states
    monoids = [monoid_of(kernel, f) for f in kernel.folds if not f.block]
    return sum(2 for m in monoids if not m.primitive and not (schedule.private_states and allows_private_states(m)))


def _limit(memory: float, issue: float, special: float, chain: float) -> str:
    named = (("memory", memory), ("issue", issue), ("special functions", special), ("latency", chain))
    return max(named, key=lambda kv: kv[1])[0]


def extra_kernel_us(device: Device) -> float:
    """Cost of one more kernel in a plan, beyond its own time, which includes its ramp and first wait."""
    return max(0.0, device.launch - RAMP - device.latency / 2)


# us per partial row of a sum down the columns: the join reads them one after another. H200, sums of fp32 4096x256: a join of
# 33 parts 1.1 us, of 528 parts 2.3. Not charged if rows are reduced as well: there many small CTAs gain more than this, which
# the model does not predict.
JOIN_PART_US = 0.0025
# us per partial row if staged tiles compute the sums. H200, sums of five fp16 inputs of 4096x1024 in 4, 16, 33 parts: 13.0,
# 13.5, 14.8; of fp32 65536x256 in 16, 66, 132: 17.8, 18.0, 18.5.
JOIN_STAGED_PART_US = 0.006


def join_cost(states: float, splits: int, length: int, device: Device) -> float:
    """Time of a second kernel, spread over the GPU, that sums partial states."""
    return device.launch + 4.0 * states * splits * length / device.l2_bandwidth


def last_block_cost(states: float, splits: int, length: int, device: Device) -> float:
    """Time if the last CTA to finish reads all partial states instead. H200, 2026-11: 132x8192 fp32 110-123 us."""
    return 4.0 * states * splits * length / 38e3
