"""Fused functions under torch's transforms and tracers, as objects that are copied, and with uncommon arguments and results."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import onepass
from onepass import errors

X = torch.arange(12.0).reshape(3, 4)


def total(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum(-1)


@onepass.fuse
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.run = onepass.fuse(self.scaled)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self.factor)  # `float` makes no Scaled: its __init__, which calls onepass, is none of this state

    @onepass.fuse
    def forward(self, x: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
        return x * self.factor + plus


class Halved:
    @classmethod
    @onepass.fuse
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class Shifted(Scaled):
    @onepass.fuse
    def forward(self, x: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
        return super().forward(x, plus=plus) + 10


def called_before() -> "onepass.Fused":
    """A fused function with kernels for one and for several rows, which a call must not reach by mistake."""
    fused = onepass.fuse(total)
    for x in (X, X[0], X[:2]):
        fused(x)
    return fused


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda f: torch.vmap(f)(X),
    "vmap over columns": lambda f: torch.vmap(f, in_dims=1)(X),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "functionalize": lambda f: torch.func.functionalize(f)(X),
}


@pytest.mark.parametrize("make", [called_before, lambda: onepass.fuse(total)], ids=["called before", "new"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_transforms_of_torch_func_are_refused(transform: Callable[[Any], Any], make: Callable[[], Any]) -> None:
    with pytest.raises(errors.UnsupportedTorchMode, match=r"under torch\.func\."):
        transform(make())


def test_transforms_within_a_fused_function_are_traced() -> None:
    inner = called_before()
    assert torch.equal(onepass.fuse(lambda x: torch.vmap(inner)(x) + 1)(X), total(X) + 1)


def test_a_tangent_is_never_dropped() -> None:
    fused = called_before()
    with forward_ad.dual_level():
        with pytest.raises(errors.UnsupportedTorchMode, match="dual_level"):
            fused(forward_ad.make_dual(X, torch.ones_like(X)))
        assert torch.equal(fused(X), total(X))


def test_tracers_record_the_ops_of_the_function() -> None:
    fused = called_before()
    compiled = torch.compile(lambda x: fused(x) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(X), total(X) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        recorded = torch.jit.trace(fused, X)  # type: ignore[no-untyped-call]
    assert torch.equal(recorded(X[:2] + 1), total(X[:2] + 1))


def test_meta_tensors_get_the_shape_of_the_result() -> None:
    result = called_before()(X.to("meta"))
    assert (result.device.type, result.shape) == ("meta", (3,))


def freed() -> torch.Tensor:
    x = torch.ones(3, 4)
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize("make", [freed, lambda: torch._efficientzerotensor(3, 4)], ids=["freed storage", "zeros"])
@pytest.mark.parametrize("fused", [called_before(), onepass.fuse(total)], ids=["called before", "new"])
def test_tensors_without_memory_are_refused(make: Callable[[], torch.Tensor], fused: Any) -> None:
    with pytest.raises(errors.BadArgument, match="Argument x has no memory"):
        fused(make())


@pytest.mark.filterwarnings("ignore:.*prototype stage")
@pytest.mark.parametrize("fused", [called_before(), onepass.fuse(total)], ids=["called before", "new"])
def test_tensors_without_a_shape_are_refused(fused: Any) -> None:
    with pytest.raises(errors.BadArgument, match="Argument x is a nested tensor"):
        fused(torch.nested.nested_tensor([torch.ones(4), torch.ones(2)]))
    with pytest.raises(errors.BadArgument, match="Argument x is a UninitializedParameter"), torch.no_grad():
        fused(torch.nn.UninitializedParameter())


def test_copies_and_pickles_compute_the_same() -> None:
    assert torch.equal(copy.deepcopy(called_before())(X), total(X))
    assert torch.equal(pickle.loads(pickle.dumps(called_before()))(X), total(X))
    assert copy.deepcopy(decorated) is decorated and pickle.loads(pickle.dumps(decorated)) is decorated
    settings = copy.copy(onepass.fuse(total, dynamic=False, tune="on"))
    assert settings.dynamic is False and settings._given == {"tune": "on"}


def test_the_copy_of_a_module_reads_the_state_of_the_copy() -> None:
    module = Scaled()
    module.run(X)
    other = copy.deepcopy(module)
    other.factor = 3.0
    assert torch.equal(other.run(X), X * 3) and torch.equal(module.run(X), X * 2)


def test_a_size_is_a_size_as_an_argument_and_as_a_result() -> None:
    viewed = onepass.fuse(lambda x, shape: x.view(shape) * 1)
    for shape in (torch.Size([4, 3]), torch.Size([2, 6])):
        assert torch.equal(viewed(X, shape), X.view(shape))
    sized = onepass.fuse(lambda x: (x * 2, {"shape": x.shape, "rest": [x.shape[1:], (x.shape[0], 1)]}))
    for x in (X, X[:2], X[:1], X[:0]):
        _, found = sized(x)
        assert found == {"shape": x.shape, "rest": [x.shape[1:], (x.shape[0], 1)]}
        assert [type(found["shape"]), type(found["rest"][0]), type(found["rest"][1])] == [torch.Size, torch.Size, tuple]


def test_text_has_the_sizes_of_the_call() -> None:
    named = onepass.fuse(lambda x: {f"{x.shape[0]} rows": x * 2, "text": f"{x.shape[0] * 2}"})
    for x in (X, X[:2]):
        found = named(x)
        assert [*found] == [f"{len(x)} rows", "text"] and found["text"] == f"{len(x) * 2}"
    with pytest.raises(errors.SymbolicAxis):
        onepass.fuse(lambda x: (x * 2, f"{x.shape[0]}"), dynamic=True)(X)
    with pytest.raises(errors.DataDependent, match="text of a tensor"):
        onepass.fuse(lambda x: (x * 2, repr(x)))(X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_numbers_of_numpy_are_plain_values(dtype: torch.dtype) -> None:
    fused, x = onepass.fuse(lambda x, by: x * by), X.to(dtype)
    numbers: list[Any] = [np.float32(2.5), np.float32(2.5), np.float64(2.5), np.int64(3), np.bool_(True), np.float32(-0.0)]
    for number in numbers:
        result, expected = fused(x, number), x * number
        assert result.dtype is expected.dtype and torch.equal(result, expected)
    assert len(fused._traces) == len(numbers) - 1
    assert torch.equal(onepass.fuse(lambda x, steps: x * len(steps))(x, range(4)), x * 4)


def weighted(x: torch.Tensor, w: torch.Tensor | None = None, *more: torch.Tensor, scale: float = 2.0, **named: Any) -> torch.Tensor:
    return (x if w is None else x * w) * scale + sum(more) + sum(named.values())


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "defaults": ((X,), {}),
    "by name": ((), {"w": X, "x": X + 1}),
    "only a name": ((X,), {"scale": 3.0}),
    "another value of that name": ((X,), {"scale": 4.0}),
    "many positions": ((X, X, X, X), {"scale": 3.0}),
    "other names": ((X,), {"a": X, "b": 2.0}),
    "as many as there are parameters": ((X, X, X, X, X), {}),
    "all": ((X, X + 1, X + 2), {"scale": 0.5, "a": X}),
}


@pytest.mark.parametrize(("args", "kwargs"), CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("fn", [weighted, functools.partial(weighted, scale=7.0)], ids=["function", "partial"])
def test_arguments_are_passed_as_to_the_function(fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    assert torch.equal(onepass.fuse(fn)(*args, **kwargs), fn(*args, **kwargs))


def test_explain_takes_the_arguments_of_the_function() -> None:
    for fn in (weighted, onepass.fuse(weighted)):
        assert onepass.explain(fn)(X.to("meta"), scale=3.0, a=X.to("meta")).kernels  # type: ignore[union-attr]
    assert onepass.explain(torch.softmax)(X, dim=-1).kernels  # type: ignore[union-attr]
    with pytest.raises(errors.BadArgument, match="missing a required argument: 'x'"):
        onepass.explain(weighted)()
    with pytest.raises(errors.BadArgument, match="takes a function, not int"):
        onepass.explain(3)  # type: ignore[arg-type]


def test_a_method_can_be_fused_where_it_is_defined() -> None:
    module, shifted = Scaled(), Shifted()
    assert torch.equal(module(X), X * 2) and torch.equal(module(X, plus=1.0), X * 2 + 1)
    assert torch.equal(shifted(X, plus=1.0), X * 2 + 11)
    assert torch.equal(Halved().of_class(X), X / 2) and torch.equal(Halved.of_class(X), X / 2)
    assert module.forward is module.forward
    others = [copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for k, other in enumerate(others):
        other.factor = k + 3.0
    assert [float(other(X)[0, 1]) for other in others] == [3.0, 4.0, 5.0] and torch.equal(module(X), X * 2)
    assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(X), X * 2)


def test_fuse_is_a_decorator_with_options_too() -> None:
    @onepass.fuse(dynamic=False)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum(-1)

    assert isinstance(doubled, type(decorated)) and doubled.dynamic is False
    assert torch.equal(doubled(X), total(X))


@pytest.mark.parametrize("options", [{"dynamic": "yes"}, {"dynamic": 2}, {"tune": "most"}])
def test_options_of_fuse_are_checked_at_once(options: Any) -> None:
    with pytest.raises(errors.OnepassError, match="ONEPASS-"):
        onepass.fuse(**options)
