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
from .access import single_stride
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
    return Traffic(batch, rows, cols, full_in, full_out, multi, vectors, thin, temps, slots, mufu, inner, states, int(unit) or 4)


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
            return _mix(schedule, resources, t, device)
        case _:
            return _looped(kernel, schedule, resources, t, device)


RAMP = 1.0  # us from launch to the first bytes and from the last to the end
VECTOR_SHARE = 0.06  # of the times a row vector is read again that reach L2; the rest hit L1
REREAD_SHARE = 0.6  # of L2 that a row read twice can count on finding itself in


def _rate(in_flight: float, device: Device) -> float:
    """The DRAM rate that some bytes in flight per SM sustain."""
    y = in_flight / device.bytes_in_flight
    return device.bandwidth * y / (1 + y**4) ** 0.25


def _reduction_time(warps_per_row: float) -> float:
    """One reduction across the threads that share a row."""
    return 0.12 if warps_per_row <= 1 else 0.35 + 0.02 * warps_per_row


def _compute(t: Traffic, warps_per_sm: float, device: Device, sms: float) -> tuple[float, float]:
    issue = t.elements / 32 * t.slots / (sms * min(3.2, 0.22 * max(warps_per_sm, 1)) * device.clock)
    special = t.elements * t.mufu / (sms * 16 * device.clock)
    return issue, special


def _waves(ctas: float, slots: float) -> float:
    w = ctas / slots
    return 1.0 if w <= 1 else (ceil(w) / w if w < 4 else 1 + 0.5 / w)


def _resident(kernel: Kernel, schedule: Schedule, r: Resources, t: Traffic, device: Device, pieces: int, length: int, block: int) -> Cost:
    """Whole rows (or columns) on chip; one tile of them per CTA."""
    ctas = ceil(pieces / block)
    here = min(r.ctas_per_sm, ceil(ctas / device.sms))
    sms = min(device.sms, ctas)
    kept = len(schedule.resident) >= len(kernel.multi_phase)
    again = 0.0 if kept else t.multi_phase
    loaded = here * block * length * t.unit
    per_cta = block * length * t.unit
    t_load = device.latency + loaded * device.sms / device.bandwidth
    folds = sum(1 for f in kernel.folds if not f.block)
    t_reduce = folds * _reduction_time(schedule.warps / min(block, schedule.warps) if isinstance(schedule.rows, Block) else schedule.warps)
    t_store = here * block * length * (t.full_out / max(t.elements, 1)) * device.sms / device.bandwidth
    in_flight = 1.6 * loaded * t_load / (t_load + t_reduce + 0.3 * t_store)
    if isinstance(schedule.rows, Cover):  # short runs of columns: rows of a tile are separate requests
        in_flight *= min(1.0, block * (t.unit / max(1, len(kernel.multi_phase) or 1)) / 128)
    l2 = again + t.temps + VECTOR_SHARE * t.vectors * ctas
    memory = t.once / (_rate(in_flight, device) * min(1.0, 1.15 * sms / device.sms)) + l2 / device.l2_bandwidth
    issue, special = _compute(t, here * schedule.warps, device, sms)
    alone = 2 * device.latency + t_reduce + per_cta / (device.bandwidth / device.sms * 4)
    core = max(memory, issue, special)
    us = RAMP + max(core * _waves(ctas, device.sms * max(r.ctas_per_sm, 1)), alone)
    return Cost(us, t.once, in_flight, _limit(memory, issue, special, alone))


def _mix(schedule: Schedule, r: Resources, t: Traffic, device: Device) -> Cost:
    """Both orders in one pass: a loop over rows with partial results per CTA."""
    assert isinstance(schedule.rows, Loop)
    height, ctas = schedule.rows.step, schedule.rows.split * t.batch
    per_sm = ctas / device.sms
    turns = ceil(t.rows / (schedule.rows.split * height))
    tile = height * t.cols * t.unit
    in_flight = per_sm * tile * (schedule.stages - 1 + 0.35 if schedule.stages > 1 else 0.5)
    reduce = t.inner * _reduction_time(max(1.0, schedule.warps / height))
    even = turns * schedule.rows.split * height / max(t.rows, 1)
    partials = 4.0 * ctas * t.cols * t.outer_states
    held = 1.0 if schedule.hoisted else VECTOR_SHARE * t.rows / height
    l2 = 2 * partials + t.temps + held * t.vectors
    memory = t.once / _rate(in_flight, device) + l2 / device.l2_bandwidth
    issue, special = _compute(t, per_sm * schedule.warps, device, min(device.sms, ctas))
    row_issue = height * t.cols / 32 * t.slots / (min(0.22 * schedule.warps, 3.2) * device.clock)
    # Sharing an SM, CTAs hide each other's reductions; what one does between loads is what the others overlap with.
    chain = turns * (reduce + (0.0 if schedule.stages > 1 else device.latency * 0.8) + row_issue)
    us = RAMP + max(max(memory, issue, special) * even, chain)
    spilled = partials if partials > device.l2_bytes / 2 else 0.0
    return Cost(us + spilled / device.bandwidth, t.once + 2 * spilled, in_flight, _limit(memory, issue, special, chain))


