"""What `onepass.fuse` returns: a function that answers from kernels, and never from a stale trace.

A call first compares the state that the function reads besides its arguments, then looks its arguments up. What is in no trace
is traced, by one thread at a time. One trace serves all row counts, with at most seven plans, made when a class of row
counts is first met.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import compat
from ..capture.state import State, TransparentWrapper
from ..capture.state_walk import state_of
from ..capture.trace import capture
from ..errors import BadArgument, NeedsGrad
from ..pipeline import optimize
from .engine import Kernels
from .settings import current_overrides, resolve, validated
from .traces import Call, Trace, Traces, flatten

MAX_STATES = 16  # of one function whose traces are kept: training and evaluation, with and without gradients...

_TRACING = threading.RLock()  # torch traces one function at a time; that function may itself call fused ones


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known of a function while it reads the same."""

    state: State
    signature: inspect.Signature
    traces: Traces = field(default_factory=Traces)


def fuse(fn: Callable[..., Any], *, dynamic: bool | None = None, tune: str | None = None) -> "Fused":
    """`fn` as fused kernels: on a GPU compiled, on CPU tensors interpreted. Forward only.

    `dynamic=False` makes kernels for every size by itself; `dynamic=True` insists that row counts may vary. `tune="on"` times the
    few best plans on the GPU at first use and takes the fastest, `"full"` many; None leaves it to `onepass.settings` and the
    environment.
    """
    return Fused(fn, dynamic, tune)


class Fused(TransparentWrapper):
    """Callable like the function it was made from."""

    def __init__(self, fn: Callable[..., Any], dynamic: bool | None = None, tune: str | None = None) -> None:
        if not callable(fn):
            raise BadArgument(detail=f"onepass.fuse takes a function, not {type(fn).__name__}.")
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.dynamic = fn, dynamic
        self._overrides = {} if tune is None else validated({"tune": tune})
        _signature(fn)
        self._known: tuple[_Known, ...] = ()  # the one used last is first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, tracing and compiling first where no earlier call did."""
        if compat.active_modes() and any(map(compat.is_fake, (*args, *kwargs.values()))):
            return self.fn(*args, **kwargs)  # within the function that is traced now, it is part of that
        known = self._now()
        args = self._positional(known.signature, args, kwargs)
        leaves, key = flatten(args)
        _forward_only(leaves)
        call = known.traces.find(key)
        if call is None or not call.is_valid(known.state):
            call = self._new_call(known, args, key)
        if call.is_empty:
            with torch.no_grad():  # no elements, nothing to fuse: the function's own answer for an empty axis is the right one
                return self.fn(*args)
        trace = call.trace
        tensors = trace.captured.buffers(leaves)
        aligned = trace.outputs.union(name for name, t in tensors.items() if t.data_ptr() % 16 == 0)
        executable = trace.kernels.executable(call.bindings, trace.captured.device, aligned)
        return trace.captured.build_result(executable(tensors, call.bindings), leaves, call.bindings)

    @property
    def _traces(self) -> tuple[Trace, ...]:
        """All of them, for tests."""
        return tuple(trace for known in self._known for trace in known.traces)

    def _positional(self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not kwargs and len(args) == len(signature.parameters):
            return args
        keyword_only = {name for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
        if given := keyword_only & kwargs.keys():
            raise BadArgument(detail=f"keyword-only arguments cannot be given to a fused function ({', '.join(sorted(given))}); "
                                     "make them positional, or bind them with functools.partial.")
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadArgument(detail=f"{getattr(self.fn, '__name__', 'the function')}: {error}.") from None
        bound.apply_defaults()  # keyword-only defaults are the function's own business
        return bound.args

    def _now(self) -> _Known:
        """What is known of the function as it is now."""
        latest = self._known[:1]
        if latest and latest[0].state.unchanged():
            return latest[0]
        with _TRACING:
            known = next((each for each in self._known if each.state.unchanged()), None)
            return self._keep(known or _Known(state_of((self.fn,)), _signature(self.fn)))

    def _keep(self, known: _Known) -> _Known:
        self._known = (known, *(each for each in self._known if each is not known))[:MAX_STATES]
        return known

    def _new_call(self, known: _Known, args: tuple[Any, ...], key: Hashable) -> Call:
        """A call of a new kind: answered by a trace that fits, or by one made now."""
        with _TRACING:
            call = known.traces.find(key) or known.traces.fit(args)
            if call is None or not call.is_valid(known.state):
                captured = capture(self.fn, args, dynamic=self.dynamic, state=known.state)
                if not known.state.unchanged():  # it was traced again, in the state that its first run left
                    known = self._keep(_Known(captured.state, known.signature))
                program = optimize(captured.program)
                kernels = Kernels(program, getattr(self.fn, "__name__", "the function"), resolve(current_overrides(self._overrides)).tune)
                bindings = captured.bind(args)
                assert bindings is not None, "a capture applies to the arguments it was made from"
                call = Call(Trace(captured, program, kernels), bindings)
            known.traces.add(key, args, call)
        return call


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except ValueError:
        raise BadArgument(detail=f"{fn} does not say what arguments it takes; wrap it in a lambda that does.") from None


def _forward_only(leaves: Sequence[Any]) -> None:
    if torch.is_grad_enabled():
        for k, arg in enumerate(leaves):
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                raise NeedsGrad(argument=k)
