"""Shared by the tests that need no card: a store of their own, which leaves with them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(tempfile.mkdtemp(prefix="onepass-tests-"))
# Binaries take the time and follow from their text alone: they stay from run to run.
BINARIES = Path(__file__).resolve().parents[2] / ".pytest_cache" / "triton"
BINARIES.mkdir(parents=True, exist_ok=True)
(FOLDER / "triton").symlink_to(BINARIES)
os.environ["ONEPASS_CACHE_DIR"] = str(FOLDER)
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Nothing is remembered of graphs compiled before, in this process or in an earlier one: those would claim nothing."""
    import torch._dynamo
    import torch._inductor.config

    from onepass.integration import failure, journal, region_op

    torch._dynamo.reset()
    for remembering in (region_op.forget, journal.reset, failure.forget):
        remembering()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
