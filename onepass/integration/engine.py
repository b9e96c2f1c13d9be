"""The kernel cache: from an optimized Program to executable kernels, each made once and shared by all callers.

One Program serves all sizes. The kernels for a call depend on its Variant (row class, specialized sizes, alignment, device), on
whether 32-bit indices suffice, and on tuning. For each such combination (a KernelKey) kernels are loaded from the store on disk, or
planned and compiled (build.py), once per process.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch

from ..device import Device, device
from ..errors import CompilerNotStarted, NotWarmedUp, ProcessExiting
from ..ir.program import Program
from ..ir.size import Bindings
from ..ir.specialize import symbols_to_specialize
from ..knobs import knobs
from ..pipeline import assemble, variant_of
from ..plan.access import needs_wide_index
from ..runtime.background import DaemonExecutor
from ..runtime.card import local_device
from ..runtime.compiled import Artifact
from ..runtime.counters import Counts, counts
from ..runtime.executable import Executable
from ..runtime.promise import Promise
from ..stages import stage
from . import build
from .build import KernelKey
from .plans import PLANS, without_lines

__all__ = ["Counts", "KernelKey", "Kernels", "counts"]

_LOG = logging.getLogger(__name__)
MAX_PROGRAMS = 256  # Programs whose kernels are cached (LRU)
MAX_KEYS = 1024  # keys cached per Program; the oldest are evicted
MAX_CACHED_SIZES = 4096  # calls (exact sizes, alignment, device) per Program that skip the lookup of their key
SHUTDOWN_SECONDS = 1.0  # how long background compilation may take to stop when the process exits
INTERPRETER_DEVICE = "h200"  # interpreted kernels are planned for this GPU, so that their plans are realistic


class Kernels:
    """The kernels of one optimized Program, compiled on demand. Equal Programs share them. Thread-safe.

    With `tune` "on" or "full", several plans are timed on the GPU, and the fastest is used.
    """

    def __init__(self, program: Program, name: str, tune: str = "off") -> None:
        self.program, self.name, self.tune = program, name, tune
        self._shared = _shared(without_lines(program))

    def executable(self, bindings: Bindings, where: torch.device, aligned: frozenset[str]) -> Executable:
        """The kernels for these sizes on this device: from memory, from the store, or compiled now.

        `aligned` names the inputs and outputs that start at a multiple of 16 bytes.
        """
        return self._shared.executable(bindings, where, aligned, self.name, self.tune)

    def prepare(self, bindings: Bindings, where: torch.device, aligned: frozenset[str]) -> Promise[Artifact]:
        """Start planning and compiling for these sizes in the background. `executable` waits for the result if necessary.

        Worker processes compile the kernels into the on-disk cache. This does not use the GPU, so it can overlap with anything.
        Tuning happens at the first call.
        """
        return self._shared.prepare(bindings, where, aligned)

    @property
    def keys(self) -> tuple[KernelKey, ...]:
        """The keys of the kernels made so far, or being made."""
        return self._shared.keys()


class _ProgramKernels:
    """The kernels that equal Programs share."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._specialize = symbols_to_specialize(program)
        self._lock = threading.Lock()  # guards the three dicts below; not held while compiling
        self._by_call: dict[tuple[object, ...], Executable] = {}
        self._promises: dict[KernelKey, Promise[Artifact]] = {}
        self._executables: dict[tuple[KernelKey, torch.device], Executable] = {}
        self._loading = threading.Lock()

    def executable(
        self, bindings: Bindings, where: torch.device, aligned: frozenset[str], name: str, tune: str = "off"
    ) -> Executable:
        where = _with_index(where)
        call = (*(bindings[symbol] for symbol in self.program.symbols), aligned, where, tune)
        found = self._by_call.get(call)
        if found is None:
            key = self.key(bindings, where, aligned, tune)
            found = self._executable_for(key, where, name)
            if self._executables.get((key, where)) is found:  # not a substitute used during graph capture
                with self._lock:
                    if len(self._by_call) >= MAX_CACHED_SIZES:
                        self._by_call.clear()
                    self._by_call[call] = found
        return found

    @stage("making kernels")
    def _executable_for(self, key: KernelKey, where: torch.device, name: str) -> Executable:
        found = self._executables.get((key, where))
        if found is not None:
            return found
        if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._during_graph_capture(key, where, name)
        made = self._make_once(key, where, name)
        with self._loading:
            found = self._executables.get((key, where))
            if found is None:
                found = assemble(made, where, key.variant.aligned)
                self._executables[key, where] = found
        return found

    def _make_once(self, key: KernelKey, where: torch.device, name: str) -> Artifact:
        """Make the kernels of a key, or wait for the thread that is making them. If that thread is interrupted, make them here."""
        while True:
            own: Promise[Artifact] = Promise()
            try:
                promise = self._claim_promise(key, own)
                if promise is own and key.tune == "off":
                    self._make(key, own, lambda: self._loaded_or_compiled(key, where))
                elif promise is own:
                    self._make(key, own, lambda: self._tune(key, where, name))
            finally:  # Ctrl-C may arrive at any line above
                own.abandon(self._stopped(key))
            try:
                return promise.result()
            except ProcessExiting:
                if not promise.abandoned:
                    raise

    def _loaded_or_compiled(self, key: KernelKey, where: torch.device) -> Artifact:
        return build.load_or_compile(self.program, key, build.compiler_for_card(self.program, key.variant, where))

    def _tune(self, key: KernelKey, where: torch.device, name: str) -> Artifact:
        """Kernels tuned before or now. The default plan's kernels, which are made first, take part."""
        found = build.load_tuned(self.program, key)
        if found is not None:
            return found
        default = self._executable_for(replace(key, tune="off"), where, name).artifact
        return build.tuned(self.program, key, default, where, name, _background(os.getpid()))

    def _during_graph_capture(self, key: KernelKey, where: torch.device, name: str) -> Executable:
        """During CUDA graph capture nothing can be loaded or timed, so only default kernels that are already loaded can be used."""
        found = self._executables.get((replace(key, tune="off"), where))
        if found is None:
            raise NotWarmedUp(function=name)
        _LOG.warning(
            "%s: using the default plan, because plans cannot be timed while a CUDA graph is being captured. "
            "To tune it, call it once before the capture.",
            name,
        )
        return found

    def prepare(self, bindings: Bindings, where: torch.device, aligned: frozenset[str]) -> Promise[Artifact]:
        key = self.key(bindings, _with_index(where), aligned)
        own: Promise[Artifact] = Promise()
        begun = False
        try:
            promise = self._claim_promise(key, own)
            if promise is own:
                compiler = build.compiler_in_worker(self.program, key.variant)
                _background(os.getpid()).start(
                    self._make,
                    key,
                    own,
                    lambda: build.load_or_compile(self.program, key, compiler),
                    dropped=partial(own.abandon, self._stopped(key)),
                )
            begun = True
        except RuntimeError as error:  # no thread could be started
            own.fail(CompilerNotStarted(kernel=self.program.name, device=key.variant.device.name, detail=error))
        finally:
            if not begun:
                own.abandon(self._stopped(key))
        return promise

    @stage("choosing kernels")
    def key(self, bindings: Bindings, where: torch.device, aligned: frozenset[str], tune: str = "off") -> KernelKey:
        """The key of the kernels that a call needs."""
        interpreted = where.type != "cuda"
        variant = variant_of(self.program, bindings, device_facts(where), aligned, self._specialize)
        return KernelKey(variant, needs_wide_index(self.program, bindings), interpreted, "off" if interpreted else tune)

    def keys(self) -> tuple[KernelKey, ...]:
        with self._lock:
            return tuple(key for key, promise in self._promises.items() if not promise.failed)

    def _claim_promise(self, key: KernelKey, own: Promise[Artifact]) -> Promise[Artifact]:
        """The promise of a key. If there is none, or it failed, `own` is registered, and the caller must fulfill it."""
        with self._lock:
            promise = self._promises.get(key)
            if promise is not None and not promise.failed:
                return promise
            self._promises.pop(key, None)
            self._evict_oldest()
            self._promises[key] = own
            return own

    def _evict_oldest(self) -> None:
        """Make room for one more key. Callers that hold kernels of an evicted key keep them."""
        if len(self._promises) < MAX_KEYS:
            return
        done = [key for key, promise in self._promises.items() if promise.done]
        for key in done[: len(self._promises) + 1 - MAX_KEYS]:
            del self._promises[key]
            for known in [each for each in self._executables if each[0] == key]:
                del self._executables[known]
            self._by_call.clear()

    def _make(self, key: KernelKey, promise: Promise[Artifact], make: Callable[[], Artifact]) -> None:
        """Fulfill a claimed promise. After a failure, the next caller tries again."""
        try:
            promise.fulfill(make())
        except Exception as error:
            promise.fail(error)
        except BaseException:
            promise.abandon(self._stopped(key))
            raise

    def _stopped(self, key: KernelKey) -> ProcessExiting:
        """The error for work that was interrupted by Ctrl-C or by the end of the process."""
        return ProcessExiting(kernel=self.program.name, device=key.variant.device.name)


_shared_lock = threading.Lock()


def _shared(program: Program) -> _ProgramKernels:
    with _shared_lock:  # two threads must not create two
        return _shared_cached(program)


@lru_cache(maxsize=MAX_PROGRAMS)
def _shared_cached(program: Program) -> _ProgramKernels:
    return _ProgramKernels(program)


def forget() -> None:
    """Drop all cached kernels and plans. They are made again when needed."""
    with _shared_lock:
        _shared_cached.cache_clear()
    PLANS.clear()


@lru_cache(maxsize=1)
def _background(process_id: int) -> DaemonExecutor:
    """Daemon threads that plan and wait for worker processes. The process id is an argument so that a forked child gets its own."""
    threads = DaemonExecutor(knobs().compile_workers, "onepass")
    atexit.register(threads.close, SHUTDOWN_SECONDS)
    return threads


def _with_index(where: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if where.type == "cuda" and where.index is None else where


def device_facts(where: torch.device) -> Device:
    """The facts that kernels for a device are planned with."""
    if where.type != "cuda":
        return device(INTERPRETER_DEVICE)
    found = local_device(where.index)
    assert found is not None
    return found
