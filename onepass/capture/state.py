"""Python state that a function can read besides its arguments, as it was when the function was traced.

A State is a list of Reads, each with the value it gave. `unchanged` compares them all by identity in one generated
expression, some 50 ns each; only where that fails are values compared (3.0 stored again is still 3.0).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, MethodType, NoneType
from typing import Any

import torch

from .. import compat
from ..errors import UnsupportedTorchMode

# Values that cannot change while they are the same object.
ATOMS = (bool, int, float, complex, str, bytes, NoneType, type(...), type(NotImplemented), range, torch.dtype, torch.device,
         torch.memory_format, torch.layout)
ABSENT = type("Absent", (), {"__repr__": lambda self: "nothing"})()


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a function may read of a tensor that is no argument without reading its values."""

    kind: type
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def snapshot(value: Any) -> Any:
    """What to remember of a value: itself, but of a tensor its facts, since memory must not be kept alive for a comparison."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or vars(value):
        return value
    return TensorFacts(type(value), tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, value.device,
                       value.requires_grad)


def same_value(now: Any, then: Any) -> bool:
    """Whether a value is what it was: the same object, or a plain value with the same type and the same bits."""
    return now is then or type(now) is type(then) and exact_key(now) == exact_key(then)


def exact_key(value: Any) -> Any:
    """A key that differs where plain values do: 0.0 from -0.0, True from 1. NaN equals itself. Other objects: who they are."""
    match value:
        case float():
            return float, type(value), value.hex()
        case complex():
            return complex, exact_key(value.real), exact_key(value.imag)
        case tuple():
            return type(value), tuple(map(exact_key, value))
        case slice():
            return slice, exact_key(value.start), exact_key(value.stop), exact_key(value.step)
        case TensorFacts():
            return value
        case _ if type(value) in ATOMS:
            return type(value), value
        case MethodType() | BuiltinFunctionType():
            return value  # equal if bound to the same object, though each look-up makes a new one
        case _:
            return Identity(value)


@dataclass(frozen=True, eq=False, slots=True)
class Identity:
    """An object as a key: equal to itself alone."""

    of: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


def cell_content(cell: CellType) -> Any:
    """What a closure variable holds, ABSENT before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """One thing a function can read: an expression over `{o}`, its owner, and what it gave."""

    where: str  # as a user would write it
    owner: Any
    expression: str
    value: Any  # tokens, a tuple of them where the expression gives several values
    kind: str = "one"  # "one" | "each": several values | "fresh": one that is made anew by every reading

    def holds(self) -> bool:
        """Whether reading gives what it gave."""
        try:
            now = evaluate(self.owner, self.expression)
        except _GONE:
            return False
        if self.kind != "each":
            return same_value(snapshot(now), self.value)
        return len(now) == len(self.value) and all(map(same_value, map(snapshot, now), self.value))

    def test(self, owner: str, value: str) -> str:
        """A fast test over names for owner and value: where it succeeds, `holds` does too."""
        given = self.expression.replace("{o}", owner)
        if self.kind != "each":
            by_identity = self.kind == "one" and not isinstance(self.value, TensorFacts)
            return f"{given} is {value}" if by_identity else f"same_value(snapshot({given}), {value})"
        length = f"len({given}) == {len(self.value)}"
        if any(isinstance(v, TensorFacts) for v in self.value):
            return f"{length} and all(map(same_value, map(snapshot, {given}), {value}))"
        return f"{length} and all(map(is_, {given}, {value}))" if self.value else length


def make_read(where: str, owner: Any, expression: str, kind: str = "one") -> tuple[Read, Any]:
    """A Read of what is there now, and that itself."""
    found = evaluate(owner, expression)
    if kind != "each":
        return Read(where, owner, expression, snapshot(found), kind), found
    values = tuple(found)
    return Read(where, owner, expression, tuple(map(snapshot, values)), kind), values


def call_or_error_type(function: Callable[[], Any]) -> Any:
    """What a function gives, or the type of its complaint."""
    try:
        return function()
    except Exception as error:
        return type(error)


_USED = {"ABSENT": ABSENT, "call_or_error_type": call_or_error_type, "autocast_dtype": torch.get_autocast_dtype, "cell_content": cell_content, "deque": deque,
         "is_": is_, "same_value": same_value, "snapshot": snapshot}
_GONE = (AttributeError, ValueError, TypeError)  # raised by reads of what is no longer there


def evaluate(owner: Any, expression: str) -> Any:
    """What an expression over `{o}` gives now."""
    return eval(_compiled(expression), {**_USED, "o": owner})


@lru_cache(maxsize=1024)
def _compiled(expression: str) -> CodeType:
    return compile(expression.replace("{o}", "o"), "<read>", "eval")


class TransparentWrapper:
    """Base of callables that do what the function `fn` does, and read no other state."""

    fn: Callable[..., Any]


class State:
    """What a function could read when it was traced, and the modes torch was in."""

    def __init__(self, reads: Sequence[Read], may_set_data: bool = False) -> None:
        self.reads = tuple(reads)
        self.may_set_data = may_set_data  # of tensors, which must be looked out for when the function runs
        for mode in compat.active_modes():
            if not isinstance(mode, torch.device):
                raise UnsupportedTorchMode(mode=type(mode).__name__)
        self._torch_unchanged = compat.torch_state_guard()

    def unchanged(self) -> bool:
        """Whether the function would read the same now."""
        return self._torch_unchanged() and (self._test() or self.first_change() is None)

    def first_change(self) -> Read | None:
        """The first thing that is no longer what it was; torch's own modes apart."""
        return next((each for each in self.reads if not each.holds()), None)

    @cached_property
    def _test(self) -> Callable[[], bool]:
        names = dict(_USED)
        for k, each in enumerate(self.reads):
            names |= {f"o{k}": each.owner, f"v{k}": each.value}
        tests = [each.test(f"o{k}", f"v{k}") for k, each in enumerate(self.reads)]
        test = eval("lambda: " + (" and ".join(tests) or "True"), names)

        def holds() -> bool:
            try:
                return bool(test())
            except _GONE:
                return False

        return holds
