"""What the results of a step are held against, and how far off they may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NotDeterministic, StepFailed
from ..ir.criterion import check, slice_scale, ulp_at
from .runner import Runner
from .step import Results, relative_rms

SMALL_RESULT = 32  # numbers whose largest error is luck: a loss may be right to the last bit in one run and 10 ulp off in the next
SMALL_RESULT_ULPS = 16  # ulp that so few may be off beyond their bound
REPEAT_EPS = 64  # eps that two runs without regions may differ by: atomic additions come in another order each time
MAX_ROUNDING = 0.1  # a distance from eager's results that is more than rounding


@dataclass(frozen=True)
class Reference:
    """What results are held against: `exact`, within bounds that follow from the errors of `other`."""

    exact: Results
    other: Results
    name: str
    notes: tuple[str, ...]


def make_reference(runner: Runner) -> Reference:
    """Run the step without regions in every way that tells something. NotRepeatable if it is another each time."""
    plain = runner.without_regions()
    notes = _repeats(plain, runner.without_regions(), runner.factory.text)
    eager = plain if runner.rest == "eager" else runner.in_eager_mode()
    exact, why = _in_float64(runner, eager)
    if exact is not None:
        return Reference(exact, plain, "float64", (*notes, *_unlike(_differences(eager, plain), plain)))
    # What rounding does is seen between two compilers, where both draw the same random numbers.
    drawn_alike = runner.by_inductor(fallback_random=True) if runner.uses_random or runner.rest == "eager" else plain
    errors = _differences(eager, drawn_alike)
    by = "eager" if runner.rest == "eager" else "Inductor"
    return Reference(plain, _off_by(plain, errors), f"{by}'s results", (*notes, why, *_unlike(errors, plain)))


def _repeats(one: Results, other: Results, what: str) -> tuple[str, ...]:
    """What is to be said of two runs of the same step."""
    if one.keys() != other.keys():
        raise NotDeterministic(what=what, detail=f"{len(one)} results, then {len(other)}")
    apart = {name: relative_rms(other[name], t) for name, t in one.items()}
    for name, far in apart.items():
        eps = torch.finfo(one[name].dtype).eps if one[name].dtype.is_floating_point else 0.0
        if far > REPEAT_EPS * eps:
            raise NotDeterministic(what=what, detail=f"{name} of two runs is {far:.2g} apart")
    changing = [name for name, far in apart.items() if far]
    return (f"the last bits of {', '.join(changing[:3])} change from run to run, without any region",) if changing else ()


def _in_float64(runner: Runner, eager: Results) -> tuple[Results | None, str]:
    """The step's results in float64, or why they are of no use."""
    if runner.uses_random:
        return None, "not held against float64, as the step draws random numbers"
    try:
        exact = runner.in_float64()
    except StepFailed as error:
        return None, f"not held against float64: {error.fields['error']}"
    if exact.keys() != eager.keys():
        return None, "not held against float64: there it gives other results"
    far = {name: relative_rms(t, exact[name]) for name, t in eager.items()}
    worst = max(far, key=far.__getitem__)
    if far[worst] > MAX_ROUNDING:
        return None, f"not held against float64: eager's {worst} is {far[worst]:.2g} off"
    return exact, ""


def _differences(eager: Results, plain: Results) -> Results:
    """How far eager's results are from Inductor's, element by element, where that looks like rounding."""
    comparable = {name: t for name, t in eager.items() if name in plain and relative_rms(t, plain[name]) <= MAX_ROUNDING}
    return {name: t.double() - plain[name].double() for name, t in comparable.items() if t.dtype.is_floating_point}


def _unlike(errors: Results, plain: Results) -> tuple[str, ...]:
    unlike = [name for name, t in plain.items() if t.dtype.is_floating_point and name not in errors]
    return (f"Inductor without any region is far from eager: {', '.join(unlike[:3])}",) if unlike else ()


def _off_by(plain: Results, errors: Results) -> Results:
    return {name: t.double() + errors[name] if name in errors else t for name, t in plain.items()}


# ---- how far off -------------------------------------------------------------------------------------------------------------


def worst_excess(mine: Results, reference: Reference) -> tuple[float, str]:
    """How far the worst result is off, in units of what is allowed of a single kernel, and which it is."""
    if mine.keys() != reference.other.keys():
        return math.inf, "the number of results"
    found = {name: _excess(t, reference.other[name], reference.exact[name]) for name, t in mine.items()}
    worst = max(found, key=found.__getitem__)
    return found[worst], worst


def _excess(mine: Tensor, other: Tensor, exact: Tensor) -> float:
    if mine.is_complex():
        return max(_excess(*(part(t) for t in (mine, other, exact))) for part in (torch.real, torch.imag))
    if mine.shape != exact.shape:
        return math.inf
    if not mine.is_floating_point():
        return math.inf if torch.equal(other, exact) and not torch.equal(mine, exact) else 0.0
    wide, theirs, right = mine.double(), other.double(), exact.double()
    known = theirs.isfinite() & right.isfinite()
    if not bool(wide[known].isfinite().all()):
        return math.inf
    known &= wide.isfinite()
    found = check(wide[known].to(mine.dtype), theirs[known], right[known], slice_scale(right)[known])
    if int(known.sum()) >= SMALL_RESULT:
        return found.excess
    spare = SMALL_RESULT_ULPS * ulp_at(float(right[known].abs().max()) if bool(known.any()) else 0.0, mine.dtype)
    return found.max_error / (found.max_bound + spare)
