"""Mutants of generated kernels."""

from __future__ import annotations

from . import Mutant

MUTANTS: list[Mutant] = []
