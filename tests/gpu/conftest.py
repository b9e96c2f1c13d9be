"""Shared by the tests that need a card."""

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

FREE = 1  # GiB that every process may have on the card unasked, about
PLACE, PLACES = 8, 11  # GiB that are asked for at a time, and how many of them there are
# Of many kernels: begun last, they would run alone at the end.
# fmt: off
LONG = ("three_norms", "moments-256-", "moments-1024-", "block_backward", "training_step", "group_norm", "qk_norm-backward",
        "small_suite", "many_steps")
# fmt: on


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", metavar="K/N", help="run the K-th of N parts of every list of cases")
    parser.addoption("--smoke", action="store_true", help="run what meets every kind of kernel once: minutes instead of hours")


def pytest_configure(config: pytest.Config) -> None:
    """Processes take tests one by one: given many at a time, the first would get all that take long."""
    if getattr(config.option, "maxschedchunk", 1) is None:
        config.option.maxschedchunk = 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a card everything is skipped; with one, what is not in the shard is left out, and what takes long comes first."""
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
    """Whether a mark says so of it, or of the parameters it was made with."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    return any(all(given.get(name) == value for name, value in mark.kwargs.items()) for mark in item.iter_markers("smoke"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What failed is named at once: a run that is cut off prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}: {report.longreprtext.strip().splitlines()[-1:]}", flush=True)


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Several test processes share one card's memory."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def is_smoke(request: pytest.FixtureRequest) -> bool:
    """Whether a few runs will do where a campaign makes many."""
    return bool(request.config.getoption("--smoke"))


@pytest.fixture
def room() -> Room:
    """Room on the card, in GiB, for as long as a part of a test needs it. Compiling needs none, and is better done before."""
    return lambda gib: _taken(gib) if gib > FREE else nullcontext()


@pytest.fixture
def sizeable() -> Iterator[None]:
    """Room for tests of which the card holds several at once."""
    with _taken(PLACE):
        yield


@pytest.fixture
def large() -> Iterator[None]:
    """Room for tests that fill much of the card."""
    with _taken(3 * PLACE):
        yield


@contextmanager
def _taken(gib: float) -> Iterator[None]:
    """As many places as hold that much. One process waits for places at a time: who needs many gets them before later ones do."""
    with ExitStack() as held:
        with _locked("queue"):
            for _ in range(min(PLACES, math.ceil(gib / PLACE))):
                held.enter_context(_free_place())
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _free_place() -> IO[str]:
    """A place that nobody has; it is taken until it is closed."""
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
