"""Kernels that stage every row they can in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.plan.kernel import Kernel
from onepass.plan.legality import Family
from onepass.plan.schedule import Ring, StagedRows
from onepass.plan.staged_rows import chunk_cover, chunk_cover_unaligned, tma_stageable, tma_stageable_unaligned
from onepass.plan.thread_layout import max_contiguous, vector
from tests.support.forced_schedules import as_kernel

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def kernel_of(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> tuple[Kernel, dict[str, int]]:
    """A function as one kernel that keeps rows on chip, and the sizes of a call."""
    return as_kernel(fn, args, Family.INNER, held=True)


def staged_schedule(
    kernel: Kernel, warps: int = 8, vectors: int = 2, slots: int = 2, split: int = 132, prefetch: int = 0
) -> StagedRows:
    """A schedule that stages every load TMA can describe. A split of 0 is one row per CTA."""
    cols = kernel.program.extent(kernel.space.cols)
    assert isinstance(cols, int)
    least = 32 * warps * vector(kernel)
    able, flat = tma_stageable(kernel), tma_stageable_unaligned(kernel)
    covered = chunk_cover_unaligned(cols, least * vectors, least) if flat else chunk_cover(cols, least * vectors, least)
    assert covered is not None
    ring = Ring(split, slots, prefetch) if split else None
    return StagedRows(
        covered.tiles,
        warps,
        ring,
        bool(flat),
        frozenset(flat or able),
        min(128, 65536 // (32 * warps)),
        vector_limit=max_contiguous(kernel) or 0,
    )
