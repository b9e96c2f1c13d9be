"""The accuracy criterion: bounds a result's error against float64 by eager torch's own error.

A tensor's largest value must not hide errors in its small values: a softmax row can hold 1.0 and 1e-5. So the criterion applies to
the whole tensor and to each magnitude band. A band groups elements by their magnitude relative to the largest value of their row
or column (their slice).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_RMS_ELEMENTS = 8  # elements; with fewer, the RMS error is too noisy (a single correctly rounded number is off by up to 0.5 ulp)
MIN_BAND_ELEMENTS = 32  # elements a band needs for its own bounds; with fewer, the largest error is mostly chance
MIN_SLICE_ELEMENTS = 16  # elements a row or column needs for its own scale; two values may both be cancellation noise
BAND_BITS, BANDS = 2, 12  # a band spans a factor of 4; the last holds all below 2^-22 of the slice's largest value
SCALE_BITS, SCALES = 4, 6  # slices whose largest values differ by less than 16x are checked together
# Error allowance for results narrower than fp32, in fp32 ulps of the slice's largest value, because intermediates may be larger
# than the result. 16 fp32 ulps are 2^-20, which is one bfloat16 ulp at 2^-12 of the largest value.
INTERMEDIATE_ULPS = 16.0


@dataclass(frozen=True, slots=True)
class Check:
    """Errors of one result against float64 and their bounds, for the band closest to (or furthest beyond) its bounds.

    RMS errors of a band are relative to the slice's largest value, so that slices of different scale weigh the same.
    """

    max_error: float
    max_bound: float
    rms_error: float
    rms_bound: float
    where: str = "all elements"

    @property
    def ok(self) -> bool:
        """Whether both errors are within their bounds."""
        return self.excess <= 1.0

    @property
    def excess(self) -> float:
        """The larger error-to-bound ratio."""
        return max(_ratio(self.max_error, self.max_bound), _ratio(self.rms_error, self.rms_bound))


def check(result: Tensor, eager: Tensor, reference: Tensor, scale: Tensor | None = None, bands: bool = True) -> Check:
    """Check max error <= 1.5 x eager's + 1 ulp, and RMS error <= 1.1 x eager's + 0.5 ulp for enough elements.

    The whole tensor uses the ulp at its largest value; each band uses the ulp of each element, and a wider RMS bound
    (1.5 x eager's + 1 ulp) because it has few elements. All values must be finite. For flattened tensors, pass
    `scale = slice_scale(reference)`.
    """
    whole = _whole(result, eager, reference)
    if result.numel() < MIN_BAND_ELEMENTS or not bands:
        return whole
    return max(whole, *_bands(result, eager, reference, slice_scale(reference) if scale is None else scale), key=lambda c: c.excess)


def judge(result: Tensor, eager: Tensor, reference: Tensor, slack: float = 1.0) -> str | None:
    """Describe what is wrong with a result in one sentence; None if it is correct. Integers are compared exactly.

    `slack` multiplies the error bounds. NaNs and infinities must match regardless.
    """
    if not result.is_floating_point():
        wrong = int((result != eager).sum())
        return f"{wrong} of {result.numel()} elements differ from eager's" if wrong else None
    ours, theirs, rounded = result.double(), eager.double(), reference.to(result.dtype).double()
    # Eager rounds between ops and may overflow where a single rounding at the end does not. Either result is correct.
    mismatched = _nonfinite_mismatch(ours, theirs) & _nonfinite_mismatch(ours, rounded)
    if bool(mismatched.any()):
        return f"{int(mismatched.sum())} NaNs or infinities differ from eager's, the first at {mismatched.nonzero()[0].tolist()}"
    finite = ours.isfinite() & theirs.isfinite() & reference.isfinite()
    found = check(ours[finite].to(result.dtype), theirs[finite], reference[finite], slice_scale(reference)[finite])
    if found.excess <= slack:
        return None
    return (
        f"for {found.where}, the largest error against float64 is {found.max_error:.3g} (limit {found.max_bound:.3g}) and "
        f"the RMS error is {found.rms_error:.3g} (limit {found.rms_bound:.3g})"
    )


def ulp_at(value: float, dtype: torch.dtype) -> float:
    """One unit in the last place (ulp) of a dtype at a value. Subnormals are evenly spaced."""
    smallest = _smallest_subnormal(dtype)
    return max(torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1), smallest) if value else smallest


def slice_scale(reference: Tensor) -> Tensor:
    """For each element, the largest finite magnitude of its row or of its column, whichever is smaller."""
    magnitude = reference.abs().where(reference.isfinite(), 0.0)
    whole = magnitude.amax() if magnitude.numel() else magnitude.sum()
    scale = whole.expand_as(magnitude)
    for dim, extent in enumerate(magnitude.shape if magnitude.dim() > 1 else ()):
        if extent >= MIN_SLICE_ELEMENTS and magnitude.numel():
            scale = torch.minimum(scale, magnitude.amax(dim, keepdim=True))
    # A slice that holds only rounding errors has no meaningful scale.
    return torch.maximum(scale, whole * torch.finfo(torch.float32).eps)


def _whole(result: Tensor, eager: Tensor, reference: Tensor) -> Check:
    ulp = ulp_at(_max(reference.abs()), result.dtype) * _cpu_ulp_factor(result)
    ours, theirs = (reference - result.double()).abs(), (reference - eager.double()).abs()
    largest = 1.5 * _max(theirs) + ulp
    rms = 1.1 * _rms(theirs) + 0.5 * ulp if reference.numel() >= MIN_RMS_ELEMENTS else largest
    return Check(_max(ours), largest, _rms(ours), rms)


def _bands(result: Tensor, eager: Tensor, reference: Tensor, scale: Tensor) -> list[Check]:
    """One Check per band: elements of similar size relative to their slice, from slices of similar scale."""
    reference, scale = reference.reshape(-1), scale.reshape(-1).clamp_min(torch.finfo(torch.float64).tiny)
    ours, theirs = ((reference - t.reshape(-1).double()).abs() / scale for t in (result, eager))
    allowed = _rounding(reference, scale, result) / scale
    group, names = _groups(reference.abs(), scale)

    def largest(values: Tensor) -> Tensor:
        return torch.zeros(len(names), dtype=values.dtype, device=values.device).scatter_reduce(0, group, values, "amax")

    def rms(values: Tensor) -> Tensor:
        count = torch.bincount(group, minlength=len(names))
        return (torch.bincount(group, values.square(), minlength=len(names)) / count).sqrt()

    bound = 1.5 * largest(theirs)[group] + allowed
    worst_ratio = largest(ours / bound)
    at = (ours / bound >= worst_ratio[group]).nonzero().flatten()
    worst = torch.zeros(len(names), dtype=torch.int64, device=at.device).scatter_(0, group[at], at)
    rows = zip(
        (ours * scale)[worst].tolist(),
        (bound * scale)[worst].tolist(),
        rms(ours).tolist(),
        (1.5 * rms(theirs) + rms(allowed)).tolist(),
        names,
        strict=True,
    )
    return [Check(*row) for row in rows]


def _rounding(reference: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """The error that rounding alone may cause per element: one ulp, plus the fp32 rounding of intermediates."""
    info = torch.finfo(result.dtype)
    ulp = (info.eps * torch.exp2(torch.frexp(reference.abs()).exponent.double() - 1)).clamp_min(_smallest_subnormal(result.dtype))
    if info.bits < 32:
        return ulp + INTERMEDIATE_ULPS * torch.finfo(torch.float32).eps * scale
    return ulp + info.eps * scale * _cpu_ulp_factor(result)


def _groups(magnitude: Tensor, scale: Tensor) -> tuple[Tensor, list[str]]:
    """The band index of each element, and the bands' names. A band with too few elements is merged with the next."""
    # `band`: magnitude below the slice's largest value. `step`: the slice's scale below the largest slice's.
    band = (torch.log2(scale / magnitude.clamp_min(torch.finfo(torch.float64).tiny)) / BAND_BITS).clamp(0, BANDS - 1).long()
    step = (torch.log2(scale.amax() / scale) / SCALE_BITS).clamp(0, SCALES - 1).long()
    counts = torch.bincount(step * BANDS + band, minlength=SCALES * BANDS).tolist()
    joined, members, pending = [0] * len(counts), [list[int]()], 0
    for key, count in enumerate(counts):
        if pending >= MIN_BAND_ELEMENTS and count:
            members.append([])
            pending = 0
        joined[key] = len(members) - 1
        if count:
            members[-1].append(key)
            pending += count
    if pending < MIN_BAND_ELEMENTS and len(members) > 1:
        last = members.pop()
        members[-1] += last
        joined = [min(number, len(members) - 1) for number in joined]
    return torch.tensor(joined, device=band.device)[step * BANDS + band], [_name(keys) for keys in members]


def _name(keys: list[int]) -> str:
    first, last = min(key % BANDS for key in keys), max(key % BANDS for key in keys)
    if first == 0 and last == BANDS - 1:
        return "all elements of some slices"
    upper = "" if first == 0 else f" below 2^-{first * BAND_BITS}"
    lower = "" if last == BANDS - 1 else f" above 2^-{(last + 1) * BAND_BITS}"
    return f"elements{lower}{' and' if lower and upper else ''}{upper} of their slice's largest value"


def _cpu_ulp_factor(result: Tensor) -> float:
    """A factor on the ulps allowed: 2 for fp32 on a CPU, where eager is more accurate than the interpreter.

    Torch's fp32 CPU kernels accumulate in float64 and use fused multiply-adds. Triton's interpreter does neither.
    """
    return 2.0 if result.device.type == "cpu" and result.dtype == torch.float32 else 1.0


def _smallest_subnormal(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def _ratio(error: float, bound: float) -> float:
    return error / bound if bound else math.inf if error else 0.0


def _nonfinite_mismatch(a: Tensor, b: Tensor) -> Tensor:
    """Elements where one tensor is NaN or infinite and the other differs."""
    return (a.isnan() != b.isnan()) | ((a.isinf() | b.isinf()) & (a != b) & ~a.isnan())


def _max(error: Tensor) -> float:
    return float(error.max()) if error.numel() else 0.0


def _rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt()) if error.numel() else 0.0
