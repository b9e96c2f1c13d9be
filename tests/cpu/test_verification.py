"""Verified calls: wrong results are found, and rounding alone is not called wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from onepass.capture import capture
from onepass.integration.fallback import fresh_results
from onepass.integration.verification import find_mistake
from onepass.ir.criterion import judge
from onepass.ir.program import Program
from onepass.pipeline import optimize

Function = Callable[[Tensor], Tensor]


def program_of(function: Function, x: Tensor) -> Program:
    return optimize(capture(function, (x,), dynamic=False).program)


def normalized_mean(x: Tensor) -> Tensor:
    """A sum that cancels, so that only rounding is left."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:]).mean(-1).sum()


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def draw(seed: int, rows: int = 6, columns: int = 40) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_left_by_cancellation_is_not_called_wrong(dtype: torch.dtype) -> None:
    program = program_of(normalized_mean, draw(0).to(dtype))
    lucky = 0
    for seed in range(30):
        x = draw(seed).to(dtype)
        actual = normalized_mean(x.flip(0, 1))  # the same sums in another order
        eager = fresh_results(program, {}, [actual], [x])
        lucky += judge(actual, eager[0], normalized_mean(x.double())) is not None
        assert find_mistake(program, {}, [actual], [x]) is None
    assert lucky, "eager was never lucky, so this shows nothing"


@pytest.mark.parametrize("function", [lambda t: (1 + t / 64).prod(-1), lambda t: t.double().cos().sum(-1)])
def test_fp64_may_be_rounded_otherwise_than_eager_rounds_it(function: Function) -> None:
    """Eager's own result is the reference, so its error cannot be seen."""
    x = draw(4, columns=300).double()
    mine = function(x.flip(1))
    assert not torch.equal(mine, function(x))
    assert find_mistake(program_of(function, x), {}, [mine], [x]) is None
    assert find_mistake(program_of(function, x), {}, [mine * (1 + 1e-12)], [x]) is not None


@pytest.mark.parametrize(("wrong", "dtype"), [(1e-4, "32"), (float("nan"), "32"), (float("inf"), "32"), (1e-13, "64")])
def test_a_sum_that_cancels_may_still_be_wrong(wrong: float, dtype: str) -> None:
    x = draw(1).to(getattr(torch, f"float{dtype}"))
    found = find_mistake(program_of(normalized_mean, x), {}, [normalized_mean(x) + wrong], [x])
    assert found is not None and found[0] == "out0"


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[1:, ::2],
        lambda t: t[:1].expand(5, -1),
        lambda t: t.bfloat16(),
        lambda t: t.double(),
    ],
    ids=["contiguous", "transposed", "strided", "overlapping", "bf16", "fp64"],
)
def test_one_wrong_element_is_found_in_any_layout(view: Callable[[Tensor], Tensor]) -> None:
    x = view(draw(2))
    program, right = program_of(softmax, x), softmax(x)
    assert find_mistake(program, {}, [right], [x]) is None
    wrong = right.clone()
    wrong[-1, -1] *= 1.25
    found = find_mistake(program, {}, [wrong], [x])
    assert found is not None and "largest error" in found[1]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_one_wrong_8_bit_float_is_found(dtype: torch.dtype) -> None:
    def quantized(t: Tensor) -> Tensor:
        return (t / t.abs().amax(-1, keepdim=True)).to(dtype)

    x = draw(3)
    program, right = program_of(quantized, x), quantized(x)
    assert find_mistake(program, {}, [right], [x]) is None
    wrong = right.clone()
    wrong[2, 5] = 1.5
    found = find_mistake(program, {}, [wrong], [x])
    assert found is not None and "largest error" in found[1]


def test_integers_are_compared_exactly() -> None:
    x = torch.arange(12).reshape(3, 4)
    program, right = program_of(lambda t: t.sum(-1), x), x.sum(-1)
    assert find_mistake(program, {}, [right], [x]) is None
    assert find_mistake(program, {}, [right + torch.tensor([0, 1, 0])], [x]) == ("out0", "1 of 3 elements differ from eager's")
