"""How well constants predict and choose: errors of predicted times, and regrets of chosen schedules, on stored measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from ..constants import CostConstants
from ..plan.resources import ctas_per_sm
from ..plan.scoring import Scored, choose, fits_one_wave
from .fit_samples import Sample
from .regret import NEAR_BEST

LARGEST_ERROR = 0.5  # of a logarithm; larger ones count as this, because such schedules are never chosen
REGRET_WEIGHT = 4.0  # of the mean regret against the root mean square error


@dataclass(frozen=True, slots=True)
class Choice:
    """The schedule that the planner takes among those measured side by side, and how much longer it takes than the best."""

    id: str
    group: str
    family: str
    held_out: bool
    measured: int
    regret: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """Errors and regrets of some samples."""

    samples: int
    median_error: float  # of |predicted / measured - 1|
    rms_error: float  # of its logarithm, cut off
    choices: int
    mean_regret: float
    near_best: float  # share of choices within NEAR_BEST of the best
    worst_regret: float

    @property
    def objective(self) -> float:
        """What the fit makes small."""
        return self.rms_error + REGRET_WEIGHT * self.mean_regret


def grouped(found: Iterable[Sample]) -> Mapping[tuple[str, str], tuple[Sample, ...]]:
    """Samples of one workload that were measured side by side."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in found:
        groups.setdefault((sample.seen.group, sample.seen.id), []).append(sample)
    return {key: tuple(members) for key, members in groups.items()}


def errors(found: Sequence[Sample], constants: CostConstants) -> list[float]:
    """Logarithms of predicted over measured times."""
    return [log_error(s, s.predicted_us(constants)) for s in found]


def log_error(sample: Sample, us: float) -> float:
    """The logarithm of a predicted time over the measured one, cut off."""
    return max(-LARGEST_ERROR, min(LARGEST_ERROR, log(us / sample.seen.us)))


def choice(members: Sequence[Sample], constants: CostConstants) -> Choice | None:
    """What the planner chooses among some measured schedules; None if it expects fewer than two to fit."""
    able = [s for s in members if s.may_be_chosen]
    if len(able) < 2:
        return None
    taken = _taken(able, [s.scored(constants) for s in able], constants)
    best = min(s.seen.us for s in members)
    return Choice(taken.seen.id, taken.seen.group, taken.schedule.family, taken.held_out, len(members), taken.seen.us / best - 1)


def _taken(able: Sequence[Sample], scored: list[Scored], constants: CostConstants) -> Sample:
    """The sample that is run. As the pipeline does, score one again of which at most half as many CTAs fit as was expected."""
    for _ in able:
        best = choose(scored)
        at = next(i for i, s in enumerate(scored) if s is best)
        fit = _fitting_ctas(able[at])
        expected = best.plan.resources.ctas_per_sm
        if fit is None or fit >= expected or not 2 * fit <= expected and fits_one_wave(able[at].schedule, fit, able[at].device):
            break
        if fit < 1:
            del scored[at]
            able = [*able[:at], *able[at + 1 :]]
        else:
            scored[at] = replace(able[at], resources=replace(able[at].resources, ctas_per_sm=fit)).scored(constants)
    return able[at]


def _fitting_ctas(sample: Sample) -> int | None:
    """How many CTAs fit an SM with the registers that the kernel was compiled to."""
    registers = sample.seen.registers
    if registers is None:
        return None
    return ctas_per_sm(registers, sample.resources.smem_bytes, sample.schedule.warps, sample.device)


def judge(found: Sequence[Sample], constants: CostConstants) -> Judgement:
    """The errors and regrets of constants on some samples."""
    choices = [c for members in grouped(found).values() if (c := choice(members, constants))]
    return judgement(errors(found, constants), choices)


def judgement(logs: Sequence[float], choices: Sequence[Choice]) -> Judgement:
    """Errors and regrets, summed up."""
    if not logs:
        return Judgement(0, 0.0, 0.0, 0, 0.0, 1.0, 0.0)
    regrets = [c.regret for c in choices]
    return Judgement(
        len(logs),
        statistics.median(abs(exp(e) - 1) for e in logs),
        statistics.fmean(e * e for e in logs) ** 0.5,
        len(regrets),
        statistics.fmean(regrets or [0.0]),
        sum(r <= NEAR_BEST for r in regrets) / max(len(regrets), 1),
        max(regrets, default=0.0),
    )
