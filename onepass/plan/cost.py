"""Predicted time of (kernel, schedule, device): bytes, bytes in flight, waves, issue, special functions, serial chains.

Pure arithmetic. Times are microseconds, rates bytes per microsecond. The shape of the formulas is that of any memory-bound
kernel: DRAM traffic at the rate that the bytes in flight can sustain, or whatever else is slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, exp, log2

from ..device import Device
from ..ir.program import Load
from .kernel import Kernel
from .resources import Resources, keeps_packed, prefetched_loads, tile_of
from .schedule import SECTOR, Block, Cover, Loop, Schedule
from .staged_rows import TMA_BOX, Chunks, prefetched_columns
from .thread_layout import private_state_columns
from .traffic import Traffic as Traffic
from .traffic import monoid_of
from .traffic import traffic as traffic


@dataclass(frozen=True, slots=True)
class Cost:
    """A prediction and what it is made of."""

    us: float
    dram_bytes: float
    in_flight: float  # bytes outstanding per SM
    limit: str  # what bounds it


def lower_bound(t: Traffic, device: Device) -> float:
    """No schedule of this kernel can be faster: its bytes at the best rate."""
    return t.once / device.bandwidth


def cost(kernel: Kernel, schedule: Schedule, resources: Resources, t: Traffic, device: Device) -> Cost:
    """Predict one schedule, as the model has it and as measurements on the card correct it."""
    found = _modeled(kernel, schedule, resources, t, device)
    correction = device.correction(schedule.family)
    return found if correction == 1.0 else replace(found, us=found.us * correction)


def _modeled(kernel: Kernel, schedule: Schedule, resources: Resources, t: Traffic, device: Device) -> Cost:
    if schedule.staged and isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Cover):
        return _parked(kernel, schedule, t, device)
    match schedule.rows, schedule.cols:
        case Block(), Cover():
            return _resident(kernel, schedule, resources, t, device, t.rows * t.batch, t.cols, schedule.rows.size)
        case Cover(), Block():
            return _resident(kernel, schedule, resources, t, device, t.cols * t.batch, t.rows, schedule.cols.size)
        case Loop(), Cover():
            return _mix(kernel, schedule, resources, t, device)
        case Block(height), Block(width):
            tiles = ceil(t.rows / height) * ceil(t.cols / width) * t.batch
            return _resident(kernel, schedule, resources, t, device, tiles, height * width, 1)
        case _:
            return _looped(kernel, schedule, resources, t, device)


# Fitted together for the least regret and error over 2036 schedules of 117 kernels (H200, 2026-11; docs/decisions/0011 has the
# method), after most had been measured; the measurements beside them say what they stand for.
RAMP = 0.1  # us from launch to the first bytes and from the last to the end, beyond the latency of a loaded memory system
VECTOR_SHARE = 0.016  # of the times a row vector is read again that reach L2; the rest hit L1
# Of L2, that rows which are read twice may take up so that all of them are found there, and so that none is. H200, softmax and
# RMSNorm of 4096 x 65536, of which 35 to 70 of 50 MB are under way: 374 and 379 us, what reading everything twice takes.
REREAD_ALL_HITS, REREAD_NO_HITS = 0.5, 0.8
TILES_IN_FLIGHT = {1: 0.62, 2: 0.65, 3: 2.1, 4: 2.2}  # of a loop over rows, by pipeline stages; H200, 2026-11, RMSNorm backward
# Bytes that a pipeline asks for ahead on an SM, from which on they wait for each other, and by how much. H200, 2026-11, backward of
# norms: 147 KB (four stages) took 2.5-4 % longer than 98 KB (three), 197 KB 1.5-3 % longer than 131 KB, 98 KB no longer than 65 KB.
# The same where every CTA has a row in shared memory: dx of RMSNorm backward 8192 x 8192 took 97.7 us with 192 KB, 93.6 with 128.
CONGESTION_FROM, CONGESTION = 98304, 0.045
# How much longer walks down columns take whose tiles are less than a line wide: presumably as two CTAs read each line, and drift
# apart, the more so where rows are split among CTAs; and as lines are written in halves. Only where the tensors are much larger
# than L2 was it seen: 1 - 2 L2 / bytes of it. H200, tiles of 64 bytes against wider ones: sums of 65536 x 4096, one fp32 input:
# 255-275 us and, split, 334 against 242; three of bf16: 365 and 415-446 against 361; five of fp16: 614 and 739-755 against 601.
# With a gradient written beside the sum: SiLU 8192 x 16384 237 us, floor 179; GELU 16384 x 4096 113-120, by 128 bytes 110, by 256
# bytes 105.
LINE = 128
NARROW_READ, NARROW_READ_SPLIT, NARROW_WRITE, ONE_LINE_WRITE = 0.06, 0.2, 0.3, 0.05
# How much longer whole rows that are read and written take for each doubling of the bytes that a thread asks for at once, from 32
# on and up to 256, in tensors much larger than L2: 1 - 4 L2 / bytes of it. H200, RMSNorm of 65536 x 4096 with 32, 64, 128 and 256
# bytes: 246.7, 249.0-249.8, 250.4-252.0 and 252.5 us; of 32768 x 8192 with 64, 128 and 256: 249.5, 252.4, 253.2.
OUTSTANDING_PENALTY, OUTSTANDING_FROM, OUTSTANDING_UP_TO = 0.014, 32, 256
# How sharply the time of whole rows turns from what DRAM takes to what CTAs take one after another. H200, RMSNorm of 65536 x 4096
# by CTAs that need 191 us so, where DRAM needs 239: 254 us, as by those that need 104. Fitted with the rest (docs/decisions/0021).
RESIDENT_SHARPNESS = 5
LAST_STORES_US = 0.1  # us until what a CTA stored last is on its way
# us of an SM that a CTA spends, for each of its warps but two, to fold rows that lie in different warps. H200, column sums of
# 256 x 65536 by CTAs of 2, 4, 8, 16 and 32 warps: 16.5, 17.1, 20.1, 24.2, 30.9 us.
WARP_FOLD_US = 0.19
RING_SLOT_US = 0.15  # us for each place of a ring of tiles. H200, 2026-11, sums over rows of one input: 8 took 0.5-0.8 us longer than 4
# us that a CTA spends between rows that it walks, and other CTAs only partly make up for: more where lanes hold states that
# must be merged, and where broken sectors are read. H200, cross-entropy over 50264 and 128256 columns with 3, 6 and 12 CTAs on
# an SM: 1.35, 1.16, 1.09 and 1.10, 1.04, 1.01 of the bytes' time; RMSNorm walked over 8192 and 16384 columns: 1.2, 1.13.
ROW_TURNAROUND_US, MERGE_TURNAROUND_US, UNALIGNED_EDGE_US = 0.4, 0.5, 1.0
AFTER_REDUCTION_WAIT = 0.35  # of the latency, that a CTA waits once more for what it asks for after a reduction
UNPIPELINED_WAIT = 0.3  # of the latency, that a walk without a pipeline waits in each turn but the first
# us that a pipeline takes to start. H200, RMSNorm backward of 16 x 65536, sums of rows by CTAs of one turn: 0.1 to 0.6 us more.
PIPELINE_START_US = 0.3
# us from a launch until TMA brings the first row: barriers, a fence, a descriptor. H200, softmax of 16 and of 256 x 4096: 2.4 and
# 3.1 us with rows in shared memory, 2.0 and 2.7 in registers.
TMA_START_US = 0.4
# Of the arithmetic of a CTA that holds several tiles of several tensors, what is left when the last of them arrives. H200, dx of
# RMSNorm backward 8192 x 16384, in eight, four and two tiles: 183.3, 186.5 and 194.8 us.
UNOVERLAPPED_MATH = 0.6
# us that each further tile of a resident row delays its CTA. H200, RMSNorm of 4096 x 65536 by CTAs of 16 warps alone on their SMs,
# in 4, 8 and 16 tiles: 264, 281, 348 us.
TILE_US = 0.15
# Bytes a cycle that L2 hands an SM. While some SMs reduce, others load at up to this, 3.4 times their share of DRAM, so that only
# all together are bound by it. H200, RMSNorm of 4096 x 65536 with one CTA on an SM: 1.09 of the bytes' time, softmax backward of
# 8192 x 32768: 1.02; at its share of DRAM a CTA alone would take 1.44 and 1.5. Fitted: 57.
FILL_RATE = 64.0
ISSUE_RATE = 3.5  # warp instructions a cycle that an SM full of warps sustains
WARPS_TO_ISSUE = 8.0  # warps with which an SM issues 63 % of that
# Warp instructions a cycle that one warp issues at most, with much to do at once, and that some warps of one CTA do; of walks over
# rows in shared memory, which hold little and wait for nothing, many more. H200, softmax of 8192 x 32768, one CTA of 4, 8 and 16
# warps on an SM: 463, 418, 407 us.
ISSUE_ONE_WARP, ISSUE_FEW_WARPS, ISSUE_FEW_WARPS_STAGED = 0.6, 0.8, 3.0
UNALIGNED_SLOTS = 12.0  # issue slots that reading or writing element by element costs an element
# The same for the first and the last chunk of a parked row that starts anywhere: every element is masked, in every walk. Wide
# ones also take more registers than are foreseen, and that is in it. H200, RMSNorm of 8192 x 50257, chunks of 4096, 8192, 16384:
# 473, 580, 619 us with 16 warps; 438 where those of 8192 are kept within 64 registers, and a second CTA fits.
UNALIGNED_EDGE_SLOTS = 40.0
# The same for an element of a row vector, where rows start anywhere and row vectors do not. H200, LayerNorm of 8192 x 50257: 633
# us, RMSNorm 438, softmax 400.
UNALIGNED_VECTOR_SLOTS = 6.0
SMEM_VECTOR_SLOTS = 0.75  # issue slots that reading an element of a row vector from shared memory costs; fitted with VECTOR_WAIT
TILE_SLOTS = 17.0  # issue slots a thread spends on a tile whatever its size: addresses, waits, barriers
MERGE_SLOTS = 35.0  # the same to merge the states of a walked tile into its own. H200, cross-entropy: 8 elements a thread cost 12 %
# us that a walk over a parked row waits for the row vectors of each chunk: its loop is not unrolled, and shared memory leaves L1
# no room for them. H200, RMSNorm of 4096 x 65536, one CTA of 8 warps on an SM, 8, 16 and 32 chunks: 371, 453, 599 us.
# Where rows start anywhere, row vectors come by single elements: RMSNorm of 8192 x 50257, 7, 13 and 25 chunks: 447, 474, 707.
VECTOR_CHUNK_US, UNALIGNED_VECTOR_CHUNK_US = 0.33, 0.4
# How much longer CTAs that share out all rows beforehand take where all they move were stores: SMs are not equally fast. H200,
# softmax, half of it stores, by as many CTAs as fit and by one a row: 284 and 258 us. Sums of rows show no such loss.
STATIC_ROWS_PENALTY = 0.2


def _soft_max(*limits: float, sharply: int = 4) -> float:
    """Limits that are close to each other add up. H200, cross-entropy over 128256 columns: within 12 % at 4, 8 and 16 warps."""
    return sum(t**sharply for t in limits) ** (1 / sharply)


def _sustained_rate(in_flight: float, device: Device) -> float:
    """The DRAM rate that some bytes in flight per SM sustain."""
    y = in_flight / device.bytes_in_flight
    return device.bandwidth * y / (1 + y**4) ** 0.25


def _congestion(asked: float) -> float:
    """How much longer bytes take, of which so many are asked for at once on an SM."""
    return 1 + CONGESTION * max(0.0, asked / CONGESTION_FROM - 1)


def _outstanding_penalty(schedule: Schedule, t: Traffic, device: Device) -> float:
    """How much longer the bytes of whole rows take that a thread asks for in one go."""
    tile = tile_of(schedule)
    asked = tile.resident_height * tile.resident_width * t.input_bytes_per_elem / (32 * schedule.warps)
    doublings = log2(min(max(asked, OUTSTANDING_FROM), OUTSTANDING_UP_TO) / OUTSTANDING_FROM) if t.full_out else 0.0
    return 1 + OUTSTANDING_PENALTY * doublings * max(0.0, 1 - 4 * device.l2_bytes / max(t.once, 1.0))


def _narrow_tile_penalty(kernel: Kernel, schedule: Schedule, t: Traffic, device: Device) -> float:
    """How much longer the bytes of a walk down the columns take because its tiles are narrow."""
    if not schedule.staged or not isinstance(schedule.cols, Block):
        return 1.0
    run = schedule.cols.size * t.input_bytes_per_elem / max(kernel.full_loads, 1)
    read = 0.0 if run >= LINE else NARROW_READ if schedule.splits == 1 else NARROW_READ_SPLIT
    written = 0.0 if not t.full_out or run >= 2 * LINE else ONE_LINE_WRITE if run >= LINE else NARROW_WRITE
    return 1 + (read + written) * max(0.0, 1 - 2 * device.l2_bytes / max(t.once, 1.0))


def _reduction_us(warps_per_row: float) -> float:
    """One reduction across the threads that share a row."""
    return 0.12 if warps_per_row <= 1 else 0.35 + 0.02 * warps_per_row


def _warps_along(schedule: Schedule, t: Traffic) -> int:
    """Warps that share a row: Triton lays them along the columns first."""
    return max(1, min(schedule.warps, tile_of(schedule).width // (32 * t.vector)))


def _issue_slots(t: Traffic, schedule: Schedule) -> float:
    """Issue slots per element under a schedule."""
    tile = tile_of(schedule)
    per_thread = tile.height * tile.width / (32 * schedule.warps)
    walks = not schedule.staged and (isinstance(schedule.rows, Loop) or isinstance(schedule.cols, Loop))
    kept = bool(schedule.resident) and not keeps_packed(schedule, t.resident_registers)
    slots = t.issue_slots_resident if kept else t.issue_slots
    per_tile = TILE_SLOTS if walks else TILE_SLOTS / 4
    per_tile += MERGE_SLOTS * t.composite_folds if isinstance(schedule.cols, Loop) else 0.0
    if schedule.ctas_per_row == 1:  # where CTAs share a row, tiles of 4 to 32 elements a thread take as long
        slots += per_tile / max(per_thread, 1.0) * (1 if tile.count == 1 else 1.3)
    slots += SMEM_VECTOR_SLOTS * t.vector_loads_per_elem if schedule.beside else 0.0
    if not schedule.sector_elems:
        return slots + UNALIGNED_SLOTS * t.unaligned
    if schedule.staged and isinstance(schedule.cols, Cover):
        slots += UNALIGNED_EDGE_SLOTS * (schedule.cols.tiles[0] + schedule.cols.tiles[-1]) / schedule.cols.width
    return slots + UNALIGNED_VECTOR_SLOTS * t.vector_loads_per_elem


def _issue_rate(warps_per_sm: float) -> float:
    """Warp instructions a cycle that an SM issues with so many warps. H200, GELU backward takes 117, 77, 66 us with 8, 16, 32."""
    return ISSUE_RATE * (1 - exp(-max(warps_per_sm, 1.0) / WARPS_TO_ISSUE))


def _issue_rate_one_cta(schedule: Schedule) -> float:
    """The same of one CTA."""
    return max(_issue_rate(schedule.warps), min(ISSUE_ONE_WARP * schedule.warps, ISSUE_FEW_WARPS_STAGED if schedule.staged else ISSUE_FEW_WARPS))


def _row_vector_waits(kernel: Kernel, schedule: Schedule) -> float:
    """What the walks over a parked row wait for row vectors. Where they gather over rows, they are unrolled and need not."""
    if schedule.hoisted or schedule.accumulates_columns:
        return 0.0
    wait = UNALIGNED_VECTOR_CHUNK_US if schedule.sector_elems else VECTOR_CHUNK_US
    return wait * len({p for i in kernel.row_vectors for p in kernel.use_phases(i)}) * tile_of(schedule).count


L1_RATE = 110.0  # bytes a cycle that an SM's L1 hands out


def _l1(t: Traffic, schedule: Schedule, device: Device, sms: float) -> float:
    """What passes through L1: every full-size tensor, and row vectors for every row, unless one load serves several or all."""
    rows = 1.0
    if isinstance(schedule.rows, Block) and isinstance(schedule.cols, Cover):
        covers = t.after_reduction and min(schedule.cols.tiles) >= t.after_reduction[-1].once_from_cols * schedule.warps
        rows = float(schedule.rows.size) if covers else 1.0
    full = (t.full_in + t.full_out) / max(t.elements, 1.0)
    beside = 0.0 if schedule.hoisted else t.vector_bytes_per_elem / rows
    return t.elements * (full + beside) / (L1_RATE * sms * device.clock)


def _compute(t: Traffic, schedule: Schedule, warps_per_sm: float, device: Device, sms: float) -> tuple[float, float]:
    issue = t.elements / 32 * _issue_slots(t, schedule) / (sms * _issue_rate(warps_per_sm) * device.clock)
    special = t.elements * t.mufu / (sms * 16 * device.clock)
    return issue, special


def _resident(kernel: Kernel, schedule: Schedule, r: Resources, t: Traffic, device: Device, pieces: int, length: int,
              block: int) -> Cost:
    """Whole rows (or columns) on chip, in registers or in shared memory; one tile of them per CTA.

    A CTA waits for its loads, reduces, and leaves its stores behind, as fast as it would alone on the card. All of them together
    are bound by DRAM.
    """
    ctas = ceil(pieces / block)
    slots = device.sms * r.ctas_per_sm
    here, sms = min(r.ctas_per_sm, ceil(ctas / device.sms)), min(device.sms, ctas)
    again = 0.0 if schedule.resident | schedule.staged >= set(kernel.multi_phase) else t.multi_phase
    share = device.bandwidth / device.sms
    load = block * length * t.input_bytes_per_elem / share
    store = block * length * (t.full_out / max(t.elements, 1)) / share
    folds = sum(1 for f in kernel.folds if not f.block)
    across_rows = isinstance(schedule.rows, Block)
    t_reduce = folds * _reduction_us(_warps_along(schedule, t) if across_rows else schedule.warps)
    if not across_rows:  # short runs of columns: every row of a tile is a request of its own, of at least two sectors
        run = block * t.input_bytes_per_elem / max(1, sum(1 for i in kernel.program.of(Load) if kernel.is_full[i]))
        load *= max(1.0, 2 * SECTOR / run)
    # Exponentials want small tiles: fewer live values between them. Rows of a column are loaded all at once.
    tiles = tile_of(schedule).count if t.mufu == 0 and across_rows else 1
    work = block * length / 32 * _issue_slots(t, schedule) / (_issue_rate_one_cta(schedule) * device.clock)
    waits = AFTER_REDUCTION_WAIT * device.latency if len(prefetched_loads(t.after_reduction, schedule)) < len(t.after_reduction) else 0.0
    waits = _row_vector_waits(kernel, schedule) if schedule.staged else waits + TILE_US * tiles
    first = device.latency if t.full_in else device.latency / 2  # partial results are near
    if across_rows and kernel.full_loads > 1 and not schedule.staged and tile_of(schedule).count > 1:
        work *= UNOVERLAPPED_MATH
    alone = first + block * length * t.input_bytes_per_elem / (FILL_RATE * device.clock) + waits + t_reduce + work
    l2 = again + t.temps + VECTOR_SHARE * t.vectors * ctas
    memory = _soft_max(ctas / sms * (load + store), ceil(ctas / slots) * alone, sharply=RESIDENT_SHARPNESS) + l2 / device.l2_bandwidth
    memory *= _congestion(here * block * length * t.input_bytes_per_elem) if schedule.staged and not schedule.sector_elems else 1.0
    memory *= _outstanding_penalty(schedule, t, device) if across_rows and not schedule.staged else 1.0
    memory = max(memory, t.once / device.bandwidth)
    issue, special = _compute(t, schedule, here * schedule.warps, device, sms)
    us = RAMP + max(_soft_max(memory, issue, special, _l1(t, schedule, device, sms)), alone + LAST_STORES_US)
    us += 0.0 if across_rows else WARP_FOLD_US * max(0, schedule.warps - 2) * ctas / sms
    us += TMA_START_US if schedule.staged else 0.0
    return Cost(us, t.once + again, here * block * length * t.input_bytes_per_elem, _limit(memory, issue, special, alone))


# Parked rows that CTAs gather over, fitted together to 368 schedules of backward passes of norms (H200, 2026-11;
# docs/decisions/0023): us of a turn for every element of a row vector that a thread loads anew: LayerNorm of 8192 x 16384, 8 warps,
# 201 us with the weight in registers, else 276; and where several share a row, warps with which an SM issues 63 % of what it can,
# and us of a turn that they wait for each other, for each warp and their number to the power of 3/2; the rest is behind the walk
# over the next row. RMSNorm of 4096 x 65536 by four 385 us, by eight, two on an SM, 425; of 256 x 65536 by four CTAs of 8 warps
# 32.7, of 16 warps 38.7.
VECTOR_RELOAD_US, WARPS_TO_ISSUE_UNROLLED, CTA_EXCHANGE_US = 0.04, 4.0, 0.0015
# us of a turn that they wait in every tile for full-size tensors that are not parked. H200, residual + RMSNorm backward of
# 8192 x 32768 by two CTAs a row in 2, 4 and 8 tiles 580, 657 and 825 us, by four in 2 and 4 tiles 548, 613; all parked: 505.
UNSTAGED_LOAD_US = 0.2
# us of a turn for each copy of a row beyond the first: a box has a power of two of chunks. H200, RMSNorm and LayerNorm backward of
# 8192 x 20480 by two CTAs a row, each input in 5 copies: 0.6 us a turn more than foreseen without; fitted with the rest.
EXTRA_COPY_US = 0.03
MAILBOX_CLEAR_US = 2.0  # us of one more kernel, which clears their words. H200, hand-written kernels of the same shape
SLOT_REFILL_US = 0.25  # us between the last read of a row's place and the next row being asked for there: fence, barrier, copies


def _unrolled_walk_us(schedule: Schedule, t: Traffic, cols: int, here: float, device: Device) -> float:
    """What walks that gather take on an SM in a turn, with what they wait for row vectors that they do not keep."""
    full = WARPS_TO_ISSUE_UNROLLED if schedule.ctas_per_row > 1 else WARPS_TO_ISSUE
    issued = ISSUE_RATE * (1 - exp(-here * schedule.warps / full))
    waits = VECTOR_RELOAD_US * cols / (32 * schedule.warps) if t.vectors and not (schedule.hoisted or schedule.beside) else 0.0
    return here * cols / 32 * _issue_slots(t, schedule) / (issued * device.clock) + waits


def _exposed_per_row_us(kernel: Kernel, schedule: Schedule) -> float:
    """What CTAs that gather wait for in a turn, and nothing hides: tensors that are not parked, rows in many copies."""
    assert isinstance(schedule.cols, Cover)
    part = Chunks(schedule.cols.tiles[0], len(schedule.cols.tiles), 0)
    copies = (part.count // part.at_once(TMA_BOX) - 1) * len(schedule.staged)
    return EXTRA_COPY_US * copies + UNSTAGED_LOAD_US * part.count * (len(schedule.staged) < kernel.full_loads)


def _parked(kernel: Kernel, schedule: Schedule, t: Traffic, device: Device) -> Cost:
    """Whole rows in shared memory; every CTA takes one after another, and its ring's further places are on their way meanwhile.

    A place is asked for, filled, read and free again; a CTA has as many under way as its ring has places, of rows or of copies of
    the next one, but reads one at a time. With one place it waits for each row as one of `_resident` does. Where it gathers over
    rows, its partial results and its row vectors cost what they do in `_mix`. Where several share a row, each has a part of it.
    """
    assert isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Cover)
    groups = min(schedule.rows.split, max(t.rows, 1))
    ctas, cols = groups * schedule.ctas_per_row, t.cols // schedule.ctas_per_row
    sms, turns = min(device.sms, ctas), ceil(t.rows / groups)
    here, even = ctas / sms, turns * groups / max(t.rows, 1)
    share, row = device.bandwidth / device.sms, float(cols * t.input_bytes_per_elem)
    again = sum(kernel.program.dtypes[i].size * (len(kernel.use_phases(i)) - 1) for i in kernel.multi_phase
                if i not in schedule.staged) * t.elements
    places = schedule.stages + prefetched_columns(schedule.cols, schedule.prefetch) / cols
    in_flight = here * row * max(places - 1, 0.5)
    uneven = 1 + STATIC_ROWS_PENALTY * t.full_out / max(t.full_in + t.full_out, 1.0) / (here if schedule.accumulates_columns else 1.0)
    moved = here * (row + cols * t.full_out / max(t.elements, 1.0)) / share
    work = cols / 32 * _issue_slots(t, schedule) / (_issue_rate_one_cta(schedule) * device.clock)
    own = t.inner_folds * _reduction_us(schedule.warps) + work + _row_vector_waits(kernel, schedule) + SLOT_REFILL_US
    own -= work if schedule.accumulates_columns else 0.0  # its walks are in `issue`
    places -= 1 if schedule.ctas_per_row > 1 else 0  # one waits for the last walk while another has the first
    cycle = _soft_max(moved * uneven, own, (device.latency + row / (FILL_RATE * device.clock) + own) / places)
    partials = 4.0 * schedule.rows.split * t.cols * t.outer_states
    spilled = partials if partials > device.l2_bytes / 2 else 0.0
    l2 = again + 2 * partials + t.temps + (1.0 if schedule.hoisted or schedule.beside else VECTOR_SHARE * t.rows) * t.vectors
    memory = max(turns * cycle + l2 / device.l2_bandwidth, t.once / device.bandwidth * uneven)
    issue, special = _compute(t, schedule, here * schedule.warps, device, sms)
    issue = turns * _unrolled_walk_us(schedule, t, cols, here, device) if schedule.accumulates_columns else issue * even
    shared = _l1(t, schedule, device, sms) + t.full_in * kernel.full_walks / (L1_RATE * sms * device.clock)
    first = device.latency + row / share
    us = RAMP + first + _soft_max(memory, issue, special * even, shared) + LAST_STORES_US + spilled / device.bandwidth
    us += turns * _exposed_per_row_us(kernel, schedule) if schedule.accumulates_columns else 0.0
    us += MAILBOX_CLEAR_US + turns * CTA_EXCHANGE_US * schedule.ctas_per_row**1.5 * schedule.warps if schedule.ctas_per_row > 1 else 0.0
    return Cost(us, t.once + again + 2 * spilled, in_flight, _limit(memory, issue, special, turns * own))


def _mix(kernel: Kernel, schedule: Schedule, r: Resources, t: Traffic, device: Device) -> Cost:
    """Both orders in one pass: a loop over rows with partial results per CTA."""
    assert isinstance(schedule.rows, Loop)
    height, ctas = schedule.rows.step, schedule.rows.split * t.batch
    per_sm = ctas / device.sms
    here = min(per_sm, float(max(r.ctas_per_sm, 1)))
    turns = ceil(t.rows / (schedule.rows.split * height))
    in_flight = here * height * t.cols * t.input_bytes_per_elem * TILES_IN_FLIGHT[min(schedule.stages, 4)]
    even = turns * schedule.rows.split * height / max(t.rows, 1)
    partials = 4.0 * ctas * t.cols * t.outer_states
    held = 1.0 if schedule.hoisted else VECTOR_SHARE * t.rows / height
    l2 = 2 * partials + t.temps + held * t.vectors
    crowded = _congestion(here * height * t.cols * t.input_bytes_per_elem * (schedule.stages - 1))
    memory = t.once / _sustained_rate(in_flight, device) * even * crowded + l2 / device.l2_bandwidth
    issue, special = _compute(t, schedule, here * schedule.warps, device, min(device.sms, ctas))
    tiles = schedule.cols.tiles if isinstance(schedule.cols, Cover) else ()
    # Tiles of one width are added up before threads exchange anything, those of another width apart. H200, LayerNorm backward of
    # 16384 x 12288, by 4096 three times: 290 us; by 8192 and 4096: 329.
    reduce = t.inner_folds * len(set(tiles)) * _reduction_us(_warps_along(schedule, t))
    # CTAs that share an SM hide each other's reductions.
    chain = turns * (reduce + (0.0 if schedule.stages > 1 else 0.8 * device.latency)) / max(1.0, here) * per_sm / here
    # A look-up waits for its index in every turn, and no pipeline fetches it early. H200, cross-entropy of 65536 x 4096 by 264
    # CTAs: 262 us, 2.1 us a turn, where the norm of as many rows takes 0.9.
    chain += turns * device.latency * any(n.indexed for n in kernel.program.nodes if isinstance(n, Load))
    spilled = partials if partials > device.l2_bytes / 2 else 0.0
    # H200, RMSNorm backward, two or four rows at once in two tiles: 4-8 % longer than in one; one row: no longer.
    cut = 1.0 if len(tiles) == 1 or height == 1 else 1.03 + 0.01 * len(tiles)
    apart = len(tiles) == 1 and _warps_along(schedule, t) >= schedule.warps or height == 1
    folding = 0.0 if apart else WARP_FOLD_US * max(0, schedule.warps - 2) * per_sm * t.outer_states
    # No other turn hides the wait for the first one. H200, sums of 2, 3 and 5 inputs of 4096 x 1024 took 1.1 to 1.9 us longer than
    # was predicted without it, the join taken off.
    us = RAMP + device.latency + _soft_max(memory * cut, issue * even, special, chain) + folding + spilled / device.bandwidth
    return Cost(us, t.once + 2 * spilled, in_flight, _limit(memory, issue, special, chain))


def _looped(kernel: Kernel, schedule: Schedule, r: Resources, t: Traffic, device: Device) -> Cost:
    """A walk in steps: looped inner, outer, pointwise."""
    tile = tile_of(schedule)
    over_cols, over_rows = isinstance(schedule.cols, Loop), isinstance(schedule.rows, Loop)
    row_blocks = ceil(t.rows / schedule.rows.size) if isinstance(schedule.rows, Block) else 1
    col_blocks = ceil(t.cols / schedule.cols.size) if isinstance(schedule.cols, Block) else 1
    ctas = row_blocks * col_blocks * t.batch * schedule.splits
    slots = device.sms * max(r.ctas_per_sm, 1)
    here, sms = min(r.ctas_per_sm, ceil(ctas / device.sms)), min(device.sms, ctas)
    waits = 0.7 if _merges_per_tile(kernel, schedule) else 1.2  # threads that need not meet go on to their next loads
    # A ring's places are filled again as soon as they are read, so all of it is on its way.
    ahead = schedule.stages if schedule.staged else waits if schedule.stages == 1 else schedule.stages - 1
    in_flight = here * tile.height * tile.width * t.input_bytes_per_elem * ahead
    walked = t.cols * tile.height if over_cols else t.rows * tile.width
    live = min(ctas, slots) * walked * t.input_bytes_per_elem / schedule.splits
    hit = min(1.0, max(0.0, (REREAD_NO_HITS - live / device.l2_bytes) / (REREAD_NO_HITS - REREAD_ALL_HITS)))
    dram = t.once + t.multi_phase * (1 - hit)
    length = t.cols if over_rows else t.rows
    partials = 8.0 * max(t.outer_states, t.inner_folds) * schedule.splits * length if schedule.splits > 1 else 0.0
    vectors = VECTOR_SHARE * t.vectors * (row_blocks if over_cols else 0)
    # TMA brings rows of 64 bytes as well as longer ones, while CTAs keep together (`_half_lines`); loads want whole lines.
    full_line = (64 if schedule.staged else 128) * kernel.full_loads
    narrow = min(1.0, tile.width * t.input_bytes_per_elem / full_line) if isinstance(schedule.cols, Block) else 1.0
    rate = _sustained_rate(in_flight, device) * narrow * min(1.0, 1.15 * sms / device.sms)
    # What is read again comes from L2 while other CTAs' rows come from DRAM.
    near = (t.full_in + t.multi_phase * hit) / device.l2_bandwidth if t.multi_phase else 0.0
    halves = _narrow_tile_penalty(kernel, schedule, t, device)
    memory = _soft_max(dram / rate * halves, near) + (partials + vectors + t.temps) / device.l2_bandwidth
    if over_cols:
        row = walked * t.input_bytes_per_elem / schedule.splits * device.sms / device.bandwidth
        between = _row_turnaround_us(kernel, schedule, t)
        memory *= 1 + between / max(here * row, between)
    issue, special = _compute(t, schedule, here * schedule.warps, device, sms)
    chain = ceil(ctas / slots) * _walk_us(kernel, schedule, t, device)
    folding = WARP_FOLD_US * max(0, schedule.warps - 2) * ctas / sms if over_rows and kernel.folds else 0.0
    filling = RING_SLOT_US * schedule.stages if schedule.staged else 0.0
    us = RAMP + _soft_max(memory, issue, special, chain) + folding + filling
    return Cost(us, dram, in_flight, _limit(memory, issue, special, chain))


def _row_turnaround_us(kernel: Kernel, schedule: Schedule, t: Traffic) -> float:
    """What a CTA does between two rows that it walks."""
    return ROW_TURNAROUND_US + MERGE_TURNAROUND_US * t.composite_folds + (UNALIGNED_EDGE_US if schedule.sector_elems else 0.0) if kernel.folds else 0.0


def _walk_us(kernel: Kernel, schedule: Schedule, t: Traffic, device: Device) -> float:
    """What one CTA's walks take when nothing else is in their way."""
    tile = tile_of(schedule)
    match schedule.rows, schedule.cols:
        case _, Loop(step, split):
            turns = ceil(t.cols / (step * split))
        case Loop(step, split), _:
            turns = ceil(t.rows / (step * split))
        case _:
            turns = 1
    merges = _merges_per_tile(kernel, schedule)
    folds = sum(1 for f in kernel.folds if not f.block)
    across = max(1.0, schedule.warps / tile.height) if isinstance(schedule.cols, Loop) else schedule.warps
    wait = device.latency * UNPIPELINED_WAIT if schedule.stages == 1 else 0.0
    fill = tile.height * tile.width * t.input_bytes_per_elem / (FILL_RATE * device.clock)
    walk = fill + (turns - 1) * max(wait, fill) + device.latency + (PIPELINE_START_US if schedule.stages > 1 else 0.0)
    return kernel.full_walks * walk + (turns * merges + folds) * _reduction_us(across)


