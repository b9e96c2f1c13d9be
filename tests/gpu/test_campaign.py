"""Random functions on a card, compiled: 4,000 of them, 100 with --smoke. See tests/campaign."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.campaign.defects import FIRST, defects

GRAPHS, SMOKE_GRAPHS, BATCH = 4000, 100, 25


def batches() -> list[Any]:
    """The first of them are part of --smoke."""
    firsts = range(FIRST, FIRST + GRAPHS, BATCH)
    smoke = firsts[: SMOKE_GRAPHS // BATCH]
    return [pytest.param(range(k, k + BATCH), id=str(k), marks=pytest.mark.smoke if k in smoke else ()) for k in firsts]


@pytest.mark.parametrize("seeds", batches())
def test_random_functions_are_right_or_refused(seeds: range) -> None:
    found = defects("card", seeds)
    torch.cuda.synchronize()
    assert not found, f"{len(found)} of {len(seeds)} graphs\n" + "\n".join(found)
