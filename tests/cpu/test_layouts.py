"""Tensors that do not lie in memory as they were traced, where ops run one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.capture import capture
from onepass.integration import journal
from onepass.integration.layouts import as_traced
from tests.support import region_calls
from tests.support.backend_options import EAGER


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """An op whose result lies otherwise than its fake implementation says."""
    made = torch.library.Library("onepass_tests", "FRAGMENT")
    made.define("turned(Tensor x) -> Tensor")
    made.impl("turned", lambda x: x.t().contiguous().t(), "CPU")
    made.impl("turned", torch.empty_like, "Meta")
    yield
    made._destroy()


def padded(x: Tensor) -> Tensor:
    """A pad that is empty at these sizes, which a trace with symbolic sizes does not know."""
    t = x.transpose(1, 2)
    return F.layer_norm(F.pad(t, (0, 0, 0, (8 - t.shape[1] % 8) % 8)), (t.shape[2],))


def turned(x: Tensor) -> Tensor:
    return torch.ops.onepass_tests.turned(x).softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize(("function", "shape"), [(padded, (2, 24, 16)), (turned, (16, 24))])
@pytest.mark.usefixtures("nothing_compiled")
def test_a_region_reads_what_was_computed(function: Any, shape: tuple[int, ...], functional: bool) -> None:
    x = torch.randn(shape)
    run = torch.compile(function, backend=onepass.backend, dynamic=True, options={**EAGER, "functional": functional})
    torch.testing.assert_close(run(x), function(x), atol=1e-5, rtol=1e-5)
    assert sum(len(graph.regions) for graph in journal.snapshot().graphs) == 1


def test_an_output_is_filled_however_it_lies() -> None:
    """As does one that takes the memory of an input."""
    outs, ins = region_calls.outputs(5), region_calls.inputs(5)
    outs[0] = torch.empty(24, 5, dtype=torch.bfloat16).t()
    torch.ops.onepass.region(outs, ins, [5], region_calls.region("layouts"))
    region_calls.assert_filled(outs, ins)
    assert outs[0].stride() == (1, 5)


def test_only_what_lies_otherwise_is_copied() -> None:
    x = torch.randn(6, 40)
    (buffer,) = (b for b in capture(lambda t: t.sum(), (x,), dynamic=False).program.buffers if b.role == "input")
    assert as_traced([x], [buffer], {})[0] is x
    (copied,) = as_traced([x.t().contiguous().t()], [buffer], {})
    assert copied.stride() == (40, 1) and torch.equal(copied, x)


def test_strides_of_zero_and_along_one_element() -> None:
    row = torch.randn(1, 40).expand(6, 40)
    (buffer,) = (b for b in capture(lambda t: t.sum(), (row,), dynamic=False).program.buffers if b.role == "input")
    (copied,) = as_traced([row.contiguous()], [buffer], {})
    assert copied.stride() == row.stride() and torch.equal(copied, row)
    one = torch.randn(1, 40)
    (buffer,) = (b for b in capture(lambda t: t.sum(), (one,), dynamic=False).program.buffers if b.role == "input")
    given = one.as_strided((1, 40), (7, 1))
    assert as_traced([given], [buffer], {})[0] is given
