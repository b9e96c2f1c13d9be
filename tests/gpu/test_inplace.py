"""Outputs in the memory of inputs on the card, where threads and CTAs run in any order: bitwise equal to separate outputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.capture.function.trace import capture
from onepass.pipeline import generate, optimize
from onepass.plan.inplace import safe_inplace_pairs
from onepass.plan.plan import Plan
from onepass.runtime.compiled import Compiled
from onepass.runtime.executable import allocate, assemble, layout
from tests.support.correctness import randoms
from tests.support.forced_schedules import candidates, planned
from tests.support.schedule_kinds import blocks, both, column_softmax, elementwise, norm

CARD = "cuda:0"
EACH = 4  # schedules of a family
REPEATS = 20  # a race may not show the first time
SIZES = ((16384, 1024), (4096, 5120), (8192, 64), (512, 16384), (1024, 1027), (300, 50257))


def assert_same(plan: Plan, inputs: dict[str, Tensor], bindings: dict[str, int]) -> int:
    """Compare every in-place pair that a plan allows with the plan out of place; returns the number of pairs."""
    pairs = safe_inplace_pairs(plan)
    if not pairs:
        return 0
    made = Compiled(plan, generate(plan), ()).artifact
    everything = frozenset(b.name for b in (*made.inputs, *made.outputs))
    executable = assemble(made, torch.device(CARD), everything)
    layouts = {b.name: layout(b, bindings) for b in made.outputs}
    apart = {name: allocate(wanted, torch.device(CARD)) for name, wanted in layouts.items()}
    executable.run_into({**inputs, **apart}, bindings)
    for output, taken in pairs:
        for _ in range(REPEATS):
            own = {**inputs, taken: inputs[taken].clone()}
            shared = {
                name: own[taken].as_strided(wanted.shape, wanted.strides)
                if name == output
                else allocate(wanted, torch.device(CARD))
                for name, wanted in layouts.items()
            }
            executable.run_into({**own, **shared}, bindings)
            for name, actual in shared.items():
                assert torch.equal(actual, apart[name]), f"{name} with {output} over {taken}: {plan.kernels[0].schedule}"
    return len(pairs)


@pytest.mark.smoke(rows=8192, dtype=torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("rows", "cols"), SIZES)
@pytest.mark.parametrize("function", [norm, both, column_softmax, elementwise, blocks])
def test_in_place_is_bitwise_the_same(function: Callable[..., Any], rows: int, cols: int, dtype: torch.dtype) -> None:
    if function is blocks and cols % 32:
        pytest.skip("blocks of 32 columns")
    x, w = randoms(rows, (rows, cols), (cols,), dtype=dtype, device=CARD)
    call = lambda x, w: tuple(t.to(dtype) for t in _several(function(x.float(), w.float())))  # noqa: E731
    captured = capture(call, (x, w), dynamic=False)
    program, bindings = optimize(captured.program), dict(captured.bind((x, w)) or {})
    found = 0
    for family, plans in candidates(program, bindings):
        chance = random.Random(f"{family.value} {rows} {cols}")
        for kernel in chance.sample(plans, min(EACH, len(plans))):
            found += assert_same(planned(program, bindings, kernel), captured.tensors((x, w)), bindings)
    if not found:
        pytest.skip("none of these schedules may write over its data")


def _several(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
