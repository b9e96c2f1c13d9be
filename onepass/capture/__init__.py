"""A torch function -> Program: trace it, lower it, remember what must hold for the answer to be right."""

from __future__ import annotations

from .captured import Captured
from .trace import capture

__all__ = ["Captured", "capture"]
