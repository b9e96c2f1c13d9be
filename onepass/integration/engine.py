"""From an optimised Program to kernels that run: which sizes share kernels, and what was made before.

One Program serves every size. What a call gets depends on its class of row counts, the sizes a kernel had better know,
whether 32 bits can count its elements, which tensors are aligned, and the device; each such Variant is planned and compiled
once in a process, whoever asks, and is looked up in the store before that.
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
from ..ir.specialize import substitute, symbols_to_specialize
from ..ir.program import Program
from ..ir.size import Bindings
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
MAX_PROGRAMS = 256  # whose kernels are kept though nobody holds them, the latest
MAX_VARIANTS = 1024  # of one Program whose kernels are kept, the latest made
MAX_CACHED_SIZES = 4096  # sets of sizes whose kernels are found without asking which Variant they belong to
LAST_SECONDS = 1.0  # for what is planned in the background to end in, when the process does
INTERPRETER_DEVICE = "h200"  # interpreted kernels are planned for this device: plans are the same as on a card


@dataclass(frozen=True)
class Variant:
    """All that decides the kernels of a Program. Sizes are pairs of symbol and number."""

    fixed: tuple[tuple[str, int], ...]  # put into the Program
    sizes: tuple[tuple[str, int], ...]  # planned for: the representative of a class of row counts
    wide: bool  # elements are counted in 64 bits
    aligned: frozenset[str]  # inputs and outputs that start on 16 bytes
    device: Device
    interpreted: bool
    tune: str = "off"  # whether plans are timed: "off", "on" or "full"


class Kernels:
    """All kernels of one optimised Program, made when first needed. Equal Programs share them; threads may, too.

    With `tune` "on" or "full", what is made for a card is the fastest of several plans that are timed there.
    """

    def __init__(self, program: Program, name: str, tune: str = "off") -> None:
        self.program, self.name, self.tune = program, name, tune
        self._shared = _shared(_without_lines(program))

    def executable(self, bindings: Bindings, where: torch.device, aligned: frozenset[str]) -> Executable:
        """The kernels for these sizes on this device: from memory, from the store, or made now.

        `aligned` names the inputs and outputs that start on 16 bytes.
        """
        return self._shared.executable(bindings, where, aligned, self.name, self.tune)

    def prepare(self, bindings: Bindings, where: torch.device, aligned: frozenset[str]) -> Promise[Artifact]:
        """Begin to plan and compile for these sizes, in the background; `executable` waits for it where it must.

        Kernels are compiled by worker processes into the cache they are loaded from later. Nothing is done on the card, so this
        may run beside anything; what is to be tuned is timed at its first call.
        """
        return self._shared.prepare(bindings, where, aligned)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What there are kernels for, by now."""
        return self._shared.variants()


