"""Predicted time of (kernel, schedule, device): bytes, bytes in flight, waves, issue, special functions, serial chains.

Pure arithmetic. Times are microseconds, rates bytes per microsecond. The shape of the formulas is that of any memory-bound
kernel: DRAM traffic at the rate that the bytes in flight can sustain, or whatever else is slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, exp

from ..device import Device
from ..ir.expr import OPS
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Op, Reduce, Store
from ..ir.size import Bindings, value
from .access import single_stride, streams_rows
from .kernel import Across, Kernel
from .lanes import own_lanes, vector
from .parked import columns_ahead
from .resources import Late, Resources, demand, early, late, packs, tile_of
from .schedule import SECTOR, Block, Cover, Loop, Schedule


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a kernel must move, whatever its schedule; bytes."""

    batch: int
    rows: int
    cols: int
    full_in: float  # full-size inputs, each once
    full_out: float
    multi_phase: float  # of full_in, what is needed on both sides of a reduction; times the extra phases
    vectors: float  # row vectors, once
    beside: float  # bytes of row vectors that every element meets, in all phases
    late: tuple[Late, ...]  # loads that are needed after a reduction
    thin: float  # column vectors and scalars in and out, once
    temps: float  # partial results and other kernels' results: they stay in L2
    slots: float  # issue slots per element, where what is needed in several phases is computed in each
    slots_once: float  # the same, where it stays in registers
    mufu: float  # special-function operations per element
    inner: int  # reductions over columns
    outer_states: int  # state components of reductions over rows
    unit: int  # bytes per element of all full-size inputs together
    words: float  # registers per element of all multi-phase inputs together, widened
    vector: int  # elements a thread takes of a tile at once
    unaligned: int  # full-size accesses whose rows do not start on 16 bytes: element by element, unless read by sectors

    @property
    def elements(self) -> float:
        return float(self.batch) * self.rows * self.cols

    @property
    def once(self) -> float:
        """Every input once, every output once: the floor."""
        return self.full_in + self.full_out + self.vectors + self.thin


def traffic(kernel: Kernel, bindings: Bindings) -> Traffic:
    """Count a kernel's bytes and operations."""
    program = kernel.program
    batch, rows, cols = kernel.counts(bindings)
    full_in = full_out = multi = vectors = thin = temps = unit = 0.0
    seen: set[tuple[str, object]] = set()
    for i, node in enumerate(program.nodes):
        if not isinstance(node, (Load, Store)):
            continue
        size = program.buffer[node.buffer].dtype.size
        if isinstance(node, Load) and node.gathers:
            moved = SECTOR * float(program.points(program.dims[i], bindings))
        else:
            points = program.points(frozenset(a for a, _ in node.strides), bindings)
            moved = size * float(points) / _sector_use(kernel, node, bindings)
        key = (node.buffer, node.offset if not (isinstance(node, Load) and node.gathers) else i)
        if isinstance(node, Load) and key in seen:
            continue
        seen.add(key)
        if program.buffer[node.buffer].role == "temp":
            temps += moved
            unit += size if kernel.is_full[i] and isinstance(node, Load) else 0
        elif kernel.is_full[i]:
            if isinstance(node, Load):
                full_in += moved
                unit += size
                multi += moved * (len(kernel.use_phases(i)) - 1 if i in kernel.multi_phase else 0)
            else:
                full_out += moved
        elif not kernel.by_row[i] and kernel.by_col[i] is Across.FULL:
            vectors += moved
        else:
            thin += moved
    slots, once, mufu = _operations(kernel)
    inner = sum(1 for f in kernel.folds if f.cols)
    states = sum(len(MONOIDS[_reduce(kernel, f.node).monoid].state) for f in kernel.folds if f.rows)
    beside = sum(program.dtypes[i].size * len(kernel.use_phases(i)) for i in program.of(Load)
                 if not kernel.by_row[i] and kernel.by_col[i] is Across.FULL)
    return Traffic(
        batch=batch, rows=rows, cols=cols, full_in=full_in, full_out=full_out, multi_phase=multi, vectors=vectors,
        beside=float(beside), late=late(kernel), thin=thin, temps=temps, slots=slots, slots_once=once, mufu=mufu, inner=inner,
        outer_states=states, unit=int(unit) or _in_flight_alone(kernel), words=demand(kernel).resident_words, vector=vector(kernel),
        unaligned=_unaligned(kernel))


