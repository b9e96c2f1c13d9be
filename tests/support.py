"""Judging results: against float64, by how far eager torch is from it; every element written; the same every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.runtime import executable
from onepass.tools.check import as_tuple, check, in_float64

Run = Callable[..., tuple[Tensor, ...]]
GARBAGE = 0x7F  # in every byte: a large float, a large integer


def poison(monkeypatch: pytest.MonkeyPatch, garbage: bool) -> None:
    """Fill fresh outputs and temporaries with NaN, or with garbage bytes, before kernels see them."""
    allocate = executable.allocate

    def poisoned(*args: Any) -> Tensor:
        made = allocate(*args)
        if garbage or not made.is_floating_point():
            torch.empty(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage()).fill_(GARBAGE)
        else:
            made.fill_(nan)
        return made

    monkeypatch.setattr(executable, "allocate", poisoned)


def once(function: Callable[..., Any], inputs: Sequence[Tensor], garbage: bool = False) -> tuple[Tensor, ...]:
    """The results of a fused function whose fresh memory was poisoned."""
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, garbage)
        return as_tuple(function(*inputs))


def twice(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same, after a second run on other poison: no element is what was there before, none changes from run to run."""
    first, second = once(function, inputs), once(function, inputs, garbage=True)
    for k, (one, two) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(_bits(one), _bits(two)), f"output {k} has elements that no kernel wrote, or differs from run to run"
    return first


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def assert_right(fused: Callable[..., Any], function: Callable[..., Any], inputs: Sequence[Tensor], run: Run = once) -> tuple[Tensor, ...]:
    """Run a fused function on poisoned memory and hold its results against the function itself, in float64 and as it is."""
    results = run(fused, inputs)
    with torch.no_grad():
        eager = as_tuple(function(*inputs))
        exact = in_float64(function, inputs)
    for k, (mine, theirs, reference) in enumerate(zip(results, eager, exact, strict=True)):
        assert_close(mine, theirs, reference, f"output {k}")
    return results


def assert_close(mine: Tensor, eager: Tensor, reference: Tensor, what: str) -> None:
    """One output: form as eager's, integers equal, NaNs and infinities in the same places, the rest by `check`."""
    assert (mine.dtype, mine.shape) == (eager.dtype, eager.shape), f"{what}: {mine.dtype} {mine.shape}, not {eager.dtype} {eager.shape}"
    if not mine.is_floating_point():
        assert torch.equal(mine, eager), f"{what}: {int((mine != eager).sum())} of {mine.numel()} differ"
        return
    mine, eager, reference, dtype = mine.double(), eager.double(), reference.double(), mine.dtype
    finite = eager.isfinite()
    wrong = (mine.isfinite() != finite) | (mine.isnan() != eager.isnan()) | (eager.isinf() & (mine != eager))
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {mine.numel()} NaNs or infinities unlike eager's, first at {_first(wrong)}"
    finite &= reference.isfinite()
    found = check(mine[finite].to(dtype), eager[finite], reference[finite])
    assert found.ok, f"{what} {tuple(mine.shape)}: {found}, worst at {_first((mine - reference).abs() == found.max_error)}"


def _first(where: Tensor) -> list[int]:
    """The first position that is set."""
    return where.nonzero()[0].tolist() if where.any() else []
