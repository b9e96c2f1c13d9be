"""The named workloads: a function, its input tensors, a default size, and the least DRAM traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import BadArgument, UnknownWorkload
from . import functions as f

ROWS_COLS = ("rows", "columns")
IMAGE = ("batch", "channels", "positions")
HEADS = ("batch", "tokens", "heads", "head width")


@dataclass(frozen=True)
class InputMaker:
    """Makes input tensors: seeded random values, or no data on "meta"."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None

    def data(self, *shape: int) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, dtype=self.dtype, device=self.device, generator=self.generator)

    def vector(self, n: int) -> Tensor:
        """Values near one, for a weight or a scale."""
        return (1.0 + 0.1 * self.data(n).float()).to(self.dtype)

    def f32(self, *shape: int) -> Tensor:
        """Standard normal values in fp32, whatever the workload's dtype."""
        return self.data(*shape).float()

    def classes(self, rows: int, below: int) -> Tensor:
        """Class indices; one row in sixteen is ignored."""
        made = torch.randint(0, below, (rows,), device=self.device, generator=self.generator)
        return torch.where(torch.arange(rows, device=self.device) % 16 == 15, f.IGNORED, made)


def input_maker(dtype: torch.dtype, device: "str | torch.device", seed: int = 0) -> InputMaker:
    """An InputMaker whose values depend only on the seed and the device type."""
    where = torch.device(device)
    generator = None if where.type == "meta" else torch.Generator(where).manual_seed(seed)
    return InputMaker(dtype, where, generator)


Inputs = Callable[..., tuple[Tensor, ...]]  # (maker, *shape) -> the function's arguments


@dataclass(frozen=True)
class Workload:
    """A named function, and how to make its inputs at any size."""

    name: str
    title: str
    function: Callable[..., Any]
    make: Inputs
    default_shape: tuple[int, ...]
    floor: str  # least DRAM traffic, in words
    dims: tuple[str, ...] = ROWS_COLS

    def inputs(
        self,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: "str | torch.device" = "meta",
        seed: int = 0,
    ) -> tuple[Tensor, ...]:
        """The function's arguments at a shape; None means the default shape."""
        shape = shape or self.default_shape
        if len(shape) != len(self.dims):
            raise BadArgument(
                detail=f"{self.name} takes a shape of {len(self.dims)} numbers ({' x '.join(self.dims)}), "
                f"not {len(shape)}. Its default: {'x'.join(map(str, self.default_shape))}."
            )
        if not dtype.is_floating_point:
            raise BadArgument(detail=f"{self.name} takes floating-point data, not {dtype}.")
        return self.make(input_maker(dtype, device, seed), *shape)


