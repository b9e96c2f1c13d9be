"""Step budgets: every search and rewrite loop counts its steps, so that it terminates on any graph.

Steps are counted, not timed, so every machine gives the same result. A budget is many times what ordinary functions need. When it
runs out, a search returns its best result so far if that is still correct (for example, a plan with more kernels than necessary).
Any other loop raises the error of its stage, and Inductor compiles the region.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import TooManySteps


@dataclass(frozen=True, slots=True)
class Budget:
    """The number of steps a loop may take: `base`, plus `per_item` for each item of its input."""

    work: str  # what the loop does, for the error message
    error: type[TooManySteps]
    base: int
    per_item: int = 0

    def steps(self, size: int = 0) -> Steps:
        """A new counter for one run of the loop over `size` items."""
        return Steps(self, self.base + self.per_item * size)


class Steps:
    """Counts down the steps of one run."""

    def __init__(self, budget: Budget, max_steps: int) -> None:
        self.budget, self.max_steps, self.remaining = budget, max_steps, max_steps

    def spend(self, count: int = 1) -> None:
        """Use up steps; raises the budget's error when none remain."""
        self.remaining -= count
        if self.remaining < 0:
            raise self.budget.error(work=self.budget.work, most=self.max_steps)

    def count(self) -> None:
        """Use up one step without raising, for searches that check `exhausted`."""
        self.remaining -= 1

    @property
    def exhausted(self) -> bool:
        """Whether the search should stop and return its best result so far."""
        return self.remaining <= 0
