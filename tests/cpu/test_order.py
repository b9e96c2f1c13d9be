"""Order is kept where it matters: random draws, effects, writes; and a backward that repeats a draw draws the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor import inductor_prims
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import compat
from onepass.capture.graph.effects import is_ordered, writes
from onepass.device import device
from onepass.errors import NoEagerKernel, RewriteFailed, SeededRandom
from onepass.integration import op_by_op, region_op  # noqa: F401, the latter defines the op that rewritten graphs call
from onepass.integration.claim import ClaimOptions, claim
from onepass.integration.node_order import sort_nodes
from tests.support.backend_options import EAGER, RESTS
from tests.support.region_graphs import graph_of

COLS = 256


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """Ops of another library: one whose schema hides its effect, and one that writes to its argument."""
    made = torch.library.Library("onepass_tests", "FRAGMENT")
    made.define("quiet(Tensor x) -> Tensor")
    made.define("fill(Tensor(a!) x) -> ()")
    made.impl("quiet", torch.clone, "CPU")
    made.impl("quiet", torch.empty_like, "Meta")
    made.impl("fill", lambda x: None, "CPU")
    made.impl("fill", lambda x: None, "Meta")
    yield
    made._destroy()


def unit(x: Tensor) -> Tensor:
    """RMSNorm, of ops that change nothing in place."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def seeded(x: Tensor) -> Tensor:
    seeds = torch.ops.prims.inductor_seeds(1, torch.device("cpu"))
    return inductor_prims.random(list(x.shape), torch.ops.prims.inductor_lookup_seed(seeds, 0), "rand") * x


def seeded_integers(x: Tensor) -> Tensor:
    seeds = torch.ops.prims.inductor_seeds(1, torch.device("cpu"))
    return inductor_prims.randint(0, 9, list(x.shape), torch.ops.prims.inductor_lookup_seed(seeds, 0)) * x


def filled(x: Tensor) -> Tensor:
    results: Any = auto_functionalized(torch.ops.onepass_tests.fill.default, x=x)
    return results[1]


def saved_state(x: Tensor) -> Tensor:
    return torch.ops.higher_order.run_and_save_rng_state(torch.ops.aten.rand_like.default, x)[1]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "rand": lambda x: torch.rand(x.shape) * x,
    "randperm": lambda x: torch.randperm(COLS) * x,
    "bernoulli": lambda x: torch.ops.aten.bernoulli.p(x, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "inductor_random": seeded,
    "inductor_randint": seeded_integers,
    "run_and_save_rng_state": saved_state,
    "auto_functionalized": filled,
    "somebody's op": lambda x: torch.ops.onepass_tests.quiet(x),
}


