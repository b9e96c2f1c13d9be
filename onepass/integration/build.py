"""Makes the kernels of one Program and Variant: loads them from the store, or plans and compiles them; tunes them on request.

The steps are those of pipeline.py. The engine makes sure that each runs once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .. import compat
from ..codegen.source import Source
from ..errors import CompilerUnavailable, DoesNotFit, OnepassError
from ..ir.program import Program
from ..pipeline import CompileKernel, compile, generate, interpret
from ..plan.alternatives import alternatives
from ..plan.plan import Plan
from ..plan.variant import Variant, specialized
from ..runtime import cache as disk
from ..runtime import measured, offline, tune
from ..runtime.background import DaemonExecutor
from ..runtime.binary import Binary
from ..runtime.compiled import Artifact, Compiled
from ..runtime.executable import aligned_of
from ..runtime.keep_sources import keep_sources
from ..runtime.launch import prepare
from .plans import PLANS, plan_without_lines

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelKey:
    """Everything besides the Program that its kernels depend on."""

    variant: Variant
    wide: bool  # 64-bit indices
    interpreted: bool
    tune: str = "off"  # whether plans are timed on the GPU: "off", "on" or "full"


def load_or_compile(program: Program, key: KernelKey, compile_kernel: CompileKernel) -> Artifact:
    """Load kernels from the store, or plan and compile them."""
    found = _load(program, key)
    if found is not None:
        return found
    chosen = plan_without_lines(PLANS.plan(program, key.variant))
    made = (interpret(chosen, key.wide) if key.interpreted else compile(chosen, compile_kernel, key.wide)).artifact
    if store := disk.store():
        store.save(store_key(program, key), made)
    return made


def _load(program: Program, key: KernelKey) -> Artifact | None:
    store = disk.store()
    made = store.load(store_key(program, key)) if store else None
    if made is not None:
        keep_sources(made.sources)
    return made


def store_key(program: Program, key: KernelKey) -> str:
    """The key of a store entry."""
    return disk.key(key_fields(program, key))


def key_fields(program: Program, key: KernelKey) -> dict[str, Any]:
    """The fields of a store entry's cache key, besides versions and settings.

    A tuned entry depends on the identity of the GPU only, not on the performance figures that planning assumes for it.
    """
    variant = key.variant
    facts = asdict(variant) | {"program": str(program), "aligned": sorted(variant.aligned)}
    facts |= {"wide": key.wide, "interpreted": key.interpreted, "tune": key.tune}
    if key.tune != "off":
        card = variant.device
        facts["device"] = {"name": card.name, "title": card.title, "capability": card.capability, "sms": card.sms}
    if not key.interpreted:
        facts["toolchain"] = compat.triton_toolchain_key(variant.device.target)
    return facts


# ---- compilers ---------------------------------------------------------------------------------------------------------------


def compiler_for_card(program: Program, variant: Variant, where: torch.device) -> CompileKernel:
    """Compile in this process and load on the GPU."""
    compile_in_worker, outputs = compiler_in_worker(program, variant), _outputs(program)

    def compile_kernel(source: Source) -> Binary:
        try:
            return prepare(source, where.index, aligned_of(source, variant.aligned, outputs)).binary
        except DoesNotFit:  # loading does not report by how much it is too big; a worker, which does not load it, can
            return compile_in_worker(source)

    return compile_kernel


def compiler_in_worker(program: Program, variant: Variant) -> CompileKernel:
    """Compile in a worker process, without a GPU."""
    outputs = _outputs(program)
    return lambda source: offline.compile(source, variant.device, aligned_of(source, variant.aligned, outputs))


def _outputs(program: Program) -> frozenset[str]:
    return frozenset(b.name for b in program.buffers if b.role == "output")


# ---- tuning ------------------------------------------------------------------------------------------------------------------


def load_tuned(program: Program, key: KernelKey) -> Artifact | None:
    """The fastest of several plans from the store, if they were timed before at this level or a higher one."""
    found = (_load(program, replace(key, tune=level)) for level in tune.stored_levels(key.tune))
    return next((made for made in found if made is not None), None)


def tuned(program: Program, key: KernelKey, default: Artifact, where: torch.device, name: str, threads: DaemonExecutor) -> Artifact:
    """The fastest of several plans, timed now. Falls back to the default plan if timing is impossible."""
    uncompiled: list[CompilerUnavailable] = []
    with tune.progress(name) as doing:
        try:
            made = _time_plans(program, key, default, where, doing, uncompiled, threads)
        except (torch.OutOfMemoryError, OnepassError) as error:
            why = "not enough free GPU memory" if isinstance(error, torch.OutOfMemoryError) else error
            _LOG.warning("%s: plans cannot be timed (%s); using the default plan", name, why)
            return default
    _LOG.info("%s: %s", name, tune.describe_outcome(made))
    store = disk.store()
    if uncompiled:
        _LOG.warning(
            "%s: %d plans could not be compiled and timed (%s); the fastest of the others is used, but not stored",
            name,
            len(uncompiled),
            uncompiled[0],
        )
    elif store:
        store.save(store_key(program, key), made)
    return made


def _time_plans(
    program: Program,
    key: KernelKey,
    default: Artifact,
    where: torch.device,
    doing: Callable[[str], None],
    uncompiled: list[CompilerUnavailable],
    threads: DaemonExecutor,
) -> Artifact:
    doing(f"compiling {tune.PLANS_PER_LEVEL[key.tune] + tune.VARIED_PER_LEVEL[key.tune] - 1} plans")
    others = _alternatives(program, key, default, uncompiled, threads)
    doing(f"timing {len(others) + 1} plans")
    variant = key.variant
    fixed, sizes = specialized(program, variant), dict(variant.sizes)
    with tune.TIMING_LOCK:
        made, timed = tune.choose(default, others, tune.DeviceTimer(fixed, sizes, where, variant.aligned))
    digest = hashlib.sha256(f"{fixed} {sizes}".encode()).hexdigest()[:32]
    seen = measured.observations_from(digest, [(m, t.us) for m, t in timed], variant.device)
    measured.observe(measured.card_of(torch.cuda.get_device_properties(where)), seen)
    return made


def _alternatives(
    program: Program, key: KernelKey, default: Artifact, uncompiled: list[CompilerUnavailable], threads: DaemonExecutor
) -> tuple[Artifact, ...]:
    """Alternatives to the default plan, compiled by worker processes into the on-disk cache.

    `uncompiled` collects the errors of plans that failed for lack of a working compiler, not because of the plan itself.
    """
    variant = key.variant
    compile_kernel = compiler_in_worker(program, variant)

    def compiled(plan: Plan) -> Artifact | None:
        try:
            sources = generate(plan, key.wide)
            binaries = tuple(map(compile_kernel, sources))
        except CompilerUnavailable as error:
            uncompiled.append(error)
            return None
        except OnepassError as error:  # only one of many candidates is lost
            _LOG.debug("a plan of %s is not timed", program.name, exc_info=error)
            return None
        unusable = any(b.spills_in_loop or b.smem_bytes > variant.device.smem_per_cta for b in binaries)
        return None if unusable else Compiled(plan, sources, binaries).artifact

    most, varied = tune.PLANS_PER_LEVEL[key.tune], tune.VARIED_PER_LEVEL[key.tune]
    plans = alternatives(specialized(program, variant), dict(variant.sizes), variant.device, most, varied=varied)
    return tune.comparable(default, [made for made in threads.map(compiled, plans) if made is not None])
