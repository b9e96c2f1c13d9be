"""Graphs as the graph pass sees them, and claims on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from onepass import compat
from onepass.integration import region_op  # noqa: F401, defines the op that rewritten graphs call
from onepass.integration.claim import Claimed, ClaimOptions, claim
from tests.support.forced_schedules import H200


def graph_of(fn: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Graph:
    """The graph of a function over shape-only tensors, decomposed."""
    mode = compat.fake_mode()
    with mode:
        fakes = [torch.empty(shape, dtype=dtype) for shape in shapes]
    return compat.trace_graph(fn, fakes, mode).graph


def claimed(graph: fx.Graph, **changes: object) -> Claimed:
    return claim(graph, ClaimOptions(H200, interpret=True, by_cost=False, **changes))  # type: ignore[arg-type]


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
