"""`onepass bisect file.py:train_step`: which regions make a step's loss or gradients diverge.

The step runs with all regions, without any, and then with ever smaller subsets. A result diverges if its errors exceed the tests'
criterion (ir/criterion.py) times a slack, because a step accumulates the errors of all its kernels. If the step can run in
float64, errors are relative to float64 and bounded by Inductor's errors. Otherwise they are relative to Inductor's results and
bounded by the differences between eager and Inductor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import BadArgument, OnepassError, WrongAnswer
from ..integration import repro
from ..integration.claim import ClaimedRegion
from ..integration.failure import describe_error
from .reference import Reference, make_reference, worst_excess
from .runner import Runner
from .step import StepFactory

SLACK = 8.0  # multiple of the bounds for a single kernel
RECOMPUTE = "recompute"  # among region ids, stands for the recomputation of values in the backward


@dataclass(frozen=True, slots=True)
class Trial:
    """One run with some regions. `excess` is the error of its worst result as a multiple of the single-kernel bound."""

    regions: tuple[str, ...]
    excess: float
    worst: str
    error: str = ""  # if the run failed

    def line(self, slack: float) -> str:
        """The trial as a line of the log."""
        named = ", ".join(self.regions[:4]) or "no region"
        more = f" and {len(self.regions) - 4} more" if len(self.regions) > 4 else ""
        found = self.error or f"{self.worst} is off by {self.excess:.3g} times the bound of a single kernel"
        return f"{'DIVERGES' if self.excess > slack else 'agrees':8} with {named}{more}: {found}"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A region that contributes to the divergence: its source lines, the result of checking it alone, and a reproducer file."""

    region: str
    lines: tuple[str, ...]
    finding: str
    repro: str


@dataclass(frozen=True, slots=True)
class BadGroup:
    """A minimal group of regions that makes the step diverge: one region, or several that do so only together."""

    suspects: tuple[Suspect, ...]
    excess: float  # of the run with only these regions
    worst: str  # the result with the largest excess


