"""A captured function: its Program, and all that must hold for the Program to answer a call."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from .. import compat
from ..ir.program import Program
from ..ir.size import Bindings, Size, Sym, value
from .outputs import Literal, Number, Passed, Recipe, Stored, View


@dataclass(frozen=True)
class TensorLeaf:
    """What a tensor argument must be."""

    name: str  # of its buffer
    dtype: torch.dtype
    device: torch.device
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    requires_grad: bool

    def admits(self, leaf: Any) -> bool:
        """Everything but sizes and strides."""
        return (isinstance(leaf, torch.Tensor) and leaf.dtype is self.dtype and leaf.device == self.device
                and leaf.dim() == len(self.shape) and leaf.layout is torch.strided
                and leaf.requires_grad == self.requires_grad and not leaf.is_neg()
                and type(leaf) in (torch.Tensor, torch.nn.Parameter))


@dataclass(frozen=True)
class PlainLeaf:
    """What any other argument must be: the same value, of the same type (1, 1.0 and True are three values)."""

    value: Any

    def admits(self, leaf: Any) -> bool:
        return type(leaf) is type(self.value) and (leaf == self.value or (leaf != leaf and self.value != self.value))


Leaf: TypeAlias = TensorLeaf | PlainLeaf


@dataclass(frozen=True)
class Ambient:
    """What besides arguments decides which ops a function runs."""

    grad: bool
    inference: bool
    default_dtype: torch.dtype
    deterministic: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    outer: tuple[tuple[str, type, Any], ...]


_WATCHED = (bool, int, float, str, types.NoneType, torch.dtype)


def ambient(fn: Callable[..., Any]) -> Ambient:
    """The present state of torch, and the plain values a function reads from its closure and its module."""
    return Ambient(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cuda", "cpu")),
        _outer_values(fn),
    )


def _outer_values(fn: Callable[..., Any]) -> tuple[tuple[str, type, Any], ...]:
    if not isinstance(fn, types.FunctionType):
        return ()
    code = fn.__code__
    found = [(name, _content(cell)) for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True)]
    outer = fn.__globals__
    found += [(name, outer[name]) for name in code.co_names if name in outer]
    return tuple((name, type(v), v) for name, v in found if isinstance(v, _WATCHED))


def _content(cell: types.CellType) -> Any:
    """What a closure variable holds; a variable not yet assigned holds nothing to watch."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


@dataclass(frozen=True)
class Captured:
    """A Program with its guards. `bind` says whether it answers a call, `tensors` and `result` translate in and out."""

    fn: Callable[..., Any]
    program: Program
    leaves: tuple[Leaf, ...]
    spec: Any  # the structure of the arguments
    ambient: Ambient
    guards: tuple[str, ...]  # Python expressions over the symbols
    recipes: tuple[Recipe, ...]
    result_spec: Any

    @property
    def device(self) -> torch.device:
        """Where the function's tensors are, and so its results (CPU, if it takes none)."""
        return next((leaf.device for leaf in self.leaves if isinstance(leaf, TensorLeaf)), torch.device("cpu"))

    def bind(self, args: tuple[Any, ...]) -> Bindings | None:
        """The symbols' values in a call, or None if any guard fails: then this Program says nothing about the call."""
        leaves, spec = compat.pytree_flatten(args)
        if spec != self.spec or ambient(self.fn) != self.ambient:
            return None
        if not all(own.admits(leaf) for own, leaf in zip(self.leaves, leaves, strict=True)):
            return None
        pairs = self._pairs(leaves)
        bindings = _bindings(pairs)
        return bindings if self._holds(pairs, bindings) else None

    def _pairs(self, leaves: list[Any]) -> list[tuple[TensorLeaf, torch.Tensor]]:
        return [(own, leaf) for own, leaf in zip(self.leaves, leaves, strict=True) if isinstance(own, TensorLeaf)]

    def _holds(self, pairs: list[tuple[TensorLeaf, torch.Tensor]], bindings: dict[str, int]) -> bool:
        if any(number < 2 for number in bindings.values()):
            return False
        for own, leaf in pairs:
            if tuple(value(s, bindings) for s in own.shape) != leaf.shape:
                return False
            if tuple(value(s, bindings) for s in own.strides) != leaf.stride():
                return False
        return all(guard(bindings) for guard in self._compiled_guards)

    @cached_property
    def _compiled_guards(self) -> tuple[Callable[[dict[str, int]], bool], ...]:
        return tuple(_compiled(text) for text in self.guards)

    def tensors(self, args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
        """The Program's input buffers in a call."""
        leaves, _ = compat.pytree_flatten(args)
        return {own.name: leaf for own, leaf in self._pairs(leaves) if own.name in self.program.buffer}

    def result(self, outputs: Mapping[str, torch.Tensor], args: tuple[Any, ...]) -> Any:
        """What the function returns, once the Program's output buffers are filled."""
        leaves, _ = compat.pytree_flatten(args)
        bindings = _bindings(self._pairs(leaves))
        made = [_made(recipe, outputs, leaves, bindings) for recipe in self.recipes]
        return compat.pytree_unflatten(made, self.result_spec)


def _bindings(pairs: list[tuple[TensorLeaf, torch.Tensor]]) -> dict[str, int]:
    """The symbols' values, each from the first size that is nothing but that symbol."""
    found: dict[str, int] = {}
    for own, leaf in pairs:
        for size, number in zip(own.shape, leaf.shape, strict=True):
            if isinstance(size, Sym) and size.coef == len(size.names) == 1:
                found.setdefault(size.names[0], number)
    return found


def _compiled(text: str) -> Callable[[dict[str, int]], bool]:
    code = compile(text, "<guard>", "eval")
    return lambda bindings: bool(eval(code, {"math": math, "__builtins__": {"min": min, "max": max, "abs": abs}}, bindings))


def _made(recipe: Recipe, outputs: Mapping[str, torch.Tensor], leaves: list[Any], bindings: Bindings) -> Any:
    match recipe:
        case Stored(buffer=name):
            return outputs[name]
        case Passed(leaf=position):
            return leaves[position]
        case View(base=base, read_as=dtype, shape=shape, strides=strides, offset=offset):
            tensor = _made(base, outputs, leaves, bindings)
            start = tensor.storage_offset() + value(offset, bindings)
            shown = tensor.as_strided([value(s, bindings) for s in shape], [value(s, bindings) for s in strides], start)
            return shown if dtype is None else shown.view(dtype)
        case Number(size=size):
            return value(size, bindings)
        case Literal(value=plain):
            return plain
