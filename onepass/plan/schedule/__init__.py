"""Schedules: how a kernel runs. One record per kernel family; `check` in `check.py` decides whether one can run a kernel."""

from __future__ import annotations

from . import families
from .base import Ring, RowVectors
from .families import *  # noqa: F403, so that only its own module names a new family
from .roles import PIECE_ELEMS, SECTOR, Block, Cover, Loop, Role, cover, power_of_two, sector_span

__all__ = ["PIECE_ELEMS", "SECTOR", "Block", "Cover", "Loop", "Ring", "Role", "RowVectors", "cover", "power_of_two", "sector_span"]
__all__ += families.__all__
