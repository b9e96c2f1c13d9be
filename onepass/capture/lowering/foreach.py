"""Expands ops on lists of tensors (`torch._foreach_*`) into one op per tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...errors import DataDependent

PREFIX = "_foreach_"


def per_tensor_calls(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Callable[[], Any]] | None:
    """Expand a foreach op into one call per tensor, in order. None for other ops, and where no single-tensor op exists."""
    name = op._schema.name.removeprefix(f"aten::{PREFIX}")
    arguments = {a.name: a for a in op._schema.arguments}
    given = dict(zip(arguments, args, strict=False)) | kwargs
    if name == op._schema.name or "out" in given:
        return None
    single = _single(name, op._overloadname)
    lists = [n for n, a in arguments.items() if str(a.type).startswith("List[") and n in given]
    counts = {len(given[n]) for n in lists}
    if single is None or len(counts) != 1:
        return None
    calls = [{n: v[k] if n in lists else v for n, v in given.items()} for k in range(counts.pop())]
    return [partial(single, values, {n for n in values if arguments[n].kwarg_only}) for values in calls]


def _single(name: str, overload: str) -> Callable[[dict[str, Any], set[str]], Any] | None:
    """The single-tensor form of a foreach op: a function of its arguments by name and of the names to pass as keywords."""
    by_keyword: set[str] = set()
    match name.rstrip("_"), overload:
        case "norm", _:
            return lambda values, _: torch.linalg.vector_norm(values.pop("self"), **values)
        case ("maximum" | "minimum") as which, "Scalar" | "ScalarList":
            name = ("clamp_min" if which == "maximum" else "clamp_max") + name.removeprefix(which)
        case (("addcdiv" | "addcmul"), "Tensor"):
            raise DataDependent(detail=f"aten.{PREFIX}{name} takes its factors from a tensor")
        case (("addcdiv" | "addcmul"), _):
            by_keyword = {"value", "scalars"}
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None

    def single(values: dict[str, Any], keywords: set[str]) -> Any:
        keywords = keywords | by_keyword & values.keys()
        named = {"value" if n == "scalars" else n: values[n] for n in keywords}
        return packet(*(v for n, v in values.items() if n not in keywords), **named)

    return single
