"""Symbolic sizes of all kinds: halves, offsets, quotients, sizes of convolutions. Regions are claimed and right at every size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import onepass
from onepass import compat
from onepass.capture.graph import region_program
from onepass.capture.lowering import align, lower
from onepass.capture.lowering.axes import Atoms, Inexpressible, cut, segments
from onepass.capture.lowering.draft import Draft
from onepass.errors import CaptureTooLong, RewriteFailed, UnsupportedOp
from onepass.integration import claim, journal, rewrite
from onepass.ir.size import product, sym
from tests.support.correctness import assert_right, randoms

OPTIONS: dict[str, Any] = {"interpret": True, "rest": "eager", "by_cost": False, "on_error": "raise"}
Shapes = tuple[tuple[int, ...], ...]


@pytest.fixture(autouse=True)
def fresh(nothing_compiled: None) -> Iterator[None]:
    yield
    onepass.disable()


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],))


def glu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return norm(F.silu(a) * b)


def guidance(x: Tensor) -> Tensor:
    u, c = x.chunk(2)
    g = u + 7.5 * (c - u)
    return g * (c.std((1, 2), keepdim=True) / g.std((1, 2), keepdim=True))


def thirds(x: Tensor) -> Tensor:
    a, b, c = x.split(x.shape[0] // 3)
    return norm(a + b * c)


def uneven(x: Tensor) -> Any:
    a, b = x.split([x.shape[0] // 2, x.shape[0] - x.shape[0] // 2])
    return norm(a), norm(b)


def shifted(x: Tensor) -> Any:
    return norm(x[:, 1:] - x[:, :-1]), norm(x).flatten(0, 1), (x[:, 1:] * x[:, :-1]).mean((0, 1))


def next_token(x: Tensor) -> Tensor:
    labels = torch.zeros(x.shape[0] * (x.shape[1] - 1), dtype=torch.long)
    return F.cross_entropy(x[:, :-1].flatten(0, 1), labels)


def ends(x: Tensor) -> Any:
    half = x.shape[1] // 2
    return norm(x[:, -1]), norm(x[:, -half:]), norm(x[:, -3:]), norm(x[:, x.shape[1] - 4 :])


def clamped(x: Tensor) -> Any:
    rows = x.shape[1]
    return norm(x[:, : min(rows - 1, 5)]), norm(x[:, max(rows - 5, 0) :]), norm(x[:, : rows - rows % 3])


def pairs(x: Tensor) -> Any:
    b, s, d = x.shape
    y = x.view(b, s // 2, 2, d)
    return norm(y.mean(2)), norm(y).view(b, s, d) + x, norm(x.reshape(b * (s // 2), 2, d)).sum(1)


def nested_pairs(x: Tensor) -> Tensor:
    b, s, d = x.shape
    return norm(x.view(b, s // 2, 2, d).view(b, s // 4, 4, d)).sum(2)


def interleaved(x: Tensor) -> Tensor:
    return norm(torch.stack([x[:, 0::2], x[:, 1::2]], -1).flatten(-2))


def windows(x: Tensor) -> Tensor:
    b, h, w, c = x.shape
    return norm(x.view(b, h // 2, 2, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 8, c)).mean(1)


def convolved(x: Tensor) -> Tensor:
    return norm(F.conv1d(x, x.new_ones(4, 3, 3), stride=2, padding=1))


def transposed(x: Tensor) -> Any:
    return norm(x + x.t()), norm(x[1:, 1:] + x[:-1, :-1].t())


def squared(x: Tensor) -> Tensor:
    rows = x.shape[0]
    return norm(x.new_ones(rows * rows, 16).view(rows, rows, 16) * x)


CASES: tuple[tuple[Callable[..., Any], Shapes], ...] = (
    (glu, ((3, 32), (5, 48))),
    (guidance, ((6, 4, 8), (8, 5, 16))),
    (thirds, ((6, 16), (12, 16))),
    (uneven, ((7, 16), (10, 16))),
    (shifted, ((3, 8, 16), (2, 9, 32), (2, 2, 16))),
    (next_token, ((2, 9, 16), (3, 12, 24))),
    (ends, ((3, 9, 16), (2, 10, 24))),
    (clamped, ((2, 9, 16), (3, 6, 16))),
    (pairs, ((3, 8, 16), (2, 10, 32))),
    (nested_pairs, ((2, 12, 16), (1, 8, 16))),
    (interleaved, ((3, 8, 6), (5, 10, 7))),
    (windows, ((1, 6, 4, 16), (2, 4, 8, 16))),
    (convolved, ((2, 3, 33), (3, 3, 40))),
    (transposed, ((16, 16), (24, 24))),
    (squared, ((4, 16), (5, 16))),
)


@pytest.mark.parametrize(("function", "shapes"), [pytest.param(*case, id=case[0].__name__) for case in CASES])
def test_symbolic_sizes(function: Callable[..., Any], shapes: Shapes) -> None:
    run = torch.compile(function, backend=onepass.backend, dynamic=True, options=OPTIONS)
    for shape in shapes:
        assert_right(run, function, lambda seed, shape=shape: (randoms(seed, shape),))  # type: ignore[misc]
    graphs = journal.snapshot().graphs
    assert graphs and all(graph.regions for graph in graphs) and not any(graph.error or graph.declined for graph in graphs)
    assert not journal.snapshot().fallbacks


@pytest.mark.parametrize("function", [next_token, nested_pairs], ids=lambda f: f.__name__)
def test_gradients_under_symbolic_sizes(function: Callable[..., Any]) -> None:
    run = torch.compile(function, backend=onepass.backend, dynamic=True, options=OPTIONS)
    shapes = next(shapes for f, shapes in CASES if f is function)
    for shape in shapes:
        x = torch.randn(shape, requires_grad=True)
        actual, eager = (torch.autograd.grad(_total(f(x)), x) for f in (run, function))
        torch.testing.assert_close(actual, eager, atol=1e-3, rtol=1e-3)
    assert all(graph.regions for graph in journal.snapshot().graphs)


def _total(results: Any) -> Tensor:
    return sum(((r * r).sum() for r in (results if isinstance(results, tuple) else (results,))), torch.zeros(()))


def test_symbolic_sizes_may_become_one_and_zero() -> None:
    """Whether the first graph serves all sizes or torch compiles another, the results must be right."""

    def tail(x: Tensor) -> Any:
        return norm(x[:, 2:]), x[:, 2:].sum(1)

    run = torch.compile(tail, backend=onepass.backend, dynamic=True, options=OPTIONS)
    for rows in (8, 3, 2, 5):
        x = torch.randn(3, rows, 16)
        torch.testing.assert_close(run(x), tail(x), atol=1e-4, rtol=1e-4)


def test_strides_of_a_tensor_of_symbolic_size_follow_its_sizes() -> None:
    """torch writes strides with Max(1, s); as a symbol, that would keep neighboring dims from being merged."""
    run = torch.compile(lambda x: norm(x[:, 1:] * 2.0), backend=onepass.backend, dynamic=True, options=OPTIONS)
    run(torch.randn(3, 8, 16))
    (region,) = journal.snapshot().graphs[-1].regions
    (out,) = (b for b in region.program.buffers if b.role == "output")
    assert out.strides[0] == product([out.shape[1], *out.shape[2:]])


def test_a_size_passed_to_a_view_is_known() -> None:
    """Even though torch writes the 2 of its result as s // (s // 2)."""
    run = torch.compile(
        lambda x: norm(x.view(x.shape[0] // 2, 2, x.shape[1])), backend=onepass.backend, dynamic=True, options=OPTIONS
    )
    run(torch.randn(6, 16))
    (region,) = journal.snapshot().graphs[-1].regions
    assert 2 in [axis.extent for axis in region.program.axes]


# ---- sizes of combined dims --------------------------------------------------------------------------------------------------


def test_runs_between_equal_ends_have_equal_products() -> None:
    s, half = sym("s"), sym("e")
    found = [(g.left, g.right) for g in segments((4, s, 16), (4, half, 2, 16))]
    assert found == [((0, 1), (0, 1)), ((1, 2), (1, 3)), ((2, 3), (3, 4))]
    assert [(g.left, g.right) for g in segments((s,), (half, 2))] == [((0, 1), (0, 2))]


def test_an_uneven_split_is_inexpressible() -> None:
    with pytest.raises(Inexpressible):
        cut(("a", "b"), (2, 3), (4,))
    atoms = Atoms()
    with pytest.raises(Inexpressible):
        atoms.split((atoms.fresh(6),), (4, 2))


def test_combined_dims_of_different_symbols_become_one() -> None:
    draft = Draft()
    one, two = (draft.tensor(draft.index(dim), (dim,)) for dim in (draft.atoms.dim(sym("a")), draft.atoms.dim(sym("b"))))
    _, (dim,) = align.broadcast(draft, [one, two])
    assert draft.dims(one) == draft.dims(two) == (draft.atoms.resolve(dim),)


def test_aligning_dims_terminates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever one of its steps does."""
    monkeypatch.setattr(align, "_refined_once", lambda draft, tensor, position, onto: tensor)
    draft = Draft()
    tensors = [draft.tensor(draft.index(dim), (dim,)) for dim in (draft.atoms.dim(6), draft.atoms.dim(sym("b")))]
    with pytest.raises(CaptureTooLong, match="ONEPASS-125"):
        align.broadcast(draft, tensors)


# ---- sizes as nodes ----------------------------------------------------------------------------------------------------------


SIZES: tuple[Callable[[Any], Any], ...] = (
    lambda s: s - 1,
    lambda s: 16 * s + 48,
    lambda s: (s - 1) // 2 + 1,
    lambda s: s % 5,
    lambda s: -(-s // 4),
    lambda s: torch.sym_max(s - 9, 3),
    lambda s: torch.sym_min(s, 7) * 2,
    lambda s: s * s + s,
    lambda s: s**3,
    lambda s: (s // 3) % 4,
)


@pytest.mark.parametrize("k", range(len(SIZES)))
def test_any_size_can_be_a_node(k: int) -> None:
    """torch's expression of a size, computed by a graph, is that size."""
    mode = compat.fake_mode()
    s = compat.fake_symbol(mode, 12)
    graph = fx.Graph()
    given = graph.placeholder("s")
    given.meta["val"] = s
    made = compat.emit_size(graph, SIZES[k](s).node.expr, {str(s.node.expr): given}.__getitem__)
    assert isinstance(made.meta["val"], torch.SymInt)
    graph.output(made)
    run = fx.GraphModule(torch.nn.Module(), graph)
    assert [run(n) for n in (2, 12, 37)] == [SIZES[k](n) for n in (2, 12, 37)]


def test_factors_of_a_size() -> None:
    mode = compat.fake_mode()
    s, t = compat.fake_symbol(mode, 12), compat.fake_symbol(mode, 5)

    def factors_of(size: Any, nonempty: bool = False) -> Any:
        coefficient, factors = compat.factored_size(size, nonempty) or (0, ())
        return coefficient, sorted(f.hint for f in factors)

    assert factors_of(7) == (7, [])
    assert factors_of(4 * s * t) == (4, [5, 12])
    assert factors_of(32 * s - 32) == (32, [11])
    assert factors_of(s * t - t) == (1, [5, 11])
    assert factors_of((s - 20) * (t - 7)) == (1, [16])  # separately, the factors would be negative
    assert factors_of(16 * torch.sym_max(s - 1, 1), nonempty=True) == (16, [11])
    assert factors_of(16 * torch.sym_max(s - 1, 1)) == (16, [11])
    bases = [str(f) for f in (compat.factored_size(16 * torch.sym_max(s - 1, 1), nonempty=True) or (0, ()))[1]]
    assert len(bases) == 1 and "Max" not in bases[0]


# ---- a region that cannot be inserted into its graph -------------------------------------------------------------------------


def left_behind() -> None:
    pytest.fail("a node that was made before the rewriting failed is still there")


def two_norms(x: Tensor, y: Tensor) -> Any:
    return norm(x[:, 1:] - x[:, :-1]), norm(y)


def test_a_size_that_cannot_be_expressed_costs_one_region(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: fx.Graph, expression: Any, known: Any) -> Any:
        graph.call_function(left_behind, ())
        raise NotImplementedError(str(expression))

    monkeypatch.setattr(compat, "emit_size", fails)
    run = torch.compile(two_norms, backend=onepass.backend, dynamic=True, options={**OPTIONS, "on_error": "warn"})
    x, y = torch.randn(2, 12, 16), torch.randn(9, 16)
    with pytest.warns(onepass.errors.OnepassWarning, match=r"ONEPASS-701.*could not be rewritten.*ONEPASS-708"):
        results = run(x, y)
    torch.testing.assert_close(results, two_norms(x, y), atol=1e-4, rtol=1e-4)
    (graph,) = journal.snapshot().graphs
    assert len(graph.regions) == 1 and len(graph.declined) == 1 and graph.error is None


def test_errors_in_rewriting_are_raised_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: rewrite.Rewriter, part: Any, text: str, functional: bool = False) -> fx.Node:
        raise RewriteFailed(detail="because")

    monkeypatch.setattr(rewrite.Rewriter, "replace", fails)
    with pytest.raises(Exception, match="ONEPASS-708"):
        torch.compile(two_norms, backend=onepass.backend, options=OPTIONS)(torch.randn(2, 12, 16), torch.randn(9, 16))


class Piece:
    """The inputs and outputs of a region."""

    def __init__(self, inputs: tuple[fx.Node, ...], outputs: tuple[fx.Node, ...]) -> None:
        self.inputs, self.outputs = inputs, outputs


def test_one_region_of_a_cycle_is_dropped() -> None:
    """x -> a, b; c reads a and b; regions {a, c} and {b, d}, where d reads a: each would have to run before the other."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    a, b = (graph.call_function(torch.neg, (x,)) for _ in range(2))
    c, d = graph.call_function(torch.add, (a, b)), graph.call_function(torch.add, (b, a))
    after = graph.call_function(torch.neg, (c,))
    graph.output((c, d, after))
    first, second, third = Piece((x, b), (a, c)), Piece((x, a), (b, d)), Piece((c,), (after,))
    assert rewrite.cyclic_regions(graph, [first, third]) == frozenset()  # type: ignore[list-item]
    assert rewrite.cyclic_regions(graph, [third, first, second]) == {1}  # type: ignore[list-item]


def test_a_region_is_lowered_once_even_if_the_search_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that cannot be lowered restarts the search; regions elsewhere in the graph do not change."""
    seen: list[str] = []
    lower_region = region_program.lower_region

    def counted(graph: fx.Graph, region: Any) -> Any:
        seen.append(str([n.name for n in region.nodes]))
        for node in region.nodes:
            if "sin" in node.name:
                raise lower.Blocked((node,), UnsupportedOp(op="sin", where="here"))
        return lower_region(graph, region)

    monkeypatch.setattr(claim, "lower_region", counted)
    run = torch.compile(lambda x, y: (norm(norm(x).sin()), norm(y)), backend=onepass.backend, options=OPTIONS)
    run(torch.randn(6, 16), torch.randn(9, 32))
    assert len(seen) == len(set(seen)) > 2
