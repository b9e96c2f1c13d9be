"""Graphs inside graphs: branches, loops and nested regions, whose inputs belong to the outer graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import compat
from onepass.integration import journal, passes
from tests.support.backend_options import EAGER, INDUCTOR, needs_compiler

SIDE = 128  # 64 KiB of fp32: worth reusing


@pytest.fixture(autouse=True)
def fresh(nothing_compiled: None) -> None:
    """Nothing compiled before."""


@torch.compiler.nested_compile_region
def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, (SIDE,)).sin()


def nested(x: Tensor, y: Tensor) -> Tensor:
    return normed(normed(x) @ y)


def branched(x: Tensor, y: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a, b: a.softmax(-1) * b, lambda a, b: F.layer_norm(a, (SIDE,)) + b, (x, y))  # type: ignore[no-any-return]


def looped(x: Tensor, y: Tensor) -> Tensor:
    step = torch.tensor(0)
    return torch._higher_order_ops.while_loop(lambda k, a: k < 3, lambda k, a: (k + 1, a.softmax(-1) + 1), (step, x + y))[1]  # type: ignore[no-any-return]


def checkpointed(x: Tensor, y: Tensor) -> Tensor:
    return checkpoint(lambda a, b: F.layer_norm(a, (SIDE,)).sin() @ b, x, y, use_reentrant=False).softmax(-1)  # type: ignore[no-any-return]


def plain(x: Tensor, y: Tensor) -> Tensor:
    return F.layer_norm(x @ y, (SIDE,)).sin()


TRAINED = [nested, branched, checkpointed, plain]
FUNCTIONS = [*TRAINED, looped]
WITHOUT_SUBGRAPHS = [checkpointed, plain]
BRANCHING = [branched, looped]


def results_and_gradients(run: Callable[..., Tensor], train: bool) -> list[Tensor]:
    """Results and gradients, after checking that no argument has changed."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(SIDE, SIDE, generator=generator).requires_grad_(train) for _ in range(2)]
    seen = [t.detach().clone() for t in given]
    out = run(*given)
    kept = out.detach().clone()
    weight = torch.randn(out.shape, generator=generator)
    gradients = torch.autograd.grad((out * weight).sum(), given) if train else ()
    for now, before in zip((*given, out), (*seen, kept), strict=True):
        torch.testing.assert_close(now.detach(), before, rtol=0, atol=0, msg="memory of the caller was overwritten")
    return [kept, *gradients]


@pytest.mark.parametrize("fn", [pytest.param(fn, marks=pytest.mark.long) if fn in BRANCHING else fn for fn in FUNCTIONS])
def test_only_the_outermost_graph_owns_its_inputs(fn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[tuple[fx.Graph, bool]] = []
    claim_options = passes.claim_options

    def recorded(graph: fx.Graph, settings: Any, phase: str) -> Any:
        outermost, options = compat.is_outermost(graph), claim_options(graph, settings, phase)
        graphs.append((graph, outermost))
        assert options.functional == (fn in BRANCHING and not outermost), "only in branches and loop bodies are tensors new"
        return options

    monkeypatch.setattr(passes, "claim_options", recorded)
    train = fn in TRAINED
    actual = results_and_gradients(torch.compile(fn, backend=onepass.backend, options=EAGER), train)
    torch.testing.assert_close(actual, results_and_gradients(fn, train), rtol=1e-4, atol=1e-4)
    assert sum(outermost for _, outermost in graphs) == 1 + train, "one for each phase"
    assert (len(graphs) == 1 + train) == (fn in WITHOUT_SUBGRAPHS)
    assert sum(len(graph.regions) for graph in journal.snapshot().graphs), "or this tries nothing"


def test_no_graph_is_outermost_if_no_passes_run() -> None:
    assert not compat.is_outermost(fx.Graph())


@needs_compiler
def test_a_nested_backward_leaves_its_inputs_alone() -> None:
    """The inputs that the outer graph may overwrite are not those of an inner graph."""
    actual = results_and_gradients(torch.compile(nested, backend=onepass.backend, options=INDUCTOR), True)
    torch.testing.assert_close(actual, results_and_gradients(nested, True), rtol=1e-4, atol=1e-4)
    assert sum(len(graph.regions) for graph in journal.snapshot().graphs)


@needs_compiler
@pytest.mark.parametrize("fn", BRANCHING)
def test_inductor_compiles_branches_and_loop_bodies_with_regions(fn: Callable[..., Tensor]) -> None:
    """It looks for ops in them that write to their arguments, and cannot handle one that takes a list of tensors."""
    actual = results_and_gradients(torch.compile(fn, backend=onepass.backend, options=INDUCTOR), False)
    torch.testing.assert_close(actual, results_and_gradients(fn, False), rtol=1e-4, atol=1e-4)
    assert sum(len(graph.regions) for graph in journal.snapshot().graphs)
