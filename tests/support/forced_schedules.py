"""Run Programs under a given schedule instead of the planner's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.capture import capture
from onepass.device import Device, device
from onepass.ir.oracle import evaluate
from onepass.ir.program import Program
from onepass.ir.simplify import online_softmax
from onepass.ir.size import Bindings
from onepass.pipeline import generate, optimize
from onepass.plan.cost.model import cost
from onepass.plan.estimate import estimate
from onepass.plan.kernel import Kernel, memory_order
from onepass.plan.legality import Family, Illegal, families, space_of
from onepass.plan.partition import with_join
from onepass.plan.plan import KernelPlan, Plan
from onepass.plan.resources import demand
from onepass.plan.schedule import Cover, Schedule
from onepass.plan.scoring import Scored, forms, scored_forms, scores
from onepass.plan.traffic import traffic
from onepass.plan.variant import specialize
from onepass.runtime.compiled import Compiled
from onepass.runtime.executable import assemble
from tests.support.correctness import poison
from tests.support.default_choices import completed

H200 = device("h200")


def as_kernel(function: Callable[..., Any], args: tuple[Tensor, ...], family: Family, held: bool) -> tuple[Kernel, dict[str, int]]:
    """A function as one kernel that keeps the reduced side on chip or loops over it, and the sizes of a call."""
    captured = capture(function, args)
    bindings = captured.bind(args)
    assert bindings is not None
    program, sizes = specialize(optimize(captured.program), bindings)
    space = space_of(program, sizes)
    assert not isinstance(space, Illegal)
    return next(f.kernel for f in forms(program, space, family) if f.held is held), dict(sizes)


def candidates(program: Program, bindings: Bindings, on: Device = H200) -> Iterator[tuple[Family, list[KernelPlan]]]:
    """The planner's candidates for a Program as one kernel, by family; none if it cannot be one kernel."""
    space = space_of(program, bindings)
    if isinstance(space, Illegal):
        return
    kinds = families(Kernel(program, space), Kernel(online_softmax(program), space))
    if isinstance(kinds, Illegal):
        return
    for family in kinds:
        written = forms(program, space, family)
        yield family, [scored.plan for form in written for scored in scored_forms(form, family, bindings, on, {})]


def scored(program: Program, bindings: Bindings, on: Device = H200) -> list[Scored]:
    """Every candidate of the planner for a Program that can be one kernel, with its predicted time."""
    found = scores(program, bindings, on, {})
    assert not isinstance(found, Illegal), found.detail
    return found


def chosen(program: Program, bindings: Bindings, family: Family, schedule: Schedule, on: Device = H200) -> KernelPlan:
    """A Program as one kernel under a given schedule, completed with the default choices of candidates."""
    space = space_of(program, bindings)
    assert not isinstance(space, Illegal), space.detail
    held = isinstance(schedule.cols, Cover) or isinstance(schedule.rows, Cover)
    written = forms(program, space, family)
    kernel = next((f.kernel for f in written if f.held == held), written[0].kernel)
    return under(kernel, completed(kernel, schedule, bindings), bindings, on)


def under(kernel: Kernel, schedule: Schedule, bindings: Bindings, on: Device = H200) -> KernelPlan:
    """A kernel under a schedule, costed as the planner's candidates are, even where it is predicted to spill."""
    resources = estimate(demand(kernel), schedule, on)
    resources = replace(resources, ctas_per_sm=max(1, resources.ctas_per_sm))
    price = cost(kernel, schedule, resources, traffic(kernel, bindings), on)
    return KernelPlan(kernel.program.name, kernel, schedule, resources, price, (kernel.program, schedule))


def planned(program: Program, bindings: Bindings, kernel: KernelPlan, on: Device = H200) -> Plan:
    """One kernel as a plan: it, and the join of its partial results."""
    order = memory_order(program, bindings)
    kernels = with_join(kernel, bindings, on, tuple(sorted(order, key=order.__getitem__)), {})
    named = tuple(replace(k, name=f"{program.name}_{i}") for i, k in enumerate(kernels))
    return Plan(program, on, bindings, named, ())


def run(plan: Plan, inputs: Mapping[str, torch.Tensor], bindings: Bindings) -> dict[str, torch.Tensor]:
    """A plan's kernels in the interpreter, at any sizes (which need not be those it was made for)."""
    compiled = Compiled(plan, generate(plan), ())
    return assemble(compiled.artifact, torch.device("cpu"), frozenset())(inputs, bindings)


SLACK = 2.0**-13  # of values of order one, after a few dozen fp32 operations and sums of up to 4096


def assert_as_oracle(plan: Plan, inputs: dict[str, torch.Tensor], bindings: Bindings, what: str) -> None:
    """Every output: integers equal; floats within their own rounding and the slack of fp32 arithmetic."""
    exact = evaluate(plan.program, inputs, bindings)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, garbage=False)
        outputs = run(plan, inputs, bindings)
    for name, actual in outputs.items():
        if actual.is_floating_point():
            scale = max(1.0, float(exact[name].abs().max())) if actual.numel() else 1.0
            relative = torch.finfo(actual.dtype).eps
            describe = lambda m, name=name: f"{what}, {name}: {m}"  # noqa: E731
            torch.testing.assert_close(actual.double(), exact[name], rtol=relative, atol=SLACK * scale, msg=describe)
        else:
            assert torch.equal(actual, exact[name]), f"{what}, {name}"


def program_of(
    function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool | None = None
) -> tuple[Program, dict[str, torch.Tensor], Bindings]:
    """The Program of a function, its inputs and sizes."""
    captured = capture(function, inputs, dynamic=dynamic)
    bindings = captured.bind(inputs)
    assert bindings is not None
    return optimize(captured.program), captured.tensors(inputs), bindings
