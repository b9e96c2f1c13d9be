"""Compare results with eager torch and float64: the same form, and right values wherever rounding does not decide.

Where a rounding decides between two results (a comparison, a cast to integers, an overflow), references that are computed a
little differently disagree with each other, and a result that one of them gives is not counted as wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onepass.ir.criterion import judge

EXACT = 2.0**-22  # of the largest value: constants such as 1/6 are rounded to fp32
LEAST = 1e-6  # anything smaller may be the rounding left by a cancellation
DRAWS, STEPS = 3, {"narrow": 2.0**-7, "single": 2.0**-18, "double": 1e-11}

Results = tuple[Any, ...]


@dataclass(frozen=True)
class Truth:
    """The reference for results. `reference` computes in float64 from arguments moved by `step`, None for the arguments
    themselves. `exactly`: the results are float64 too. `overlaps`: strides are not compared, because fake tensors that
    overlap themselves give other strides than real ones. `traced` gives fake results: torch gives those of its
    decompositions another layout than eager's at times, or another type (huber_loss of two), and every compiler gets them so.
    `loses_infinities`: the mean of var_mean is infinite in eager if the infinity comes last, else NaN; here it is always
    NaN."""

    eager: Results
    reference: Callable[[float | None, int], Results]
    precision: str = "single"  # a key of STEPS: how far one rounding may move a value
    exactly: bool = False
    overlaps: bool = False
    traced: Callable[[], Results] | None = None
    loses_infinities: bool = False


def compared(actual: Results, truth: Truth) -> tuple[str, str, int]:
    """The verdict (right, noise, skipped, form or wrong), what is wrong, and the output concerned."""
    if len(actual) != len(truth.eager):
        return "form", f"{len(actual)} results, not {len(truth.eager)}", 0
    for k, (one, other) in enumerate(zip(actual, truth.eager, strict=True)):
        if (wrong := _form(one, other, truth)) and not (wrong.startswith(("strides", "dtype")) and _as_traced(one, k, truth)):
            return "form", wrong, k
    try:
        exact = truth.reference(None, 0)
    except Exception as error:
        return "skipped", f"no float64 reference: {error}", 0
    kind = "right"
    for k, (one, other, reference) in enumerate(zip(actual, truth.eager, exact, strict=True)):
        judged = isinstance(other, torch.Tensor) and other.numel()
        if judged and (differs := _wrong(one, other, reference, truth.exactly)):
            if odd := _undecided(k, one, other, reference, truth):
                return "wrong", f"{odd}; {differs}", k
            kind = "noise"
    return kind, "", 0


def differ_exactly(actual: torch.Tensor, reference: torch.Tensor, slack: float = EXACT) -> str | None:
    """How two float64 results differ beyond the order of sums, or `slack` of the largest value; None if they do not."""
    if not actual.numel():
        return None
    if not actual.is_floating_point():
        return None if torch.equal(actual, reference.to(actual.dtype)) else "integers differ from float64's"
    a, b = actual.double(), reference.double()
    largest = b.abs().where(b.isfinite(), 0).amax().clamp_min(LEAST)
    same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= slack * largest)
    return None if bool(same.all()) else f"{int((~same).sum())} elements differ from float64's"


def moved(value: Any, step: float | None, draw: int) -> Any:
    """An argument in float64, its floats a rounding away."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    wide = value.detach().double()
    if step is not None:
        noise = torch.Generator().manual_seed(draw)
        sign = torch.randint(0, 2, value.shape, generator=noise).double() * 2 - 1
        wide = wide * (1 + step * sign.to(value.device))
    return wide.requires_grad_(value.requires_grad)


def precision_of(dtypes: set[torch.dtype], exactly: bool = False) -> str:
    """How far one rounding may move a value that meets these types."""
    if exactly:
        return "double"
    return "narrow" if any(d.is_floating_point and d.itemsize < 4 for d in dtypes) else "single"


