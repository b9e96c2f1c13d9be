"""The ops that claimed regions become: `onepass::region` fills given tensors, `onepass::region_out` allocates its results.

A call carries the region as one text (region_spec.py), because a cached graph may run in another process than the one that claimed
its regions. The first call parses the text and compiles; later calls with the same sizes take two lookups and the launches.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import InputsOverwritten, WrongAnswer, text_of
from ..ir.size import Bindings, value
from ..stages import to_coded_error
from . import journal, repro
from .aliasing import alias_mask, overwrites, unsafe_outputs, via_scratch
from .checks import Checks
from .engine import Kernels
from .failure import describe_error, format_lines, is_fatal, raise_coded, report_fallback, reproducer
from .fallback import MAX_INDUCTOR_FALLBACKS, Fallback, Fill, clone_strided, inductor_fallback, shares_storage, torch_fallback
from .layouts import as_traced
from .region_spec import decode, digest_of
from .settings import resolve
from .verification import find_mistake

_LOG = logging.getLogger(__name__)
MAX_CACHED_SIZES = 4096  # distinct calls (sizes, alignment, aliasing) cached per region
MAX_REGIONS = 2048  # regions cached per process; those not called recently are evicted
NAMESPACE = "onepass"

Key = tuple[int, ...]  # of a call: device, alignment, which outputs alias which inputs, sizes


class _Region:
    """A region in this process: its Programs, and a function that fills its outputs for each key of calls so far."""

    def __init__(self, text: str) -> None:
        spec = decode(text)
        self.id, self.lines, self.settings = spec.id, spec.lines, resolve(spec.settings.given)
        self.program, self.optimized = spec.captured, spec.program
        self.inputs = tuple(b for b in self.program.buffers if b.role == "input")
        self.outputs = tuple(b for b in self.program.buffers if b.role == "output")
        self.tally = journal.tally(self.id)
        self.checks = Checks(self.settings.verify) if self.settings.verify else None
        self._fills: dict[Key, Fill] = {}
        self._kernels: Kernels | None = None
        self._fallbacks = 0
        self._lock = threading.RLock()  # held while compiling
        self.called = True  # called since the last eviction pass

    def __call__(self, outs: Sequence[Tensor], ins: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Fill `outs`, with kernels for the call's sizes, device, alignment (16 bytes) and aliasing."""
        self.tally.count()
        self.called = True
        input_addresses = [tensor.data_ptr() for tensor in ins]
        aligned = aliased = 0
        for k, tensor in enumerate(outs):
            at = tensor.data_ptr()
            aligned += aligned + (not at & 15)
            if at in input_addresses:
                aliased |= alias_mask(at, input_addresses) << k * len(input_addresses)
        for at in input_addresses:
            aligned += aligned + (not at & 15)
        key = (outs[0].get_device(), aligned, aliased, *sizes)
        fill = self._fills.get(key)
        due = self.checks is not None and self.checks.due()
        if fill is None or due:
            self._slow_path(key, outs, ins, sizes)
            return
        try:
            fill(outs, ins)
        except Exception as error:
            self._recover(error, key, fill, outs, ins, sizes)

    def _slow_path(self, key: Key, outs: Sequence[Tensor], ins: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Handle the first call for a key, or a verified call. Copies the inputs that the call overwrites."""
        bindings = self.bindings(sizes)
        originals = [clone_strided(t) if taken else t for t, taken in zip(ins, shares_storage(outs, ins), strict=True)]
        with self._lock:
            fill = self._fills.get(key)
            if fill is None:
                self._remember(key, self._first_run(outs, ins, originals, bindings))
            else:
                self._rerun(key, fill, outs, ins, originals, bindings)
            if self.checks is not None and self.checks.waits and not _capturing(outs[0]):
                self.checks.made()
                self._verify(outs, ins, originals, bindings)

    def _rerun(
        self, key: Key, fill: Fill, outs: Sequence[Tensor], ins: Sequence[Tensor], originals: Sequence[Tensor], bindings: Bindings
    ) -> None:
        """Run a later call that is verified. The inputs it overwrites were copied, so a failure can fall back."""
        try:
            fill(outs, ins)
        except Exception as error:
            self._raise_unless_recoverable(fill, error, outs)
            self._remember(key, self._fall_back("launched", to_coded_error(error, "computing a region"), outs, originals, bindings))

    def _recover(
        self, error: Exception, key: Key, fill: Fill, outs: Sequence[Tensor], ins: Sequence[Tensor], sizes: Sequence[int]
    ) -> None:
        """Fall back after a failure of kernels that ran before. They are not used for this key any more.

        Raises if kernels queued before the failure may have overwritten an input, because the result cannot be recomputed then.
        """
        self._raise_unless_recoverable(fill, error, outs)
        if overwrites(outs, ins):
            raise InputsOverwritten(region=self.id, lines=format_lines(self.lines), error=describe_error(error)) from error
        with self._lock:
            now = self._fills.get(key, fill)
            if now is fill:
                coded = to_coded_error(error, "computing a region")
                self._remember(key, self._fall_back("launched", coded, outs, ins, self.bindings(sizes)))
            else:  # another thread had the same failure and already replaced the kernels
                now(outs, ins)

    def _raise_unless_recoverable(self, fill: Fill, error: Exception, outs: Sequence[Tensor]) -> None:
        """Re-raise the error of a later call if no fallback may be used."""
        if isinstance(fill, Fallback) or is_fatal(error) or _capturing(outs[0]):
            raise error
        if self.settings.on_error == "raise":
            self._raise(error, "launched")

    def _raise(self, error: Exception, stage: str) -> NoReturn:
        raise_coded(error, f"Region {self.id}", self.lines, stage)

    def bindings(self, sizes: Sequence[int]) -> Bindings:
        """The values of the Program's symbols in a call."""
        return dict(zip(self.program.symbols, sizes, strict=True))

    def _remember(self, key: Key, fill: Fill) -> None:
        if len(self._fills) >= MAX_CACHED_SIZES:
            self._fills.clear()
        self._fills[key] = fill

    def _first_run(self, outs: Sequence[Tensor], ins: Sequence[Tensor], originals: Sequence[Tensor], bindings: Bindings) -> Fill:
        """Compile for these sizes and run once. Returns the function that fills the outputs."""
        if any(self.program.points((axis.name,), bindings) == 0 for axis in self.program.axes):
            fill = torch_fallback(self.program, bindings)  # nothing to launch, but empty reductions still have results
            fill(outs, ins)
            return fill
        stage = "planned and compiled"
        try:
            fill = self._bind_kernels(outs, ins, bindings)
            stage = "launched"
            fill(outs, ins)
        except Exception as error:
            if is_fatal(error) or self.settings.on_error == "raise":
                self._raise(error, stage)
            return self._fall_back(stage, to_coded_error(error, "computing a region"), outs, originals, bindings)
        return fill

    def _bind_kernels(self, outs: Sequence[Tensor], ins: Sequence[Tensor], bindings: Bindings) -> Fill:
        """Compile the kernels for a call and bind them to its sizes."""
        if self._kernels is None:
            self._kernels = Kernels(self.optimized, f"region {self.id}", self.settings.tune)
        pairs = [*zip(self.outputs, outs, strict=True), *zip(self.inputs, ins, strict=True)]
        aligned = frozenset(b.name for b, tensor in pairs if tensor.data_ptr() % 16 == 0)
        executable = self._kernels.executable(bindings, outs[0].device, aligned)
        place = {b.name: k for each in (self.outputs, self.inputs) for k, b in enumerate(each)}
        scratch = unsafe_outputs(outs, ins, {(place[out], place[taken]) for out, taken in executable.artifact.in_place})
        if scratch:
            names = ", ".join(self.outputs[k].name for k in scratch)
            _LOG.info(
                "region %s: its kernels cannot write %s in place over an input; using a copy for sizes %s",
                self.id,
                names,
                dict(bindings),
            )
        journal.bound(self.tally, tuple(bindings.values()), executable.artifact, len(scratch))
        return via_scratch(executable.bound(bindings), scratch)

    def _fall_back(self, stage: str, error: Exception, outs: Sequence[Tensor], ins: Sequence[Tensor], bindings: Bindings) -> Fill:
        """Fall back to Inductor, or to torch op by op if Inductor fails too, and run the call with it."""
        self._fallbacks += 1
        fill, runs_as = torch_fallback(self.program, bindings), "torch, op by op"
        if self._fallbacks <= MAX_INDUCTOR_FALLBACKS:
            try:
                fill, runs_as = inductor_fallback(self.program, bindings, outs, ins), "inductor"
            except Exception as second:
                if is_fatal(second):
                    raise
                _LOG.debug("Inductor cannot compile region %s", self.id, exc_info=second)
        report_fallback(self.id, self.lines, stage, error, lambda: self._repro(text_of(error), outs, ins, bindings), runs_as)
        journal.bound(self.tally, tuple(bindings.values()), None)
        fill(outs, ins)
        return Fallback(fill)

    def _verify(self, outs: Sequence[Tensor], ins: Sequence[Tensor], originals: Sequence[Tensor], bindings: Bindings) -> None:
        """Compare the results of a call with float64."""
        if found := find_mistake(self.program, bindings, outs, originals):
            output, wrong = found
            where = reproducer(partial(self._repro, f"{output}: {wrong}", outs, ins, bindings))
            raise WrongAnswer(region=self.id, output=output, detail=wrong, repro=where)

    def _repro(self, what: str, outs: Sequence[Tensor], ins: Sequence[Tensor], bindings: Bindings) -> str:
        return repro.write_region(self.id, what, self.program, bindings, repro.layout_of(self.program, outs, ins))


def _capturing(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# ---- the op ------------------------------------------------------------------------------------------------------------------

_REGIONS: dict[str, _Region] = {}  # by the digest of their text
_REGIONS_LOCK = threading.Lock()


def run(outs: Sequence[Tensor], ins: Sequence[Tensor], sizes: Sequence[int], region: str) -> None:
    """Run a region: fill `outs`. Inputs, outputs and sizes are in the order of the captured Program's buffers and symbols.

    Strides may be others than the Program's.
    """
    found = _REGIONS.get(digest_of(region))
    if found is None:
        found = _find_or_make(region)
    bindings = found.bindings(sizes)
    filled = as_traced(outs, found.outputs, bindings)
    found(filled, as_traced(ins, found.inputs, bindings), sizes)
    for out, computed in zip(outs, filled, strict=True):
        if computed is not out:
            out.copy_(computed)


def bind(region: str) -> Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[int]], None]:
    """`run` for one region, as the code that Inductor generates calls it: without torch's dispatcher, which takes several us, and
    with the strides that were traced."""
    key, regions = digest_of(region), _REGIONS

    def call(outs: Sequence[Tensor], ins: Sequence[Tensor], sizes: Sequence[int]) -> None:
        found = regions.get(key)
        if found is None:
            found = _find_or_make(region)
        found(outs, ins, sizes)

    return call


