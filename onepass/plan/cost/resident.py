"""Time with whole rows (or columns) on chip, in registers or shared memory, one tile of them per CTA."""

from __future__ import annotations

from math import ceil
from typing import Annotated, NamedTuple

from ..resources import tile_of
from ..schedule import SECTOR, Block
from ..traffic import Traffic
from .case import (
    SLOTS,
    Case,
    congestion,
    issue_and_special_us,
    issue_rate_one_cta,
    issue_slots,
    l1_us,
    outstanding_penalty,
    reduction_us,
    row_vector_wait_us,
    warps_along,
)
from .terms import Cost, Label, limits, soft_max


class ResidentTerms(NamedTuple):
    """A CTA waits for its loads, reduces, and issues its stores, at the speed it would have alone on the GPU. DRAM bounds all CTAs
    together.
    """

    launch: Annotated[float, Label("launch", "launch_us")]
    dram: Annotated[float, Label("DRAM", "bytes of all CTAs / bandwidth of the SMs in use")]
    waves: Annotated[float, Label("waves", "CTAs / CTAs that fit at once", factor=True)]
    first: Annotated[float, Label("CTA: first bytes", "latency")]
    fill: Annotated[float, Label("CTA: loads", "bytes of a CTA / fill_rate")]
    wait: Annotated[
        float, Label("CTA: waits", "after_reduction_wait, tile_us; if staged vector_chunk_us, unaligned_vector_chunk_us")
    ]
    reduce: Annotated[float, Label("CTA: reductions", "reduction_in_warp_us, reduction_us, reduction_warp_us")]
    math: Annotated[
        float,
        Label(
            "CTA: arithmetic", "issue slots of a CTA / issue_few_warps, issue_one_warp, issue_few_warps_staged; unoverlapped_math"
        ),
    ]
    l2: Annotated[float, Label("L2", "rows read again, partial results and vector_l2_share / L2 rate")]
    congestion: Annotated[float, Label("congestion", "congestion, congestion_from", factor=True)]
    outstanding: Annotated[
        float, Label("bytes outstanding", "outstanding_penalty, outstanding_from, outstanding_up_to, outstanding_l2", factor=True)
    ]
    least: Annotated[float, Label("DRAM at its best", "every byte once / DRAM rate")]
    issue: Annotated[float, Label("issue", "issue slots / issue_rate, warps_to_issue; " + SLOTS)]
    special: Annotated[float, Label("special functions", "operations / special_rate")]
    l1: Annotated[float, Label("L1", "bytes / l1_rate")]
    warp_fold: Annotated[float, Label("sums across warps", "warp_fold_us")]
    tma_start: Annotated[float, Label("TMA start", "tma_start_us")]
    sharpness: Annotated[float, Label("", "sharpness", hidden=True)]
    dram_sharpness: Annotated[float, Label("", "resident_sharpness", hidden=True)]

    @property
    def cta_us(self) -> float:
        """Time of one CTA alone."""
        return self.first + self.fill + self.wait + self.reduce + self.math

    @property
    def memory(self) -> float:
        """Time of all loads and stores, with CTAs in turn."""
        time = soft_max(self.dram, self.waves * self.cta_us, sharpness=self.dram_sharpness) + self.l2
        return max(time * self.congestion * self.outstanding, self.least)

    @property
    def us(self) -> float:
        """The predicted time."""
        together = soft_max(self.memory, self.issue, self.special, self.l1, sharpness=self.sharpness)
        return self.launch + together + self.warp_fold + self.tma_start

    @property
    def limits(self) -> tuple[tuple[str, float], ...]:
        """The times of the resources that work at once."""
        return limits(self.memory, self.issue, self.special, self.cta_us, self.l1)


