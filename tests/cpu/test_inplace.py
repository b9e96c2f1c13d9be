"""Outputs in the memory of inputs: which plans allow it, which memory is free, and what happens otherwise."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from hypothesis import event, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

import onepass
from onepass.capture.graph.reuse import GraphMemory
from onepass.integration import journal, region_op
from onepass.integration.aliasing import unsafe_outputs
from onepass.ir.expr import F32
from onepass.ir.program import Axis, Buffer, Load, Program, Store
from onepass.ir.size import Bindings
from onepass.ir.text import parse
from onepass.pipeline import generate, optimize
from onepass.plan import inplace
from onepass.plan.inplace import safe_inplace_pairs
from onepass.plan.legality import Family
from onepass.plan.partition import plan
from onepass.plan.plan import KernelPlan, Plan
from onepass.plan.schedule import Cover, LoopedRows, MixOrder, Outer, Pointwise, ResidentRows, Schedule, SplitRows
from onepass.runtime import offline
from onepass.runtime.compiled import Compiled
from onepass.runtime.executable import allocate, assemble, layout
from onepass.runtime.interpreter import interpret
from tests.support.forced_schedules import H200, candidates, chosen, planned, program_of
from tests.support.random_programs import EXTENTS, INPUT_BOUND, MOST_POINTS, Case, Maker, Val
from tests.support.region_calls import region
from tests.support.region_graphs import claimed, graph_of, norm
from tests.support.schedule_kinds import KINDS

EACH = 2  # schedules of a family per example


# ---- plans run in place ------------------------------------------------------------------------------------------------------


@contextmanager
def ctas_in(order: Callable[[int], list[int]]) -> Iterator[None]:
    """Run interpreted CTAs in a given order: with both directions, every CTA runs after every other one."""
    builder = interpret._engine().builder
    wanted: list[int] = []

    def dim(*counts: int) -> None:
        wanted[:] = order(counts[0])
        type(builder).set_grid_dim(builder, *counts)

    def place(at: int, *rest: int) -> None:
        type(builder).set_grid_idx(builder, wanted[at], *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_dim", dim, raising=False)
        patch.setattr(builder, "set_grid_idx", place, raising=False)
        yield


def run(plan: Plan, inputs: Mapping[str, Tensor], bindings: Bindings, over: Mapping[str, str]) -> dict[str, Tensor]:
    """The outputs of a plan; those in `over` are written to the memory of an input."""
    made = Compiled(plan, generate(plan), ()).artifact
    own = {name: t.as_strided(t.shape, t.stride()).clone(memory_format=torch.preserve_format) for name, t in inputs.items()}
    tensors = dict(own)
    for buffer in made.outputs:
        wanted = layout(buffer, bindings)
        tensors[buffer.name] = (
            own[over[buffer.name]].as_strided(wanted.shape, wanted.strides)
            if buffer.name in over
            else allocate(wanted, torch.device("cpu"))
        )
    assemble(made, torch.device("cpu"), frozenset()).run_into(tensors, bindings)
    return {b.name: tensors[b.name] for b in made.outputs}


def assert_same_in_place(plan: Plan, inputs: Mapping[str, Tensor], bindings: Bindings) -> int:
    """Check every in-place pair that a plan allows, with CTAs in both orders; returns the number of pairs."""
    pairs = safe_inplace_pairs(plan)
    apart = run(plan, inputs, bindings, {}) if pairs else {}
    for pair in pairs:
        for order in (lambda n: list(range(n)), lambda n: list(range(n))[::-1]):
            with ctas_in(order):
                shared = run(plan, inputs, bindings, dict([pair]))
            for name, actual in shared.items():
                assert torch.equal(bits(actual), bits(apart[name])), f"{name} with {pair} in place: {plan.kernels}"
    return len(pairs)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def cut_small(plan: Plan, seed: int) -> Plan:
    """The plan with one warp per CTA and smaller tiles, so that small data has several tiles per side."""
    chance = random.Random(seed)

    def smaller(size: int) -> int:
        return max(1, size >> chance.randrange(5))

    def cut(kernel: KernelPlan) -> KernelPlan:
        blocks = bool(kernel.kernel.space.block)
        match one := kernel.schedule:
            case Pointwise():
                width = one.width if blocks else smaller(one.width)
                return replace(kernel, schedule=replace(one, warps=1, height=smaller(one.height), width=width))
            case LoopedRows() | SplitRows():
                step = one.step if blocks else smaller(one.step)
                return replace(kernel, schedule=replace(one, warps=1, height=smaller(one.height), step=step, private_states=False))
            case ResidentRows():
                return replace(kernel, schedule=replace(one, warps=1, height=smaller(one.height)))
            case Outer():
                return replace(kernel, schedule=replace(one, warps=1, step=smaller(one.step), width=smaller(one.width)))
            case MixOrder():
                return replace(kernel, schedule=replace(one, warps=1, step=smaller(one.step)))
            case _:
                return replace(kernel, schedule=replace(one, warps=1))

    return replace(plan, kernels=tuple(map(cut, plan.kernels)))


class Overwriting(Maker):
    """Makes Programs whose outputs have the layout of inputs."""

    def again(self) -> None:
        """Read an input a second time along other axes of the same lengths."""
        spec = self.one(*self.inputs)
        load = next((n for n in self.builder.nodes if isinstance(n, Load) and n.buffer == spec.buffer.name), None)
        if load is None or spec.buffer.dtype != F32:
            return
        swapped = self.draw(st.permutations([a for a, _ in load.strides]))
        if all(self.extent[a] == self.extent[b] for (a, _), b in zip(load.strides, swapped, strict=True)):
            strides = tuple(sorted((b, step) for (_, step), b in zip(load.strides, swapped, strict=True)))
            self.values.append(Val(self.builder.add(replace(load, strides=strides)), F32, frozenset(swapped), INPUT_BOUND, True))

    def over(self) -> None:
        """Store a value with the layout of a loaded input."""
        # Neither a slice nor an indexed table: a store along the same strides would leave elements unwritten.
        loads = {n.buffer: n for n in self.builder.nodes if isinstance(n, Load) and not n.offset and not n.indexed}
        spec = self.one(*self.inputs)
        load = loads.get(spec.buffer.name)
        if load is None or not spec.buffer.dtype.is_float:
            return
        axes = {a for a, _ in load.strides}
        val = self.pick(lambda v: v.dtype == F32 and v.dims <= axes and not isinstance(self.builder.nodes[v.at], Load))
        if val is None:
            return
        val = val if spec.buffer.dtype == F32 else self.op("cast", val, dtype=spec.buffer.dtype)
        name = f"z{len(self.outputs)}"
        self.outputs.append(Buffer(name, spec.buffer.dtype, "output", spec.buffer.shape, spec.buffer.strides))
        self.builder.add(Store(name, val.at, load.strides))


@st.composite
def overwriting(draw: st.DrawFn) -> Case:
    """Programs like those of tests.support.random_programs, with outputs that could overwrite an input."""
    extents = draw(st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=3))
    extents = extents if draw(st.booleans()) else extents[:1] * len(extents)
    while torch.Size(extents).numel() > MOST_POINTS:
        extents.pop()
    maker = Overwriting(draw, tuple(Axis(name, n) for name, n in zip("abc", extents, strict=False)), {})
    for _ in range(draw(st.integers(1, 3))):
        maker.input()
        maker.again()
    for _ in range(draw(st.integers(0, 3))):
        maker.pointwise(draw(st.integers(0, 2)))
        maker.reduce()
        if draw(st.booleans()):
            maker.over()
    maker.pointwise(draw(st.integers(1, 3)))
    maker.outputs_of_reductions()
    maker.over()
    maker.over()
    if not maker.outputs:
        maker.output(lambda v: True)
    return maker.case()


@given(overwriting(), st.integers(0, 2**32))
@settings(max_examples=200)
def test_in_place_writes_that_a_plan_allows_do_not_change_results(case: Case, seed: int) -> None:
    """The interpreter has no threads, so hazards between threads are not tested here."""
    if not case.program.nodes:
        return
    program = optimize(case.program)
    note(str(program))
    inputs = case.make_inputs(seed % 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inplace, "WARP", 1)
        assert_same_in_place(plan(program, case.bindings, H200), inputs, case.bindings)
        for family, plans in candidates(program, case.bindings):
            for k, kernel in enumerate(random.Random(seed).sample(plans, min(EACH, len(plans)))):
                one = cut_small(planned(program, case.bindings, kernel), seed + k)
                event(f"{family.value}: {'in place' if assert_same_in_place(one, inputs, case.bindings) else 'apart'}")


# Tiles of fewer elements than threads, without a CTA-wide synchronization between them.
REFUSED = {"inner, rows a tile", "inner looped, odd rows", "inner looped, long odd rows"}


WHOLE = ("norm", "column_softmax", "both", "elementwise", "blocks")  # functions with a result as large as their data


@pytest.mark.parametrize("kind", [kind for kind, (function, *_) in KINDS.items() if function.__name__ in WHOLE])
def test_every_family_can_write_over_its_data(kind: str) -> None:
    function, family, (rows, cols), schedule = KINDS[kind]
    rows = min(rows, 13) if cols > 2000 else rows
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, cols, generator=generator), torch.randn(cols, generator=generator)
    program, tensors, bindings = program_of(function, x, w, dynamic=False if isinstance(schedule.rows, Cover) else None)
    one = planned(program, bindings, chosen(program, bindings, family, replace(schedule, warps=1)))
    assert (("out0", "x") in safe_inplace_pairs(one)) == (kind not in REFUSED)
    assert_same_in_place(one, tensors, bindings)


# ---- what is refused ---------------------------------------------------------------------------------------------------------

SQUARE = """program square
  axis m = 64
  axis n = 64
  input x: f32 [64, 64] strides [64, 1]
  input t: i64 [64] strides [1]
  output y: f32 [64, 64] strides [64, 1]
  output r: f32 [64] strides [1]
