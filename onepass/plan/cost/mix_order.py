"""Time of both orders in one pass: a loop over rows in registers, with partial column results per CTA."""

from __future__ import annotations

from math import ceil
from typing import Annotated, NamedTuple

from ...ir.program import Load
from ..schedule import Cover, Loop, RowVectors
from .case import SLOTS, Case, congestion, issue_and_special_us, reduction_us, sustained_rate, warps_along
from .terms import Cost, Label, limits, soft_max


class MixOrderTerms(NamedTuple):
    """DRAM, instruction issue and the serial chain of one CTA's rows work at once."""

    launch: Annotated[float, Label("launch", "launch_us")]
    first: Annotated[float, Label("first rows", "latency")]
    dram: Annotated[float, Label("DRAM", "every byte once / rate that the bytes in flight sustain: tiles_in_flight_1 to _4")]
    imbalance: Annotated[float, Label("uneven rows", "rows per CTA, rounded up", factor=True)]
    congestion: Annotated[float, Label("congestion", "congestion, congestion_from", factor=True)]
    l2: Annotated[float, Label("L2", "partial results, vector_l2_share / L2 rate")]
    tiles: Annotated[float, Label("tiles of several rows", "tiles_at_once, further_tile", factor=True)]
    issue: Annotated[float, Label("issue", "issue slots / issue_rate, warps_to_issue; " + SLOTS)]
    special: Annotated[float, Label("special functions", "operations / special_rate")]
    reductions: Annotated[float, Label("chain: reductions", "reduction_in_warp_us, reduction_us, reduction_warp_us")]
    lookups: Annotated[float, Label("chain: indexed loads", "latency of each iteration")]
    warp_fold: Annotated[float, Label("sums across warps", "warp_fold_us")]
    spilled: Annotated[float, Label("partial results in DRAM", "partial results beyond partials_l2_share / DRAM rate")]
    sharpness: Annotated[float, Label("", "sharpness", hidden=True)]

    @property
    def memory(self) -> float:
        """Time of all loads and stores."""
        return self.dram * self.imbalance * self.congestion + self.l2

    @property
    def chain(self) -> float:
        """Serial time of a CTA's rows."""
        return self.reductions + self.lookups

    @property
    def us(self) -> float:
        """The predicted time."""
        times = self.memory * self.tiles, self.issue * self.imbalance, self.special, self.chain
        return self.launch + self.first + soft_max(*times, sharpness=self.sharpness) + self.warp_fold + self.spilled

    @property
    def limits(self) -> tuple[tuple[str, float], ...]:
        """The times of the resources that work at once."""
        return limits(self.memory, self.issue, self.special, self.chain)


def mix_order(case: Case) -> Cost:
    """The cost of a loop over rows in registers."""
    kernel, schedule, t, device, c = case.kernel, case.schedule, case.t, case.device, case.c
    assert isinstance(schedule.rows, Loop)
    height, ctas = schedule.rows.step, schedule.rows.split * t.batch
    per_sm = ctas / device.sms
    co_resident = min(per_sm, float(max(case.resources.ctas_per_sm, 1)))
    iterations = ceil(t.rows / (schedule.rows.split * height))
    tiles_in_flight = (c.tiles_in_flight_1, c.tiles_in_flight_2, c.tiles_in_flight_3, c.tiles_in_flight_4)
    in_flight = co_resident * height * t.cols * t.input_bytes_per_elem * tiles_in_flight[min(schedule.stages, 4) - 1]
    partials = 4.0 * ctas * t.cols * t.outer_states
    vector_loads = 1.0 if schedule.row_vectors is RowVectors.REGISTERS else c.vector_l2_share * t.rows / height
    prefetched = co_resident * height * t.cols * t.input_bytes_per_elem * (schedule.stages - 1)
    issue, special = issue_and_special_us(case, co_resident * schedule.warps, min(device.sms, ctas))
    spilled = partials if partials > device.l2_bytes * c.partials_l2_share else 0.0
    record = MixOrderTerms(
        launch=c.launch_us,
        first=device.latency,  # the wait for the first iteration is not hidden
        dram=t.once / sustained_rate(in_flight, device),
        imbalance=iterations * schedule.rows.split * height / max(t.rows, 1),
        congestion=congestion(prefetched, c),
        l2=(2 * partials + t.temps + vector_loads * t.vectors) / device.l2_bandwidth,
        tiles=_tile_penalty(case),
        issue=issue,
        special=special,
        # CTAs on the same SM hide each other's reductions.
        reductions=iterations * _exchanges_us(case) / max(1.0, co_resident) * per_sm / co_resident,
        # An indexed load waits for its index in every iteration, and no pipeline prefetches it.
        lookups=iterations * device.latency * any(n.indexed for n in kernel.program.nodes if isinstance(n, Load)),
        warp_fold=0.0 if _folds_within_warps(case) else c.warp_fold_us * max(0, schedule.warps - 2) * per_sm * t.outer_states,
        spilled=spilled / device.bandwidth,
        sharpness=c.sharpness,
    )
    return Cost.of(record, t.once + 2 * spilled, in_flight)


def _tiles(case: Case) -> tuple[int, ...]:
    return case.schedule.cols.tiles if isinstance(case.schedule.cols, Cover) else ()


def _exchanges_us(case: Case) -> float:
    """Time of one iteration's reductions.

    Tiles of equal width are added before threads exchange anything; each other width is exchanged separately.
    """
    schedule, t, c = case.schedule, case.t, case.c
    return t.inner_folds * len(set(_tiles(case))) * reduction_us(warps_along(schedule, t), c)


def _tile_penalty(case: Case) -> float:
    """Slowdown of several rows at once in several tiles."""
    tiles, height = _tiles(case), case.schedule.rows.step if isinstance(case.schedule.rows, Loop) else 1
    return 1.0 if len(tiles) == 1 or height == 1 else case.c.tiles_at_once + case.c.further_tile * len(tiles)


def _folds_within_warps(case: Case) -> bool:
    """Whether no two warps hold states of the same column."""
    schedule = case.schedule
    one_row = isinstance(schedule.rows, Loop) and schedule.rows.step == 1
    return len(_tiles(case)) == 1 and warps_along(schedule, case.t) >= schedule.warps or one_row
