"""The trace cache of one function, keyed by everything that a trace is guarded on.

A call's key consists of the types, sizes, strides and values of its arguments. A new key may match an existing trace with symbolic
sizes; such traces are indexed by their static dims. The cache is LRU over keys, and a trace lives as long as a key uses it.
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
from ..capture.function.captured import Captured, Pattern, has_layout, pattern_key
from ..capture.function.state import Identity, State, exact_key
from ..ir.program import Program
from ..ir.size import Bindings
from .engine import Kernels

MAX_CALL_KINDS = 1024  # call keys cached per function and state
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype})  # never pytrees


@dataclass(frozen=True, eq=False)
class Trace:
    """A captured function, its optimized Program and its kernels."""

    captured: Captured
    program: Program
    kernels: Kernels

    @cached_property
    def outputs(self) -> frozenset[str]:
        """The output buffers. They are aligned, because calls allocate them."""
        return frozenset(b.name for b in self.program.buffers if b.role == "output")


@dataclass(frozen=True, eq=False)
class Call:
    """The answer to a call key: a trace, and the values of its symbols."""

    trace: Trace
    bindings: Bindings

    @cached_property
    def is_left_to_torch(self) -> bool:
        """Whether there is nothing to compute: an axis has no elements, or the tensors are shapes alone (device meta)."""
        return self.trace.program.is_empty(self.bindings) or self.trace.captured.device.type == "meta"

    def is_valid(self, state: State) -> bool:
        """Whether the trace is valid in `state`. Also checks the state that functions among the arguments read."""
        own = self.trace.captured.state
        return own is state or own.unchanged()


def flatten(args: tuple[Any, ...]) -> tuple[Sequence[Any], Hashable]:
    """The pytree leaves of arguments, and a key of everything about them that a trace may depend on."""
    if all(type(arg) in _LEAVES for arg in args):
        return args, tuple(map(_key, args))
    leaves, spec = compat.pytree_flatten(args)
    return leaves, (compat.structure_key(spec), *map(_key, leaves))


def _key(leaf: Any) -> Hashable:
    if not isinstance(leaf, torch.Tensor):
        return exact_key(leaf)
    if not has_layout(leaf):
        return Identity(leaf)  # rejected later in any case
    return type(leaf), leaf.dtype, leaf.device, leaf.shape, leaf.stride(), leaf.requires_grad, leaf.is_neg()


class Traces:
    """The traces of one function in one state. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: OrderedDict[Hashable, Call] = OrderedDict()  # most recently used last
        self._uses: Counter[Trace] = Counter()  # number of call keys per trace
        self._by_pattern: dict[Pattern, dict[Hashable, tuple[Trace, ...]]] = {}
        self._fixed: dict[Trace, Hashable] = {}

    def __iter__(self) -> Iterator[Trace]:
        with self._lock:
            return iter(tuple(self._uses))

    def find(self, key: Hashable) -> Call | None:
        """The cached answer for a call key."""
        call = self._calls.get(key)
        if call is not None:
            with self._lock:
                if key in self._calls:
                    self._calls.move_to_end(key)
        return call

    def fit(self, args: tuple[Any, ...]) -> Call | None:
        """Find a trace made for other sizes that fits these arguments."""
        leaves, spec = compat.pytree_flatten(args)
        for pattern, traces in tuple(self._by_pattern.items()):
            for trace in traces.get(pattern_key(pattern, leaves, spec), ()):
                bindings = trace.captured.bind_leaves(leaves, spec)
                if bindings is not None:
                    return Call(trace, bindings)
        return None

    def add(self, key: Hashable, args: tuple[Any, ...], call: Call) -> None:
        """Cache the answer for a call key; evict the least recently used key if there are too many."""
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
