"""The data file of constants: its contents, and that code and file cannot drift apart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from onepass.constants import SHIPPED, SHIPPED_FILE, BadConstants, load, read, text_of, with_values

ROOT = Path(__file__).resolve().parents[2]
ONEPASS = "\n".join(p.read_text() for p in (ROOT / "onepass").rglob("*.py") if "constants" not in p.parts)


def test_the_file_round_trips() -> None:
    assert text_of(*read()) == SHIPPED_FILE.read_text()
    assert load() == SHIPPED and SHIPPED.device == "h200"


def test_every_constant_states_its_meaning_and_basis() -> None:
    _, entries = read()
    for section, found in entries.items():
        for name, entry in found.items():
            assert entry.meaning and entry.unit and entry.scales_with, f"{section}.{name}"
            missing = [f for f in entry.data if not (ROOT / "bench/results" / SHIPPED.device / f).is_file()]
            assert not missing, f"{section}.{name} was fitted to {missing}, which is not there"


def test_every_constant_is_used() -> None:
    unused = [
        f"{part.name}.{f.name}"
        for part in fields(SHIPPED)
        if part.name != "device"
        for f in fields(getattr(SHIPPED, part.name))
        if not re.search(rf"\.{f.name}\b", ONEPASS)
    ]
    assert not unused


def test_replacing_values_keeps_everything_else() -> None:
    device, entries = read()
    changed = with_values(entries, "cost", {"tile_us": 0.5})
    assert changed["cost"]["tile_us"].value == 0.5 and changed["cost"]["tile_us"].meaning == entries["cost"]["tile_us"].meaning
    assert [k for k, v in changed["cost"].items() if v != entries["cost"][k]] == ["tile_us"]
    assert text_of(device, changed) != text_of(device, entries)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda j: j["cost"].pop("tile_us"), "missing tile_us"),
        (lambda j: j["cost"].update(tail_us=j["cost"]["tile_us"]), "unknown tail_us"),
        (lambda j: j.pop("floor"), "missing floor"),
        (lambda j: j["cost"]["tile_us"].update(value="0.15"), "not a number"),
        (lambda j: j["cost"]["tile_us"].update(value=True), "not a number"),
        (lambda j: j["cost"]["tile_us"].update(value=float("inf")), "not a number"),
        (lambda j: j["inductor"]["resident_cols"].update(value=1024.5), "number of type int"),
        (lambda j: j["cost"]["tile_us"].pop("unit"), "has the fields"),
        (lambda j: j["cost"]["tile_us"].update(basis="guessed"), "'guessed'"),
        (lambda j: j["cost"]["tile_us"].update(basis="assumed"), "does not go with its data"),
        (lambda j: j["cost"]["tile_us"].update(data=[]), "does not go with its data"),
    ],
)
def test_a_file_that_does_not_fit_the_code_is_refused(tmp_path: Path, change: Callable[[Any], Any], says: str) -> None:
    raw = json.loads(SHIPPED_FILE.read_text())
    change(raw)
    (tmp_path / "other.json").write_text(json.dumps(raw))
    with pytest.raises(BadConstants, match=says):
        load(tmp_path / "other.json")


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{")
    with pytest.raises(BadConstants):
        load(tmp_path / "other.json")
