"""Whole training steps, onepass beside Inductor: kernel time, time outside matmul and attention, step time, memory, compiling.

    PYTHONPATH=. python bench/models.py OUT.json [--models NAME ...] [--graphs]

Kernel time is the sum of CUDA kernel durations of one step, from the profiler. Both compilers run in this process, each from empty
caches of its own, and are then measured in turns. `--graphs` adds step times under mode="reduce-overhead".

A card at its power limit changes its clocks by some percent from step to step, more than a model of large matmuls can gain. So
kernels are timed in steps that follow a rest, while step times are those of steps in a row, as in training: one of each compiler
in turns, so that both find the card in the same state.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import onepass
from onepass.tools.timing import reserve_memory
from tests.models import ZOO, Example

ROUNDS = 6
REST_SECONDS = 0.5  # seconds
TIMED_STEPS = 60  # of each compiler
RESERVED_BYTES = 64 << 30  # bytes: two models at once, with what their steps take
# Kernels of matmul and attention, by what their names begin with or hold: neither compiler makes them.
EXCLUDED_KERNELS = ("nvjet", "gemm", "cutlass", "cublas", "flash", "fmha", "sdpa", "cudnn", "splitK", "xmma")


@dataclass(frozen=True)
class Setup:
    """A model of the zoo at the size it is measured."""

    model: str
    tokens: int
    changes: dict[str, Any] = field(default_factory=dict)


SETUPS = {
    "seed": Setup("seed_transformer_learnable", 32 * 2048),
    "llama": Setup("llama", 8 * 2048, {"layers": 8, "batch": 8, "length": 2048}),
    "gpt2-medium": Setup("gpt2", 8 * 1024, {"layers": 24, "batch": 8, "length": 1024}),
    "qwen3": Setup("qwen3", 8 * 2048, {"layers": 8, "batch": 8, "length": 2048}),
}


BACKENDS: dict[str, Any] = {"inductor": "inductor", "onepass": onepass.backend}


@dataclass(frozen=True)
class Measured:
    """One compiler on one model."""

    kernel_ms: float
    outside_ms: float  # of it, outside matmul and attention
    kernels: int
    step_ms: float
    tokens_per_s: float
    peak_gib: float
    compile_s: float
    loss: float
    graphs_step_ms: float | None = None
    graphs_kernel_ms: float | None = None
    kernel_ms_by_round: tuple[float, ...] = ()
    step_ms_by_turn: tuple[float, ...] = ()
    slowest: tuple[tuple[str, int, float], ...] = ()  # kernels outside matmul and attention: name, calls, ms


@dataclass(frozen=True)
class Ready:
    """A model that one compiler has compiled, and what that took."""

    step: Callable[[], torch.Tensor]
    compile_s: float
    peak_gib: float
    loss: float


def ready(setup: Setup, backend: Any) -> Ready:
    """A model under one compiler, from nothing. What was on the card before does not count towards its memory."""
    before = torch.cuda.memory_allocated()
    example = _example(setup)
    run = torch.compile(example.module, backend=backend)
    step = partial(_step, setup, example, run)
    began = time.perf_counter()
    loss = float(step().detach())
    compile_s = time.perf_counter() - began
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return Ready(step, compile_s, (torch.cuda.max_memory_allocated() - before) / 2**30, loss)


def measured(setup: Setup, compiled: dict[str, Ready]) -> dict[str, Measured]:
    """Kernel and step times of each, in turns: a card that gets warm slows down everybody, and whoever comes next."""
    profiles: dict[str, list[tuple[Counter[str], Counter[str]]]] = {name: [] for name in compiled}
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for turn in range(TIMED_STEPS + 2):
        for name in _order(compiled, turn):
            times[name] += _step_times(compiled[name].step, 1)
    for turn in range(ROUNDS):
        for name in _order(compiled, turn):
            time.sleep(REST_SECONDS)
            profiles[name].append(_kernels(compiled[name].step))
    return {name: _summarized(setup, each, profiles[name], times[name][2:]) for name, each in compiled.items()}


def _order(names: Iterable[str], turn: int) -> list[str]:
    return list(names)[:: 1 if turn % 2 else -1]


def _summarized(setup: Setup, each: Ready, profiles: list[tuple[Counter[str], Counter[str]]], times: list[float]) -> Measured:
    """The profile of the round whose kernels took the median time stands for all."""
    step_ms = statistics.median(times)
    calls, spent = sorted(profiles, key=lambda p: sum(p[1].values()))[len(profiles) // 2]
    outside = {name: ms for name, ms in spent.items() if not any(o in name for o in EXCLUDED_KERNELS)}
    slowest = sorted(((name[:80], calls[name], round(ms, 4)) for name, ms in outside.items()), key=lambda row: -row[2])[:30]
    return Measured(sum(spent.values()), sum(outside.values()), sum(calls.values()), step_ms, setup.tokens / step_ms * 1e3,
                    each.peak_gib, each.compile_s, each.loss, slowest=tuple(slowest),
                    kernel_ms_by_round=tuple(round(sum(p[1].values()), 3) for p in profiles),
                    step_ms_by_turn=tuple(round(ms, 3) for ms in times))


def _example(setup: Setup) -> Example:
    maker = ZOO[setup.model]
    return maker("real", device="cuda", dtype=torch.float32 if maker.autocast else torch.bfloat16, **setup.changes)


def _step(setup: Setup, example: Example, run: Callable[..., Any]) -> torch.Tensor:
    example.module.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16) if ZOO[setup.model].autocast else nullcontext():
        loss = example.loss(run(**example.inputs))
    loss.backward()
    return loss


def _kernels(step: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """How often each kernel ran in a step, and for how many ms."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    calls, spent = Counter[str](), Counter[str]()
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            calls[event.name] += 1
            spent[event.name] += event.device_time / 1e3
    return calls, spent


