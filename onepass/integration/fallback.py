"""Fallbacks: compute a region without onepass kernels, with Inductor or with torch op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import compat
from ..ir.oracle import evaluate_into
from ..ir.program import Program
from ..ir.size import Bindings

Fill = Callable[[Sequence[Tensor], Sequence[Tensor]], None]  # (outputs, inputs), in the order of the Program's buffers
MAX_INDUCTOR_FALLBACKS = 8  # fallbacks of one region that Inductor compiles; later ones run op by op


@dataclass(frozen=True)
class Fallback:
    """Fills the outputs of a region whose kernels failed. If it fails too, the error is raised."""

    fill: Fill

    def __call__(self, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
        self.fill(outs, ins)


def torch_fallback(program: Program, bindings: Bindings) -> Fill:
    """Compute op by op with torch, in the types eager would use. Also handles empty axes."""

    def fill(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for out, result in zip(outs, fresh_results(program, bindings, outs, ins), strict=True):
                out.copy_(result)

    return fill


def fresh_results(program: Program, bindings: Bindings, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[Tensor]:
    """Compute the outputs into new memory with the layout of `outs`, because an output may alias an input."""
    results = [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device) for o in outs]
    evaluate_into(program, tensors_by_name(program, results, ins), bindings)
    return results


def tensors_by_name(program: Program, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> dict[str, Tensor]:
    """Map buffer names of the Program to the tensors of a call."""
    tensors = {"input": iter(ins), "output": iter(outs)}
    return {b.name: next(tensors[b.role]) for b in program.buffers if b.role != "temp"}


def inductor_fallback(program: Program, bindings: Bindings, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> Fill:
    """Compile the Program with Inductor for these exact sizes. Errors of Inductor propagate."""
    layouts = [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device="meta") for o in outs]
    device = outs[0].device

    def compute(*tensors: Tensor) -> list[Tensor]:
        results = [torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device) for like in layouts]
        evaluate_into(program, tensors_by_name(program, results, tensors), bindings)
        return results

    with torch.no_grad():
        at_start = [at_storage_start(t) for t in ins]
        # Tracing on real tensors turns the Program's sizes into constants of the graph.
        compiled: Callable[..., list[Tensor]] = torch.compile(compat.trace_graph(compute, at_start, nullcontext()), dynamic=False)
        compiled(*at_start)

    def fill(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for out, result in zip(outs, compiled(*map(at_storage_start, ins)), strict=True):
                out.copy_(result)

    return fill


def at_storage_start(tensor: Tensor) -> Tensor:
    """The tensor, copied if it does not start at its storage's beginning: a traced graph assumes storage offset 0."""
    return tensor if tensor.storage_offset() == 0 else clone_strided(tensor)


def clone_strided(tensor: Tensor) -> Tensor:
    """A copy with the same strides, including gaps and overlapping elements."""
    return map_storage(tensor, Tensor.clone)


def map_storage(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor with the same strides over changed memory. `change` gets the memory between the first and last element, flat."""
    if not tensor.numel():
        return tensor
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return change(tensor.as_strided((extent,), (1,))).as_strided(tensor.shape, tensor.stride(), 0)


def shares_storage(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[bool]:
    """For each input, whether an output shares its storage."""
    written = {o.untyped_storage().data_ptr() for o in outs if o.numel()}
    return [t.numel() > 0 and t.untyped_storage().data_ptr() in written for t in ins]
