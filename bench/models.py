"""Whole training steps, onepass beside Inductor: kernel time, time outside matmul and attention, step time, memory, compiling.

    PYTHONPATH=. python bench/models.py OUT.json [--models NAME ...] [--graphs]

Kernel time is the sum of CUDA kernel durations of one step, from the profiler. Both compilers run in this process, one after the
other, each from empty caches of its own. `--graphs` adds step times under mode="reduce-overhead".
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
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import onepass
from tests.models import ZOO, Example

STEPS = 10
# Kernels of matmul and attention, by what their names begin with or hold: neither compiler makes them.
OTHERS = ("nvjet", "gemm", "cutlass", "cublas", "flash", "fmha", "sdpa", "cudnn", "splitK", "xmma")


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
    slowest: tuple[tuple[str, int, float], ...] = ()  # kernels outside matmul and attention: name, calls, ms


def measure(setup: Setup, backend: Any, graphs: bool) -> Measured:
    """A model under one compiler, from nothing."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    example = _example(setup)
    run = torch.compile(example.module, backend=backend)
    began = time.perf_counter()
    loss = _step(setup, example, run)
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - began
    for _ in range(2):
        _step(setup, example, run)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    _step(setup, example, run)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    calls, spent = _kernels(lambda: _step(setup, example, run))
    outside = {name: ms for name, ms in spent.items() if not any(o in name for o in OTHERS)}
    step_ms = _step_time(lambda: _step(setup, example, run))
    slowest = sorted(((name[:80], calls[name], round(ms, 4)) for name, ms in outside.items()), key=lambda row: -row[2])[:30]
    replayed = _under_graphs(setup, example, backend) if graphs else None
    return Measured(sum(spent.values()), sum(outside.values()), sum(calls.values()), step_ms, setup.tokens / step_ms * 1e3, peak,
                    compile_s, float(loss.detach()), replayed, tuple(slowest))


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


def _step_time(step: Callable[[], Any]) -> float:
    """The median over several steps, each waited for; what the host takes is in it."""
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def _under_graphs(setup: Setup, example: Example, backend: Any) -> float:
    torch._dynamo.reset()
    run = torch.compile(example.module, backend=backend, mode="reduce-overhead")

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        _step(setup, example, run)

    for _ in range(4):
        step()
    return _step_time(step)


def main() -> None:
    """Measure, and write after every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="*", default=list(SETUPS), choices=list(SETUPS))
    parser.add_argument("--graphs", action="store_true")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = {"date": date.today().isoformat(), "card": torch.cuda.get_device_name(), "torch": torch.__version__,
                               "onepass": onepass.__version__, "python": platform.python_version(), "models": {}}
    for name in given.models:
        rows = results["models"][name] = {"setup": asdict(SETUPS[name])}
        for compiler, backend in (("inductor", "inductor"), ("onepass", onepass.backend)):
            with tempfile.TemporaryDirectory() as caches:
                for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "ONEPASS_CACHE_DIR"):
                    os.environ[variable] = str(Path(caches) / variable.lower())
                try:
                    rows[compiler] = asdict(measure(SETUPS[name], backend, given.graphs))
                except Exception as error:  # one that fails is shown as such, and the others go on
                    rows[compiler] = {"error": f"{type(error).__name__}: {error}"[:500]}
            shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in rows[compiler].items() if k != "slowest"}
            print(name, compiler, shown, flush=True)
            given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
