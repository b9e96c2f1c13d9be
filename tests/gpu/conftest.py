"""Configuration of the tests that need a card."""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO

import pytest
import torch

from tests.support.fixture_types import Room

FREE = 1  # GiB, about, that every process may use on the card without a reservation
PLACE, PLACES = 8, 11  # GiB per reservation, and how many reservations there are
# Tests of many kernels: started last, they would run alone at the end.
# fmt: off
LONG = ("three_norms", "moments-256-", "moments-1024-", "block_backward", "training_step", "group_norm", "qk_norm-backward",
        "small_suite", "many_steps")
# fmt: on


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", metavar="K/N", help="run the K-th of N parts of every list of cases")
    parser.addoption("--smoke", action="store_true", help="run what meets every kind of kernel once: minutes instead of hours")


def pytest_configure(config: pytest.Config) -> None:
    """Distribute tests one by one: with larger batches, the first process would get all the long ones."""
    if getattr(config.option, "maxschedchunk", 1) is None:
        config.option.maxschedchunk = 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip everything without a card; with one, select the shard and run long tests first."""
    part, parts = map(int, config.getoption("--shard").split("/"))
    if config.getoption("--smoke"):
        items[:] = [item for item in items if "gpu" not in item.path.parts or _is_smoke(item)]
    here = [item for item in items if "gpu" in item.path.parts]
    left = {id(item) for k, item in enumerate(here) if k % parts != part - 1}
    long = {id(item) for item in here if any(name in item.name for name in LONG)}
    items[:] = sorted((item for item in items if id(item) not in left), key=lambda item: id(item) not in long)
    if not torch.cuda.is_available():
        for item in here:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _is_smoke(item: pytest.Item) -> bool:
    """Whether a smoke mark selects the test, or its parameters."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    return any(all(given.get(name) == value for name, value in mark.kwargs.items()) for mark in item.iter_markers("smoke"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print failures at once: an interrupted run prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}: {report.longreprtext.strip().splitlines()[-1:]}", flush=True)


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Free cached memory, because several test processes share one card."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def is_smoke(request: pytest.FixtureRequest) -> bool:
    """Whether a few runs are enough instead of many."""
    return bool(request.config.getoption("--smoke"))


@pytest.fixture
def room() -> Room:
    """Reserves GiB on the card for part of a test. Compiling needs none and should happen before."""
    return lambda gib: _taken(gib) if gib > FREE else nullcontext()


@pytest.fixture
def sizeable() -> Iterator[None]:
    """A reservation for tests of which several fit on the card."""
    with _taken(PLACE):
        yield


@pytest.fixture
def large() -> Iterator[None]:
    """A reservation for tests that fill much of the card."""
    with _taken(3 * PLACE):
        yield


@contextmanager
def _taken(gib: float) -> Iterator[None]:
    """Take as many reservations as hold `gib`. One process waits at a time, so large requests are served in order."""
    with ExitStack() as held:
        with _locked("queue"):
            for _ in range(min(PLACES, math.ceil(gib / PLACE))):
                held.enter_context(_free_place())
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _free_place() -> IO[str]:
    """A free reservation; it is held until the file is closed."""
    while True:
        for k in range(PLACES):
            place = _opened(f"place-{k}")
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return place
            except BlockingIOError:
                place.close()
        time.sleep(0.05)


@contextmanager
def _locked(name: str) -> Iterator[None]:
    with _opened(name) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _opened(name: str) -> IO[str]:
    return (Path(tempfile.gettempdir()) / f"onepass-{name}-tests.lock").open("w")
