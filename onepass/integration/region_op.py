"""The op a claimed region becomes: `onepass::region`, and the `onepass::region_out` that allocates its results itself.

A call carries the region's whole Program as text, because the process that runs a cached graph is not the one that claimed
its regions. Its key names the region and what was set about its calls. What follows from key and text is made at the first
call and remembered; later calls with the same sizes are two lookups and the launches.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..errors import InputsOverwritten, WrongAnswer, text_of
from ..ir.criterion import judge
from ..ir.oracle import evaluate
from ..ir.size import Bindings, value
from ..ir.text import parse
from ..pipeline import optimize
from ..stages import to_coded_error
from . import journal, repro
from .aliasing import alias_mask, overwrites, unsafe_outputs, via_scratch
from .checks import Checks
from .engine import Kernels
from .failure import describe_error, format_lines, is_fatal, report_fallback, reproducer
from .fallback import (
    MAX_INDUCTOR_FALLBACKS,
    Fallback,
    Fill,
    clone_strided,
    fresh_results,
    inductor_fallback,
    shares_storage,
    tensors_by_name,
    torch_fallback,
)
from .settings import decode_key

_LOG = logging.getLogger(__name__)
MAX_CACHED_SIZES = 4096  # sets of sizes of one region
MAX_REGIONS = 2048  # that are kept, the ones called latest
NAMESPACE = "onepass"

Key = tuple[int, ...]  # of a kind of call: device, alignment, which outputs lie over inputs, sizes


class _Region:
    """One region of this process: its Program, and what fills its outputs for every set of sizes met so far."""

    def __init__(self, key: str, text: str) -> None:
        marked = decode_key(key)
        self.id, self.settings, self.lines = marked.region, marked.settings, marked.lines
        self.program = parse(text)
        self.inputs = tuple(b for b in self.program.buffers if b.role == "input")
        self.outputs = tuple(b for b in self.program.buffers if b.role == "output")
        self.tally = journal.tally(self.id)
        self.checks = Checks(self.settings.verify) if self.settings.verify else None
        self._fills: dict[Key, Fill] = {}
        self._kernels: Kernels | None = None
        self._fallbacks = 0
        self._lock = threading.RLock()  # held while something is made
        self.called = True  # since it was last considered for being forgotten

    def __call__(self, outs: Sequence[Tensor], ins: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Fill `outs`. What does it depends on sizes, device, which tensors start on 16 bytes and which outputs lie over inputs."""
        self.tally.count()
        self.called = True
        read = [tensor.data_ptr() for tensor in ins]
        aligned = taken = 0
        for k, tensor in enumerate(outs):
            at = tensor.data_ptr()
            aligned += aligned + (not at & 15)
            if at in read:
                taken |= alias_mask(at, read) << k * len(read)
        for at in read:
            aligned += aligned + (not at & 15)
        key = (outs[0].get_device(), aligned, taken, *sizes)
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
        """A first call with some sizes, or one that is verified. Of inputs that are overwritten a copy is kept."""
        bindings = self._bindings(sizes)
        kept = [clone_strided(t) if taken else t for t, taken in zip(ins, shares_storage(outs, ins), strict=True)]
        with self._lock:
            fill = self._fills.get(key)
            if fill is None:
                self._remember(key, self._first_run(outs, ins, kept, bindings))
            else:
                self._rerun(key, fill, outs, ins, kept, bindings)
            if self.checks is not None and self.checks.waits and not _capturing(outs[0]):
                self.checks.made()
                self._verify(outs, ins, kept, bindings)

    def _rerun(self, key: Key, fill: Fill, outs: Sequence[Tensor], ins: Sequence[Tensor], kept: Sequence[Tensor],
               bindings: Bindings) -> None:
        """A later call, of whose inputs there are copies."""
        try:
            fill(outs, ins)
        except Exception as error:
            self._raise_unless_recoverable(fill, error, outs)
            self._remember(key, self._fall_back("launched", to_coded_error(error, "computing a region"), outs, kept, bindings))

    def _recover(self, error: Exception, key: Key, fill: Fill, outs: Sequence[Tensor], ins: Sequence[Tensor],
                      sizes: Sequence[int]) -> None:
        """Answer a call whose kernels failed though they had run before; they are not used for these sizes any more.

        Raises where kernels that were queued before the failure may have written over an input: nothing can be computed from it.
        """
        self._raise_unless_recoverable(fill, error, outs)
        if overwrites(outs, ins):
            raise InputsOverwritten(region=self.id, lines=format_lines(self.lines), error=describe_error(error)) from error
        with self._lock:
            now = self._fills.get(key, fill)
            if now is fill:
                coded = to_coded_error(error, "computing a region")
                self._remember(key, self._fall_back("launched", coded, outs, ins, self._bindings(sizes)))
            else:  # another thread met the same, and was first
                now(outs, ins)

    def _raise_unless_recoverable(self, fill: Fill, error: Exception, outs: Sequence[Tensor]) -> None:
        """Raise an error of a later call, where nothing else may compute the region."""
        if isinstance(fill, Fallback) or is_fatal(error) or self.settings.on_error == "raise" or _capturing(outs[0]):
            raise error

    def _bindings(self, sizes: Sequence[int]) -> Bindings:
        return dict(zip(self.program.symbols, sizes, strict=True))

    def _remember(self, key: Key, fill: Fill) -> None:
        if len(self._fills) >= MAX_CACHED_SIZES:
            self._fills.clear()
        self._fills[key] = fill

    def _first_run(self, outs: Sequence[Tensor], ins: Sequence[Tensor], kept: Sequence[Tensor], bindings: Bindings) -> Fill:
        """What fills outputs of these sizes, after its first run."""
        if any(self.program.points((axis.name,), bindings) == 0 for axis in self.program.axes):
            fill = torch_fallback(self.program, bindings)  # nothing to launch, but reductions over nothing have results
            fill(outs, ins)
            return fill
        stage = "planned and compiled"
        try:
            fill = self._bind_kernels(outs, ins, bindings)
            stage = "launched"
            fill(outs, ins)
        except Exception as error:
            if is_fatal(error) or self.settings.on_error == "raise":
                raise
            return self._fall_back(stage, to_coded_error(error, "computing a region"), outs, kept, bindings)
        return fill

    def _bind_kernels(self, outs: Sequence[Tensor], ins: Sequence[Tensor], bindings: Bindings) -> Fill:
        """Kernels of onepass."""
        if self._kernels is None:
            self._kernels = Kernels(optimize(self.program), f"region {self.id}", self.settings.tune)
        pairs = [*zip(self.outputs, outs, strict=True), *zip(self.inputs, ins, strict=True)]
        aligned = frozenset(b.name for b, tensor in pairs if tensor.data_ptr() % 16 == 0)
        executable = self._kernels.executable(bindings, outs[0].device, aligned)
        place = {b.name: k for each in (self.outputs, self.inputs) for k, b in enumerate(each)}
        apart = unsafe_outputs(outs, ins, {(place[out], place[taken]) for out, taken in executable.artifact.in_place})
        if apart:
            names = ", ".join(self.outputs[k].name for k in apart)
            _LOG.info("region %s: its kernels cannot write %s over an input; copied at %s", self.id, names, dict(bindings))
        journal.bound(self.tally, tuple(bindings.values()), executable.artifact, len(apart))
        return via_scratch(executable.bound(bindings), apart)

    def _fall_back(self, stage: str, error: Exception, outs: Sequence[Tensor], ins: Sequence[Tensor], bindings: Bindings) -> Fill:
        """What Inductor makes of the region, or torch op by op where Inductor cannot; the call is answered with it."""
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

    def _verify(self, outs: Sequence[Tensor], ins: Sequence[Tensor], kept: Sequence[Tensor], bindings: Bindings) -> None:
        """Hold the results of a call against float64."""
        with torch.no_grad():
            exact = evaluate(self.program, tensors_by_name(self.program, outs, kept), bindings)
            eager = fresh_results(self.program, bindings, outs, kept)
            for buffer, mine, theirs in zip(self.outputs, outs, eager, strict=True):
                wrong = judge(mine, theirs, exact[buffer.name])
                if wrong:
                    where = reproducer(partial(self._repro, f"{buffer.name}: {wrong}", outs, ins, bindings))
                    raise WrongAnswer(region=self.id, output=buffer.name, detail=wrong, repro=where)

    def _repro(self, what: str, outs: Sequence[Tensor], ins: Sequence[Tensor], bindings: Bindings) -> str:
        return repro.write_region(self.id, what, self.program, bindings, repro.layout_of(self.program, outs, ins))


