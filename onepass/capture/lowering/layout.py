"""Layouts that kernels cannot write: tensors whose elements overlap in memory."""

from __future__ import annotations

import torch
from torch import fx

from ... import compat
from ...errors import OverlappingElements
from .source import user_line


def check_layout(node: fx.Node) -> None:
    """Refuse outputs whose elements overlap in memory. In eager, such elements overwrite each other."""
    val: torch.Tensor = node.meta["val"]
    if shares_elements(val):
        raise OverlappingElements(shape=list(val.shape), strides=list(val.stride()), where=user_line(node.stack_trace))


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor may overlap in memory, for the sizes seen at trace time."""
    pairs = [(compat.size_hint(stride), compat.size_hint(size)) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    known = sorted((stride, size) for stride, size in pairs if stride is not None and size is not None and size != 1)
    reach = 0  # distance from the first element to the last, over the dims so far
    for stride, size in known:
        if stride <= reach and tensor.numel():
            return True
        reach += stride * (size - 1)
    return False