def _in_flight_alone(kernel: Kernel) -> int:
    """Bytes per element where there is one row, or one column, and so nothing full-size."""
    loads = [(i, n) for i, n in enumerate(kernel.program.nodes) if isinstance(n, Load) and (n.strides or n.gathers)]
    return sum(SECTOR if n.gathers else kernel.program.dtypes[i].size for i, n in loads) or 4


def _unaligned(kernel: Kernel) -> int:
    """Full-size accesses along rows that do not start on 16 bytes."""
    found = 0
    for i, node in enumerate(kernel.program.nodes):
        if isinstance(node, (Load, Store)) and kernel.is_full[i]:
            step, size = streams_rows(kernel, node), kernel.program.buffer[node.buffer].dtype.size
            found += isinstance(step, int) and step * size % 16 != 0
    return found


def _reduce(kernel: Kernel, i: int) -> Reduce:
    node = kernel.program.nodes[i]
    assert isinstance(node, Reduce)
    return node


def _operations(kernel: Kernel) -> tuple[float, float, float]:
    """Issue slots per element, with what is needed in several phases computed in each or once; special functions."""
    slots = once = mufu = 0.0
    for i, node in enumerate(kernel.program.nodes):
        if not kernel.is_full[i]:
            continue
        if isinstance(node, Op):
            times = max(1, len(kernel.use_phases(i)))
            slots += OPS[node.name].slots * times
            once += OPS[node.name].slots
            mufu += OPS[node.name].mufu * times
        elif isinstance(node, (Load, Store)):
            slots += 0.4
            once += 0.4
    for fold in kernel.folds:
        monoid = MONOIDS[_reduce(kernel, fold.node).monoid]
        slots += 1 if monoid.primitive else 4
        once += 1 if monoid.primitive else 4
        mufu += 0 if monoid.primitive or "exp" not in monoid.name else 1
    return slots, once, mufu


def _sector_use(kernel: Kernel, node: Load | Store, bindings: Bindings) -> float:
    """The useful share of the 32-byte sectors an access touches."""
    size = kernel.program.buffer[node.buffer].dtype.size
    along = [a for a, s in node.strides if s == 1]
    if not along or not any(a in kernel.space.cols or a in kernel.space.rows for a in along):
        return 1.0 if not node.strides else max(size / SECTOR, min(1.0, size * 4 / SECTOR))
    run = size * value(kernel.program.axis[along[0]].extent, bindings)
    if single_stride(kernel.program, kernel.space.cols, node.strides) == 1:
        run = size * kernel.program.points(kernel.space.cols, bindings)
    if along[0] in kernel.space.rows and any(a in kernel.space.cols for a, _ in node.strides):
        return 0.5  # across the grain: whole sectors only where a tile is several rows high
    return 1.0 if run % SECTOR == 0 or run >= 1024 else run / (SECTOR * ceil(run / SECTOR) + SECTOR / 2)


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
    found = _modelled(kernel, schedule, resources, t, device)
    correction = device.correction(schedule.family)
    return found if correction == 1.0 else replace(found, us=found.us * correction)


def _modelled(kernel: Kernel, schedule: Schedule, resources: Resources, t: Traffic, device: Device) -> Cost:
    if schedule.parked and isinstance(schedule.cols, Cover) and isinstance(schedule.rows, Loop):
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


