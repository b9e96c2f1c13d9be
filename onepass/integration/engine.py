"""The kernel cache: from an optimized Program to executable kernels, each compiled once and shared by all callers.

One Program serves all sizes. The kernels for a call depend on its class of row counts, the sizes that are specialized, whether
32-bit indices suffice, which tensors are aligned, and the device. Each such combination (a Variant) is loaded from the store on
disk, or planned and compiled, once per process.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial

import torch

from .. import compat
from ..codegen.source import Source
from ..device import Device, device
from ..errors import CompilerNotStarted, CompilerUnavailable, DoesNotFit, NotWarmedUp, OnepassError, ProcessExiting
from ..ir.program import Program
from ..ir.size import Bindings
from ..ir.specialize import substitute, symbols_to_specialize
from ..knobs import knobs
from ..pipeline import CompileKernel, compile, generate, keep_sources, plan_for_interpreter, representative_sizes
from ..plan.access import needs_wide_index
from ..plan.alternatives import alternatives
from ..plan.plan import Plan
from ..runtime import cache as disk
from ..runtime import measured, offline, tune
from ..runtime.background import DaemonExecutor
from ..runtime.binary import Binary
from ..runtime.card import local_device
from ..runtime.compiled import Artifact, Compiled
from ..runtime.counters import Counts, count, counts
from ..runtime.executable import Executable, aligned_of, assemble
from ..runtime.launch import prepare
from ..runtime.promise import Promise
from ..stages import stage

__all__ = ["Counts", "Kernels", "Variant", "counts"]

_LOG = logging.getLogger(__name__)
MAX_PROGRAMS = 256  # Programs whose kernels are cached (LRU)
MAX_VARIANTS = 1024  # variants cached per Program; the oldest are evicted
MAX_CACHED_SIZES = 4096  # calls (exact sizes, alignment, device) per Program that skip the lookup of their Variant
SHUTDOWN_SECONDS = 1.0  # how long background compilation may take to stop when the process exits
INTERPRETER_DEVICE = "h200"  # interpreted kernels are planned for this GPU, so that their plans are realistic


@dataclass(frozen=True)
class Variant:
    """Everything that the kernels of a Program depend on. Sizes are (symbol, value) pairs."""

    fixed: tuple[tuple[str, int], ...]  # sizes specialized in the Program
    sizes: tuple[tuple[str, int], ...]  # sizes planned for: the representative of a class of row counts
    wide: bool  # 64-bit indices
    aligned: frozenset[str]  # inputs and outputs that start at a multiple of 16 bytes
    device: Device
    interpreted: bool
    tune: str = "off"  # whether plans are timed on the GPU: "off", "on" or "full"


class Kernels:
    """The kernels of one optimized Program, compiled on demand. Equal Programs share them. Thread-safe.

    With `tune` "on" or "full", several plans are timed on the GPU, and the fastest is used.
    """

    def __init__(self, program: Program, name: str, tune: str = "off") -> None:
        self.program, self.name, self.tune = program, name, tune
        self._shared = _shared(_without_lines(program))

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
    def variants(self) -> tuple[Variant, ...]:
        """The variants compiled so far, or being compiled."""
        return self._shared.variants()


class _ProgramKernels:
    """The kernels that equal Programs share."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._fixed = tuple(sorted(symbols_to_specialize(program)))
        self._lock = threading.Lock()  # guards the three dicts below; not held while compiling
        self._by_call: dict[tuple[object, ...], Executable] = {}
        self._promises: dict[Variant, Promise[Artifact]] = {}
        self._executables: dict[tuple[Variant, torch.device], Executable] = {}
        self._loading = threading.Lock()

    def executable(self, bindings: Bindings, where: torch.device, aligned: frozenset[str], name: str,
                   tune: str = "off") -> Executable:
        where = _with_index(where)
        key = (*(bindings[symbol] for symbol in self.program.symbols), aligned, where, tune)
        found = self._by_call.get(key)
        if found is None:
            variant = self.variant(bindings, where, aligned, tune)
            found = self._executable_for(variant, where, name)
            if self._executables.get((variant, where)) is found:  # not a substitute used during graph capture
                with self._lock:
                    if len(self._by_call) >= MAX_CACHED_SIZES:
                        self._by_call.clear()
                    self._by_call[key] = found
        return found

    @stage("making kernels")
    def _executable_for(self, variant: Variant, where: torch.device, name: str) -> Executable:
        found = self._executables.get((variant, where))
        if found is not None:
            return found
        if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._during_graph_capture(variant, where, name)
        made = self._make_once(variant, where, name)
        with self._loading:
            found = self._executables.get((variant, where))
            if found is None:
                found = assemble(made, where, variant.aligned)
                self._executables[variant, where] = found
        return found

    def _make_once(self, variant: Variant, where: torch.device, name: str) -> Artifact:
        """Compile a Variant, or wait for the thread that is compiling it. If that thread is interrupted, compile here."""
        while True:
            own: Promise[Artifact] = Promise()
            try:
                promise = self._claim_promise(variant, own)
                if promise is own and variant.tune == "off":
                    self._make(variant, own, lambda: self._loaded_or_compiled(variant, where))
                elif promise is own:
                    self._make(variant, own, lambda: self._tune(variant, where, name))
            finally:  # Ctrl-C may arrive at any line above
                own.abandon(self._stopped(variant))
            try:
                return promise.result()
            except ProcessExiting:
                if not promise.abandoned:
                    raise

    def _loaded_or_compiled(self, variant: Variant, where: torch.device) -> Artifact:
        return _load_or_compile(self.program, variant, self._compiler_for_card(where, variant))

    def _during_graph_capture(self, variant: Variant, where: torch.device, name: str) -> Executable:
        """During CUDA graph capture nothing can be loaded or timed, so only default kernels that are already loaded can be used."""
        found = self._executables.get((replace(variant, tune="off"), where))
        if found is None:
            raise NotWarmedUp(function=name)
        _LOG.warning("%s: using the default plan, because plans cannot be timed while a CUDA graph is being captured. "
                     "To tune it, call it once before the capture.", name)
        return found

    def prepare(self, bindings: Bindings, where: torch.device, aligned: frozenset[str]) -> Promise[Artifact]:
        variant = self.variant(bindings, _with_index(where), aligned)
        own: Promise[Artifact] = Promise()
        begun = False
        try:
            promise = self._claim_promise(variant, own)
            if promise is own:
                compiler = self._compiler_in_worker(variant)
                _background(os.getpid()).start(self._make, variant, own, lambda: _load_or_compile(self.program, variant, compiler),
                                               dropped=partial(own.abandon, self._stopped(variant)))
            begun = True
        except RuntimeError as error:  # no thread could be started
            own.fail(CompilerNotStarted(kernel=self.program.name, device=variant.device.name, detail=error))
        finally:
            if not begun:
                own.abandon(self._stopped(variant))
        return promise

    @stage("choosing kernels")
    def variant(self, bindings: Bindings, where: torch.device, aligned: frozenset[str], tune: str = "off") -> Variant:
        """The Variant that a call needs."""
        facts, interpreted = _device_facts(where), where.type != "cuda"
        fixed = {name: bindings[name] for name in self._fixed}
        free = {name: bindings[name] for name in self.program.symbols if name not in fixed}
        sizes = representative_sizes(substitute(self.program, fixed), free, facts)
        return Variant(tuple(fixed.items()), tuple(sizes.items()), needs_wide_index(self.program, bindings),
                       aligned & self._buffer_names, facts, interpreted, "off" if interpreted else tune)

    def variants(self) -> tuple[Variant, ...]:
        with self._lock:
            return tuple(variant for variant, promise in self._promises.items() if not promise.failed)

    @property
    def _buffer_names(self) -> frozenset[str]:
        return frozenset(self.program.buffer)

    def _claim_promise(self, variant: Variant, own: Promise[Artifact]) -> Promise[Artifact]:
        """The promise of a Variant. If there is none, or it failed, `own` is registered, and the caller must fulfill it."""
        with self._lock:
            promise = self._promises.get(variant)
            if promise is not None and not promise.failed:
                return promise
            self._promises.pop(variant, None)
            self._evict_oldest()
            self._promises[variant] = own
            return own

    def _evict_oldest(self) -> None:
        """Make room for one more Variant. Callers that hold kernels of an evicted Variant keep them."""
        if len(self._promises) < MAX_VARIANTS:
            return
        done = [variant for variant, promise in self._promises.items() if promise.done]
        for variant in done[:len(self._promises) + 1 - MAX_VARIANTS]:
            del self._promises[variant]
            for known in [each for each in self._executables if each[0] == variant]:
                del self._executables[known]
            self._by_call.clear()

    def _make(self, variant: Variant, promise: Promise[Artifact], make: Callable[[], Artifact]) -> None:
        """Fulfill a claimed promise. After a failure, the next caller tries again."""
        try:
            promise.fulfill(make())
        except Exception as error:
            promise.fail(error)
        except BaseException:
            promise.abandon(self._stopped(variant))
            raise

    def _stopped(self, variant: Variant) -> ProcessExiting:
        """The error for work that was interrupted by Ctrl-C or by the end of the process."""
        return ProcessExiting(kernel=self.program.name, device=variant.device.name)

    def _tune(self, variant: Variant, where: torch.device, name: str) -> Artifact:
        """The fastest of several plans, from the store or timed now. Falls back to the default plan if timing is impossible."""
        store = disk.store()
        for level in tune.stored_levels(variant.tune):
            made = store.load(_key(self.program, replace(variant, tune=level))) if store else None
            if made is not None:
                keep_sources(made.sources)
                return made
        default = self._executable_for(replace(variant, tune="off"), where, name).artifact
        uncompiled: list[CompilerUnavailable] = []
        with tune.progress(name) as doing:
            try:
                made = self._time_plans(default, variant, where, doing, uncompiled)
            except (torch.OutOfMemoryError, OnepassError) as error:
                why = "not enough free GPU memory" if isinstance(error, torch.OutOfMemoryError) else error
                _LOG.warning("%s: plans cannot be timed (%s); using the default plan", name, why)
                return default
        _LOG.info("%s: %s", name, tune.describe_outcome(made))
        if uncompiled:
            _LOG.warning("%s: %d plans could not be compiled and timed (%s); the fastest of the others is used, but not stored",
                         name, len(uncompiled), uncompiled[0])
        elif store:
            store.save(_key(self.program, variant), made)
        return made

    def _time_plans(self, default: Artifact, variant: Variant, where: torch.device, doing: Callable[[str], None],
               uncompiled: list[CompilerUnavailable]) -> Artifact:
        doing(f"compiling {tune.PLANS_PER_LEVEL[variant.tune] - 1} plans")
        others = self._alternatives(default, variant, uncompiled)
        doing(f"timing {len(others) + 1} plans")
        program, sizes = _specialized(self.program, variant), dict(variant.sizes)
        with tune.TIMING_LOCK:
            made, timed = tune.choose(default, others, tune.DeviceTimer(program, sizes, where, variant.aligned))
        digest = hashlib.sha256(f"{program} {sizes}".encode()).hexdigest()[:32]
        seen = measured.observations_from(digest, [(m, t.us) for m, t in timed], variant.device)
        measured.observe(measured.card_of(torch.cuda.get_device_properties(where)), seen)
        return made

    def _alternatives(self, default: Artifact, variant: Variant, uncompiled: list[CompilerUnavailable]) -> tuple[Artifact, ...]:
        """Alternatives to the default plan, compiled by worker processes into the on-disk cache.

        `uncompiled` collects the errors of plans that failed for lack of a working compiler, not because of the plan itself.
        """
        program, sizes, compile_kernel = _specialized(self.program, variant), dict(variant.sizes), self._compiler_in_worker(variant)

        def compiled(plan: Plan) -> Artifact | None:
            try:
                sources = generate(plan, variant.wide)
                binaries = tuple(map(compile_kernel, sources))
            except CompilerUnavailable as error:
                uncompiled.append(error)
                return None
            except OnepassError as error:  # only one of many candidates is lost
                _LOG.debug("a plan of %s is not timed", program.name, exc_info=error)
                return None
            unusable = any(b.spills_in_loop or b.smem_bytes > variant.device.smem_per_cta for b in binaries)
            return None if unusable else Compiled(plan, sources, binaries).artifact

        plans = alternatives(program, sizes, variant.device, tune.PLANS_PER_LEVEL[variant.tune])
        found = _background(os.getpid()).map(compiled, plans)
        return tune.comparable(default, [made for made in found if made is not None])

    def _compiler_for_card(self, where: torch.device, variant: Variant) -> CompileKernel:
        """Compile in this process and load on the GPU."""
        compile_in_worker, outputs = self._compiler_in_worker(variant), self._outputs

        def compile_kernel(source: Source) -> Binary:
            try:
                return prepare(source, where.index, aligned_of(source, variant.aligned, outputs)).binary
            except DoesNotFit:  # loading does not tell how much too big it is; a worker that does not load it can
                return compile_in_worker(source)

        return compile_kernel

    def _compiler_in_worker(self, variant: Variant) -> CompileKernel:
        """Compile in a worker process, without a GPU."""
        outputs = self._outputs
        return lambda source: offline.compile(source, variant.device, aligned_of(source, variant.aligned, outputs))

    @property
    def _outputs(self) -> frozenset[str]:
        return frozenset(b.name for b in self.program.buffers if b.role == "output")


