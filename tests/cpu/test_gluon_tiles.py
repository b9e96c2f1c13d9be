"""Column tiles staged in shared memory: results in the functional model, compilation, and when the planner offers them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from onepass import errors, pipeline
from onepass.codegen import gluon_tiles
from onepass.codegen import kernel_ir as ir
from onepass.codegen.printer import Lowered
from onepass.device import Device, device
from onepass.ir.oracle import evaluate
from onepass.plan.cost.model import cost
from onepass.plan.estimate import estimate
from onepass.plan.kernel import Kernel
from onepass.plan.legality import Family, Illegal
from onepass.plan.partition import plan, with_join
from onepass.plan.plan import KernelPlan, Plan
from onepass.plan.resources import demand
from onepass.plan.schedule import StagedTiles
from onepass.plan.scoring import scores
from onepass.plan.split import halves
from onepass.plan.staging.tiles import register_cap, rows_at_once, smem_bytes, strip_rows, strips, strips_of, tile_stageable
from onepass.plan.thread_layout import explicit_vector
from onepass.plan.traffic import traffic
from onepass.runtime import offline
from onepass.runtime.binary import Binary
from onepass.runtime.compile_job import job
from onepass.runtime.compiled import Compiled
from onepass.runtime.executable import allocate, assemble, layout
from onepass.runtime.interpreter import gluon_model
from onepass.runtime.module import build
from onepass.tools.functions import outer_sum
from tests.support.forced_schedules import as_kernel
from tests.support.kernel_changes import Change, assigned, changed, fields, value_fields, without
from tests.support.processes import run_python

H200 = device("h200")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
COUNTS = (1, 2, 3, 5, 7, 8, 14)


def total(xs: tuple[Tensor, ...]) -> Tensor:
    found = xs[0].float()
    for x in xs[1:]:
        found = found + x.float()
    return found


def greatest(*xs: Tensor) -> Tensor:
    return total(xs).amax(0)


def spread(*xs: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(total(xs), 0)
    return var, mean


def product_and_least(x: Tensor) -> tuple[Tensor, Tensor]:
    return (1 + x.float() / 512).prod(0), x.float().amin(0)


def log_sum(x: Tensor) -> Tensor:
    return torch.logsumexp(x.float(), 0)


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.float().argmax(0), x.float().argmin(0)


def signs(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x > 2).any(0), (x > -2).all(0)


def gradient_and_bias(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.where(x > 0, dy, 0)
    return dx, dx.float().sum(0)


def wide_gradient(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    dx = x.float() * dy.float()
    return dx, dx.sum(0)


def vectors_beside(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    y = (x.float() - mean) * rstd * w + b
    return y.sum(0), rstd.sum(0) + w.float()


def mixed(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() * y.float()).sum(0)


def meta(rows: int, cols: int, dtype: torch.dtype = F16) -> Tensor:
    return torch.empty(rows, cols, dtype=dtype, device="meta")


def kernel_of(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> tuple[Kernel, dict[str, int]]:
    """A function as one kernel that walks rows, and the sizes of a call."""
    return as_kernel(fn, args, Family.OUTER, held=False)


def tiles(kernel: Kernel, warps: int = 4, width: int = 64, deep: int = 2, stages: int = 2, split: int = 1) -> StagedTiles:
    """A schedule whose tiles have `deep` vectors per thread."""
    able, vector = tile_stageable(kernel), explicit_vector(kernel)
    tall, size = rows_at_once(width, vector, warps) * deep, sum(kernel.program.dtypes[i].size for i in able)
    one = StagedTiles(tall, width, warps, stages, split, strip_rows(tall, width, warps, vector, size), frozenset(able))
    smem = smem_bytes(demand(kernel), one)
    ctas_per_sm = 2 if 2 * (smem + H200.smem_reserve) <= H200.smem_per_sm else 1
    return replace(one, registers=register_cap(len(able), warps, ctas_per_sm, H200))


def inputs(count: int, rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(count * rows + cols)
    return tuple(torch.randn(rows, cols).to(dtype) for _ in range(count))


def run_tiles(fn: Callable[..., Any], args: tuple[Tensor, ...], wide: bool = False, **how: int) -> None:
    """Run in the model, join if rows are split, and compare with the oracle."""
    kernel, bindings = kernel_of(fn, args)
    schedule, program = tiles(kernel, **how), kernel.program
    assert schedule.staged
    takes = estimate(demand(kernel), schedule, H200)
    costs = cost(kernel, schedule, replace(takes, ctas_per_sm=max(1, takes.ctas_per_sm)), traffic(kernel, bindings), H200)
    one = KernelPlan("tiles", kernel, schedule, takes, costs, (program, schedule))
    order = (*kernel.space.rows, *kernel.space.cols)
    kernels = tuple(replace(k, name=f"tiles_{i}") for i, k in enumerate(with_join(one, bindings, H200, order, {})))
    chosen = Plan(program, H200, bindings, kernels, ())
    made = Compiled(chosen, pipeline.generate(chosen, wide), ()).artifact
    assert made.sources[0].gluon and len(made.sources) == (1 if schedule.splits == 1 else 2)
    names = [b.name for b in program.buffers if b.role == "input"]
    given = dict(zip(names, args, strict=True))
    found = assemble(made, torch.device("cpu"), frozenset())(given, bindings)
    for name, right in evaluate(program, given, bindings).items():
        actual = found[name]
        if actual.is_floating_point():
            scale = max(1.0, float(right.abs().max()))
            torch.testing.assert_close(actual.double(), right, rtol=2 * torch.finfo(actual.dtype).eps, atol=4e-6 * scale)
        else:
            assert torch.equal(actual, right)


# ---- results ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("fn", [outer_sum, greatest, spread])
def test_reductions_of_many_inputs_are_right(fn: Callable[..., Any], count: int, dtype: torch.dtype) -> None:
    run_tiles(fn, inputs(count, 256, 256, dtype), width=128, deep=2, stages=2 + count % 3, split=1 + count % 4)
    run_tiles(fn, inputs(count, 100, 72, dtype), width=64, deep=1 + count % 2, stages=2 + count % 2, split=1 + count % 3)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("how", [{"deep": 1}, {"deep": 4, "split": 3, "stages": 3}, {"deep": 4, "width": 32, "warps": 8}])
@pytest.mark.parametrize("fn", [product_and_least, log_sum, positions, signs])
def test_every_reduction_is_right(fn: Callable[..., Any], how: dict[str, Any], dtype: torch.dtype) -> None:
    run_tiles(fn, inputs(1, 300, 72, dtype), **how)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "split"), [(2, 1), (2, 3), (31, 2), (32, 2), (33, 5), (64, 3), (200, 1), (200, 7), (250, 4)])
def test_any_ring_any_split_any_number_of_rows(rows: int, split: int, stages: int) -> None:
    run_tiles(spread, inputs(1, rows, 72, F32), stages=stages, split=split)  # tiles of 16 rows


@pytest.mark.parametrize("cols", [8, 64, 72, 200, 256])
@pytest.mark.parametrize("width", [32, 64, 256])
def test_any_number_of_columns(cols: int, width: int) -> None:
    run_tiles(outer_sum, inputs(2, 70, cols, BF16), width=width, split=2)


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("fn", [gradient_and_bias, wide_gradient])
def test_full_size_results_are_stored_too(fn: Callable[..., Any], split: int) -> None:
    run_tiles(fn, inputs(2, 100, 72, BF16), split=split)


@pytest.mark.parametrize(("deep", "split"), [(1, 1), (4, 3)])
def test_row_vectors_and_row_scalars_are_not_staged(deep: int, split: int) -> None:
    x, row = inputs(1, 100, 72, BF16)[0], torch.rand(100, 1)
    run_tiles(vectors_beside, (x, torch.randn(72), torch.randn(72), row, row + 0.5), deep=deep, split=split)


def test_variances_of_many_rows_keep_full_precision() -> None:
    """A running mean is rounded at every row. Per-thread states compensate for that."""
    x = (torch.linspace(1, 2, 16384)[:, None] + torch.zeros(32)).half()
    kernel, bindings = kernel_of(spread, (x,))
    var, mean = torch.empty(32), torch.empty(32)
    buffers = dict(zip([b.name for b in kernel.program.buffers], (x, var, mean), strict=True))
    source = gluon_tiles.lower(kernel, tiles(kernel, width=32, deep=1), bindings, "spread").source()
    gluon_model.run_source(source, buffers, bindings)
    for actual, right in ((var, x.double().var(0)), (mean, x.double().mean(0))):
        torch.testing.assert_close(actual.double(), right, rtol=torch.finfo(F32).eps, atol=0)


def test_types_may_be_mixed() -> None:
    (x,), (y,) = inputs(1, 100, 72, BF16), inputs(1, 100, 72, F32)
    run_tiles(mixed, (x, y), split=2)


def test_64_bit_element_offsets_are_right() -> None:
    run_tiles(gradient_and_bias, inputs(2, 100, 72, BF16), wide=True, split=3)


def test_overhanging_rows_do_not_contribute() -> None:
    """Zeros filled in by TMA would be the maximum of negative numbers, and would make a product 0."""
    x = -1 - torch.rand(33, 72)
    run_tiles(greatest, (x,), deep=4)
    run_tiles(positions, (x,), deep=4, split=2)
    run_tiles(log_sum, (x - 100,), deep=4)


# ---- broken kernels --------------------------------------------------------------------------------------------------------


def lowered(count: int, rows: int, cols: int, **how: int) -> tuple[Lowered, dict[str, Tensor], dict[str, int]]:
    """A sum's kernel, its buffers and its sizes."""
    args = inputs(count, rows, cols, F32)
    kernel, bindings = kernel_of(outer_sum, args)
    made = gluon_tiles.lower(kernel, tiles(kernel, **how), bindings, "tiles")
    program = kernel.program
    given = dict(zip([b.name for b in program.buffers if b.role == "input"], args, strict=True))
    fresh = {b.name: allocate(layout(b, bindings), torch.device("cpu")) for b in program.buffers if b.role == "output"}
    return made, {**given, **fresh}, bindings


