"""Which nodes become one region, which are given back to Inductor, and what the rewritten graph looks like."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from onepass.capture.graph import regions
from onepass.capture.graph.boundary import MAX_DUPLICATED_NODES
from onepass.capture.graph.grouping import Groups
from onepass.capture.graph.region_program import lower_region
from onepass.capture.graph.regions import Region, find_regions
from onepass.device import device
from onepass.errors import RewriteFailed
from onepass.integration import claim as claims
from onepass.integration import region_op  # noqa: F401, defines the op that rewritten graphs call
from onepass.integration.claim import ClaimOptions, claim
from tests.support.region_graphs import claimed, graph_of, norm

CPU = torch.device("cpu")
H200 = device("h200")


def regions_of(fn: Callable[..., object], *shapes: tuple[int, ...], epilogues: bool = False) -> tuple[Region, ...]:
    return find_regions(graph_of(fn, *shapes), CPU, {}, epilogues)


def ops(region: Region) -> list[str]:
    return [str(node.target).removeprefix("aten.").split(".")[0] for node in region.nodes]


# ---- groups ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_groups_merge_exactly_if_no_cycle_arises(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 12))
    after = [data.draw(st.sets(st.integers(n + 1, count - 1), max_size=3)) if n + 1 < count else set() for n in range(count)]
    groups, home = Groups(after), {n: n for n in range(count)}
    for _ in range(12):
        a, b = data.draw(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)))
        merged = {n: home[a] if h == home[b] else h for n, h in home.items()}
        quotient = nx.DiGraph((merged[u], merged[v]) for u in range(count) for v in after[u] if merged[u] != merged[v])
        legal = nx.is_directed_acyclic_graph(quotient)
        assert groups.merge(a, b) == legal
        home = merged if legal else home
        for n in range(count):
            assert groups.members(n) == tuple(m for m in range(count) if home[m] == home[n])


# ---- growing ---------------------------------------------------------------------------------------------------------------


def test_a_norm_absorbs_the_residual_add_before_it() -> None:
    def fn(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return h, norm(h, w)

    (region,) = regions_of(fn, (64, 32), (64, 32), (32,))
    assert ops(region)[0] == "add" and len(region.inputs) == 3 and len(region.outputs) == 2


def test_a_matmul_between_two_norms_keeps_them_apart() -> None:
    first, second = regions_of(lambda x, w, m: norm(norm(x, w) @ m + x, w), (64, 32), (32,), (32, 32))
    assert "add" in ops(second) and len(first.outputs) == 1


def test_three_norms_of_one_input_join() -> None:
    (region,) = regions_of(lambda x, a, b, c: (norm(x, a), norm(x, b), norm(x, c)), (64, 32), (32,), (32,), (32,))
    assert len(region.reductions) == 3 and len(region.inputs) == 4


def test_both_gradients_of_a_norm_are_one_region() -> None:
    def backward(x: Tensor, w: Tensor, rstd: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        xhat, g = x * rstd, dy * w
        return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True)), (dy * xhat).sum(0)

    (region,) = regions_of(backward, (64, 32), (32,), (64, 1), (64, 32))
    assert len(region.reductions) == 2


def test_a_shared_scalar_does_not_join_unrelated_data() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x * x).sum() + (y * y).sum()

    assert len(regions_of(fn, (64, 32), (128, 48))) == 2


def test_regions_grow_through_views() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        heads = (x + 1).view(4, 16, 4, 8).transpose(1, 2)
        return norm(heads, w).transpose(1, 2).reshape(64, 32)

    (region,) = regions_of(fn, (64, 32), (8,))
    assert "add" in ops(region) and len(region.outputs) == 1


def test_regions_do_not_extend_across_a_write() -> None:
    graph = graph_of(lambda x, w: norm(x, w).sum(0), (64, 32), (32,))
    x, total = next(iter(graph.nodes)), next(n for n in graph.nodes if "sum" in str(n.target))
    with graph.inserting_before(total):
        graph.call_function(torch.ops.aten.copy_.default, (x, x)).meta["val"] = x.meta["val"]
    assert [len(region.reductions) for region in find_regions(graph, CPU, {})] == [1, 1]


def test_regions_have_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not counting nodes that are recomputed rather than read."""
    monkeypatch.setattr(regions, "MAX_NODES", 5)

    def chain(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(60):
            x = x.sin()
        return norm(x, w)

    found = regions_of(chain, (64, 32), (32,))
    assert found and all(len(region.nodes) <= 5 + MAX_DUPLICATED_NODES for region in found)


def test_reductions_of_a_few_elements_count_as_arithmetic() -> None:
    assert regions_of(lambda x: x.view(64, 4, 32).sum(1), (64, 128)) == ()


def test_tensors_on_another_device_are_not_claimed() -> None:
    graph = graph_of(norm, (64, 32), (32,))
    here, elsewhere = (len(find_regions(graph, where, {})) for where in (CPU, torch.device("meta")))
    assert (here, elsewhere) == (1, 0)


def test_arithmetic_without_a_reduction_is_not_claimed() -> None:
    assert regions_of(lambda x, y: F.gelu(x) * y, (64, 32), (64, 32)) == ()


# ---- boundary --------------------------------------------------------------------------------------------------------------


def test_arithmetic_that_a_later_kernel_needs_anyway_is_given_back() -> None:
    def fn(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = norm(x, w)
        a, b = n.chunk(2, -1)
        return n * cos + torch.cat([-b, a], -1) * sin

    (region,) = regions_of(fn, (64, 32), (32,), (64, 32), (64, 32))
    assert len(region.outputs) == 1 and len(region.inputs) == 2
    assert region.lost_fusion_bytes == 2 * 64 * 32 * 4  # the norm is written and read, which a single kernel would avoid


def test_a_sum_that_an_earlier_kernel_can_compute_is_left_to_it() -> None:
    def fn(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = r + torch.cat([x[:, 16:], x[:, :16]], -1)
        return h, norm(h, w)

    (region,) = regions_of(fn, (64, 32), (64, 32), (32,))
    assert "add" not in ops(region)[:1] and len(region.inputs) == 2


def test_a_residual_that_is_added_again_after_a_matmul_is_not_charged() -> None:
    def fn(x: Tensor, r: Tensor, w: Tensor, m: Tensor) -> Tensor:
        h = x + r
        return torch.relu(h + norm(h, w) @ m)

    (region,) = regions_of(fn, (64, 32), (64, 32), (32,), (32, 32))
    assert region.lost_fusion_bytes == 0


def test_a_max_autotuned_matmul_is_charged_for_its_epilogue() -> None:
    def fn(x: Tensor, m: Tensor, w: Tensor) -> Tensor:
        return norm(x @ m, w)

    (plain,) = regions_of(fn, (64, 32), (32, 32), (32,))
    (tuned,) = regions_of(fn, (64, 32), (32, 32), (32,), epilogues=True)
    assert plain.lost_fusion_bytes == 0 and tuned.lost_fusion_bytes == 0  # two readers, so nothing can be fused into the matmul
    (single,) = regions_of(lambda x, m: torch.relu(x @ m).sum(0), (64, 32), (32, 32), epilogues=True)
    assert ops(single) == ["relu", "sum"] and single.lost_fusion_bytes == 2 * 64 * 32 * 4


def test_cheap_arithmetic_is_repeated_rather_than_written() -> None:
    def fn(x: Tensor, s: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        scaled = x * s
        first = norm(scaled, w)
        return first, norm(first @ m + scaled, w)

    first, second = regions_of(fn, (64, 32), (64, 1), (32,), (32, 32))
    assert len(first.outputs) == 1
    assert "mul" in ops(second)[:1] and len(second.inputs) == 4


# ---- rewriting -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("functional", [False, True])
def test_the_rewritten_graph_computes_the_same(functional: bool) -> None:
    def fn(x: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        h = norm(x, w) @ m + x
        return torch.softmax(h, -1).t(), h.sum(0), h

    graph = graph_of(fn, (24, 16), (16,), (16, 16))
    outcome = claimed(graph, functional=functional)
    assert len(outcome.regions) == 2 and not outcome.declined
    args = torch.randn(24, 16), torch.randn(16), torch.randn(16, 16)
    results = fx.GraphModule(torch.nn.Module(), graph)(*args)
    for given_back, expected in zip(results, fn(*args), strict=True):
        assert given_back.stride() == expected.stride()
        torch.testing.assert_close(given_back, expected)


def test_one_region_of_a_cycle_stays_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "cyclic_regions", lambda graph, parts: frozenset({0}))
    graph = graph_of(lambda x, w, m: norm(norm(x, w) @ m, w), (24, 16), (16,), (16, 16))
    outcome = claimed(graph)
    assert len(outcome.regions) == 1 and [left.reason for left in outcome.declined] == ["it could not be rewritten"]
    assert isinstance(outcome.declined[0].error, RewriteFailed)


def test_equal_blocks_have_equal_text() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor, m: Tensor) -> Tensor:
        return norm(norm(x, a) @ m, b)

    graph = graph_of(fn, (64, 32), (32,), (32,), (32, 32))
    for k, node in enumerate(graph.nodes):
        node.meta["stack_trace"] = f'File "model.py", line {k}, in forward'
    parts = [lower_region(graph, region) for region in find_regions(graph, CPU, {})]
    assert len({part.key for part in parts}) == 1 and len({part.lines for part in parts}) == 2


def test_a_region_does_not_write_a_result_without_live_users() -> None:
    graph = graph_of(lambda x: torch.softmax(x, -1).sum(0), (64, 32))
    shifted = next(n for n in graph.nodes if "exp" in str(n.target))
    with graph.inserting_after(shifted):
        graph.call_function(torch.ops.aten.neg.default, (shifted,)).meta["val"] = shifted.meta["val"]
    (region,) = claimed(graph).regions
    assert len(region.part.outputs) == 1


@pytest.mark.parametrize("named", ["id", "line"])
def test_regions_can_be_skipped(named: str) -> None:
    def graph() -> fx.Graph:
        made = graph_of(norm, (64, 32), (32,))
        for node in made.nodes:
            node.meta["stack_trace"] = 'File "model.py", line 12, in forward'
        return made

    (first,) = claimed(graph()).regions
    assert first.lines == ("model.py:12",)
    outcome = claimed(graph(), skip=frozenset({first.id if named == "id" else "model.py:12"}))
    assert not outcome.regions and "skipped" in outcome.declined[0].reason


def test_a_node_that_cannot_be_lowered_does_not_prevent_other_claims() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return norm(x, w), x.cumsum(-1), x.to(torch.complex64).sum(-1)

    outcome = claimed(graph_of(fn, (64, 32), (32,)))
    assert len(outcome.regions) == 1
    assert {left.ops[0] for left in outcome.declined} == {"aten.cumsum", "aten.sum"}
    assert any("dtype" in left.reason for left in outcome.declined)


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("_foreach_norm", lambda x, w: torch._foreach_norm([x, w])[0]),
        ("_foreach_max", lambda x, w: torch._foreach_max([x, w])[0]),
        ("cummax", lambda x, w: x.cummax(-1)[0]),
        ("nanmedian", lambda x, w: x.nanmedian()),
        ("index_add", lambda x, w: w.index_add(0, torch.zeros(64, dtype=torch.long), x[:, 0])),
        ("aminmax", None),
    ],
)
def test_reductions_without_a_lowering_are_listed(name: str, fn: Callable[..., object] | None) -> None:
    if fn is None:  # known only by torch's tag
        if not hasattr(torch.Tag, "reduction"):
            pytest.skip("this torch does not tell which ops reduce")
        graph = graph_of(lambda x, w: x.exp() + w, (64, 32), (32,))
        node = next(n for n in graph.nodes if "exp" in str(n.target))
        node.target = torch.ops.aten.aminmax.default
    else:
        graph = graph_of(fn, (64, 32), (32,))
    assert f"aten.{name}" in [op for left in claimed(graph).declined for op in left.ops]


def test_a_claim_that_costs_more_than_it_saves_is_not_made() -> None:
    def fn(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = norm(x, w)
        a, b = n.chunk(2, -1)
        return n * cos + torch.cat([-b, a], -1) * sin

    outcome = claim(graph_of(fn, (16384, 128), (128,), (16384, 128), (16384, 128)), ClaimOptions(H200, interpret=True))
    (left,) = outcome.declined
    assert "keeps on chip" in left.reason and left.predicted_us is not None and left.inductor_us is not None
    assert left.predicted_us > left.inductor_us
