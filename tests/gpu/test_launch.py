"""Launching on a real card: values, alignment, empty and large grids, streams, threads, graphs, host cost."""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"), pytest.mark.smoke]

from onepass.codegen.source import GridDim, Param, ParamKind, Source  # noqa: E402
from onepass.device import DEVICES  # noqa: E402
from onepass.errors import CompileFailed  # noqa: E402
from onepass.ir.expr import DTYPES  # noqa: E402
from onepass.ir.size import sym  # noqa: E402
from onepass.runtime import card, launch, offline  # noqa: E402

BLOCK = 1024
TEXT = f"""import triton
import triton.language as tl


@triton.jit(do_not_specialize=["zero"])
def vector_add(x, y, out, s0, zero):
    i = tl.program_id(0) * {BLOCK} + tl.arange(0, {BLOCK})
    a = tl.load(x + i, mask=i < s0)
    b = tl.load(y + i, mask=i < s0)
    tl.store(out + i, a + b + zero, mask=i < s0)
"""
ALL = frozenset({"x", "y", "out"})


def vector_add() -> Source:
    pointers = tuple(Param(name, ParamKind.POINTER, name, DTYPES["f32"]) for name in ("x", "y", "out"))
    rest = (Param("s0", ParamKind.SIZE, "s0"), Param("zero", ParamKind.ZERO, "zero"))
    return Source("vector_add", TEXT, pointers + rest, (GridDim(sym("s0"), BLOCK),), warps=4)


def call(launcher: launch.Launcher, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """Launch on the current stream of the tensors' device."""
    n = x.numel()
    grid = vector_add().programs({"s0": n})
    stream = torch.cuda.current_stream(x.device).cuda_stream
    launcher(grid, (x.data_ptr(), y.data_ptr(), out.data_ptr(), n, 0), stream)


@pytest.mark.parametrize("n", [0, 1, 2, 16, 1000, BLOCK, 4096, 10_000_019])
def test_values_for_every_size_from_one_kernel(n: int) -> None:
    launcher = launch.prepare(vector_add(), 0, ALL)
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    out = torch.full_like(x, float("nan"))
    call(launcher, x, y, out)
    assert torch.equal(out, x + y)
    assert launch.prepare(vector_add(), 0, ALL) is launcher


def test_misaligned_pointers() -> None:
    launcher = launch.prepare(vector_add(), 0, frozenset({"out"}))
    x, y = torch.randn(5001, device="cuda")[1:], torch.randn(5003, device="cuda")[3:]
    out = torch.empty(5000, device="cuda")
    call(launcher, x, y, out)
    assert torch.equal(out, x + y)
    assert launcher.binary.wide_loads == 0


def test_binary_is_the_one_compiled_offline() -> None:
    present = card.local_device()
    assert present is not None
    launcher = launch.prepare(vector_add(), 0, ALL)
    assert launcher.binary == offline.compile(vector_add(), present)
    assert launcher.binary.registers > 0


def test_graph_capture_and_replay() -> None:
    launcher = launch.prepare(vector_add(), 0, ALL)
    x, y, out = (torch.randn(100_000, device="cuda") for _ in range(3))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(launcher, x, y, out)
        call(launcher, out, y, out)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, x + y + y)


def test_two_streams_and_two_threads() -> None:
    launcher = launch.prepare(vector_add(), 0, ALL)
    data = [[torch.randn(1 << 22, device="cuda") for _ in range(3)] for _ in range(2)]
    torch.cuda.synchronize()

    def work(tensors: list[torch.Tensor]) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                tensors[2].fill_(float("nan"))
                call(launcher, *tensors)
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(tensors,)) for tensors in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, y, out in data:
        assert torch.equal(out, x + y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
def test_a_device_that_is_not_current() -> None:
    launcher = launch.prepare(vector_add(), 1, ALL)
    x, y, out = (torch.randn(5000, device="cuda:1") for _ in range(3))
    with torch.cuda.device(0):
        call(launcher, x, y, out)
    assert torch.equal(out, x + y)


def test_loading_what_a_worker_compiled_starts_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch.prepare(vector_add(), 0, ALL)  # the first launch in a process makes Triton compile its driver utilities
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    source = replace(vector_add(), name="added", text=TEXT.replace("vector_add", "added"))
    device = card.local_device()
    assert device is not None
    offline.compile(source, device, ALL)
    monkeypatch.setattr(subprocess, "Popen", _no_compiler)
    launcher = launch.prepare(source, 0, ALL)
    monkeypatch.undo()
    x, y, out = (torch.randn(5000, device="cuda") for _ in range(3))
    call(launcher, x, y, out)
    assert torch.equal(out, x + y)


def _no_compiler(*args: object, **kwargs: object) -> None:
    raise AssertionError(f"started: {args[0]}")


def test_a_launch_failure_is_a_coded_error() -> None:
    broken = replace(vector_add(), text=TEXT.replace("a + b", "a + undefined"))
    with pytest.raises(CompileFailed, match="undefined"):
        launch.prepare(broken, 0, ALL)


def test_the_card_is_recognized() -> None:
    facts = card.doctor_facts()
    assert facts["usable"]["launch"]["ok"] and facts["card"]["sms"] > 0 and facts["driver_cuda"]
    if "H200" in facts["card"]["title"]:
        assert card.local_device() is DEVICES["h200"]


def test_host_cost_of_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    launcher = launch.prepare(vector_add(), 0, ALL)
    x, y, out = (torch.randn(BLOCK, device="cuda") for _ in range(3))
    args, stream = (x.data_ptr(), y.data_ptr(), out.data_ptr(), BLOCK, 0), torch.cuda.current_stream().cuda_stream
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            launcher(1, args, stream)
        best = min(best, (time.perf_counter() - start) / 100 * 1e6)
    with capsys.disabled():
        print(f"\nhost cost of one launch: {best:.2f} us")
    assert best < 30
