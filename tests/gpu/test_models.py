"""Whole models on a card: as accurate as eager, with CUDA graphs, varying lengths and many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo

import onepass
from bench.zoo import ZOO, Example
from onepass.integration import journal
from tests.support.fixture_types import Room
from tests.support.training_step import assert_as_right_as_eager

# Routing compares values, and different rounding may route differently.
NAMES = [name for name, maker in ZOO.items() if not maker.routed]
LARGE = {"llama": 32, "qwen3": 32, "gemma3": 24}  # GiB, most of it for float64 copies and gradients
SMALL = min(NAMES, key=lambda name: LARGE.get(name, 0))  # with --smoke
FEW = {"layers": 2, "batch": 2, "length": 256, "rows": 2048}  # otherwise the float64 step alone would fill the card


def make_model(name: str, **changes: object) -> tuple[Example, bool]:
    """A model at real widths, with few layers."""
    maker = ZOO[name]
    if reason := maker.missing():
        pytest.skip(reason)
    few = {k: min(v, maker.sizes["real"][k]) for k, v in FEW.items() if k in maker.sizes["real"]}
    dtype = torch.float32 if maker.autocast else torch.bfloat16
    return maker("real", device="cuda", dtype=dtype, **{**few, **changes}), maker.autocast


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    journal.reset()


@pytest.mark.smoke(name=SMALL)
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step(name: str, room: Room) -> None:
    with room(LARGE.get(name, 8)):
        example, autocast = make_model(name)
        assert_as_right_as_eager(torch.compile(example.module, backend=onepass.backend), example, autocast)
    seen = journal.snapshot()
    assert any(graph.regions for graph in seen.graphs) and not seen.fallbacks


def test_under_cuda_graphs(sizeable: None) -> None:
    example, autocast = make_model("seed_transformer_learnable")
    run = torch.compile(example.module, backend=onepass.backend, mode="reduce-overhead")
    losses = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        example.module.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = example.loss(run(**example.inputs))
        loss.backward()
        losses.append(loss.item())
    assert len(set(losses)) == 1


def test_twenty_lengths_need_one_more_compilation() -> None:
    module = torch.nn.Sequential(torch.nn.LayerNorm(512), torch.nn.Linear(512, 512), torch.nn.RMSNorm(512)).cuda()
    run = torch.compile(module, backend=onepass.backend)
    for k in range(20):
        x = torch.randn(4, 64 + 8 * k, 512, device="cuda", requires_grad=True)
        run(x).sum().backward()
        torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-4)
    phases = [graph.phase for graph in journal.snapshot().graphs]
    assert phases.count("forward") <= 2 and phases.count("backward") <= 2


def test_the_loss_over_many_steps_matches_inductor(sizeable: None) -> None:
    def losses(backend: Any) -> torch.Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        example, _ = make_model("seed_transformer_learnable", batch=4, length=256)
        run = torch.compile(example.module, backend=backend)
        optimiser = torch.optim.AdamW(example.module.parameters(), lr=1e-3)
        found = []
        for k in range(200):
            with torch.autocast("cuda", torch.bfloat16):
                loss = example.loss(run(**example.draw(k % 8)))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            found.append(loss.detach())
        return torch.stack(found).double().cpu()

    first, second, actual = losses("inductor"), losses("inductor"), losses(onepass.backend)
    spread = (first - second).abs().max().clamp(min=2e-3 * first.abs().max())  # Inductor is deterministic without atomics
    assert (actual - first)[:50].abs().max() <= 4 * spread
    assert abs(actual[-20:].mean() - first[-20:].mean()) <= 4 * spread
