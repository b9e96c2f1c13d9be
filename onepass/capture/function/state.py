"""Guards on Python state that a function reads besides its arguments.

A State is a list of Reads, each with the value it had when the function was traced. `unchanged` first compares all of them by
identity in one generated expression (about 50 ns per Read). Only if that fails does it compare by value, so storing 3.0 again
is no change.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, MethodType, NoneType
from typing import Any

import torch

from ... import compat
from ...errors import UnsupportedTorchMode

# Types whose values never change while they are the same object.
IMMUTABLE_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    NoneType,
    type(...),
    type(NotImplemented),
    range,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)
ABSENT = type("Absent", (), {"__repr__": lambda self: "nothing"})()


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """What a function can read of a non-argument tensor without reading its elements."""

    kind: type
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def snapshot(value: Any) -> Any:
    """What a Read stores of a value. For a tensor only its facts, because a guard must not keep its memory alive."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or vars(value):
        return value
    return TensorMetadata(
        type(value), tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, value.device, value.requires_grad
    )


def same_value(now: Any, then: Any) -> bool:
    """Whether a value is unchanged: the same object, or a plain value of the same type with the same bits."""
    return now is then or type(now) is type(then) and exact_key(now) == exact_key(then)


def exact_key(value: Any) -> Hashable:
    """A key that tells plain values apart exactly: 0.0 from -0.0, True from 1. NaN equals itself. Other objects: by identity."""
    match value:
        case float():
            return float, type(value), value.hex()
        case complex():
            return complex, exact_key(value.real), exact_key(value.imag)
        case tuple():
            return type(value), tuple(map(exact_key, value))
        case slice():
            return slice, exact_key(value.start), exact_key(value.stop), exact_key(value.step)
        case TensorMetadata():
            return value
        case _ if type(value) in IMMUTABLE_TYPES:
            return type(value), value
        case _ if is_numpy(value, "generic"):
            return type(value), value.tobytes()
        case MethodType() | BuiltinFunctionType():
            return value  # equal if bound to the same object, although each attribute access makes a new one
        case _:
            return Identity(value)


def is_numpy(value: Any, kind: str) -> bool:
    """Whether a value is an instance of a class of NumPy, by the name of the class."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, kind))


@dataclass(frozen=True, eq=False, slots=True)
class Identity:
    """Wraps an object so that it compares by identity."""

    of: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


def cell_content(cell: CellType) -> Any:
    """The value of a closure variable, ABSENT before its first assignment."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """One read of Python state: an expression over its owner, `{o}`, and the value it gave."""

    where: str  # the place, as a user would write it
    owner: Any
    expression: str
    value: Any  # a snapshot, or a tuple of snapshots if the expression gives several values
    kind: str = "one"  # "one" value | "each": several values | "fresh": an object that every read creates anew

    def holds(self) -> bool:
        """Whether the read still gives the same value."""
        try:
            now = evaluate(self.owner, self.expression)
        except _READ_ERRORS:
            return False
        if self.kind != "each":
            return same_value(snapshot(now), self.value)
        return len(now) == len(self.value) and all(map(same_value, map(snapshot, now), self.value))

    def test(self, owner: str, value: str) -> str:
        """Source of a fast check, given the names of owner and value. If it succeeds, so does `holds`."""
        given = self.expression.replace("{o}", owner)
        if self.kind != "each":
            by_identity = self.kind == "one" and not isinstance(self.value, TensorMetadata)
            return f"{given} is {value}" if by_identity else f"same_value(snapshot({given}), {value})"
        length = f"len({given}) == {len(self.value)}"
        if any(isinstance(v, TensorMetadata) for v in self.value):
            return f"{length} and all(map(same_value, map(snapshot, {given}), {value}))"
        return f"{length} and all(map(is_, {given}, {value}))" if self.value else length


def make_read(where: str, owner: Any, expression: str, kind: str = "one") -> tuple[Read, Any]:
    """Make a Read of the current value. Returns the Read and the value."""
    found = evaluate(owner, expression)
    if kind != "each":
        return Read(where, owner, expression, snapshot(found), kind), found
    values = tuple(found)
    return Read(where, owner, expression, tuple(map(snapshot, values)), kind), values


def call_or_error_type(function: Callable[[], Any]) -> Any:
    """The result of a function, or the type of the exception it raises."""
    try:
        return function()
    except Exception as error:
        return type(error)


# Names that the expressions of Reads and their checks use.
_EXPRESSION_NAMES = {
    "ABSENT": ABSENT,
    "call_or_error_type": call_or_error_type,
    "autocast_dtype": torch.get_autocast_dtype,
    "cell_content": cell_content,
    "deque": deque,
    "is_": is_,
    "same_value": same_value,
    "snapshot": snapshot,
}
_READ_ERRORS = (AttributeError, ValueError, TypeError)  # raised by a Read whose target no longer exists


def evaluate(owner: Any, expression: str) -> Any:
    """Evaluate an expression over `{o}`."""
    return eval(_compiled(expression), {**_EXPRESSION_NAMES, "o": owner})


@lru_cache(maxsize=1024)
def _compiled(expression: str) -> CodeType:
    return compile(expression.replace("{o}", "o"), "<read>", "eval")


class TransparentWrapper:
    """Base class of callables that behave like the function `fn` and read no other state."""

    fn: Callable[..., Any]


class State:
    """The state a function could read when it was traced, and torch's modes at that time."""

    def __init__(self, reads: Sequence[Read], may_set_data: bool = False) -> None:
        self.reads = tuple(reads)
        self.may_set_data = may_set_data  # the function may assign `.data` of tensors; detected while it is traced
        for mode in compat.active_modes():
            if not isinstance(mode, torch.device):
                raise UnsupportedTorchMode(mode=mode if isinstance(mode, str) else type(mode).__name__)
        self._torch_unchanged = compat.torch_state_guard()

    def unchanged(self) -> bool:
        """Whether the function would read the same values now."""
        return self._torch_unchanged() and (self._test() or self.first_change() is None)

    def first_change(self) -> Read | None:
        """The first Read that no longer holds. Does not cover torch's modes."""
        return next((each for each in self.reads if not each.holds()), None)

    @cached_property
    def _test(self) -> Callable[[], bool]:
        names = dict(_EXPRESSION_NAMES)
        for k, each in enumerate(self.reads):
            names |= {f"o{k}": each.owner, f"v{k}": each.value}
        tests = [each.test(f"o{k}", f"v{k}") for k, each in enumerate(self.reads)]
        test = eval("lambda: " + (" and ".join(tests) or "True"), names)

        def holds() -> bool:
            try:
                return bool(test())
            except _READ_ERRORS:
                return False

        return holds
