"""Predicted time of (kernel, schedule, device): bytes, bytes in flight, waves, issue, special functions, serial chains.

Pure arithmetic. Times are microseconds, rates bytes per microsecond. The shape of the formulas is that of any memory-bound
kernel: DRAM traffic at the rate that the bytes in flight can sustain, or whatever else is slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..device import Device
from ..ir.expr import OPS
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Op, Reduce, Store
from ..ir.size import Bindings, value
from .access import single_stride, streams_rows
from .kernel import Across, Kernel
from .resources import Resources, tile_of
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
    thin: float  # column vectors and scalars in and out, once
    temps: float  # partial results and other kernels' results: they stay in L2
    slots: float  # issue slots per element
    mufu: float  # special-function operations per element
    inner: int  # reductions over columns
    outer_states: int  # state components of reductions over rows
    unit: int  # bytes per element of all full-size inputs together
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
        moved = size * float(program.points(frozenset(a for a, _ in node.strides), bindings))
        if isinstance(node, Load) and node.gathers:
            moved = SECTOR * float(program.points(program.dims[i], bindings))
        moved /= _sector_use(kernel, node, bindings)
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
    slots, mufu = _operations(kernel)
    inner = sum(1 for f in kernel.folds if f.cols)
    states = sum(len(MONOIDS[_reduce(kernel, f.node).monoid].state) for f in kernel.folds if f.rows)
    return Traffic(batch, rows, cols, full_in, full_out, multi, vectors, thin, temps, slots, mufu, inner, states, int(unit) or 4,
                   _unaligned(kernel))


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


def _operations(kernel: Kernel) -> tuple[float, float]:
    """Issue slots and special functions per element; what is needed in several phases is computed in each."""
    slots = mufu = 0.0
    for i, node in enumerate(kernel.program.nodes):
        if not kernel.is_full[i]:
            continue
        if isinstance(node, Op):
            times = max(1, len(kernel.use_phases(i)))
            slots += OPS[node.name].slots * times
            mufu += OPS[node.name].mufu * times
        elif isinstance(node, (Load, Store)):
            slots += 0.4
    for fold in kernel.folds:
        monoid = MONOIDS[_reduce(kernel, fold.node).monoid]
        slots += 1 if monoid.primitive else 4
        mufu += 0 if monoid.primitive or "exp" not in monoid.name else 1
    return slots, mufu


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
    """Predict one schedule."""
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


RAMP = 1.0  # us from launch to the first bytes and from the last to the end
VECTOR_SHARE = 0.06  # of the times a row vector is read again that reach L2; the rest hit L1
REREAD_SHARE = 0.6  # of L2 that a row read twice can count on finding itself in
TILES_IN_FLIGHT = {1: 0.62, 2: 0.65, 3: 2.1, 4: 2.2}  # of a loop over rows, by pipeline stages; H200, 2026-11, RMSNorm backward
PER_TILE = 0.1  # us that each further tile of a resident row delays its CTA
ISSUE_RATE = 3.6  # warp instructions a cycle that an SM full of warps sustains
PER_TILE_SLOTS = 48.0  # issue slots a thread spends on a tile whatever its size: addresses, waits, barriers


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


def _compute(t: Traffic, schedule: Schedule, warps_per_sm: float, device: Device, sms: float) -> tuple[float, float]:
    tile = tile_of(schedule)
    per_thread = tile.height * tile.width / (32 * schedule.warps)
    walks = isinstance(schedule.rows, Loop) or isinstance(schedule.cols, Loop)
    slots = t.slots + (PER_TILE_SLOTS if walks else PER_TILE_SLOTS / 4) / max(per_thread, 1.0) * (1 if tile.count == 1 else 1.3)
    if not schedule.lead:
        slots += 2.0 * t.unaligned
    issue = t.elements / 32 * slots / (sms * min(ISSUE_RATE, 0.45 * max(warps_per_sm, 1)) * device.clock)
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
    again = 0.0 if len(schedule.resident) >= len(kernel.multi_phase) else t.multi_phase
    share = device.bandwidth / device.sms
    load = block * length * t.unit / share
    store = block * length * (t.full_out / max(t.elements, 1)) / share
    folds = sum(1 for f in kernel.folds if not f.block)
    across_rows = isinstance(schedule.rows, Block)
    t_reduce = folds * _reduction_time(max(1.0, schedule.warps / block) if across_rows else schedule.warps)
    if not across_rows:  # short runs of columns: every row of a tile is a request of its own, of at least two sectors
        run = block * t.unit / max(1, sum(1 for i in kernel.program.of(Load) if kernel.is_full[i]))
        load *= max(1.0, 2 * SECTOR / run)
    tiles = tile_of(schedule).count if t.mufu == 0 else 1  # exponentials want small tiles: fewer live values between them
    alone = device.latency + t_reduce + load + PER_TILE * tiles
    cycle = _together(here * (load + store), alone)
    l2 = again + t.temps + VECTOR_SHARE * t.vectors * ctas
    memory = ctas / (sms * here) * cycle * _waves(ctas, slots) + l2 / device.l2_bandwidth
    memory = max(memory, t.once / device.bandwidth)
    issue, special = _compute(t, schedule, here * schedule.warps, device, sms)
    us = RAMP + max(_together(memory, issue, special), alone + device.latency)
    return Cost(us, t.once + again, here * block * length * t.unit, _limit(memory, issue, special, alone))


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
    reduce = t.inner * _reduction_time(schedule.warps if schedule.warps > height else 1)
    # CTAs that share an SM hide each other's reductions.
    chain = turns * (reduce + (0.0 if schedule.stages > 1 else 0.8 * device.latency)) / max(1.0, per_sm)
    # A look-up waits for its index in every turn, and no pipeline fetches it early. H200, cross-entropy of 65536 x 4096 by 264
    # CTAs: 262 us, 2.1 us a turn, where the norm of as many rows takes 0.9.
    chain += turns * device.latency * any(n.gathers for n in kernel.program.nodes if isinstance(n, Load))
    spilled = partials if partials > device.l2_bytes / 2 else 0.0
    tiles = tile_of(schedule).count
    cut = 1.0 if tiles == 1 else 1.03 + 0.01 * tiles  # H200, RMSNorm backward: a row in two tiles took 4-7 % longer than in one
    us = RAMP + _together(memory, issue * even, special, chain) * cut + spilled / device.bandwidth
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
    waits = 0.7 if kernel.folds else 1.1  # a walk that folds nothing goes on to its next loads
    in_flight = here * tile.height * tile.width * t.unit * (waits if schedule.stages == 1 else schedule.stages - 1)
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
    issue, special = _compute(t, schedule, here * schedule.warps, device, sms)
    chain = ceil(ctas / slots) * _walk_time(kernel, schedule, t, device)
    return Cost(RAMP + _together(memory, issue, special, chain), dram, in_flight, _limit(memory, issue, special, chain))


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
    merges = sum(2 for f in kernel.folds if not f.block and not MONOIDS[_reduce(kernel, f.node).monoid].primitive)
    folds = sum(1 for f in kernel.folds if not f.block)
    across = max(1.0, schedule.warps / tile.height) if isinstance(schedule.cols, Loop) else schedule.warps
    wait = device.latency * 0.55 if schedule.stages == 1 else 0.0
    return kernel.passes * (turns * wait + device.latency) + (turns * merges + folds) * _reduction_time(across)


def _limit(memory: float, issue: float, special: float, chain: float) -> str:
    named = (("memory", memory), ("issue", issue), ("special functions", special), ("latency", chain))
    return max(named, key=lambda kv: kv[1])[0]


def join_cost(states: float, splits: int, length: int, device: Device) -> float:
    """A second kernel, spread over the card, that sums partial states."""
    return device.launch + 4.0 * states * splits * length / device.l2_bandwidth


def last_block_cost(states: float, splits: int, length: int, device: Device) -> float:
    """The alternative: the last CTA to finish reads all partial states. H200, 2026-11: 132 x 8192 fp32 took 110-123 us."""
    return 4.0 * states * splits * length / 38e3
