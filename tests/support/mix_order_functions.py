"""Functions that reduce the same data along rows and down columns, for testing mix-order fusion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.correctness import randoms
from tests.support.function_cases import BF16, F32, backward, layer_norm, rms_norm, three_norms


def one_more(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x + 1).sum(0), (x + 1).sum(1)


def row_and_column_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(-1), x.sum(0)


def poison_row(seed: int, rows: int, cols: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Rows followed in memory by one of NaNs."""
    x = randoms(seed, (rows + 1, cols), dtype=dtype, device=device)
    x[rows] = torch.nan
    return x[:rows]


def concatenated(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.cat([(x * y).sum(0), x.sum(0)]), (x * y).sum(1), x.sum(1)


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Three layer norms in a chain, modulated by the same scale and shift."""
    for _ in range(3):
        x = layer_norm(x) * (1 + scale) + shift
    return x


modulated_backward = backward(modulated)


# ---- the list: function, inputs at full size and at a size for an interpreter ----------------------------------------------

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Listed:
    """One function of the list, with the shapes of its (random) arguments."""

    name: str
    function: Callable[..., Any]
    full: tuple[Shape, ...]
    small: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...] = (BF16, F32)
    prepare: Callable[..., tuple[Tensor, ...]] = lambda *tensors: tensors

    def inputs(self, shapes: tuple[Shape, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> tuple[Tensor, ...]:
        made = randoms(seed, *shapes, dtype=dtype, device=device)
        return self.prepare(*(made if len(shapes) > 1 else (made,)))


def _both(fold: Callable[..., Tensor], dims: Any, swap: bool) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return (lambda x: (fold(x, dims), fold(x, -1))) if swap else (lambda x: (fold(x, -1), fold(x, dims)))


def _near_one(x: Tensor) -> tuple[Tensor]:
    return ((1 + 0.01 * x.float()).to(x.dtype),)


SUMMED: tuple[tuple[Shape, Shape, Any], ...] = (
    ((32768, 768), (128, 96), 0),
    ((32769, 768), (131, 96), 0),
    ((32, 1024, 768), (4, 32, 96), (0, 1)),
)


def _sums() -> list[Listed]:
    found = []
    for name, fold in (("sum", torch.sum), ("mean", torch.mean), ("prod", torch.prod)):
        for swap in (False, True):
            for full, small, dims in SUMMED:
                if name != "prod" or dims == 0:
                    label = f"{name}-{'x'.join(map(str, full))}" + ("-swapped" if swap else "")
                    prepare = _near_one if name == "prod" else (lambda *tensors: tensors)
                    found.append(Listed(label, _both(fold, dims, swap), (full,), (small,), prepare=prepare))
    return found


def _dependent(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(1), x.sum(0, keepdim=True) + x


def _joined(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.cat([a, b], 1) * 2.0
    return x.sum(0), x.sum(1)


def _keepdim_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A layer norm with parameters of shape [1, columns]."""
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5) * w + b


def _projected_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return layer_norm(x[:, :, :-1], w, b)


