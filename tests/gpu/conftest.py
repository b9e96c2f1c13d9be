"""Shared by the tests that need a card."""

from __future__ import annotations

import fcntl
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

AT_ONCE = 3
FEW = 1 << 25  # elements that every process may have on the card
# Of many kernels: begun last, they would run alone at the end.
LONG = ("three_norms", "block_backward", "training_step", "group_norm", "qk_norm-backward", "small_suite", "many_steps")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", metavar="K/N", help="run the K-th of N parts of every list of cases")


def pytest_configure(config: pytest.Config) -> None:
    """Processes take tests one by one: given many at a time, the first would get all that take long."""
    if getattr(config.option, "maxschedchunk", 1) is None:
        config.option.maxschedchunk = 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a card everything is skipped; with one, what is not in the shard is left out, and what takes long comes first."""
    part, parts = map(int, config.getoption("--shard").split("/"))
    here = [item for item in items if "gpu" in item.path.parts]
    left = {id(item) for k, item in enumerate(here) if k % parts != part - 1}
    long = {id(item) for item in here if any(name in item.name for name in LONG)}
    items[:] = sorted((item for item in items if id(item) not in left), key=lambda item: id(item) not in long)
    if not torch.cuda.is_available():
        for item in here:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA card"))


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Several test processes share one card's memory."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def large() -> Iterator[None]:
    """Tests that fill much of the card's memory run one at a time."""
    with _locked("large"):
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@pytest.fixture
def sizeable(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of which the card holds a few at once, but none beside a large one."""
    with _locked(f"sizeable-{zlib.crc32(request.node.name.encode()) % AT_ONCE}"), _locked("large", fcntl.LOCK_SH):
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@pytest.fixture
def room(request: pytest.FixtureRequest) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """Room for a part of a test: what has few elements needs none, the rest takes turns as sizeable tests do."""

    @contextmanager
    def taken(elements: int) -> Iterator[None]:
        if elements <= FEW:
            yield
            return
        with _locked(f"sizeable-{zlib.crc32(request.node.name.encode()) % AT_ONCE}"), _locked("large", fcntl.LOCK_SH):
            yield
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    yield taken


@contextmanager
def _locked(name: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / f"onepass-{name}-tests.lock").open("w") as lock:
        fcntl.flock(lock, kind)
        yield
