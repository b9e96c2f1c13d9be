"""Claims on the graphs of whole models, captured from Inductor on an H200: what is claimed, what is declined, what compiles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

from onepass.capture.graph.effects import is_ordered
from onepass.capture.graph.node_kinds import OTHER_REDUCTIONS
from onepass.capture.graph.recompute import recompute
from onepass.device import device
from onepass.integration import region_op  # noqa: F401, defines the op that rewritten graphs call
from onepass.integration.claim import Claimed, ClaimedRegion, ClaimOptions, claim
from onepass.pipeline import compile
from onepass.runtime import offline
from onepass.runtime.compiled import Compiled
from tests.support import stored_graphs

H200 = device("h200")
GRAPHS = dict(stored_graphs.stored())
SHARE = 0.95  # of all reductions for which onepass has a Monoid

# Declined reductions by model, besides sorting, cumulative sums and the like. Inductor rotates the norms of queries and keys in
# the kernel that computes them, and looks up embeddings in the norm that follows.
LEFT = {
    "qwen3_forward": 4,
    "qwen3_backward": 8,
    "gemma3_forward": 4,
    "deepseek_v3_forward": 1,
    "bert_forward": 1,
    "bert_dropout_forward": 1,
    "prenorm_layernorm_block_backward": 1,
    "cross_entropy_zloss_backward": 1,
    "moe_router_backward": 1,
}


@cache
def outcome(name: str) -> Claimed:
    graph = stored_graphs.load(stored_graphs.read(GRAPHS[name]))
    ordered = [node for node in graph.nodes if is_ordered(node)]
    found = claim(graph, ClaimOptions(H200, phase=name.rsplit("_", 1)[-1]))
    assert [node for node in graph.nodes if is_ordered(node)] == ordered, "random ops, attention and writes stay in their order"
    return found


def left(name: str) -> int:
    others = {op.rsplit(".", 1)[0] for op in OTHER_REDUCTIONS}
    return sum(op not in others for each in outcome(name).declined for op in each.ops)


def test_the_stored_graphs_exist() -> None:
    assert len(GRAPHS) >= 40 and all(isinstance(path, Path) for path in GRAPHS.values())


@pytest.mark.parametrize("name", GRAPHS)
def test_only_the_expected_reductions_are_declined(name: str) -> None:
    assert all(each.error is None for each in outcome(name).declined)
    assert left(name) <= LEFT.get(name, 0), [(each.ops, each.reason) for each in outcome(name).declined]
    assert outcome(name).regions or left(name)


def test_nearly_all_reductions_are_claimed() -> None:
    taken = sum(region.reductions for name in GRAPHS for region in outcome(name).regions)
    lost = sum(left(name) for name in GRAPHS)
    assert taken >= SHARE * (taken + lost), f"{taken} claimed, {lost} left"


@pytest.mark.parametrize("name", GRAPHS)
def test_every_region_compiles_without_spills(name: str) -> None:
    regions = {region.id: region for region in outcome(name).regions}
    with ThreadPoolExecutor(2) as threads:
        for region, compiled in zip(regions.values(), threads.map(_compiled, regions.values()), strict=True):
            assert all(binary.spill_bytes == 0 for binary in compiled.binaries), region.id


def _compiled(region: ClaimedRegion) -> Compiled:
    return compile(region.plan, lambda source: offline.compile(source, H200))


# ---- with recomputation ------------------------------------------------------------------------------------------------------

SAVING = ["seed_transformer_learnable", "seed_transformer_learnable_bf16"]  # their blocks scale their residuals


@cache
def saving(model: str) -> tuple[Claimed, ...]:
    """The claims on both graphs of a model after recomputation."""
    forward, backward = (stored_graphs.load(stored_graphs.read(GRAPHS[f"{model}_{phase}"])) for phase in ("forward", "backward"))
    assert recompute(forward, backward, 1, torch.device("cuda", 0))
    return claim(forward, ClaimOptions(H200, phase="forward")), claim(backward, ClaimOptions(H200, phase="backward"))


@pytest.mark.parametrize("model", SAVING)
def test_recomputation_declines_no_reduction_and_saves_time(model: str) -> None:
    for phase, now in zip(("forward", "backward"), saving(model), strict=True):
        before = outcome(f"{model}_{phase}")
        assert not now.declined and len(now.regions) == len(before.regions)
        assert sum(r.predicted_us for r in now.regions) < sum(r.predicted_us for r in before.regions)


@pytest.mark.parametrize("model", SAVING)
def test_regions_that_recompute_values_compile_without_spills(model: str) -> None:
    known = {r.id for phase in ("forward", "backward") for r in outcome(f"{model}_{phase}").regions}
    for region in {r.id: r for now in saving(model) for r in now.regions if r.id not in known}.values():
        assert all(binary.spill_bytes == 0 for binary in _compiled(region).binaries), region.id
