"""Bugs that other compilers had in training and with in-place ops, each named after the public thread that reported it.

Functions are compiled by the backend, claiming everything possible, with the rest in eager. Results, gradients and changes
of the arguments are compared with eager and float64. Threads are named as in test_historic_bugs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.integration import journal
from onepass.tools.check import as_tuple
from tests.support.correctness import DRAWS, Judged, compared, pooled, randoms

Function: TypeAlias = Callable[..., Any]
OPTIONS: dict[str, Any] = {"interpret": True, "rest": "eager", "by_cost": False, "on_error": "raise"}
pytestmark = pytest.mark.usefixtures("nothing_compiled")


def step(run: Function, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Results, gradients of the floating-point arguments, and the arguments after the call."""
    torch.manual_seed(0)
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    given = [leaf * 1 if leaf.requires_grad else leaf for leaf in leaves]  # a copy, because it may be changed in place
    results = as_tuple(run(*given))
    ends = [r for r in results if r.requires_grad]
    weights = [torch.linspace(-1, 2, r.numel(), dtype=torch.float64).reshape(r.shape).to(r.dtype) for r in ends]
    starts = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(ends, starts, weights, allow_unused=True) if ends else ()
    found = {f"output {k}": r.detach() for k, r in enumerate(results)}
    found |= {f"gradient {k}": g for k, g in enumerate(grads) if g is not None}
    return found | {f"argument {k}": g.detach() for k, g in enumerate(given)}


def assert_as_eager(function: Function, make: Callable[[int], Sequence[Tensor]]) -> None:
    """Check that results are within the criterion, over several draws if one fails; integers and forms must match exactly."""
    compiled = torch.compile(function, backend=onepass.backend, options=OPTIONS)
    draws = [judge_step(compiled, function, make(0))]
    wrong = [name for name, found in draws[0].items() if not found.ok]
    draws += [judge_step(compiled, function, make(seed)) for seed in range(1, DRAWS)] if wrong else []
    for name in wrong:
        together = pooled([draw[name] for draw in draws])
        assert together.ok, f"{name}: {together.check}"


def judge_step(compiled: Function, function: Function, inputs: Sequence[Tensor]) -> dict[str, Judged]:
    """The results of a step, compiled, in eager and in float64; as for models, each tensor is judged as a whole."""
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    actual, eager, exact = step(compiled, inputs), step(function, inputs), step(function, wide)
    assert actual.keys() == eager.keys()
    return {name: replace(compared(actual[name], eager[name], exact[name], name), bands=False) for name in eager}


def regions() -> int:
    return sum(len(graph.regions) for graph in journal.snapshot().graphs)


def scattered_diagonal(x: Tensor, y: Tensor) -> Tensor:
    return torch.diagonal_scatter(x, y).sum()


def scattered_slice(x: Tensor, y: Tensor) -> Tensor:
    return torch.slice_scatter(x, y, 1, 0, 6).sum(1)


def over_its_sum(h: Tensor, w: Tensor) -> Tensor:
    return h / h.sum(1, keepdim=True) * w


def node_features(f: Tensor, batch: Tensor) -> Tensor:
    """Features divided by the sum of the features of their graph."""
    squares = f**2 + 0.0098
    total = torch.zeros(1, f.shape[1], dtype=f.dtype).index_add(0, batch, squares)
    scaled = squares / (total[batch] + 1e-6)
    return scaled - scaled.mean(-1, keepdim=True)


def added_then_looked_up(x: Tensor, index: Tensor) -> Tensor:
    total = torch.zeros(1, x.shape[1], dtype=x.dtype).scatter_add(0, index[:, None].expand(-1, x.shape[1]), x)
    return total.index_select(0, index).softmax(-1)


def same_row_twice(x: Tensor) -> Tensor:
    x[[0, 0]] += x[[0, 0]]
    return x.softmax(-1)


def changed_then_read(a: Tensor) -> Tensor:
    b = a + 1
    a.copy_(b)
    return (a * b / (a + 2)).sum(-1)


