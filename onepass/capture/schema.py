"""Ops by their exact overloads, and the arguments of a call as the op's schema names them.

Overloads of one op differ in what they compute: `view.dtype` reads bits anew where `view.default` regroups elements, and
`scatter.reduce` adds where `scatter.src` overwrites. So tables name overloads, never ops. And an argument that nobody reads
may change the result: a call remembers which of its arguments its handler has read, and the rest must hold their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import fx


def op_name(target: Any) -> str:
    """`aten.add.Tensor` for an overload, `_operator.mul` for a Python function: the name of this one thing."""
    if hasattr(target, "overloadpacket"):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def short_name(target: Any) -> str:
    """`aten.add` for any overload of it. For people to read: an overload has no other name in their code."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(target, "__name__", str(target))


# Arguments that say where the memory of a result is and how it comes there, with the values that leave its elements as they are.
PLACEMENT: Mapping[str, Callable[[Any], bool]] = {
    "device": lambda _: True,  # results elsewhere than the arguments are refused where outputs are planned
    "layout": lambda value: value in (None, torch.strided),  # sparse tensors hold no element per position
    "pin_memory": lambda value: not value,  # the host memory that kernels' results lie in is pageable
    "non_blocking": lambda _: True,  # when a copy between devices ends; there is none between a kernel's values
    "memory_format": lambda _: True,  # strides: those of outputs are torch's own, other values have none
}


@dataclass(frozen=True)
class BoundArguments(Sequence[Any]):
    """The arguments of one call. By position they are those torch takes by position, by name all that the schema has.

    What the call leaves out holds the schema's default. Reading an argument, in either way, is remembered in `read`.
    """

    values: Mapping[str, Any]
    positional: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.positional)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> list[Any]: ...
    def __getitem__(self, at: int | slice) -> Any:
        return [self.named(name) for name in self.positional[at]] if isinstance(at, slice) else self.named(self.positional[at])

    def named(self, name: str) -> Any:
        """The argument with this name in the schema."""
        self.read.add(name)
        return self.values[name]

    def mapped(self, change: Callable[[Any], Any]) -> BoundArguments:
        """The same call with its values changed, those in lists too. What is read of it counts as read of this one."""
        changed = {name: fx.node.map_aggregate(value, change) for name, value in self.values.items()}
        return BoundArguments(changed, self.positional, self.defaults, self.read)

    def ignored(self) -> Iterator[str]:
        """Arguments that nobody read though they may say something about the result's elements."""
        for name, value in self.values.items():
            harmless = PLACEMENT.get(name, lambda _: False)
            by_default = name in self.defaults and bool(value == self.defaults[name])
            if not (name in self.read or by_default or harmless(value)):
                yield name


def bind_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundArguments:
    """The arguments of a call of an op, or of a Python function, whose arguments have no names."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        by_position = {f"argument {k}": value for k, value in enumerate(args)}
        return BoundArguments({**by_position, **kwargs}, tuple(by_position))
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    positional = tuple(a.name for a in schema.arguments if not a.kwarg_only)
    given = {**dict(zip(positional, args, strict=False)), **kwargs}
    values = {a.name: given.get(a.name, defaults.get(a.name)) for a in schema.arguments}
    return BoundArguments(values, positional, defaults)
