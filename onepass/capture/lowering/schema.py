"""Ops by exact overload, and the arguments of a call by their schema names.

Overloads of one op compute different things: `view.dtype` reinterprets bits where `view.default` regroups elements, and
`scatter.reduce` adds where `scatter.src` overwrites. So tables are keyed by overload. An argument that a handler ignores may
change the result, so a call records which arguments were read; the others must hold their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import fx


def op_name(target: Any) -> str:
    """The unique name of a target: `aten.add.Tensor` for an overload, `_operator.mul` for a Python function."""
    if hasattr(target, "overloadpacket"):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def short_name(target: Any) -> str:
    """`aten.add` for any of its overloads. For messages: users do not see overloads."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(target, "__name__", str(target))


# Arguments that only affect where and how a result is stored, with the values that leave its elements unchanged.
PLACEMENT: Mapping[str, Callable[[Any], bool]] = {
    "device": lambda _: True,  # results on another device are refused when outputs are planned
    "layout": lambda value: value in (None, torch.strided),  # sparse tensors do not store every element
    "pin_memory": lambda value: not value,  # results in host memory are pageable
    "non_blocking": lambda _: True,  # concerns copies between devices; kernels make none
    "memory_format": lambda _: True,  # outputs have torch's strides, other values have none
}


@dataclass(frozen=True)
class BoundArguments(Sequence[Any]):
    """The arguments of one call: by position as torch takes them, and by schema name.

    Omitted arguments hold the schema's default. `read` records every argument that was read, by position or by name.
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
        """The argument with this schema name. Marks it as read."""
        self.read.add(name)
        return self.values[name]

    def mapped(self, change: Callable[[Any], Any]) -> BoundArguments:
        """The call with its values changed, including those in lists. Both share one record of what was read."""
        changed = {name: fx.node.map_aggregate(value, change) for name, value in self.values.items()}
        return BoundArguments(changed, self.positional, self.defaults, self.read)

    def ignored(self) -> Iterator[str]:
        """Arguments that no handler read although they may affect the elements of the result."""
        for name, value in self.values.items():
            harmless = PLACEMENT.get(name, lambda _: False)
            by_default = name in self.defaults and bool(value == self.defaults[name])
            if not (name in self.read or by_default or harmless(value)):
                yield name


def bind_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundArguments:
    """Bind the arguments of an op by its schema. Arguments of Python functions get names by position."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        by_position = {f"argument {k}": value for k, value in enumerate(args)}
        return BoundArguments({**by_position, **kwargs}, tuple(by_position))
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    positional = tuple(a.name for a in schema.arguments if not a.kwarg_only)
    given = {**dict(zip(positional, args, strict=False)), **kwargs}
    values = {a.name: given.get(a.name, defaults.get(a.name)) for a in schema.arguments}
    return BoundArguments(values, positional, defaults)
