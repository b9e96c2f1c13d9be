"""The mutants of the campaign still apply: each changes one place of the code as it is, and names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.campaign.mutants import ROOT, changed, everything, verdict_of
from tests.campaign.mutations import Mutant

EVERY = everything()


@pytest.mark.parametrize("mutant", EVERY, ids=[m.name for m in EVERY])
def test_a_mutant_is_another_program(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert ast.dump(ast.parse(changed(mutant, text))) != ast.dump(ast.parse(text))
    assert mutant.file.startswith("onepass/") and mutant.promise and mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), f"there is no test {test}"


def test_names_tell_mutants_apart() -> None:
    assert len({m.name for m in EVERY}) == len(EVERY)
    assert len({(m.file, m.before, m.after) for m in EVERY}) == len(EVERY)


@pytest.mark.parametrize(("body", "verdict"), [("assert False", "killed"), ("pass", "survived"), ("while True: pass", "late")])
def test_tests_that_fail_kill(tmp_path: Path, body: str, verdict: str) -> None:
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    assert verdict_of(tmp_path, ("test_it.py",), 3 if verdict == "late" else 60)[0] == verdict


def test_tests_that_wait_for_ever_are_ended(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import time\n\ndef test_it():\n    time.sleep(999)\n")
    assert verdict_of(tmp_path, ("test_it.py",), stuck=3)[0] == "late"


def test_tests_that_cannot_run_kill_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import nothing_of_this_name\n")
    assert verdict_of(tmp_path, ("test_it.py",))[0] == "broken"


def test_a_line_that_is_gone_is_an_error() -> None:
    gone = Mutant("gone", "onepass/device.py", "no such line", "", "nothing", ("tests/cpu/test_ir.py",))
    with pytest.raises(ValueError, match="must be there once"):
        changed(gone, "a text")
