"""Measures training steps with onepass and with Inductor: kernel time, step time, memory and compile time.

    PYTHONPATH=. python bench/models.py OUT.json [--models NAME ...] [--graphs]

Kernel time is the sum of CUDA kernel durations of one step, from the profiler, in total and without matmul and attention. Both
compilers run in this process with separate, empty caches, and are then measured in alternation. `--graphs` adds step times under
mode="reduce-overhead".

At its power limit a GPU changes its clocks by a few percent from step to step, more than a model with large matmuls can gain. So
kernels are timed in steps after a pause, while step times come from consecutive steps, as in training. The compilers alternate, so
that both see the GPU in the same state.
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
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

import onepass
from bench.zoo import ZOO, Example
from onepass.measure.timing import reserve_memory

ROUNDS = 6
REST_SECONDS = 0.5  # seconds
TIMED_STEPS = 60  # per compiler
RESERVED_BYTES = 64 << 30  # enough for two models and their steps
# Substrings of the names of matmul and attention kernels, which neither compiler generates.
EXCLUDED_KERNELS = ("nvjet", "gemm", "cutlass", "cublas", "flash", "fmha", "sdpa", "cudnn", "splitK", "xmma")


@dataclass(frozen=True)
class Setup:
    """A model of the zoo and the size to measure it at."""

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
    """The measurements of one compiler on one model."""

    kernel_ms: float
    outside_ms: float  # kernel time outside matmul and attention
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
    """A compiled model, with compile time, memory and loss."""

    step: Callable[[], torch.Tensor]
    compile_s: float
    peak_gib: float
    loss: float


def ready(setup: Setup, backend: Any) -> Ready:
    """Compile a model from scratch. Memory that was allocated before is not counted."""
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
    """Kernel and step times of each compiler. They alternate, because a warm GPU slows down whatever runs next."""
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
    """Summarize one compiler. The profile of the round with the median kernel time represents all rounds."""
    step_ms = statistics.median(times)
    calls, spent = sorted(profiles, key=lambda p: sum(p[1].values()))[len(profiles) // 2]
    outside = {name: ms for name, ms in spent.items() if not any(o in name for o in EXCLUDED_KERNELS)}
    slowest = sorted(((name[:80], calls[name], round(ms, 4)) for name, ms in outside.items()), key=lambda row: -row[2])[:30]
    return Measured(
        sum(spent.values()),
        sum(outside.values()),
        sum(calls.values()),
        step_ms,
        setup.tokens / step_ms * 1e3,
        each.peak_gib,
        each.compile_s,
        each.loss,
        slowest=tuple(slowest),
        kernel_ms_by_round=tuple(round(sum(p[1].values()), 3) for p in profiles),
        step_ms_by_turn=tuple(round(ms, 3) for ms in times),
    )


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
    """The number of calls and the total ms of each kernel in a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    calls, spent = Counter[str](), Counter[str]()
    for event in profiled.events():
        if event.device_type == DeviceType.CUDA:
            calls[event.name] += 1
            spent[event.name] += event.device_time / 1e3
    return calls, spent


def _step_times(step: Callable[[], Any], count: int) -> list[float]:
    """Times of consecutive steps in ms, each synchronized; host time is included."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def under_graphs(setup: Setup, backends: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Step and kernel times under mode="reduce-overhead". The compilers alternate in groups of steps, because a graph is recorded
    again after another model ran."""
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

            times[name] += _step_times(step, 12)[8:]  # the first ones compile, record, and are affected by what ran before
            time.sleep(REST_SECONDS)
            kernels[name].append(sum(_kernels(step)[1].values()))
            examples[name].module.zero_grad(set_to_none=True)
    return {name: (statistics.median(times[name]), statistics.median(kernels[name])) for name in backends}


def start_up() -> None:
    """Compile something small, so that importing Inductor and starting its workers is not part of any compile time."""
    for backend in BACKENDS.values():
        torch.compile(torch.nn.functional.layer_norm, backend=backend)(torch.ones(64, 128, device="cuda"), (128,))


def compare(setup: Setup, graphs: bool) -> dict[str, Any]:
    """Measure both compilers on one model. A failure is recorded as an error."""
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
            compiled.clear()  # frees their memory
            replayed = under_graphs(setup, backends)
            for name, (step_ms, kernel_ms) in replayed.items():
                rows[name] |= {"graphs_step_ms": step_ms, "graphs_kernel_ms": kernel_ms}
    return rows


def main() -> None:
    """Measure, and write the file after every model. Models in an existing file that are not requested are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="*", default=list(SETUPS), choices=list(SETUPS))
    parser.add_argument("--graphs", action="store_true")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"models": {}}
    environment = {
        "date": date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "version": onepass.__version__,
        "python": platform.python_version(),
    }
    reserve_memory(RESERVED_BYTES, torch.device("cuda"))
    start_up()
    for name in arguments.models:
        rows = compare(SETUPS[name], arguments.graphs)
        results["models"][name] = {"setup": asdict(SETUPS[name]), **environment, **rows}
        for compiler, row in rows.items():
            shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if not isinstance(v, (list, tuple))}
            print(name, compiler, shown, flush=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