class _Shared:
    """What equal Programs share."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._fixed = tuple(sorted(symbols_to_specialize(program)))
        self._lock = threading.Lock()  # of the three below; never held while something is made
        self._by_call: dict[tuple[object, ...], Executable] = {}
        self._made: dict[Variant, Promise[Artifact]] = {}
        self._executables: dict[tuple[Variant, torch.device], Executable] = {}
        self._loading = threading.Lock()

    def executable(self, bindings: Bindings, where: torch.device, aligned: frozenset[str], name: str,
                   tune: str = "off") -> Executable:
        where = _numbered(where)
        exact = (*(bindings[symbol] for symbol in self.program.symbols), aligned, where, tune)
        found = self._by_call.get(exact)
        if found is None:
            variant = self.variant(bindings, where, aligned, tune)
            found = self._executable_for(variant, where, name)
            if self._executables.get((variant, where)) is found:  # and no stand-in
                with self._lock:
                    if len(self._by_call) >= MAX_CACHED_SIZES:
                        self._by_call.clear()
                    self._by_call[exact] = found
        return found

    @stage("making kernels")
    def _executable_for(self, variant: Variant, where: torch.device, name: str) -> Executable:
        found = self._executables.get((variant, where))
        if found is not None:
            return found
        if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._while_capturing(variant, where, name)
        made = self._make_once(variant, where, name)
        with self._loading:
            found = self._executables.get((variant, where))
            if found is None:
                found = assemble(made, where, variant.aligned)
                self._executables[variant, where] = found
        return found

    def _make_once(self, variant: Variant, where: torch.device, name: str) -> Artifact:
        """What this thread makes, or another does meanwhile; if that one is interrupted, this one makes it after all."""
        while True:
            mine: Promise[Artifact] = Promise()
            try:
                promise = self._claim_promise(variant, mine)
                if promise is mine and variant.tune == "off":
                    self._make(variant, mine, lambda: _made(self.program, variant, self._compiler_for_card(where, variant)))
                elif promise is mine:
                    self._make(variant, mine, lambda: self._tuned(variant, where, name))
            finally:  # Ctrl-C may have come at any line above
                mine.abandon(self._stopped(variant))
            try:
                return promise.result()
            except ProcessExiting:
                if not promise.abandoned:
                    raise

    def _while_capturing(self, variant: Variant, where: torch.device, name: str) -> Executable:
        """Now nothing can be loaded or timed; kernels that were not tuned will do, where they are loaded already."""
        found = self._executables.get((replace(variant, tune="off"), where))
        if found is None:
            raise NotWarmedUp(function=name)
        _LOG.warning("%s: first called while a CUDA graph is being captured, where nothing can be timed; the default plan is "
                     "used. To have it tuned, call it once before the capture.", name)
        return found

    def prepare(self, bindings: Bindings, where: torch.device, aligned: frozenset[str]) -> Promise[Artifact]:
        variant = self.variant(bindings, _numbered(where), aligned)
        mine: Promise[Artifact] = Promise()
        begun = False
        try:
            promise = self._claim_promise(variant, mine)
            if promise is mine:
                measure = self._compiler_in_worker(variant)
                _background(os.getpid()).start(self._make, variant, mine, lambda: _made(self.program, variant, measure),
                                               dropped=partial(mine.abandon, self._stopped(variant)))
            begun = True
        except RuntimeError as error:  # there are no more threads
            mine.fail(CompilerNotStarted(kernel=self.program.name, device=variant.device.name, detail=error))
        finally:
            if not begun:
                mine.abandon(self._stopped(variant))
        return promise

    @stage("choosing kernels")
    def variant(self, bindings: Bindings, where: torch.device, aligned: frozenset[str], tune: str = "off") -> Variant:
        """Which kernels a call needs."""
        facts, interpreted = _facts(where), where.type != "cuda"
        fixed = {name: bindings[name] for name in self._fixed}
        free = {name: bindings[name] for name in self.program.symbols if name not in fixed}
        sizes = representative_sizes(substitute(self.program, fixed), free, facts)
        return Variant(tuple(fixed.items()), tuple(sizes.items()), needs_wide_index(self.program, bindings),
                       aligned & self._buffer_names, facts, interpreted, "off" if interpreted else tune)

    def variants(self) -> tuple[Variant, ...]:
        with self._lock:
            return tuple(variant for variant, promise in self._made.items() if not promise.failed)

    @property
    def _buffer_names(self) -> frozenset[str]:
        return frozenset(self.program.buffer)

    def _claim_promise(self, variant: Variant, mine: Promise[Artifact]) -> Promise[Artifact]:
        """The one promise of a Variant: `mine` where there is none, or one that came to nothing. Then the caller is to keep it."""
        with self._lock:
            promise = self._made.get(variant)
            if promise is not None and not promise.failed:
                return promise
            self._made.pop(variant, None)
            self._forget_oldest()
            self._made[variant] = mine
            return mine

    def _forget_oldest(self) -> None:
        """Make room for one more Variant. Whoever has kernels of a forgotten one keeps them."""
        if len(self._made) < MAX_VARIANTS:
            return
        done = [variant for variant, promise in self._made.items() if promise.done]
        for variant in done[:len(self._made) + 1 - MAX_VARIANTS]:
            del self._made[variant]
            for known in [each for each in self._executables if each[0] == variant]:
                del self._executables[known]
            self._by_call.clear()

    def _make(self, variant: Variant, promise: Promise[Artifact], make: Callable[[], Artifact]) -> None:
        """Keep a claimed promise. After a failure, whoever asks next tries again."""
        try:
            promise.fulfill(make())
        except Exception as error:
            promise.fail(error)
        except BaseException:
            promise.abandon(self._stopped(variant))
            raise

    def _stopped(self, variant: Variant) -> ProcessExiting:
        """Why nothing is made any more: Ctrl-C, or the end of the process."""
        return ProcessExiting(kernel=self.program.name, device=variant.device.name)

    def _tuned(self, variant: Variant, where: torch.device, name: str) -> Artifact:
        """The winner among several plans: remembered, or timed now. The default plan's kernels where they cannot be timed."""
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
                made = self._timed(default, variant, where, doing, uncompiled)
            except (torch.OutOfMemoryError, OnepassError) as error:
                why = "too little memory is free on the card" if isinstance(error, torch.OutOfMemoryError) else error
                _LOG.warning("%s: plans cannot be timed (%s); the default plan is used", name, why)
                return default
        _LOG.info("%s: %s", name, tune.describe_outcome(made))
        if uncompiled:
            _LOG.warning("%s: %d plans could not be compiled to be timed (%s); the winner is used, but not kept",
                         name, len(uncompiled), uncompiled[0])
        elif store:
            store.save(_key(self.program, variant), made)
        return made

    def _timed(self, default: Artifact, variant: Variant, where: torch.device, doing: Callable[[str], None],
               uncompiled: list[CompilerUnavailable]) -> Artifact:
        doing(f"compiling {tune.PLANS_PER_LEVEL[variant.tune] - 1} plans")
        others = self._others(default, variant, uncompiled)
        doing(f"timing {len(others) + 1} plans")
        program, sizes = _specialized(self.program, variant), dict(variant.sizes)
        with tune.TIMING_LOCK:
            made, timed = tune.choose(default, others, tune.DeviceTimer(program, sizes, where, variant.aligned))
        digest = hashlib.sha256(f"{program} {sizes}".encode()).hexdigest()[:32]
        seen = measured.observations_from(digest, [(m, t.us) for m, t in timed], variant.device)
        measured.observe(measured.card_of(torch.cuda.get_device_properties(where)), seen)
        return made

    def _others(self, default: Artifact, variant: Variant, uncompiled: list[CompilerUnavailable]) -> tuple[Artifact, ...]:
        """Other plans than the default that can run in its place, compiled by workers into the cache they are loaded from.

        Into `untried` goes why plans could not be compiled that the compiler did not refuse.
        """
        program, sizes, measure = _specialized(self.program, variant), dict(variant.sizes), self._compiler_in_worker(variant)

        def compiled(plan: Plan) -> Artifact | None:
            try:
                sources = generate(plan, variant.wide)
                binaries = tuple(map(measure, sources))
            except CompilerUnavailable as error:
                uncompiled.append(error)
                return None
            except OnepassError as error:  # one plan of many: nothing is lost but a chance
                _LOG.debug("a plan of %s is not timed", program.name, exc_info=error)
                return None
            hopeless = any(b.spills_in_loop or b.smem_bytes > variant.device.smem_per_cta for b in binaries)
            return None if hopeless else Compiled(plan, sources, binaries).artifact

        plans = alternatives(program, sizes, variant.device, tune.PLANS_PER_LEVEL[variant.tune])
        found = _background(os.getpid()).map(compiled, plans)
        return tune.comparable(default, [made for made in found if made is not None])

    def _compiler_for_card(self, where: torch.device, variant: Variant) -> CompileKernel:
        """Compile for the card and load there, in this process."""
        apart, brought = self._compiler_in_worker(variant), self._outputs

        def measure(source: Source) -> Binary:
            try:
                return prepare(source, where.index, aligned_of(source, variant.aligned, brought)).binary
            except DoesNotFit:  # the card does not say by how much; a worker that need not load it does
                return apart(source)

        return measure

    def _compiler_in_worker(self, variant: Variant) -> CompileKernel:
        """Compile in a worker process, which needs no card."""
        brought = self._outputs
        return lambda source: offline.compile(source, variant.device, aligned_of(source, variant.aligned, brought))

    @property
    def _outputs(self) -> frozenset[str]:
        return frozenset(b.name for b in self.program.buffers if b.role == "output")


