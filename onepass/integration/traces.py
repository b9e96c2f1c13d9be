"""The traces of one function, found by a key of what they are guarded by.

A call is looked up by everything its arguments show: types, sizes, strides, values. A kind of call not met before is answered by
a trace with symbols, if one fits: traces with the same dims fixed are found by the sizes of those dims. The kinds of calls
used latest are kept, and with them their traces.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .. import compat
from ..capture.captured import Captured, Pattern, pattern_key
from ..capture.state import Identity, State, exact_key
from ..ir.program import Program
from ..ir.size import Bindings
from .engine import Kernels

MAX_CALL_KINDS = 1024  # kinds of calls of one function in one state that are kept
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype})  # never trees


@dataclass(frozen=True, eq=False)
class Trace:
    """A capture, its Program and the kernels made for it so far."""

    captured: Captured
    program: Program
    kernels: Kernels

    @cached_property
    def outputs(self) -> frozenset[str]:
        """The buffers that calls allocate, which makes them aligned."""
        return frozenset(b.name for b in self.program.buffers if b.role == "output")


@dataclass(frozen=True, eq=False)
class Call:
    """A kind of call: the trace that answers it, and the values of its symbols."""

    trace: Trace
    bindings: Bindings

    @cached_property
    def is_empty(self) -> bool:
        """Whether an axis has no elements."""
        program = self.trace.program
        return any(program.points((axis.name,), self.bindings) == 0 for axis in program.axes)

    def is_valid(self, state: State) -> bool:
        """Whether it answers while `state` is unchanged: what functions among the arguments read is compared here."""
        own = self.trace.captured.state
        return own is state or own.unchanged()


def flatten(args: tuple[Any, ...]) -> tuple[Sequence[Any], Hashable]:
    """The leaves of some arguments, and a key for everything about them that a trace may depend on."""
    if all(type(arg) in _LEAVES for arg in args):
        return args, tuple(map(_key, args))
    leaves, spec = compat.pytree_flatten(args)
    return leaves, (compat.structure_key(spec), *map(_key, leaves))


def _key(leaf: Any) -> Hashable:
    if not isinstance(leaf, torch.Tensor):
        return exact_key(leaf)
    if leaf.layout is not torch.strided:
        return Identity(leaf)  # is refused in any case
    return type(leaf), leaf.dtype, leaf.device, leaf.shape, leaf.stride(), leaf.requires_grad, leaf.is_neg()


class Traces:
    """The traces of one function in one state. Threads may use it at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: OrderedDict[Hashable, Call] = OrderedDict()  # the one used last is last
        self._uses: Counter[Trace] = Counter()  # by how many kinds of calls
        self._by_pattern: dict[Pattern, dict[Hashable, tuple[Trace, ...]]] = {}
        self._fixed: dict[Trace, Hashable] = {}

    def __iter__(self) -> Iterator[Trace]:
        with self._lock:
            return iter(tuple(self._uses))

    def find(self, key: Hashable) -> Call | None:
        """What answered such a call before."""
        call = self._calls.get(key)
        if call is not None:
            with self._lock:
                if key in self._calls:
                    self._calls.move_to_end(key)
        return call

    def fit(self, args: tuple[Any, ...]) -> Call | None:
        """A call that a trace made for other sizes answers."""
        leaves, spec = compat.pytree_flatten(args)
        for pattern, traces in tuple(self._by_pattern.items()):
            for trace in traces.get(pattern_key(pattern, leaves, spec), ()):
                bindings = trace.captured.bind_leaves(leaves, spec)
                if bindings is not None:
                    return Call(trace, bindings)
        return None

    def add(self, key: Hashable, args: tuple[Any, ...], call: Call) -> None:
        """Remember what answers a kind of call; forget the kind that was not asked for longest."""
        with self._lock:
            self._forget(key)
            self._calls[key] = call
            if not self._uses[call.trace]:
                pattern = call.trace.captured.pattern
                known = self._by_pattern.setdefault(pattern, {})
                fixed = pattern_key(pattern, *compat.pytree_flatten(args))
                known[fixed] = (call.trace, *known.get(fixed, ()))
                self._fixed[call.trace] = fixed
            self._uses[call.trace] += 1
            while len(self._calls) > MAX_CALL_KINDS:
                self._forget(next(iter(self._calls)))

    def _forget(self, key: Hashable) -> None:
        call = self._calls.pop(key, None)
        if call is None:
            return
        self._uses[call.trace] -= 1
        if not self._uses[call.trace]:
            del self._uses[call.trace]
            self._drop(call.trace)

    def _drop(self, trace: Trace) -> None:
        pattern, fixed = trace.captured.pattern, self._fixed.pop(trace)
        known = self._by_pattern[pattern]
        known[fixed] = tuple(each for each in known[fixed] if each is not trace)
        if not known[fixed]:
            del known[fixed]
        if not known:
            del self._by_pattern[pattern]
