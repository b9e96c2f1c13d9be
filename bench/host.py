"""Measures the host time of a region call relative to an eager add: `PYTHONPATH=. python bench/host.py OUT.json`.

Tensors are small, so that the GPU is mostly idle and only launching is timed: many calls, one synchronization at the end.
"""

from __future__ import annotations

import inspect
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass import compat
from onepass.capture.graph.region_program import RegionProgram, lower_region
from onepass.capture.graph.regions import find_regions
from onepass.integration import region_op  # noqa: F401, defines the op
from onepass.integration.region_spec import RegionSpec, encode
from onepass.pipeline import optimize

CALLS = 2000


def norm(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm with two outputs: one kernel."""
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (x * rstd * w).to(x.dtype), rstd


def backward(x: Tensor, w: Tensor, rstd: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm backward: two kernels, the second one sums partial results."""
    xhat, g = x.float() * rstd, dy.float() * w
    return (rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))).to(x.dtype), (dy.float() * xhat).sum(0).to(w.dtype)


def region_of(function: Callable[..., Any], args: tuple[Tensor, ...]) -> RegionProgram:
    """The only region of a function."""
    mode = compat.fake_mode()
    graph = compat.trace_graph(function, [mode.from_tensor(a, static_shapes=True) for a in args], mode).graph
    (region,) = find_regions(graph, args[0].device, {})
    return lower_region(graph, region)


def microseconds(call: Callable[[], Any]) -> float:
    """Host time of a call in microseconds: the minimum of a few rounds."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - began) / CALLS * 1e6)
        torch.cuda.synchronize()
    return best


def main() -> None:
    """Measure and write the result file."""
    x, dy = (torch.randn(256, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w, rstd = torch.randn(512, device="cuda", dtype=torch.bfloat16), torch.rand(256, 1, device="cuda")
    times = {"eager add": microseconds(lambda: x + x)}
    for name, function, args in (("one kernel", norm, (x, w)), ("two kernels", backward, (x, w, rstd, dy))):
        part = region_of(function, args)
        outs = [
            torch.empty_strided(n.meta["val"].shape, n.meta["val"].stride(), dtype=n.meta["val"].dtype, device="cuda")
            for n in part.outputs
        ]
        named = dict(zip(inspect.signature(function).parameters, args, strict=True))
        ins = [named[str(n.target).rsplit("_", 1)[0]] for n in part.inputs]
        text = encode(RegionSpec(part.id, part.program, optimize(part.program)))
        call = partial(torch.ops.onepass.region.default, outs, ins, [], text)
        call()
        times[f"region, {name}"] = microseconds(call)
    ratio = {name: round(us / times["eager add"], 2) for name, us in times.items()}
    found = {
        "date": date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "us": {n: round(us, 2) for n, us in times.items()},
        "times an add": ratio,
    }
    print(found)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
