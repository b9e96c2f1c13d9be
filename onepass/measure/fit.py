"""Fits the constants of the cost model to the stored measurements, by coordinate descent.

Errors of predicted times and regrets of choices are made small together, on three quarters of the workloads; the others judge.
Steps, order and measurements are fixed, so a fit always ends the same.

A cost model is used where nothing was measured, and predictions nobody checked must not move plans. So the fitted constants replace
those in the file only if they are better on the workloads that were held out, and no choice that was measured gets slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ..constants import CostConstants, Entry
from .fit_judge import REGRET_WEIGHT, Choice, Judgement, choice, grouped, judge, judgement, log_error
from .fit_samples import Sample

FACTORS = (1.25, 0.8, 1.05, 0.95)  # that a constant is tried multiplied with
PASSES = 4  # over all constants
LEAST_GAIN = 0.0005  # of the objective, for a step to be taken
LEAST_HELD_OUT_GAIN = 0.02  # share of the objective on held-out workloads, for a fit to be taken
DIGITS = 3
FITTED = ("fitted", "kept")  # bases of constants that measurements support
# The value at which a constant has no effect, by its unit; rates, exponents and counts have none.
WITHOUT = {"us": 0.0, "us of SM time": 0.0, "share": 0.0, "instructions": 0.0, "latencies": 0.0, "factor": 1.0}

Log = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Fit:
    """The outcome of a fit."""

    before: CostConstants
    fitted: CostConstants
    train: tuple[Judgement, Judgement]  # with the constants before and after
    held_out: tuple[Judgement, Judgement]
    slower: tuple[tuple[Choice, Choice], ...]  # choices that changed without being measured faster
    taken: bool

    @property
    def constants(self) -> CostConstants:
        """What the file should hold."""
        return self.fitted if self.taken else self.before

    @property
    def changed_values(self) -> dict[str, float]:
        """The constants to write."""
        return {name: after for name, (_, after) in self.changed.items()} if self.taken else {}

    @property
    def changed(self) -> dict[str, tuple[float, float]]:
        """The constants that the descent moved, before and after."""
        pairs = {f.name: (getattr(self.before, f.name), getattr(self.fitted, f.name)) for f in fields(self.before)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class _Search:
    """Constants with the errors and choices they give. A step only predicts again what it changes."""

    def __init__(self, found: Sequence[Sample], constants: CostConstants, names: Sequence[str]) -> None:
        self.constants, self.samples = constants, tuple(found)
        self.groups = [members for members in grouped(found).values() if len(members) > 1]
        self.group_of = {id(s): k for k, members in enumerate(self.groups) for s in members}
        self.errors = [log_error(s, s.predicted_us(constants)) for s in self.samples]
        self.choices = [choice(members, constants) for members in self.groups]
        self.moved = {name: self._moved(name) for name in names}

    def _moved(self, name: str) -> list[int]:
        """The samples whose predictions depend on a constant."""
        value = getattr(self.constants, name)
        others = [replace(self.constants, **{name: value * factor}) for factor in FACTORS[:2]]
        return [k for k, s in enumerate(self.samples) if len({s.predicted_us(c) for c in (self.constants, *others)}) > 1]

    @property
    def objective(self) -> float:
        """What is made small."""
        return self._objective(self.errors, self.choices)

    def _objective(self, errors: list[float], choices: list[Choice | None]) -> float:
        known = [c for c in choices if c]
        return judgement(errors, known).objective if errors else 0.0

    def try_value(self, name: str, value: float) -> bool:
        """Take another value of a constant if that is better."""
        other = replace(self.constants, **{name: value})
        errors, choices = list(self.errors), list(self.choices)
        for k in self.moved[name]:
            errors[k] = log_error(self.samples[k], self.samples[k].predicted_us(other))
        for k in {self.group_of[id(self.samples[k])] for k in self.moved[name] if id(self.samples[k]) in self.group_of}:
            choices[k] = choice(self.groups[k], other)
        if self._objective(errors, choices) > self.objective - LEAST_GAIN:
            return False
        self.constants, self.errors, self.choices = other, errors, choices
        return True


def fittable(entries: Mapping[str, Entry]) -> tuple[str, ...]:
    """The constants of the cost model that measurements support, except those that ties and exponents are."""
    return tuple(name for name, e in entries.items() if e.basis in FITTED and e.unit != "exponent")


def descend(found: Sequence[Sample], start: CostConstants, names: Sequence[str], log: Log = lambda _: None) -> CostConstants:
    """Constants with a smaller objective on some samples: each in turn, by fixed factors, until no step helps."""
    search = _Search(found, start, names)
    for turn in range(PASSES):
        steps = 0
        for name in names:
            for factor in FACTORS:
                value = float(f"{getattr(search.constants, name) * factor:.{DIGITS}g}")
                steps += search.try_value(name, value)
        log(f"pass {turn + 1}: {steps} steps, objective {search.objective:.4f}")
        if not steps:
            break
    return search.constants


def fit(found: Sequence[Sample], start: CostConstants, names: Sequence[str], log: Log = lambda _: None) -> Fit:
    """Fit to the workloads that are not held out, and judge by those that are."""
    train, rest = [s for s in found if not s.held_out], [s for s in found if s.held_out]
    fitted = descend(train, start, names, log)
    judged = judge(rest, start), judge(rest, fitted)
    slower = slower_choices(found, start, fitted)
    better = judged[1].objective < judged[0].objective * (1 - LEAST_HELD_OUT_GAIN)
    return Fit(start, fitted, (judge(train, start), judge(train, fitted)), judged, slower, better and not slower)


def slower_choices(found: Sequence[Sample], before: CostConstants, after: CostConstants) -> tuple[tuple[Choice, Choice], ...]:
    """Choices among measured schedules that take longer with other constants."""
    pairs = ((choice(members, before), choice(members, after)) for members in grouped(found).values())
    return tuple((a, b) for a, b in pairs if a and b and b.regret > a.regret)


@dataclass(frozen=True, slots=True)
class Ablation:
    """What it costs to do without one constant."""

    name: str
    value: float
    samples: int  # whose predictions depend on it
    error: float  # rise of the root mean square error
    regret: float  # rise of the mean regret
    choices: int  # that change

    @property
    def objective(self) -> float:
        """Rise of the objective."""
        return self.error + REGRET_WEIGHT * self.regret


def ablate(found: Sequence[Sample], constants: CostConstants, entries: Mapping[str, Entry]) -> tuple[Ablation, ...]:
    """What each constant that can be left out is worth, the least first."""
    base, groups = judge(found, constants), grouped(found)
    chosen = [choice(members, constants) for members in groups.values()]
    rows = []
    for name, entry in entries.items():
        value = getattr(constants, name)
        if entry.unit not in WITHOUT or value == WITHOUT[entry.unit]:
            continue
        without = replace(constants, **{name: type(value)(WITHOUT[entry.unit])})
        moved = sum(s.predicted_us(without) != s.predicted_us(constants) for s in found)
        other, now = judge(found, without), [choice(members, without) for members in groups.values()]
        rows.append(
            Ablation(
                name,
                value,
                moved,
                other.rms_error - base.rms_error,
                other.mean_regret - base.mean_regret,
                sum(a != b for a, b in zip(chosen, now, strict=True)),
            )
        )
    return tuple(sorted(rows, key=lambda a: (a.objective, a.name)))
