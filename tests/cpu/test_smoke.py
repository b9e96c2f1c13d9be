"""The contents of `pytest tests/gpu --smoke`: collected here, with its checks run on interpreted kernels."""

from __future__ import annotations

from functools import cache

import pytest

from tests.campaign import checks, defects
from tests.support.family_cells import cells
from tests.support.processes import ROOT, run_python

COLLECT = "import sys, pytest; sys.exit(pytest.main(['tests/gpu', '--collect-only', '-p', 'no:cacheprovider', *sys.argv[1:]]))"


@cache
def collected(*options: str) -> frozenset[str]:
    """The ids of the tests in a run with these options."""
    done = run_python(COLLECT, *options, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return frozenset(line for line in done.stdout.splitlines() if "::" in line)


def ids_in(ids: frozenset[str], file: str) -> set[str]:
    return {name.split("::", 1)[1] for name in ids if name.startswith(f"tests/gpu/{file}.py::")}


@pytest.mark.parametrize("family,kind", cells())
def test_each_family_runs_with_each_class_of_types(family: str, kind: str) -> None:
    assert f"test_right_under_schedules_of_each_family[{family}-{kind}]" in ids_in(collected("--smoke"), "test_families")


@pytest.mark.parametrize(
    "file,least,most",
    [
        ("test_launch", 10, 30),
        ("test_inplace", 5, 5),
        ("test_models", 1, 1),
        ("test_tune", 1, 1),
        ("test_determinism", 11, 11),
        ("test_campaign", 4, 4),
        ("test_system", 2, 2),
        ("test_right", 0, 0),
    ],
)
def test_the_smoke_tests_include_the_other_files(file: str, least: int, most: int) -> None:
    assert least <= len(ids_in(collected("--smoke"), file)) <= most


def test_without_the_option_all_tests_run() -> None:
    everything = collected()
    assert collected("--smoke") < everything and len(ids_in(everything, "test_determinism")) > 200
    assert len(ids_in(everything, "test_campaign")) == 160


def test_random_functions_are_checked() -> None:
    assert defects.defects("interpret", range(defects.FIRST, defects.FIRST + 3)) == []


def test_a_random_function_that_is_wrong_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = checks.Finding(7, "wrong", "output 0: all of it")
    monkeypatch.setattr(defects, "check", lambda graph, stage: wrong if graph.seed == 7 else checks.Finding(graph.seed, "slow"))
    (defect,) = defects.defects("card", range(6, 9))
    assert "output 0: all of it" in defect and "def f(" in defect
