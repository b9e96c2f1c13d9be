"""Times and bytes of a plan at other sizes than those it was made for.

A row class has one plan. Reports and claims ask what it takes at the sizes of a call: the kernels and their schedules stay, and the
cost model is evaluated again.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.size import Bindings
from .cost.model import cost
from .kernel import Kernel
from .legality import Illegal, space_of
from .plan import KernelPlan, Plan
from .traffic import traffic


def at_sizes(plan: Plan, bindings: Bindings) -> Plan:
    """The same kernels with their times and bytes at the sizes of a call. Their code is still that of `plan`."""
    sizes = {name: bindings[name] for name in plan.bindings}
    if sizes == dict(plan.bindings):
        return plan
    return replace(plan, bindings=sizes, kernels=tuple(_at(kernel, sizes, plan) for kernel in plan.kernels))


def _at(kernel: KernelPlan, sizes: Bindings, plan: Plan) -> KernelPlan:
    program, schedule = kernel.scored_as
    whole = kernel.kernel.space if program == kernel.program else space_of(program, plan.bindings)  # else half of a split reduction
    scored = Kernel(program, kernel.kernel.space if isinstance(whole, Illegal) else whole)
    return replace(kernel, cost=cost(scored, schedule, kernel.resources, traffic(scored, sizes), plan.device))
