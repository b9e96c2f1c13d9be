"""The criterion: how far a result may be from float64, measured against how far eager torch is.

A tensor's largest value must not hide the errors of its small ones: a softmax row holds a 1.0 beside values of 1e-5. So the
criterion holds for the tensor as a whole, and for each of its magnitude bands, where an element's magnitude is counted from
the largest value of the row or column it lies in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_RMS_ELEMENTS = 8  # numbers whose RMS error says nothing: of a single one, rounded as well as can be, it is up to half an ulp
MIN_BAND_ELEMENTS = 32  # numbers from which a band has bounds of its own: the largest error of fewer is luck, ours and eager's
MIN_SLICE_ELEMENTS = 16  # elements from which a row or column has a scale of its own: of two, both may be what cancellation left
BAND_BITS, BANDS = 2, 12  # a band is a factor of 4 wide; the last one holds what is below 2^-22 of its slice's largest value
SCALE_BITS, SCALES = 4, 6  # slices whose largest values differ by less than 16 times are judged together
# fp32 roundings of a slice's largest value that a result narrower than fp32 may carry. What a small element was computed from
# may be larger than the slice itself: 16 of them are 2^-20, an ulp of bfloat16 at 2^-12 of the largest value.
INTERMEDIATE_ULPS = 16.0


@dataclass(frozen=True, slots=True)
class Check:
    """Errors of one result against float64, and the bounds eager's own errors set, in the band that keeps them least well.

    RMS errors of a band are in units of the slice's largest value, so that slices of different scale count alike.
    """

    max_error: float
    max_bound: float
    rms_error: float
    rms_bound: float
    where: str = "all elements"

    @property
    def ok(self) -> bool:
        """Whether both errors keep within their bounds."""
        return self.excess <= 1.0

    @property
    def excess(self) -> float:
        """The larger of both errors, in units of its bound."""
        return max(_ratio(self.max_error, self.max_bound), _ratio(self.rms_error, self.rms_bound))


def check(result: Tensor, eager: Tensor, reference: Tensor, scale: Tensor | None = None, bands: bool = True) -> Check:
    """Max error <= 1.5 x eager's + 1 ulp; RMS error <= 1.1 x eager's + 0.5 ulp, where there are many numbers.

    Of the whole tensor, with the ulp at its largest value, and of every band, with the ulp of each element. All values are
    finite. `scale` is `slice_scale(reference)`, for tensors that have lost their shape. RMS errors of a band, of few numbers,
    have the wider bounds of largest ones.
    """
    whole = _whole(result, eager, reference)
    if result.numel() < MIN_BAND_ELEMENTS or not bands:
        return whole
    return max(whole, *_bands(result, eager, reference, slice_scale(reference) if scale is None else scale),
               key=lambda c: c.excess)


def judge(result: Tensor, eager: Tensor, reference: Tensor, slack: float = 1.0) -> str | None:
    """What is wrong with a result, in a sentence; None if nothing is. Integers are compared exactly.

    `slack` multiplies the bounds, not what is said of NaNs and infinities.
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
    found = check(mine[finite].to(result.dtype), theirs[finite], reference[finite], slice_scale(reference)[finite])
    if found.excess <= slack:
        return None
    return (f"of {found.where}, the largest error against float64 is {found.max_error:.3g} where {found.max_bound:.3g} is allowed, "
            f"the RMS error {found.rms_error:.3g} where {found.rms_bound:.3g} is")


def ulp_at(value: float, dtype: torch.dtype) -> float:
    """One unit in the last place of a dtype at a value; below its normal range all values are equally far apart."""
    least = _least(dtype)
    return max(torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1), least) if value else least


