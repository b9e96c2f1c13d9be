"""Captures the graphs that a graph pass sees, for every model of the test zoo, forward and backward, into OUT/graphs.tar.

    PYTHONPATH=. python scripts/capture_graphs.py OUT          on a machine with a GPU: real widths, two layers, bf16
    tar -xf OUT/graphs.tar -C tests/fixtures/graphs            to add them to the tests

Inductor runs up to the point where it calls a user's last graph pass. Nothing is lowered or compiled; the traced graph runs op by
op, so that the backward is traced too. A model that fails is listed, and the others continue.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import multiprocessing
import os
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import fx

from bench.zoo import ZOO, Example
from tests.support.stored_graphs import dump, packed

LAYERS = 2  # enough to include what lies between layers
MAX_WORKERS = 4  # several models are on the GPU at once


@dataclass(frozen=True)
class Job:
    """One model to capture, and how to run it."""

    name: str
    model: str
    device: str
    size: str
    changes: dict[str, Any] = field(default_factory=dict)
    narrow: bool = False  # bf16 weights, overriding the model's default
    dynamic: bool = False  # the batch size is symbolic
    inference: bool = False


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job: files by name, or an error."""

    name: str
    seconds: float
    files: dict[str, bytes]
    nodes: dict[str, int]
    breaks: int = 0
    error: str | None = None


def jobs(device: str, size: str) -> list[Job]:
    """Every model of the zoo, and a few variants."""
    plain = [Job(name, name, device, size) for name in ZOO]
    gpt2 = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    bert = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return [
        *plain,
        Job("seed_transformer_learnable_bf16", "seed_transformer_learnable", device, size, narrow=True),
        Job("seed_transformer_learnable_dynamic", "seed_transformer_learnable", device, size, dynamic=True),
        Job("gpt2_dropout", "gpt2", device, size, gpt2),
        Job("bert_dropout", "bert", device, size, bert),
        Job("llama", "llama", device, size, inference=True),
    ]


class Recorder:
    """A backend that records the graphs that Inductor passes to a user's last graph pass."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.graphs: list[tuple[str, dict[str, Any]]] = []  # phase and graph

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        compiled: Callable[..., Any] = compile_fx(module, list(inputs), inner_compile=self.instead_of_lowering)
        return compiled

    def instead_of_lowering(self, module: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
        """Run Inductor's passes before lowering on a copy, record the result, and return the unchanged graph."""
        from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
        from torch._inductor import compile_fx, config
        from torch._inductor.custom_graph_pass import CustomGraphPass
        from torch._inductor.virtualized import V

        phase = "backward" if how.get("is_backward") else "inference" if how.get("is_inference") else "forward"
        record = self.record

        class Record(CustomGraphPass):  # type: ignore[misc]  # Inductor's types are not followed
            def __call__(self, graph: fx.Graph) -> None:
                record(phase, graph)

            def uuid(self) -> None:
                return None

        runnable = copy.deepcopy(module)
        with torch.no_grad(), config.patch(post_grad_custom_post_pass=Record()):
            compile_fx.view_to_reshape(module)
            mode = compile_fx.fake_tensor_prop(module, inputs)
            with V.set_fake_mode(mode):
                compile_fx._recursive_post_grad_passes(module, is_inference=phase == "inference")
        boxed: Callable[..., Any] = make_boxed_func(runnable.forward)
        return boxed

    def record(self, phase: str, graph: fx.Graph) -> None:
        """Record the current state of a graph."""
        self.graphs.append((phase, dump(graph, **self.about, phase=phase)))

    def named(self) -> dict[str, dict[str, Any]]:
        """Graphs by file name. If a model has several graphs of a phase, all but the first are numbered."""
        found: dict[str, dict[str, Any]] = {}
        for phase, graph in self.graphs:
            stem = f"{self.about['model']}_{phase}"
            numbers = (f"{stem}_{k}" if k > 1 else stem for k in range(1, len(self.graphs) + 1))
            found[next(n for n in numbers if n not in found)] = graph
        return found


