"""Configuration of the tests that need no card: they have their own store."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from onepass import files
from tests.support.fixture_types import Anothers

CACHE = Path(__file__).resolve().parents[2] / ".pytest_cache"


def _store() -> Path:
    """A folder for one worker of a run, with nothing in it but binaries, which are slow to make and depend only on their text.

    It is kept from run to run. If other users can write to the checkout, or another run uses the folder, it is a temporary one.
    """
    kept = CACHE / f"store-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
    with suppress(OSError), files.open_folder(kept, create=True) as handle:
        lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=handle)  # open until the process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in ("entries", "cards", "quarantine"):
            shutil.rmtree(kept / name, ignore_errors=True)
        return kept
    fresh = Path(tempfile.mkdtemp(prefix="onepass-tests-"))
    atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    return fresh


os.environ["ONEPASS_CACHE_DIR"] = str(_store())
# Unexpected failures write their reproducers outside of the checkout.
os.environ["ONEPASS_REPRO_DIR"] = tempfile.mkdtemp(prefix="onepass-repros-")
atexit.register(shutil.rmtree, os.environ["ONEPASS_REPRO_DIR"], ignore_errors=True)


@pytest.fixture
def anothers(monkeypatch: pytest.MonkeyPatch) -> Anothers:
    """Make a file or folder look as if another user owned it; changing the owner would need root."""
    fstat, foreign = os.fstat, set[tuple[int, int]]()

    def seen(handle: int) -> os.stat_result:
        status = fstat(handle)
        values = list(status)
        values[4] = 54321 if (status.st_dev, status.st_ino) in foreign else values[4]
        return os.stat_result(values)

    def give(path: Path) -> None:
        status = path.lstat()
        foreign.add((status.st_dev, status.st_ino))

    monkeypatch.setattr(os, "fstat", seen)
    return give


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Forget graphs compiled before, in this process or an earlier one: a cached graph claims nothing."""
    import torch._dynamo
    import torch._inductor.config

    from onepass.integration import engine, failure, journal, region_op

    torch._dynamo.reset()
    for remembering in (region_op.forget, engine.forget, journal.reset, failure.reset_warnings):
        remembering()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A separate, empty store for a test, and no kernels in memory before and after it."""
    from onepass.integration import engine

    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "store"))
    engine.forget()
    yield
    engine.forget()