def _three_layer_norms(x1: Tensor, x2: Tensor, x3: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return layer_norm(x1, w, b), layer_norm(x2, w, b), layer_norm(x3, w, b)


def _norm(name: str, function: Callable[..., Any], vectors: int, full: Shape, small: Shape, *dtypes: torch.dtype) -> Listed:
    """Backward of a norm: dy, x, then vectors of the columns."""

    def arguments(shape: Shape) -> tuple[Shape, ...]:
        return (shape, shape, *((shape[-1],),) * vectors)

    return Listed(f"{name}-{'x'.join(map(str, full))}", backward(function), arguments(full), arguments(small), dtypes)


def _norms() -> list[Listed]:
    rms = [
        ((1000000, 256), (512, 64)),
        ((32768, 2048), (16, 2048)),
        ((32768, 768), (64, 768)),
        ((33791, 768), (67, 768)),
        ((13, 8472), (7, 8472)),
    ]
    layer = [((32768, 768), (64, 768)), ((32769, 768), (65, 768))]
    dynamic = [((251, 223, 128), (5, 7, 128))]
    return [
        *(_norm("rms_norm", rms_norm, 1, full, small, BF16) for full, small in rms),
        *(_norm("layer_norm-bias", layer_norm, 2, full, small, F32) for full, small in layer),
        *(_norm("layer_norm", layer_norm, 1, full, small, F32) for full, small in layer),
        *(_norm("rms_norm-3d", rms_norm, 1, full, small, F32) for full, small in dynamic),
        *(_norm("layer_norm-3d", layer_norm, 2, full, small, F32) for full, small in dynamic),
    ]


def _three(vectors: int, shape: Shape) -> tuple[Shape, ...]:
    """Three gradients, three inputs, and vectors they share."""
    return (*(shape,) * 6, *((shape[-1],),) * vectors)


def _others() -> list[Listed]:
    x, small = (32768, 768), (64, 96)
    return [
        Listed("too-close", row_and_column_sums, ((768, 768),), ((96, 96),)),
        Listed(
            "non-common-strided-read", lambda x, y: (x.sum(1), (x * y.t()).sum(1)), ((8192, 8192),) * 2, ((96, 96),) * 2, (F32,)
        ),
        Listed("square", row_and_column_sums, ((8192, 8192),), ((128, 128),), (F32,)),
        Listed(
            "non-coalesced",
            lambda x, y: ((x + y).sum(-1), x.sum((0, 1))),
            ((128, 256, 768), (128, 768, 256)),
            ((4, 16, 96), (4, 96, 16)),
            (F32,),
            lambda x, y: (x, y.transpose(1, 2)),
        ),
        Listed("non-contiguous-pointwise", lambda x: (x.sum(1) * x[:, 0], x.sum(0)), (x,), (small,)),
        Listed("narrow", row_and_column_sums, ((32768, 256),), ((256, 32),), (F32,)),
        Listed("three-layers", row_and_column_sums, ((8388608, 2),), ((1024, 2),), (F32,)),
        Listed(
            "permuted-input",
            lambda x: (x.sum(-1), x.sum((0, 1))),
            ((1024, 32, 768),),
            ((16, 4, 96),),
            (F32,),
            lambda x: (x.permute(1, 0, 2),),
        ),
        Listed(
            "two-pairs",
            lambda x, y: (x.sum(-1), x.sum(0), y.sum(-1), y.sum(0)),
            ((262144, 32), (262272, 34)),
            ((256, 32), (130, 34)),
            (F32,),
        ),
        Listed("three-rms-norms", backward(three_norms, 3), _three(1, x), _three(1, small)),
        Listed("three-layer-norms", backward(_three_layer_norms, 3), _three(2, x), _three(2, small)),
        Listed("producer-consumer", _dependent, (x,), (small,)),
        Listed("additive-columns", _joined, ((32768, 300), (32768, 200)), ((64, 30), (64, 20)), (F32,)),
        Listed(
            "additive-splits",
            backward(_projected_norm),
            ((32, 200, 999), (32, 200, 1000), (999,), (999,)),
            ((2, 5, 99), (2, 5, 100), (99,), (99,)),
            (F32,),
        ),
        Listed(
            "keepdim",
            backward(_keepdim_norm),
            ((32768, 2048), (32768, 2048), (1, 2048), (1, 2048)),
            ((16, 256), (16, 256), (1, 256), (1, 256)),
            (F32,),
        ),
        Listed("several-dims", lambda x: (x.sum((1, 2)), x.sum(0)), ((32768, 512, 2),), ((64, 64, 2),), (F32,)),
        Listed("gelu-bias", backward(lambda x, b: F.gelu(x + b)), (x, x, (768,)), (small, small, (96,))),
        *(Listed(f"peeled-{name}", function, ((32, 1027),), ((32, 1027),), (F32,)) for name, function in PEELED.items()),
    ]


PEELED: dict[str, Callable[..., Any]] = {
    "sum": lambda x: x.sum(-1),
    "outer-sum": lambda x: x.sum(0),
    "max-and-sum": lambda x: (x.amax(-1), x.sum(-1)),
    "both": row_and_column_sums,
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1),
}

LIST = {listed.name: listed for listed in (*_sums(), *_norms(), *_others())}
