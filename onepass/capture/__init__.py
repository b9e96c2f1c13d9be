"""Capture: trace a torch function, lower it to a Program, and keep the guards under which the Program is valid."""

from __future__ import annotations

from .captured import Captured
from .trace import capture

__all__ = ["Captured", "capture"]