def _step_times(step: Callable[[], Any], count: int) -> list[float]:
    """Steps in a row, each waited for, in ms; what the host takes is in them."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def under_graphs(setup: Setup, backends: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Step and kernel times under mode="reduce-overhead", in turns of several steps: a graph is recorded again after another
    model ran."""
    torch._dynamo.reset()
    examples = {name: _example(setup) for name in backends}
    runs = {name: torch.compile(examples[name].module, backend=backends[name], mode="reduce-overhead") for name in backends}
    times: dict[str, list[float]] = {name: [] for name in backends}
    kernels: dict[str, list[float]] = {name: [] for name in backends}
    for turn in range(ROUNDS // 2):
        for name in _order(backends, turn):

            def step(name: str = name) -> None:
                torch.compiler.cudagraph_mark_step_begin()
                _step(setup, examples[name], runs[name])

            times[name] += _step_times(step, 12)[8:]  # the first ones compile, record, and feel what ran before
            time.sleep(REST_SECONDS)
            kernels[name].append(sum(_kernels(step)[1].values()))
            examples[name].module.zero_grad(set_to_none=True)
    return {name: (statistics.median(times[name]), statistics.median(kernels[name])) for name in backends}


def start_up() -> None:
    """Whoever compiles first in a process imports Inductor and starts its workers; that is nobody's compile time."""
    for backend in BACKENDS.values():
        torch.compile(torch.nn.functional.layer_norm, backend=backend)(torch.ones(64, 128, device="cuda"), (128,))


def compare(setup: Setup, graphs: bool) -> dict[str, Any]:
    """Both compilers on one model. One that fails is shown as such."""
    torch._dynamo.reset()
    rows: dict[str, Any] = {}
    compiled: dict[str, Ready] = {}
    with ExitStack() as caches:
        for name, backend in BACKENDS.items():
            folder = Path(caches.enter_context(tempfile.TemporaryDirectory()))
            for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "ONEPASS_CACHE_DIR"):
                os.environ[variable] = str(folder / variable.lower())
            try:
                compiled[name] = ready(setup, backend)
            except Exception as error:
                rows[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        rows |= {name: asdict(row) for name, row in measured(setup, compiled).items()}
        if graphs:
            backends = {name: BACKENDS[name] for name in compiled}
            compiled.clear()  # and their memory
            replayed = under_graphs(setup, backends)
            for name, (step_ms, kernel_ms) in replayed.items():
                rows[name] |= {"graphs_step_ms": step_ms, "graphs_kernel_ms": kernel_ms}
    return rows


def main() -> None:
    """Measure, and write after every model; of a file that is there already, models that are not asked for stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="*", default=list(SETUPS), choices=list(SETUPS))
    parser.add_argument("--graphs", action="store_true")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"models": {}}
    here = {"date": date.today().isoformat(), "card": torch.cuda.get_device_name(), "torch": torch.__version__,
            "version": onepass.__version__, "python": platform.python_version()}
    reserve_memory(RESERVED_BYTES, torch.device("cuda"))
    start_up()
    for name in given.models:
        rows = compare(SETUPS[name], given.graphs)
        results["models"][name] = {"setup": asdict(SETUPS[name]), **here, **rows}
        for compiler, row in rows.items():
            shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if not isinstance(v, (list, tuple))}
            print(name, compiler, shown, flush=True)
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
