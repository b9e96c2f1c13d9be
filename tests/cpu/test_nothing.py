"""Functions that compute nothing, and tensors without elements: eager's results, and no kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.capture.function.trace import capture
from onepass.ir.oracle import evaluate
from onepass.tools.check import as_tuple
from tests.support.correctness import randoms

NOTHING: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "a view": lambda x: x.t(),
    "a part, and itself": lambda x: (x[1:], x),
    "none": lambda x: None,
    "a cast to its own type": lambda x: x.float(),
    "twice": lambda x: [x, (x, {"view": x.view(-1)})],
    "nothing": lambda x: (),
    "sizes": lambda x: (x.shape, x.numel(), x.size(0) * 2),
    "plain values": lambda x: (1, "a", 2.5, x.dtype),
    "repeated": lambda x: x[:, None].expand(3, 5, 4),
    "a diagonal": lambda x: x.diagonal(),
}


def same_tensor(actual: Tensor, eager: Tensor) -> bool:
    return actual.data_ptr() == eager.data_ptr() and actual.shape == eager.shape and actual.stride() == eager.stride()


@pytest.mark.parametrize("name", NOTHING)
def test_a_function_that_computes_nothing_runs_without_kernels(name: str) -> None:
    function, x = NOTHING[name], randoms(0, (3, 4))
    for dynamic in (None, False):
        fused = onepass.fuse(function, dynamic=dynamic)
        for _ in range(2):
            actual, eager = (torch.utils._pytree.tree_leaves(f(x)) for f in (fused, function))
            assert all(same_tensor(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(actual, eager, strict=True))
    report: Any = onepass.explain(function, device="h200")(x.to("meta"))
    assert not report.kernels and report.predicted_us == 0 and "no kernel:" in str(report)


def test_a_function_without_arguments_may_return_plain_values() -> None:
    assert onepass.fuse(lambda: 3)() == 3 and onepass.fuse(lambda n: n + 1)(3) == 4


EMPTY: dict[str, Callable[[Tensor], Any]] = {
    "sums": lambda x: (x.sum(), x.sum(0), x.sum(-1), x.prod(0)),
    "means": lambda x: (x.mean(), x.mean(0), x.mean(-1), x.var(-1)),
    "truths": lambda x: ((x > 0).any(0), (x > 0).all()),
    "softmax": lambda x: (x.softmax(-1), x.logsumexp(0)),
    "parts": lambda x: torch.cat([x, x], 0).sum(0),
    "next to others": lambda x: (x.sum(0), x.new_ones(3) * 2),
    "itself": lambda x: x,
}


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", EMPTY)
def test_empty_tensors_give_the_results_of_eager_and_are_explained(name: str, shape: tuple[int, ...]) -> None:
    x, function = torch.empty(shape), EMPTY[name]
    for actual, eager in zip(as_tuple(onepass.fuse(function)(x)), as_tuple(function(x)), strict=True):
        torch.testing.assert_close(actual, eager, rtol=0, atol=0, equal_nan=True)
    report: Any = onepass.explain(function, device="h200")(x.to("meta"))
    assert not report.kernels and report.to_json()["kernels"] == [] and "no kernel:" in str(report)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0), (2, 0, 3)], ids=str)
def test_an_empty_result_may_have_strides_of_zero(shape: tuple[int, ...]) -> None:
    """Its store must still name the axis without elements."""
    x = torch.ones([1 if size == 0 else size for size in shape], dtype=torch.bfloat16).expand(shape)
    for function in (lambda x: x.float(), lambda x: x * 2, lambda x: (x.half(), x.sum(-1), torch.cat([x, x], -1))):
        for actual, eager in zip(as_tuple(onepass.fuse(function)(x)), as_tuple(function(x)), strict=True):
            assert actual.stride() == eager.stride()
            torch.testing.assert_close(actual, eager, rtol=0, atol=0)


@pytest.mark.parametrize("function", [lambda x: x.amax(0), lambda x: x.argmin(0), lambda x: x.argmax(), lambda x: x.max()])
def test_the_maximum_of_nothing_raises_the_error_of_eager(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.empty(0, 4)
    with pytest.raises(Exception, match=r"max|min") as eager:
        function(x)
    with pytest.raises(type(eager.value)) as actual:
        onepass.fuse(function)(x)
    assert str(actual.value) == str(eager.value)


def test_slices_of_empty_tensors_can_be_replaced() -> None:
    x = torch.zeros(3, 0)
    captured = capture(lambda x: torch.slice_scatter(x, x[1:] * 2, 0, 1).sum(-1), (x,))
    found = evaluate(captured.program, captured.tensors((x,)), captured.bind((x,)) or {})
    assert [t.tolist() for t in found.values()] == [[0.0, 0.0, 0.0]]


REPEATED_NEVER: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: torch.eq(x.sum(), 1).expand(2)[0:0],
    "past its end": lambda x: (x.sum() + 1).expand(2)[2:],
    "a row": lambda x: x.sum(0, keepdim=True).expand(4, 4)[0:0],
    "next to the row": lambda x: (x.amax(0).expand(4, 4)[:0], x.amax(0)),
    "as many as there are rows less three": lambda x: x.sum().expand(x.size(0))[3:],
}


@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize("name", REPEATED_NEVER)
def test_a_value_expanded_to_no_elements_is_not_written(name: str, dynamic: bool | None) -> None:
    function = REPEATED_NEVER[name]
    fused = onepass.fuse(function, dynamic=dynamic)
    for rows in (4, 5, 3):
        x = randoms(0, (rows, 4))
        for actual, eager in zip(as_tuple(fused(x)), as_tuple(function(x)), strict=True):
            assert (actual.shape, actual.stride(), actual.dtype) == (eager.shape, eager.stride(), eager.dtype)
            torch.testing.assert_close(actual, eager)
