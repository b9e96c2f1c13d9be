"""Kernels of function cases, planned for a card and not compiled."""

from __future__ import annotations

import torch

from onepass.capture.function.trace import capture
from onepass.pipeline import interpret, optimize
from onepass.plan.partition import plan
from onepass.plan.variant import representative_sizes, specialize
from onepass.runtime.compiled import Artifact
from tests.support.forced_schedules import H200
from tests.support.function_cases import CASES


def artifact_of(name: str, rows: int = 48, cols: int = 130) -> Artifact:
    """The kernels of a case, not compiled."""
    inputs = CASES[name].inputs(rows, cols, torch.bfloat16, "cpu")
    captured = capture(CASES[name].function, inputs)
    program, free = specialize(optimize(captured.program), captured.bind(inputs) or {})
    return interpret(plan(program, representative_sizes(program, free, H200), H200)).artifact
