"""Every search and rewrite loop terminates: within its budget for any graph, and far below it for graphs that once blew up."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.capture import capture
from onepass.capture.graph import node_kinds
from onepass.capture.graph.dataflow import Dataflow
from onepass.capture.lowering import draft
from onepass.capture.lowering.draft import Draft
from onepass.capture.lowering.substitute import Affine, substitute
from onepass.device import device
from onepass.errors import CaptureTooLong, CyclicKernels, PlanTooLong, SimplifyTooLong, TooManySteps
from onepass.integration import journal
from onepass.ir import rewrite
from onepass.ir.budget import Budget
from onepass.ir.expr import F32, DType
from onepass.ir.program import Axis, Buffer, Const, Load, Node, Op, Program, Reduce, Result, Store
from onepass.pipeline import optimize
from onepass.plan import footprint, partition
from onepass.plan.partition import Search, plan
from onepass.plan.split import Cut

H200 = device("h200")


def program_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Program:
    return optimize(capture(function, tuple(torch.empty(s, device="meta") for s in shapes), dynamic=False).program)


def chain(length: int) -> Program:
    """x + 1 + 1 + ..., none of it folded."""
    nodes: list[Node] = [Load("x", (("d0", 1),)), Const(1.5, F32)]
    for _ in range(length):
        nodes.append(Op("add", (len(nodes) - 1 if len(nodes) > 2 else 0, 1), F32))
    nodes.append(Store("out0", len(nodes) - 1, (("d0", 1),)))
    buffers = (Buffer("x", F32, "input", (64,), (1,)), Buffer("out0", F32, "output", (64,), (1,)))
    return Program("chain", (Axis("d0", 64),), buffers, tuple(nodes))


def test_steps_are_counted_and_scaled() -> None:
    budget = Budget("Counting", PlanTooLong, base=2, per_item=3)
    steps = budget.steps(1)
    steps.spend(4)
    before = steps.exhausted
    steps.spend()
    assert not before and steps.exhausted
    with pytest.raises(TooManySteps, match=r"ONEPASS-202.*Counting stopped after its limit of 5 steps"):
        steps.spend()


# ---- capture -----------------------------------------------------------------------------------------------------------------


def test_a_program_that_grows_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "DRAFT_BUDGET", replace(draft.DRAFT_BUDGET, base=20))
    with pytest.raises(CaptureTooLong, match="ONEPASS-125"):
        program_of(lambda x: reduce(operator.add, [x * k for k in range(1, 20)]), (4, 16))


def test_a_region_over_its_budget_stays_with_inductor(monkeypatch: pytest.MonkeyPatch, nothing_compiled: None) -> None:
    """Only that region: the other norm is claimed."""
    monkeypatch.setattr(partition, "SIZE", replace(partition.SIZE, base=40))

    def two(x: Tensor, y: Tensor) -> Any:
        return reduce(operator.add, [F.layer_norm(x * k, (16,)) for k in range(1, 6)]), F.layer_norm(y, (32,))

    x, y = torch.randn(6, 16), torch.randn(9, 32)
    run = torch.compile(two, backend=onepass.backend, options={"interpret": True, "rest": "eager", "by_cost": False})
    with pytest.warns(onepass.errors.OnepassWarning, match=r"ONEPASS-701.*could not be planned.*ONEPASS-202"):
        results = run(x, y)
    torch.testing.assert_close(results, two(x, y), atol=1e-4, rtol=1e-4)
    (graph,) = journal.snapshot().graphs
    assert len(graph.regions) == len(graph.declined) == 1


def test_nested_short_sums_are_not_unrolled_exponentially() -> None:
    """Seven rows are unrolled into additions; 7 * 7 * 7 * 7 of them, of a few ops each, are not."""

    def nested(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x.sigmoid() + 1).sum(0)
        return x

    program = program_of(nested, (7, 7, 7, 7, 16))
    assert len(program.nodes) < 1500 and any(isinstance(n, Reduce) for n in program.nodes)
    plan(program, {}, H200)


@pytest.mark.parametrize("turn", [lambda x: x[1:], lambda x: x + x.t()], ids=("slice", "transpose"))
def test_a_chain_of_reductions_is_moved_in_linear_time(turn: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """x + norm(x), again and again, then moved: every further norm costs as much as the one before, not twice as much."""
    added, add = [0], Draft.add

    def counted(self: Draft, node: Node, dtype: DType) -> int:
        added[0] += 1
        return add(self, node, dtype)

    def deep(levels: int) -> int:
        def function(x: Tensor) -> Tensor:
            for _ in range(levels):
                x = x + F.rms_norm(x, (16,))
            return turn(x)

        added[0] = 0
        capture(function, (torch.empty(16, 16),), dynamic=False)
        return added[0]

    monkeypatch.setattr(Draft, "add", counted)
    sizes = [deep(n) for n in (3, 5, 7)]
    assert 0 < sizes[2] - sizes[1] == sizes[1] - sizes[0]


def test_a_long_chain_is_moved_without_recursion() -> None:
    made = Draft()
    (atom,) = made.atoms.dim(64)
    value = made.index((atom,))
    for k in range(2000):
        value = made.op("add", value, made.const(k + 1, made.dtype(value)))
    (image,) = made.atoms.dim(32)
    moved = substitute(made, value, {(atom,): Affine(((image, 2),), 1)})
    assert made.free(moved) == {image}


def test_a_long_chain_of_views_is_followed_without_recursion() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, 16)
    node = x
    for _ in range(2000):
        node = graph.call_function(torch.ops.aten.alias.default, (node,))
        node.meta["val"] = torch.empty(8, 16)
    total = graph.call_function(torch.ops.aten.sum.dim_IntList, (node, [0]))
    total.meta["val"] = torch.empty(16)
    graph.output(total)
    monkey = {
        n: node_kinds.NodeKind.FREE if n.op == "call_function" and n is not total else k
        for n, k in node_kinds.classify_nodes(graph, torch.device("cpu"), {}).items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onepass.capture.graph.dataflow.classify_nodes", lambda *_: monkey)
        dataflow = Dataflow(graph, torch.device("cpu"), {}, False)
    assert dataflow.producers[dataflow.position_of[total]] == (dataflow.position_of[x],)


# ---- the ir ------------------------------------------------------------------------------------------------------------------


def test_rules_that_undo_each_other_terminate() -> None:
    def there(made: rewrite.Draft, node: Node) -> Node | None:
        return replace(node, name="sub") if isinstance(node, Op) and node.name == "add" else None

    def back(made: rewrite.Draft, node: Node) -> Node | None:
        return replace(node, name="add") if isinstance(node, Op) and node.name == "sub" else None

    with pytest.raises(SimplifyTooLong, match="ONEPASS-203"):
        rewrite.sweep(chain(400), (there, back))


def test_powers_are_not_expanded_to_find_a_one_hot_factor() -> None:
    """The one-hot rule searches a product for an index comparison; sixty squarings have 2**60 factors without one."""

    def function(x: Tensor) -> Tensor:
        for _ in range(60):
            x = x * x
        return x[:, None].expand(-1, 32).sum(1)

    assert len(program_of(function, (16,)).nodes) < 100


# ---- planning ----------------------------------------------------------------------------------------------------------------


def rows_one_by_one(x: Tensor) -> Tensor:
    y = F.layer_norm(x, (x.shape[-1],))
    return y.softmax(-1).sum(0) + y.sum(0)


def many_sums(x: Tensor) -> Any:
    return tuple((x * k).sum(0) for k in range(1, 11)), tuple((x + k).amax(1) for k in range(1, 11))


@pytest.mark.parametrize(("function", "shape"), [(rows_one_by_one, (6, 16)), (many_sums, (64, 256))], ids=("rows", "sums"))
def test_the_number_of_scored_merges_is_linear_in_the_kernels(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    search = Search(program_of(function, shape), {}, H200, {})
    search.run()
    assert len(search.seeds) > 18
    assert len(search._memo) <= partition.SCORINGS.steps(len(search.seeds)).max_steps + len(search.seeds)


def test_a_search_out_of_budget_returns_its_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "THOROUGH", replace(partition.THOROUGH, base=0))
    monkeypatch.setattr(partition, "SCORINGS", replace(partition.SCORINGS, base=0, per_item=0))
    program = program_of(many_sums, (64, 256))
    search = Search(program, {}, H200, {})
    groups = search.run()
    assert len(search._memo) == len(search.seeds) + 1 and sorted(i for g in groups for i in g) == sorted(program.of(Reduce, Store))


def test_a_search_stays_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "THOROUGH", replace(partition.THOROUGH, base=0))
    monkeypatch.setattr(partition, "SCORINGS", replace(partition.SCORINGS, base=24, per_item=0))
    search = Search(program_of(many_sums, (64, 256)), {}, H200, {})
    search.run()
    assert len(search.seeds) == 20 and len(search._memo) <= 24


def test_few_kernels_are_merged_best_first() -> None:
    """The named workloads, of up to 19 results, are searched thoroughly: each round makes the one best merge."""
    search = Search(program_of(lambda x, y: (x.sum(0), y.sum(0), (x + y).sum(1)), (4096, 512), (4096, 512)), {}, H200, {})
    search._all_merged = None  # type: ignore[assignment,method-assign]
    search._agglomerate(search.seeds)
    assert not search.thorough.exhausted


def test_kernels_that_depend_on_each_other_are_refused() -> None:
    program = program_of(lambda x: x.softmax(-1).sum(-1), (64, 512))
    first, second, *rest = list(program.of(Reduce))
    search = Search(program, {}, H200, {})
    circle = [frozenset({first, rest[-1]}) if rest else frozenset({first}), frozenset({second})]
    with pytest.raises(CyclicKernels, match="ONEPASS-204"):
        search._ordered(circle)


def test_a_program_too_large_to_plan_is_refused() -> None:
    with pytest.raises(PlanTooLong, match="ONEPASS-202"):
        plan(chain(5000), {}, H200)


def test_a_long_chain_is_extracted_without_recursion() -> None:
    program = chain(3000)
    (store,) = program.of(Store)
    assert Cut(program, ("d0",)).extract(frozenset({store}), "chain").nodes == program.nodes


def test_extraction_keeps_the_order_of_use() -> None:
    """Operands come right before their first use: the text of kernels depends on that."""
    nodes: tuple[Node, ...] = (
        Load("x", (("d0", 1),)),
        Load("y", (("d0", 1),)),
        Op("neg", (1,), F32),
        Op("neg", (0,), F32),
        Op("add", (2, 3), F32),
        Reduce("sum", (4,), ("d0",)),
        Result(5, 0),
        Store("out0", 6, ()),
    )
    buffers = tuple(Buffer(n, F32, "input", (64,), (1,)) for n in "xy")
    program = Program("p", (Axis("d0", 64),), (*buffers, Buffer("out0", F32, "output")), nodes)
    cut_out = Cut(program, ("d0",)).extract(frozenset({5, 7}), "p")
    kinds_of = [n.buffer if isinstance(n, (Load, Store)) else type(n).__name__ for n in cut_out.nodes]
    assert kinds_of[:5] == ["y", "Op", "x", "Op", "Op"]


def test_views_too_complex_to_compare_count_as_overlapping() -> None:
    walks = [(1000 + 2 * k, 4) for k in reversed(range(16))]  # all even: it would take 7**16 attempts to find that no sum is odd
    assert footprint._can_reach(3001, walks, footprint.COMPARE_VIEWS.steps())


# ---- unrelated axes ----------------------------------------------------------------------------------------------------------


def sizes_apart() -> Iterator[tuple[tuple[int, ...], ...]]:
    yield (4, 33, 7, 2), (4, 33, 7, 2)
    yield (5, 16), (9, 32)


@pytest.mark.parametrize("shapes", list(sizes_apart()), ids=str)
def test_no_kernel_iterates_over_the_product_of_unrelated_axes(shapes: tuple[tuple[int, ...], ...]) -> None:
    program = program_of(lambda a, b: (torch.tanh(a), b.sum(-2)), *shapes)
    for kernel in plan(program, {}, H200).kernels:
        walked = max(
            kernel.program.points(dims | frozenset(n.axes if isinstance(n, Reduce) else ()), {})
            for n, dims in zip(kernel.program.nodes, kernel.program.dims, strict=True)
        )
        space = kernel.kernel.space
        assert kernel.program.points((*space.batch, *space.rows, *space.cols), {}) == walked
