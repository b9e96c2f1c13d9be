"""Recomputation in the backward: which values are recomputed instead of saved, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

import onepass
from bench.zoo import transformer
from onepass.capture.graph import recompute as rule
from onepass.capture.graph.recompute import recompute
from onepass.errors import OnepassWarning
from onepass.integration import journal, split
from onepass.integration.settings import resolve

ROWS, DIM = 8, 32
NBYTES = ROWS * DIM * 4


def graphs(forward: Callable[..., Any], backward: Callable[..., Any], outputs: int) -> tuple[fx.Graph, fx.Graph]:
    """The graphs of two functions as the partitioner leaves them: the second takes the saved values of the first."""
    x, y, scale, tangent = torch.randn(ROWS, DIM), torch.randn(ROWS, DIM), torch.randn(DIM), torch.randn(ROWS, DIM)
    saved = forward(x, y, scale)[outputs:]
    first, second = make_fx(forward, tracing_mode="fake")(x, y, scale), make_fx(backward, tracing_mode="fake")(*saved, tangent)
    results: Any = first.graph.output_node().args[0]
    names = [node.name for node in results[outputs:]] + ["tangents_1"]
    for node, name in zip([n for n in second.graph.nodes if n.op == "placeholder"], names, strict=True):
        node._rename(name)
        node.target = node.name
    return first.graph, second.graph


def recomputed(forward: Callable[..., Any], backward: Callable[..., Any], outputs: int = 1) -> list[tuple[int, int]]:
    first, second = graphs(forward, backward, outputs)
    before = len(first.output_node().args[0])  # type: ignore[arg-type]
    done = recompute(first, second, outputs, torch.device("cpu"), 1)
    assert len(first.output_node().args[0]) == before - len(done)  # type: ignore[arg-type]
    assert sum(node.op == "placeholder" for node in second.nodes) == before - outputs - len(done) + 1
    return [(d.nbytes, d.traffic_saved) for d in done]


def norm_of_sum(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    total = x + scale * y
    return total * total.square().mean(-1, keepdim=True), x, y, scale, total


def test_recomputing_a_sum_of_tensors_read_anyway_costs_nothing() -> None:
    """The forward does not write the sum, and the backward does not read it."""
    done = recomputed(norm_of_sum, lambda x, y, scale, total, d: (d * total, d * x, d * y * scale))
    assert done == [(NBYTES, 2 * NBYTES)]


def test_recomputing_from_a_tensor_not_read_otherwise_is_charged() -> None:
    done = recomputed(norm_of_sum, lambda x, y, scale, total, d: (d * total, d @ x.T, d * y * scale))
    assert done == [(NBYTES, NBYTES)]


def test_reading_two_tensors_instead_of_one_gains_nothing() -> None:
    def multiplied(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        total = x + scale * y
        return total @ total.T, x, y, scale, total

    assert not recomputed(multiplied, lambda x, y, scale, total, d: (d * total, d @ x.T, d @ y.T, d * scale))
    assert recomputed(multiplied, lambda x, y, scale, total, d: (d * total, d * x, d * y * scale)) == [(NBYTES, NBYTES)]


def test_operands_of_a_matmul_are_saved() -> None:
    assert not recomputed(norm_of_sum, lambda x, y, scale, total, d: (d.T @ total, d * x, d * y * scale))


def test_results_of_a_reduction_are_saved() -> None:
    def spread(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        total = x + (scale * y).sum(-1, keepdim=True)
        return total.exp(), x, y, scale, total

    assert not recomputed(spread, lambda x, y, scale, total, d: (d * total, d * x, d * y * scale))


def test_results_returned_to_the_user_stay() -> None:
    def returned(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        normed, *rest = norm_of_sum(x, y, scale)
        return normed, rest[-1], *rest

    assert not recomputed(returned, lambda x, y, scale, total, d: (d * total, d * x, d * y * scale), outputs=2)


def test_a_value_saved_by_a_checkpoint_policy_stays_saved() -> None:
    first, second = graphs(norm_of_sum, lambda x, y, scale, total, d: (d * total, d * x, d * y * scale), 1)
    first.output_node().args[0][-1].meta["recompute"] = CheckpointPolicy.MUST_SAVE  # type: ignore[index, union-attr]
    assert not recompute(first, second, 1, torch.device("cpu"), 1)


def test_long_chains_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "MAX_OPS", 1)
    assert not recomputed(norm_of_sum, lambda x, y, scale, total, d: (d * total, d * x, d * y * scale))


def test_a_value_may_be_recomputed_from_a_recomputed_one() -> None:
    def twice(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        total = x + scale * y
        more = scale * total + x
        return more.exp(), x, y, scale, total, more

    # `more` is needed before `total`, so the computation of `total` moves to the front.
    def backward(x: Tensor, y: Tensor, scale: Tensor, total: Tensor, more: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return d * more, d * total, d * x, d * y * scale

    assert recomputed(twice, backward) == [(NBYTES, 2 * NBYTES)] * 2


def stream(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """A norm within a residual stream: its factor and the normalized rows are saved, and only its own backward reads them."""
    total = x + y
    factor = total.square().mean(-1, keepdim=True)
    normed = total / factor
    return total + (normed * scale) @ y.T @ y, scale, factor, normed


def of_stream(scale: Tensor, factor: Tensor, normed: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    return d * normed, d * scale * factor


def run(first: fx.Graph, second: fx.Graph, outputs: int, *args: Tensor) -> list[Tensor]:
    """The results of both graphs, run one after the other."""
    results = fx.GraphModule({}, first)(*args)
    return [*results[:outputs], *fx.GraphModule({}, second)(*results[outputs:], args[0])]


def test_a_value_written_anyway_is_saved_instead() -> None:
    """The residual stream continues from the norm's input, so that is in memory, and the normalized rows need not be saved."""
    args = torch.randn(ROWS, DIM), torch.randn(ROWS, DIM), torch.randn(DIM)
    before = run(*graphs(stream, of_stream, 1), 1, *args)
    first, second = graphs(stream, of_stream, 1)
    assert [(d.nbytes, d.traffic_saved) for d in recompute(first, second, 1, torch.device("cpu"), 1)] == [(NBYTES, NBYTES)]
    saved = [node.name for node in first.output_node().args[0][1:]]  # type: ignore[index, union-attr]
    taken = [node.target for node in second.nodes if node.op == "placeholder"]
    assert saved == taken[:-1] and saved[-1] == "add" and "div" not in saved
    for one, other in zip(run(first, second, 1, *args), before, strict=True):
        assert torch.equal(one, other)