def strip(offset: int) -> Change:
    return value_fields(ir.SharedLoad, slot=lambda load: replace(load.slot, index=f"{load.slot.index} + {offset}"))


MANY, FEW, STRIPS = (100, 2), (16, 2), (100, 8)  # rows, and vectors per thread of a tile


@pytest.mark.parametrize(
    ("change", "caught", "size"),
    [
        (without(ir.Wait), errors.UseBeforeArrival, MANY),
        (fields(ir.Wait, phase="0"), errors.WrongPhase, MANY),
        (lambda node: ir.Fence() if isinstance(node, ir.Release) else node, errors.RefillBeforeDrain, MANY),
        (assigned("prefetch_tile", "tile + 1"), errors.CopyLeftBehind, MANY),
        (fields(ir.Expect, lambda expect: expect.barrier.index == "slot", bytes=4096), errors.ExpectedBytesDiffer, MANY),
        (assigned("prologue_in", "prologue_tile <= tile_count"), errors.CopyOutOfBounds, FEW),
        (
            fields(
                ir.CopyAsync,
                lambda copy: copy.pred == "prefetch_in" and copy.map == "xs1_tiles",
                coordinates=("prefetch_tile * 16 + 256", "first_col"),
            ),
            errors.CopyOutOfBounds,
            MANY,
        ),
        (strip(1), errors.UseBeforeArrival, STRIPS),
        (strip(9), errors.OutsideAllocation, STRIPS),
        (fields(ir.Store, masks=()), errors.AccessOutOfBounds, MANY),
    ],
)
def test_a_broken_kernel_is_caught(change: Change, caught: type[Exception], size: tuple[int, int]) -> None:
    rows, deep = size
    kernel, buffers, bindings = lowered(2, rows, 72, deep=deep)
    with pytest.raises(caught):
        gluon_model.run_source(changed(kernel, change), buffers, bindings)


