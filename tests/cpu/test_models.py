"""Whole models, forward and backward, through torch.compile(backend=onepass): as accurate as eager, without extra graph breaks.

Sizes are tiny and kernels interpreted. The rest of the graph runs op by op, or through Inductor in some tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import onepass
from bench.zoo import ZOO, Example
from onepass.integration import journal
from tests.support.training_step import assert_as_right_as_eager

# Models that route by comparing values may route differently in bf16, and are then as accurate as eager but not close to it.
AUTOCAST = (
    "seed_transformer",
    "seed_transformer_learnable",
    "prenorm_layernorm_block",
    "masked_softmax_attention",
    "cross_entropy_zloss",
    "llama",
    "gpt2",
)
# These take 4 to 40 seconds each; the others have regions of the same kinds.
LONG = {"bert", "vit", "qwen3", "deepseek_v3", "gemma3", "mixtral", "t5"}
LONG_UNDER_AUTOCAST = {"seed_transformer_learnable", "gpt2"}
THROUGH_INDUCTOR = ("llama", "seed_transformer_learnable")


def marked(names: Iterable[str], long: Collection[str]) -> list[Any]:
    """Parameters of a test; those in `long` run only in `make test-all`."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    """Reset all state between tests."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    journal.reset()
    yield
    torch._dynamo.reset()


def example_of(name: str) -> Example:
    if reason := ZOO[name].missing():
        pytest.skip(reason)
    return ZOO[name]("tiny")


def compiled(module: nn.Module, rest: str, **more: Any) -> Any:
    """The module compiled by onepass for a CPU, claiming everything possible, however small. Errors are raised."""
    options = {"interpret": True, "rest": rest, "on_error": "raise", "by_cost": False, **more}
    return torch.compile(module, backend=onepass.backend, options=options)


def assert_claimed() -> None:
    """Check that regions were claimed in forward and backward, ran, and did not fall back."""
    seen = journal.snapshot()
    assert {"forward", "backward"} <= {g.phase for g in seen.graphs if g.regions}, [(g.phase, g.declined) for g in seen.graphs]
    assert sum(seen.calls.values()) > 0 and not seen.fallbacks


def cuts() -> tuple[int, int]:
    """Graph breaks and graphs since Dynamo was reset."""
    counters = torch._dynamo.utils.counters
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


def cuts_of_a_backend_that_does_nothing(example: Example) -> tuple[int, int]:
    """The graph breaks of a backend that runs graphs unchanged. Dynamo decides on breaks before it calls a backend."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(example.module, backend="eager")(**example.inputs)
    return cuts()


@pytest.mark.parametrize("name", marked(ZOO, LONG))
def test_a_training_step_is_as_accurate_as_eager_without_graph_breaks(name: str) -> None:
    example = example_of(name)
    run = compiled(example.module, "eager")
    run(**example.inputs)
    actual = cuts()
    assert_as_right_as_eager(run, example)
    assert_claimed()
    assert actual == cuts_of_a_backend_that_does_nothing(example)


@pytest.mark.parametrize("name", marked(AUTOCAST, LONG_UNDER_AUTOCAST))
def test_a_training_step_under_autocast_is_as_accurate_as_eager(name: str) -> None:
    example = example_of(name)
    assert_as_right_as_eager(compiled(example.module, "eager"), example, autocast=True)
    assert_claimed()


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ for what no region claims")
@pytest.mark.parametrize("name", THROUGH_INDUCTOR)
def test_a_training_step_with_the_rest_in_inductor_is_as_accurate_as_eager(name: str) -> None:
    example = example_of(name)
    with torch._inductor.config.patch(force_disable_caches=True):  # a graph from an earlier run would claim nothing
        assert_as_right_as_eager(compiled(example.module, "inductor"), example)
    assert_claimed()
