"""A captured function: its Program and the guards under which the Program is valid for a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from ... import compat
from ...ir.program import Program
from ...ir.size import Bindings, Size, Sym, value
from .outputs import Literal, Number, PassThrough, Recipe, Stored, View
from .state import State, exact_key, same_value


@dataclass(frozen=True)
class TensorLeaf:
    """Guard on a tensor argument."""

    name: str  # the name of its buffer
    dtype: torch.dtype
    device: torch.device
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    requires_grad: bool

    def matches(self, leaf: Any) -> bool:
        """Check everything except sizes and strides."""
        return (
            isinstance(leaf, torch.Tensor)
            and has_layout(leaf)
            and leaf.dtype is self.dtype
            and leaf.device == self.device
            and leaf.dim() == len(self.shape)
            and leaf.requires_grad == self.requires_grad
            and not leaf.is_neg()
        )


@dataclass(frozen=True)
class PlainLeaf:
    """Guard on any other argument: the same value of the same type. 1, 1.0 and True differ, and so do 0.0 and -0.0."""

    value: Any

    def matches(self, leaf: Any) -> bool:
        return same_value(leaf, self.value)


Leaf: TypeAlias = TensorLeaf | PlainLeaf
Pattern: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...]


def has_layout(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one with strides. Nested and uninitialized tensors do not even have a shape."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def pattern_key(pattern: Pattern, leaves: Sequence[Any], spec: Any) -> Hashable:
    """A key of the parts of a call that traces with this pattern fix. None if the call's structure differs."""
    if len(leaves) != len(pattern):
        return None
    found: list[Hashable] = [compat.structure_key(spec)]
    for fixed, leaf in zip(pattern, leaves, strict=True):
        is_tensor = isinstance(leaf, torch.Tensor)
        if is_tensor is (fixed is None) or is_tensor and not has_layout(leaf):
            return None
        if fixed is None:
            found.append(exact_key(leaf))
            continue
        shape, strides = leaf.shape, leaf.stride()
        if any(d >= len(shape) for dims in fixed for d in dims):
            return None
        found.append((leaf.dtype, leaf.device, len(shape), *(shape[d] for d in fixed[0]), *(strides[d] for d in fixed[1])))
    return tuple(found)


@dataclass(frozen=True)
class Captured:
    """A Program with its guards. `bind` checks a call; `tensors` and `result` convert its inputs and outputs."""

    fn: Callable[..., Any]
    program: Program
    leaves: tuple[Leaf, ...]
    spec: Any  # pytree structure of the arguments
    state: State  # what the function reads besides its arguments
    guards: tuple[str, ...]  # Python expressions over the symbols
    recipes: tuple[Recipe, ...]
    result_spec: Any

    @property
    def device(self) -> torch.device:
        """The device of the function's tensors and results; the CPU if it takes no tensors."""
        return next((leaf.device for leaf in self.leaves if isinstance(leaf, TensorLeaf)), torch.device("cpu"))

    @cached_property
    def pattern(self) -> Pattern:
        """For each tensor argument, the dims whose sizes and strides are fixed. None for other arguments."""
        return tuple(
            (_fixed_positions(leaf.shape), _fixed_positions(leaf.strides)) if isinstance(leaf, TensorLeaf) else None
            for leaf in self.leaves
        )

    def bind(self, args: tuple[Any, ...]) -> Bindings | None:
        """The values of the symbols in a call, or None if a guard fails and the Program is not valid for the call."""
        return self.bind_leaves(*compat.pytree_flatten(args)) if self.state.unchanged() else None

    def bind_leaves(self, leaves: Sequence[Any], spec: Any) -> Bindings | None:
        """`bind` for flattened arguments. The caller has checked that the guarded state is unchanged."""
        if spec != self.spec:
            return None
        if not all(own.matches(leaf) for own, leaf in zip(self.leaves, leaves, strict=True)):
            return None
        pairs = self._pairs(leaves)
        bindings = _bindings(pairs)
        return bindings if self._holds(pairs, bindings) else None

    def _pairs(self, leaves: Sequence[Any]) -> list[tuple[TensorLeaf, torch.Tensor]]:
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
        return self.buffers(compat.pytree_flatten(args)[0])

    def buffers(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The Program's input buffers, from flattened arguments."""
        return {name: leaves[position] for position, name in self._inputs}

    @cached_property
    def _inputs(self) -> tuple[tuple[int, str], ...]:
        return tuple(
            (k, leaf.name)
            for k, leaf in enumerate(self.leaves)
            if isinstance(leaf, TensorLeaf) and leaf.name in self.program.buffer
        )

    def result(self, outputs: Mapping[str, torch.Tensor], args: tuple[Any, ...]) -> Any:
        """The function's result, once the Program's output buffers are filled."""
        leaves, _ = compat.pytree_flatten(args)
        return self.build_result(outputs, leaves, _bindings(self._pairs(leaves)))

    def build_result(self, outputs: Mapping[str, torch.Tensor], leaves: Sequence[Any], bindings: Bindings) -> Any:
        """`result` for flattened arguments and known symbol values."""
        return self._build_tree([_build_leaf(recipe, outputs, leaves, bindings) for recipe in self.recipes])

    @cached_property
    def _build_tree(self) -> Callable[[list[Any]], Any]:
        return compat.tree_builder(self.result_spec)


def _fixed_positions(sizes: tuple[Size, ...]) -> tuple[int, ...]:
    """The positions of sizes that are plain ints."""
    return tuple(d for d, size in enumerate(sizes) if isinstance(size, int))


def _bindings(pairs: list[tuple[TensorLeaf, torch.Tensor]]) -> dict[str, int]:
    """The values of the symbols. Each comes from the first size that is exactly that symbol."""
    found: dict[str, int] = {}
    for own, leaf in pairs:
        for size, number in zip(own.shape, leaf.shape, strict=True):
            if isinstance(size, Sym) and size.coef == len(size.names) == 1:
                found.setdefault(size.names[0], number)
    return found


def _compiled(text: str) -> Callable[[dict[str, int]], bool]:
    code = compile(text, "<guard>", "eval")
    return lambda bindings: bool(eval(code, {"math": math, "__builtins__": {"min": min, "max": max, "abs": abs}}, bindings))


def _build_leaf(recipe: Recipe, outputs: Mapping[str, torch.Tensor], leaves: Sequence[Any], bindings: Bindings) -> Any:
    match recipe:
        case Stored(buffer=name):
            return outputs[name]
        case PassThrough(leaf=position):
            return leaves[position]
        case View(base=base, read_as=dtype, shape=shape, strides=strides, offset=offset):
            tensor = _build_leaf(base, outputs, leaves, bindings)
            start = tensor.storage_offset() + value(offset, bindings)
            view = tensor.as_strided([value(s, bindings) for s in shape], [value(s, bindings) for s in strides], start)
            return view if dtype is None else view.view(dtype)
        case Number(size=size):
            return value(size, bindings)
        case Literal(value=plain):
            return plain
