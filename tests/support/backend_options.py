"""Options under which the backend claims everything possible on a CPU, with the rest of a graph in eager or in Inductor."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

EAGER: dict[str, Any] = {"interpret": True, "rest": "eager", "by_cost": False, "verify": 4, "on_error": "raise"}
INDUCTOR: dict[str, Any] = {**EAGER, "rest": "inductor"}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ to compile for CPU tensors")
RESTS = [pytest.param(EAGER, id="eager"), pytest.param(INDUCTOR, id="inductor", marks=needs_compiler)]