"""


def square(body: str) -> Program:
    return parse(SQUARE + body)


def forced(program: Program, family: Family, schedule: Schedule) -> Plan:
    return planned(program, {}, chosen(program, {}, family, schedule))


ROW = ResidentRows(1, (64,), 1)
SUM = "  %0 = load x [m:64, n:1]\n  %1 = reduce sum(%0) over n\n  %2 = result %1.0\n"
REFUSALS: dict[str, tuple[str, Schedule]] = {
    "the store is transposed": (SUM + "  %3 = mul %0 %2\n  store y [m:1, n:64] = %3\n  store r [m:1] = %2\n", ROW),
    "the input is looked up": (
        "  %0 = load t [m:1]\n  %1 = load x [n:1] gather(%0 * 64 < 64)\n  %2 = reduce sum(%1) over n\n"
        "  %3 = result %2.0\n  %4 = sub %1 %3\n  store y [m:64, n:1] = %4\n  store r [m:1] = %3\n",
        ROW,
    ),
    "the input is looked up from where it is written": (
        "  %0 = load t [m:1]\n  %1 = load x [m:64, n:1] gather(%0 * 64 < 1)\n  %2 = reduce sum(%1) over n\n  %3 = result %2.0\n"
        "  %4 = sub %1 %3\n  store y [m:64, n:1] = %4\n  store r [m:1] = %3\n",
        ROW,
    ),
    "the next row is read": (
        SUM.replace("[m:64, n:1]", "[m:64, n:1] + 64") + "  %3 = mul %0 %2\n  store y [m:64, n:1] = %3\n  store r [m:1] = %2\n",
        ROW,
    ),
    "rows overlap": (SUM.replace("m:64", "m:63") + "  %3 = mul %0 %2\n  store y [m:63, n:1] = %3\n  store r [m:1] = %2\n", ROW),
    "another load is transposed": (
        SUM + "  %3 = load x [m:1, n:64]\n  %4 = add %3 %2\n  %5 = add %0 %4\n  store y [m:64, n:1] = %5\n  store r [m:1] = %2\n",
        ROW,
    ),
    "the store is not in the last walk": (
        SUM + "  %3 = mul %0 %0\n  %4 = mul %0 %2\n"
        "  %5 = reduce sum(%4) over n\n  %6 = result %5.0\n  store r [m:1] = %6\n"
        "  store y [m:64, n:1] = %3\n",
        LoopedRows(1, 32, 1),
    ),
    "the store waits for nothing": (
        "  %0 = load x [m:64, n:1]\n  %1 = index (m, n) : i64\n  %2 = cast f32 %1\n"
        "  %3 = reduce sum(%0) over n\n  %4 = result %3.0\n"
        "  store y [m:64, n:1] = %2\n  store r [m:1] = %4\n",
        ROW,
    ),
    "several threads read an element": (
        SUM + "  %3 = mul %0 %2\n  store y [m:64, n:1] = %3\n  store r [m:1] = %2\n",
        replace(ROW, warps=4),
    ),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_unsafe_in_place_writes_are_refused(why: str) -> None:
    body, schedule = REFUSALS[why]
    assert ("y", "x") not in safe_inplace_pairs(forced(square(body), Family.INNER, schedule))


def test_an_input_that_other_ctas_read_is_not_overwritten() -> None:
    """r[m] in place of a row vector v[m] that every column block reads."""
    text = """program scaled
  axis m = 64
  axis n = 256
  input x: f32 [64, 256] strides [256, 1]
  input v: f32 [64] strides [1]
  output y: f32 [64, 256] strides [256, 1]
  output r: f32 [64] strides [1]
  %0 = load x [m:256, n:1]
  %1 = load v [m:1]
  %2 = mul %0 %1
  %3 = neg %1
  store y [m:256, n:1] = %2
  store r [m:1] = %3
