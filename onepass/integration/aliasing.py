"""Aliasing between the outputs and inputs of a region call: detect what kernels cannot write in place, and copy instead."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .fallback import Fill


def alias_mask(address: int, addresses: Sequence[int]) -> int:
    """A bit mask of the entries of `addresses` that equal `address`."""
    return sum(1 << k for k, each in enumerate(addresses) if each == address)


def unsafe_outputs(outs: Sequence[Tensor], ins: Sequence[Tensor], allowed: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """The outputs that kernels must not write in place. `allowed` are the (output, input) pairs that may share memory."""
    return tuple(k for k, out in enumerate(outs) if not _is_safe(k, outs, ins, allowed))


def overwrites(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> bool:
    """Whether an output overlaps an input in memory."""
    return any(_overlap(out, taken) for out in outs for taken in ins)


def _is_safe(k: int, outs: Sequence[Tensor], ins: Sequence[Tensor], allowed: Collection[tuple[int, int]]) -> bool:
    if any(_overlap(outs[k], other) for j, other in enumerate(outs) if j != k):
        return False
    touched = [j for j, taken in enumerate(ins) if _overlap(outs[k], taken)]
    return not touched or len(touched) == 1 and (k, touched[0]) in allowed and _coincide(outs[k], ins[touched[0]])


def _overlap(a: Tensor, b: Tensor) -> bool:
    (first, end), (other, other_end) = _span(a), _span(b)
    return first < other_end and other < end


def _coincide(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same elements in the same order. Shapes may differ if both are contiguous."""
    if a.data_ptr() != b.data_ptr() or a.dtype != b.dtype:
        return False
    return (a.shape, a.stride()) == (b.shape, b.stride()) or a.numel() == b.numel() and a.is_contiguous() and b.is_contiguous()


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor, and the first address after its end."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def via_scratch(fill: Fill, chosen: Sequence[int]) -> Fill:
    """Wrap `fill` so that the chosen outputs are computed in scratch memory and copied to their place at the end."""
    if not chosen:
        return fill

    def filled(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
        scratch = {k: torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device) for k in chosen for o in (outs[k],)}
        fill([scratch.get(k, out) for k, out in enumerate(outs)], ins)
        for k, made in scratch.items():
            outs[k].copy_(made)

    return filled