def test_zeros_past_the_last_row_are_masked() -> None:
    kernel, buffers, bindings = lowered(1, 20, 64, deep=2)
    source = kernel.source()
    trace = gluon_model.run_source(source, buffers, bindings)
    assert {c.axes for c in trace.crossings} == {(0,)} and len(trace.crossings) == 1
    assert source.text.count("rows_in") == 2, "what is whole has no mask"


# ---- the text --------------------------------------------------------------------------------------------------------------

GOLDEN = """\
    iteration = 0
    for tile in range(split_id, whole_tiles, 3):
        slot = iteration % 2
        mbarrier.wait(ready.index(slot), iteration // 2 & 1)
        cta_barrier()
        first_strip = slot * 2
        for k in range(0, 2 + zero):
            rows = tile * 128 + k * 64 + lanes
            x = x_strips.index(first_strip + k).load(TILE)
            cast1 = x.to(gl.float32)
            held = cast1.reshape([4, 16, 64])
            max2_thread = fold_max(held, 0)
            own = gl.convert_layout(max2_thread.reshape([16, 64]), TILE, assert_trivial=True)
            max2_acc = gl.maximum(max2_acc, own, propagate_nan=tl.PropagateNan.ALL)
        fence_async_shared()
        cta_barrier()
        prefetch_tile = tile + 6
        prefetch_in = prefetch_tile < tile_count
        mbarrier.expect(ready.index(slot), 16384, pred=prefetch_in)
        tma.async_copy_global_to_shared(x_tiles, [prefetch_tile * 128, first_col], ready.index(slot), \
x_ring.index(slot), pred=prefetch_in)
        iteration += 1
    for tile in range(split_id + (whole_tiles - split_id + 2) // 3 * 3, tile_count, 3):
"""


