"""Defects that the smoke tests on a card find in random functions."""

from __future__ import annotations

from .checks import check
from .draw import graph

FIRST = 2 * 10**6  # seeds that no other stage draws


def defects(stage: str, seeds: range) -> list[str]:
    """The defects in the graphs of these seeds. Slowness does not count: the machine may be busy."""
    found = []
    for seed in seeds:
        what = check(graph(seed), stage)
        if what.is_bad and what.kind != "slow":
            found.append(f"{what}\n{graph(seed).inputs}\n{graph(seed).source()}")
    return found
