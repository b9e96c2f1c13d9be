"""The arguments of a call: flattened leaves, their names and layouts, and which sizes become symbols."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch

from ... import compat
from ...errors import BadArgument, MixedDevices, NeedsGrad, UnsupportedDevice, UnsupportedDtype, UnsupportedLayout
from ...ir.expr import BY_TORCH, DTYPES
from ...ir.size import Size, mul, sym, value
from .captured import has_layout
from .known_functions import is_immutable
from .outputs import check_shape

DEVICES = ("cpu", "cuda", "meta")
# Accepted non-tensor arguments. Functions, types and enum members are compared by identity, and their state is guarded.
# fmt: off
_ACCEPTED_TYPES = (bool, int, float, str, bytes, complex, NoneType, slice, torch.dtype, torch.device, torch.memory_format,
                   enum.Enum, type, FunctionType, BuiltinFunctionType)
# fmt: on


@dataclass(frozen=True)
class Arguments:
    """Flattened arguments. `names` has one entry per leaf."""

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    spec: Any

    @property
    def tensors(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """The tensor leaves with their positions."""
        return tuple((i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))

    @property
    def objects(self) -> tuple[Any, ...]:
        """The leaves that can refer to Python state: functions, classes, enum members."""
        return tuple(leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor) and not is_immutable(leaf))


def flatten(fn: Callable[..., Any], args: tuple[Any, ...]) -> Arguments:
    """Flatten arguments and name the leaves after the function's parameters."""
    leaves, spec = compat.pytree_flatten(args)
    names: list[str] = []
    for parameter, arg in zip(_parameters(fn, len(args)), args, strict=True):
        own, _ = compat.pytree_flatten(arg)
        names += [parameter] if len(own) == 1 and own[0] is arg else [f"{parameter}_{k}" for k in range(len(own))]
    return Arguments(tuple(leaves), tuple(_unique(names)), spec)


def _parameters(fn: Callable[..., Any], count: int) -> list[str]:
    """A name for each positional argument, or `x0`, `x1`, ... if the signature has none."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "x")
    names = positional[:count] + [f"{rest}{k}" for k in range(count - len(positional[:count]))]
    return [re.sub(r"\W", "_", name) for name in names]


def _unique(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        while name in found:
            name += "_"
        found.append(name)
    return found


def check(arguments: Arguments) -> None:
    """Refuse arguments that no kernel can take."""
    for name, leaf in zip(arguments.names, arguments.leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            _check_tensor(name, leaf)
        elif not isinstance(leaf, _ACCEPTED_TYPES) and not is_immutable(leaf):
            raise BadArgument(
                detail=f"Argument {name} is a {type(leaf).__name__}, and onepass cannot detect when it changes. "
                "Pass tensors, numbers, strings, or tuples, lists and dicts of them."
            )
    devices = {leaf.device for _, leaf in arguments.tensors}
    if len(devices) > 1:
        raise MixedDevices(devices=", ".join(sorted(str(d) for d in devices)))


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type not in DEVICES:
        raise UnsupportedDevice(device=tensor.device)
    if tensor.layout is not torch.strided:
        raise UnsupportedLayout(argument=name, layout=tensor.layout)
    if tensor.is_nested:
        raise BadArgument(detail=f"Argument {name} is a nested tensor. Pass a plain one (.to_padded_tensor(0)).")
    if tensor.dtype not in BY_TORCH:
        raise UnsupportedDtype(what=f"Argument {name}", dtype=tensor.dtype, where="the call", supported=", ".join(DTYPES))
    if not has_layout(tensor):
        raise BadArgument(detail=f"Argument {name} is a {type(tensor).__name__}. Pass a plain torch.Tensor.")
    if tensor.is_neg():
        raise BadArgument(detail=f"Argument {name} is a lazily negated view. Call .resolve_neg() first.")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NeedsGrad(argument=name)
    check_shape(f"Argument {name}", tensor.shape)


@dataclass(frozen=True)
class Layout:
    """A tensor's shape and strides, as Sizes."""

    shape: tuple[Size, ...]
    strides: tuple[Size, ...]


@dataclass(frozen=True)
class Layouts:
    """The layouts of all tensor arguments, and the current values of the symbols in them."""

    each: tuple[Layout, ...]
    hints: dict[str, int]


def candidate_layouts(tensors: Sequence[torch.Tensor]) -> tuple[Layouts, ...]:
    """Layouts to try, from most to fewest symbols: all dims but the last, the first dim only, none."""
    rows, leading = _symbolic(tensors, None), _symbolic(tensors, 1)
    fixed = Layouts(tuple(Layout(tuple(t.shape), tuple(t.stride())) for t in tensors), {})
    symbolic = [rows, leading] if leading != rows else [rows]
    return (*(layouts for layouts in symbolic if layouts.hints), fixed)


def _symbolic(tensors: Sequence[torch.Tensor], max_dims: int | None) -> Layouts:
    """Make the first `most` dims of each tensor symbolic (None: all), but never the last dim.

    Equal sizes share one symbol. Sizes 0 and 1 stay fixed, because torch specializes on them. A vector's size becomes a symbol
    if it equals some row count and no column count.
    """
    rows = dict.fromkeys(s for t in tensors if t.dim() > 1 for s in t.shape[:-1][:max_dims] if s > 1)
    columns = {s for t in tensors if t.dim() > 1 for s in (t.shape[-1:] if max_dims is None else t.shape[max_dims:])}
    symbols = {size: sym(f"s{k}") for k, size in enumerate(rows)}
    hints = {f"s{k}": size for k, size in enumerate(rows)}
    layouts = []
    for tensor in tensors:
        vary = tensor.dim() - 1 if max_dims is None else min(max_dims, tensor.dim() - 1)
        if tensor.dim() == 1 and tensor.shape[0] not in columns:
            vary = 1
        shape = tuple(symbols.get(s, s) if d < vary else s for d, s in enumerate(tensor.shape))
        layouts.append(Layout(shape, _symbolic_strides(tensor, shape, hints)))
    return Layouts(tuple(layouts), hints)


def _symbolic_strides(tensor: torch.Tensor, shape: tuple[Size, ...], hints: dict[str, int]) -> tuple[Size, ...]:
    """Strides as products of sizes. A stride that equals another dim's stride times its size is assumed to be that product."""
    found: dict[int, Size] = {}
    # From the innermost dim outward. Among dims with equal strides, the last comes first.
    for dim in sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), -d)):
        number = tensor.stride(dim)
        spans = [mul(found[inner], shape[inner]) for inner in sorted(found, reverse=True) if tensor.stride(inner)]
        found[dim] = next((s for s in spans if value(s, hints) == number and number), number)
    return tuple(found[d] for d in range(tensor.dim()))
