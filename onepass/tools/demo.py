"""The demonstration: RMSNorm backward planned and compiled for an H200, and a smaller one run and checked."""

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
from ..runtime.card import present
from .check import as_tuple, check, in_float64
from .explain import RefusalRow, Report, explain_function
from .workloads import make_inputs, workload

SHOWN = "rms_norm_backward"
# Where to look for a refused merge: larger regions have more to refuse.
REFUSING = (SHOWN, "rms_norm_backward_16", "block_backward")
SMALL = (64, 512)


def demo(console: Console) -> bool:
    """Print the demonstration; whether every number was right."""
    began = perf_counter()
    console.rule("1. one pass over the data")
    shown = _explain(SHOWN)
    console.print(shown)
    console.rule("2. what was not merged")
    _show_refusal(console, shown)
    console.rule("3. the numbers")
    right = _show_numbers(console)
    if card := present():
        console.rule("4. on this GPU")
        _show_speed(console, card)
    console.print(f"\n{'all right' if right else '[red]WRONG[/red]'}, {perf_counter() - began:.0f} s")
    return right


def _explain(name: str, device: str = "h200") -> Report:
    chosen = workload(name)
    return explain_function(chosen.function, device=device)(*chosen.inputs())


def _refusals(shown: Report) -> Iterator[tuple[str, RefusalRow]]:
    for name in REFUSING:
        found = shown if name == SHOWN else _explain(name)
        yield from ((name, r) for r in found.refusals if r.cost_fused_us is not None and r.cost_apart_us is not None)


def _show_refusal(console: Console, shown: Report) -> None:
    name, refusal = next(_refusals(shown), (None, None))
    if refusal is None:
        console.print("every merge paid off")
        return
    console.print(f"{name}: {refusal.cost_fused_us:.1f} us in one kernel, {refusal.cost_apart_us:.1f} us apart, so apart:\n"
                  f"  {escape(refusal.detail)}")


def _show_numbers(console: Console) -> bool:
    """Run a small instance and compare it with float64."""
    function = workload(SHOWN).function
    device = "cuda" if present() else "cpu"
    inputs = make_inputs(SHOWN, SMALL, device=device)
    results, eager, reference = as_tuple(fuse(function)(*inputs)), as_tuple(function(*inputs)), in_float64(function, inputs)
    where = "on the GPU" if device == "cuda" else "under the interpreter"
    console.print(f"{SHOWN} bf16 {SMALL[0]}x{SMALL[1]} {where}, against float64:")
    checks = [check(*tensors) for tensors in zip(results, eager, reference, strict=True)]
    for name, c in zip(("dx", "dw"), checks, strict=True):
        console.print(f"  {name}: max error {c.max_error:.2e} (allowed {c.max_bound:.2e}), "
                      f"RMS {c.rms_error:.2e} (allowed {c.rms_bound:.2e})")
    return all(c.ok for c in checks)


def _show_speed(console: Console, card: Device) -> None:
    """Time the real size on the present card, against the best rate its memory sustains."""
    chosen = workload(SHOWN)
    inputs = chosen.inputs(device="cuda")
    shown = explain_function(chosen.function, device=card)(*inputs)
    us = _time_us(fuse(chosen.function), inputs)
    rate = shown.floor_bytes / us
    size = "x".join(map(str, chosen.default_shape))
    console.print(f"{SHOWN} bf16 {size}: {us:.1f} us, {rate / 1e6:.2f} TB/s of the {shown.device.bandwidth / 1e6:.2f} "
                  f"a simple kernel sustains on {shown.device.title} ({100 * rate / shown.device.bandwidth:.0f} %)")


def _time_us(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], runs: int = 20) -> float:
    """Median time of a call's kernels with a cold cache.

    The call is replayed from a graph, so that the host's share does not count. Before each replay 256 MB are written and
    another 256 MB read: a write alone leaves dirty lines in L2 that the timed kernels would have to evict.
    """
    function(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*inputs)
    written, read = (torch.zeros(1 << 26, device="cuda") for _ in range(2))
    times = []
    for _ in range(runs):
        written.zero_()
        read.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return median(times)