def greatest_of_one(x: Tensor) -> Tensor:
    return x.float().amax(0)


def test_the_generated_text() -> None:
    kernel, bindings = kernel_of(greatest_of_one, (meta(500, 256),))
    schedule = tiles(kernel, deep=8, split=3)
    first = halves(kernel, 3, (*kernel.space.rows, *kernel.space.cols)).first
    half = Kernel(first, kernel.space)
    text = gluon_tiles.lower(half, replace(schedule, staged=frozenset(tile_stageable(half))), bindings, "greatest").source().text
    turns = text[text.index("    iteration = 0") :]
    assert re.sub("  # .*", "", turns).startswith(GOLDEN)


# ---- compilation -----------------------------------------------------------------------------------------------------------


def compiled(fn: Callable[..., Any], args: tuple[Tensor, ...], **how: int) -> tuple[Binary, Kernel, StagedTiles]:
    kernel, bindings = kernel_of(fn, args)
    schedule = tiles(kernel, **how)
    return offline.compile(gluon_tiles.lower(kernel, schedule, bindings, "tiles").source(), H200), kernel, schedule


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "how", [{"width": 128, "deep": 4, "stages": 4}, {"width": 32, "deep": 8, "stages": 3}, {"width": 256, "deep": 2, "warps": 8}]
)
@pytest.mark.parametrize("fn", [outer_sum, greatest, spread, product_and_least, log_sum, positions])
def test_tiles_compile_without_spills_in_the_computed_shared_memory(
    fn: Callable[..., Any], how: dict[str, int], dtype: torch.dtype
) -> None:
    binary, kernel, schedule = compiled(fn, (meta(8192, 1024, dtype),), **how)
    expected = estimate(demand(kernel), schedule, H200)
    assert binary.spill_bytes == 0
    assert binary.smem_bytes == expected.smem_bytes <= H200.smem_per_cta
    assert not binary.loads and set(binary.stores) == {16}
    assert binary.tma_copies and binary.mbarriers
    assert binary.registers <= schedule.registers  # given a cap, the compiler uses more than it needs
    assert 0.5 <= expected.registers / binary.registers <= 1.5


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("count", [*COUNTS, 16])
def test_many_inputs_compile(count: int, dtype: torch.dtype) -> None:
    binary, kernel, schedule = compiled(outer_sum, tuple(meta(8192, 1024, dtype) for _ in range(count)), width=128, stages=3)
    assert binary.spill_bytes == 0 and binary.smem_bytes == estimate(demand(kernel), schedule, H200).smem_bytes
    assert binary.tma_copies == count * (schedule.stages + 2), "one copy an input and tile"


