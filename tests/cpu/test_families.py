"""Every kernel family with every class of types: each cell has kernels, and interpreted ones are right."""

from __future__ import annotations

import pytest
import torch

from tests.support.correctness import assert_right, twice
from tests.support.family_cells import CLASSES, FAMILIES, IN_REGISTERS, cells, members, weighed


def test_every_family_the_planner_tries_is_listed() -> None:
    assert weighed() == set(FAMILIES)


@pytest.mark.parametrize("family,kind", cells())
def test_every_cell_has_kernels(family: str, kind: str) -> None:
    for few in (False, True):
        found = list(members(family, kind, few=few))
        assert found and {one.kernel.schedule.family for one in found} == {family}
    assert {one.dtype for one in members(family, kind)} == set(CLASSES[kind])


@pytest.mark.parametrize("family,kind", [cell for cell in cells() if cell[0] in IN_REGISTERS])
def test_a_kernel_of_each_cell_is_right(family: str, kind: str) -> None:
    one = next(members(family, kind, small=True, few=True))
    assert_right(one.call(torch.device("cpu")), one.function, one.inputs, run=twice)
