"""Cost model: predicted times, and the terms they are made of. `model` chooses the formula, and is imported by its own name."""

from .case import sustained_rate
from .floor import floor_us
from .terms import Cost, Term

__all__ = ["Cost", "Term", "floor_us", "sustained_rate"]