def _made(program: Program, variant: Variant, measure: CompileKernel) -> Artifact:
    """Kernels of a Variant: from the store, or planned and compiled."""
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
        made = compile(fixed, sizes, variant.device, measure, variant.wide).artifact
    if store:
        store.save(key, made)
    return made


def _specialized(program: Program, variant: Variant) -> Program:
    """A Program with a Variant's sizes fixed, and with what does not start on 16 bytes marked: TMA cannot read that."""
    fixed = substitute(program, dict(variant.fixed))
    return replace(fixed, buffers=tuple(replace(b, aligned=b.name in variant.aligned) for b in fixed.buffers))


def _key(program: Program, variant: Variant) -> str:
    return disk.key(_key_fields(program, variant))


def _key_fields(program: Program, variant: Variant) -> dict[str, object]:
    """What an entry of the store follows from, beside versions and settings.

    What was tuned follows from the card itself, and not from what planning believes about it.
    """
    facts = asdict(variant) | {"program": str(program), "aligned": sorted(variant.aligned)}
    if variant.tune != "off":
        card = variant.device
        facts["device"] = {"name": card.name, "title": card.title, "capability": card.capability, "sms": card.sms}
    if not variant.interpreted:
        facts["toolchain"] = compat.triton_toolchain_key(variant.device.target)
    return facts


_sharing = threading.Lock()


def _shared(program: Program) -> _Shared:
    with _sharing:  # two threads must not get two
        return _remembered(program)


@lru_cache(maxsize=MAX_PROGRAMS)
def _remembered(program: Program) -> _Shared:
    return _Shared(program)


def _without_lines(program: Program) -> Program:
    """The Program without the user's lines: they would name one of several equal Programs, or a file that has changed since."""
    return replace(program, nodes=tuple(replace(node, src="") for node in program.nodes))


@lru_cache(maxsize=1)
def _background(process_id: int) -> DaemonExecutor:
    """Threads that plan and wait for worker processes, and do not keep this one from ending; a forked child has its own."""
    threads = DaemonExecutor(knobs().compile_workers, "onepass")
    atexit.register(threads.close, LAST_SECONDS)
    return threads


def _numbered(where: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if where.type == "cuda" and where.index is None else where


def _facts(where: torch.device) -> Device:
    if where.type != "cuda":
        return device(INTERPRETER_DEVICE)
    found = local_device(where.index)
    assert found is not None
    return found
