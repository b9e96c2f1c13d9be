"""Shared by the tests that need no card: a store of their own, which leaves with them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp(prefix="onepass-tests-"))
# Binaries take the time and follow from their text alone: they stay from run to run.
BINARIES = Path(__file__).resolve().parents[2] / ".pytest_cache" / "triton"
BINARIES.mkdir(parents=True, exist_ok=True)
(FOLDER / "triton").symlink_to(BINARIES)
os.environ["ONEPASS_CACHE_DIR"] = str(FOLDER)
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
