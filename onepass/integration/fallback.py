"""A region computed without kernels of onepass: as Inductor compiles its Program, or by torch op by op."""

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
MAX_INDUCTOR_FALLBACKS = 8  # sets of sizes of one region that Inductor is asked to compile; more are computed op by op


@dataclass(frozen=True)
class Fallback:
    """What fills the outputs of a region whose kernels failed. Nothing takes its place if it fails as well."""

    fill: Fill

    def __call__(self, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
        self.fill(outs, ins)


def torch_fallback(program: Program, bindings: Bindings) -> Fill:
    """Op by op, in the types eager would use. Right for empty axes too: a reduction over nothing is its identity."""

    def fill(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for out, result in zip(outs, fresh_results(program, bindings, outs, ins), strict=True):
                out.copy_(result)

    return fill


def fresh_results(program: Program, bindings: Bindings, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[Tensor]:
    """The outputs in memory of their own, with the layout of `outs`, so that an output may have taken an input's memory."""
    results = [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device) for o in outs]
    evaluate_into(program, tensors_by_name(program, results, ins), bindings)
    return results


def tensors_by_name(program: Program, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of a call by the names of the Program's buffers."""
    tensors = {"input": iter(ins), "output": iter(outs)}
    return {b.name: next(tensors[b.role]) for b in program.buffers if b.role != "temp"}


def inductor_fallback(program: Program, bindings: Bindings, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> Fill:
    """As Inductor compiles it for these very sizes; raises whatever it raises."""
    layouts = [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device="meta") for o in outs]
    device = outs[0].device

    def compute(*tensors: Tensor) -> list[Tensor]:
        results = [torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device) for like in layouts]
        evaluate_into(program, tensors_by_name(program, results, tensors), bindings)
        return results

    with torch.no_grad():
        at_start = [at_storage_start(t) for t in ins]
        # The graph is traced on the tensors themselves: numbers of the Program become constants of the graph.
        compiled = torch.compile(compat.trace_graph(compute, at_start, nullcontext()), dynamic=False)
        compiled(*at_start)

    def fill(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for out, result in zip(outs, compiled(*map(at_storage_start, ins)), strict=True):
                out.copy_(result)

    return fill


def at_storage_start(tensor: Tensor) -> Tensor:
    """The same tensor at the start of its memory: addresses in a traced graph count from there."""
    return tensor if tensor.storage_offset() == 0 else clone_strided(tensor)


def clone_strided(tensor: Tensor) -> Tensor:
    """A copy with the same strides, gaps and repeats included."""
    if not tensor.numel():
        return tensor
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def shares_storage(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[bool]:
    """For each input, whether an output is written to its memory."""
    written = {o.untyped_storage().data_ptr() for o in outs if o.numel()}
    return [t.numel() > 0 and t.untyped_storage().data_ptr() in written for t in ins]
