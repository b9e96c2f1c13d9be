"""In-place changes: of local values they are supported, of arguments they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onepass
from onepass import errors
from onepass.capture import capture

X = torch.arange(1.0, 7.0).view(2, 3)
aten, foreach = torch.ops.aten, {n.removeprefix("_foreach_"): getattr(torch, n) for n in dir(torch) if n.startswith("_foreach_")}


def same_as_eager(fn: Callable[..., Any], *args: Any) -> None:
    actual, expected = onepass.fuse(fn)(*args), fn(*args)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_in_place_foreach_ops_on_local_values() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c, d = x + 1, x + 2, x + 3, x + 4
        foreach["add_"]([a, b], 1)
        foreach["add_"]([a], [b], alpha=2)
        foreach["mul_"]([c, d], [2.0, 3.0])
        foreach["div_"]([d], x.sum())
        foreach["addcdiv_"]([a, b], [c, d], [x, x], [0.5, 2.0])
        foreach["addcmul_"]([b], [c], [d], 0.5)
        foreach["lerp_"]([c], [x], 0.25)
        foreach["sqrt_"](d.unbind(0))
        return a, b, c, d

    same_as_eager(fn, X)


def test_foreach_ops_that_copy_clamp_and_clear_local_values() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = x * 2, x * 3, x * 4
        foreach["copy_"]([a[0]], [x[1]])
        foreach["zero_"]([b, b])
        foreach["clamp_max_"]([c], [7.0])
        foreach["maximum_"]([a], 3.0)
        return a, b, c, x

    same_as_eager(fn, X)


def test_foreach_ops_that_return_new_values() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pair = [x, x + 1]
        return (
            *foreach["exp"](pair),
            *foreach["sub"](pair, [x + 2, x], alpha=3),
            *foreach["norm"](pair),
            *foreach["norm"](pair, 1),
            *foreach["pow"](2.0, pair),
            *foreach["minimum"](pair, [2.5, 3.5]),
            *foreach["max"](pair),
        )

    same_as_eager(fn, X)


def test_every_foreach_op_consists_of_known_ops_or_is_refused() -> None:
    """Also ops of the installed torch that are not listed here: an op that changes its input must not be accepted silently."""
    passed = []
    for name, op in foreach.items():
        if name.endswith("_"):
            for rest in ((), (1.0,), ([X],), ([X], 0.5), ([X], [X]), ([X], [X], 0.5)):
                try:
                    op([X.clone()], *rest)
                except (RuntimeError, TypeError, ValueError):
                    continue  # no such overload
                try:
                    capture(lambda x, rest, op=op: (op([x], *rest), x * 2)[1], (X.clone(), rest))
                except errors.Mutation:
                    continue
                passed.append((name, rest))
    assert not passed


def on_symbols(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._foreach_add_([y[1:], y[:1]], 1)  # type: ignore[attr-defined]
    return y.sum(-1)


def test_symbolic_rows() -> None:
    fused = onepass.fuse(on_symbols)
    for rows in (5, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(fused(x), on_symbols(x))


def test_out_arguments_and_views_of_local_values() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z = torch.empty_like(x), x[:, 0] * 2
        torch.exp(x, out=y).mul_(2)
        torch.amax(y, 1, out=z)
        y[0] = 1
        w = x + 1
        w.set_(y * 2)  # type: ignore[call-overload]
        return y, z, w.unsqueeze_(0)

    same_as_eager(fn, X)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch._foreach_add_([x + 1, x], 1),
        lambda x: torch._foreach_add_(x.unbind(0), 1),
        lambda x: torch._foreach_mul_([x.t()[1:]], 2),
        lambda x: torch._foreach_copy_([x], [x + 1]),
        lambda x: aten._foreach_add.Scalar_out([x + 1], 1, out=[x]),
        lambda x: torch._fused_sgd_(
            [x],
            [x + 1],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=1.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        ),
        lambda x: torch.exp(x + 1, out=x),
        lambda x: torch.exp(x[0] + 1, out=x[1]),
        lambda x: torch.exp(x + 1, out=x.view(3, 2).t()),
        lambda x: torch.max(x + 1, 1, out=(x[:, 0], torch.empty(2, dtype=torch.long))),
        lambda x: x.copy_(x + 1),
        lambda x: x.t()[0].copy_(x[0, :2]),
        lambda x: x.view(torch.int32).add_(1),
        lambda x: x.reshape(3, 2).zero_(),
        lambda x: x.contiguous().zero_(),
        lambda x: x.float().zero_(),
        lambda x: x.detach().zero_(),
        lambda x: x.data.zero_(),
        lambda x: x.chunk(2)[1].zero_(),
        lambda x: x.diagonal().fill_(3),
        lambda x: x.__setitem__(0, 1),
        lambda x: x.set_(x + 1),
        lambda x: (x + 1).set_(x).add_(1),
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.resize_(3),
        lambda x: x.requires_grad_(),
        lambda x: setattr(x, "data", x + 1),
        lambda x: torch.nn.functional.relu(x, inplace=True),
        lambda x: torch.nn.functional.batch_norm(x, x[0], x[1], training=True),
    ],
)
def test_in_place_changes_of_arguments_are_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(errors.Mutation):
        capture(lambda x: (fn(x), x * 2)[1], (X,))


def test_factors_given_as_a_tensor_are_refused() -> None:
    with pytest.raises(errors.DataDependent, match="factors"):
        capture(lambda x: (torch._foreach_addcdiv_([x], [x], [x], torch.ones(1)), x * 2)[1], (X,))


def test_setting_data_is_refused() -> None:
    def on_own(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.data = x * 3
        return y * 2

    with pytest.raises(errors.Mutation, match=r"Setting \.data"):
        capture(on_own, (X,))


def test_changes_of_containers_among_the_arguments_are_refused() -> None:
    def into_dict(d: dict[str, torch.Tensor]) -> torch.Tensor:
        d["y"] = d["x"] * 2
        return d["y"]

    def into_list(xs: list[torch.Tensor]) -> torch.Tensor:
        xs[0] = xs[0] * 2
        return xs[0]

    for fn, given in ((into_dict, {"x": X}), (into_list, [X, X])):
        with pytest.raises(errors.Mutation, match="a list or dict among its arguments"):
            capture(fn, (given,))
