"""From an optimised Program to kernels that run: which sizes share kernels, and what was made before.

One Program serves every size. What a call gets depends on its class of row counts, the sizes a kernel had better know,
whether 32 bits can count its elements, which tensors are aligned, and the device; each such Variant is planned and compiled
once in a process, whoever asks, and is looked up in the store before that.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache

import torch

from .. import compat
from ..codegen.source import Source
from ..device import Device, device
from ..errors import DoesNotFit, NotReady
from ..ir.fix import fix, symbols_to_fix
from ..ir.program import Program
from ..ir.size import Bindings
from ..knobs import knobs
from ..pipeline import Measure, compile, interpretable, keep, representative
from ..plan.access import needs_wide_index
from ..runtime import cache as disk
from ..runtime import offline
from ..runtime.binary import Binary
from ..runtime.card import present
from ..runtime.compiled import Made
from ..runtime.counts import Counts, count, counts
from ..runtime.executable import Executable, aligned_of, assemble
from ..runtime.launch import prepare

__all__ = ["Counts", "Kernels", "Variant", "counts"]

MOST_PROGRAMS = 1024  # whose kernels are kept though nobody holds them
MOST_REMEMBERED = 4096  # sets of sizes whose kernels are found without asking which Variant they belong to
CPU_FACTS = "h200"  # interpreted kernels are planned for this device: plans are the same as on a card


@dataclass(frozen=True)
class Variant:
    """All that decides the kernels of a Program. Sizes are pairs of symbol and number."""

    fixed: tuple[tuple[str, int], ...]  # put into the Program
    sizes: tuple[tuple[str, int], ...]  # planned for: the representative of a class of row counts
    wide: bool  # elements are counted in 64 bits
    aligned: frozenset[str]  # inputs and outputs that start on 16 bytes
    device: Device
    interpreted: bool


class Kernels:
    """All kernels of one optimised Program, made when first needed. Equal Programs share them; threads may, too."""

    def __init__(self, program: Program, name: str) -> None:
        self.program, self.name = program, name
        self._shared = _shared(_without_lines(program))

    def executable(self, bindings: Bindings, where: torch.device, aligned: frozenset[str]) -> Executable:
        """The kernels for these sizes on this device: from memory, from the store, or made now.

        `aligned` names the inputs and outputs that start on 16 bytes.
        """
        return self._shared.executable(bindings, where, aligned, self.name)

    def prepare(self, bindings: Bindings, where: torch.device, aligned: frozenset[str]) -> Future[Made]:
        """Begin to plan and compile for these sizes, in the background; `executable` waits for it where it must.

        Kernels are compiled by worker processes into the cache they are loaded from later. Nothing is done on the card, so this
        may run beside anything.
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
        self._fixed = tuple(sorted(symbols_to_fix(program)))
        self._lock = threading.Lock()  # of the three below; never held while something is made
        self._quick: dict[tuple[object, ...], Executable] = {}
        self._made: dict[Variant, Future[Made]] = {}
        self._executables: dict[tuple[Variant, torch.device], Executable] = {}
        self._loading = threading.Lock()

    def executable(self, bindings: Bindings, where: torch.device, aligned: frozenset[str], name: str) -> Executable:
        where = _numbered(where)
        exact = (*(bindings[symbol] for symbol in self.program.symbols), aligned, where)
        found = self._quick.get(exact)
        if found is None:
            found = self._of_variant(self.variant(bindings, where, aligned), where, name)
            with self._lock:
                if len(self._quick) >= MOST_REMEMBERED:
                    self._quick.clear()
                self._quick[exact] = found
        return found

    def _of_variant(self, variant: Variant, where: torch.device, name: str) -> Executable:
        found = self._executables.get((variant, where))
        if found is not None:
            return found
        if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotReady(function=name)
        future, mine = self._claimed(variant)
        if mine:
            self._make(variant, future, self._measure_on(where, variant))
        made = future.result()
        with self._loading:
            found = self._executables.get((variant, where))
            if found is None:
                found = assemble(made, where, variant.aligned)
                self._executables[variant, where] = found
        return found

    def prepare(self, bindings: Bindings, where: torch.device, aligned: frozenset[str]) -> Future[Made]:
        variant = self.variant(bindings, _numbered(where), aligned)
        future, mine = self._claimed(variant)
        if mine:
            _background(os.getpid()).submit(self._make, variant, future, self._measure_apart(variant))
        return future

    def variant(self, bindings: Bindings, where: torch.device, aligned: frozenset[str]) -> Variant:
        """Which kernels a call needs."""
        facts, interpreted = _facts(where), where.type != "cuda"
        fixed = {name: bindings[name] for name in self._fixed}
        free = {name: bindings[name] for name in self.program.symbols if name not in fixed}
        sizes = representative(fix(self.program, fixed), free, facts)
        return Variant(tuple(fixed.items()), tuple(sizes.items()), needs_wide_index(self.program, bindings),
                       frozenset() if interpreted else aligned & self._brought, facts, interpreted)

    def variants(self) -> tuple[Variant, ...]:
        with self._lock:
            return tuple(self._made)

    @property
    def _brought(self) -> frozenset[str]:
        return frozenset(self.program.buffer)

    def _claimed(self, variant: Variant) -> tuple[Future[Made], bool]:
        """The one future of a Variant, and whether the caller is to fulfil it."""
        with self._lock:
            future = self._made.get(variant)
            if future is not None:
                return future, False
            self._made[variant] = future = Future()
            return future, True

    def _make(self, variant: Variant, future: Future[Made], measure: Measure) -> None:
        """Fulfil a claimed future. After a failure, whoever asks next tries again."""
        try:
            made = _made(self.program, variant, measure)
        except BaseException as error:
            with self._lock:
                del self._made[variant]
            future.set_exception(error)
        else:
            future.set_result(made)

    def _measure_on(self, where: torch.device, variant: Variant) -> Measure:
        """Compile for the card and load there, in this process."""
        apart, brought = self._measure_apart(variant), self._outputs

        def measure(source: Source) -> Binary:
            try:
                return prepare(source, where.index, aligned_of(source, variant.aligned, brought)).binary
            except DoesNotFit:  # the card does not say by how much; a worker that need not load it does
                return apart(source)

        return measure

    def _measure_apart(self, variant: Variant) -> Measure:
        """Compile in a worker process, which needs no card."""
        brought = self._outputs
        return lambda source: offline.compile(source, variant.device, aligned_of(source, variant.aligned, brought))

    @property
    def _outputs(self) -> frozenset[str]:
        return frozenset(b.name for b in self.program.buffers if b.role == "output")