def _merges_per_tile(kernel: Kernel, schedule: Schedule) -> int:
    """Exchanges between threads for every tile of a walk."""
    if schedule.staged:
        return 0  # every thread has states of its own
    monoids = [monoid_of(kernel, f) for f in kernel.folds if not f.block]
    return sum(2 for m in monoids if not m.primitive and private_state_columns(kernel, schedule, m) is None)


def _limit(memory: float, issue: float, special: float, chain: float) -> str:
    named = (("memory", memory), ("issue", issue), ("special functions", special), ("latency", chain))
    return max(named, key=lambda kv: kv[1])[0]


def extra_kernel_us(device: Device) -> float:
    """What one more kernel of a plan costs beside its own time, which has its ramp and the wait for its first bytes."""
    return max(0.0, device.launch - RAMP - device.latency / 2)


# us for each part of the rows that a sum down the columns has: its join reads them one after another. H200, sums of fp32
# 4096 x 256: a join of 33 parts 1.1 us, of 528 parts 2.3. Where rows are reduced as well it is not charged: there many small CTAs
# gain more than this beside few large ones, which nothing here foresees (RMSNorm backward of 131072 x 512: 528 CTAs of 2 warps
# 95.7 us, 132 of 16 warps 100.4 to 102.3).
JOIN_PART_US = 0.0025
# The same where tiles in shared memory sum parts of the rows. H200, sums of five fp16 inputs of 4096 x 1024 in 4, 16 and 33
# parts: 13.0, 13.5, 14.8; of fp32 65536 x 256 in 16, 66 and 132: 17.8, 18.0, 18.5.
JOIN_STAGED_PART_US = 0.006


def join_cost(states: float, splits: int, length: int, device: Device) -> float:
    """A second kernel, spread over the card, that sums partial states."""
    return device.launch + 4.0 * states * splits * length / device.l2_bandwidth


def last_block_cost(states: float, splits: int, length: int, device: Device) -> float:
    """The alternative: the last CTA to finish reads all partial states. H200, 2026-11: 132 x 8192 fp32 took 110-123 us."""
    return 4.0 * states * splits * length / 38e3
