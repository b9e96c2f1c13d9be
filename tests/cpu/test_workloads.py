"""The named workloads compute what their names say: forwards as in torch, backwards as derived by autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.errors import BadArgument, UnknownWorkload
from onepass.tools import functions as f
from onepass.tools.check import as_tuple, check, in_float64
from onepass.tools.workloads import WORKLOADS, Workload, make_inputs, workload

SMALL = {2: (32, 256), 3: (4, 64, 9), 4: (2, 5, 3, 16)}


def exactly(name: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A workload's inputs and results in float64."""
    w = workload(name)
    inputs = in_float64(lambda: make_inputs(w, SMALL[len(w.dims)], torch.float64), ())
    return inputs, in_float64(w.function, inputs)


def rms(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, f.EPS)


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, f.EPS)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean((0, 2)), x.var((0, 2), correction=0)


FORWARD: dict[str, Callable[..., Any]] = {
    "rms_norm": rms,
    "layer_norm": layer,
    "add_rms_norm": lambda x, r, w: (x + r, rms(x + r, w)),
    "add_layer_norm": lambda x, r, w, b: (x + r, layer(x + r, w, b)),
    "softmax": lambda x: x.softmax(-1),
    "softmax_dim0": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "cross_entropy_mean": F.cross_entropy,
    "group_norm": lambda x, w, b: F.group_norm(x, f.GROUPS, w, b, f.EPS),
    "batch_norm_stats": moments,
    "qk_norm": lambda q, k, wq, wk: (rms(q, wq), rms(k, wk)),
    "l2_normalize": lambda x: F.normalize(x, dim=-1),
    "var_mean": lambda x: (x.var(-1), x.mean(-1)),
    "sum_rows": lambda x: x.sum(1),
    "sum_cols": lambda x: x.sum(0),
    "sum_all": lambda x: x.sum(),
    "sum_both": lambda x: (x.sum(1), x.sum(0)),
    **{f"outer_sum_{k}": lambda *xs: sum(xs).sum(0) for k in (1, 2, 3, 5)},
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_is_what_torch_computes(name: str) -> None:
    inputs, results = exactly(name)
    for actual, expected in zip(results, as_tuple(FORWARD[name](*inputs)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def gradients(function: Callable[..., Any], inputs: tuple[Tensor, ...], incoming: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of every floating-point input by autograd."""
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    return torch.autograd.grad(as_tuple(function(*leaves)), [t for t in leaves if t.requires_grad], incoming)


def same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_rms_norm_backward() -> None:
    (x, w, _, dy), results = exactly("rms_norm_backward")
    same(results, gradients(rms, (x, w), (dy,)))


def test_layer_norm_backward() -> None:
    (x, w, _, _, dy), results = exactly("layer_norm_backward")
    same(results, gradients(layer, (x, w, torch.zeros_like(w)), (dy,)))


def test_add_rms_norm_backward() -> None:
    (h, w, _, dy, dh), results = exactly("add_rms_norm_backward")
    same(results, gradients(lambda h, w: (h * 1, rms(h, w)), (h, w), (dh, dy)))


def test_add_layer_norm_backward() -> None:
    (h, w, _, _, dy, dh), results = exactly("add_layer_norm_backward")
    same(results, gradients(lambda h, w, b: (h * 1, layer(h, w, b)), (h, w, torch.zeros_like(w)), (dh, dy)))


def test_softmax_backward() -> None:
    (y, dy), results = exactly("softmax_backward")
    same(results, gradients(lambda x: x.softmax(-1), (y.log(),), (dy,)))


def test_cross_entropy_backward() -> None:
    (logits, target, _, dloss), results = exactly("cross_entropy_backward")
    same(results, gradients(lambda x: F.cross_entropy(x, target, reduction="none"), (logits,), (dloss,)))


@pytest.mark.parametrize(("name", "activation"), [("gelu_backward_bias", F.gelu), ("silu_backward_bias", F.silu)])
def test_activation_backward_with_bias(name: str, activation: Callable[[Tensor], Tensor]) -> None:
    (x, b, dy), results = exactly(name)
    same(results, gradients(lambda x, b: activation(x + b), (x, b), (dy,)))


def test_swiglu_backward_with_biases() -> None:
    (gate, up, dy), (dgate, dgate_bias, dup, dup_bias) = exactly("swiglu_backward_bias")
    zero = torch.zeros_like(gate[0])
    expected = gradients(lambda g, u, bg, bu: F.silu(g + bg) * (u + bu), (gate, up, zero, zero), (dy,))
    same((dgate, dup, dgate_bias, dup_bias), expected)


@pytest.mark.parametrize("k", [1, 3])
def test_rms_norm_backward_with_residual_scales(k: int) -> None:
    (x, w, _, dy, *residuals), (dx, dw, *scales) = exactly(f"rms_norm_backward_{k}")

    def forward(w: Tensor, *scale: Tensor) -> Tensor:
        return rms(x + sum((s - s.detach()) * r for s, r in zip(scale, residuals, strict=True)), w)

    same((dx,), gradients(lambda x: rms(x, w), (x,), (dy,)))
    same((dw, *scales), gradients(forward, (w, *(torch.ones_like(w) for _ in residuals)), (dy,)))


def test_three_norms_sharing_a_weight() -> None:
    (w, x1, x2, x3, _, _, _, *dys), (dx1, dx2, dx3, dw) = exactly("three_norms_shared_weight_backward")
    same((dw, dx1, dx2, dx3), gradients(lambda w, *xs: tuple(rms(x, w) for x in xs), (w, x1, x2, x3), tuple(dys)))


def test_block_backward() -> None:
    """Compared with autograd of the block, with attention and MLP replaced by inputs."""
    names = inspect.signature(f.block_backward).parameters
    v = dict(zip(names, make_inputs("block_backward", (32, 256), torch.float64), strict=True))
    v["h1"] = v["m0"] * v["x"] + v["m1"] * v["x0"] + v["a"] * v["attn"]  # as the forward pass would compute it
    v["rstd0"], v["rstd1"] = (
        torch.rsqrt(h.square().mean(-1, keepdim=True) + f.EPS) for h in (v["m0"] * v["x"] + v["m1"] * v["x0"], v["h1"])
    )
    dmlp, dattn, dx, dx0, db, da, dw1, dw0, dm0, dm1 = in_float64(f.block_backward, tuple(v.values()))

    def forward(
        x: Tensor, x0: Tensor, attn: Tensor, mlp: Tensor, w0: Tensor, w1: Tensor, a: Tensor, b: Tensor, m0: Tensor, m1: Tensor
    ) -> tuple[Tensor, ...]:
        h0 = m0 * x + m1 * x0
        h1 = h0 + a * attn
        return rms(h0, w0), rms(h1, w1), h1 + b * mlp, x0 * 1

    given = tuple(v[n] for n in inspect.signature(forward).parameters)
    expected = gradients(forward, given, (v["dn0"], v["dn1"], v["dh2"], v["dx0"]))
    same((dx, dx0, dattn, dmlp, dw0, dw1, da, db, dm0, dm1), expected)


def test_rms_norm_fp8_round_trip() -> None:
    x, w = make_inputs("rms_norm_fp8", (16, 512))
    packed, top, row_top = f.rms_norm_fp8(x, w)
    y = rms(x.double(), w.double())
    restored = packed.double().view(16, 4, 128) * (top / f.FP8_MAX)[..., None]
    assert (restored.view(16, 512) - y).abs().max() <= y.abs().max() / 16  # e4m3 keeps three bits of fraction
    torch.testing.assert_close(row_top.double(), y.abs().amax(-1), rtol=1e-5, atol=0)
    assert packed.dtype is f.FP8 and bool((packed.float().abs().view(16, 4, 128).amax(-1) == f.FP8_MAX).all())


@pytest.mark.parametrize("w", WORKLOADS.values(), ids=WORKLOADS)
def test_meta_inputs_have_the_shapes_and_types_of_real_ones(w: Workload) -> None:
    small = SMALL[len(w.dims)]
    meta, real = w.inputs(small), w.inputs(small, device="cpu")
    assert [(t.shape, t.dtype, t.stride()) for t in meta] == [(t.shape, t.dtype, t.stride()) for t in real]
    results = [(t.shape, t.dtype) for t in as_tuple(w.function(*meta))]
    assert results == [(t.shape, t.dtype) for t in as_tuple(w.function(*real))]
    assert len(w.default_shape) == len(w.dims)


def test_inputs_depend_on_the_seed_alone() -> None:
    first, again, other = (make_inputs("rms_norm", (4, 8), seed=s) for s in (1, 1, 2))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])


def test_check_refuses_an_error_eager_does_not_make() -> None:
    exact = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    eager = exact.to(torch.bfloat16)
    assert check(eager, eager, exact).ok
    off = eager.clone()
    off[7] += 0.05
    assert not check(off, eager, exact).ok


def test_check_counts_units_in_the_last_place_of_the_result() -> None:
    exact = torch.tensor([1.5], dtype=torch.float64)  # between 1 and 2 bf16 steps by 2 ** -7
    right = exact.to(torch.bfloat16)
    assert check(right + 2.0**-7, right, exact).max_error == check(right, right, exact).max_bound == 2.0**-7


def test_unknown_names_and_shapes_are_refused() -> None:
    with pytest.raises(UnknownWorkload, match="rms_norm_backward"):
        workload("rms_nrom")
    with pytest.raises(BadArgument, match="batch x channels x positions"):
        workload("group_norm").inputs((8, 8))