def definition(region: str) -> tuple[str, str]:
    """The name of a region's function in the code that Inductor generates, and the lines that define it."""
    name = f"onepass_region_{digest_of(region)[:12]}"
    return name, f"from {__name__} import bind as onepass_bind\n{name} = onepass_bind({region!r})\n"


def _find_or_make(text: str) -> _Region:
    key = digest_of(text)
    with _REGIONS_LOCK:
        found = _REGIONS.get(key)
        if found is None:
            _evict()
            found = _REGIONS[key] = _Region(text)
        return found


def _evict() -> None:
    """Evict the oldest region that was not called since the last pass (second-chance eviction)."""
    while len(_REGIONS) >= MAX_REGIONS:
        key, region = next(iter(_REGIONS.items()))
        del _REGIONS[key]
        if region.called:
            region.called = False
            _REGIONS[key] = region  # moved to the end
        else:
            journal.drop(region.tally)


def run_fresh(ins: Sequence[Tensor], sizes: Sequence[int], region: str) -> list[Tensor]:
    """Run a region into newly allocated tensors."""
    outs = _empties(ins, sizes, region)
    run(outs, ins, sizes, region)
    return outs


def forget() -> None:
    """Drop all cached regions. They are rebuilt when called again."""
    with _REGIONS_LOCK:
        for region in _REGIONS.values():
            journal.drop(region.tally)
        _REGIONS.clear()


