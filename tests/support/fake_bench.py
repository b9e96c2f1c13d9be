"""Made-up benchmark runs: plausible figures, a small suite, and a clock that returns them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onepass.device import device
from onepass.errors import NotMeasured
from onepass.measure.bench import Machine
from onepass.measure.results import Anchor, Candidate, Regret, Result, Row, Run, row_id
from onepass.measure.schedule_record import ScheduleRecord
from onepass.measure.suites import Job, Suite
from onepass.measure.timing import Call, Timed

BANDWIDTH = 4500.0  # GB/s
VERSIONS = {"torch": "2.11.0", "triton": "3.6.0", "onepass": "0.1.0", "python": "3.12.3"}

SMALL = Suite(
    "small",
    "a few small ones",
    (Job("rms_norm", (8, 64)), Job("rms_norm_backward", (16, 64), "f32"), Job("outer_sum_2", (32, 16), "f32")),
)
PLACE = Machine(device("h200"), "a card", {"torch": "2.11", "onepass": "0"}, torch.device("cpu"))


class FakeClock:
    """Runs every call and returns predefined times."""

    device = torch.device("cpu")

    def __init__(self, us: Mapping[str, float] | None = None) -> None:
        self.us, self.sessions = us or {}, list[tuple[str, ...]]()

    def synchronize(self) -> None: ...

    def times(self, calls: Mapping[str, Call], most: int = 20) -> dict[str, Timed | NotMeasured]:
        self.sessions.append(tuple(calls))
        for call in calls.values():
            call()
        return {name: Timed(self.us.get(name, 5.0), 0.01, most, 1) for name in calls}

    def host_us(self, call: Call, of: Timed) -> float:
        return 3.0

    def graph_us(self, function: Callable[..., Any], inputs: Sequence[Tensor], copies: int) -> float:
        return 6.0


def six(value: float) -> float:
    """A value rounded to six digits, as in files."""
    return float(f"{value:.6g}")


def row(workload: str, shape: tuple[int, ...], times: dict[str, float], tensors: int = 3, dtype: str = "bf16") -> Row:
    """A row whose providers take `times` times the floor."""
    elements = 1
    for n in shape:
        elements *= n
    floor_bytes = elements * 2 * tensors
    floor_us = floor_bytes / BANDWIDTH / 1e3
    results = {
        p: Result(
            us=six(floor_us * t),
            spread=0.01,
            runs=20,
            kernels=1,
            registers=64,
            spill_bytes=0,
            predicted_us=six(floor_us * (t + 1) / 2) if p == "onepass" else None,
        )
        for p, t in times.items()
    }
    return Row(workload, shape, dtype, row_id(workload, shape, dtype), floor_bytes, six(floor_us), results)


def norms() -> Run:
    """A suite of three workloads at several widths, and one at a single size where a peer fails."""
    rows = []
    for i, n in enumerate((512, 1024, 2048, 4096, 5120, 8192, 16384)):
        m = 2**26 // n
        rows += [
            row(
                "rms_norm_backward",
                (m, n),
                {
                    "onepass": 1.06 + 0.01 * i,
                    "onepass-tuned": 1.05 + 0.008 * i,
                    "eager": 2.7,
                    "inductor": 1.3 + 0.2 * i,
                    "inductor-nonstrict": 1.3 + 0.12 * i,
                    "liger": 1.2 + 4 / (1 + i),
                    "quack": 1.1 + 0.05 * i,
                },
            ),
            row("rms_norm", (m, n), {"onepass": 1.02, "eager": 1.7, "inductor": 1.05 + 0.03 * i, "quack": 1.08}, tensors=2),
        ]
    single = row("layer_norm_backward", (8192, 8192), {"onepass": 1.1, "inductor": 2.6})
    rows.append(
        replace(
            single,
            results={
                **single.results,
                "quack": Result(error="N must be even"),
                "liger": replace(single.results["onepass"], us=50.0, wrong="dw is off by 3"),
            },
        )
    )
    return Run(
        "norms",
        "2026-01-31T12:00:00",
        "NVIDIA H200",
        "h200",
        VERSIONS,
        (Anchor("read", 2**28, 60.0), Anchor("copy", 2**29, 124.0), Anchor("add", 3 * 2**28, 180.0)),
        tuple(rows),
        (regret(rows[0]), regret(rows[-1])),
    )


def rows_suite() -> Run:
    """One workload from one row to many."""
    rows = tuple(
        row("softmax", (m, 4096), {"onepass": 1.03 + 40 / m, "inductor": 1.4 + 60 / m, "eager": 3.0 + 90 / m}, tensors=2)
        for m in (1, 16, 256, 4096, 16384, 131072)
    )
    return replace(norms(), suite="rows", rows=rows, regret=())


def regret(of: Row) -> Regret:
    """A workload whose second candidate would have been a little faster."""
    us = of.us("onepass") or 1.0
    return Regret(
        of.id,
        us,
        six(us * 0.97),
        us,
        (
            Candidate((ScheduleRecord("mix-order", (4,), (4096,), 8, 264),), "mix-order", us, us, 127, 0),
            Candidate((ScheduleRecord("mix-order", (2,), (4096,), 8, 264),), "mix-order", six(us * 1.1), six(us * 0.97), 96, 0),
            Candidate((ScheduleRecord("mix-order", (8,), (4096,), 4, 264),), "mix-order", six(us * 1.2), six(us * 1.5), 255, 64),
            Candidate((ScheduleRecord("inner looped", (1,), (4096,), 4, 1),), "inner looped", six(us * 2.2), None),
        ),
    )