def _made(program: Program, variant: Variant, measure: Measure) -> Made:
    """Kernels of a Variant: from the store, or planned and compiled."""
    store, key = disk.store(), disk.key(_facts_of_entry(program, variant))
    made = store.load(key) if store else None
    if made is not None:
        keep(made.sources)
        return made
    count(plans=1)
    fixed, sizes = fix(program, dict(variant.fixed)), dict(variant.sizes)
    if variant.interpreted:
        made = interpretable(fixed, sizes, variant.device, variant.wide).made
    else:
        made = compile(fixed, sizes, variant.device, measure, variant.wide).made
    if store:
        store.save(key, made)
    return made


def _facts_of_entry(program: Program, variant: Variant) -> dict[str, object]:
    """What an entry of the store follows from, beside versions and settings."""
    facts = asdict(variant) | {"program": str(program), "aligned": sorted(variant.aligned)}
    if not variant.interpreted:
        facts["toolchain"] = _toolchain(variant.device.target)
    return facts


@cache
def _toolchain(target: int) -> str:
    return compat.triton_toolchain(target)


_sharing = threading.Lock()


def _shared(program: Program) -> _Shared:
    with _sharing:  # two threads must not get two
        return _remembered(program)


@lru_cache(maxsize=MOST_PROGRAMS)
def _remembered(program: Program) -> _Shared:
    return _Shared(program)


def _without_lines(program: Program) -> Program:
    """The Program without the user's lines: they would name one of several equal Programs, or a file that has changed since."""
    return replace(program, nodes=tuple(replace(node, src="") for node in program.nodes))


@lru_cache(maxsize=1)
def _background(process_id: int) -> ThreadPoolExecutor:
    """Threads that plan and wait for worker processes; a forked child has none of its parent's."""
    return ThreadPoolExecutor(knobs().compile_workers, thread_name_prefix="onepass")


def _numbered(where: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if where.type == "cuda" and where.index is None else where


def _facts(where: torch.device) -> Device:
    if where.type != "cuda":
        return device(CPU_FACTS)
    found = present(where.index)
    assert found is not None
    return found