def _load_or_compile(program: Program, variant: Variant, compile_kernel: CompileKernel) -> Artifact:
    """Load the kernels of a Variant from the store, or plan and compile them."""
    store, key = disk.store(), _key(program, variant)
    made = store.load(key) if store else None
    if made is not None:
        keep_sources(made.sources)
        return made
    count(plans=1)
    fixed, sizes = _specialized(program, variant), dict(variant.sizes)
    if variant.interpreted:
        made = plan_for_interpreter(fixed, sizes, variant.device, variant.wide).artifact
    else:
        made = compile(fixed, sizes, variant.device, compile_kernel, variant.wide).artifact
    if store:
        store.save(key, made)
    return made


def _specialized(program: Program, variant: Variant) -> Program:
    """Apply a Variant to a Program: specialize its sizes, and mark unaligned buffers, which TMA cannot read."""
    fixed = substitute(program, dict(variant.fixed))
    return replace(fixed, buffers=tuple(replace(b, aligned=b.name in variant.aligned) for b in fixed.buffers))


def _key(program: Program, variant: Variant) -> str:
    return disk.key(_key_fields(program, variant))


def _key_fields(program: Program, variant: Variant) -> dict[str, object]:
    """The fields of a store entry's cache key, besides versions and settings.

    A tuned entry depends on the identity of the GPU only, not on the performance figures that planning assumes for it.
    """
    facts = asdict(variant) | {"program": str(program), "aligned": sorted(variant.aligned)}
    if variant.tune != "off":
        card = variant.device
        facts["device"] = {"name": card.name, "title": card.title, "capability": card.capability, "sms": card.sms}
    if not variant.interpreted:
        facts["toolchain"] = compat.triton_toolchain_key(variant.device.target)
    return facts


_shared_lock = threading.Lock()


def _shared(program: Program) -> _ProgramKernels:
    with _shared_lock:  # two threads must not create two
        return _shared_cached(program)


@lru_cache(maxsize=MAX_PROGRAMS)
def _shared_cached(program: Program) -> _ProgramKernels:
    return _ProgramKernels(program)


def _without_lines(program: Program) -> Program:
    """The Program without source lines, because equal Programs may come from different lines."""
    return replace(program, nodes=tuple(replace(node, src="") for node in program.nodes))


@lru_cache(maxsize=1)
def _background(process_id: int) -> DaemonExecutor:
    """Daemon threads that plan and wait for worker processes. The process id is an argument so that a forked child gets its own."""
    threads = DaemonExecutor(knobs().compile_workers, "onepass")
    atexit.register(threads.close, SHUTDOWN_SECONDS)
    return threads


def _with_index(where: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if where.type == "cuda" and where.index is None else where


def _device_facts(where: torch.device) -> Device:
    if where.type != "cuda":
        return device(INTERPRETER_DEVICE)
    found = local_device(where.index)
    assert found is not None
    return found