# RAMP, VECTOR_SHARE, L1_RATE, LATE, PER_TILE, PER_TILE_SLOTS, WARPS_TO_ISSUE and ACROSS_WARPS were measured first and then
# searched for the least regret over many kernels (docs/decisions/0008); the measurements beside them say what they stand for.
RAMP = 0.6  # us from launch to the first bytes and from the last to the end
VECTOR_SHARE = 0.05  # of the times a row vector is read again that reach L2; the rest hit L1
REREAD_SHARE = 0.6  # of L2 that a row read twice can count on finding itself in
TILES_IN_FLIGHT = {1: 0.62, 2: 0.65, 3: 2.1, 4: 2.2}  # of a loop over rows, by pipeline stages; H200, 2026-11, RMSNorm backward
LAST_STORES = 0.3  # us until what a CTA stored last is on its way
# us of an SM that a CTA spends, for each of its warps but two, to fold rows that lie in different warps. H200, column sums of
# 256 x 65536 by CTAs of 2, 4, 8, 16 and 32 warps: 16.5, 17.1, 20.1, 24.2, 30.9 us.
ACROSS_WARPS = 0.19
# us that a CTA spends between rows that it walks, and other CTAs only partly make up for: more where lanes hold states that
# must be merged, and where broken sectors are read. H200, cross-entropy over 50264 and 128256 columns with 3, 6 and 12 CTAs on
# an SM: 1.35, 1.16, 1.09 and 1.10, 1.04, 1.01 of the bytes' time; RMSNorm walked over 8192 and 16384 columns: 1.2, 1.13.
TURNAROUND, AND_MERGES, AND_EDGES = 0.6, 1.6, 0.8
LATE = 0.35  # of the latency, that a CTA waits once more for what it asks for after a reduction
PER_TILE = 0.17  # us that each further tile of a resident row delays its CTA
ISSUE_RATE = 3.5  # warp instructions a cycle that an SM full of warps sustains
WARPS_TO_ISSUE = 8.0  # warps with which an SM issues 63 % of that
UNALIGNED_SLOTS = 12.0  # issue slots that reading or writing element by element costs an element
PER_TILE_SLOTS = 25.0  # issue slots a thread spends on a tile whatever its size: addresses, waits, barriers


def _together(*limits: float) -> float:
    """Limits that are close to each other add up. H200, cross-entropy over 128256 columns: within 12 % at 4, 8 and 16 warps."""
    return sum(t**4 for t in limits) ** 0.25


def _rate(in_flight: float, device: Device) -> float:
    """The DRAM rate that some bytes in flight per SM sustain."""
    y = in_flight / device.bytes_in_flight
    return device.bandwidth * y / (1 + y**4) ** 0.25


def _reduction_time(warps_per_row: float) -> float:
    """One reduction across the threads that share a row."""
    return 0.12 if warps_per_row <= 1 else 0.35 + 0.02 * warps_per_row


