"""The functions behind the named workloads: plain torch, 16-bit tensors computed in fp32 and rounded once, for the outputs.

Backward passes are explicit formulas over the tensors a forward pass saves, because that is the graph a compiler gets.
Names: x data, w weight, b bias, dy incoming gradient, rstd 1 / standard deviation (or root mean square), xhat normalized x.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPS = 1e-6
IGNORED = -100  # cross_entropy's ignore_index
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_BLOCK = 128
GROUPS = 32  # for group_norm


def row_rstd(x: Tensor) -> Tensor:
    """1 / root mean square of each row, as an RMSNorm forward saves it."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)


def row_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation of each row, as a LayerNorm forward saves them."""
    var, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
    return mean, torch.rsqrt(var + EPS)


# Norms


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """RMSNorm: x divided by its root mean square, times a weight."""
    return (x.float() * row_rstd(x) * w).to(x.dtype)


def _rms_norm_dx(xhat: Tensor, rstd: Tensor, g: Tensor) -> Tensor:
    return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))


def rms_norm_backward(x: Tensor, w: Tensor, rstd: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x (a sum along each row) and w (a sum down each column)."""
    xhat = x.float() * rstd
    g = dy.float() * w
    return _rms_norm_dx(xhat, rstd, g).to(x.dtype), (dy.float() * xhat).sum(0).to(w.dtype)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """LayerNorm: x centered and scaled to unit variance, times a weight, plus a bias."""
    mean, rstd = row_moments(x)
    return ((x.float() - mean) * rstd * w + b).to(x.dtype)


