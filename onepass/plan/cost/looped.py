"""Time of a walk in steps: looped inner, outer, pointwise."""

from __future__ import annotations

from math import ceil
from typing import Annotated, NamedTuple

from ..resources import tile_of
from ..schedule import Block, Loop
from .case import SLOTS, Case, issue_and_special_us, merges_per_tile, narrow_tile_penalty, reduction_us, sustained_rate
from .terms import Cost, Label, limits, soft_max

STAGED_LINE, LOADED_LINE = 64, 128  # bytes of a row that load at the full rate: by TMA, and otherwise


class LoopedTerms(NamedTuple):
    """DRAM, L2, instruction issue and the serial chain of a CTA's steps work at once."""

    launch: Annotated[float, Label("launch", "launch_us")]
    dram: Annotated[
        float,
        Label(
            "DRAM",
            "bytes / rate that the bytes in flight sustain: walk_tiles_in_flight, "
            "merging_tiles_in_flight, reread_all_hits, reread_no_hits, sm_rate_share",
        ),
    ]
    narrow: Annotated[float, Label("narrow tiles", "narrow_read, narrow_read_split, narrow_write, one_line_write", factor=True)]
    rereads: Annotated[float, Label("L2: rows read again", "bytes that hit / L2 rate")]
    l2: Annotated[float, Label("L2: partial results, row vectors", "vector_l2_share / L2 rate")]
    turnaround: Annotated[float, Label("between rows", "row_turnaround_us, merge_turnaround_us, unaligned_edge_us", factor=True)]
    issue: Annotated[float, Label("issue", "issue slots / issue_rate, warps_to_issue; " + SLOTS)]
    special: Annotated[float, Label("special functions", "operations / special_rate")]
    waves: Annotated[float, Label("waves", "CTAs / CTAs that fit at once", factor=True)]
    walk: Annotated[float, Label("CTA: loads", "latency, fill_rate, unpipelined_wait, pipeline_start_us")]
    exchanges: Annotated[float, Label("CTA: reductions", "reduction_in_warp_us, reduction_us, reduction_warp_us")]
    warp_fold: Annotated[float, Label("sums across warps", "warp_fold_us")]
    ring: Annotated[float, Label("ring of tiles", "ring_slot_us")]
    sharpness: Annotated[float, Label("", "sharpness", hidden=True)]

    @property
    def memory(self) -> float:
        """Time of all loads and stores. Re-reads come from L2 while other CTAs' rows come from DRAM."""
        return (soft_max(self.dram * self.narrow, self.rereads, sharpness=self.sharpness) + self.l2) * self.turnaround

    @property
    def chain(self) -> float:
        """Serial time of CTAs in turn."""
        return self.waves * (self.walk + self.exchanges)

    @property
    def us(self) -> float:
        """The predicted time."""
        together = soft_max(self.memory, self.issue, self.special, self.chain, sharpness=self.sharpness)
        return self.launch + together + self.warp_fold + self.ring

    @property
    def limits(self) -> tuple[tuple[str, float], ...]:
        """The times of the resources that work at once."""
        return limits(self.memory, self.issue, self.special, self.chain)


class Walk(NamedTuple):
    """How a walk fills the GPU."""

    row_blocks: int
    ctas: int
    resident_ctas: int  # that fit on the GPU at once
    co_resident: int
    sms: int
    walked: int  # elements of a CTA's tile along the whole walk


def looped(case: Case) -> Cost:
    """The cost of a walk in steps."""
    kernel, schedule, t, device, c = case.kernel, case.schedule, case.t, case.device, case.c
    w = _walk(case)
    over_cols, over_rows = isinstance(schedule.cols, Loop), isinstance(schedule.rows, Loop)
    in_flight = _in_flight(case, w)
    live = min(w.ctas, w.resident_ctas) * w.walked * t.input_bytes_per_elem / schedule.splits
    hit = min(1.0, max(0.0, (c.reread_no_hits - live / device.l2_bytes) / (c.reread_no_hits - c.reread_all_hits)))
    dram = t.once + t.multi_phase * (1 - hit)
    rate = sustained_rate(in_flight, device) * _line_use(case) * min(1.0, c.sm_rate_share * w.sms / device.sms)
    issue, special = issue_and_special_us(case, w.co_resident * schedule.warps, w.sms)
    walk, exchanges = _cta_us(case)
    record = LoopedTerms(
        launch=c.launch_us,
        dram=dram / rate,
        narrow=narrow_tile_penalty(case),
        rereads=(t.full_in + t.multi_phase * hit) / device.l2_bandwidth if t.multi_phase else 0.0,
        l2=_l2_bytes(case, w) / device.l2_bandwidth,
        turnaround=_turnaround(case, w) if over_cols else 1.0,
        issue=issue,
        special=special,
        waves=ceil(w.ctas / w.resident_ctas),
        walk=walk,
        exchanges=exchanges,
        warp_fold=c.warp_fold_us * max(0, schedule.warps - 2) * w.ctas / w.sms if over_rows and kernel.folds else 0.0,
        ring=c.ring_slot_us * schedule.stages if schedule.staged else 0.0,
        sharpness=c.sharpness,
    )
    return Cost.of(record, dram, in_flight)