"""
    pairs = safe_inplace_pairs(forced(parse(text), Family.POINTWISE, Pointwise(4, 64, 1)))
    assert ("r", "v") not in pairs and ("y", "x") in pairs


def test_an_input_that_ctas_of_other_rows_read_is_not_overwritten() -> None:
    """r[m, n] in place of v[m, n], which is read again for every k."""
    text = """program scaled
  axis k = 8
  axis m = 64
  axis n = 256
  input x: f32 [8, 64, 256] strides [16384, 256, 1]
  input v: f32 [64, 256] strides [256, 1]
  output y: f32 [8, 64, 256] strides [16384, 256, 1]
  output r: f32 [64, 256] strides [256, 1]
  %0 = load x [k:16384, m:256, n:1]
  %1 = load v [m:256, n:1]
  %2 = mul %0 %1
  %3 = neg %1
  store y [k:16384, m:256, n:1] = %2
  store r [m:256, n:1] = %3
"""
    pairs = safe_inplace_pairs(forced(parse(text), Family.POINTWISE, Pointwise(4, 256, 1)))
    assert ("r", "v") not in pairs and ("y", "x") in pairs


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_only_memory_of_the_same_type_is_reused(dtype: str) -> None:
    text = (
        "%0 = load x [m:64, n:1]; %1 = cast f32 %0; %2 = neg %1; store y [m:64, n:1] = %2"
        if dtype == "bf16"
        else "%0 = load x [m:64, n:1]; %1 = neg %0; store y [m:64, n:1] = %1"
    )
    program = parse(
        f"program p; axis m = 64; axis n = 64; input x: {dtype} [64, 64] strides [64, 1]; "
        f"output y: f32 [64, 64] strides [64, 1]; {text}"
    )
    plan = forced(program, Family.POINTWISE, Pointwise(4, 64, 1))
    assert (("y", "x") in safe_inplace_pairs(plan)) == (dtype == "f32")


def test_an_input_that_a_later_kernel_reads_is_not_overwritten() -> None:
    program = square(SUM + "  %3 = neg %0\n  store y [m:64, n:1] = %3\n  store r [m:1] = %2\n")
    whole = forced(program, Family.INNER, ROW)
    (kernel,) = whole.kernels
    assert ("y", "x") in safe_inplace_pairs(whole)
    assert ("y", "x") not in safe_inplace_pairs(
        replace(
            whole,
            kernels=(
                kernel,
                replace(
                    kernel,
                    kernel=replace(
                        kernel.kernel,
                        program=replace(program, nodes=tuple(n for n in program.nodes if getattr(n, "buffer", "") != "y")[:3]),
                    ),
                ),
            ),
        )
    )


def test_a_resident_row_of_odd_length_can_be_overwritten() -> None:
    """The partial sectors at its ends have few elements, but a reduction across all warps comes before the store."""
    program, _, bindings = program_of(lambda x: torch.softmax(x, -1), torch.randn(4, 4099))
    kept = ResidentRows(1, (1024,) * 4, 4, sector_elems=8)
    assert ("out0", "x") in safe_inplace_pairs(planned(program, bindings, chosen(program, bindings, Family.INNER, kept)))
    walked = LoopedRows(1, 1024, 4, sector_elems=8)
    assert ("out0", "x") not in safe_inplace_pairs(planned(program, bindings, chosen(program, bindings, Family.INNER, walked)))


def test_overwritten_inputs_are_read_coherently() -> None:
    """`ld.global.nc` would promise that the kernel does not write what it reads."""

    def overwritten(x: Tensor, w: Tensor) -> Tensor:
        return norm(x, w)

    program, _, bindings = program_of(overwritten, torch.randn(4096, 2048), torch.randn(2048))
    one = plan(program, bindings, H200)
    assert ("out0", "x") in safe_inplace_pairs(one)
    for source in generate(one):
        offline.compile(source, H200)
        found = list((Path(os.environ["ONEPASS_CACHE_DIR"]) / "triton").rglob(f"{source.name}.ptx"))
        assert found and not any("global.nc" in path.read_text() for path in found)


# ---- which memory is free ----------------------------------------------------------------------------------------------------

BIG = (256, 128)


def taken(fn: Callable[..., object], *shapes: tuple[int, ...], **changes: object) -> tuple[list[int], fx.Graph]:
    """How many outputs of each region take an input's memory, and the graph."""
    graph = graph_of(fn, *shapes)
    outcome = claimed(graph, **changes)
    assert outcome.regions
    return [r.in_place for r in outcome.regions], graph


