"""`onepass bench`: measures a suite on this machine's GPU, with interleaved runs of every provider of a workload.

Results are written after every workload, so an interrupted run can resume. Worker processes first compile all kernels of onepass
and Inductor in parallel.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from .. import __version__
from ..device import Device
from ..errors import BadArgument, CannotResume, GpuRequired, OnepassError
from ..knobs import knobs
from ..plan.cost import floor_us
from ..runtime.background import DaemonExecutor
from ..runtime.card import local_device
from ..runtime.promise import Promise
from . import peers
from .bench_tables import line
from .captured_function import CapturedFunction
from .providers import Prepared, is_onepass, make_provider, supported_providers
from .regret import CompiledCandidate, compile_candidates, regret
from .results import Anchor, Result, Row, Run, load, save
from .suites import Job, Suite
from .timing import Clock, Timed, anchor_bytes, anchor_calls, copies_for, reserve_memory
from .verdict import SLACK, Judge
from .warm import compiles_slowly, prewarm_inductor

ANCHOR_RUNS = 8
LIVE_COPIES = 12  # rough number of copies of a workload's inputs and outputs alive while it is checked against float64 and timed
MAX_ERROR_LENGTH = 300  # characters


@dataclass(frozen=True)
class Options:
    """What to measure, and how."""

    suite: Suite
    providers: tuple[str, ...]
    out: Path | None = None
    fresh: bool = False
    time_limit: float | None = None  # seconds
    only: str = ""
    graphs: bool = False
    regret: bool = False
    max_candidates: int = 12  # per workload


@dataclass(frozen=True)
class Machine:
    """The GPU, its Device record, and the installed versions."""

    device: Device
    card: str
    versions: dict[str, str]
    where: torch.device = torch.device("cuda", 0)


def bench(
    options: Options,
    console: Console,
    place: Machine | None = None,
    make_clock: Callable[[], Clock] = Clock,
    now: Callable[[], float] = perf_counter,
) -> Run:
    """Measure the part of a suite that has no results yet, by default on the first GPU of this machine."""
    jobs = selected_jobs(options)
    place = place or this_machine()
    run = previous_run(options, place)
    todo = [job for job in jobs if is_unfinished(job, run, options)]
    began, longest = now(), 0.0
    if todo:
        session = _Session(options, place, todo, console, make_clock)
        run = session.with_anchors(run, jobs)
    with _progress(console) as progress:
        task = progress.add_task(options.suite.name, total=len(todo))
        for k, job in enumerate(todo):
            at = now()
            if options.time_limit is not None and at - began + longest > options.time_limit:
                remaining = f"{len(todo) - k} of {len(jobs)} workloads remain; "
                console.print(remaining + ("run the same command to continue" if options.out else "pass --out to continue later"))
                break
            run = session.measured(run, job)
            if options.out is not None:
                save(run, options.out)
            longest = max(longest, now() - at)
            progress.advance(task)
            console.print(escape(f"{k + 1}/{len(todo)} {now() - began:.0f} s  {line(row_of(run, job))}"))
    return run


def selected_jobs(options: Options) -> tuple[Job, ...]:
    """The jobs whose id contains the text of `--only`."""
    found = tuple(job for job in options.suite.jobs if options.only in job.id)
    if not found:
        names = ", ".join(dict.fromkeys(job.workload for job in options.suite.jobs))
        raise BadArgument(detail=f"No workload of suite {options.suite.name} has {options.only!r} in its name. It has {names}.")
    return found


def this_machine() -> Machine:
    """The first GPU of this machine, and the installed versions."""
    device = local_device()
    if device is None:
        why = "torch finds none" if torch.version.cuda else "this torch is a CPU build"
        raise GpuRequired(what="`onepass bench`", why=why)
    return Machine(device, torch.cuda.get_device_name(), versions())


def versions() -> dict[str, str]:
    """Versions of the packages that affect the times."""
    found = {"torch": torch.__version__, "onepass": __version__, "python": platform.python_version()}
    with suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    return found | {name: peers.version(name) for name in peers.PACKAGES if peers.importable(name)}


def previous_run(options: Options, place: Machine) -> Run:
    """The run to resume: the one in the output file, or an empty one."""
    fresh = Run(options.suite.name, datetime.now().isoformat(timespec="seconds"), place.card, place.device.name, place.versions)
    if options.out is None or options.fresh or not options.out.exists():
        return fresh
    found = load(options.out)
    trouble = None
    if found.suite != options.suite.name:
        trouble = f"it belongs to the suite {found.suite}"
    elif found.card != place.card:
        trouble = f"it was measured on {found.card}, and this is {place.card}"
    elif other := [f"{k} {v} (here {place.versions[k]})" for k, v in found.versions.items() if place.versions.get(k, v) != v]:
        trouble = f"it was measured with {', '.join(other)}"
    if trouble:
        raise CannotResume(file=options.out, detail=trouble)
    return replace(found, versions={**found.versions, **place.versions})


def is_unfinished(job: Job, run: Run, options: Options) -> bool:
    """Whether a requested result of a job is missing from a run."""
    row = row_of(run, job)
    if row is None or not set(supported_providers(options.providers, job)) <= row.results.keys():
        return True
    return options.regret and all(r.id != job.id for r in run.regret)


def row_of(run: Run, job: Job) -> Row | None:
    """The row of a job; None if it is not measured yet."""
    return next((r for r in run.rows if r.id == job.id), None)


def with_row(run: Run, row: Row, order: Sequence[str]) -> Run:
    """A run with one row added or replaced. Rows stay in suite order."""
    rows = {r.id: r for r in (*run.rows, row)}
    place = {id: k for k, id in enumerate(order)}
    return replace(
        run,
        rows=tuple(sorted(rows.values(), key=lambda r: place.get(r.id, len(place)))),
        date=datetime.now().isoformat(timespec="seconds"),
    )


def one_line_error(error: BaseException) -> str:
    """The error type and the first line of its message."""
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:MAX_ERROR_LENGTH]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True
    )


class _Session:
    """State shared by all workloads of a run: the timing buffers and the compiled candidates."""

    def __init__(
        self, options: Options, place: Machine, jobs: Sequence[Job], console: Console, make_clock: Callable[[], Clock]
    ) -> None:
        self.options, self.place, self.console = options, place, console
        self.order = [job.id for job in options.suite.jobs]
        self._tried: dict[str, tuple[CompiledCandidate, ...]] = {}
        with self._warming(jobs):  # in parallel, since neither keeps all cores busy until it ends
            self._compile(jobs)
        if place.where.type == "cuda":
            reserve_memory(LIVE_COPIES * max(job.floor_bytes for job in jobs), place.where)
        self.clock = make_clock()

    def _compile(self, jobs: Sequence[Job]) -> None:
        """Compile the kernels of all jobs in parallel. Errors are ignored here: they recur, and are reported, when a job runs."""
        began = perf_counter()
        made: list[Promise[Any]] = []
        candidates: dict[str, tuple[Future[CompiledCandidate], ...]] = {}
        with DaemonExecutor(knobs().compile_workers, "onepass-bench") as pool:
            for job in jobs:
                with suppress(Exception), torch.no_grad():
                    ours = CapturedFunction.of(job.subject.function, job.inputs())
                    made.append(ours.start_compiling(self.place.where))
                    if self.options.regret:
                        candidates[job.id] = compile_candidates(ours, self.place.device, self.options.max_candidates, pool)
            for future in made:
                with suppress(Exception):
                    future.result()
            for id, futures in candidates.items():
                self._tried[id] = tuple(future.result() for future in futures if future.exception() is None)
        plans = f", {sum(map(len, self._tried.values()))} candidates" if self.options.regret else ""
        self.console.print(
            f"{len(jobs)} workloads{plans} compiled by {knobs().compile_workers} workers in "
            f"{perf_counter() - began:.0f} s (ONEPASS_COMPILE_WORKERS)"
        )

    @contextmanager
    def _warming(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Compile Inductor's kernels in other processes meanwhile, for at most half of the time limit."""
        began, limit = perf_counter(), self.options.time_limit
        if len(jobs) < 2 or not any(map(compiles_slowly, self.options.providers)) or self.place.where.type != "cuda":
            yield
            return
        with prewarm_inductor(jobs, self.options.providers, self.place.where, limit=None if limit is None else limit / 2):
            yield
        self.console.print(f"Inductor's kernels compiled in {perf_counter() - began:.0f} s")

    def with_anchors(self, run: Run, jobs: Sequence[Job]) -> Run:
        """Measure plain reads, copies and adds at the byte counts of the workloads."""
        if run.anchors:
            return run
        found: list[Anchor] = []
        with torch.no_grad():
            for moved in anchor_bytes(job.floor_bytes for job in jobs):
                times = self.clock.times(anchor_calls(moved, self.clock.device), ANCHOR_RUNS)
                found += [Anchor(kind, moved, t.us) for kind, t in times.items() if isinstance(t, Timed)]
        return replace(run, anchors=tuple(found))

    def measured(self, run: Run, job: Job) -> Run:
        """The run with one more workload: its row, and its regret if requested."""
        torch.compiler.reset()
        with torch.no_grad():
            inputs = job.inputs(self.clock.device)
            row = row_of(run, job)
            if row is None or not set(supported_providers(self.options.providers, job)) <= row.results.keys():
                run = with_row(run, self._row(job, inputs), self.order)
            if self.options.regret and job.id in self._tried:
                run = self._with_regret(run, job, inputs)
        return run

    def _with_regret(self, run: Run, job: Job, inputs: Sequence[Tensor]) -> Run:
        ours = CapturedFunction.of(job.subject.function, inputs)
        try:
            found = regret(job.id, ours, self._tried[job.id], inputs, self.clock, self.place.device)
        except (OnepassError, RuntimeError) as error:  # a failure on one workload must not end the run
            self.clock.synchronize()
            self.console.print(escape(f"{job.id}: regret not measured: {one_line_error(error)}"))
            return run
        return replace(run, regret=(*(r for r in run.regret if r.id != job.id), found))

    def _row(self, job: Job, inputs: Sequence[Tensor]) -> Row:
        """Prepare and check each provider, then time those with right answers in interleaved runs."""
        ready: dict[str, Prepared] = {}
        results: dict[str, Result] = {}
        judge: Judge | None = None
        for name in supported_providers(self.options.providers, job):
            try:
                judge = judge or Judge(job.workload, job.subject.function, inputs)
                prepared = make_provider(name, job, inputs)
                wrong = judge.wrong(prepared.call(), 1.0 if is_onepass(name) else SLACK)
                self.clock.synchronize()
            except Exception as error:
                self.clock.synchronize()
                results[name] = Result(error=one_line_error(error))
                continue
            if wrong:
                results[name] = Result(wrong=wrong[:MAX_ERROR_LENGTH])
            else:
                ready[name] = prepared
        del judge
        results |= self._timed(job, inputs, ready)
        floor = floor_us(job.footprint, self.place.device)
        ordered = {name: results[name] for name in supported_providers(self.options.providers, job)}
        return Row(job.workload, job.shape, job.dtype, job.id, job.floor_bytes, floor, ordered)

    def _timed(self, job: Job, inputs: Sequence[Tensor], ready: dict[str, Prepared]) -> dict[str, Result]:
        if not ready:
            return {}
        try:
            times = self.clock.times({name: p.call for name, p in ready.items()})
        except (OnepassError, RuntimeError) as error:
            self.clock.synchronize()
            return dict.fromkeys(ready, Result(error=one_line_error(error)))
        return {
            name: self._result(name, job, inputs, ready[name], timed)
            if isinstance(timed, Timed)
            else Result(error=one_line_error(timed))
            for name, timed in times.items()
        }

    def _result(self, name: str, job: Job, inputs: Sequence[Tensor], prepared: Prepared, timed: Timed) -> Result:
        found = Result(timed.us, timed.spread, timed.runs, timed.kernels, host_us=self.clock.host_us(prepared.call, timed))
        copies = copies_for(job.floor_bytes, self.place.device.l2_bytes)
        if self.options.graphs and prepared.function is not None and copies is not None:
            with suppress(RuntimeError):  # not every provider can be captured in a CUDA graph
                found = replace(found, graph_us=self.clock.graph_us(prepared.function, inputs, copies))
        if name == "onepass":
            ours = CapturedFunction.of(job.subject.function, inputs)
            made = ours.executable(self.clock.device).artifact
            found = replace(
                found,
                registers=max((b.registers for b in made.binaries), default=None),
                spill_bytes=sum(b.spill_bytes for b in made.binaries),
                predicted_us=ours.predicted_us(made, self.place.device),
            )
        return found


def bench_models(arguments: Sequence[str]) -> int:
    """Run bench/models.py, which measures whole models. It uses models from the tests, so it is not part of the package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "bench" / "models.py").is_file():
        raise BadArgument(detail="The suite models needs a checkout of the repository: clone it and run the command there.")
    if local_device() is None:
        raise GpuRequired(what="`onepass bench models`", why="torch finds none")
    return subprocess.run([sys.executable, "-m", "bench.models", *arguments], cwd=root, check=False).returncode
