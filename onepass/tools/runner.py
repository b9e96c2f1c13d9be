"""Runs a training step in the modes that `onepass bisect` compares: with regions, without, in eager mode, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import compat
from ..errors import NothingToCompare, OnepassError, StepFailed, WrongAnswer
from ..integration import journal
from ..integration.claim import ClaimedRegion
from ..integration.failure import describe_error, is_fatal
from ..integration.inductor import backend
from ..integration.settings import settings, validated
from .step import Float64, Results, StepFactory, random_state, results, to_float64
from .trace_model import root_cause, uncompiled


@dataclass(frozen=True)
class Runner:
    """Runs one step, with given onepass settings."""

    factory: StepFactory
    overrides: Mapping[str, Any]
    compiles_itself: bool = False  # the step calls torch.compile(backend="onepass") itself
    uses_random: bool = False  # the step draws random numbers while it runs

    @staticmethod
    def of(factory: StepFactory, options: Mapping[str, Any]) -> Runner:
        """A runner for a step. Runs the step once, unchanged, to find out whether it compiles itself and uses random numbers."""
        runner = Runner(factory, {"interpret": not torch.cuda.is_available(), **validated(options)}, True)
        before = runner.journal_position()
        with settings(**runner.overrides):
            step = factory()
            state = random_state()
            runner._guarded("as it is", lambda: results(step, step.call, factory.text))
        return replace(runner, compiles_itself=runner.journal_position()[0] > before[0], uses_random=random_state() != state)

    def run(self, how: str, **changes: Any) -> Results:
        """The results of a fresh step under torch.compile, with some settings changed."""
        return self._guarded(how, lambda: self._compiled({**self.overrides, **changes}))

    @property
    def rest(self) -> str:
        """What runs the operations outside regions: "inductor" or "eager"."""
        return str(self.overrides.get("rest", "inductor"))

    def without_regions(self) -> Results:
        """The results without any region, with eager or Inductor according to the setting `rest`."""
        return self.in_eager_mode() if self.rest == "eager" else self.by_inductor()

    def by_inductor(self, fallback_random: bool = False) -> Results:
        """The results under plain Inductor. `fallback_random` selects eager's random numbers."""
        with compat.inductor_config(fallback_random=True) if fallback_random else nullcontext():
            return self.run("under Inductor", disable=True)

    def in_eager_mode(self) -> Results:
        """The results in eager mode; torch.compile inside the step is ignored."""
        return self._guarded("in eager mode", lambda: self._uncompiled(wide=False))

    def in_float64(self) -> Results:
        """The results in eager mode with float64 tensors."""
        return self._guarded("in float64", lambda: self._uncompiled(wide=True))

    def journal_position(self) -> tuple[int, int]:
        """The number of graphs and of recomputed values recorded so far, to pass to `claimed` later."""
        now = journal.snapshot()
        return len(now.graphs), len(now.recomputed)

    def claimed(self, before: tuple[int, int]) -> tuple[dict[str, ClaimedRegion], bool]:
        """The regions claimed since a journal position, and whether any value was recomputed instead of saved."""
        now = journal.snapshot()
        regions = {r.id: r for graph in now.graphs[before[0] :] for r in graph.regions}
        return regions, len(now.recomputed) > before[1]

    def cause(self, error: OnepassError) -> BaseException:
        """The original exception behind the failure of a run."""
        return root_cause(error.__cause__) if isinstance(error, StepFailed) and error.__cause__ is not None else error

    def ends_search(self, error: OnepassError) -> bool:
        """Whether no later run can succeed after an error, such as a device fault."""
        cause = self.cause(error)
        return is_fatal(cause) and not isinstance(cause, WrongAnswer)

    def _compiled(self, overrides: Mapping[str, Any]) -> Results:
        with settings(**overrides), compat.inductor_config(force_disable_caches=True):
            step = self.factory()
            call = step.call if self.compiles_itself else torch.compile(uncompiled(step.call), backend=backend)
            return results(step, call, self.factory.text)

    def _uncompiled(self, wide: bool) -> Results:
        step = self.factory()
        if wide:
            step = to_float64(step)
        with torch.compiler.set_stance("force_eager"), Float64() if wide else nullcontext():
            return results(step, step.call, self.factory.text)

    def _guarded(self, how: str, call: Any) -> Results:
        """Call a function; turn its exceptions into StepFailed."""
        try:
            found: Results = call()
        except NothingToCompare:
            raise
        except (Exception, SystemExit) as error:  # sys.exit(0) in a step must not pass for agreement
            raise StepFailed(what=self.factory.text, how=how, error=describe_error(root_cause(error))) from error
        return found
