"""The same bits from every run on a card: 1,000 of each workload of the suites, 20 with --smoke, and in other processes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from onepass.measure.suites import SUITES, Job
from tests.support.determinism import Machine, calling, changing, digest, digests_elsewhere
from tests.support.fixture_types import Room

JOBS = SUITES["all"].jobs
FEW = JOBS[:: -(-len(JOBS) // 10)]  # ten of them, across all suites
RUNS, SMOKE_RUNS, PROCESSES = 1000, 20, 3
CARD = torch.device("cuda", 0)


def params() -> list[Any]:
    return [pytest.param(job, id=job.id, marks=pytest.mark.smoke if job in FEW else ()) for job in JOBS]


def gib(job: Job) -> float:
    """GiB for the arguments, several results at once, and scratch memory."""
    return 6 * sum(t.numel() * t.element_size() for t in job.inputs("meta")) / 2**30


@pytest.mark.parametrize("job", params())
def test_every_run_gives_the_same_bits(job: Job, room: Room, is_smoke: bool) -> None:
    with room(gib(job)):
        found = changing(calling(job, CARD), SMOKE_RUNS if is_smoke else RUNS, Machine(CARD))
        gc.collect()  # a graph's memory
    assert not found, f"runs that differ: {found}"


@pytest.mark.smoke
def test_every_process_gives_the_same_bits(room: Room, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Including a process with an empty store, which plans and compiles again."""
    with room(max(map(gib, FEW))):
        here = [digest(calling(job, CARD)()) for job in FEW]
        for k in range(PROCESSES):
            store = {"ONEPASS_CACHE_DIR": str(tmp_path_factory.mktemp("store"))} if k == PROCESSES - 1 else {}
            assert digests_elsewhere(FEW, CARD, **store) == here