def _walk(case: Case) -> Walk:
    schedule, t, device, fit = case.schedule, case.t, case.device, case.resources.ctas_per_sm
    tile = tile_of(schedule)
    row_blocks = ceil(t.rows / schedule.rows.size) if isinstance(schedule.rows, Block) else 1
    col_blocks = ceil(t.cols / schedule.cols.size) if isinstance(schedule.cols, Block) else 1
    ctas = row_blocks * col_blocks * t.batch * schedule.splits
    walked = t.cols * tile.height if isinstance(schedule.cols, Loop) else t.rows * tile.width
    return Walk(row_blocks, ctas, device.sms * max(fit, 1), min(fit, ceil(ctas / device.sms)), min(device.sms, ctas), walked)


def _in_flight(case: Case, w: Walk) -> float:
    """Bytes in flight per SM. Slots of a ring are refilled as soon as they are read, so the whole ring is in flight. Without
    exchanges, threads go on to their next loads.
    """
    schedule, c, tile = case.schedule, case.c, tile_of(case.schedule)
    unpipelined = c.merging_tiles_in_flight if merges_per_tile(case.kernel, schedule) else c.walk_tiles_in_flight
    tiles = schedule.stages if schedule.staged else unpipelined if schedule.stages == 1 else schedule.stages - 1
    return w.co_resident * tile.height * tile.width * case.t.input_bytes_per_elem * tiles


def _line_use(case: Case) -> float:
    """The share of the DRAM rate at which rows as narrow as a tile load."""
    if not isinstance(case.schedule.cols, Block):
        return 1.0
    full_line = (STAGED_LINE if case.schedule.staged else LOADED_LINE) * case.kernel.full_loads
    return min(1.0, tile_of(case.schedule).width * case.t.input_bytes_per_elem / full_line)


def _l2_bytes(case: Case, w: Walk) -> float:
    """Bytes of partial results, of row vectors that reach L2 again, and of other kernels' results."""
    schedule, t = case.schedule, case.t
    length = t.cols if isinstance(schedule.rows, Loop) else t.rows
    partials = 8.0 * max(t.outer_states, t.inner_folds) * schedule.splits * length if schedule.splits > 1 else 0.0
    vectors = case.c.vector_l2_share * t.vectors * (w.row_blocks if isinstance(schedule.cols, Loop) else 0)
    return partials + vectors + t.temps


def _turnaround(case: Case, w: Walk) -> float:
    """Slowdown by the time a CTA spends between two rows that it walks, which CTAs on the same SM hide."""
    c, device = case.c, case.device
    if not case.kernel.folds:
        return 1.0
    row = w.walked * case.t.input_bytes_per_elem / case.schedule.splits * device.sms / device.bandwidth
    edges = c.unaligned_edge_us if case.schedule.sector_elems else 0.0
    turnaround = c.row_turnaround_us + c.merge_turnaround_us * case.t.composite_folds + edges
    return 1 + turnaround / max(w.co_resident * row, turnaround)


def _cta_us(case: Case) -> tuple[float, float]:
    """Time of one CTA's loads, and of its reductions, without contention."""
    kernel, schedule, t, device, c = case.kernel, case.schedule, case.t, case.device, case.c
    tile = tile_of(schedule)
    match schedule.rows, schedule.cols:
        case _, Loop(step, split):
            steps = ceil(t.cols / (step * split))
        case Loop(step, split), _:
            steps = ceil(t.rows / (step * split))
        case _:
            steps = 1
    merges = merges_per_tile(kernel, schedule)
    folds = sum(1 for f in kernel.folds if not f.block)
    across = max(1.0, schedule.warps / tile.height) if isinstance(schedule.cols, Loop) else schedule.warps
    step_wait = device.latency * c.unpipelined_wait if schedule.stages == 1 else 0.0
    fill = tile.height * tile.width * t.input_bytes_per_elem / (c.fill_rate * device.clock)
    walk = fill + (steps - 1) * max(step_wait, fill) + device.latency + (c.pipeline_start_us if schedule.stages > 1 else 0.0)
    return kernel.full_walks * walk, (steps * merges + folds) * reduction_us(across, c)