def _looped(kernel: Kernel, schedule: Schedule, r: Resources, t: Traffic, device: Device) -> Cost:
    """A walk in steps: looped inner, outer, pointwise."""
    tile = tile_of(schedule)
    row_blocks = ceil(t.rows / schedule.rows.size) if isinstance(schedule.rows, Block) else 1
    col_blocks = ceil(t.cols / schedule.cols.size) if isinstance(schedule.cols, Block) else 1
    ctas = row_blocks * col_blocks * t.batch * schedule.splits
    here = min(r.ctas_per_sm, ceil(ctas / device.sms))
    sms = min(device.sms, ctas)
    step_bytes = tile.height * tile.width * t.unit
    deep = schedule.stages if schedule.stages > 1 else 1
    in_flight = here * step_bytes * (0.7 if deep == 1 else deep - 1)
    running = min(ctas, device.sms * max(r.ctas_per_sm, 1))
    walked = t.cols * tile.height if isinstance(schedule.cols, Loop) else t.rows * tile.width
    live = running * walked * t.unit / schedule.splits
    hit = min(1.0, REREAD_SHARE * device.l2_bytes / max(live, 1.0))
    dram = t.once + t.multi_phase * (1 - hit)
    partials = 8.0 * (t.outer_states or t.inner) * schedule.splits * (t.cols if isinstance(schedule.rows, Loop) else t.rows) \
        if schedule.splits > 1 else 0.0
    vectors = VECTOR_SHARE * t.vectors * (row_blocks if isinstance(schedule.cols, Loop) else 0)
    narrow = 1.0
    if isinstance(schedule.cols, Block):
        narrow = min(1.0, tile.width * t.unit / max(1, sum(1 for i in kernel.program.of(Load) if kernel.is_full[i])) / 128)
    memory = dram / (_rate(in_flight, device) * narrow * min(1.0, 1.15 * sms / device.sms)) + \
        (t.multi_phase * hit + partials + vectors + t.temps) / device.l2_bandwidth
    issue, special = _compute(t, here * schedule.warps, device, sms)
    length = t.cols if isinstance(schedule.cols, Loop) else t.rows if isinstance(schedule.rows, Loop) else 1
    step = tile.width if isinstance(schedule.cols, Loop) else tile.height
    turns = ceil(length / step / schedule.splits) if length > 1 else 1
    folds = sum(1 for f in kernel.folds if not f.block)
    rounds = ceil(ctas / (device.sms * max(r.ctas_per_sm, 1)))
    chain = rounds * (kernel.passes * (turns * (device.latency * 0.55 / deep) + device.latency) + folds * _reduction_time(schedule.warps))
    us = RAMP + max(max(memory, issue, special) * _waves(ctas, device.sms * max(r.ctas_per_sm, 1)), chain)
    return Cost(us, dram, in_flight, _limit(memory, issue, special, chain))


def _limit(memory: float, issue: float, special: float, chain: float) -> str:
    named = (("memory", memory), ("issue", issue), ("special functions", special), ("latency", chain))
    return max(named, key=lambda kv: kv[1])[0]


def join_cost(states: float, splits: int, length: int, device: Device) -> float:
    """A second kernel, spread over the card, that sums partial states."""
    return device.launch + 4.0 * states * splits * length / device.l2_bandwidth


def last_block_cost(states: float, splits: int, length: int, device: Device) -> float:
    """The alternative: the last CTA to finish reads all partial states. H200, 2026-11: 132 x 8192 fp32 took 110-123 us."""
    return 4.0 * states * splits * length / 38e3
