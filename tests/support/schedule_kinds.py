"""A function and a schedule of every kind of kernel, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onepass.plan.legality import Family
from onepass.plan.schedule import (
    LoopedRows,
    MixOrder,
    Outer,
    Pointwise,
    ResidentRows,
    RowVectors,
    Schedule,
    SplitRows,
    WholeColumns,
)
from tests.support.function_cases import layer_norm


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A mean and a variance of each row, applied to the row."""
    return layer_norm(x, w, w)


def row_sums(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reductions along rows whose results are not applied to the rows."""
    return (x * w).sum(-1), x.logsumexp(-1), x.argmax(-1)


def column_sums(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reductions down columns, f(0) != 0."""
    return (x * w + 1).sum(0), x.var(0), x.amax(0)


def column_softmax(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * w, 0)


def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A normalized row, its sum, and sums down its columns, f(0) != 0."""
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1) + w
    return y, (y + 1).sum(0), torch.exp(y).sum(0)


def elementwise(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * w


def blocks(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of every 32 columns, applied to them, within a normalized row."""
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1) * w
    parts = y.view(y.shape[0], -1, 32)
    top = parts.abs().amax(-1, keepdim=True)
    return (parts / (top + 1)).view(y.shape), top.squeeze(-1)


def variance(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).var(-1)