def slice_scale(reference: Tensor) -> Tensor:
    """For every element, the largest finite magnitude of the row or column it lies in, whichever is less."""
    magnitude = reference.abs().where(reference.isfinite(), 0.0)
    whole = magnitude.amax() if magnitude.numel() else magnitude.sum()
    scale = whole.expand_as(magnitude)
    for dim, extent in enumerate(magnitude.shape if magnitude.dim() > 1 else ()):
        if extent >= MIN_SLICE_ELEMENTS and magnitude.numel():
            scale = torch.minimum(scale, magnitude.amax(dim, keepdim=True))
    # A slice of nothing but rounding errors has no scale of its own.
    return torch.maximum(scale, whole * torch.finfo(torch.float32).eps)


def _whole(result: Tensor, eager: Tensor, reference: Tensor) -> Check:
    ulp = ulp_at(_max(reference.abs()), result.dtype) * _eager_advantage(result)
    ours, theirs = (reference - result.double()).abs(), (reference - eager.double()).abs()
    largest = 1.5 * _max(theirs) + ulp
    return Check(_max(ours), largest, _rms(ours), 1.1 * _rms(theirs) + 0.5 * ulp if reference.numel() >= MIN_RMS_ELEMENTS else largest)


def _bands(result: Tensor, eager: Tensor, reference: Tensor, scale: Tensor) -> list[Check]:
    """A Check of every band: elements that are about as small beside their slice, in slices of about one scale."""
    reference, scale = reference.reshape(-1), scale.reshape(-1).clamp_min(torch.finfo(torch.float64).tiny)
    ours, theirs = ((reference - t.reshape(-1).double()).abs() / scale for t in (result, eager))
    allowed = _rounding(reference, scale, result) / scale
    group, names = _groups(reference.abs(), scale)

    def largest(of: Tensor) -> Tensor:
        return torch.zeros(len(names), dtype=of.dtype, device=of.device).scatter_reduce(0, group, of, "amax")

    def rms(of: Tensor) -> Tensor:
        count = torch.bincount(group, minlength=len(names))
        return (torch.bincount(group, of.square(), minlength=len(names)) / count).sqrt()

    bound = 1.5 * largest(theirs)[group] + allowed
    least_well = largest(ours / bound)
    at = (ours / bound >= least_well[group]).nonzero().flatten()
    worst = torch.zeros(len(names), dtype=torch.int64, device=at.device).scatter_(0, group[at], at)
    rows = zip((ours * scale)[worst].tolist(), (bound * scale)[worst].tolist(),
               rms(ours).tolist(), (1.5 * rms(theirs) + rms(allowed)).tolist(), names, strict=True)
    return [Check(*row) for row in rows]


def _rounding(reference: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """What rounding alone may do to each element: an ulp of its own, and the roundings in fp32 of what it was computed from."""
    info = torch.finfo(result.dtype)
    ulp = (info.eps * torch.exp2(torch.frexp(reference.abs()).exponent.double() - 1)).clamp_min(_least(result.dtype))
    if info.bits < 32:
        return ulp + INTERMEDIATE_ULPS * torch.finfo(torch.float32).eps * scale
    return ulp + info.eps * scale * _eager_advantage(result)


def _groups(magnitude: Tensor, scale: Tensor) -> tuple[Tensor, list[str]]:
    """The number of the band each element is judged in, and the bands' names. Bands of few elements join the next."""
    # A band below the largest value of its slice, and a step below the largest slice.
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


def _eager_advantage(result: Tensor) -> float:
    """Ulps where one is allowed elsewhere. On a CPU, torch's fp32 kernels accumulate in float64 and contract multiplications
    with additions, which a kernel does on a GPU and an interpreter does not."""
    return 2.0 if result.device.type == "cpu" and result.dtype == torch.float32 else 1.0


def _least(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def _ratio(error: float, bound: float) -> float:
    return error / bound if bound else math.inf if error else 0.0


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Where one is NaN or infinite and the other is not the same."""
    return (a.isnan() != b.isnan()) | ((a.isinf() | b.isinf()) & (a != b) & ~a.isnan())


def _max(error: Tensor) -> float:
    return float(error.max()) if error.numel() else 0.0


def _rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt()) if error.numel() else 0.0
