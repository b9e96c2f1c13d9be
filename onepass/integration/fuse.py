"""What `onepass.fuse` returns: a function that answers from kernels, and never from a stale trace.

Every call checks every guard of the captures made so far; if none applies, the function is captured anew. One capture
serves all row counts, with at most four plans, made when a class of row counts is first met.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.trace import Captured, capture
from ..errors import BadArgument, NeedsGrad
from ..ir.program import Program
from ..ir.size import Bindings
from ..pipeline import optimise
from .engine import Kernels
from .settings import checked, given, resolve


@dataclass(frozen=True)
class _Trace:
    """A capture, its Program and the kernels made for it so far."""

    captured: Captured
    program: Program
    kernels: Kernels
    outputs: frozenset[str]  # memory allocated for them is always aligned


def fuse(fn: Callable[..., Any], *, dynamic: bool | None = None, tune: str | None = None) -> "Fused":
    """`fn` as fused kernels: on a GPU compiled, on CPU tensors interpreted. Forward only.

    `dynamic=False` makes kernels for every size by itself; `dynamic=True` insists that row counts may vary. `tune="on"` times the
    few best plans on the GPU at first use and takes the fastest, `"full"` many; None leaves it to `onepass.settings` and the
    environment.
    """
    return Fused(fn, dynamic, tune)


class Fused:
    """Callable like the function it was made from."""

    def __init__(self, fn: Callable[..., Any], dynamic: bool | None = None, tune: str | None = None) -> None:
        if not callable(fn):
            raise BadArgument(detail=f"onepass.fuse takes a function, not {type(fn).__name__}.")
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.dynamic = fn, dynamic
        self._said = {} if tune is None else checked({"tune": tune})
        try:
            self._signature = inspect.signature(fn)
        except ValueError:
            raise BadArgument(detail=f"{fn} does not say what arguments it takes; wrap it in a lambda that does.") from None
        self._traces: list[_Trace] = []
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, capturing and compiling first where no earlier call did."""
        args = self._positional(args, kwargs)
        _forward_only(args)
        trace, bindings = self._trace(args)
        if any(trace.program.points((axis.name,), bindings) == 0 for axis in trace.program.axes):
            with torch.no_grad():  # no elements, nothing to fuse: the function's own answer for an empty axis is the right one
                return self.fn(*args)
        tensors = trace.captured.tensors(args)
        aligned = trace.outputs.union(name for name, t in tensors.items() if t.data_ptr() % 16 == 0)
        executable = trace.kernels.executable(bindings, trace.captured.device, aligned)
        return trace.captured.result(executable(tensors, bindings), args)

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not kwargs and len(args) == len(self._signature.parameters):
            return args
        keyword_only = {name for name, p in self._signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
        if given := keyword_only & kwargs.keys():
            raise BadArgument(detail=f"keyword-only arguments cannot be given to a fused function ({', '.join(sorted(given))}); "
                                     "make them positional, or bind them with functools.partial.")
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadArgument(detail=f"{getattr(self.fn, '__name__', 'the function')}: {error}.") from None
        bound.apply_defaults()  # keyword-only defaults are the function's own business
        return bound.args

    def _trace(self, args: tuple[Any, ...]) -> tuple[_Trace, Bindings]:
        for trace in self._traces:
            bindings = trace.captured.bind(args)
            if bindings is not None:
                return trace, bindings
        with self._lock:
            captured = capture(self.fn, args, dynamic=self.dynamic)
            program = optimise(captured.program)
            outputs = frozenset(b.name for b in program.buffers if b.role == "output")
            kernels = Kernels(program, getattr(self.fn, "__name__", "the function"), resolve(given(self._said)).tune)
            trace = _Trace(captured, program, kernels, outputs)
            self._traces.append(trace)
        bindings = captured.bind(args)
        assert bindings is not None, "a capture applies to the arguments it was made from"
        return trace, bindings


def _forward_only(args: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled():
        for k, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                raise NeedsGrad(argument=k)