def _capturing(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# ---- the op ------------------------------------------------------------------------------------------------------------------

_REGIONS: dict[str, _Region] = {}
_REGIONS_LOCK = threading.Lock()


def run(outs: Sequence[Tensor], ins: Sequence[Tensor], sizes: Sequence[int], key: str, program: str) -> None:
    """Fill `outs`. Inputs, outputs and sizes are in the order of the Program's buffers and symbols."""
    region = _REGIONS.get(key)
    if region is None:
        with _REGIONS_LOCK:
            region = _REGIONS.get(key)
            if region is None:
                _make_room()
                region = _REGIONS[key] = _Region(key, program)
    region(outs, ins, sizes)


def _make_room() -> None:
    """Forget the oldest region that was not called since it was last passed over here; if all were, the oldest."""
    while len(_REGIONS) >= MAX_REGIONS:
        key, region = next(iter(_REGIONS.items()))
        del _REGIONS[key]
        if region.called:
            region.called = False
            _REGIONS[key] = region  # it is the youngest now
        else:
            journal.drop(region.tally)


def run_fresh(ins: Sequence[Tensor], sizes: Sequence[int], key: str, program: str) -> list[Tensor]:
    """The same into fresh tensors."""
    outs = _empties(ins, sizes, program)
    run(outs, ins, sizes, key, program)
    return outs


def forget() -> None:
    """Forget every region; those that are called again are made again."""
    with _REGIONS_LOCK:
        for region in _REGIONS.values():
            journal.drop(region.tally)
        _REGIONS.clear()


@lru_cache(maxsize=1024)
def _outputs(program: str) -> tuple[Any, tuple[str, ...]]:
    parsed = parse(program)
    return tuple(b for b in parsed.buffers if b.role == "output"), parsed.symbols


def _empties(ins: Sequence[Tensor], sizes: Sequence[Any], program: str) -> list[Tensor]:
    """Uninitialised outputs, with the very strides the Program promises; sizes may be symbolic."""
    outputs, symbols = _outputs(program)
    bindings = dict(zip(symbols, sizes, strict=True))
    return [ins[0].new_empty_strided([value(s, bindings) for s in b.shape], [value(s, bindings) for s in b.strides],
                                     dtype=b.dtype.torch) for b in outputs]


def _fake(outs: Sequence[Tensor], ins: Sequence[Tensor], sizes: Sequence[Any], key: str, program: str) -> None:
    """What torch is told of `region` without running it: nothing but that `outs` are written."""


def _fake_fresh(ins: Sequence[Tensor], sizes: Sequence[Any], key: str, program: str) -> list[Tensor]:
    return _empties(ins, sizes, program)


def _define() -> torch.library.Library:
    """Both ops, for CUDA tensors and for CPU tensors, which are interpreted. Torch forgets them with the value returned."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    library.define("region(Tensor(a!)[] outs, Tensor[] ins, SymInt[] sizes, str key, str program) -> ()", tags=tags)
    library.define("region_out(Tensor[] ins, SymInt[] sizes, str key, str program) -> Tensor[]", tags=tags)
    for device in ("CPU", "CUDA"):
        library.impl("region", run, device)
        library.impl("region_out", run_fresh, device)
    torch.library.register_fake(f"{NAMESPACE}::region", _fake, lib=library)
    torch.library.register_fake(f"{NAMESPACE}::region_out", _fake_fresh, lib=library)
    return library


_LIBRARY = _define()
