"""Step budgets: every search and rewrite loop counts its steps, so that each ends however a graph is made.

Steps are counted, never timed: what one machine declines, every machine declines. A budget is many times what ordinary functions
take. Past it, a search makes do with what it has where that is right all the same (a plan of more kernels than it might have), and
everything else raises the error of its stage, which leaves the region to Inductor.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import TooManySteps


@dataclass(frozen=True, slots=True)
class Budget:
    """How many steps a loop may take: `most`, and `each` more for every unit of the size of what it works on."""

    work: str  # what the steps are, as part of a message
    error: type[TooManySteps]
    base: int
    per_item: int = 0

    def steps(self, size: int = 0) -> Steps:
        """A counter for one run of the loop."""
        return Steps(self, self.base + self.per_item * size)


class Steps:
    """The steps of one run, counted down."""

    def __init__(self, budget: Budget, max_steps: int) -> None:
        self.budget, self.max_steps, self.remaining = budget, max_steps, max_steps

    def spend(self, count: int = 1) -> None:
        """Spend steps; raises the error of the budget once there are none left."""
        self.remaining -= count
        if self.remaining < 0:
            raise self.budget.error(work=self.budget.work, most=self.max_steps)

    def count(self) -> None:
        """Count a step of a search that ends by itself when they are spent, without an error."""
        self.remaining -= 1

    @property
    def exhausted(self) -> bool:
        """Whether a search had better end with what it has."""
        return self.remaining <= 0