def of_shared(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Column reductions of a row vector and of full-size values."""
    y = (w * 2).expand(x.shape)
    return (*torch.var_mean(y, 0), (x + y).sum(0))


def of_rows(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reductions over rows of per-row scalars, and a sum down the columns."""
    rows = (x * x).mean(-1, keepdim=True)
    return x * rows * w, rows.amax(), (x * rows).sum(0)


def full(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * w).sum(), x.amax()


def spread(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A variance over rows and columns at once, and sums of each."""
    return torch.var(x * w), x.sum(0), x.sum(1)


def finished(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of rows, and sums of columns that are multiplied by a vector after the loop."""
    return (x * x).sum(1), x.sum(0) * w


def ahead(count: int, most: int) -> torch.Tensor:
    """Positions three further on."""
    return (torch.arange(count) + 3).clamp(max=most - 1)


def looked_up(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A normalized row and a row vector, both with indexed loads."""
    at = ahead(w.shape[0], w.shape[0])
    return norm(x.gather(1, at.expand(x.shape)), w.gather(0, at))


def looked_up_down(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A normalized column with an indexed load."""
    y = x.gather(0, ahead(x.shape[0], x.shape[0])[:, None].expand(x.shape)) * w
    return torch.softmax(y, 0)


def looked_up_both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    at = ahead(w.shape[0], w.shape[0])
    return both(x.gather(1, at.expand(x.shape)), w.gather(0, at))


KINDS: dict[str, tuple[Callable[..., Any], Family, tuple[int, int], Schedule]] = {
    "inner": (norm, Family.INNER, (37, 192), ResidentRows(1, (128, 64), 1)),
    "inner, overhanging": (norm, Family.INNER, (37, 190), ResidentRows(1, (128, 64), 1)),
    "inner, rows a tile": (norm, Family.INNER, (37, 65), ResidentRows(8, (64, 1), 1)),
    "inner, odd rows": (norm, Family.INNER, (4, 1027), ResidentRows(1, (256,) * 4, 1, sector_elems=8)),
    "inner looped": (norm, Family.INNER, (5, 1024), LoopedRows(1, 256, 2)),
    "inner looped, tail": (norm, Family.INNER, (5, 1000), LoopedRows(1, 256, 2, stages=2)),
    "inner looped, odd rows": (norm, Family.INNER, (4, 1027), LoopedRows(1, 256, 2, sector_elems=8)),
    "inner looped, long odd rows": (norm, Family.INNER, (4, 50257), LoopedRows(1, 4096, 16, sector_elems=8)),
    "inner looped, rows a tile": (norm, Family.INNER, (13, 100), LoopedRows(8, 32, 4)),
    "inner split": (row_sums, Family.INNER, (3, 2048), SplitRows(1, 128, 4, 2)),
    "inner split, tail": (row_sums, Family.INNER, (3, 2001), SplitRows(1, 128, 5, 2)),
    "inner split of all": (full, Family.INNER, (5, 401), SplitRows(1, 128, 4, 2)),
    "column": (column_softmax, Family.OUTER, (48, 40), WholeColumns((32, 16), 16, 1)),
    "column, overhanging": (column_softmax, Family.OUTER, (47, 37), WholeColumns((32, 16), 8, 1)),
    "outer": (column_sums, Family.OUTER, (64, 64), Outer(8, 32, 4)),
    "outer, tail": (column_sums, Family.OUTER, (61, 70), Outer(8, 32, 4)),
    "outer split": (column_sums, Family.OUTER, (64, 64), Outer(4, 32, 4, 4)),
    "outer split, tail": (column_sums, Family.OUTER, (131, 33), Outer(4, 32, 4, 5)),
    "outer, two passes": (column_softmax, Family.OUTER, (61, 70), Outer(8, 32, 4)),
    "mix-order": (both, Family.MIX, (40, 96), MixOrder(1, 4, (64, 32), 2)),
    "mix-order, rows a step": (both, Family.MIX, (129, 64), MixOrder(4, 5, (64,), 2)),
    "mix-order, overhanging": (both, Family.MIX, (41, 61), MixOrder(2, 4, (32, 32), 2, stages=2, row_vectors=RowVectors.REGISTERS)),
    "mix-order, more programs than rows": (both, Family.MIX, (3, 64), MixOrder(4, 7, (64,), 2)),
    "mix-order, one program": (both, Family.MIX, (9, 64), MixOrder(2, 1, (64,), 2)),
    "mix-order, vectors after the loop": (finished, Family.MIX, (41, 64), MixOrder(2, 1, (64,), 2)),
    "mix-order, vectors held for after the loop": (
        finished,
        Family.MIX,
        (41, 64),
        MixOrder(2, 1, (64,), 2, stages=2, row_vectors=RowVectors.REGISTERS),
    ),
    "mix-order, all at once": (spread, Family.MIX, (41, 61), MixOrder(4, 3, (32, 32), 2)),
    "mix-order, all at once, even": (spread, Family.MIX, (40, 64), MixOrder(4, 5, (64,), 2)),
    "pointwise": (elementwise, Family.POINTWISE, (37, 70), Pointwise(4, 32, 4)),
    "blocks, inner": (blocks, Family.INNER, (5, 192), ResidentRows(1, (128, 64), 1)),
    "blocks, inner looped": (blocks, Family.INNER, (5, 224), LoopedRows(1, 64, 1)),
    "mix-order, of row results": (of_rows, Family.MIX, (41, 64), MixOrder(2, 3, (64,), 2)),
    "outer, of what rows share": (of_shared, Family.OUTER, (61, 70), Outer(8, 32, 4)),
    "blocks, overhanging": (blocks, Family.INNER, (5, 160), ResidentRows(1, (128, 64), 1)),
    "variance, odd rows": (variance, Family.INNER, (4, 1027), LoopedRows(1, 256, 2, sector_elems=8)),
    "looked up, inner": (looked_up, Family.INNER, (5, 190), ResidentRows(1, (128, 64), 1)),
    "looked up, rows a tile": (looked_up, Family.INNER, (37, 65), ResidentRows(8, (64, 1), 1)),
    "looked up, inner looped": (looked_up, Family.INNER, (5, 1000), LoopedRows(1, 256, 2)),
    "looked up, column": (looked_up_down, Family.OUTER, (47, 37), WholeColumns((32, 16), 8, 1)),
    "looked up, mix-order": (looked_up_both, Family.MIX, (41, 61), MixOrder(2, 4, (32, 32), 2)),
    "looked up, vectors held": (
        looked_up_both,
        Family.MIX,
        (41, 61),
        MixOrder(2, 4, (32, 32), 2, stages=2, row_vectors=RowVectors.REGISTERS),
    ),
}
