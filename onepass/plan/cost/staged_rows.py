"""Time with whole rows in shared memory: each CTA loops over rows while further rows arrive in its ring."""

from __future__ import annotations

from math import ceil, exp
from typing import Annotated, NamedTuple

from ..schedule import Cover, Loop
from ..staged_rows import TMA_BOX, Chunks, prefetched_columns
from .case import SLOTS, Case, issue_and_special_us, issue_rate_one_cta, issue_slots, l1_us, reduction_us, row_vector_wait_us
from .terms import Cost, Label, limits, soft_max


class StagedRowsTerms(NamedTuple):
    """A ring slot is requested, filled, read and freed again. A CTA has as many rows or copies in flight as its ring has slots, but
    reads one at a time. With a single slot it waits for each row, as resident rows do. If CTAs share rows, each handles its part of
    the columns.
    """

    launch: Annotated[float, Label("launch", "launch_us")]
    first: Annotated[float, Label("first row", "latency, bytes of a row / bandwidth of an SM")]
    rows: Annotated[float, Label("rows per CTA", "rows / CTAs", factor=True)]
    transfer: Annotated[float, Label("row: transfer", "bytes of a row, in and out / bandwidth of an SM")]
    static_rows: Annotated[float, Label("static rows", "static_rows_penalty", factor=True)]
    reduce: Annotated[float, Label("row: reductions", "reduction_in_warp_us, reduction_us, reduction_warp_us")]
    math: Annotated[float, Label("row: arithmetic", "issue slots of a row / issue_few_warps_staged, issue_one_warp")]
    vector_wait: Annotated[float, Label("row: row vectors", "vector_chunk_us, unaligned_vector_chunk_us")]
    refill: Annotated[float, Label("row: ring slot", "slot_refill_us")]
    arrival: Annotated[float, Label("row: arrival", "latency, bytes of a row / fill_rate")]
    slots: Annotated[float, Label("", "ring slots", hidden=True)]
    l2: Annotated[float, Label("L2", "rows read again, partial results, vector_l2_share / L2 rate")]
    least: Annotated[float, Label("DRAM at its best", "every byte once / DRAM rate")]
    issue: Annotated[
        float,
        Label(
            "issue",
            "issue slots / issue_rate, warps_to_issue; with column sums warps_to_issue_unrolled, vector_reload_us; " + SLOTS,
        ),
    ]
    special: Annotated[float, Label("special functions", "operations / special_rate")]
    imbalance: Annotated[float, Label("uneven rows", "rows per CTA, rounded up", factor=True)]
    l1: Annotated[float, Label("L1", "bytes / l1_rate")]
    spilled: Annotated[float, Label("partial results in DRAM", "partial results beyond partials_l2_share / DRAM rate")]
    exposed: Annotated[float, Label("unhidden loads", "extra_copy_us, unstaged_load_us")]
    exchange: Annotated[float, Label("exchange between CTAs", "mailbox_clear_us, cta_exchange_us")]
    sharpness: Annotated[float, Label("", "sharpness", hidden=True)]

    @property
    def row_us(self) -> float:
        """Time of one row in one CTA, without its transfer."""
        return self.reduce + self.math + self.vector_wait + self.refill

    @property
    def memory(self) -> float:
        """Time of all loads and stores, with the rows of a CTA in turn."""
        arrival = (self.arrival + self.row_us) / self.slots
        row = soft_max(self.transfer * self.static_rows, self.row_us, arrival, sharpness=self.sharpness)
        return max(self.rows * row + self.l2, self.least * self.static_rows)

    @property
    def us(self) -> float:
        """The predicted time."""
        together = soft_max(self.memory, self.issue, self.special * self.imbalance, self.l1, sharpness=self.sharpness)
        return self.launch + self.first + together + self.spilled + self.exposed + self.exchange

    @property
    def limits(self) -> tuple[tuple[str, float], ...]:
        """The times of the resources that work at once."""
        return limits(self.memory, self.issue, self.special, self.rows * self.row_us, self.l1)