def _empties(ins: Sequence[Tensor], sizes: Sequence[Any], region: str) -> list[Tensor]:
    """Uninitialized outputs with the strides that the Program specifies. Sizes may be symbolic."""
    program = decode(region).captured
    bindings = dict(zip(program.symbols, sizes, strict=True))
    return [
        ins[0].new_empty_strided(
            [value(s, bindings) for s in b.shape], [value(s, bindings) for s in b.strides], dtype=b.dtype.torch
        )
        for b in program.buffers
        if b.role == "output"
    ]


def _fake(outs: Sequence[Tensor], ins: Sequence[Tensor], sizes: Sequence[Any], region: str) -> None:
    """The fake (shape-only) implementation of `region`: it only writes `outs`."""


def _fake_fresh(ins: Sequence[Tensor], sizes: Sequence[Any], region: str) -> list[Tensor]:
    return _empties(ins, sizes, region)


def _define() -> torch.library.Library:
    """Register both ops for CUDA and for CPU (interpreted). They exist as long as the returned library does."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    library.define("region(Tensor(a!)[] outs, Tensor[] ins, SymInt[] sizes, str region) -> ()", tags=tags)
    library.define("region_out(Tensor[] ins, SymInt[] sizes, str region) -> Tensor[]", tags=tags)
    for device in ("CPU", "CUDA"):
        library.impl("region", run, device)
        library.impl("region_out", run_fresh, device)
    torch.library.register_fake(f"{NAMESPACE}::region", _fake, lib=library)
    torch.library.register_fake(f"{NAMESPACE}::region_out", _fake_fresh, lib=library)
    return library


_LIBRARY = _define()