def _form(actual: Any, eager: Any, truth: Truth) -> str:
    if not isinstance(eager, torch.Tensor):
        return "" if type(actual) is type(eager) and (actual == eager or actual != actual) else f"value: {actual!r}, not {eager!r}"
    if not isinstance(actual, torch.Tensor):
        return f"type: {type(actual).__name__}, not a tensor"
    if actual.shape != eager.shape:
        return f"shape: {tuple(actual.shape)}, not {tuple(eager.shape)}"
    if not truth.exactly and actual.dtype != eager.dtype:
        return f"dtype: {actual.dtype}, not {eager.dtype}"
    if eager.numel() and not truth.overlaps and _steps(actual) != _steps(eager):
        return f"strides: {actual.stride()}, not {eager.stride()}"
    return ""


def _as_traced(actual: torch.Tensor, k: int, truth: Truth) -> bool:
    """Whether a result has the type and layout of torch's fake result."""
    expected = truth.traced()[k] if truth.traced is not None else None
    return expected is not None and (truth.exactly or expected.dtype == actual.dtype) and _steps(expected) == _steps(actual)


def _steps(t: torch.Tensor) -> list[int]:
    """The strides of dims with more than one element."""
    return [step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1]


def _wrong(actual: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor, exactly: bool) -> str | None:
    if exactly:
        return differ_exactly(actual, reference)
    return judge(actual, eager, reference.double() if reference.is_floating_point() else reference)


def _undecided(k: int, actual: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor, truth: Truth) -> str:
    """What is wrong with the elements on which all references agree; empty if nothing is."""
    references = [reference.double(), eager.double()]
    for draw in range(DRAWS):
        try:
            references.append(truth.reference(STEPS[truth.precision], draw)[k].double())
        except Exception:
            continue
    stacked, given = torch.stack([r.cpu() for r in references]), actual.double().cpu()
    finite, middle = stacked.isfinite().all(0), stacked[0]
    spread = torch.where(finite, (stacked - middle).abs().amax(0), 0.0)
    slack = _slack(actual, truth.exactly)
    scale = torch.where(finite, middle.abs(), 0.0).amax() if slack and not truth.exactly else middle.abs()
    near = (given - middle).abs() <= 8 * spread + slack * torch.maximum(middle.abs(), 2.0**-6 * scale)
    alike = (given == middle) | (given.isnan() & middle.isnan()) | (truth.loses_infinities & given.isnan() & middle.isinf())
    bad = _all_alike(stacked) & ~torch.where(finite, near | alike, alike) & ~_fails(stacked)
    if not bool(bad.any()):
        return ""
    at = tuple(bad.nonzero()[0].tolist())
    return (
        f"{int(bad.sum())} of {bad.numel()}, first at {list(at)}: {float(given[at])!r}, eager {float(eager[at])!r}, "
        f"float64 {float(middle[at])!r}"
    )


def _fails(stacked: torch.Tensor) -> torch.Tensor:
    """Where eager itself is off by half the value on which all float64 references agree: something overflowed in its type."""
    exact, eager = torch.cat([stacked[:1], stacked[2:]]), stacked[1]
    agree = (exact - exact[0]).abs().amax(0) <= 0.1 * exact[0].abs()
    return agree & ~((eager - exact[0]).abs() <= 0.5 * exact[0].abs())


def _slack(actual: torch.Tensor, exactly: bool) -> float:
    """The relative error that a result's own type allows; none for integers."""
    if not actual.is_floating_point():
        return 0.0
    return EXACT if exactly else 4 * torch.finfo(actual.dtype).eps + 2.0**-18


def _all_alike(stacked: torch.Tensor) -> torch.Tensor:
    """Where all references are finite, or the same special value."""
    nan, first = stacked.isnan(), stacked[0]
    return nan.all(0) | (~nan.any(0) & (stacked.isfinite().all(0) | (stacked == first).all(0)))