def resident(case: Case, pieces: int, length: int, block: int) -> Cost:
    """The cost of `pieces` rows (or columns) of `length` elements, `block` of them per CTA."""
    schedule, t, device, c = case.schedule, case.t, case.device, case.c
    ctas = ceil(pieces / block)
    resident_ctas = device.sms * case.resources.ctas_per_sm
    co_resident, sms = min(case.resources.ctas_per_sm, ceil(ctas / device.sms)), min(device.sms, ctas)
    reread = 0.0 if schedule.resident | schedule.staged >= set(case.kernel.multi_phase) else t.multi_phase
    cta_bytes = block * length * t.input_bytes_per_elem
    across_rows = isinstance(schedule.rows, Block)
    folds = sum(1 for f in case.kernel.folds if not f.block)
    issue, special = issue_and_special_us(case, co_resident * schedule.warps, sms)
    record = ResidentTerms(
        launch=c.launch_us,
        dram=ctas / sms * _transfer_us(case, block, length, cta_bytes),
        waves=ceil(ctas / resident_ctas),
        first=device.latency if t.full_in else device.latency / 2,  # partial results are in L2
        fill=cta_bytes / (c.fill_rate * device.clock),
        wait=_wait_us(case),
        reduce=folds * reduction_us(warps_along(schedule, t) if across_rows else schedule.warps, c),
        math=_math_us(case, block * length),
        l2=(reread + t.temps + c.vector_l2_share * t.vectors * ctas) / device.l2_bandwidth,
        congestion=congestion(co_resident * cta_bytes, c) if schedule.staged and not schedule.sector_elems else 1.0,
        outstanding=outstanding_penalty(case) if across_rows and not schedule.staged else 1.0,
        least=t.once / device.bandwidth,
        issue=issue,
        special=special,
        l1=l1_us(case, sms),
        warp_fold=0.0 if across_rows else c.warp_fold_us * max(0, schedule.warps - 2) * ctas / sms,
        tma_start=c.tma_start_us if schedule.staged else 0.0,
        sharpness=c.sharpness,
        dram_sharpness=c.resident_sharpness,
    )
    return Cost.of(record, t.once + reread, co_resident * cta_bytes)


def _transfer_us(case: Case, block: int, length: int, cta_bytes: int) -> float:
    """Time to load and store the data of one CTA at its SM's share of the DRAM rate."""
    schedule, t = case.schedule, case.t
    sm_bandwidth = case.device.bandwidth / case.device.sms
    load = cta_bytes / sm_bandwidth
    store = block * length * (t.full_out / max(t.elements, 1)) / sm_bandwidth
    if not isinstance(schedule.rows, Block):  # every row of a short run is its own request of at least two sectors
        run = block * t.input_bytes_per_elem / case.kernel.full_loads
        load *= max(1.0, 2 * SECTOR / run)
    return load + store


def _math_us(case: Case, elements: int) -> float:
    """Time of the arithmetic of one CTA."""
    schedule, c = case.schedule, case.c
    math = elements / 32 * issue_slots(case) / (issue_rate_one_cta(schedule, c) * case.device.clock)
    hides = isinstance(schedule.rows, Block) and case.kernel.full_loads > 1 and not schedule.staged and tile_of(schedule).count > 1
    return math * c.unoverlapped_math if hides else math


def _wait_us(case: Case) -> float:
    """Time that one CTA waits for more than its first bytes."""
    schedule, t, c = case.schedule, case.t, case.c
    if schedule.staged:
        return row_vector_wait_us(case)
    return _post_reduction_wait_us(case) + c.tile_us * _tiles_in_turn(t, case)


def _post_reduction_wait_us(case: Case) -> float:
    prefetches_all = len(case.schedule.early_loads) == len(case.t.after_reduction)
    return 0.0 if prefetches_all else case.c.after_reduction_wait * case.device.latency


def _tiles_in_turn(t: Traffic, case: Case) -> int:
    """Tiles that a CTA loads in turn. Exponentials favor small tiles, with fewer live values; rows of a resident column are loaded
    all at once.
    """
    return tile_of(case.schedule).count if t.mufu == 0 and isinstance(case.schedule.rows, Block) else 1
