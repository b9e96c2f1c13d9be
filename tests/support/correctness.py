"""Check results: against float64, relative to eager's error; every element written; the same every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.ir.criterion import Check, check, slice_scale
from onepass.runtime import executable
from onepass.tools.check import as_tuple, in_float64

Run = Callable[..., tuple[Tensor, ...]]
DRAWS, MOST_POOLED = 16, 1 << 16
FEW = 16  # with fewer elements, more draws are needed to estimate an error
GARBAGE = 0x7F  # in every byte: a large float, a large integer


def poison(monkeypatch: pytest.MonkeyPatch, garbage: bool) -> None:
    """Fill fresh outputs and temporaries with NaN, or with garbage bytes, before kernels see them."""
    allocate = executable.allocate

    def poisoned(*args: Any) -> Tensor:
        made = allocate(*args)
        if garbage or not made.is_floating_point():
            torch.empty(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage()).fill_(GARBAGE)
        else:
            made.fill_(math.nan)
        return made

    monkeypatch.setattr(executable, "allocate", poisoned)


def once(function: Callable[..., Any], inputs: Sequence[Tensor], garbage: bool = False) -> tuple[Tensor, ...]:
    """The results of a fused function whose fresh memory was poisoned."""
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, garbage)
        return as_tuple(function(*inputs))


def twice(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same, after a second run on other poison: every element is written, and none changes from run to run."""
    first, second = once(function, inputs), once(function, inputs, garbage=True)
    for k, (one, two) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(_bits(one), _bits(two)), f"output {k} has elements that no kernel wrote, or differs from run to run"
    return first


def _bits(t: Tensor) -> Tensor:
    """The bytes of a copy, because `contiguous` keeps the stride of a one-element tensor, which other types cannot view."""
    return t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_right(
    fused: Callable[..., Any], function: Callable[..., Any], make: Callable[[int], Sequence[Tensor]], run: Run = once
) -> tuple[Tensor, ...]:
    """Run a fused function on poisoned memory and compare its results with the function in float64 and in eager.

    `make` gives the arguments for a seed. The largest error of few or ill-conditioned elements is a matter of chance, ours and
    eager's, so an output that fails is judged again, together with the same output for other seeds.
    """
    inputs = make(0)
    results = run(fused, inputs)
    for k, judged in enumerate(_judged(results, function, inputs)):
        if not judged.ok and judged.actual.numel() <= MOST_POOLED:
            draws = DRAWS if judged.actual.numel() > FEW else 4 * DRAWS
            more = [_judged(run(fused, again), function, again)[k] for again in map(make, range(1, draws))]
            judged = pooled([judged, *more])
        assert judged.ok, f"output {k} {tuple(results[k].shape)}: {judged.check}, worst at {judged.worst}"
    return results


@dataclass(frozen=True)
class Judged:
    """The finite elements of an output, of eager's and of the float64 reference, and the scale of their slices."""

    actual: Tensor
    eager: Tensor
    reference: Tensor
    scale: Tensor
    bands: bool = True

    @cached_property
    def check(self) -> Check:
        return check(self.actual, self.eager, self.reference, self.scale, self.bands)

    @property
    def ok(self) -> bool:
        return self.check.ok

    @property
    def worst(self) -> int:
        return int((self.actual.double() - self.reference).abs().argmax())


def pooled(draws: list[Judged]) -> Judged:
    """Several draws of one output as one output."""
    actual, eager, reference, scale = (
        torch.cat(parts) for parts in zip(*((d.actual, d.eager, d.reference, d.scale) for d in draws))
    )
    return Judged(actual, eager, reference, scale, draws[0].bands)


def _judged(results: tuple[Tensor, ...], function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Judged]:
    with torch.no_grad():
        eager = as_tuple(function(*inputs))
        exact = in_float64(function, inputs)
    return [compared(*each, f"output {k}") for k, each in enumerate(zip(results, eager, exact, strict=True))]


def compared(actual: Tensor, eager: Tensor, reference: Tensor, what: str) -> Judged:
    """Check that form, integers, NaNs and infinities match eager, and return the finite elements to judge."""
    got, expected = (actual.dtype, actual.shape), (eager.dtype, eager.shape)
    assert got == expected, f"{what}: {got}, not {expected}"
    if not actual.is_floating_point():
        assert torch.equal(actual, eager), f"{what}: {int((actual != eager).sum())} of {actual.numel()} differ"
        nothing = torch.zeros(0)
        return Judged(nothing, nothing, nothing.double(), nothing.double())
    wide, wide_eager, reference = actual.double(), eager.double(), reference.double()
    wrong = (wide.isnan() != wide_eager.isnan()) | ((wide.isinf() | wide_eager.isinf()) & (wide != wide_eager) & ~wide.isnan())
    assert not wrong.any(), f"{what}: NaNs or infinities unlike eager's at {wrong.nonzero()[:3].tolist()}"
    finite = wide_eager.isfinite() & reference.isfinite()
    return Judged(wide[finite].to(actual.dtype), wide_eager[finite], reference[finite], slice_scale(reference)[finite])


def randoms(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Standard normal tensors of these shapes; a single one is not wrapped in a tuple."""
    generator = torch.Generator(device).manual_seed(seed)
    made = tuple(torch.randn(shape, generator=generator, dtype=dtype, device=device) for shape in shapes)
    return made if len(made) > 1 else made[0]
