"""Tests that need a card: large tensors, streams, graphs, addresses, and feedback from the compiler to the planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass import pipeline
from onepass.capture.function.trace import capture
from onepass.codegen.source import Source
from onepass.errors import NotWarmedUp
from onepass.plan.partition import plan
from onepass.runtime.binary import Binary
from onepass.runtime.card import local_device
from onepass.runtime.executable import aligned_of, assemble
from onepass.runtime.launch import prepare
from onepass.tools.check import as_tuple
from tests.support.correctness import assert_right, once, randoms, twice
from tests.support.function_cases import CASES, Case, rms_norm

HUGE = (600_000, 4096)  # more than 2**31 elements
NAMES = ("rms_norm-w-backward", "layer_norm-wb", "softmax-last", "sum-both", "cross_entropy-mean")


def fused_case(name: str) -> tuple[Case, Callable[..., Any]]:
    return CASES[name], onepass.fuse(CASES[name].function)


def equal(actual: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(as_tuple(actual), as_tuple(expected), strict=True))


# ---- more than 2**31 elements ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("large")
def test_rms_norm_of_more_than_2_to_the_31_elements() -> None:
    """Rows are independent: all are written, and those around every power of two are right."""
    rows, cols = HUGE
    x = torch.randn(HUGE, dtype=torch.bfloat16, device="cuda")
    w = randoms(1, (cols,), dtype=torch.bfloat16, device="cuda")
    (y,) = once(onepass.fuse(rms_norm), (x, w))
    assert not any(bool(part.isnan().any()) for part in y.split(rows // 8))
    for middle in (2, 2**30 // cols, 2**31 // cols, rows - 3):
        part = slice(middle - 2, middle + 3)
        assert_right(lambda *_, part=part: y[part], rms_norm, lambda _, part=part: (x[part], w))  # type: ignore[misc]


@pytest.mark.usefixtures("large")
def test_column_sums_of_more_than_2_to_the_31_elements() -> None:
    """Zeros and ones, whose sums are exact in any order."""
    rows, cols = HUGE
    x = torch.randint(0, 2, HUGE, dtype=torch.int8, device="cuda").to(torch.bfloat16)
    exact = torch.zeros(cols, dtype=torch.int64, device="cuda")
    for part in x.split(rows // 16):
        exact += part.sum(0, dtype=torch.float32).to(torch.int64)
    (columns,) = twice(onepass.fuse(lambda x: x.sum(0, dtype=torch.float32)), (x,))
    assert torch.equal(columns.to(torch.int64), exact)
    row_sums, columns = twice(onepass.fuse(lambda x: (x.float().sum(1), x.float().sum(0))), (x,))
    assert torch.equal(columns.to(torch.int64), exact)
    assert int(row_sums.sum(dtype=torch.float64)) == int(exact.sum())


# ---- streams ---------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke(name=NAMES[0])
@pytest.mark.parametrize("name", NAMES)
def test_two_streams_at_once(name: str) -> None:
    case, fused = fused_case(name)
    inputs = [case.inputs(4096, 1000, torch.bfloat16, "cuda", seed) for seed in range(2)]
    serial = [as_tuple(fused(*args)) for args in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(20):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[k].append(as_tuple(fused(*inputs[k])))
    torch.cuda.synchronize()
    assert all(equal(result, serial[k]) for k in range(2) for result in found[k])


def keep_busy() -> None:
    """Some milliseconds of work on the current stream."""
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        a = torch.tanh(a @ a)


def test_work_is_queued_on_the_current_stream() -> None:
    """The input is filled late on a side stream; a launch anywhere else would read what was there before."""
    case, fused = fused_case("rms_norm-w-backward")
    inputs = case.inputs(4096, 1000, torch.bfloat16, "cuda")
    expected = fused(*inputs)
    late = tuple(torch.zeros_like(t) for t in inputs)
    fused(*late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        keep_busy()
        for actual, made in zip(late, inputs):
            actual.copy_(made)
        result = fused(*late)
    stream.synchronize()
    assert equal(result, expected)


# ---- graphs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke(name=NAMES[0])
@pytest.mark.parametrize("name", NAMES)
def test_inside_a_graph(name: str) -> None:
    case, fused = fused_case(name)
    static = case.inputs(2304, 1000, torch.bfloat16, "cuda")
    fused(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused(*static)
    for seed in range(1, 4):
        fresh = case.inputs(2304, 1000, torch.bfloat16, "cuda", seed)
        for actual, made in zip(static, fresh, strict=True):
            actual.copy_(made)
        graph.replay()
        torch.cuda.synchronize()
        assert equal(captured, fused(*fresh))


def test_nothing_is_compiled_inside_a_graph() -> None:
    """Neither for a function that was never called before, nor for a row count that needs other kernels."""
    case, fused = fused_case("layer_norm-wb")
    few, many = (case.inputs(rows, 768, torch.bfloat16, "cuda") for rows in (64, 8192))
    with pytest.raises(NotWarmedUp), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fused(*few)
    fused(*few)
    with pytest.raises(NotWarmedUp), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fused(*many)
    assert_right(fused, case.function, lambda seed: case.inputs(8192, 768, torch.bfloat16, "cuda", seed))


# ---- addresses and row counts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [768, 1027])
@pytest.mark.parametrize("name", NAMES)
def test_unaligned_addresses(name: str, cols: int) -> None:
    """One fused function, called with tensors of any alignment."""
    case, fused = fused_case(name)
    for ahead in (0, 1, 3, 8):

        def moved(t: Tensor, ahead: int = ahead) -> Tensor:
            return torch.cat([t.new_zeros(ahead), t.flatten()])[ahead:].view(t.shape)

        def make(seed: int, moved: Callable[[Tensor], Tensor] = moved) -> tuple[Tensor, ...]:
            return tuple(moved(t) for t in case.inputs(500, cols, torch.bfloat16, "cuda", seed))

        assert_right(fused, case.function, make, run=twice)


def test_one_capture_serves_every_row_class() -> None:
    case, fused = fused_case("formula-rms_norm_backward")
    for rows in (3, 64, 500, 2000, 5000, 20_000, 50_000, 16, 100, 300, 1500, 6000, 30_000, 60_000):
        assert_right(fused, case.function, lambda seed, rows=rows: case.inputs(rows, 512, torch.bfloat16, "cuda", seed))  # type: ignore[misc]
    assert len(fused._traces) == 1 and len(fused._traces[0].kernels.variants) == 7  # type: ignore[attr-defined]


# ---- a kernel that spills --------------------------------------------------------------------------------------------------


def test_a_plan_that_spills_is_replaced_and_the_next_is_right() -> None:
    """The compiler is made to report spills for the first kernel it sees; the plan after that runs."""
    case = CASES["rms_norm-w-backward"]
    inputs = case.inputs(4096, 1024, torch.bfloat16, "cuda")
    captured = capture(case.function, inputs)
    program, bindings = pipeline.optimize(captured.program), captured.bind(inputs)
    device, everything = local_device(), frozenset(captured.tensors(inputs))
    assert device is not None and bindings is not None
    measured: list[str] = []

    def measure(source: Source) -> Binary:
        measured.append(source.text)
        binary = prepare(source, 0, aligned_of(source, everything)).binary
        return replace(binary, spill_bytes=64, spills_in_loop=True) if source.text == measured[0] else binary

    compiled = pipeline.compile(plan(program, bindings, device), measure)
    assert compiled.rejected and all(b.spill_bytes == 0 for b in compiled.binaries)
    outputs = frozenset(b.name for b in compiled.artifact.outputs)
    executable = assemble(compiled.artifact, torch.device("cuda", 0), everything | outputs)

    def run(*args: Tensor) -> Any:
        return captured.result(executable(captured.tensors(args), bindings), args)

    assert_right(run, case.function, lambda seed: case.inputs(4096, 1024, torch.bfloat16, "cuda", seed))
