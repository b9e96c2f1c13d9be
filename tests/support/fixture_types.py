"""Types of the fixtures in tests/cpu/conftest.py and tests/gpu/conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

Anothers: TypeAlias = Callable[[Path], None]
Room: TypeAlias = Callable[[float], AbstractContextManager[None]]
