"""Capture: trace a torch function, lower it to a Program, and keep the guards under which the Program is valid."""

from __future__ import annotations

from .function.captured import Captured
from .function.trace import capture

__all__ = ["Captured", "capture"]