def test_a_matmul_that_only_the_region_reads_is_overwritten() -> None:
    fn = lambda x, w, m: norm((x @ m).view(2, 128, 128), w)  # noqa: E731
    counts, graph = taken(fn, BIG, BIG[1:], (128, 128))
    assert counts == [1] and not [n for n in graph.nodes if "empty" in str(n.target)]
    x, w, m = torch.randn(BIG), torch.randn(128), torch.randn(128, 128)
    torch.testing.assert_close(fx.GraphModule(nn.Module(), graph)(x, w, m), fn(x, w, m))
    assert taken(fn, BIG, BIG[1:], (128, 128), in_place=False)[0] == [0]
    assert taken(fn, BIG, BIG[1:], (128, 128), functional=True)[0] == [0]


def test_a_region_overwrites_the_output_of_another() -> None:
    fn = lambda x, w, m: torch.softmax(norm(x @ m, w).t().cumsum(0).t() @ m, -1)  # noqa: E731
    assert sum(taken(fn, BIG, BIG[1:], (128, 128))[0]) == 2
    cut = lambda x, w, m: norm(torch.relu(norm(x @ m, w)).view(-1).cos().view(BIG), w)  # noqa: E731
    assert sum(taken(cut, BIG, BIG[1:], (128, 128))[0]) >= 1


