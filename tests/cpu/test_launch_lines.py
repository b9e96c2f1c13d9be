"""Regions in the code that Inductor generates: called without torch's dispatcher, or through it where that is not possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config, lowering
from torch._inductor.utils import run_and_get_code

import onepass
from onepass.compat import launch_lines
from onepass.integration import region_op

OP = "torch.ops.onepass.region.default("
OPTIONS: dict[str, Any] = {"interpret": True, "by_cost": False, "on_error": "raise"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def norm_and_softmax(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x, (x.shape[-1],), w)
    return y, torch.softmax(y @ y.t(), -1)


def compiled_code(*inputs: Tensor, dynamic: bool = False) -> str:
    """The code of a run whose results are right."""
    run = torch.compile(norm_and_softmax, backend=onepass.backend, options=OPTIONS, dynamic=dynamic)
    with config.patch(force_disable_caches=True):
        results, (code,) = run_and_get_code(run, *inputs)
    torch.testing.assert_close(results, norm_and_softmax(*inputs))
    return str(code)


@pytest.mark.parametrize("dynamic", [False, True])
def test_regions_are_called_directly(dynamic: bool) -> None:
    code = compiled_code(torch.randn(6, 40), torch.randn(40), dynamic=dynamic)
    assert " = onepass_bind(" in code and OP not in code


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_region_that_is_called_twice_is_defined_once(dynamic: bool) -> None:
    def twice(x: Tensor) -> Tensor:
        return torch.softmax(torch.softmax(x, -1) @ x, -1)

    x = torch.randn(8, 8)
    run = torch.compile(twice, backend=onepass.backend, options=OPTIONS, dynamic=dynamic)
    result, (code,) = run_and_get_code(run, x)
    torch.testing.assert_close(result, twice(x))
    names = [line.strip().partition("(")[0] for line in code.splitlines() if line.strip().startswith("onepass_region_")]
    calls = [name for name in names if " = " not in name]
    assert len(calls) == 2 and code.count(" = onepass_bind(") == len({*calls})


def test_a_graph_in_partitions_defines_its_regions_at_the_top() -> None:
    with config.patch(graph_partition=True):
        assert OP not in compiled_code(torch.randn(6, 40), torch.randn(40))


def test_evicted_regions_are_rebuilt() -> None:
    x, w = torch.randn(6, 40), torch.randn(40)
    run = torch.compile(norm_and_softmax, backend=onepass.backend, options=OPTIONS)
    expected = run(x, w)
    region_op.forget()
    torch.testing.assert_close(run(x, w), expected, rtol=0, atol=0)


def test_a_torch_that_cannot_call_regions_directly_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(lowering, "tag_to_layout_constraint")
    monkeypatch.delitem(lowering.lowerings, torch.ops.onepass.region.default, raising=False)
    launch_lines.call_directly.cache_clear()
    try:
        assert not launch_lines.call_directly(torch.ops.onepass.region.default, region_op.definition)
        monkeypatch.undo()
        monkeypatch.delitem(lowering.lowerings, torch.ops.onepass.region.default, raising=False)
        code = compiled_code(torch.randn(6, 40), torch.randn(40))  # in this process it is known to be impossible
        assert OP in code and " = onepass_bind(" not in code
    finally:
        launch_lines.call_directly.cache_clear()
        lowering.lowerings.pop(torch.ops.onepass.region.default, None)
