"""Cache of optimized Programs and plans in this process: a claim plans a region, and its first call reuses that plan."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Generic, TypeVar

from .. import pipeline
from ..ir.program import Program
from ..plan.plan import KernelPlan, Plan
from ..plan.variant import Variant

MAX_PROGRAMS, MAX_PLANS = 256, 256  # kept; the least recently used are evicted

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Plans:
    """The optimized Programs and the plans made so far. Thread-safe.

    Equal Programs share a plan, whatever lines of user code they came from; the lines in a plan are those of the first.
    """

    def __init__(self) -> None:
        self._programs = _Latest[Program, Program](MAX_PROGRAMS)
        self._plans = _Latest[tuple[Program, Variant], Plan](MAX_PLANS)

    def optimized(self, captured: Program) -> Program:
        """The optimized form of a captured Program."""
        return self._programs.get(captured, lambda: pipeline.optimize(captured))

    def plan(self, program: Program, variant: Variant) -> Plan:
        """The plan of an optimized Program for a Variant."""
        return self._plans.get((program, variant), lambda: pipeline.make_plan(program, variant))

    def clear(self) -> None:
        """Drop everything."""
        self._programs.clear()
        self._plans.clear()


class _Latest(Generic[Key, Value]):
    """A bounded cache; values not used recently are dropped. A value that could not be made is tried again."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        with self._lock:
            found = self._values.pop(key, None)
            if found is not None:
                self._values[key] = found  # moved to the end
                return found
        made = make()
        with self._lock:
            self._values[key] = made
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return made

    def clear(self) -> None:
        with self._lock:
            self._values.clear()


PLANS = Plans()  # of this process: filled by claims and calls, read by calls


def without_lines(program: Program) -> Program:
    """A Program without lines of user code, because equal Programs may come from different lines."""
    return replace(program, nodes=tuple(replace(node, src="") for node in program.nodes))


def plan_without_lines(plan: Plan) -> Plan:
    """A plan whose kernels name no lines of user code, so that their text does not depend on which caller planned first."""

    def stripped(kernel: KernelPlan) -> KernelPlan:
        scored, schedule = kernel.scored_as
        return replace(
            kernel,
            kernel=replace(kernel.kernel, program=without_lines(kernel.program)),
            scored_as=(without_lines(scored), schedule),
        )

    return replace(plan, program=without_lines(plan.program), kernels=tuple(map(stripped, plan.kernels)))
