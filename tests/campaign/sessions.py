"""The sessions that the interruption campaign interrupts: `python -m tests.campaign.sessions NAME [--go-on]`.

Prints results that must be the same each time. With --go-on, Ctrl-C does not end it: as in a notebook, the same is run once more.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import onepass
from onepass.measure import bench
from onepass.measure.results import load, to_json
from tests.support.fake_bench import PLACE, SMALL, FakeClock

STEPS = 4
RESULTS = Path("bench.json")  # where a session is started
INTERRUPTED = "interrupted, and going on"


class Tiny(nn.Module):
    """A norm, two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        return F.cross_entropy(self.down(F.gelu(self.up(self.norm(x)))), target)


def tiny_model() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model with its inputs, the same each time."""
    torch.manual_seed(0)
    return Tiny(), (torch.randn(6, 24), torch.randint(10, (6,)))


def training() -> Callable[[], list[float]]:
    """A few steps from the same initial state; compiled code is kept."""
    model, inputs = tiny_model()
    start = {name: t.clone() for name, t in model.state_dict().items()}
    compiled = torch.compile(model, backend=onepass.backend, options={"interpret": True, "rest": "eager", "by_cost": False})

    def steps() -> list[float]:
        model.load_state_dict(start)
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = compiled(*inputs)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return [*losses, *(float(p.detach().double().sum()) for p in model.parameters())]

    return steps


def explaining() -> Callable[[], list[Any]]:
    """Two functions planned and compiled."""
    x = torch.empty(64, 256, device="meta")
    functions = [lambda x: x.softmax(-1), lambda x: (x * x).sum(0)]
    return lambda: [onepass.explain(f, device="h200")(x).to_json() for f in functions]


def measuring(*providers: str) -> Callable[[], list[Any]]:
    """A small benchmark with made-up times; it resumes an earlier run."""
    bench.anchor_bytes = lambda floors: ()  # type: ignore[assignment, attr-defined]  # anchors are large tensors

    def run() -> list[Any]:
        clock: Any = FakeClock()
        bench.bench(bench.Options(SMALL, providers, RESULTS), Console(file=io.StringIO()), PLACE, lambda: clock)
        rows: list[Any] = to_json(load(RESULTS))["rows"]  # read back from the file, where figures have fewer digits
        return rows

    return run


SESSIONS: dict[str, Callable[[], Callable[[], list[Any]]]] = {
    "training": training,
    "explaining": explaining,
    "bench": lambda: measuring("onepass", "eager"),
    "bench with Inductor": lambda: measuring("onepass", "eager", "inductor"),
}


def main() -> None:
    """Run a session once, or twice if it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SESSIONS)
    parser.add_argument("--go-on", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    work = SESSIONS[given.name]()
    try:
        found = work()
    except KeyboardInterrupt:
        if not given.go_on:
            raise
        print(INTERRUPTED, file=sys.stderr)
        found = work()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