KEPT: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "an input of the graph": lambda x, w, m: norm(x, w),
    "a result of the graph": lambda x, w, m: (lambda h: (norm(h, w), h))(x @ m),
    "a view is a result": lambda x, w, m: (lambda h: (norm(h, w), h.view(-1)))(x @ m),
    "another kernel reads it": lambda x, w, m: (lambda h: (norm(h, w), h @ m))(x @ m),
    "another kernel reads a view": lambda x, w, m: (lambda h: (norm(h, w), h.t() @ h))(x @ m),
    "arithmetic outside reads it": lambda x, w, m: (lambda h: (norm(h, w), torch.cumsum(torch.relu(h), 0)))(x @ m),
    "a view of an input of the graph": lambda x, w, m: norm(torch.ops.aten._unsafe_view(x, (128, 256)).view(BIG), w),
}


@pytest.mark.parametrize("why", KEPT)
def test_memory_with_other_readers_is_not_reused(why: str) -> None:
    assert taken(KEPT[why], BIG, BIG[1:], (128, 128))[0] == [0]


@pytest.mark.parametrize(
    ("made", "is_free"),
    [
        (lambda x, m: x @ m, True),
        (lambda x, m: x * 2, True),
        (lambda x, m: torch.cumsum(x, 0), False),
        (lambda x, m: x.t(), False),
        (lambda x, m: x, False),
    ],
    ids=["matmul", "arithmetic", "an op not known to allocate", "view", "argument"],
)
def test_only_ops_known_to_allocate_give_free_memory(made: Callable[..., Tensor], is_free: bool) -> None:
    graph = graph_of(lambda x, m: made(x, m).sum(0), BIG, (128, 128))
    call = next(n for n in graph.nodes if "sum.dim" in str(n.target))
    (value,) = call.all_input_nodes
    assert GraphMemory(graph, ()).is_dead_after(call, value) == is_free


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cast_to_the_same_type_may_return_its_argument(dtype: torch.dtype) -> None:
    graph = graph_of(lambda x: x.sum(0), BIG)
    x, call = next(iter(graph.nodes)), next(n for n in graph.nodes if "sum.dim" in str(n.target))
    with graph.inserting_before(call):
        cast = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": dtype})
    cast.meta["val"] = torch.empty(BIG, dtype=dtype, device="meta")
    call.args = (cast, *call.args[1:])
    assert GraphMemory(graph, ()).is_dead_after(call, cast) == (dtype == torch.float64)


