"""Every op of the table as users call it: fused functions against float64, at odd sizes and for special values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onepass
from onepass.ir.criterion import judge
from onepass.ir.expr import BY_TORCH, OPS, OpSpec

SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.5, 1e-7, -1e-7, 20.0, -41.0, 1e4, -2.5)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# The references of these are no functions of torch's own that could be traced.
BY_TORCH_FUNCTION: dict[str, Callable[..., Tensor]] = {"cast": lambda a: a.to(torch.float32) * 1, "fma": lambda a, b, c: a * b + c}
FLOAT_OPS = sorted(name for name, spec in OPS.items() if spec.takes.accepts(BY_TORCH[torch.float32]))


def function_of(spec: OpSpec) -> Callable[..., Tensor]:
    return BY_TORCH_FUNCTION.get(spec.name, lambda *args: spec.reference(*args))


def spread(spec: OpSpec, dtype: torch.dtype, position: int) -> Tensor:
    """One argument: ordinary values of many sizes, positive and negative, in an odd number of columns."""
    generator = torch.Generator().manual_seed(position)
    x = torch.randn(5, 37, generator=generator, dtype=torch.float64) * torch.tensor([0.01, 0.3, 0.9, 2.0, 8.0])[:, None]
    return x.to(dtype)


def special(dtype: torch.dtype, arity: int) -> list[Tensor]:
    """Special values in all pairs."""
    values = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    turned = [values.repeat_interleave(len(values)), values.repeat(len(values)), values.flip(0).repeat(len(values))]
    return [t.reshape(len(values), -1) for t in turned[:arity]]


def judged(spec: OpSpec, args: list[Tensor]) -> str | None:
    if spec.name == "where":
        args[0] = args[0] > 0
    function = function_of(spec)
    reference = function(*(a.double() if a.is_floating_point() else a for a in args))
    mine, eager = onepass.fuse(lambda *a: function(*a))(*args), function(*args)
    assert mine.dtype == eager.dtype and mine.shape == eager.shape
    if not eager.is_floating_point():
        reference = eager
    if eager.dtype == torch.float64:  # eager is the reference itself here, and another library may be an ulp or two from it
        torch.testing.assert_close(mine, eager, rtol=1e-15, atol=1e-16, equal_nan=True)
        return None
    return judge(mine, eager, reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLOAT_OPS)
def test_floats(name: str, dtype: torch.dtype) -> None:
    spec = OPS[name]
    assert judged(spec, [spread(spec, dtype, k) for k in range(spec.arity)]) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLOAT_OPS)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    assert judged(OPS[name], special(dtype, OPS[name].arity)) is None
