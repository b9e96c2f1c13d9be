"""`onepass demo`: plans and compiles RMSNorm backward for an H200, then runs and checks a smaller one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ..device import Device
from ..integration.fuse import fuse
from ..runtime.card import local_device
from .check import as_tuple, check, in_float64
from .explain import RefusalRow, Report, explain_function
from .workloads import make_inputs, workload

WORKLOAD = "rms_norm_backward"
# Workloads to search for a refused merge. Larger regions have more refusals.
REFUSAL_CANDIDATES = (WORKLOAD, "rms_norm_backward_16", "block_backward")
SMALL_SHAPE = (64, 512)


def demo(console: Console) -> bool:
    """Print the demonstration. Returns whether every result was right."""
    began = perf_counter()
    console.rule("1. one pass over the data")
    shown = _explain(WORKLOAD)
    console.print(shown)
    console.rule("2. what was not merged")
    _show_refusal(console, shown)
    console.rule("3. accuracy")
    right = _show_numbers(console)
    if card := local_device():
        console.rule("4. speed on this GPU")
        _show_speed(console, card)
    console.print(f"\n{'all right' if right else '[red]WRONG[/red]'}, {perf_counter() - began:.0f} s")
    return right


def _explain(name: str, device: str = "h200") -> Report:
    chosen = workload(name)
    return explain_function(chosen.function, device=device)(*chosen.inputs())


def _refusals(shown: Report) -> Iterator[tuple[str, RefusalRow]]:
    for name in REFUSAL_CANDIDATES:
        found = shown if name == WORKLOAD else _explain(name)
        yield from ((name, r) for r in found.refusals if r.cost_fused_us is not None and r.cost_apart_us is not None)


def _show_refusal(console: Console, shown: Report) -> None:
    name, refusal = next(_refusals(shown), (None, None))
    if refusal is None:
        console.print("every merge was made")
        return
    console.print(
        f"{name}: {refusal.cost_fused_us:.1f} us in one kernel, {refusal.cost_apart_us:.1f} us in separate kernels, "
        "so they stay separate:\n"
        f"  {escape(refusal.detail)}"
    )


def _show_numbers(console: Console) -> bool:
    """Run a small instance and compare it with float64."""
    function = workload(WORKLOAD).function
    device = "cuda" if local_device() else "cpu"
    inputs = make_inputs(WORKLOAD, SMALL_SHAPE, device=device)
    results, eager, reference = as_tuple(fuse(function)(*inputs)), as_tuple(function(*inputs)), in_float64(function, inputs)
    where = "on the GPU" if device == "cuda" else "under the interpreter"
    console.print(f"{WORKLOAD} bf16 {SMALL_SHAPE[0]}x{SMALL_SHAPE[1]} {where}, against float64:")
    checks = [check(*tensors) for tensors in zip(results, eager, reference, strict=True)]
    for name, c in zip(("dx", "dw"), checks, strict=True):
        console.print(
            f"  {name}: max error {c.max_error:.2e} (allowed {c.max_bound:.2e}), RMS {c.rms_error:.2e} (allowed {c.rms_bound:.2e})"
        )
    return all(c.ok for c in checks)


def _show_speed(console: Console, card: Device) -> None:
    """Time the default size on this GPU and compare it with the best rate of its memory."""
    chosen = workload(WORKLOAD)
    inputs = chosen.inputs(device="cuda")
    shown = explain_function(chosen.function, device=card)(*inputs)
    us = _time_us(fuse(chosen.function), inputs)
    rate = shown.floor_bytes / us
    size = "x".join(map(str, chosen.default_shape))
    console.print(
        f"{WORKLOAD} bf16 {size}: {us:.1f} us, {rate / 1e6:.2f} TB/s of the {shown.device.bandwidth / 1e6:.2f} "
        f"a simple kernel sustains on {shown.device.title} ({100 * rate / shown.device.bandwidth:.0f} %)"
    )


def _time_us(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], runs: int = 20) -> float:
    """Median time of a call's kernels with a cold cache.

    The call is replayed from a CUDA graph, which excludes host time. Before each replay, 256 MB are written and another 256 MB
    read: a write alone would leave dirty lines in L2, which the timed kernels would have to evict.
    """
    function(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*inputs)
    written, read = (torch.zeros(1 << 26, device="cuda") for _ in range(2))
    times: list[float] = []
    for _ in range(runs):
        written.zero_()
        read.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * float(begin.elapsed_time(end)))
    return median(times)