def layer_norm_backward(x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, w and b."""
    xhat = (x.float() - mean) * rstd
    g = dy.float() * w
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * xhat).sum(0).to(w.dtype), dy.float().sum(0).to(w.dtype)


def add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream h = x + r and its RMSNorm."""
    h = (x.float() + r.float()).to(x.dtype)
    return h, rms_norm(h, w)


def add_rms_norm_backward(h: Tensor, w: Tensor, rstd: Tensor, dy: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and r (the same tensor) and of w; dh is the gradient from the residual stream."""
    xhat = h.float() * rstd
    dx = dh.float() + _rms_norm_dx(xhat, rstd, dy.float() * w)
    return dx.to(h.dtype), (dy.float() * xhat).sum(0).to(w.dtype)


def add_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream h = x + r and its LayerNorm."""
    h = (x.float() + r.float()).to(x.dtype)
    return h, layer_norm(h, w, b)


def add_layer_norm_backward(
    h: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and r (the same tensor), w and b."""
    xhat = (h.float() - mean) * rstd
    g = dy.float() * w
    dx = dh.float() + rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx.to(h.dtype), (dy.float() * xhat).sum(0).to(w.dtype), dy.float().sum(0).to(w.dtype)


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """GroupNorm of [batch, channels, positions]: normalized over groups of channels and all positions."""
    batch, channels, positions = x.shape
    grouped = x.float().view(batch, GROUPS, channels // GROUPS, positions)
    var, mean = torch.var_mean(grouped, (2, 3), correction=0, keepdim=True)
    xhat = ((grouped - mean) * torch.rsqrt(var + EPS)).view(x.shape)
    return (xhat * w[:, None] + b[:, None]).to(x.dtype)


def batch_norm_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel of [batch, channels, positions]."""
    var, mean = torch.var_mean(x.float(), (0, 2), correction=0)
    return mean, var


def qk_norm(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm over each head of queries and keys."""
    return rms_norm(q, wq), rms_norm(k, wk)


def l2_normalize(x: Tensor) -> Tensor:
    """Scale each row to unit length."""
    length = x.float().square().sum(-1, keepdim=True).sqrt()
    return (x.float() / length.clamp_min(EPS)).to(x.dtype)


def rms_norm_fp8(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm to fp8 with a scale per 128 columns, and the largest magnitude of each row."""
    rows, cols = x.shape
    y = x.float() * row_rstd(x) * w
    blocks = y.view(rows, cols // FP8_BLOCK, FP8_BLOCK)
    top = blocks.abs().amax(-1, keepdim=True).clamp_min(EPS)
    packed = (blocks * (FP8_MAX / top)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return packed.view(rows, cols), top.squeeze(-1), y.abs().amax(-1)


# Softmax and losses


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dim."""
    e = torch.exp(x.float() - x.float().amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def softmax_dim0(x: Tensor) -> Tensor:
    """Softmax over the first dim: each column sums to one."""
    e = torch.exp(x.float() - x.float().amax(0, keepdim=True))
    return (e / e.sum(0, keepdim=True)).to(x.dtype)


def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """Gradient of softmax, given its output y."""
    g = dy.float() * y.float()
    return (g - y.float() * g.sum(-1, keepdim=True)).to(y.dtype)


def _logsumexp(x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    return top + torch.log(torch.exp(x - top).sum(-1, keepdim=True))


def logsumexp(x: Tensor) -> Tensor:
    """Logsumexp over the last dim."""
    return _logsumexp(x.float()).squeeze(-1)


def log_softmax(x: Tensor) -> Tensor:
    """Log-softmax over the last dim."""
    return (x.float() - _logsumexp(x.float())).to(x.dtype)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Loss of each row; 0 for rows whose target is -100."""
    counted = target != IGNORED
    at = torch.where(counted, target, 0)
    picked = logits.gather(1, at[:, None]).float()
    return torch.where(counted, (_logsumexp(logits.float()) - picked).squeeze(1), 0.0)


def cross_entropy_mean(logits: Tensor, target: Tensor) -> Tensor:
    """Mean loss of the rows that are not ignored."""
    return cross_entropy(logits, target).sum() / (target != IGNORED).sum()


def cross_entropy_backward(logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor) -> Tensor:
    """Gradient of the logits, given the forward's logsumexp of each row."""
    p = torch.exp(logits.float() - lse[:, None])
    hit = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    scale = torch.where(target != IGNORED, dloss, 0.0)
    return ((p - hit.float()) * scale[:, None]).to(logits.dtype)


# Activations with a bias gradient


def _with_bias_gradient(dz: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    return dz.to(like.dtype), dz.sum(0).to(like.dtype)


def gelu_backward_bias(x: Tensor, b: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and b through gelu(x + b)."""
    z = x.float() + b
    cdf = 0.5 * (1.0 + torch.erf(z * math.sqrt(0.5)))
    pdf = torch.exp(-0.5 * z * z) * (1.0 / math.sqrt(2.0 * math.pi))
    return _with_bias_gradient(dy.float() * (cdf + z * pdf), x)


def _silu_slope(z: Tensor) -> tuple[Tensor, Tensor]:
    """silu(z) and its derivative."""
    s = torch.sigmoid(z)
    return z * s, s * (1.0 + z * (1.0 - s))


def silu_backward_bias(x: Tensor, b: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and b through silu(x + b)."""
    return _with_bias_gradient(dy.float() * _silu_slope(x.float() + b)[1], x)


def swiglu_backward_bias(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of gate and up through silu(gate) * up, and of the biases of the two projections."""
    value, slope = _silu_slope(gate.float())
    dgate = dy.float() * up.float() * slope
    return (*_with_bias_gradient(dgate, gate), *_with_bias_gradient(dy.float() * value, up))


# Plain reductions


def var_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and mean of each row."""
    var, mean = torch.var_mean(x.float(), -1)
    return var, mean


def sum_rows(x: Tensor) -> Tensor:
    """The sum of each row."""
    return x.float().sum(-1)


def sum_cols(x: Tensor) -> Tensor:
    """The sum of each column."""
    return x.float().sum(0)


def sum_all(x: Tensor) -> Tensor:
    """The sum of all elements."""
    return x.float().sum()


def sum_both(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row sums and column sums of the same data."""
    return x.float().sum(-1), x.float().sum(0)


def outer_sum(*xs: Tensor) -> Tensor:
    """Column sums of the sum of several tensors."""
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total.sum(0)


# Larger pieces of a transformer's backward pass


def rms_norm_backward_residuals(x: Tensor, w: Tensor, rstd: Tensor, dy: Tensor, *residuals: Tensor) -> tuple[Tensor, ...]:
    """RMSNorm backward, plus the gradient of a per-channel scale of each residual, computed from dx."""
    xhat = x.float() * rstd
    dx = _rms_norm_dx(xhat, rstd, dy.float() * w)
    scales = tuple((dx * r.float()).sum(0).to(w.dtype) for r in residuals)
    return dx.to(x.dtype), (dy.float() * xhat).sum(0).to(w.dtype), *scales


def three_norms_shared_weight_backward(
    w: Tensor,
    x1: Tensor,
    x2: Tensor,
    x3: Tensor,
    rstd1: Tensor,
    rstd2: Tensor,
    rstd3: Tensor,
    dy1: Tensor,
    dy2: Tensor,
    dy3: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward of three RMSNorms that share one weight: three dx, one dw."""
    parts = [rms_norm_backward(x, w.float(), rstd, dy) for x, rstd, dy in ((x1, rstd1, dy1), (x2, rstd2, dy2), (x3, rstd3, dy3))]
    (dx1, dw1), (dx2, dw2), (dx3, dw3) = parts
    return dx1, dx2, dx3, (dw1 + dw2 + dw3).to(w.dtype)


def block_backward(
    x: Tensor,
    x0: Tensor,
    attn: Tensor,
    mlp: Tensor,
    h1: Tensor,
    rstd0: Tensor,
    rstd1: Tensor,
    w0: Tensor,
    w1: Tensor,
    a: Tensor,
    b: Tensor,
    m0: Tensor,
    m1: Tensor,
    dn0: Tensor,
    dn1: Tensor,
    dh2: Tensor,
    dx0: Tensor,
) -> tuple[Tensor, ...]:
    """All of a transformer block's backward pass that is not matmul or attention.

    Forward:  h0 = m0*x + m1*x0;  h1 = h0 + a*attn(norm(h0)*w0);  h2 = h1 + b*mlp(norm(h1)*w1), with per-channel vectors
    m0, m1, a, b, w0, w1. dn0 and dn1 are the gradients of the inputs of attention and MLP, dh2 that of the block's
    output, dx0 the gradient of x0 accumulated by later blocks. Returns the gradients of mlp, attn, x, x0 and of
    b, a, w1, w0, m0, m1.
    """
    xhat1, g1 = h1.float() * rstd1, dn1.float() * w1
    dh1 = dh2.float() + _rms_norm_dx(xhat1, rstd1, g1)
    xhat0 = (x.float() * m0 + x0.float() * m1) * rstd0
    dh0 = dh1 + _rms_norm_dx(xhat0, rstd0, dn0.float() * w0)
    data = (dh2.float() * b, dh1 * a, dh0 * m0, dx0.float() + dh0 * m1)
    vectors = (
        dh2.float() * mlp.float(),
        dh1 * attn.float(),
        dn1.float() * xhat1,
        dn0.float() * xhat0,
        dh0 * x.float(),
        dh0 * x0.float(),
    )
    return tuple(d.to(x.dtype) for d in data) + tuple(v.sum(0).to(w0.dtype) for v in vectors)
