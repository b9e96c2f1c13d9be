"""A sample of the fault campaigns: system calls that fail or are a process's last, many processes at once, Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import run_python

# In a separate process: they fork, which a process with threads should not do.
CAMPAIGN = """
import sys
from tests.campaign import {name}
sys.argv[1:] = {arguments}
sys.exit({name}.main())
"""


@pytest.mark.parametrize(("name", "arguments"), [("writes", ["--step", "167"]), ("crowd", ["--count", "6"])])
def test_a_sample_of_faults_finds_nothing(name: str, arguments: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = run_python(CAMPAIGN.format(name=name, arguments=[*arguments, "--log", str(log)]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(log.read_text().splitlines()) >= 2


def test_a_sample_of_interruptions_finds_nothing(tmp_path: Path) -> None:
    """Two interruptions of a session that plans and compiles, and goes on: a seed whose first two are of the cheapest kind."""
    log = tmp_path / "log"
    done = run_python(CAMPAIGN.format(name="interrupts", arguments=["--count", "2", "--seed", "273", "--log", str(log)]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["kind"] for line in log.read_text().splitlines()] == ["explaining --go-on"] * 2
