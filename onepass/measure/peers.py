"""The named workloads in other kernel libraries (Liger, quack), if they are installed. None of them is a dependency.

A backward pass calls the library's backward function, or autograd if the library offers nothing else: then the forward pass runs
once, before timing, and its state is kept. The time of a library includes every kernel it launches, casts and final sums too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tools.check import as_tuple
from ..tools.functions import EPS
from .timing import Call

PACKAGES = {"liger": ("liger_kernel", "liger-kernel"), "quack": ("quack", "quack-kernels")}  # module, distribution

Peer = Callable[..., Call]  # from a workload's inputs to a call


def importable(library: str) -> bool:
    """Whether a library is installed."""
    return importlib.util.find_spec(PACKAGES[library][0]) is not None


def version(library: str) -> str:
    """The version of an installed library."""
    module, distribution = PACKAGES[library]
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(module), "__version__", "unknown"))


def peer(library: str, workload: str) -> Peer | None:
    """A library's implementation of a workload; None if it has none."""
    return _PEERS[library].get(workload)


def _through_autograd(
    forward: Callable[..., Any], inputs: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[int]
) -> Call:
    """A call that repeats the backward pass of `forward`, for the gradients of the `wanted` inputs."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
        results = as_tuple(forward(*leaves))
    sought = [leaves[k] for k in wanted]
    return lambda: torch.autograd.grad(results, sought, gradients, retain_graph=True)


# ---- Liger


def _liger(module: str, function: str) -> Callable[..., Any]:
    apply: Callable[..., Any] = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply
    return apply


def _liger_rms(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = _liger("rms_norm", "LigerRMSNormFunction")(x, w, EPS, 0.0, "llama", False)  # False: do not overwrite dy
    return y


def _liger_layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y: Tensor = _liger("layer_norm", "LigerLayerNormFunction")(x, w, b, EPS)
    return y


def _liger_add_rms(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y, h = _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")(x, r, w, EPS, 0.0, "llama", False)
    return h, y


def _liger_softmax(x: Tensor) -> Call:
    function = _liger("softmax", "LigerSoftmaxFunction")
    return lambda: function(x)


def _liger_layer_backward(x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor) -> Call:
    return _through_autograd(_liger_layer, (x, w, torch.zeros_like(w)), (dy,), (0, 1, 2))


# ---- quack: its weights are fp32


def _quack_rms(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = importlib.import_module("quack.rmsnorm").rmsnorm(x, w, eps=EPS)
    return y


def _quack_add_rms(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y, h = importlib.import_module("quack.rmsnorm").rmsnorm(x, w, residual=r, eps=EPS, prenorm=True)
    return h, y


def _quack_rms_forward(x: Tensor, w: Tensor) -> Call:
    weight = w.float()
    return lambda: _quack_rms(x, weight)


def _quack_add_rms_forward(x: Tensor, r: Tensor, w: Tensor) -> Call:
    weight = w.float()
    return lambda: _quack_add_rms(x, r, weight)


def _quack_layer_forward(x: Tensor, w: Tensor, b: Tensor) -> Call:
    forward, weight, bias = importlib.import_module("quack.rmsnorm").layernorm_fwd, w.float(), b.float()
    return lambda: forward(x, weight, bias, EPS)


def _quack_layer_backward(x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor) -> Call:
    backward, weight = importlib.import_module("quack.rmsnorm").layernorm_bwd, w.float()
    flat_rstd, flat_mean = rstd.flatten(), mean.flatten()
    return lambda: backward(x, weight, dy, flat_rstd, flat_mean)


def _quack_softmax(x: Tensor) -> Call:
    function = importlib.import_module("quack.softmax").softmax
    return lambda: function(x)


def _quack_softmax_backward(y: Tensor, dy: Tensor) -> Call:
    function = importlib.import_module("quack.softmax").softmax_bwd
    return lambda: function(dy, y)


def _quack_loss(logits: Tensor, target: Tensor) -> Tensor:
    losses: Tensor = importlib.import_module("quack.cross_entropy").cross_entropy(logits, target, reduction="none")
    return losses


def _add_rms_backward(forward: Callable[..., Any], h: Tensor, w: Tensor, dy: Tensor, dh: Tensor) -> Call:
    """The gradients of x and w of `forward(x, r, w)`, which returns (h, y), where r is zero."""
    return _through_autograd(forward, (h, torch.zeros_like(h), w), (dh, dy), (0, 2))


def _called(function: Callable[..., Any]) -> Peer:
    return lambda *inputs: lambda: function(*inputs)


_PEERS: dict[str, dict[str, Peer]] = {
    "liger": {
        "rms_norm": _called(_liger_rms),
        "rms_norm_backward": lambda x, w, rstd, dy: _through_autograd(_liger_rms, (x, w), (dy,), (0, 1)),
        "layer_norm": _called(_liger_layer),
        "layer_norm_backward": _liger_layer_backward,
        "add_rms_norm": _called(_liger_add_rms),
        "add_rms_norm_backward": lambda h, w, rstd, dy, dh: _add_rms_backward(_liger_add_rms, h, w, dy, dh),
        "softmax": _liger_softmax,
    },
    "quack": {
        "rms_norm": _quack_rms_forward,
        "rms_norm_backward": lambda x, w, rstd, dy: _through_autograd(_quack_rms, (x, w.float()), (dy,), (0, 1)),
        "layer_norm": _quack_layer_forward,
        "layer_norm_backward": _quack_layer_backward,
        "add_rms_norm": _quack_add_rms_forward,
        "add_rms_norm_backward": lambda h, w, rstd, dy, dh: _add_rms_backward(_quack_add_rms, h, w.float(), dy, dh),
        "softmax": _quack_softmax,
        "softmax_backward": _quack_softmax_backward,
        "cross_entropy": _called(_quack_loss),
        "cross_entropy_backward": lambda x, target, lse, dloss: _through_autograd(_quack_loss, (x, target), (dloss,), (0,)),
    },
}
