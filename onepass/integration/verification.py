"""Compare the results of a region's call with float64 (the `verify` setting)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir.criterion import judge
from ..ir.oracle import evaluate
from ..ir.program import Program
from ..ir.size import Bindings
from .fallback import fresh_results, map_storage, tensors_by_name

MORE_ROUNDINGS = 8  # sets of nearby inputs that show how far eager's own rounding may go
# Factor on the bounds that follow from them. By chance, one cancelling sum in 18,000 exceeds three times what the worst of nine
# others allows. A wrong kernel is off by far more.
SECOND_LOOK_SLACK = 3.0
NEARBY = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}


def find_mistake(program: Program, bindings: Bindings, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> tuple[str, str] | None:
    """The first wrong output of a call and what is wrong with it; None if all are right. `ins` are the inputs before the call."""
    with torch.no_grad():
        exact, eager = _float64(program, bindings, outs, ins), fresh_results(program, bindings, outs, ins)
        names = [b.name for b in program.buffers if b.role == "output"]
        suspects = [k for k, name in enumerate(names) if judge(outs[k], eager[k], exact[name])]
        if not suspects:
            return None
        worst = _worst_of_eager(program, bindings, outs, ins, exact, eager)
        wrong = ((names[k], judge(outs[k], worst[k], exact[names[k]], SECOND_LOOK_SLACK)) for k in suspects)
        return next(((name, detail) for name, detail in wrong if detail), None)


def _float64(program: Program, bindings: Bindings, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> dict[str, Tensor]:
    return evaluate(program, tensors_by_name(program, outs, ins), bindings)


def _worst_of_eager(
    program: Program,
    bindings: Bindings,
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    exact: dict[str, Tensor],
    eager: Sequence[Tensor],
) -> list[Tensor]:
    """Results as far from float64 as eager's were, on these inputs or on nearby ones.

    Where sums cancel, a result consists of rounding errors: the mean of a normalized row, or its gradient. Eager's error on one set
    of inputs may then be far below its usual one by chance, and says little about the error that is allowed.
    """
    names = [b.name for b in program.buffers if b.role == "output"]
    error = [_distance(theirs, exact[name]) for name, theirs in zip(names, eager, strict=True)]
    for draw in range(MORE_ROUNDINGS):
        moved = [_nearby(tensor, 100 * draw + k) for k, tensor in enumerate(ins)]
        there, theirs = _float64(program, bindings, outs, moved), _eager(program, bindings, outs, moved, draw)
        error = [torch.maximum(e, _distance(t, there[name])) for e, t, name in zip(error, theirs, names, strict=True)]
    return [
        torch.where(theirs.double().isfinite(), exact[name] + e, theirs.double()) if theirs.is_floating_point() else theirs
        for name, theirs, e in zip(names, eager, error, strict=True)
    ]


def _eager(program: Program, bindings: Bindings, outs: Sequence[Tensor], ins: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Eager's results; in fp64, where those are the reference itself, results of the same ops rounded otherwise."""
    results = fresh_results(program, bindings, outs, ins)
    if all(result.dtype != torch.float64 for result in results):
        return results
    rounded = evaluate(program, tensors_by_name(program, outs, ins), bindings, torch.Generator().manual_seed(seed))
    names = (b.name for b in program.buffers if b.role == "output")
    return [rounded[name] if result.dtype == torch.float64 else result for name, result in zip(names, results, strict=True)]


def _distance(result: Tensor, exact: Tensor) -> Tensor:
    """The error of each element; 0 where it is not a number or infinite."""
    return torch.nan_to_num((result.double() - exact.double()).abs(), nan=0.0, posinf=0.0)


def _nearby(tensor: Tensor, seed: int) -> Tensor:
    """A copy of a float tensor in which every element is a little larger or smaller. Other tensors are returned as they are."""
    step = NEARBY.get(tensor.dtype)
    if step is None or not tensor.numel():
        return tensor

    def move(memory: Tensor) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        sign = torch.randint(0, 2, memory.shape, generator=random).to(memory.device) * 2 - 1
        return memory * (1 + step * sign).to(memory.dtype)

    return map_storage(tensor, move)