def test_a_value_the_user_may_change_is_not_saved_instead() -> None:
    def given(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        factor = total.square().mean(-1, keepdim=True)
        normed = total / factor
        return total + (normed * scale) @ y.T @ y, total, scale, factor, normed

    assert not recomputed(given, of_stream, outputs=2)


@pytest.mark.parametrize("policy", CheckpointPolicy)
def test_a_value_recomputed_by_a_checkpoint_policy_is_not_saved_instead(policy: CheckpointPolicy) -> None:
    first, second = graphs(stream, of_stream, 1)
    next(node for node in first.nodes if node.name == "add").meta["recompute"] = policy
    assert bool(recompute(first, second, 1, torch.device("cpu"), 1)) == policy.name.endswith("SAVE")


def test_one_saved_value_is_replaced_by_one() -> None:
    """Two values that are written anyway, each of half the bytes, would be saved instead of one."""

    def of_two(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        total, other = (x + y).bfloat16(), (x * y).bfloat16()
        both = total.float() / other.float()
        return ((both * scale).exp() @ y.T @ y).bfloat16() + total + other, scale, both

    assert not recomputed(of_two, lambda scale, both, d: (d * both, d * scale))


def example() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    parts = transformer.build(learnable=True, **{**transformer.TINY, "layers": 3})
    return parts.module, parts.draw(torch.Generator().manual_seed(0))


def gradients(module: nn.Module, inputs: dict[str, Tensor], **options: Any) -> list[Tensor]:
    torch._dynamo.reset()
    module.zero_grad()
    options = {"interpret": True, "rest": "eager", "by_cost": False, "on_error": "raise", **options}
    torch.compile(module, backend=onepass.backend, options=options)(**inputs).backward()
    return [p.grad.clone() for p in module.parameters()]  # type: ignore[union-attr]


def test_a_transformer_saves_one_sum_per_block(caplog: pytest.LogCaptureFixture) -> None:
    """Of three sums, those after the MLP and after the mix follow from the one after attention. The last block has no mix."""
    with caplog.at_level("INFO", logger="onepass.integration.split"):
        module, inputs = example()
        actual = gradients(module, inputs)
    logged = [r.getMessage() for r in caplog.records if "recomputed in the backward" in r.getMessage()]
    assert [text.split()[0] for text in logged] == ["5"]
    for one, other in zip(actual, gradients(module, inputs, recompute=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_an_error_leaves_the_saved_values_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no such luck.")

    monkeypatch.setattr(split, "recompute", broken)
    module, inputs = example()
    with pytest.warns(OnepassWarning, match="ONEPASS-709.*no such luck"):
        actual = gradients(module, inputs, on_error="warn")
    for one, other in zip(actual, gradients(module, inputs, recompute=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with pytest.raises(Exception, match="no such luck"):
        gradients(module, inputs)


def test_both_graphs_are_changed_or_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_way(forward: fx.Graph, backward: fx.Graph, *_: Any) -> None:
        for graph in (forward, backward):
            graph.create_node("placeholder", "left_behind")
        raise ValueError("half way")

    modules = [fx.GraphModule({}, g) for g in graphs(norm_of_sum, lambda x, y, scale, total, d: (d * total, d * x), 1)]
    before = [str(m.graph) for m in modules]
    monkeypatch.setattr(split, "recompute", half_way)
    with pytest.warns(OnepassWarning, match="half way"):
        split.SplitPass(resolve({"interpret": True, "on_error": "warn"}))(modules[0], modules[1], 1)
    assert [str(m.graph) for m in modules] == before


def test_the_uuid_of_the_partitioner_depends_on_settings_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {split.SplitPass(resolve(given)).uuid() for given in ({}, {"by_cost": False})}
    monkeypatch.setattr(split, "versions", lambda: {"onepass": "other sources"})
    assert len(found | {split.SplitPass(resolve({})).uuid()}) == 3


def test_a_partitioner_set_by_the_user_takes_precedence() -> None:
    calls = []

    class Theirs(CustomPartitionerFn):  # type: ignore[misc]  # Inductor's types are not followed
        def __call__(self, gm: Any, joint_inputs: Any, **how: Any) -> Any:
            calls.append(how["num_fwd_outputs"])
            return min_cut_rematerialization_partition(gm, joint_inputs, **how)

        def uuid(self) -> str:
            return "theirs"

    module, inputs = example()
    gradients(module, inputs, custom_partitioner_fn=Theirs())
    assert calls == [1]


@pytest.mark.long
def test_reports_list_values_that_are_no_longer_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "MIN_BYTES", 1)
    module, inputs = example()
    report: Any = onepass.explain(module)(**inputs)
    assert len(report.recomputed) == 5 and len(report.to_json()["recomputed"]) == 5
    assert "5 values (" in str(report) and "computed again in the backward instead of saved" in str(report)
    journal.reset()
    gradients(module, inputs)
    assert len(onepass.report().recomputed) == 5 and "5 values (" in str(onepass.report())
