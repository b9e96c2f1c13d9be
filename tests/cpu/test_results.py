"""Benchmark results as values and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onepass.errors import BadResults, BadSpec
from onepass.measure import results
from onepass.measure.results import Result, Run, load, parse, row_id, save, summarize, to_json
from tests.support.fake_bench import norms, row, rows_suite


@pytest.mark.parametrize("run", [norms(), rows_suite(), replace(norms(), rows=(), anchors=(), regret=())])
def test_a_run_round_trips_through_json(run: Run) -> None:
    assert parse(json.loads(json.dumps(to_json(run), allow_nan=False))) == run


def test_the_json_contains_derived_figures() -> None:
    found = to_json(norms())
    assert found["schema"] == 2
    assert found["anchors"][0] == {"kind": "read", "bytes": 2**28, "us": 60.0, "gbps": pytest.approx(4473.9243)}
    first = found["rows"][0]
    assert first["id"] == "rms_norm_backward 131072x512 bf16"
    assert first["best_peer"] == "quack"
    assert first["against_best_peer"] == pytest.approx(1.1 / 1.06, rel=1e-3)
    assert first["results"]["onepass"]["times_floor"] == pytest.approx(1.06, rel=1e-3)
    assert first["results"]["onepass"]["gbps"] == pytest.approx(4500 / 1.06, rel=1e-3)
    assert found["regret"][0]["regret"] == pytest.approx(0.0309, rel=1e-2)
    assert found["summary"]["worst_times_floor"]["id"] == "rms_norm_backward 4096x16384 bf16"
    assert "regret" not in to_json(rows_suite())


def test_failed_and_wrong_providers_have_no_time() -> None:
    last = norms().rows[-1]
    assert last.results["liger"].us == 50.0
    assert last.us("liger") is None and last.us("quack") is None and last.us("eager") is None
    assert last.best_peer == "inductor"
    found = to_json(norms())["rows"][-1]["results"]
    assert found["liger"]["gbps"] is None and found["quack"]["us"] is None


def test_summaries_skip_what_has_no_time() -> None:
    fast = row("softmax", (4096, 4096), {"onepass": 1.0, "inductor": 2.0, "quack": 1.5})
    slow = row("softmax", (4096, 8192), {"onepass": 2.0, "eager": 1.0})
    failed = replace(fast, results={"onepass": Result(error="no plan"), "inductor": fast.results["inductor"]})
    found = summarize((fast, slow, failed))
    assert found.geomean_times_floor == pytest.approx(2**0.5, rel=0.01)
    assert found.worst_times_floor and found.worst_times_floor.id == slow.id
    assert found.geomean_against_best_peer == pytest.approx(0.75**0.5, rel=0.01)
    assert found.worst_against_best_peer and found.worst_against_best_peer.value == pytest.approx(0.5, rel=0.01)
    assert found.geomean_against_inductor == pytest.approx(2, rel=0.01)
    assert summarize(()) == results.Summary(None, None, None, None, None)


def test_a_workload_without_a_floor() -> None:
    unbounded = replace(norms().rows[0], floor_bytes=0, floor_us=0.0)
    assert unbounded.times_floor("onepass") is None
    assert summarize((unbounded,)).worst_times_floor is None


def test_row_ids() -> None:
    assert row_id("rms_norm", (8192, 4096), "bf16") == "rms_norm 8192x4096 bf16"


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    found = to_json(norms())
    change(found)
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda j: j.pop("schema"), "no field schema"),
        (lambda j: j.update(schema=3), "its schema is 3, but this onepass reads 2"),
        (lambda j: j.pop("suite"), "the run has no field suite"),
        (lambda j: j.update(date="yesterday"), "the date 'yesterday' is not in ISO form"),
        (lambda j: j.update(rows={}), "rows is an object, expected a list"),
        (lambda j: j.update(versions={"torch": 2}), "versions.torch is 2, expected a text"),
        (lambda j: j["rows"][3].update(colour="red"), r"rows\[3\] has a field colour that schema 2 does not know"),
        (lambda j: j["rows"][3]["shape"].append(1.5), r"rows\[3\].shape\[2\] is 1.5, expected a whole number"),
        (lambda j: j["rows"][3]["shape"].append(True), r"rows\[3\].shape\[2\] is True, expected a whole number"),
        (lambda j: j["rows"][3].update(floor_us=-1.0), r"rows\[3\]: a floor is 0 or more"),
        (
            lambda j: j["rows"][0]["results"]["quack"].update(us="fast"),
            r"rows\[0\].results.quack.us is the text 'fast', expected a number",
        ),
        (
            lambda j: j["rows"][0]["results"]["quack"].update(us=float("nan")),
            r"rows\[0\].results.quack.us is nan, expected a number",
        ),
        (lambda j: j["rows"][0]["results"]["quack"].update(us=0), r"rows\[0\].results.quack: a time is above 0"),
        (
            lambda j: j["rows"][0]["results"]["quack"].update(us=None),
            r"rows\[0\].results.quack: a result without a time needs a reason",
        ),
        (lambda j: j["rows"][0]["results"].update(other={"us": 1.0}), r"rows\[0\]: providers are onepass, .* not other"),
        (lambda j: j["rows"].append(j["rows"][0]), "the run: several rows have the same id"),
        (lambda j: j["anchors"][0].update(kind="write"), r"anchors\[0\]: an anchor's kind is one of read, copy, add"),
        (lambda j: j["regret"][0]["candidates"].append(7), r"regret\[0\].candidates\[4\] is 7 where an object belongs"),
    ],
)
def test_violations_of_the_schema_are_named(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(BadResults, match=message) as caught:
        parse(broken(change), "old.json")
    assert "[ONEPASS-811] old.json" in str(caught.value)


def test_older_files_may_lack_optional_fields() -> None:
    found = to_json(norms())
    del found["rows"][0]["results"]["onepass"]["host_us"], found["anchors"], found["summary"]
    assert parse(found) == replace(norms(), anchors=())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is not JSON"),
        (b"\xff\xfe{", "it is not JSON"),
        (b"[1]", "it contains a list, but a run is an object"),
        (b"null", "it contains null"),
    ],
)
def test_files_with_other_content_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(BadResults, match=message):
        load(file)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(BadResults, match="directory"):
            load(path)


def test_saving_replaces_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "h200" / "norms.json"
    save(rows_suite(), file)
    save(norms(), file)
    assert load(file) == norms()
    assert [p.name for p in file.parent.iterdir()] == ["norms.json"]
    assert file.read_text().endswith("}\n")


def test_a_file_is_synced_to_disk_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sync = tmp_path / "norms.json", os.fsync
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(file.exists()), sync(handle)))
    save(norms(), file)
    assert synced == [False]


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "norms.json"
    save(norms(), file)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BadSpec, match="No space left on device"):
        save(rows_suite(), file)
    assert load(file) == norms()
    assert list(tmp_path.iterdir()) == [file]
