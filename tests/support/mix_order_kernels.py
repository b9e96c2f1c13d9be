"""Functions that become one mix-order kernel, with inputs to run or to compile them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.plan.kernel import Kernel
from onepass.plan.legality import Family, Illegal, space_of
from onepass.plan.scoring import forms
from onepass.tools.functions import add_rms_norm_backward, layer_norm_backward, rms_norm_backward, row_moments, row_rstd
from tests.support.forced_schedules import program_of
from tests.support.staged_kernels import BF16, F32, meta


def mixed_kernel(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> Kernel:
    """A function as one kernel that walks rows and accumulates over them."""
    program, _, bindings = program_of(fn, *args)
    space = space_of(program, bindings)
    assert not isinstance(space, Illegal)
    return forms(program, space, Family.MIX)[0].kernel


def spread_and_top(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A row reduction, and a variance and a maximum of every column."""
    y = x.float()
    return (y - y.amax(-1, keepdim=True)).to(x.dtype), y.var(0), y.amax(0)


def all_else(x: Tensor) -> tuple[Tensor, ...]:
    """The other reductions, down the columns and along the rows."""
    y = x.float()
    near = 1 + y / 512
    down = y.argmax(0), y.amin(0), near.prod(0), torch.logsumexp(y, 0)
    return (*down, y.argmin(-1), near.prod(-1), torch.logsumexp(y, -1), (y - y.mean(-1, keepdim=True)).to(x.dtype))


def totals(x: Tensor) -> tuple[Tensor, ...]:
    """Reductions over rows and columns at once, and of per-row scalars."""
    y = x.float()
    rows = (y * y).mean(-1, keepdim=True)
    return torch.var(y), y.sum(0), rows.amax(), (y * rows).to(x.dtype)


def finished(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Column sums of a normalized row that are multiplied by a vector after the loop."""
    y = x.float() * row_rstd(x) + w
    return y.to(x.dtype), (y + 1).sum(0) * w


def stored_early(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values that the first pass could accumulate and store, and a result of the second pass that needs no row."""
    return (x.float() + 1).to(x.dtype), x.float().sum(0), x.float().sum(-1, keepdim=True) * w


def looked_up(x: Tensor, w: Tensor, rstd: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """A row vector with an indexed load."""
    at = (torch.arange(w.shape[0]) + 3).clamp(max=w.shape[0] - 1)
    return rms_norm_backward(x, w.gather(0, at), rstd, dy)


def inputs_of(fn: Callable[..., Any], rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(cols)
    x, dy, dh = (torch.randn(rows, cols).to(dtype) for _ in range(3))
    w = torch.randn(cols).to(dtype)
    few: dict[Callable[..., Any], tuple[Tensor, ...]] = {
        rms_norm_backward: (x, w, row_rstd(x), dy),
        looked_up: (x, w, row_rstd(x), dy),
        layer_norm_backward: (x, w, *row_moments(x), dy),
        add_rms_norm_backward: (x, w, row_rstd(x), dy, dh),
        finished: (x, w),
        stored_early: (x, w),
    }
    return few.get(fn, (x,))


def meta_inputs(fn: Callable[..., Any], cols: int, dtype: torch.dtype = BF16, rows: int = 4096) -> tuple[Tensor, ...]:
    x, w, row = meta(rows, cols, dtype=dtype), meta(cols, dtype=dtype), meta(rows, 1, dtype=F32)
    rowwise = (row, row) if fn is layer_norm_backward else (row,)
    return x, w, *rowwise, *([meta(rows, cols, dtype=dtype)] * (2 if fn is add_rms_norm_backward else 1))