def example_of(job: Job) -> Example:
    """The model of a job, with at most LAYERS layers."""
    maker = ZOO[job.model]
    if reason := maker.missing():
        raise RuntimeError(reason)
    changes = dict(job.changes)
    if "layers" in maker.sizes[job.size]:
        changes["layers"] = min(LAYERS, maker.sizes[job.size]["layers"])
    dtype = torch.bfloat16 if job.narrow or not maker.autocast else torch.float32
    return maker(job.size, device=job.device, dtype=dtype, **changes)


def step(job: Job, example: Example, run: Callable[..., Any]) -> None:
    """One training step, or one call without gradients."""
    if job.dynamic:
        for value in example.inputs.values():
            torch._dynamo.mark_dynamic(value, 0)
    device = torch.device(job.device).type
    with torch.no_grad() if job.inference else nullcontext():
        with torch.autocast(device, torch.bfloat16) if ZOO[job.model].autocast else nullcontext():
            loss = example.loss(run(**example.inputs))
        if not job.inference:
            loss.backward()


def capture(job: Job) -> Outcome:
    """Trace one model and return its graphs; errors become part of the outcome."""
    began, error, recorder = time.perf_counter(), None, Recorder({"model": job.name, "size": job.size})
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        # Cached results would have to be serialized, which is not possible here.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            example = example_of(job)
            step(job, example, torch.compile(example.module, backend=recorder, dynamic=None if job.dynamic else False))
    except Exception:  # models and releases may raise anything
        error = traceback.format_exc(limit=-6)
    if job.device.startswith("cuda"):
        torch.cuda.empty_cache()
    graphs = recorder.named()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return Outcome(
        job.name,
        time.perf_counter() - began,
        {name: packed(g) for name, g in graphs.items()},
        {name: len(g["nodes"]) for name, g in graphs.items()},
        breaks,
        error,
    )


def run_all(selected: list[Job], workers: int, keep: Callable[[Outcome], None]) -> None:
    """Run every job, a few at a time. Jobs that were lost in a crash run again, in a process each."""
    spawn = multiprocessing.get_context("spawn")
    crashed = []
    with ProcessPoolExecutor(workers, spawn) as pool:
        futures = {pool.submit(capture, job): job for job in selected}
        for future in as_completed(futures):
            try:
                keep(future.result())
            except BrokenProcessPool:
                crashed.append(futures[future])
    for job in crashed:
        with ProcessPoolExecutor(1, spawn) as pool:
            try:
                keep(pool.submit(capture, job).result())
            except BrokenProcessPool as error:
                keep(Outcome(job.name, 0.0, {}, {}, error=f"its process ended: {error}"))


def main() -> int:
    """Capture and print a summary; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="real")
    parser.add_argument("--models", nargs="*", help="names of zoo models; default: all")
    parser.add_argument("--workers", type=int, default=min(MAX_WORKERS, os.cpu_count() or 1))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    selected = [j for j in jobs(arguments.device, arguments.size) if not arguments.models or j.model in arguments.models]
    summary: dict[str, Any] = {"torch": torch.__version__, "device": arguments.device, "size": arguments.size, "jobs": []}

    def keep(outcome: Outcome) -> None:
        """Save an outcome immediately, so that it survives a later crash."""
        with tarfile.open(arguments.out / "graphs.tar", "a") as archive:
            for name, data in sorted(outcome.files.items()):
                entry = tarfile.TarInfo(f"{name}.json.gz")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        entry_json = {
            "name": outcome.name,
            "seconds": round(outcome.seconds, 1),
            "nodes": outcome.nodes,
            "breaks": outcome.breaks,
            "bytes": sum(map(len, outcome.files.values())),
            "error": outcome.error,
        }
        summary["jobs"].append(entry_json)
        (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1))
        print({k: v for k, v in entry_json.items() if k != "error"}, outcome.error or "", flush=True)

    (arguments.out / "graphs.tar").unlink(missing_ok=True)
    run_all(selected, arguments.workers, keep)
    failed = [job["name"] for job in summary["jobs"] if job["error"]]
    print(f"{len(selected) - len(failed)} of {len(selected)} captured" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
