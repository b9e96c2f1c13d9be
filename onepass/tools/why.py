"""`onepass explain --why`: the candidate schedules of each kernel by predicted time, and the terms of the chosen one's.

The planner keeps no candidates. They are scored again here, which takes milliseconds and gives the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.text import Text

from ..constants import SHIPPED
from ..plan.cost import Term
from ..plan.partition import Search
from ..plan.plan import KernelPlan, Plan
from ..plan.scoring import Scored
from .tables import as_text, table, us

SHOWN = 6  # candidates of a kernel in a table; JSON has all
WIDTH = 80
# How to read both tables: why the first schedule is not always chosen, and what the two times of a term mean.
NOTES = f"""
time: predicted, with the join of partial results if several CTAs share one. Times within {SHIPPED.cost.tie - 1:.0%} of the best are
ties. They go to data in registers, then to fewer CTAs per row, then to data read once, then to fewer registers.
est. regs: per thread, estimated before compiling. alone: what a term would take by itself, or a slowdown adds. adds: how much
shorter the predicted time would be without it; 0 if it is hidden behind others. computed from: names with underscores are
constants, explained in onepass/constants/h200.json."""
JOIN_SOURCE = "launch, partial results / L2 rate, join_part_us"


@dataclass(frozen=True, slots=True)
class CandidateWhy:
    """One schedule of a kernel that the planner considered."""

    schedule: str
    family: str
    predicted_us: float  # including the join of partial results
    limit: str
    limits: tuple[tuple[str, float], ...]  # times of the resources that work at once
    registers: int
    ctas_per_sm: int
    terms: tuple[Term, ...]
    chosen: bool


@dataclass(frozen=True, slots=True)
class KernelWhy:
    """The candidates of one kernel, best first. The chosen one may come later: schedules within the model's accuracy are ties, and
    compiling may show that one spills.
    """

    kernel: str
    candidates: tuple[CandidateWhy, ...]

    @property
    def chosen(self) -> CandidateWhy | None:
        """The schedule of the plan, if it is among the candidates."""
        return next((c for c in self.candidates if c.chosen), None)


@dataclass(frozen=True, slots=True)
class Why:
    """Why each kernel of a plan has its schedule."""

    kernels: tuple[KernelWhy, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """All candidates with their terms, as JSON-ready values."""
        return [
            {"kernel": k.kernel, "candidates": [{**asdict(c), "limits": dict(c.limits)} for c in k.candidates]}
            for k in self.kernels
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = options.update(max_width=WIDTH)
        for kernel in self.kernels:
            yield from console.render(_heading(kernel), narrow)
            yield from console.render(_ranking(kernel), narrow)
            if kernel.chosen:
                yield from console.render(_term_table(kernel.chosen), narrow)
        yield from console.render(Text("\n" + " ".join(NOTES.split()), style="dim"), narrow)

    def __str__(self) -> str:
        return as_text(self)


def why(plan: Plan) -> Why:
    """The candidates of each kernel of a plan, except kernels that only join partial results."""
    search = Search(plan.program, plan.bindings, plan.device, {})
    taken = {k.scored_as: k for k in plan.kernels}
    found = []
    for group in search.run():
        scored = sorted(search.others(group), key=lambda s: s.us)
        kernel = next((taken[s.plan.scored_as] for s in scored if s.plan.scored_as in taken), None)
        if scored:
            found.append(_kernel(scored, kernel))
    return Why(tuple(found))


def _kernel(scored: Sequence[Scored], kernel: KernelPlan | None) -> KernelWhy:
    candidates = tuple(_candidate(s, kernel is not None and s.plan.scored_as == kernel.scored_as) for s in scored)
    return KernelWhy(kernel.name if kernel else scored[0].plan.name, candidates)


def _candidate(scored: Scored, chosen: bool) -> CandidateWhy:
    found = scored.plan
    join = scored.us - found.cost.us
    terms = (*found.cost.terms, Term("join of partial results", join, join, JOIN_SOURCE)) if join else found.cost.terms
    return CandidateWhy(
        str(found.schedule),
        found.family,
        scored.us,
        found.cost.limit,
        found.cost.limits,
        found.resources.registers,
        found.resources.ctas_per_sm,
        terms,
        chosen,
    )


def _heading(kernel: KernelWhy) -> Text:
    rank = next((k for k, c in enumerate(kernel.candidates, 1) if c.chosen), None)
    place = f"number {rank} is chosen" if rank else "the chosen schedule is none of them"
    return Text.assemble((f"\n{kernel.kernel}", "bold"), f": {len(kernel.candidates)} candidate schedules, {place}\n")


def _ranking(kernel: KernelWhy) -> Any:
    shown = table(
        "ranking",
        ("", "right"),
        ("time", "right"),
        ("limit", "left"),
        ("est. regs", "right"),
        ("CTAs/SM", "right"),
        ("schedule", "left"),
    )
    for rank, c in enumerate(kernel.candidates, 1):
        if rank <= SHOWN or c.chosen:
            shown.add_row(
                f"{'>' if c.chosen else ''}{rank}",
                us(c.predicted_us),
                c.limit,
                str(c.registers),
                str(c.ctas_per_sm),
                escape(c.schedule),
            )
    return shown


def _term_table(chosen: CandidateWhy) -> Any:
    shown = table(
        "\nterms of the predicted time of the chosen schedule",
        ("term", "left"),
        ("alone, us", "right"),
        ("adds, us", "right"),
        ("computed from", "left"),
    )
    for term in chosen.terms:
        shown.add_row(escape(term.name), f"{term.us:.2f}", f"{term.adds_us:.2f}", escape(term.source))
    return shown