def test_scratch_for_exchanges_between_warps_reuses_the_ring() -> None:
    binary, kernel, schedule = compiled(positions, (meta(8192, 1024),), width=256, deep=1, warps=8)
    assert binary.smem_bytes == estimate(demand(kernel), schedule, H200).smem_bytes == 8 * 256 * 8 + 128


@pytest.mark.parametrize(("dtype", "deep"), [(F32, 1), (F32, 8), (F16, 1), (BF16, 4)])
def test_threads_read_16_bytes_at_a_time(dtype: torch.dtype, deep: int) -> None:
    kernel, bindings = kernel_of(spread, (meta(8192, 1024, dtype), meta(8192, 1024, dtype)))
    ptx = build(job(gluon_tiles.lower(kernel, tiles(kernel, deep=deep), bindings, "tiles").source(), 90)).asm["ptx"]
    turns = ptx[: ptx.index("shfl.sync")]
    reads = re.findall(r"ld\.shared\.(v4\.b32|v2\.b64|\S+)", turns)
    assert reads and set(reads) <= {"v4.b32", "v2.b64"}
    assert "cp.async.bulk.tensor.2d" in turns and "mbarrier.try_wait" in turns


def test_strips_of_a_tile_need_no_barriers_between_them() -> None:
    """One after the wait, one before the refill, one that the compiler adds before each copy, none per strip."""
    few, _, low = compiled(outer_sum, (meta(8192, 1024),), deep=8)
    many, kernel, tall = compiled(outer_sum, (meta(8192, 1024),), deep=16)
    assert strips_of(tall, explicit_vector(kernel)).count == 2 * strips_of(low, explicit_vector(kernel)).count == 4
    assert many.barriers == few.barriers


@pytest.mark.parametrize("fn", [spread, log_sum, positions])
def test_threads_exchange_states_only_after_the_last_tile(fn: Callable[..., Any]) -> None:
    kernel, bindings = kernel_of(fn, (meta(8192, 1024),))
    source = gluon_tiles.lower(kernel, tiles(kernel, deep=4), bindings, "tiles").source()
    assert "assert_trivial=True" in source.text
    ptx = build(job(source, 90)).asm["ptx"]
    last_copy = ptx.rindex("cp.async.bulk.tensor")
    assert min(ptx.index("shfl.sync"), ptx.index("st.shared")) > last_copy


# ---- the budget ------------------------------------------------------------------------------------------------------------


def offered(fn: Callable[..., Any], args: tuple[Tensor, ...], on: Device = H200) -> list[StagedTiles]:
    """The staged schedules of a function."""
    kernel, bindings = kernel_of(fn, args)
    found = scores(kernel.program, bindings, on, {})
    assert not isinstance(found, Illegal)
    actual = [s.plan for s in found if s.plan.schedule.family.startswith("outer staged")]
    for each in actual:
        assert each.resources.smem_bytes <= on.smem_per_cta
        assert each.resources.ctas_per_sm * (each.resources.smem_bytes + on.smem_reserve) <= on.smem_per_sm
    return [each.schedule for each in actual if isinstance(each.schedule, StagedTiles)]


def vectors_of(schedule: StagedTiles, of: int) -> int:
    """The vectors that a thread reads from one input's tile."""
    return schedule.step // rows_at_once(schedule.width, of, schedule.warps)


