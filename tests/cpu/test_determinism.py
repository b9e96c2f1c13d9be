"""The determinism checks, on interpreted kernels: equal runs pass, and differing runs are detected."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from onepass.measure.suites import Job
from tests.support.determinism import Machine, bits, calling, changing, digest, digests_elsewhere, same

HERE = torch.device("cpu")
JOBS = (Job("rms_norm", (6, 96)), Job("rms_norm_backward", (9, 64)), Job("outer_sum_1", (130, 32), "f32"), Job("softmax", (3, 50)))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.id)
def test_interpreted_kernels_give_the_same_bits(job: Job) -> None:
    assert changing(calling(job, HERE), 4, Machine(HERE)) == {}


def test_another_process_gives_the_same_bits() -> None:
    assert digests_elsewhere(JOBS[:2], HERE) == [digest(calling(job, HERE)()) for job in JOBS[:2]]


@pytest.mark.parametrize("way,turns", [("again", 4), ("on several streams", 4), ("from a graph", 4), ("after other work", 4)])
def test_a_run_that_differs_is_counted(way: str, turns: int) -> None:
    """The last digit changes in one of the four ways of running."""
    ways = ["again", "on several streams", "from a graph", "after other work"]
    before = {"again": 0, "on several streams": 1, "from a graph": 4, "after other work": 5}[way]  # calls after the first
    count = itertools.count(-1)

    def call() -> tuple[Tensor, ...]:
        return (torch.tensor([1.0, 1.0 + 2**-23 if next(count) == before else 1.0]),)

    assert changing(call, turns, Machine(HERE)) == {way: 1} and way in ways


def test_zeros_of_either_sign_and_nans_of_either_kind_differ() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([torch.nan])
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not same([zero], [-zero]) and same([nan], [nan.clone()]) and not same([nan], [other])
    assert digest([zero]) != digest([-zero]) and digest([zero]) != digest([zero.double()]) != digest([zero[None]])
    assert all(len(bits(torch.zeros(3, dtype=d))) == 3 for d in (torch.bool, torch.bfloat16, torch.float64, torch.float8_e5m2))
