"""Checks a provider's results against float64 before they are timed.

onepass must meet the accuracy criterion (ir/criterion.py). Other providers get a multiple of its bounds: some round intermediate
values, which their users accept, and excluding them for that would make the comparison unfair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..ir.criterion import judge
from ..tools.check import as_tuple, in_float64

SLACK = 4.0  # multiple of the criterion's bounds, for other providers
WHOLE_ELEMENTS = 1 << 28  # up to this size, all rows are checked at once
PART_ELEMENTS = 1 << 27  # per part, for larger inputs

# Workloads with independent rows, and the minimum rank of the inputs that are split by rows.
_ROW_WISE = {
    "rms_norm": 2,
    "layer_norm": 2,
    "add_rms_norm": 2,
    "add_layer_norm": 2,
    "softmax": 1,
    "log_softmax": 1,
    "softmax_backward": 1,
    "logsumexp": 1,
    "cross_entropy": 1,
    "cross_entropy_backward": 1,
}


def parts(name: str, inputs: Sequence[Tensor]) -> Iterator[slice | None]:
    """Row ranges to check one at a time. None means all rows, as workloads that reduce over rows require."""
    largest = max(inputs, key=Tensor.numel)
    rows = largest.shape[0]
    if name not in _ROW_WISE or largest.numel() <= WHOLE_ELEMENTS:
        yield None
        return
    height = max(1, PART_ELEMENTS // (largest.numel() // rows))
    for start in range(0, rows, height):
        yield slice(start, min(rows, start + height))


class Judge:
    """Checks results of one call by the criterion, in parts that limit memory use."""

    def __init__(self, name: str, function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        self._function, self._inputs, self._min_dims = function, tuple(inputs), _ROW_WISE.get(name, 1)
        self._parts = tuple(parts(name, inputs))
        # If all rows are checked at once, the reference is computed once for all providers.
        self._known = self._truth(None) if self._parts == (None,) else None

    def wrong(self, answer: Any, slack: float) -> str | None:
        """Describe what is wrong with an answer; None if it is right."""
        results = as_tuple(answer)
        for part in self._parts:
            eager, reference = self._known or self._truth(part)
            if len(results) != len(eager):
                return f"{len(results)} results where {len(eager)} are expected"
            for k, (answer, theirs, exact) in enumerate(zip(results, eager, reference, strict=True)):
                found = _wrong(answer if part is None else answer[part], theirs, exact, slack)
                if found:
                    return f"result {k}: {found}" if len(results) > 1 else found
        return None

    def _truth(self, part: slice | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        given = [t if part is None or t.dim() < self._min_dims else t[part] for t in self._inputs]
        return as_tuple(self._function(*given)), in_float64(self._function, given)


def _wrong(answer: Tensor, eager: Tensor, reference: Tensor, slack: float) -> str | None:
    if answer.shape != eager.shape:
        return f"its shape is {tuple(answer.shape)} where {tuple(eager.shape)} is expected"
    exact = reference.double() if reference.is_floating_point() else reference  # fp8 has no arithmetic
    return judge(answer, eager, exact, slack)
