"""Comparing two benchmark runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onepass.__main__ import app
from onepass.measure.compare import Change, Comparison, compare
from onepass.measure.results import Anchor, Result, Run, save
from tests.support.fake_bench import norms, rows_suite

BASE = rows_suite()
FIRST, SECOND = BASE.rows[4].id, BASE.rows[5].id


def changed(by: Mapping[tuple[str, str], float], run: Run = BASE, spread: float = 0.005) -> Run:
    """A run with some of its times multiplied."""
    return replace(
        run,
        rows=tuple(
            replace(r, results={p: replace(v, us=(v.us or 0) * by.get((r.id, p), 1), spread=spread) for p, v in r.results.items()})
            for r in run.rows
        ),
    )


def verdicts(found: Comparison) -> list[tuple[str, str, str]]:
    return [(c.id, c.provider, c.verdict) for c in found.shown]


def test_equal_runs_have_no_differences() -> None:
    found = compare(BASE, BASE)
    assert not found.shown and not found.warnings and not found.status_changes and not found.got_slower
    assert found.geomean("onepass") == pytest.approx(1)
    assert "No time changed beyond noise, in 18 comparisons." in str(found)


def test_changes_beyond_noise_are_listed_worst_first() -> None:
    found = compare(
        BASE, changed({(FIRST, "onepass"): 1.03, (SECOND, "onepass"): 1.2, (FIRST, "eager"): 0.5, (SECOND, "eager"): 1.015})
    )
    assert verdicts(found) == [(SECOND, "onepass", "slower"), (FIRST, "onepass", "slower"), (FIRST, "eager", "faster")]
    assert found.got_slower
    assert found.geomean("onepass") == pytest.approx((1.03 * 1.2) ** (1 / 6), rel=1e-3)
    assert len(replace(found, show_all=True).shown) == 18


@pytest.mark.parametrize(
    ("before", "after", "noise", "verdict"),
    [
        (100, 101.9, 0.02, "same"),
        (100, 102.1, 0.02, "slower"),
        (102.1, 100, 0.02, "faster"),
        (101.9, 100, 0.02, "same"),
        (100, 105, 0.06, "same"),
        (100, 107, 0.06, "slower"),
    ],
)
def test_only_changes_beyond_noise_are_reported(before: float, after: float, noise: float, verdict: str) -> None:
    assert Change("x", "onepass", before, after, noise).verdict == verdict


def test_noise_is_the_sum_of_spreads_and_at_least_two_percent() -> None:
    slower = {(FIRST, "onepass"): 1.05}
    assert {c.noise for c in compare(changed({}, spread=0.03), changed(slower, spread=0.04)).changes} == {0.07}
    assert {c.noise for c in compare(changed({}, spread=0.001), changed(slower, spread=0.002)).changes} == {0.02}
    unknown = replace(BASE, rows=tuple(replace(r, results={"onepass": Result(us=1.0)}) for r in BASE.rows))
    assert {c.noise for c in compare(unknown, unknown).changes} == {0.02}


def test_slower_peers_are_not_regressions() -> None:
    assert not compare(BASE, changed({(FIRST, "inductor"): 2})).got_slower


def test_results_that_become_wrong_or_right_are_reported() -> None:
    broken = replace(
        BASE,
        rows=(
            *BASE.rows[:4],
            replace(BASE.rows[4], results={**BASE.rows[4].results, "onepass": Result(us=1.0, wrong="[dx] is off")}),
            BASE.rows[5],
        ),
    )
    found = compare(BASE, broken)
    changes = [(t.provider, t.before, t.after, t.broke) for t in found.status_changes]
    assert changes == [("onepass", "right", "wrong: [dx] is off", True)]
    assert found.got_slower and not found.shown
    assert "wrong: [dx] is off" in str(found)
    mended = compare(broken, BASE)
    assert not mended.got_slower and not mended.status_changes[0].broke


def test_rows_of_only_one_run_are_listed() -> None:
    found = compare(replace(BASE, rows=BASE.rows[1:]), replace(BASE, rows=BASE.rows[:-1]), ("a.json", "b.json"))
    assert found.only_before == (SECOND,) and found.only_after == (BASE.rows[0].id,)
    assert f"Only in a.json: {SECOND}" in str(found)
    nothing = compare(norms(), BASE)
    assert not nothing.changes and "nothing to compare" in str(nothing)


def test_differences_between_setups_are_reported() -> None:
    other = replace(BASE, suite="widths", card="NVIDIA A100", versions={**BASE.versions, "torch": "2.13.0", "quack": "0.6"})
    assert compare(BASE, other).warnings == (
        "the suites differ: rows, then widths",
        "the cards differ: NVIDIA H200, then NVIDIA A100",
        "quack differs: absent, then 0.6",
        "torch differs: 2.11.0, then 2.13.0",
    )
    hot = replace(BASE, anchors=tuple(Anchor(a.kind, a.bytes, a.us * 1.08) for a in BASE.anchors))
    assert compare(BASE, hot).warnings == ("the GPU itself was 8.0% slower (plain reads, copies and adds)",)
    fewer = replace(BASE, rows=tuple(replace(r, results={p: v for p, v in r.results.items() if p != "eager"}) for r in BASE.rows))
    assert compare(BASE, fewer).warnings == ("this provider is lost: eager",)


def test_rows_with_different_work_are_not_compared() -> None:
    other = replace(BASE, rows=(replace(BASE.rows[0], floor_bytes=1), *BASE.rows[1:]))
    found = compare(BASE, other)
    assert "move different bytes" in found.warnings[0]
    assert BASE.rows[0].id not in {c.id for c in found.changes}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    save(BASE, before)
    save(changed({(FIRST, "onepass"): 1.2}), after)
    return str(before), str(after)


def test_the_command(files: tuple[str, str]) -> None:
    run = CliRunner().invoke
    before, after = files
    shown = run(app, ["compare", before, after])
    assert shown.exit_code == 0 and FIRST in shown.output and "+20.0%" in shown.output and SECOND not in shown.output
    assert SECOND in run(app, ["compare", before, after, "--all"]).output
    assert run(app, ["compare", before, after, "--fail-on-slower"]).exit_code == 1
    assert run(app, ["compare", after, before, "--fail-on-slower"]).exit_code == 0


def test_the_command_as_json(files: tuple[str, str]) -> None:
    shown = CliRunner().invoke(app, ["compare", *files, "--json", "--fail-on-slower"])
    assert shown.exit_code == 1
    found = json.loads(shown.stdout)
    assert [(c["id"], c["verdict"]) for c in found["changes"]] == [(FIRST, "slower")]
    assert found["got_slower"] and found["geomean"]["eager"] == 1.0