def staged_rows(case: Case) -> Cost:
    """The cost of a loop over staged rows."""
    kernel, schedule, t, device, c = case.kernel, case.schedule, case.t, case.device, case.c
    assert isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Cover)
    groups = min(schedule.rows.split, max(t.rows, 1))
    ctas, cols = groups * schedule.ctas_per_row, t.cols // schedule.ctas_per_row
    sms, rows_per_cta = min(device.sms, ctas), ceil(t.rows / groups)
    co_resident, imbalance = ctas / sms, rows_per_cta * groups / max(t.rows, 1)
    sm_bandwidth, row = device.bandwidth / device.sms, float(cols * t.input_bytes_per_elem)
    unstaged = [i for i in kernel.multi_phase if i not in schedule.staged]
    reread = sum(kernel.program.dtypes[i].size * (len(kernel.use_phases(i)) - 1) for i in unstaged) * t.elements
    ring_rows = schedule.stages + prefetched_columns(schedule.cols, schedule.prefetch) / cols
    partials = 4.0 * schedule.rows.split * t.cols * t.outer_states
    spilled = partials if partials > device.l2_bytes * c.partials_l2_share else 0.0
    vectors = (c.vector_l2_share * t.rows if schedule.reloads_vectors else 1.0) * t.vectors
    issue, special = issue_and_special_us(case, co_resident * schedule.warps, sms)
    both = schedule.accumulates_columns
    record = StagedRowsTerms(
        launch=c.launch_us,
        first=device.latency + row / sm_bandwidth,
        rows=rows_per_cta,
        transfer=co_resident * (row + cols * t.full_out / max(t.elements, 1.0)) / sm_bandwidth,
        static_rows=1 + c.static_rows_penalty * t.full_out / max(t.full_in + t.full_out, 1.0) / (co_resident if both else 1.0),
        reduce=t.inner_folds * reduction_us(schedule.warps, c),
        # Walks that accumulate columns are counted in `issue`.
        math=0.0 if both else cols / 32 * issue_slots(case) / (issue_rate_one_cta(schedule, c) * device.clock),
        vector_wait=row_vector_wait_us(case),
        refill=c.slot_refill_us,
        arrival=device.latency + row / (c.fill_rate * device.clock),
        # If CTAs share a row, one slot waits for the last walk while another is in the first.
        slots=ring_rows - (1 if schedule.ctas_per_row > 1 else 0),
        l2=(reread + 2 * partials + t.temps + vectors) / device.l2_bandwidth,
        least=t.once / device.bandwidth,
        issue=rows_per_cta * _unrolled_walk_us(case, cols, co_resident) if both else issue * imbalance,
        special=special,
        imbalance=imbalance,
        l1=l1_us(case, sms) + t.full_in * kernel.full_walks / (c.l1_rate * sms * device.clock),
        spilled=spilled / device.bandwidth,
        exposed=rows_per_cta * _exposed_per_row_us(case) if both else 0.0,
        exchange=_exchange_us(case, rows_per_cta),
        sharpness=c.sharpness,
    )
    return Cost.of(record, t.once + reread + 2 * spilled, co_resident * row * max(ring_rows - 1, c.one_slot_in_flight))


def _exchange_us(case: Case, rows_per_cta: int) -> float:
    """Time that CTAs which share rows take for their mailboxes and wait for each other."""
    schedule, c = case.schedule, case.c
    if schedule.ctas_per_row == 1:
        return 0.0
    return float(c.mailbox_clear_us + rows_per_cta * c.cta_exchange_us * schedule.ctas_per_row**1.5 * schedule.warps)


def _unrolled_walk_us(case: Case, cols: int, co_resident: float) -> float:
    """Time per row of the CTAs on an SM for walks that accumulate columns, including reloads of row vectors."""
    schedule, c = case.schedule, case.c
    full = c.warps_to_issue_unrolled if schedule.ctas_per_row > 1 else c.warps_to_issue
    rate = c.issue_rate * (1 - exp(-co_resident * schedule.warps / full))
    reloads = case.t.vectors and schedule.reloads_vectors
    reload = c.vector_reload_us * cols / (32 * schedule.warps) if reloads else 0.0
    return co_resident * cols / 32 * issue_slots(case) / (rate * case.device.clock) + reload


def _exposed_per_row_us(case: Case) -> float:
    """Unhidden time per row of CTAs that accumulate columns: full-size tensors that are not staged, rows in many copies."""
    schedule, c = case.schedule, case.c
    assert isinstance(schedule.cols, Cover)
    pieces = Chunks(schedule.cols.tiles[0], len(schedule.cols.tiles), 0)
    copies = (pieces.count // pieces.chunks_per_box(TMA_BOX) - 1) * len(schedule.staged)
    return c.extra_copy_us * copies + c.unstaged_load_us * pieces.count * (len(schedule.staged) < case.kernel.full_loads)
