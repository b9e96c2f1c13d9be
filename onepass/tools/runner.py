"""Runs one step in the ways that are compared: with regions, without, in eager mode, in float64."""

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
    """One step, and the settings its regions get."""

    factory: StepFactory
    overrides: Mapping[str, Any]
    compiles_itself: bool = False  # it calls torch.compile(backend="onepass")
    uses_random: bool = False  # random numbers, while it runs

    @staticmethod
    def of(make: StepFactory, options: Mapping[str, Any]) -> Runner:
        """A runner that has watched the step as it is, with everything it compiles left to Inductor's place in it."""
        runner = Runner(make, {"interpret": not torch.cuda.is_available(), **validated(options)}, True)
        before = runner.journal_position()
        with settings(**runner.overrides):
            step = make()
            state = random_state()
            runner._guarded("as it is", lambda: results(step, step.call, make.text))
        return replace(runner, compiles_itself=runner.journal_position()[0] > before[0], uses_random=random_state() != state)

    def run(self, how: str, **changes: Any) -> Results:
        """The results of a new step under torch.compile, with these changes to the settings."""
        return self._guarded(how, lambda: self._compiled({**self.overrides, **changes}))

    @property
    def rest(self) -> str:
        """Who runs what is in no region."""
        return str(self.overrides.get("rest", "inductor"))

    def without_regions(self) -> Results:
        """As those compute it who run what is in no region."""
        return self.in_eager_mode() if self.rest == "eager" else self.by_inductor()

    def by_inductor(self, fallback_random: bool = False) -> Results:
        """As Inductor compiles it, with random numbers of its own or with eager's."""
        with compat.inductor_config(fallback_random=True) if fallback_random else nullcontext():
            return self.run("under Inductor", disable=True)

    def in_eager_mode(self) -> Results:
        """Op by op, whatever it compiles."""
        return self._guarded("in eager mode", lambda: self._uncompiled(wide=False))

    def in_float64(self) -> Results:
        """Op by op, of float64 tensors."""
        return self._guarded("in float64", lambda: self._uncompiled(wide=True))

    def journal_position(self) -> tuple[int, int]:
        """How many graphs went through the pass so far, and how many values were computed again instead of saved."""
        now = journal.snapshot()
        return len(now.graphs), len(now.recomputed)

    def claimed(self, before: tuple[int, int]) -> tuple[dict[str, ClaimedRegion], bool]:
        """The regions of the graphs since then, and whether anything was computed again instead of saved."""
        now = journal.snapshot()
        regions = {r.id: r for graph in now.graphs[before[0]:] for r in graph.regions}
        return regions, len(now.recomputed) > before[1]

    def cause(self, error: OnepassError) -> BaseException:
        """What really went wrong in a run."""
        return root_cause(error.__cause__) if isinstance(error, StepFailed) and error.__cause__ is not None else error

    def ends_search(self, error: OnepassError) -> bool:
        """Whether no other run can be expected to work after an error."""
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
        """What a call gives; whatever goes wrong in it is said to be of the step."""
        try:
            found: Results = call()
        except NothingToCompare:
            raise
        except Exception as error:
            raise StepFailed(what=self.factory.text, how=how, error=describe_error(root_cause(error))) from error
        return found
