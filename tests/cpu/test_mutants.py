"""The mutants of the campaign still apply: each changes one place of the present code, and names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.campaign.mutants import ROOT, all_mutants, mutated, verdict_of
from tests.campaign.mutations import Mutant
from tests.support.processes import run_python

EVERY = all_mutants()
COLLECT = "import sys, pytest; sys.exit(pytest.main([*sys.argv[1:], '--collect-only', '-m', '', '-p', 'no:cacheprovider']))"


@pytest.mark.parametrize("mutant", EVERY, ids=[m.name for m in EVERY])
def test_a_mutant_applies_and_names_existing_tests(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert ast.dump(ast.parse(mutated(mutant, text))) != ast.dump(ast.parse(text))
    assert mutant.file.startswith("onepass/") and mutant.promise and mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), f"there is no test {test}"


def not_collected(tests: set[str]) -> set[str]:
    """The tests, named with their parameters, that pytest does not find. A mutant that names one would run nothing."""
    done = run_python(COLLECT, *sorted({test.partition("::")[0] for test in tests}), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return tests - set(done.stdout.splitlines())


def test_tests_that_are_named_with_parameters_exist() -> None:
    named = {test for mutant in EVERY for test in mutant.tests if "[" in test}
    made_up = {test.replace("[", "[0-") for test in named}
    assert named and not_collected(named | made_up) == made_up


def test_mutants_have_unique_names() -> None:
    assert len({m.name for m in EVERY}) == len(EVERY)
    assert len({(m.file, m.before, m.after) for m in EVERY}) == len(EVERY)


@pytest.mark.parametrize(("body", "verdict"), [("assert False", "killed"), ("pass", "survived"), ("while True: pass", "late")])
def test_the_verdict_follows_from_the_tests(tmp_path: Path, body: str, verdict: str) -> None:
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    assert verdict_of(tmp_path, ("test_it.py",), 3 if verdict == "late" else 60)[0] == verdict


def test_tests_that_hang_are_killed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import time\n\ndef test_it():\n    time.sleep(999)\n")
    assert verdict_of(tmp_path, ("test_it.py",), stuck=3)[0] == "late"


def test_tests_that_cannot_run_do_not_kill_a_mutant(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import nothing_of_this_name\n")
    assert verdict_of(tmp_path, ("test_it.py",))[0] == "broken"


def test_a_missing_line_is_an_error() -> None:
    gone = Mutant("gone", "onepass/device.py", "no such line", "", "nothing", ("tests/cpu/test_ir.py",))
    with pytest.raises(ValueError, match="must be there once"):
        mutated(gone, "a text")
