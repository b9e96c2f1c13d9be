"""Give the tensors of a region's call the strides that they were traced with.

Code that Inductor generates lays tensors out as traced. Ops that run one by one may not: `constant_pad_nd` by a symbolic size that
turns out to be 0 keeps the strides of its argument, and a custom op may return what its fake implementation does not say. A kernel
would read other elements, and so would the evaluation in float64 that its results are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir.program import Buffer
from ..ir.size import Bindings, value


def as_traced(tensors: Sequence[Tensor], buffers: Sequence[Buffer], bindings: Bindings) -> list[Tensor]:
    """The tensors of a call, each copied unless it has the strides of its buffer."""
    wanted = (tuple(value(stride, bindings) for stride in buffer.strides) for buffer in buffers)
    return [t if _has_strides(t, strides) else _copied(t, strides) for t, strides in zip(tensors, wanted, strict=True)]


def _has_strides(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor has strides where they matter: not along dims of one element."""
    own = tensor.stride()
    return own == strides or all(n == 1 or a == b for n, a, b in zip(tensor.shape, own, strides, strict=True)) or not tensor.numel()


def _copied(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy with other strides. Along a dim with stride 0, all elements are the first."""
    stored = tensor[tuple(slice(None) if stride else slice(1) for stride in strides)]
    made = torch.empty_strided(stored.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(stored).as_strided(tensor.shape, strides)
