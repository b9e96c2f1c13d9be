"""The criterion: how far a result may be from float64, measured against how far eager torch is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Check:
    """Errors of one result against float64, and the bounds eager's own errors set."""

    max_error: float
    max_bound: float
    rms_error: float
    rms_bound: float

    @property
    def ok(self) -> bool:
        """Whether both errors keep within their bounds."""
        return self.max_error <= self.max_bound and self.rms_error <= self.rms_bound


FEW = 8  # numbers whose RMS error says nothing: of a single one, rounded as well as can be, it is up to half an ulp


def check(result: Tensor, eager: Tensor, reference: Tensor) -> Check:
    """Max error <= 1.5 x eager's + 1 ulp at max|reference|; RMS error <= 1.1 x eager's + 0.5 ulp, where there are many numbers."""
    ulp = spacing(_max(reference.abs()), result.dtype)
    ours, theirs = (reference - result.double()).abs(), (reference - eager.double()).abs()
    largest = 1.5 * _max(theirs) + ulp
    return Check(_max(ours), largest, _rms(ours), 1.1 * _rms(theirs) + 0.5 * ulp if reference.numel() >= FEW else largest)


def spacing(value: float, dtype: torch.dtype) -> float:
    """One unit in the last place of a dtype at a value; below its normal range all values are equally far apart."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    return max(info.eps * 2.0 ** (math.frexp(value)[1] - 1), least) if value else least


def judge(result: Tensor, eager: Tensor, reference: Tensor) -> str | None:
    """What is wrong with a result, in a sentence; None if nothing is. Integers are compared exactly.

    On CPU fp32 results get one ulp more: torch's kernels there accumulate in float64 and contract multiplications with
    additions, which a kernel does on a GPU and an interpreter does not.
    """
    if not result.is_floating_point():
        wrong = int((result != eager).sum())
        return f"{wrong} of {result.numel()} elements differ from eager's" if wrong else None
    mine, theirs, rounded = result.double(), eager.double(), reference.to(result.dtype).double()
    # Eager rounds between ops and may overflow where one rounding at the end does not: either is right.
    odd = _differs(mine, theirs) & _differs(mine, rounded)
    if bool(odd.any()):
        return f"{int(odd.sum())} NaNs or infinities are unlike eager's, the first at {odd.nonzero()[0].tolist()}"
    finite = mine.isfinite() & theirs.isfinite() & reference.isfinite()
    found = check(mine[finite].to(result.dtype), theirs[finite], reference[finite])
    spare = 0.0
    if result.device.type == "cpu" and result.dtype == torch.float32:
        spare = spacing(_max(reference[finite].abs()), torch.float32)
    if found.max_error <= found.max_bound + spare and found.rms_error <= found.rms_bound + 0.5 * spare:
        return None
    return (f"its largest error against float64 is {found.max_error:.3g} where {found.max_bound:.3g} is allowed, "
            f"its RMS error {found.rms_error:.3g} where {found.rms_bound:.3g} is")


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Where one is NaN or infinite and the other is not the same."""
    return (a.isnan() != b.isnan()) | ((a.isinf() | b.isinf()) & (a != b) & ~a.isnan())


def _max(error: Tensor) -> float:
    return float(error.max()) if error.numel() else 0.0


def _rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt()) if error.numel() else 0.0
