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
from ..codegen.source import Source
from ..device import Device, device
from ..errors import BadArgument, DoesNotFit, NeedsGrad, NotReady
from ..ir.fix import symbols_to_fix
from ..ir.program import Program
from ..ir.size import Bindings
from ..pipeline import compile, interpretable, optimise, representative, row_class, specialise
from ..plan.access import needs_wide_index
from ..runtime import offline
from ..runtime.binary import Binary
from ..runtime.card import present
from ..runtime.executable import Executable, aligned_of, assemble
from ..runtime.launch import prepare

MOST_REMEMBERED = 4096  # sizes whose index width is remembered
CPU_FACTS = "h200"  # interpreted kernels are planned for this device: plans are the same as on a card


@dataclass(frozen=True)
class _Trace:
    """A capture and its Program, ready to plan."""

    captured: Captured
    program: Program
    fixed: tuple[str, ...]  # symbols whose every value gets kernels of its own


def fuse(fn: Callable[..., Any], *, dynamic: bool | None = None) -> "Fused":
    """`fn` as fused kernels: on a GPU compiled, on CPU tensors interpreted. Forward only.

    `dynamic=False` makes kernels for every size by itself; `dynamic=True` insists that row counts may vary.
    """
    return Fused(fn, dynamic)


class Fused:
    """Callable like the function it was made from."""

    def __init__(self, fn: Callable[..., Any], dynamic: bool | None = None) -> None:
        if not callable(fn):
            raise BadArgument(detail=f"onepass.fuse takes a function, not {type(fn).__name__}.")
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.dynamic = fn, dynamic
        try:
            self._signature = inspect.signature(fn)
        except ValueError:
            raise BadArgument(detail=f"{fn} does not say what arguments it takes; wrap it in a lambda that does.") from None
        self._traces: list[_Trace] = []
        self._executables: dict[tuple[Any, ...], Executable] = {}
        self._wide: dict[tuple[int, ...], bool] = {}
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
        executable = self._executable(trace, bindings, tensors)
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
            trace = _Trace(captured, program, tuple(sorted(symbols_to_fix(program))))
            self._traces.append(trace)
        bindings = captured.bind(args)
        assert bindings is not None, "a capture applies to the arguments it was made from"
        return trace, bindings

    def _counts_wide(self, trace: _Trace, bindings: Bindings) -> bool:
        """Whether 32 bits are too few to count elements; remembered, because the question is asked on every call."""
        key = (id(trace), *bindings.values())
        if key not in self._wide:
            if len(self._wide) > MOST_REMEMBERED:
                self._wide.clear()
            self._wide[key] = needs_wide_index(trace.program, bindings)
        return self._wide[key]

    def _executable(self, trace: _Trace, bindings: Bindings, tensors: dict[str, torch.Tensor]) -> Executable:
        """The kernels for these sizes, alignments and device: from memory, or made now."""
        where = trace.captured.device
        facts = _facts(where)
        aligned = frozenset(name for name, t in tensors.items() if t.data_ptr() % 16 == 0)
        wide = self._counts_wide(trace, bindings)
        fixed = tuple(bindings[name] for name in trace.fixed)
        free = {name: size for name, size in bindings.items() if name not in trace.fixed}
        key = (id(trace), fixed, row_class(free, facts), wide, aligned, where)
        found = self._executables.get(key)
        if found is not None:
            return found
        if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotReady(function=getattr(self.fn, "__name__", "the function"))
        with self._lock:
            if key not in self._executables:
                self._executables[key] = _build(trace.program, bindings, facts, where, aligned, wide)
            return self._executables[key]


def _build(program: Program, bindings: Bindings, facts: Device, where: torch.device, aligned: frozenset[str],
           wide: bool) -> Executable:
    program, free = specialise(program, bindings)
    sizes = representative(program, free, facts)
    if where.type == "cpu":
        return assemble(interpretable(program, sizes, facts, wide), where, aligned)
    index = where.index if where.index is not None else torch.cuda.current_device()

    def measure(source: Source) -> Binary:
        try:
            return prepare(source, index, aligned_of(source, aligned)).binary
        except DoesNotFit:  # the card does not say by how much; a worker that need not load it does
            return offline.compile(source, facts, aligned_of(source, aligned))

    return assemble(compile(program, sizes, facts, measure, wide), where, aligned)


def _facts(where: torch.device) -> Device:
    if where.type == "cuda":
        found = present(where.index or 0)
        assert found is not None
        return found
    return device(CPU_FACTS)


def _forward_only(args: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled():
        for k, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                raise NeedsGrad(argument=k)