def copied_then_changed(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    y.mul_(2)
    return x.softmax(-1), y.softmax(-1)


def reciprocal_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * x + 1
    before = y.sum(-1)
    y.reciprocal_()
    return before, y.sum(-1)


def bits_then_changed(x: Tensor) -> Tensor:
    y = x.view(torch.int32) * 2
    y.sub_(-4)
    x[:, 2:5] = 2
    return y.view(torch.int64).sum(1)


def window_means(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, 7).flatten(1).sum(-1)


def weighted_losses(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    return (F.cross_entropy(x, t, reduction="none") * w).sum()


def all_ignored(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t, reduction="sum")


def z_loss(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=42) + 1e-4 * x.logsumexp(-1).square().mean()


def safe_rows(x: Tensor, mask: Tensor) -> Tensor:
    """Fully masked rows are removed before use."""
    return x.masked_fill(mask, -torch.inf).softmax(-1)[1:].square().sum(-1)


def modulated(x: Tensor, table: Tensor) -> Tensor:
    """Two blocks whose scale and shift are parts of one parameter."""
    first_scale, first_shift, second_scale, second_shift = table.chunk(4, 0)
    x = x + F.layer_norm(x, (32,)) * (1 + first_scale) + first_shift
    return x + F.layer_norm(x, (32,)) * (1 + second_scale) + second_shift


def norms_of_zeros(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1) + x.abs().sum(-1)


def greatest_of_equals(x: Tensor) -> Tensor:
    return x.amax(-1) - x.amin(-1) + x.max(0).values.sum()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return randoms(seed, shape)


CASES: dict[str, tuple[Function, Sequence[Tensor]]] = {
    "pytorch#182012 a sum's gradient was 0 next to a replaced diagonal": (scattered_diagonal, [numbers(8, 8), numbers(8)]),
    "pytorch#180164 and next to a slice": (scattered_slice, [numbers(4, 13, 33), numbers(4, 6, 33)]),
    "pytorch#178080 a gradient of [1, C, 1, 1] lost its dims": (over_its_sum, [numbers(2, 23, 6, 6) + 9, numbers(1, 23, 1, 1)]),
    "pytorch#171493 a graph's sum was read before it was written": (node_features, [numbers(64, 40), torch.zeros(64).long()]),
    "pytorch#191571 and so was a row of another": (added_then_looked_up, [numbers(8, 40), torch.zeros(8).long()]),
    "pytorch#174074 a row that is listed twice was changed twice": (same_row_twice, [numbers(1, 50)]),
    "torchdynamo#2016 an argument that is changed, then read": (changed_then_read, [numbers(4, 17)]),
    "pytorch#196639 softmax of what is changed after it was copied": (copied_then_changed, [numbers(4, 32)]),
    "pytorch#93824 reciprocals in place": (reciprocal_in_place, [numbers(3, 16)]),
    "pytorch#179931 sums of all images but the first were wrong": (window_means, [numbers(3, 33, 8, 8)]),
    "pytorch#198101 bits of an argument that is changed afterwards": (bits_then_changed, [torch.arange(-60, 60).reshape(4, 30)]),
    "Liger-Kernel#968 gradients of losses that are weighted one by one": (
        weighted_losses,
        [numbers(8, 15), torch.tensor([1, 2, -100, 4, -100, 0, 14, 3]), numbers(8, seed=1)],
    ),
    "pytorch#116349 gradients where all classes are ignored": (all_ignored, [numbers(4, 50), torch.full((4,), -100)]),
    "Liger-Kernel#239 a loss with smoothing, a z term and an ignored class": (
        z_loss,
        [numbers(6, 50) * 3, torch.tensor([42, 0, 49, 42, 7, 1])],
    ),
    "pytorch#131060 rows that are masked throughout, left out": (
        safe_rows,
        [numbers(4, 9), torch.tensor([[True], [False], [False], [False]]).expand(4, 9)],
    ),
    "pytorch#193061 gradients of chained blocks with one parameter": (modulated, [numbers(40, 32), numbers(4, 32)]),
    "pytorch#29372 gradients of the norm of zeros": (norms_of_zeros, [torch.zeros(3, 8)]),
    "pytorch#100573 equal numbers share the gradient of the greatest": (greatest_of_equals, [numbers(20, 30).mul(2).round()]),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str) -> None:
    function, inputs = CASES[name]
    assert_as_eager(function, lambda seed: inputs)
    assert regions()


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5).square().mean(-1)


@pytest.mark.parametrize(
    "function",
    [lambda x: checkpoint(dropped, x, use_reentrant=False), lambda x: dropped(x) + dropped(x * 2)],
    ids=["pytorch#190717 drawn again for the backward", "pytorch#192635 drawn in another order"],
)
def test_dropout_draws_what_eager_draws(function: Function) -> None:
    """The backward uses the mask of the forward."""
    assert_as_eager(function, lambda seed: [numbers(6, 32, seed=seed)])
    assert regions()


def test_a_call_of_other_sizes_is_right() -> None:
    """pytorch#165506: kernels for one size were used for another."""
    compiled = torch.compile(over_its_sum, backend=onepass.backend, options=OPTIONS, dynamic=True)
    for rows, cols in ((3, 40), (7, 40), (2, 65), (130, 9)):
        x, w = numbers(rows, cols, 2) + 9, numbers(1, cols, 1)
        actual, exact = compiled(x, w), over_its_sum(x.double(), w.double())
        assert compared(actual, over_its_sum(x, w), exact, "quotients").ok