@pytest.mark.parametrize(
    ("count", "warps", "deepest"),
    [
        (1, 4, 8),
        (7, 4, 8),
        (8, 4, 4),
        (14, 4, 4),
        (15, 4, 2),
        (28, 4, 2),
        (29, 4, 1),
        (56, 4, 1),
        (3, 8, 8),
        (4, 8, 4),
        (7, 8, 4),
        (8, 8, 2),
        (14, 8, 2),
        (15, 8, 1),
        (28, 8, 1),
        (29, 8, 0),
    ],
)
def test_tiles_shrink_to_the_budget_and_never_below_a_vector(count: int, warps: int, deepest: int) -> None:
    args = tuple(meta(4096, 1024) for _ in range(count))
    found = [s for s in offered(outer_sum, args) if s.warps == warps]
    assert max((vectors_of(s, 8) for s in found), default=0) == deepest
    assert all(2 <= s.stages <= 8 for s in found)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_the_smallest_tile_at_the_edge_of_the_budget_compiles(dtype: torch.dtype) -> None:
    """28 inputs with 8 warps leave 2944 bytes of shared memory: scratch for exchanges must not be added to the ring."""
    binary, kernel, schedule = compiled(outer_sum, tuple(meta(4096, 1024, dtype) for _ in range(28)), warps=8, deep=1)
    assert binary.smem_bytes == estimate(demand(kernel), schedule, H200).smem_bytes == 28 * 2 * 4096 + 128
    assert H200.smem_per_cta - binary.smem_bytes == 2944 and binary.spill_bytes == 0
    assert set(binary.stores) == {16}


@pytest.mark.parametrize("dtype", [F32, F16])
def test_the_most_inputs_that_fit_compile_and_one_more_is_not_offered(dtype: torch.dtype) -> None:
    most = tuple(meta(4096, 1024, dtype) for _ in range(56))
    assert {s.warps for s in offered(outer_sum, most)} == {4}
    assert not offered(outer_sum, (*most, meta(4096, 1024, dtype)))
    binary, _, _ = compiled(outer_sum, most, deep=1)
    assert binary.spill_bytes == 0 and binary.smem_bytes <= H200.smem_per_cta


def test_a_ring_larger_than_shared_memory_has_no_occupancy() -> None:
    kernel, _ = kernel_of(outer_sum, tuple(meta(4096, 1024) for _ in range(8)))
    fits, over = tiles(kernel, deep=4, stages=3), tiles(kernel, deep=4, stages=4)
    assert estimate(demand(kernel), fits, H200).ctas_per_sm == 1
    assert estimate(demand(kernel), over, H200).ctas_per_sm == 0
    assert smem_bytes(demand(kernel), over) > H200.smem_per_cta >= smem_bytes(demand(kernel), fits)


@pytest.mark.parametrize(("tall", "width", "warps"), [(16, 512, 4), (512, 64, 4), (8, 64, 4), (24, 64, 4), (256, 4, 1)])
def test_tiles_that_no_layout_or_tma_box_allows_are_refused(tall: int, width: int, warps: int) -> None:
    with pytest.raises(ValueError, match="cannot read tiles"):
        strips(tall, width, warps, 1, 8)


# ---- the plan --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "on", "there"),
    [
        (tuple(meta(4096, 1024) for _ in range(5)), "h200", True),
        ((meta(4096, 1024, F32),), "h200", True),
        ((meta(65536, 72, BF16),), "h200", True),
        ((meta(4096, 1024, F32),), "a100", False),  # no TMA
        ((meta(4096, 1023, BF16),), "h200", False),  # unaligned rows
        (
            (meta(4096, 1024), torch.empty_strided((4096, 1024), (1028, 1), dtype=F16, device="meta")),
            "h200",
            False,
        ),  # one unaligned input is enough
        ((meta(4096, 1024, torch.float64),), "h200", False),
    ],
)
def test_tiles_are_offered_where_tma_can_load_every_input(args: tuple[Tensor, ...], on: str, there: bool) -> None:
    assert bool(offered(outer_sum, args, device(on))) is there
    kernel, bindings = kernel_of(outer_sum, args)
    assert plan(kernel.program, bindings, device(on)).kernels, "what cannot be brought has another plan"