def test_only_one_output_reuses_the_memory_of_an_input() -> None:
    def normed(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        unit = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1)
        return unit * w, unit + w

    fn = lambda x, w, m: normed(x @ m, w)  # noqa: E731
    counts, graph = taken(fn, BIG, BIG[1:], (128, 128))
    assert counts == [1]
    args = torch.randn(BIG), torch.randn(128), torch.randn(128, 128) / 11
    for actual, expected in zip(fx.GraphModule(nn.Module(), graph)(*args), fn(*args), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_small_buffers_are_not_reused() -> None:
    assert taken(lambda x, w, m: norm(x @ m, w), (64, 128), (128,), (128, 128))[0] == [0]


def test_two_regions_that_read_the_same_value_keep_it() -> None:
    def fn(x: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ m
        return norm(h, w) @ m, norm(h.cos() + norm(h, w) @ m, w)

    _, graph = taken(fn, BIG, BIG[1:], (128, 128))
    first = next(n for n in graph.nodes if n.target is torch.ops.aten.mm.default)
    bases = [base for n in graph.nodes if "_all_bases" in n.kwargs for base in n.kwargs["_all_bases"]]
    readers = [u for u in first.users if "_all_bases" in u.kwargs]
    assert first not in bases or len(readers) == 1
    x, w, m = torch.randn(BIG), torch.randn(128), torch.randn(128, 128) / 11
    for actual, expected in zip(fx.GraphModule(nn.Module(), graph)(x, w, m), fn(x, w, m), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# ---- calls -------------------------------------------------------------------------------------------------------------------

TRANSPOSED = """program transposed
  axis m = 24
  axis n = 24
  input in0: f32 [24, 24] strides [24, 1]
  output out0: f32 [24, 24] strides [1, 24]
  output out1: f32 [24] strides [1]
  %0 = load in0 [m:24, n:1]
  %1 = reduce sum(%0) over n
  %2 = result %1.0
  %3 = sub %0 %2
  store out0 [m:1, n:24] = %3
  store out1 [m:1] = %2
"""


pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.mark.parametrize("shift", [0, 5, -5])
def test_unsafe_overlaps_are_computed_out_of_place(shift: int) -> None:
    """The same memory read by rows and written by columns, or memory that overlaps partially."""
    flat = torch.randn(24 * 24 + 10)
    x = flat[5 : 5 + 576].view(24, 24)
    before = x.clone()
    out = flat[5 + shift : 5 + shift + 576].as_strided((24, 24), (1, 24))
    sums = torch.empty(24)
    region_op.run([out, sums], [x], [], region("t", TRANSPOSED, on_error="raise"))
    torch.testing.assert_close(out, before - before.sum(-1, keepdim=True))
    (seen,) = journal.snapshot().regions
    assert seen.copied == 1 and not journal.snapshot().fallbacks


def test_in_place_and_out_of_place_calls_are_distinguished() -> None:
    for shared in (False, True, False, True):
        x = torch.randn(24, 24)
        before, sums = x.clone(), torch.empty(24)
        out = x.as_strided((24, 24), (1, 24)) if shared else torch.empty(24, 24).t()
        region_op.run([out, sums], [x], [], region("u", TRANSPOSED, on_error="raise"))
        torch.testing.assert_close(out, before - before.sum(-1, keepdim=True))
        assert shared or torch.equal(x, before)


def test_calls_are_distinguished_by_which_output_overlaps_an_input() -> None:
    for over in (1, 0, 1, 0):
        x = torch.randn(24, 24)
        before = x.clone()
        out = x.as_strided((24, 24), (1, 24)) if over == 0 else torch.empty(24, 24).t()
        sums = x.view(-1)[:24] if over == 1 else torch.empty(24)
        region_op.run([out, sums], [x], [], region("u", TRANSPOSED, on_error="raise"))
        torch.testing.assert_close(out, before - before.sum(-1, keepdim=True))
        torch.testing.assert_close(sums, before.sum(-1))


def test_only_identical_elements_are_safe_to_overwrite() -> None:
    x = torch.randn(8, 8)
    pairs = {(0, 0), (0, 1)}
    assert unsafe_outputs([torch.randn(8, 8)], [x], pairs) == ()
    assert unsafe_outputs([x], [x], pairs) == () and unsafe_outputs([x.view(64)], [x], pairs) == ()
    assert unsafe_outputs([x], [x], {(0, 1)}) == (0,)
    assert unsafe_outputs([x.t()], [x], pairs) == (0,) and unsafe_outputs([x[1:]], [x], pairs) == (0,)
    assert unsafe_outputs([x.view(torch.int32)], [x], pairs) == (0,)
    assert unsafe_outputs([x], [x, x], pairs) == (0,), "another input reads what is overwritten"
    assert unsafe_outputs([x, x], [torch.randn(3)], pairs) == (0, 1), "two outputs in one place"
    assert unsafe_outputs([x[:0]], [x], pairs) == ()
    assert unsafe_outputs([x], [x.t()], pairs) == (0,), "the input lies otherwise"
    flat = torch.randn(16)
    for out, taken in ((flat[:8], flat[7:15]), (flat[7:15], flat[:8])):
        assert unsafe_outputs([out], [taken], pairs) == (0,), "one element in common"


# ---- through Inductor --------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"interpret": True, "by_cost": False, "verify": 1, "on_error": "raise"}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ to compile for CPU tensors")


def compiled(fn: Callable[..., Any], *args: Tensor, **options: Any) -> str:
    """The code Inductor generates for a function, after checking its results against eager."""

    with torch.no_grad():
        results, (code, *_) = run_and_get_code(torch.compile(fn, backend=onepass.backend, options={**OPTIONS, **options}), *args)
        expected = fn(*args)
    for actual, wanted in zip(*((r if isinstance(r, tuple) else (r,)) for r in (results, expected)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    return code[code.index("def call") :]


def written(code: str) -> list[tuple[str, str]]:
    """The first buffer that each call of a region writes and the first that it reads."""
    return re.findall(r"^ *onepass_region_\w+\(\[\D*?(buf\d+).*?\], \[(\w+)", code, re.MULTILINE)


def feed_forward(x: Tensor, r: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return norm(norm((x @ m) + r, w) @ m, w)


def arguments() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, r, w, m = (torch.randn(shape, generator=generator) for shape in ((2, *BIG), (2, *BIG), BIG[1:], (128, 128)))
    return x, r, w, m / 11


@needs_compiler
def test_inductor_allocates_nothing_for_outputs_in_reused_memory() -> None:
    """Two matmuls allocate memory; each of two regions writes where it read."""
    args = arguments()
    code = compiled(feed_forward, *args)
    assert code.count("empty_strided_cpu(") == 2 and "clone" not in code
    assert written(code) == [("buf0", "buf0"), ("buf3", "buf3")]
    assert not any(out == first for out, first in written(compiled(feed_forward, *args, in_place=False)))
    seen = journal.snapshot()
    assert [r.in_place for r in seen.graphs[0].regions] == [1, 1] and all(r.copied == 0 for r in seen.regions)


@needs_compiler
def test_a_result_is_not_overwritten() -> None:
    def fn(x: Tensor, r: Tensor, w: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ m
        return norm(h + r, w), h

    compiled(fn, *arguments())
    assert [r.in_place for g in journal.snapshot().graphs for r in g.regions] == [0]


@needs_compiler
def test_training_in_place_matches_eager() -> None:
    """Gradients through two linear layers and three norms, with activations that backward needs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(128), nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 128), nn.RMSNorm(128))
    x = torch.randn(BIG)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        (run(leaf) * torch.arange(128.0)).sum().backward()
        return [leaf.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item, union-attr]

    actual = gradients(torch.compile(model, backend=onepass.backend, options=OPTIONS))
    for one, other in zip(actual, gradients(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    assert sum(r.in_place for g in journal.snapshot().graphs for r in g.regions) > 0


class Classifier(nn.Module):
    """Its logits are saved for the backward and not read by anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 512, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), target)


@needs_compiler
@pytest.mark.parametrize("in_place", [True, False])
def test_a_gradient_reuses_the_memory_of_a_saved_activation(in_place: bool) -> None:
    torch.manual_seed(0)
    model, x, target = Classifier(), torch.randn(256, 64), torch.randint(0, 512, (256,))

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        run(leaf, target).backward()
        return [leaf.grad, model.head.weight.grad.clone()]  # type: ignore[list-item, union-attr]

    run = torch.compile(model, backend=onepass.backend, options={**OPTIONS, "in_place": in_place})
    actual, (_, code) = run_and_get_code(gradients, run)
    for one, other, again in zip(actual, gradients(model), gradients(run), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert torch.equal(one, again)
    assert [r.in_place for g in journal.snapshot().graphs if g.phase == "backward" for r in g.regions] == [int(in_place)]
    assert bool(re.search(r"onepass_region_\w+\(\[mm\]", code)) == in_place and "clone" not in code


@needs_compiler
def test_a_saved_activation_that_is_read_again_is_not_overwritten() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(128, 128, requires_grad=True), torch.randn(BIG)

    def fn(x: Tensor) -> Tensor:
        h = x @ weight
        return torch.softmax(h, -1).square().sum() + (h @ weight).square().sum()

    leaf = x.clone().requires_grad_()
    actual = torch.autograd.grad(torch.compile(fn, backend=onepass.backend, options=OPTIONS)(leaf), (leaf, weight))
    for one, other in zip(actual, torch.autograd.grad(fn(leaf), (leaf, weight)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2)


class Shown(Classifier):
    """The same backward graph, but its caller sees the logits."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.head(x)
        return nn.functional.cross_entropy(logits, target), logits.detach()


@needs_compiler
def test_a_cached_graph_does_not_overwrite_what_this_caller_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.compiler.config, "force_disable_caches", False)
    x, target = torch.randn(256, 64, requires_grad=True), torch.randint(0, 512, (256,))
    hidden, shown = Classifier(), Shown()
    torch.compile(hidden, backend=onepass.backend, options=OPTIONS)(x, target).backward()
    assert [r.in_place for g in journal.snapshot().graphs if g.phase == "backward" for r in g.regions] == [1]
    torch._dynamo.reset()
    loss, logits = torch.compile(shown, backend=onepass.backend, options=OPTIONS)(x, target)
    before = logits.clone()
    loss.backward()
    assert torch.equal(logits, before)
