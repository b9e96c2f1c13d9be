"""`onepass bench` on a card: kernels are attributed to calls, a small suite is measured and resumed. No time is asserted."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

from onepass.measure.bench import Options, bench  # noqa: E402
from onepass.measure.bench_tables import tables  # noqa: E402
from onepass.measure.results import load  # noqa: E402
from onepass.measure.suites import Job, Suite  # noqa: E402
from onepass.measure.timing import Clock, Timed, anchor_calls  # noqa: E402
from onepass.tools.tables import as_text  # noqa: E402

SMALL = Suite("small", "two of a kind", (Job("rms_norm", (2048, 2048)), Job("rms_norm_backward", (4096, 1024))))


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


def test_kernels_are_counted_in_the_call_that_launched_them(clock: Clock) -> None:
    x = torch.randn(1 << 22, device="cuda")

    def two() -> None:
        x.add_(1.0)
        x.mul_(0.5)

    found = clock.times({"one": lambda: x.add_(1.0), "two": two, "none": lambda: None})
    one, both = found["one"], found["two"]
    assert isinstance(one, Timed) and isinstance(both, Timed) and not isinstance(found["none"], Timed)
    assert (one.kernels, both.kernels, one.runs) == (1, 2, 20) and both.us > one.us > 0
    assert clock.host_us(two, both) > 0


def test_anchors_run(clock: Clock) -> None:
    found = clock.times(anchor_calls(1 << 26, clock.device), 5)
    assert set(found) == {"read", "copy", "add"} and all(isinstance(t, Timed) and t.us > 0 for t in found.values())


def test_a_graph_over_rotating_buffers(clock: Clock) -> None:
    x = torch.randn(1 << 24, device="cuda")
    assert clock.graph_us(lambda t: t + 1, (x,), copies=3) > 0


def test_a_small_suite(tmp_path: Path) -> None:
    out, page = tmp_path / "small.json", Console(file=io.StringIO())
    run = bench(Options(SMALL, ("onepass", "eager", "inductor"), out, graphs=True, regret=True, max_candidates=3), page)
    assert [r.id for r in load(out).rows] == [job.id for job in SMALL.jobs] and run.anchors
    for row in run.rows:
        assert all(result.ok for result in row.results.values()), row.results
        result = row.results["onepass"]
        assert (
            result.kernels
            and result.registers
            and result.spill_bytes == 0
            and result.host_us
            and result.predicted_us
            and result.graph_us
        )
    assert [r.id for r in run.regret] == [job.id for job in SMALL.jobs]
    assert all(r.best_us <= r.picked_us and len(r.candidates) > 1 for r in run.regret)
    assert "best peer" in as_text(*tables(run))
    again = bench(Options(SMALL, ("onepass", "eager"), out), page)
    assert [r.results.keys() for r in again.rows] == [r.results.keys() for r in run.rows]  # nothing was measured again


@pytest.mark.parametrize("provider", ["inductor-nonstrict", "onepass-tuned"])
def test_other_provider_settings_run(provider: str) -> None:
    run = bench(Options(Suite("one", "one", SMALL.jobs[1:]), ("onepass", provider)), Console(file=io.StringIO()))
    assert run.rows[0].results[provider].ok, run.rows[0].results[provider]