def from_the_middle(x: Tensor) -> Tensor:
    return x[:, 8:].float().sum(0)


def by_batch(x: Tensor) -> Tensor:
    return x.float().sum(1)


def column_softmax(x: Tensor) -> Tensor:
    return x.float().softmax(0)


def row_sums(x: Tensor) -> Tensor:
    return x.float().sum(1)


def test_kernels_of_other_shapes_are_not_tiled() -> None:
    assert not tile_stageable(kernel_of(by_batch, (torch.empty(8, 4096, 256, device="meta"),))[0])
    assert not tile_stageable(kernel_of(column_softmax, (meta(4096, 1024),))[0]), "rows are walked twice"
    assert not tile_stageable(kernel_of(row_sums, (meta(4096, 1024),))[0])
    assert not tile_stageable(kernel_of(from_the_middle, (meta(4096, 1032),))[0]), "a tensor map begins where the tensor does"


def test_splits_need_not_be_powers_of_two() -> None:
    found = offered(outer_sum, (meta(65536, 1536, F32),))
    assert {"outer staged", "outer staged split"} == {s.family for s in found}
    assert any(s.splits & (s.splits - 1) for s in found)


def test_a_plan_with_tiles_is_emitted_compiled_and_joined() -> None:
    kernel, bindings = kernel_of(outer_sum, tuple(meta(4096, 1024) for _ in range(5)))
    made = pipeline.compile(plan(kernel.program, bindings, H200), lambda source: offline.compile(source, H200))
    first, _ = made.plan.kernels
    assert first.family == "outer staged split" and made.sources[0].gluon and not made.sources[1].gluon
    assert isinstance(first.schedule, StagedTiles)
    kib = first.schedule.stages * first.schedule.step * first.schedule.width * 2 / 1024
    assert all(f"staged in shared memory ({kib:.1f} KiB)" in text for text in first.loads)
    assert 5 * 1024 * kib <= first.resources.smem_bytes
    assert made.binaries[0].smem_bytes == first.resources.smem_bytes and made.binaries[0].spill_bytes == 0


@pytest.mark.parametrize("mode", ["", "consan"])
def test_kernels_are_instrumented_if_triton_is_set_to(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's concurrency sanitizer keeps its state in memory passed to the launch, and uses assertions."""
    kernel, bindings = kernel_of(greatest, (meta(2100, 256),))
    source = gluon_tiles.lower(kernel, tiles(kernel), bindings, "greatest").source()
    monkeypatch.setattr(triton.knobs.compilation, "instrumentation_mode", mode)
    made = build(job(source, H200.target))
    assert ("assertfail" in made.asm["ptx"]) == bool(made.metadata.global_scratch_size) == bool(mode)


RENAMED = """
import torch
import triton.experimental.gluon.language._core as core
import triton.experimental.gluon.language.nvidia.hopper.tma as tma
from onepass.capture import capture
from onepass.device import device
from onepass.pipeline import generate, optimize
from onepass.plan.partition import plan
from onepass.runtime.compile_job import job
from onepass.runtime.module import build

memory = core.shared_memory_descriptor
if hasattr(memory, "_reinterpret"):
    memory.reinterpret = memory._reinterpret
    del memory._reinterpret
if not hasattr(tma, "async_load"):
    tma.async_load = tma.async_copy_global_to_shared
del tma.async_copy_global_to_shared
captured = capture(lambda a, b: (a.sum(0), b.sum(0)), (torch.empty(4096, 1024, device="meta"),) * 2, dynamic=False)
(source,) = [s for s in generate(plan(optimize(captured.program), {}, device("h200"))) if s.gluon]
assert "_reinterpret" in source.text and "async_copy_global_to_shared" in source.text
print(len(build(job(source, 90)).asm["cubin"]) > 0)
"""


def test_kernels_compile_with_the_names_of_triton_3_9(tmp_path: Path) -> None:
    done = run_python(RENAMED, env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"})
    assert done.stdout == "True\n", done.stdout + done.stderr[-2000:]
