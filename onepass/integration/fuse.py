"""`onepass.fuse`: wraps a function so that calls run fused kernels, and never use a stale trace.

A call first checks that the state which the function reads besides its arguments is unchanged, then looks up a trace for its
arguments. Without a matching trace, the function is traced, by one thread at a time. One trace serves all row counts, with at most
seven plans. Each plan is made when its class of row counts first occurs.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, overload

import torch

from .. import compat
from ..capture.function.known_functions import is_torch_in_c
from ..capture.function.state import State, TransparentWrapper
from ..capture.function.state_walk import state_of
from ..errors import BadArgument, NeedsGrad, UnsupportedTorchMode
from ..pipeline import capture, optimize
from .engine import Kernels
from .settings import Settings, resolved, validated
from .traces import Call, Trace, Traces, flatten

MAX_STATES = 16  # states of one function whose traces are kept: train and eval, with and without gradients...

_TRACING = threading.RLock()  # torch traces one function at a time; reentrant, because a traced function may call fused functions


@dataclass(frozen=True, eq=False)
class _Known:
    """The traces of a function for one state of what it reads besides its arguments."""

    state: State
    signature: inspect.Signature
    traces: Traces = field(default_factory=Traces)

    @functools.cached_property
    def arity(self) -> int | None:
        """How many arguments fill the signature, if all of them have a position."""
        kinds = {p.kind for p in self.signature.parameters.values()}
        parameter = inspect.Parameter
        fixed = kinds <= {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
        return len(self.signature.parameters) if fixed else None


@overload
def fuse(fn: Callable[..., Any], *, dynamic: bool | None = None, tune: str | None = None) -> "Fused": ...
@overload
def fuse(*, dynamic: bool | None = None, tune: str | None = None) -> Callable[[Callable[..., Any]], "Fused"]: ...


def fuse(
    fn: Callable[..., Any] | None = None, *, dynamic: bool | None = None, tune: str | None = None
) -> "Fused | Callable[[Callable[..., Any]], Fused]":
    """Run `fn` as fused kernels: compiled on a GPU, interpreted on CPU tensors. Forward only.

    `dynamic=False` makes separate kernels for every size; `dynamic=True` requires that row counts may vary. `tune="on"` times the
    few best plans on the GPU at first use and takes the fastest; `tune="full"` times many. None leaves the choice to
    `onepass.settings` and the environment. Without a function, the result is a decorator with these options.
    """
    if dynamic not in (None, True, False):
        raise BadArgument(detail=f"dynamic is True, False or None, not {dynamic!r}.")
    given = {} if tune is None else validated({"tune": tune})
    if fn is None:
        return functools.partial(Fused, dynamic=dynamic, tune=given.get("tune"))
    return Fused(fn, dynamic, tune)


class Fused(TransparentWrapper):
    """A fused function, with the signature of the original."""

    def __init__(self, fn: Callable[..., Any], dynamic: bool | None = None, tune: str | None = None) -> None:
        if not callable(fn):
            raise BadArgument(detail=f"onepass.fuse takes a function, not {type(fn).__name__}.")
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.dynamic = fn, dynamic
        self._given = {} if tune is None else validated({"tune": tune})
        _signature(fn)
        self._named: dict[tuple[str, ...], Fused] = {}
        self._known: tuple[_Known, ...] = ()  # most recently used first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result. Traces and compiles first if no earlier call did."""
        if compat.is_recorded((*args, *kwargs.values())):
            return self.fn(*args, **kwargs)  # inside a function that is being traced: inline
        known = self._now()
        if kwargs or len(args) != known.arity:
            names, args = self._positional(known.signature, args, kwargs)
            if names:
                return self._by_name(names)(*args)
        leaves, key = flatten(args)
        _forward_only(leaves)
        call = known.traces.find(key)
        if call is None or not call.is_valid(known.state):
            call = self._new_call(known, args, key, resolved(self._given))
        if call.is_left_to_torch:
            with torch.no_grad():
                return self.fn(*args)
        trace = call.trace
        tensors = trace.captured.buffers(leaves)
        addresses = {name: t.data_ptr() for name, t in tensors.items()}
        if not all(addresses.values()):
            _refuse_without_memory(tensors)
        aligned = trace.outputs.union(name for name, address in addresses.items() if address % 16 == 0)
        executable = trace.kernels.executable(call.bindings, trace.captured.device, aligned)
        return trace.captured.build_result(executable(tensors, call.bindings), leaves, call.bindings)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Copies and pickles have the function, and trace it anew. A decorated function is found by its name."""
        path = (getattr(self, "__module__", ""), *getattr(self, "__qualname__", "").split("."))
        found: Any = functools.reduce(lambda owner, name: getattr(owner, name, None), path[1:], sys.modules.get(path[0]))
        return ".".join(path[1:]) if found is self else (Fused, (self.fn, self.dynamic, self._given.get("tune")))

    @property
    def _traces(self) -> tuple[Trace, ...]:
        """All traces, for tests."""
        return tuple(trace for known in self._known for trace in known.traces)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        """The method of an instance, if a class has the fused function as an attribute. The instance keeps it with its traces."""
        if instance is None:
            return self
        if torch.compiler.is_compiling():
            return functools.partial(self.fn, instance)  # which Dynamo knows better than a MethodType
        kept, key = getattr(instance, "__dict__", None), f"fused {getattr(self, '__qualname__', self.fn)}"
        method = kept.get(key) if isinstance(kept, dict) else None
        if method is None or getattr(method.fn, "__self__", None) is not instance:  # copies of an instance have the original's
            method = Fused(MethodType(self.fn, instance), self.dynamic, self._given.get("tune"))
            if isinstance(kept, dict):
                kept[key] = method
        return method

    def resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function that a call traces, and its arguments, all by position."""
        names, args = self._positional(_signature(self.fn), args, kwargs)
        return self._by_name(names).fn if names else self.fn, args

    def _positional(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """The names of arguments that have no position, and all arguments: by position, and then those of the names."""
        if signature is _UNKNOWN_NAMES:
            return tuple(kwargs), (*args, *kwargs.values())
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadArgument(detail=f"{getattr(self.fn, '__name__', 'the function')}: {error}.") from None
        bound.apply_defaults()
        positions = {name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
        names = tuple(name for name in kwargs if name not in positions)
        return names, (*bound.args, *(kwargs[name] for name in names))

    def _by_name(self, names: tuple[str, ...]) -> "Fused":
        """The function with its last arguments given by name: they have no position, or none that torch's C functions expose."""
        if names not in self._named:
            fn, count = self.fn, len(names)

            def by_name(*args: Any) -> Any:
                return fn(*args[:-count], **dict(zip(names, args[-count:])))

            by_name.__name__ = getattr(fn, "__name__", type(fn).__name__)
            self._named[names] = Fused(by_name, self.dynamic, self._given.get("tune"))
        return self._named[names]

    def _now(self) -> _Known:
        """The traces for the function's current state."""
        latest = self._known[:1]
        if latest and latest[0].state.unchanged():
            return latest[0]
        compat.warm_up_tracing()  # before the lock: its imports may run code that calls fused functions on another thread
        with _TRACING:
            known = next((each for each in self._known if each.state.unchanged()), None)
            return self._keep(known or _Known(state_of((self.fn,)), _signature(self.fn)))

    def _keep(self, known: _Known) -> _Known:
        self._known = (known, *(each for each in self._known if each is not known))[:MAX_STATES]
        return known

    def _new_call(self, known: _Known, args: tuple[Any, ...], key: Hashable, settings: Settings) -> Call:
        """Handle a new kind of call: use a trace that fits, or make one with these settings."""
        with _TRACING:
            call = known.traces.find(key) or known.traces.fit(args)
            if call is None or not call.is_valid(known.state):
                captured = capture(self.fn, args, dynamic=self.dynamic, state=known.state)
                if not known.state.unchanged():  # the first run changed the state, and it was traced again in the new state
                    known = self._keep(_Known(captured.state, known.signature))
                program = optimize(captured.program)
                kernels = Kernels(program, getattr(self.fn, "__name__", "the function"), settings.tune)
                bindings = captured.bind(args)
                assert bindings is not None, "a capture applies to the arguments it was made from"
                call = Call(Trace(captured, program, kernels), bindings)
            known.traces.add(key, args, call)
        return call


_UNKNOWN_NAMES = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except ValueError:
        if is_torch_in_c(fn):
            return _UNKNOWN_NAMES
        raise BadArgument(detail=f"{fn} has no signature; wrap it in a lambda or function that has one.") from None


def _forward_only(leaves: Sequence[Any]) -> None:
    if torch.is_grad_enabled():
        for k, arg in enumerate(leaves):
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                raise NeedsGrad(argument=k)
    if compat.has_tangent(leaves):
        raise UnsupportedTorchMode(mode="torch.autograd.forward_ad.dual_level")


def _refuse_without_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse elements without an address. An empty tensor needs none."""
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.data_ptr():
            raise BadArgument(detail=f"Argument {name} has no memory: its storage was freed, or it only stands for zeros.")
