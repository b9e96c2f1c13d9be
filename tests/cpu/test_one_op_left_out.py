"""Numbers and sizes that depend on data, and sparse tensors: the ops that have them are left out, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor, nn

import onepass
from onepass.integration import journal
from tests.support.backend_options import EAGER


@pytest.fixture(autouse=True)
def fresh(nothing_compiled: None) -> None:
    """Nothing compiled before."""


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def scaled(x: Tensor, n: Tensor) -> Any:
    """One norm is multiplied by a number that only the graph knows."""
    return norm(x) * n.item(), x.softmax(-1).sum(0)


def cut(x: Tensor, n: Tensor) -> Any:
    """One result has as many rows as a number says, and one is a sum over them; both are next to a norm of all rows."""
    rows: Any = n.item()
    torch._check(rows >= 2)
    torch._check(rows <= x.shape[0])
    return norm(x[:rows]), norm(x).sum(0) + x[:rows].sum(0)


def compiled(function: Any) -> Any:
    return torch.compile(function, backend=onepass.backend, options=EAGER)


def compared(function: Any, *args: Tensor) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.testing.assert_close(compiled(function)(*args), function(*args), atol=1e-4, rtol=1e-4)


def reductions() -> tuple[int, list[tuple[str, str]]]:
    """How many reductions were claimed, and those that were not, with reasons."""
    graphs = journal.snapshot().graphs
    left = [(op, each.reason) for graph in graphs for each in graph.declined for op in each.ops]
    return sum(region.reductions for graph in graphs for region in graph.regions), left


@pytest.mark.parametrize("number", [torch.tensor(5), torch.tensor(2.5)], ids=["int", "float"])
def test_a_number_that_depends_on_data_costs_the_op_that_reads_it(number: Tensor) -> None:
    compared(scaled, torch.randn(16, 32), number)
    assert reductions() == (4, [])


def test_a_size_that_depends_on_data_costs_the_reductions_over_it() -> None:
    compared(cut, torch.randn(16, 32), torch.tensor(5))
    claimed, left = reductions()
    assert claimed == 2
    assert left == [("aten.var_mean", "a size depends on data"), ("aten.sum", "it reads a tensor with a size that depends on data")]


def test_a_gradient_that_is_sparse_keeps_what_it_is_computed_from() -> None:
    """torch cannot compute fake tensors anew behind a call of a region where one of them is sparse."""
    torch.manual_seed(0)
    table = nn.Embedding(20, 32, sparse=True)
    model = nn.Sequential(table, nn.LayerNorm(32))
    rows = torch.arange(24).view(8, 3) % 7

    def gradients(run: Any) -> list[Tensor]:
        model.zero_grad()
        (run(rows) * torch.arange(32.0)).sum().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return [grad.to_dense() if grad.is_sparse else grad for grad in found]

    torch.testing.assert_close(gradients(compiled(model)), gradients(model), atol=1e-4, rtol=1e-4)
    claimed, left = reductions()
    assert claimed and {reason for _, reason in left} == {"a tensor of layout torch.sparse_coo is computed from it"}
    assert all(graph.error is None for graph in journal.snapshot().graphs)
