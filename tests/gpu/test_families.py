"""Every kernel family with every class of types on a card, under forced schedules: right, and independent of prior memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from onepass.knobs import knobs
from onepass.runtime.card import local_device
from tests.support.correctness import assert_right, twice
from tests.support.family_cells import cells, members
from tests.support.forced_schedules import H200

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("family,kind", cells())
def test_right_under_schedules_of_each_family(family: str, kind: str, is_smoke: bool) -> None:
    card, found = torch.device("cuda", 0), list(members(family, kind, few=is_smoke))
    with ThreadPoolExecutor(knobs().compile_workers) as threads:
        list(threads.map(lambda one: one.compile(local_device() or H200), found))
    for one in found:
        assert_right(one.call(card), one.function, lambda seed, one=one: one.inputs(seed, card), run=twice)  # type: ignore[misc]