def _warps_along(schedule: Schedule, t: Traffic) -> int:
    """Warps that share a row: Triton lays them along the columns first."""
    return max(1, min(schedule.warps, tile_of(schedule).width // (32 * t.vector)))


def _slots(t: Traffic, schedule: Schedule) -> float:
    """Issue slots per element under a schedule."""
    tile = tile_of(schedule)
    per_thread = tile.height * tile.width / (32 * schedule.warps)
    walks = isinstance(schedule.rows, Loop) or isinstance(schedule.cols, Loop)
    kept = bool(schedule.resident) and not packs(schedule, t.words)
    slots = t.slots_once if kept else t.slots
    slots += (PER_TILE_SLOTS if walks else PER_TILE_SLOTS / 4) / max(per_thread, 1.0) * (1 if tile.count == 1 else 1.3)
    return slots if schedule.lead else slots + UNALIGNED_SLOTS * t.unaligned


def _issued(warps_per_sm: float) -> float:
    """Warp instructions a cycle that an SM issues with so many warps. H200, GELU backward takes 117, 77, 66 us with 8, 16, 32."""
    return ISSUE_RATE * (1 - exp(-max(warps_per_sm, 1.0) / WARPS_TO_ISSUE))


L1_RATE = 110.0  # bytes a cycle that an SM's L1 hands out


def _l1(t: Traffic, schedule: Schedule, device: Device, sms: float) -> float:
    """What passes through L1: every full-size tensor, and row vectors for every row, unless one load serves several or all."""
    rows = 1.0
    if isinstance(schedule.rows, Block) and isinstance(schedule.cols, Cover):
        covers = t.late and min(schedule.cols.tiles) >= t.late[-1].once_from * schedule.warps
        rows = float(schedule.rows.size) if covers else 1.0
    full = (t.full_in + t.full_out) / max(t.elements, 1.0)
    beside = 0.0 if schedule.hoisted else t.beside / rows
    return t.elements * (full + beside) / (L1_RATE * sms * device.clock)


def _compute(t: Traffic, schedule: Schedule, warps_per_sm: float, device: Device, sms: float) -> tuple[float, float]:
    issue = t.elements / 32 * _slots(t, schedule) / (sms * _issued(warps_per_sm) * device.clock)
    special = t.elements * t.mufu / (sms * 16 * device.clock)
    return issue, special


def _waves(ctas: float, slots: float) -> float:
    """How much longer the last, partly filled wave makes it."""
    w = ctas / slots
    return 1.0 if w <= 1 else (ceil(w) / w if w < 4 else 1 + 0.5 / w)


def _resident(kernel: Kernel, schedule: Schedule, r: Resources, t: Traffic, device: Device, pieces: int, length: int,
              block: int) -> Cost:
    """Whole rows (or columns) on chip; one tile of them per CTA.

    A CTA waits for its loads, reduces, and leaves its stores behind. The CTAs of an SM take turns at its share of DRAM; one
    alone leaves it idle while it reduces.
    """
    ctas = ceil(pieces / block)
    slots = device.sms * r.ctas_per_sm
    here, sms = min(r.ctas_per_sm, ceil(ctas / device.sms)), min(device.sms, ctas)
    again = 0.0 if len(schedule.resident | schedule.parked) >= len(kernel.multi_phase) else t.multi_phase
    share = device.bandwidth / device.sms
    load = block * length * t.unit / share
    store = block * length * (t.full_out / max(t.elements, 1)) / share
    folds = sum(1 for f in kernel.folds if not f.block)
    across_rows = isinstance(schedule.rows, Block)
    t_reduce = folds * _reduction_time(_warps_along(schedule, t) if across_rows else schedule.warps)
    if not across_rows:  # short runs of columns: every row of a tile is a request of its own, of at least two sectors
        run = block * t.unit / max(1, sum(1 for i in kernel.program.of(Load) if kernel.is_full[i]))
        load *= max(1.0, 2 * SECTOR / run)
    # Exponentials want small tiles: fewer live values between them. Rows of a column are loaded all at once.
    tiles = tile_of(schedule).count if t.mufu == 0 and across_rows else 1
    issued = max(_issued(schedule.warps), min(0.6 * schedule.warps, 1.2))  # few warps, but each with much to do at once
    work = block * length / 32 * _slots(t, schedule) / (issued * device.clock)
    waits = LATE * device.latency if len(early(t.late, schedule)) < len(t.late) else 0.0
    first = device.latency if t.full_in else device.latency / 2  # partial results are near
    alone = first + waits + t_reduce + load + work + PER_TILE * tiles
    cycle = _together(here * (load + store), alone)
    l2 = again + t.temps + VECTOR_SHARE * t.vectors * ctas
    memory = ctas / (sms * here) * cycle * _waves(ctas, slots) + l2 / device.l2_bandwidth
    memory = max(memory, t.once / device.bandwidth)
    issue, special = _compute(t, schedule, here * schedule.warps, device, sms)
    us = RAMP + max(_together(memory, issue, special, _l1(t, schedule, device, sms)), alone + LAST_STORES)
    us += 0.0 if across_rows else ACROSS_WARPS * max(0, schedule.warps - 2) * ctas / sms
    return Cost(us, t.once + again, here * block * length * t.unit, _limit(memory, issue, special, alone))


DRAINING = 0.25  # of a row, that is on its way into places which a last walk has freed, in the mean over both walks. A guess
REFILL = 0.15  # us between the last read of a row's place and the next row being asked for there: fence, barrier, copies. A guess


def _parked(kernel: Kernel, schedule: Schedule, t: Traffic, device: Device) -> Cost:
    """Whole rows in shared memory; every CTA takes one after another, and its ring's further places are on their way meanwhile.

    With one place a CTA waits for each row as one of `_resident` does, the less the more copies of the next row have places too.
    With more it waits only where the rows in flight on an SM do not keep DRAM busy. Where it gathers over rows, its partial results
    and its row vectors cost what they do in `_mix`. No constant of this was fitted: such kernels have yet to run on a card.
    """
    assert isinstance(schedule.rows, Loop)
    ctas = min(schedule.rows.split, max(t.rows, 1))
    sms, turns = min(device.sms, ctas), ceil(t.rows / ctas)
    here, even = ctas / sms, turns * ctas / max(t.rows, 1)
    share, row = device.bandwidth / device.sms, float(t.cols * t.unit)
    again = sum(kernel.program.dtypes[i].size * (len(kernel.use_phases(i)) - 1) for i in kernel.multi_phase
                if i not in schedule.parked) * t.elements
    assert isinstance(schedule.cols, Cover)
    rows_ahead = schedule.stages - 1 + columns_ahead(schedule.cols, schedule.ahead) / t.cols
    in_flight = here * row * max(rows_ahead + (DRAINING if schedule.ahead else 0.0), 0.5)
    moved = here * (row + t.cols * t.full_out / max(t.elements, 1.0)) / share
    issued = max(_issued(schedule.warps), min(0.6 * schedule.warps, 1.2))
    work = t.cols / 32 * _slots(t, schedule) / (issued * device.clock)
    own = t.inner * _reduction_time(schedule.warps) + work + REFILL
    if not rows_ahead:
        cycle = _together(moved, device.latency + row / share + own)
    else:  # half a row ahead, and the first walk over a row never waits for all of it
        waits = max(0.0, 1.0 - 2 * rows_ahead) * (device.latency + row / share)
        cycle = _together(moved * device.bandwidth / _rate(in_flight, device), waits + own)
    partials = 4.0 * schedule.rows.split * t.cols * t.outer_states
    spilled = partials if partials > device.l2_bytes / 2 else 0.0
    l2 = again + 2 * partials + t.temps + (1.0 if schedule.hoisted else VECTOR_SHARE * t.rows) * t.vectors
    memory = max(turns * cycle + l2 / device.l2_bandwidth, t.once / device.bandwidth)
    issue, special = _compute(t, schedule, here * schedule.warps, device, sms)
    shared = _l1(t, schedule, device, sms) + t.full_in * kernel.passes / (L1_RATE * sms * device.clock)
    first = device.latency + row / share
    us = RAMP + first + _together(memory, issue * even, special * even, shared) + LAST_STORES + spilled / device.bandwidth
    return Cost(us, t.once + again + 2 * spilled, in_flight, _limit(memory, issue, special, turns * own))


def _mix(kernel: Kernel, schedule: Schedule, r: Resources, t: Traffic, device: Device) -> Cost:
    """Both orders in one pass: a loop over rows with partial results per CTA."""
    assert isinstance(schedule.rows, Loop)
    height, ctas = schedule.rows.step, schedule.rows.split * t.batch
    per_sm = ctas / device.sms
    turns = ceil(t.rows / (schedule.rows.split * height))
    in_flight = per_sm * height * t.cols * t.unit * TILES_IN_FLIGHT[min(schedule.stages, 4)]
    even = turns * schedule.rows.split * height / max(t.rows, 1)
    partials = 4.0 * ctas * t.cols * t.outer_states
    held = 1.0 if schedule.hoisted else VECTOR_SHARE * t.rows / height
    l2 = 2 * partials + t.temps + held * t.vectors
    memory = t.once / _rate(in_flight, device) * even + l2 / device.l2_bandwidth
    issue, special = _compute(t, schedule, per_sm * schedule.warps, device, min(device.sms, ctas))
    reduce = t.inner * _reduction_time(_warps_along(schedule, t))
    # CTAs that share an SM hide each other's reductions.
    chain = turns * (reduce + (0.0 if schedule.stages > 1 else 0.8 * device.latency)) / max(1.0, per_sm)
    # A look-up waits for its index in every turn, and no pipeline fetches it early. H200, cross-entropy of 65536 x 4096 by 264
    # CTAs: 262 us, 2.1 us a turn, where the norm of as many rows takes 0.9.
    chain += turns * device.latency * any(n.gathers for n in kernel.program.nodes if isinstance(n, Load))
    spilled = partials if partials > device.l2_bytes / 2 else 0.0
    tiles = tile_of(schedule).count
    cut = 1.0 if tiles == 1 else 1.03 + 0.01 * tiles  # H200, RMSNorm backward: a row in two tiles took 4-7 % longer than in one
    apart = tiles == 1 and _warps_along(schedule, t) >= schedule.warps or height == 1
    folding = 0.0 if apart else ACROSS_WARPS * max(0, schedule.warps - 2) * per_sm * t.outer_states
    us = RAMP + _together(memory, issue * even, special, chain) * cut + folding + spilled / device.bandwidth
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
    waits = 0.7 if _merges(kernel, schedule) else 1.2  # threads that need not meet go on to their next loads
    # A ring's places are filled again as soon as they are read, so all of it is on its way. That, and what follows from it for
    # tiles that come through shared memory, was not fitted: such kernels have yet to run on a card.
    ahead = schedule.stages if schedule.parked else waits if schedule.stages == 1 else schedule.stages - 1
    in_flight = here * tile.height * tile.width * t.unit * ahead
    walked = t.cols * tile.height if over_cols else t.rows * tile.width
    live = min(ctas, slots) * walked * t.unit / schedule.splits
    hit = min(1.0, REREAD_SHARE * device.l2_bytes / max(live, 1.0))
    dram = t.once + t.multi_phase * (1 - hit)
    length = t.cols if over_rows else t.rows
    partials = 8.0 * max(t.outer_states, t.inner) * schedule.splits * length if schedule.splits > 1 else 0.0
    vectors = VECTOR_SHARE * t.vectors * (row_blocks if over_cols else 0)
    narrow = min(1.0, tile.width * t.unit / _full_loads(kernel) / 128) if isinstance(schedule.cols, Block) else 1.0
    rate = _rate(in_flight, device) * narrow * min(1.0, 1.15 * sms / device.sms)
    memory = dram / rate + (t.multi_phase * hit + partials + vectors + t.temps) / device.l2_bandwidth
    memory *= _waves(ctas, slots)
    if over_cols:
        row = walked * t.unit / schedule.splits * device.sms / device.bandwidth
        between = _between_rows(kernel, schedule)
        memory *= 1 + between / max(here * row, between)
    issue, special = _compute(t, schedule, here * schedule.warps, device, sms)
    chain = ceil(ctas / slots) * _walk_time(kernel, schedule, t, device)
    folding = ACROSS_WARPS * max(0, schedule.warps - 2) * ctas / sms if over_rows and kernel.folds else 0.0
    return Cost(RAMP + _together(memory, issue, special, chain) + folding, dram, in_flight, _limit(memory, issue, special, chain))


def _between_rows(kernel: Kernel, schedule: Schedule) -> float:
    """What a CTA does between two rows that it walks."""
    merged = sum(1 for f in kernel.folds if not f.block and not MONOIDS[_reduce(kernel, f.node).monoid].primitive)
    return TURNAROUND + AND_MERGES * merged + (AND_EDGES if schedule.lead else 0.0) if kernel.folds else 0.0


def _full_loads(kernel: Kernel) -> int:
    return max(1, sum(1 for i in kernel.program.of(Load) if kernel.is_full[i]))


def _walk_time(kernel: Kernel, schedule: Schedule, t: Traffic, device: Device) -> float:
    """What one CTA's walks take when nothing else is in their way."""
    tile = tile_of(schedule)
    match schedule.rows, schedule.cols:
        case _, Loop(step, split):
            turns = ceil(t.cols / (step * split))
        case Loop(step, split), _:
            turns = ceil(t.rows / (step * split))
        case _:
            turns = 1
    merges = _merges(kernel, schedule)
    folds = sum(1 for f in kernel.folds if not f.block)
    across = max(1.0, schedule.warps / tile.height) if isinstance(schedule.cols, Loop) else schedule.warps
    wait = device.latency * 0.55 if schedule.stages == 1 else 0.0
    return kernel.passes * (turns * wait + device.latency) + (turns * merges + folds) * _reduction_time(across)


def _merges(kernel: Kernel, schedule: Schedule) -> int:
    """Exchanges between threads for every tile of a walk."""
    if schedule.parked:
        return 0  # every thread has states of its own
    monoids = [MONOIDS[_reduce(kernel, f.node).monoid] for f in kernel.folds if not f.block]
    return sum(2 for m in monoids if not m.primitive and own_lanes(kernel, schedule, m) is None)


def _limit(memory: float, issue: float, special: float, chain: float) -> str:
    named = (("memory", memory), ("issue", issue), ("special functions", special), ("latency", chain))
    return max(named, key=lambda kv: kv[1])[0]


def join_cost(states: float, splits: int, length: int, device: Device) -> float:
    """A second kernel, spread over the card, that sums partial states."""
    return device.launch + 4.0 * states * splits * length / device.l2_bandwidth


def last_block_cost(states: float, splits: int, length: int, device: Device) -> float:
    """The alternative: the last CTA to finish reads all partial states. H200, 2026-11: 132 x 8192 fp32 took 110-123 us."""
    return 4.0 * states * splits * length / 38e3