def make_inputs(
    name: "str | Workload",
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: "str | torch.device" = "cpu",
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """Random arguments of a workload. Saved statistics are computed from the data they belong to."""
    return workload(name).inputs(shape, dtype, device, seed)


def workload(name: "str | Workload") -> Workload:
    """The workload with a name; a Workload is returned unchanged."""
    if isinstance(name, Workload):
        return name
    found = WORKLOADS.get(name)
    if found is None:
        raise UnknownWorkload(name=name, known=", ".join(sorted(WORKLOADS)))
    return found


# Inputs of the functions


def _x(n: int) -> Inputs:
    return lambda make, *shape: tuple(make.data(*shape) for _ in range(n))


def _x_and_vectors(data: int, vectors: int) -> Inputs:
    def inputs(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
        return *(make.data(rows, cols) for _ in range(data)), *(make.vector(cols) for _ in range(vectors))

    return inputs


def _rms_backward(further: int) -> Inputs:
    def inputs(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
        x, dy, *rest = (make.data(rows, cols) for _ in range(2 + further))
        return x, make.vector(cols), f.row_rstd(x), dy, *rest

    return inputs


def _layer_backward(further: int) -> Inputs:
    def inputs(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
        x, dy, *rest = (make.data(rows, cols) for _ in range(2 + further))
        return x, make.vector(cols), *f.row_moments(x), dy, *rest

    return inputs


def _softmax_backward(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
    return f.softmax(make.data(rows, cols)), make.data(rows, cols)


def _loss(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
    return make.data(rows, cols), make.classes(rows, cols)


def _loss_backward(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
    logits, target = _loss(make, rows, cols)
    return logits, target, f.logsumexp(logits), make.f32(rows)


def _bias_backward(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
    return make.data(rows, cols), make.vector(cols), make.data(rows, cols)


def _image(make: InputMaker, batch: int, channels: int, positions: int) -> tuple[Tensor, ...]:
    return make.data(batch, channels, positions), make.vector(channels), make.vector(channels)


def _heads(make: InputMaker, batch: int, tokens: int, heads: int, width: int) -> tuple[Tensor, ...]:
    """[batch, heads, tokens, width] as transposed views, as attention gets them."""
    q, k = (make.data(batch, tokens, heads, width).transpose(1, 2) for _ in range(2))
    return q, k, make.vector(width), make.vector(width)


def _three_norms(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
    xs = tuple(make.data(rows, cols) for _ in range(3))
    return make.vector(cols), *xs, *(f.row_rstd(x) for x in xs), *(make.data(rows, cols) for _ in range(3))


def _block_backward(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
    x, x0, attn, mlp, h1, dn0, dn1, dh2, dx0 = (make.data(rows, cols) for _ in range(9))
    w0, w1, a, b, m0, m1 = (make.vector(cols) for _ in range(6))
    h0 = x.float() * m0 + x0.float() * m1
    return x, x0, attn, mlp, h1, f.row_rstd(h0), f.row_rstd(h1), w0, w1, a, b, m0, m1, dn0, dn1, dh2, dx0


_SQUARE, _TALL, _WIDE_MLP = (8192, 8192), (98304, 512), (16384, 4096)
_VOCABULARY, _PICTURES = (8192, 50257), (64, 256, 1024)


def _named(
    function: Callable[..., Any], title: str, make: Inputs, shape: tuple[int, ...], floor: str, dims: tuple[str, ...] = ROWS_COLS
) -> Workload:
    return Workload(function.__name__, title, function, make, shape, floor, dims)


_FIXED = (
    _named(f.rms_norm, "RMSNorm", _x_and_vectors(1, 1), _SQUARE, "x in, y out"),
    _named(f.rms_norm_backward, "RMSNorm backward", _rms_backward(0), _SQUARE, "x, dy in, dx out"),
    _named(f.layer_norm, "LayerNorm", _x_and_vectors(1, 2), _SQUARE, "x in, y out"),
    _named(f.layer_norm_backward, "LayerNorm backward", _layer_backward(0), _SQUARE, "x, dy in, dx out"),
    _named(f.add_rms_norm, "residual add + RMSNorm", _x_and_vectors(2, 1), _SQUARE, "x, r in, h, y out"),
    _named(f.add_rms_norm_backward, "residual add + RMSNorm backward", _rms_backward(1), _SQUARE, "h, dy, dh in, dx out"),
    _named(f.add_layer_norm, "residual add + LayerNorm", _x_and_vectors(2, 2), _SQUARE, "x, r in, h, y out"),
    _named(f.add_layer_norm_backward, "residual add + LayerNorm backward", _layer_backward(1), _SQUARE, "h, dy, dh in, dx out"),
    _named(f.softmax, "softmax", _x(1), (32768, 50257), "x in, y out"),
    _named(f.softmax_backward, "softmax backward", _softmax_backward, (16384, 4096), "y, dy in, dx out"),
    _named(f.softmax_dim0, "softmax over the first dim", _x(1), (4096, 4096), "x in, y out"),
    _named(f.log_softmax, "log-softmax", _x(1), _VOCABULARY, "x in, y out"),
    _named(f.logsumexp, "log-sum-exp", _x(1), _VOCABULARY, "x in"),
    _named(f.cross_entropy, "cross-entropy, one loss per row", _loss, _VOCABULARY, "logits in"),
    _named(f.cross_entropy_mean, "cross-entropy, mean loss", _loss, _VOCABULARY, "logits in"),
    _named(f.cross_entropy_backward, "cross-entropy backward", _loss_backward, _VOCABULARY, "logits in, their gradient out"),
    _named(f.group_norm, "GroupNorm with 32 groups", _image, _PICTURES, "x in, y out", IMAGE),
    _named(f.batch_norm_stats, "BatchNorm statistics", _x(1), _PICTURES, "x in", IMAGE),
    _named(f.gelu_backward_bias, "GELU backward + bias gradient", _bias_backward, _WIDE_MLP, "x, dy in, dx out"),
    _named(f.silu_backward_bias, "SiLU backward + bias gradient", _bias_backward, _WIDE_MLP, "x, dy in, dx out"),
    _named(f.swiglu_backward_bias, "SwiGLU backward + bias gradients", _x(3), _WIDE_MLP, "gate, up, dy in, two gradients out"),
    _named(f.qk_norm, "QK-norm of transposed heads", _heads, (8, 2048, 32, 128), "q, k in and out", HEADS),
    _named(f.l2_normalize, "L2 normalization", _x(1), _SQUARE, "x in, y out"),
    _named(f.var_mean, "variance and mean of rows", _x(1), _SQUARE, "x in"),
    _named(f.sum_rows, "row sums", _x(1), _SQUARE, "x in"),
    _named(f.sum_cols, "column sums", _x(1), _SQUARE, "x in"),
    _named(f.sum_all, "sum of all elements", _x(1), _SQUARE, "x in"),
    _named(f.sum_both, "row sums and column sums", _x(1), _SQUARE, "x in"),
    _named(f.rms_norm_fp8, "RMSNorm to fp8 with scales", _x_and_vectors(1, 1), _SQUARE, "x in, y out in fp8"),
    _named(
        f.three_norms_shared_weight_backward,
        "backward of three RMSNorms sharing a weight",
        _three_norms,
        (32768, 768),
        "three x, dy in, three dx out",
    ),
    _named(f.block_backward, "transformer block backward between the matmuls", _block_backward, _TALL, "nine tensors in, four out"),
)
_COUNTED = (
    *(
        Workload(f"outer_sum_{k}", f"column sums of the sum of {k}", f.outer_sum, _x(k), (65536, 4096), f"{k} tensors in")
        for k in (1, 2, 3, 5, 8, 14)
    ),
    *(
        Workload(
            f"rms_norm_backward_{k}",
            f"RMSNorm backward + {k} residual-scale gradients",
            f.rms_norm_backward_residuals,
            _rms_backward(k),
            _TALL,
            f"x, dy, {k} residuals in, dx out",
        )
        for k in range(1, 17)
    ),
)

WORKLOADS = {w.name: w for w in (*_FIXED, *_COUNTED)}
