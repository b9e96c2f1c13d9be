"""Random functions on a card, compiled: 4,000 of them, 100 with --smoke. See tests/campaign."""

from __future__ import annotations

import pytest
import torch

from tests.campaign.checks import check
from tests.campaign.draw import graph

GRAPHS, SMOKE_GRAPHS, BATCH = 4000, 100, 25
FIRST = 2 * 10**6  # seeds that no other stage draws


def defects(stage: str, seeds: range) -> list[str]:
    """What is wrong with the graphs of these seeds. One that is merely slow is not: the machine may be busy."""
    found = []
    for seed in seeds:
        what = check(graph(seed), stage)
        if what.is_bad and what.kind != "slow":
            found.append(f"{what}\n{graph(seed).inputs}\n{graph(seed).source()}")
    return found


def batches() -> list:
    """The first of them are part of --smoke."""
    firsts = range(FIRST, FIRST + GRAPHS, BATCH)
    smoke = firsts[:SMOKE_GRAPHS // BATCH]
    return [pytest.param(range(k, k + BATCH), id=str(k), marks=pytest.mark.smoke if k in smoke else ()) for k in firsts]


@pytest.mark.parametrize("seeds", batches())
def test_random_functions_are_right_or_refused(seeds: range) -> None:
    found = defects("card", seeds)
    torch.cuda.synchronize()
    assert not found, f"{len(found)} of {len(seeds)} graphs\n" + "\n".join(found)