@dataclass(frozen=True, slots=True)
class Bisection:
    """The outcome of a bisection."""

    what: str
    reference: str
    regions: int
    slack: float
    bad_groups: tuple[BadGroup, ...]
    diverges_without_regions: bool  # it diverges with every region disabled too
    notes: tuple[str, ...]
    trials: tuple[Trial, ...] = field(repr=False)

    @property
    def diverges(self) -> bool:
        """Whether the step diverges with all regions, whatever the cause."""
        return bool(self.bad_groups) or self.diverges_without_regions

    @property
    def skip(self) -> tuple[str, ...]:
        """The regions to disable so that results agree."""
        return tuple(s.region for group in self.bad_groups for s in group.suspects if s.region != RECOMPUTE)

    @property
    def options(self) -> dict[str, Any]:
        """The onepass settings with which results agree."""
        blamed = {s.region for group in self.bad_groups for s in group.suspects}
        return {**({"skip": list(self.skip)} if self.skip else {}), **({"recompute": False} if RECOMPUTE in blamed else {})}

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON-ready values; an infinite excess is null."""
        bad_groups = [
            {
                "regions": [
                    {"id": s.region, "lines": list(s.lines), "finding": s.finding, "repro": s.repro} for s in group.suspects
                ],
                "excess": _finite(group.excess),
                "worst": group.worst,
            }
            for group in self.bad_groups
        ]
        trials = [
            {"regions": list(t.regions), "excess": _finite(t.excess), "worst": t.worst, "error": t.error} for t in self.trials
        ]
        return {
            "what": self.what,
            "reference": self.reference,
            "regions": self.regions,
            "slack": self.slack,
            "guilty": bad_groups,
            "diverges": self.diverges,
            "options": self.options,
            "notes": list(self.notes),
            "trials": trials,
        }

    def __str__(self) -> str:
        return "\n".join([_headline(self), *(f"note: {note}" for note in self.notes), *_accusations(self)])


def bisect(
    text: str,
    inputs: str | None = None,
    options: Mapping[str, Any] | None = None,
    slack: float = SLACK,
    seed: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> Bisection:
    """Find the regions that make `file.py:function` diverge. `options` are onepass settings; `log` gets a line per trial."""
    if not 1 <= slack < math.inf:  # nothing exceeds NaN
        raise BadArgument(detail=f"The slack is a number of 1 or more, not {slack}.")
    if not 0 <= seed < 1 << 32:  # NumPy's range
        raise BadArgument(detail=f"The seed is a number from 0 to 2^32 - 1, not {seed}.")
    runner = Runner.of(StepFactory.of(text, inputs, seed), options or {})
    log(f"{text}: running without regions, in eager mode and in float64")
    reference = make_reference(runner)
    search = _Search(runner, reference, slack, log)
    trials = search.trials
    bad_groups, diverges_without_regions = search.bad_groups()
    return Bisection(
        text,
        reference.name,
        len(search.claimed),
        slack,
        bad_groups,
        diverges_without_regions,
        (*reference.notes, *search.notes),
        tuple(trials.values()),
    )


class _Search:
    """Runs a step with subsets of its regions, caches every trial, and finds minimal groups that diverge."""

    def __init__(self, runner: Runner, reference: Reference, slack: float, log: Callable[[str], None]) -> None:
        self.runner, self.reference, self.slack, self.log = runner, reference, slack, log
        self.trials: dict[frozenset[str], Trial] = {}
        self.notes: list[str] = []
        self.runs = 1  # per trial
        self.claimed: dict[str, ClaimedRegion] = {}
        self.elements: tuple[str, ...] = ()

    def bad_groups(self) -> tuple[tuple[BadGroup, ...], bool]:
        """The minimal groups of regions that make the step diverge, and whether it diverges without any region."""
        before = self.runner.journal_position()
        everything = self._trial(None)
        self.claimed, recomputes = self.runner.claimed(before)
        self.elements = (*self.claimed, *((RECOMPUTE,) if recomputes else ()))
        self.trials[frozenset(self.elements)] = replace(everything, regions=self.elements)
        if not self.claimed:
            self.notes.append("no region was claimed; --option by_cost=False claims every region that onepass can compile")
        if not self.elements:
            return (), False
        if everything.excess <= self.slack and not self._changes():
            return (), False
        if self._diverges(()):
            return (), True
        return tuple(self._groups()), False

    def _changes(self) -> bool:
        """Whether a second run with all regions diverges. If results vary, every later trial runs twice and the worse counts."""
        again = self._trial(frozenset(self.elements), fresh=True)
        first = self.trials[frozenset(self.elements)]
        if again.excess != first.excess:
            self.runs = 2
            self.notes.append("the results of the step with regions vary from run to run, so every trial was run twice")
            self.trials[frozenset(self.elements)] = max(first, again, key=lambda t: t.excess)
        return again.excess > self.slack

    def _groups(self) -> list[BadGroup]:
        """Find minimal groups one by one, until the step agrees without them."""
        remaining, found = self.elements, []
        while self._diverges(remaining):
            group = minimal(remaining, self._diverges)
            trial = self.trials[frozenset(group)]
            found.append(BadGroup(tuple(map(self._suspect, group)), trial.excess, trial.worst))
            remaining = tuple(e for e in remaining if e not in group)
        return found

    def _diverges(self, elements: Collection[str]) -> bool:
        key = frozenset(elements)
        if key not in self.trials:
            self.trials[key] = self._trial(key)
        return self.trials[key].excess > self.slack

    def _trial(self, elements: frozenset[str] | None, fresh: bool = False) -> Trial:
        """Run the step with some regions; None means all."""
        names = tuple(e for e in self.elements if elements is None or e in elements)
        found = max((self._run(names, elements) for _ in range(self.runs)), key=lambda t: t.excess)
        self.log(found.line(self.slack) if elements is not None else found.line(self.slack).replace("no region", "all regions", 1))
        return found

    def _run(self, names: tuple[str, ...], elements: frozenset[str] | None) -> Trial:
        try:
            results = self.runner.run("with regions of onepass", **self._changed(elements))
        except OnepassError as error:
            if self.runner.ends_search(error):
                raise
            return Trial(names, math.inf, "", describe_error(error))
        return Trial(names, *worst_excess(results, self.reference))

    def _changed(self, elements: frozenset[str] | None) -> dict[str, Any]:
        """The settings for a run with only these elements."""
        if elements is None:
            return {}
        overrides = self.runner.overrides
        skip = (*overrides.get("skip", ()), *(region for region in self.claimed if region not in elements))
        return {"skip": skip, **({} if RECOMPUTE in elements else {"recompute": False})}

    def _suspect(self, element: str) -> Suspect:
        """The Suspect of an element: runs it alone, with every call of the region compared with float64."""
        if element == RECOMPUTE:
            return Suspect(element, (), "values that the backward recomputes instead of loading them from the forward", "")
        region = self.claimed[element]
        finding, where = "every call of it agrees with float64, so rounding or memory reuse causes the divergence", ""
        try:
            self.runner.run("checking one region", **self._changed(frozenset((element,))), verify="1/1")
        except OnepassError as error:
            wrong = self.runner.cause(error)
            finding = str(wrong.fields["detail"]) if isinstance(wrong, WrongAnswer) else describe_error(wrong)
            where = str(wrong.fields["repro"]) if isinstance(wrong, WrongAnswer) else ""
        layout = repro.Layout(str(region.part.outputs[0].meta["val"].device))
        where = where or repro.write_region(element, finding, region.program, region.bindings, layout)
        return Suspect(element, region.lines, finding, where)


def minimal(elements: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """A minimal subset that fails: without any one of its elements, it does not. All elements together must fail.

    Delta debugging: tries halves, then quarters, and so on, and the complements of each.
    """
    parts, kept = 2, tuple(elements)
    while len(kept) > 1:
        size = math.ceil(len(kept) / parts)
        chunks = [kept[i : i + size] for i in range(0, len(kept), size)]
        rests = [tuple(e for e in kept if e not in chunk) for chunk in chunks] if len(chunks) > 2 else []
        smaller = next((some for some in (*chunks, *rests) if fails(some)), None)
        if smaller is not None:
            parts = 2 if smaller in chunks else max(parts - 1, 2)
            kept = smaller
        elif parts < len(kept):
            parts = min(2 * parts, len(kept))
        else:
            break
    return kept


# ---- the outcome as text -----------------------------------------------------------------------------------------------------


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _headline(found: Bisection) -> str:
    counted = f"{found.regions} region{'s' * (found.regions != 1)}"
    if found.diverges_without_regions:
        return f"{found.what} diverges from {found.reference} with all {counted} disabled too: the cause is outside the regions."
    if not found.bad_groups:
        return f"{found.what}: no result diverges from {found.reference}, with {counted}."
    blamed = sum(len(group.suspects) for group in found.bad_groups)
    return f"{found.what} diverges from {found.reference}: {blamed} of {counted} responsible."


def _accusations(found: Bisection) -> list[str]:
    lines: list[str] = []
    for group in found.bad_groups:
        off = (
            "it fails"
            if math.isinf(group.excess) and not group.worst
            else (f"{group.worst} is off by {group.excess:.3g} times the bound of a single kernel")
        )
        together = " (only together)" if len(group.suspects) > 1 else ""
        lines.append(f"with {', '.join(s.region for s in group.suspects)} alone{together}, {off}")
        for s in group.suspects:
            lines += [f"  {s.region}: {s.finding}", *(f"    at {line}" for line in s.lines)]
            lines += [f"    reproducer: {s.repro}"] if s.repro else []
    if found.bad_groups:
        overrides = ", ".join(f"{name}={value!r}" for name, value in found.options.items())
        lines.append(f"to disable: torch.compile(..., options={found.options!r}), or: with onepass.settings({overrides})")
    return lines
