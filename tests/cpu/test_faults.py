"""A sample of the campaigns of faults: writing calls that fail or are a process's last, and many processes at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import run_python

# In a process of its own: they fork, which a process with threads had better not do.
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