def between_norms(draw: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Draws between two norms of one tensor, which become one region: the first draw depends on a norm, the second on nothing."""

    def fn(x: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        early = draw(unit(x))
        return early, draw(o), F.layer_norm(x, (COLS,)), draw(early)

    return fn


def claimed_in(graph: fx.Graph) -> int:
    return len(claim(graph, ClaimOptions(device("h200"), interpret=True, by_cost=False)).regions)


@pytest.mark.parametrize("name", DRAWS)
def test_the_order_of_effects_is_kept(name: str) -> None:
    graph = graph_of(between_norms(DRAWS[name]), (64, COLS), (64, COLS))
    before = [node for node in graph.nodes if is_ordered(node)]
    assert len(before) >= 3
    assert claimed_in(graph)
    assert [node for node in graph.nodes if is_ordered(node)] == before


@pytest.mark.parametrize("one", list(DRAWS)[::3])
@pytest.mark.parametrize("other", list(DRAWS)[1::3])
def test_the_order_of_different_effects_is_kept(one: str, other: str) -> None:
    def fn(x: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        early = DRAWS[one](unit(x))
        free = DRAWS[other](o)
        return early, F.layer_norm(x, (COLS,)) + free, free.softmax(-1)

    graph = graph_of(fn, (64, COLS), (64, COLS))
    before = [node for node in graph.nodes if is_ordered(node)]
    assert claimed_in(graph)
    assert [node for node in graph.nodes if is_ordered(node)] == before


def test_a_region_does_not_span_two_random_draws() -> None:
    """Its first op feeds one draw and its last reads a later draw: as one call it would swap them."""

    def fn(x: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        normed = unit(x)
        early = torch.rand_like(normed)
        late = torch.rand_like(o)
        return early, F.layer_norm(normed + late, (COLS,))

    graph = graph_of(fn, (64, COLS), (64, COLS))
    before = [node for node in graph.nodes if is_ordered(node)]
    assert claimed_in(graph) == 2
    assert [node for node in graph.nodes if is_ordered(node)] == before


def test_pure_ops_may_be_reordered() -> None:
    graph = graph_of(lambda x, o: (unit(x).sin() @ o.T, o.softmax(-1)), (64, COLS), (64, COLS))
    assert not [node for node in graph.nodes if is_ordered(node)]
    assert claimed_in(graph) and not [node for node in graph.nodes if is_ordered(node)], "nor is a region's call ordered"


def test_an_order_that_cannot_be_kept_is_an_error() -> None:
    graph = graph_of(lambda x: (torch.rand_like(x), torch.randn_like(x)), (4, 8))
    first, second = (node for node in graph.nodes if is_ordered(node))
    first.args = (second,)
    with pytest.raises(RewriteFailed):
        sort_nodes(graph)


def test_reading_before_a_write_a_value_computed_after_it_is_an_error() -> None:
    graph = graph_of(lambda x, y: (x.exp(), y.zero_(), x.sin()), (4, 8), (4, 8))
    early, late = (next(n for n in graph.nodes if name in str(n.target)) for name in ("exp", "sin"))
    early.args = (late,)
    with pytest.raises(RewriteFailed):
        sort_nodes(graph)


# ---- writes ------------------------------------------------------------------------------------------------------------------


def late_softmax(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """A widening, and arithmetic that would be repeated, of a tensor that is overwritten before their use."""
    wide, scaled = x.float(), x * 3
    x.mul_(0)
    return wide.softmax(-1) + y, (scaled + y).softmax(-1), x.float().softmax(-1)


def early_readers(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Users of a region that read a tensor which is overwritten later."""
    normed = unit(y)
    both = normed + x.float().sin()
    layer = F.layer_norm(y, (COLS,))
    x.zero_()
    return both.exp(), layer, x + y.softmax(-1)


def test_a_write_with_an_unused_result_is_kept() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return x.softmax(-1)

    graph = graph_of(fn, (16, COLS), (16, COLS))
    before = [node for node in graph.nodes if writes(node)]
    assert before and not before[0].users
    assert claimed_in(graph)
    assert [node for node in graph.nodes if writes(node)] == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fn", [late_softmax, early_readers])
def test_nothing_moves_across_a_write(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    mode = compat.fake_mode()
    with mode:
        fakes = [torch.empty(16, COLS, dtype=dtype), torch.empty(16, COLS)]
    traced = compat.trace_graph(fn, fakes, mode)
    assert any(writes(node) for node in traced.graph.nodes)
    assert claimed_in(traced.graph)
    traced.recompile()
    x, y = torch.randn(16, COLS).to(dtype), torch.randn(16, COLS)
    for actual, expected in zip(traced(x.clone(), y), fn(x.clone(), y), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


# ---- under torch.compile -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(nothing_compiled: None) -> None:
    """Nothing compiled before."""


def dropped(x: Tensor, b: Tensor) -> Tensor:
    return checkpoint(lambda x, b: F.dropout(x.softmax(-1) + b, 0.5, True), x, b, use_reentrant=False)  # type: ignore[no-any-return]


def dropped_in_the_middle(x: Tensor, b: Tensor) -> Tensor:
    inner = lambda x, b: F.layer_norm(F.dropout(F.layer_norm(x, (64,)) + b, 0.5, True), (64,)).float() * x  # noqa: E731
    return checkpoint(inner, x, b, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("options", RESTS)
def test_a_checkpoint_draws_the_same_again(options: dict[str, Any], fallback: bool) -> None:
    torch.manual_seed(0)
    x, b = torch.randn(32, 64), torch.ones(64, requires_grad=True)
    with torch._inductor.config.patch(fallback_random=fallback):
        y = torch.compile(dropped, backend=onepass.backend, options=options)(x, b)
        y.sum().backward()
    torch.testing.assert_close(b.grad, (y != 0).float().sum(0) * 2)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("options", RESTS)
def test_fallback_random_draws_as_eager_does(options: dict[str, Any]) -> None:
    x, o = torch.randn(64, COLS), torch.ones(64, COLS)
    fn = between_norms(lambda t: F.dropout(t, 0.5, True))
    with torch._inductor.config.patch(fallback_random=True), torch.no_grad():
        torch.manual_seed(3)
        actual = torch.compile(fn, backend=onepass.backend, options=options)(x, o)
        torch.manual_seed(3)
        torch.testing.assert_close(actual, fn(x, o), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh")
def test_with_the_rest_in_eager_all_draws_match_eager() -> None:
    x, b = torch.randn(32, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    found = []
    for run in (dropped_in_the_middle, torch.compile(dropped_in_the_middle, backend=onepass.backend, options=EAGER)):
        torch.manual_seed(3)
        found.append(torch.autograd.grad(run(x, b).sin().sum(), (x, b)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_seeded_draws_are_refused_in_an_op_by_op_run() -> None:
    mode = compat.fake_mode()
    with mode:
        fake = torch.empty(4, 8)
    with pytest.raises(SeededRandom, match="ONEPASS-710"):
        op_by_op.run_op_by_op(compat.trace_graph(seeded, [fake], mode), [fake], is_inference=True)


@pytest.mark.usefixtures("fresh")
def test_an_op_does_not_read_what_it_overwrites() -> None:
    """Inductor makes the gradient of a lookup in-place, and its zeros are the values that it adds."""

    def floors(x: Tensor, at: Tensor) -> Tensor:
        return x.index_select(0, at).floor()

    for rows in (1, 5):
        x = torch.rand(rows, requires_grad=True)
        run = torch.compile(floors, backend=onepass.backend, options=EAGER)
        found = torch.autograd.grad(run(x, torch.zeros(rows, dtype=torch.int64)).sum(), x)
        assert torch.equal(found[0], torch.zeros(rows))


def test_arguments_in_overwritten_memory_are_copied() -> None:
    def add_to_itself(x: Tensor, at: Tensor) -> Tensor:
        y = x + 1
        return y.index_put((at,), y[:], accumulate=True)

    mode = compat.fake_mode()
    with mode:
        fakes = [torch.empty(4), torch.empty(4, dtype=torch.int64)]
    module = compat.trace_graph(add_to_itself, fakes, mode)
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.index_put.default:
            node.target = torch.ops.aten.index_put_.default  # as Inductor's pass leaves it
    op_by_op.copy_overwritten_arguments(module.graph)
    module.recompile()
    x, at = torch.arange(4.0), torch.tensor([1, 2, 3, 0])
    assert torch.equal(module(x, at), add_to_itself(x, at))


@pytest.mark.usefixtures("fresh")
def test_an_op_that_torch_has_no_kernel_for_has_a_code() -> None:
    """Inductor computes `all` as "not any not"."""
    run = torch.compile(lambda x: x.all(), backend=onepass.backend, options=EAGER)
    with pytest.raises(NoEagerKernel, match=r"ONEPASS-717.*logical_not.*rest="):
        run(torch.ones(3, dtype=torch.uint16))
