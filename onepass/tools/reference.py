"""The reference results for `onepass bisect`, and the error bounds around them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NotDeterministic, StepFailed
from ..ir.criterion import check, slice_scale, ulp_at
from .runner import Runner
from .step import Results, relative_rms

# Below this many elements the largest error is mostly random: a loss may be exact in one run and 10 ulp off in the next.
SMALL_RESULT = 32
SMALL_RESULT_ULPS = 16  # extra tolerance of such results, in ulp
REPEAT_EPS = 64  # eps by which two runs without regions may differ, because the order of atomic additions varies
MAX_ROUNDING = 0.1  # relative RMS difference from eager that is too large to be rounding


@dataclass(frozen=True)
class Reference:
    """Reference results `exact`, with error bounds derived from the errors of `other`."""

    exact: Results
    other: Results
    name: str
    notes: tuple[str, ...]


def make_reference(runner: Runner) -> Reference:
    """Run the step without regions in several modes to get the reference. Raises NotDeterministic if its results vary."""
    plain = runner.without_regions()
    notes = _repeats(plain, runner.without_regions(), runner.factory.text)
    eager = plain if runner.rest == "eager" else runner.in_eager_mode()
    exact, why = _in_float64(runner, eager)
    if exact is not None:
        return Reference(exact, plain, "float64", (*notes, *_unlike(_differences(eager, plain), plain)))
    # The effect of rounding is estimated from two compilers that draw the same random numbers.
    drawn_alike = runner.by_inductor(fallback_random=True) if runner.uses_random or runner.rest == "eager" else plain
    errors = _differences(eager, drawn_alike)
    by = "eager" if runner.rest == "eager" else "Inductor"
    return Reference(plain, _off_by(plain, errors), f"{by}'s results", (*notes, why, *_unlike(errors, plain)))


def _repeats(one: Results, other: Results, what: str) -> tuple[str, ...]:
    """Notes on the differences between two runs of the same step. Raises NotDeterministic if they are too large."""
    if one.keys() != other.keys():
        raise NotDeterministic(what=what, detail=f"{len(one)} results, then {len(other)}")
    differences = {name: relative_rms(other[name], t) for name, t in one.items()}
    for name, far in differences.items():
        eps = torch.finfo(one[name].dtype).eps if one[name].dtype.is_floating_point else 0.0
        if far > REPEAT_EPS * eps:
            raise NotDeterministic(what=what, detail=f"{name} of two runs is {far:.2g} apart")
    changing = [name for name, far in differences.items() if far]
    return (f"the last bits of {', '.join(changing[:3])} vary from run to run, even without regions",) if changing else ()


def _in_float64(runner: Runner, eager: Results) -> tuple[Results | None, str]:
    """The step's results in float64, or None and the reason why they cannot be used."""
    if runner.uses_random:
        return None, "not compared with float64: the step draws random numbers"
    try:
        exact = runner.in_float64()
    except StepFailed as error:
        return None, f"not compared with float64: {error.fields['error']}"
    if exact.keys() != eager.keys():
        return None, "not compared with float64: the step returns other results there"
    far = {name: relative_rms(t, exact[name]) for name, t in eager.items()}
    worst = max(far, key=far.__getitem__)
    if far[worst] > MAX_ROUNDING:
        return None, f"not compared with float64: eager's {worst} is off by {far[worst]:.2g}"
    return exact, ""


def _differences(eager: Results, plain: Results) -> Results:
    """Elementwise differences between eager's and Inductor's results, for results where they are small enough to be rounding."""
    comparable = {name: t for name, t in eager.items() if name in plain and relative_rms(t, plain[name]) <= MAX_ROUNDING}
    return {name: t.double() - plain[name].double() for name, t in comparable.items() if t.dtype.is_floating_point}


def _unlike(errors: Results, plain: Results) -> tuple[str, ...]:
    unlike = [name for name, t in plain.items() if t.dtype.is_floating_point and name not in errors]
    return (f"Inductor without any region is far from eager: {', '.join(unlike[:3])}",) if unlike else ()


def _off_by(plain: Results, errors: Results) -> Results:
    return {name: t.double() + errors[name] if name in errors else t for name, t in plain.items()}


# ---- errors ------------------------------------------------------------------------------------------------------------------


def worst_excess(results: Results, reference: Reference) -> tuple[float, str]:
    """The error of the worst result, as a multiple of the bound for a single kernel, and the name of that result."""
    if results.keys() != reference.other.keys():
        return math.inf, "the number of results"
    found = {name: _excess(t, reference.other[name], reference.exact[name]) for name, t in results.items()}
    worst = max(found, key=found.__getitem__)
    return found[worst], worst


def _excess(result: Tensor, other: Tensor, exact: Tensor) -> float:
    if result.is_complex():
        return max(_excess(*(part(t) for t in (result, other, exact))) for part in (torch.real, torch.imag))
    if result.shape != exact.shape:
        return math.inf
    if not result.is_floating_point():
        return math.inf if torch.equal(other, exact) and not torch.equal(result, exact) else 0.0
    result_wide, other_wide, exact_wide = result.double(), other.double(), exact.double()
    known = other_wide.isfinite() & exact_wide.isfinite()
    if not bool(result_wide[known].isfinite().all()):
        return math.inf
    known &= result_wide.isfinite()
    found = check(result_wide[known].to(result.dtype), other_wide[known], exact_wide[known], slice_scale(exact_wide)[known])
    if int(known.sum()) >= SMALL_RESULT:
        return found.excess
    spare = SMALL_RESULT_ULPS * ulp_at(float(exact_wide[known].abs().max()) if bool(known.any()) else 0.0, result.dtype)
    return found.max_error / (found.max_bound + spare)
