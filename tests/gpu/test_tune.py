"""Tuning and calibrating on a card: they run, results stay right, winners are remembered. No time is asserted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch._dynamo

import onepass
from onepass.integration import engine
from onepass.integration.engine import counts
from onepass.measure.calibrate import calibrate
from tests.support.correctness import assert_right
from tests.support.function_cases import CASES
from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (1200, 1024)  # small, and in the class of row counts around 3168

SECOND = """
import sys, torch, onepass
from onepass.integration.engine import counts
from onepass.runtime import tune
from tests.support.function_cases import CASES

tune.choose = lambda *_: sys.exit("timed again")
case = CASES["rms_norm-w-backward"]
fused = onepass.fuse(case.function, tune="on")
fused(*case.inputs(*map(int, sys.argv[1:]), torch.bfloat16, "cuda"))
torch.cuda.synchronize()
print(counts().plans, counts().compilations)
"""


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizeable: None) -> None:
    """A separate store for each test, nothing in memory, and a reservation on the card, without which nothing is timed."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "store"))
    engine.forget()
    torch._dynamo.reset()


@pytest.mark.smoke(name="rms_norm-w-backward")
@pytest.mark.parametrize("name", ["rms_norm-w-backward", "cross_entropy-mean"])
def test_what_is_tuned_is_right(name: str) -> None:
    case = CASES[name]
    fused = onepass.fuse(case.function, tune="on")
    inputs = case.inputs(*SHAPE, torch.bfloat16, "cuda")
    kept, random = [t.clone() for t in inputs], torch.cuda.get_rng_state()
    fused(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(kept, inputs)) and torch.equal(random, torch.cuda.get_rng_state())
    assert_right(fused, case.function, lambda seed: case.inputs(*SHAPE, torch.bfloat16, "cuda", seed))
    trace = fused._traces[0]
    bindings = trace.captured.bind(inputs) or {}
    aligned = trace.outputs.union(trace.captured.tensors(inputs))
    trials = trace.kernels.executable(bindings, torch.device("cuda"), aligned).artifact.trials
    assert len(trials) > 1 and all(t.us > 0 for t in trials) and sum(t.taken for t in trials) == 1


def test_a_second_process_times_nothing() -> None:
    case = CASES["rms_norm-w-backward"]
    onepass.fuse(case.function, tune="on")(*case.inputs(*SHAPE, torch.bfloat16, "cuda"))
    done = run_python(SECOND, *map(str, SHAPE), env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout == "0 0\n", done.stdout + done.stderr


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inside_torch_compile(mode: str | None) -> None:
    """Including tuning before a graph is captured, which `reduce-overhead` does at a later call."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.LayerNorm(1024)).cuda()
    x = torch.randn(2048, 512, device="cuda")
    expected = module(x)
    with onepass.settings(tune="on"):
        compiled = torch.compile(module, backend=onepass.backend, mode=mode)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            module.zero_grad(set_to_none=True)  # gradients of the previous step are in memory that the graph overwrites
            found = compiled(x)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
            found.sum().backward()
    assert not onepass.report().fallbacks


def test_captured_into_a_graph_after_tuning() -> None:
    case = CASES["softmax-last"]
    fused = onepass.fuse(case.function, tune="on")
    inputs = case.inputs(*SHAPE, torch.bfloat16, "cuda")
    before = counts()
    expected = fused(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused(*inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected) and counts().plans > before.plans


def test_the_card_can_be_calibrated() -> None:
    found = calibrate(dry_run=True)  # raises if a figure is implausible
    assert not found.kept and "facts" in str(found)
