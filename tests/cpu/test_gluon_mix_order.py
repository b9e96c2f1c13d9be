"""Mix-order kernels with staged rows: results in the functional model, compilation, and plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass import errors, pipeline
from onepass.codegen import kernel_ir as ir
from onepass.plan import candidates
from onepass.plan.legality import Family, Illegal
from onepass.plan.partition import plan
from onepass.plan.plan import REGISTERS_UNBOUNDED, Plan
from onepass.plan.schedule import Loop, Ring, RowVectors, Schedule, StagedMixOrder
from onepass.plan.scoring import scores
from onepass.plan.staged_rows import chunk_cover, must_stage, tma_stageable
from onepass.plan.thread_layout import vector
from onepass.runtime import feedback, offline
from onepass.runtime.binary import Binary
from onepass.tools.functions import add_rms_norm_backward, layer_norm_backward, rms_norm_backward
from tests.support.forced_schedules import H200, assert_as_oracle, chosen, planned, program_of, run, scored
from tests.support.kernel_changes import FORGOTTEN, Change, assigned, fields, first_changed
from tests.support.mix_order_kernels import (
    all_else,
    finished,
    inputs_of,
    looked_up,
    meta_inputs,
    mixed_kernel,
    spread_and_top,
    stored_early,
    totals,
)
from tests.support.staged_kernels import BF16, F32

RELOAD, REGISTERS = RowVectors.RELOAD, RowVectors.REGISTERS


def mix_order_plan(
    fn: Callable[..., Any],
    args: tuple[Tensor, ...],
    warps: int = 4,
    vectors: int = 1,
    slots: int = 2,
    split: int = 2,
    row_vectors: RowVectors = RELOAD,
    registers: int = 0,
    least: bool = False,
    prefetch: int = 0,
) -> Plan:
    """A plan that stages every load TMA can describe, or with `least` only those it must, and joins partial results."""
    program, _, bindings = program_of(fn, *args)
    kernel = mixed_kernel(fn, args)
    cols = kernel.program.extent(kernel.space.cols)
    assert isinstance(cols, int)
    width = 32 * warps * vector(kernel)
    schedule = StagedMixOrder(
        chunk_cover(cols, width * vectors, width).tiles,
        warps,
        Ring(split, slots, prefetch),
        row_vectors,
        staged=must_stage(kernel) if least else frozenset(tma_stageable(kernel)),
        registers=registers,
    )
    return planned(program, bindings, chosen(program, bindings, Family.MIX, schedule))


def check(fn: Callable[..., Any], args: tuple[Tensor, ...], **how: Any) -> None:
    """Run in the model and compare with the oracle."""
    _, tensors, bindings = program_of(fn, *args)
    assert_as_oracle(mix_order_plan(fn, args, **how), tensors, bindings, f"{how}")


# ---- results ---------------------------------------------------------------------------------------------------------------


# fmt: off
FUNCTIONS = [rms_norm_backward, layer_norm_backward, add_rms_norm_backward, spread_and_top, all_else, totals, finished,
             stored_early]
# fmt: on


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("cols", [2048, 2568])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_every_reduction_is_right_over_staged_rows(fn: Callable[..., Any], cols: int, dtype: torch.dtype) -> None:
    check(fn, inputs_of(fn, 7, cols, dtype))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_totals_of_values_far_from_zero(dtype: torch.dtype) -> None:
    """With a mean of 0, a wrong count would not show."""
    check(totals, (inputs_of(totals, 7, 2568, dtype)[0] + 3,))


@pytest.mark.parametrize("row_vectors", [RELOAD, REGISTERS])
@pytest.mark.parametrize(("rows", "slots", "split"), [(7, 1, 1), (7, 1, 3), (7, 2, 2), (7, 3, 2), (3, 2, 5), (2, 3, 4)])
def test_any_ring_any_grid_any_number_of_rows_per_cta(rows: int, slots: int, split: int, row_vectors: RowVectors) -> None:
    check(layer_norm_backward, inputs_of(layer_norm_backward, rows, 3080, BF16), slots=slots, split=split, row_vectors=row_vectors)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("cols", "vectors"), [(1024, 1), (1032, 1), (5120, 1), (4096, 2)])
def test_any_number_of_chunks_and_of_copies(cols: int, vectors: int, slots: int) -> None:
    check(rms_norm_backward, inputs_of(rms_norm_backward, 5, cols, BF16), vectors=vectors, slots=slots)


@pytest.mark.parametrize("row_vectors", [RELOAD, REGISTERS])
def test_row_vectors_may_be_indexed(row_vectors: RowVectors) -> None:
    check(looked_up, inputs_of(looked_up, 3, 2056, BF16), row_vectors=row_vectors)


@pytest.mark.parametrize("row_vectors", [RELOAD, REGISTERS])
def test_single_phase_loads_need_not_be_staged(row_vectors: RowVectors) -> None:
    args = inputs_of(add_rms_norm_backward, 5, 2056, BF16)
    plan = mix_order_plan(add_rms_norm_backward, args, least=True)
    assert len(plan.kernels[0].schedule.staged) == 2 and len(tma_stageable(mixed_kernel(add_rms_norm_backward, args))) == 3
    check(add_rms_norm_backward, args, least=True, row_vectors=row_vectors)


@pytest.mark.parametrize("fn", [layer_norm_backward, all_else])
def test_64_bit_element_offsets_are_right(fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.forced_schedules.generate", lambda plan: pipeline.generate(plan, wide=True))
    check(fn, inputs_of(fn, 5, 2056, BF16), row_vectors=REGISTERS)
    check(fn, inputs_of(fn, 5, 2048, BF16), slots=1, prefetch=1)
    source = pipeline.generate(mix_order_plan(fn, inputs_of(fn, 5, 2056, BF16), 8, row_vectors=REGISTERS), wide=True)[0]
    assert offline.compile(source, H200).spill_bytes == 0


def test_sums_of_fp32_data_are_compensated() -> None:
    rows = torch.full((600, 1024), 0.1)
    rows[0] = 4096.0
    plan = mix_order_plan(rms_norm_backward, (rows, torch.ones(1024), torch.ones(600, 1), torch.ones(600, 1024)), split=1)
    assert "lost" in pipeline.generate(plan)[0].text
    _, tensors, bindings = program_of(rms_norm_backward, rows, torch.ones(1024), torch.ones(600, 1), torch.ones(600, 1024))
    _, dw = run(plan, tensors, bindings).values()
    exact = rows.double().sum(0)
    assert float((dw.double() - exact).abs().max()) <= float(exact.max()) * torch.finfo(F32).eps


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("change", "caught"), FORGOTTEN)
def test_a_broken_kernel_is_caught(slots: int, change: Change, caught: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs_of(rms_norm_backward, 7, 2568, BF16)
    _, tensors, bindings = program_of(rms_norm_backward, *args)
    plan = mix_order_plan(rms_norm_backward, args, slots=slots)
    monkeypatch.setattr("tests.support.forced_schedules.generate", lambda plan: first_changed(plan, change))
    with pytest.raises(caught):
        run(plan, tensors, bindings)


# ---- a ring of copies ------------------------------------------------------------------------------------------------------


def rows_and_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """A single pass, which is both the first and the last one over a row."""
    return x.float().sum(-1), x.float().sum(0)


@pytest.mark.parametrize("row_vectors", [RELOAD, REGISTERS])
@pytest.mark.parametrize("fn", [*FUNCTIONS, rows_and_columns])
def test_every_reduction_is_right_over_a_ring_of_copies(fn: Callable[..., Any], row_vectors: RowVectors) -> None:
    check(fn, inputs_of(fn, 7, 4096, BF16), slots=1, prefetch=3, row_vectors=row_vectors)


@pytest.mark.parametrize("warps", [4, 16])  # with many warps the compiler does not know the length of a pass
@pytest.mark.parametrize(("rows", "split"), [(2, 1), (2, 3), (7, 1), (8, 1), (7, 3), (3, 5), (19, 2)])
@pytest.mark.parametrize("prefetch", [1, 3, 4, 9])
def test_copies_fill_the_slots_of_the_ring_in_order_for_any_number_of_rows(
    rows: int, split: int, prefetch: int, warps: int
) -> None:
    check(
        rms_norm_backward,
        inputs_of(rms_norm_backward, rows, 1024 * warps, BF16),
        warps=warps,
        slots=1,
        split=split,
        prefetch=prefetch,
    )


@pytest.mark.parametrize("prefetch", [1, 3, 9])
def test_a_single_row_arrives_with_the_first_copies(prefetch: int) -> None:
    """A program of one row is a different program, so the kernel for more rows gets one row."""
    args = inputs_of(rms_norm_backward, 7, 4096, BF16)
    _, tensors, bindings = program_of(rms_norm_backward, *args)
    alone = {name: x[:1] if len(x) == 7 else x for name, x in tensors.items()}
    plan = mix_order_plan(rms_norm_backward, args, slots=1, split=3, prefetch=prefetch)
    assert_as_oracle(plan, alone, dict.fromkeys(bindings, 1), "one row")


@pytest.mark.parametrize(("cols", "vectors"), [(2048, 1), (5120, 1), (6144, 1), (8192, 1), (10240, 1), (8192, 2)])
def test_any_number_of_chunks_arrives_in_copies(cols: int, vectors: int) -> None:
    check(rms_norm_backward, inputs_of(rms_norm_backward, 5, cols, BF16), vectors=vectors, slots=1, split=1, prefetch=2)


@pytest.mark.parametrize(("fn", "cols"), [(rms_norm_backward, 4096), (rms_norm_backward, 8192), (rows_and_columns, 4096)])
@pytest.mark.parametrize(
    ("change", "caught"),
    [
        *FORGOTTEN[:2],
        (fields(ir.Wait, lambda wait: wait.phase == "phase ^ wrapped", phase="phase"), errors.WrongPhase),
        (assigned("phase", "0"), errors.WrongPhase),
        (assigned("first_slot", "0"), errors.WrongPhase),
        (fields(ir.Advance, by=3), errors.WrongPhase),
        (
            fields(ir.Expect, lambda expect: expect.pred == "prefetch_in", barrier=ir.Slot(ir.Name("ready"), "first_slot")),
            errors.WrongPhase,
        ),
        (assigned("prefetch_row", "row + 1"), errors.CopyLeftBehind),
    ],
)
def test_a_broken_ring_of_copies_is_caught(
    fn: Callable[..., Any], cols: int, change: Change, caught: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(caught):
        run_changed(fn, inputs_of(fn, 9, cols, BF16), change, monkeypatch)


def run_changed(fn: Callable[..., Any], args: tuple[Tensor, ...], change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a changed kernel with a ring of copies, and compare with the oracle."""
    _, tensors, bindings = program_of(fn, *args)
    plan = mix_order_plan(fn, args, slots=1, prefetch=3)
    monkeypatch.setattr("tests.support.forced_schedules.generate", lambda plan: first_changed(plan, change))
    assert_as_oracle(plan, tensors, bindings, "changed")


def test_a_refill_of_the_wrong_part_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs_of(rms_norm_backward, 9, 4096, BF16)
    wrong = fields(
        ir.CopyAsync, lambda copy: copy.coordinates == ("prefetch_row", "3 * 4", "0"), coordinates=("prefetch_row", "2 * 4", "0")
    )
    with pytest.raises(AssertionError, match="changed"):
        run_changed(rms_norm_backward, args, wrong, monkeypatch)


# ---- compilation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "cols", "dtype", "warps", "slots", "row_vectors"),
    [
        (rms_norm_backward, 4096, BF16, 8, 3, REGISTERS),
        (rms_norm_backward, 8192, BF16, 8, 3, REGISTERS),
        (rms_norm_backward, 8192, BF16, 16, 3, RELOAD),
        (rms_norm_backward, 8192, F32, 16, 3, RELOAD),
        (rms_norm_backward, 10008, BF16, 8, 2, RELOAD),
        (rms_norm_backward, 10240, BF16, 8, 2, RELOAD),  # five copies per row
        (rms_norm_backward, 10240, BF16, 8, 1, REGISTERS),
        (rms_norm_backward, 16384, BF16, 16, 3, REGISTERS),
        (rms_norm_backward, 16384, BF16, 8, 2, RELOAD),
        (rms_norm_backward, 32768, BF16, 8, 1, RELOAD),
        (layer_norm_backward, 8192, BF16, 8, 3, REGISTERS),
        (layer_norm_backward, 8192, BF16, 16, 3, RELOAD),
        (add_rms_norm_backward, 8192, BF16, 16, 3, RELOAD),
    ],
)
def test_kernels_compile_without_spills_in_the_computed_shared_memory(
    fn: Callable[..., Any], cols: int, dtype: torch.dtype, warps: int, slots: int, row_vectors: RowVectors
) -> None:
    most = min(248, 65536 // (32 * warps))
    plan = mix_order_plan(fn, meta_inputs(fn, cols, dtype), warps, 1, slots, 132, row_vectors, registers=most)
    binary = offline.compile(pipeline.generate(plan)[0], H200)
    expected = plan.kernels[0].resources
    assert binary.spill_bytes == 0 and binary.registers <= most
    assert binary.smem_bytes == expected.smem_bytes <= H200.smem_per_cta
    assert binary.tma_copies and binary.mbarriers
    assert set(binary.stores) == {16} and set(binary.loads) == {4, 16}  # one number per row, the rest in vectors
    assert expected.ctas_per_sm >= 1, "what compiles is not thought to be too much"


@pytest.mark.parametrize(("warps", "vectors", "prefetch", "spilled"), [(8, 1, 3, 0), (8, 1, 1, 0), (16, 1, 3, 24), (16, 2, 3, 20)])
def test_rings_of_copies_of_long_rows_compile_in_the_computed_shared_memory(
    warps: int, vectors: int, prefetch: int, spilled: int
) -> None:
    """Accumulators take half of the registers. With 16 warps a few words are spilled, fewer by Triton 3.6 than by 3.7."""
    most = min(248, 65536 // (32 * warps))
    plan = mix_order_plan(
        rms_norm_backward, meta_inputs(rms_norm_backward, 32768), warps, vectors, 1, 132, registers=most, prefetch=prefetch
    )
    binary = offline.compile(pipeline.generate(plan)[0], H200)
    assert binary.spill_bytes <= spilled and binary.registers <= most
    assert binary.smem_bytes == plan.kernels[0].resources.smem_bytes <= H200.smem_per_cta
    assert set(binary.stores) == {16} and set(binary.loads) == {4, 16}


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_every_reduction_compiles(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    plan = mix_order_plan(fn, inputs_of(fn, 7, 2056, dtype), 8, slots=3, registers=248)
    binary = offline.compile(pipeline.generate(plan)[0], H200)
    assert binary.smem_bytes == plan.kernels[0].resources.smem_bytes and binary.spill_bytes == 0


def test_additions_to_accumulators_are_not_delayed() -> None:
    """A loop between the last pass and the next row would delay them, and keep their operands in registers."""
    for slots, prefetch, counter in ((1, 0, "iteration"), (2, 0, "iteration"), (1, 2, "copies_done")):
        text = pipeline.generate(
            mix_order_plan(rms_norm_backward, meta_inputs(rms_norm_backward, 5120), slots=slots, prefetch=prefetch)
        )[0].text
        loop, after = text[text.index(f"{counter} = 0") :].split(f"{counter} += ")
        last = loop[loop.rindex("_acc") :]
        assert "for " not in last.replace("for j in gl.static_range", "") and "_acc" in after


# ---- the plan --------------------------------------------------------------------------------------------------------------


def staged_plans(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> list[Schedule]:
    program, _, bindings = program_of(fn, *args)
    found = scores(program, bindings, H200, {})
    assert not isinstance(found, Illegal)
    return [s.plan.schedule for s in found if s.plan.schedule.staged and s.plan.schedule.ctas_per_row == 1]


@pytest.mark.parametrize(
    ("fn", "cols", "dtype", "offered"),
    [
        (rms_norm_backward, 4096, BF16, True),
        (layer_norm_backward, 16384, BF16, True),
        (rms_norm_backward, 8191, BF16, False),  # unaligned rows
        (rms_norm_backward, 8188, BF16, False),  # on 8 bytes
        (rms_norm_backward, 8188, F32, True),
        (rms_norm_backward, 65536, BF16, False),  # more shared memory than a CTA can have
    ],
)
def test_rows_are_staged_where_tma_can_load_them(fn: Callable[..., Any], cols: int, dtype: torch.dtype, offered: bool) -> None:
    found = staged_plans(fn, meta_inputs(fn, cols, dtype))
    assert bool(found) is offered
    for each in found:
        assert each.family == "mix-order staged" and isinstance(each.rows, Loop) and each.splits == each.rows.split


@pytest.mark.parametrize(
    ("cols", "prefetch"),
    [
        (32768, {1, 3}),  # four copies per row
        (16384, {1, 3}),  # with two CTAs on an SM; a single CTA has room for three rows
        (32776, set()),  # a row with a tail
    ],
)
def test_spare_shared_memory_prefetches_the_next_row(cols: int, prefetch: set[int]) -> None:
    found = staged_plans(rms_norm_backward, meta_inputs(rms_norm_backward, cols))
    assert {s.prefetch for s in found} - {0} == prefetch
    assert all(s.stages == 1 for s in found if s.prefetch)
    assert all(f"prefetch {s.prefetch}" in str(s) for s in found if s.prefetch)


def test_prefetching_part_of_the_next_row_is_predicted_to_pay() -> None:
    program, _, bindings = program_of(rms_norm_backward, *meta_inputs(rms_norm_backward, 32768, rows=8192))
    found = [s for s in scored(program, bindings) if s.plan.schedule.family == "mix-order staged" and s.plan.schedule.warps == 16]
    best = {ahead: min(s.us for s in found if s.plan.schedule.prefetch == ahead) for ahead in (0, 1, 3)}
    assert best[3] < best[1] < best[0]
    most = next(s.plan for s in found if s.plan.schedule.prefetch == 3)
    assert "staged in shared memory (112.0 KiB)" in most.loads[0]


@pytest.mark.parametrize(("spilled", "heavy"), [(16, False), (400, True)])
def test_a_small_spill_under_a_register_cap_does_not_rule_out_heavier_schedules(spilled: int, heavy: bool) -> None:
    """ptxas uses every register up to the cap, so the count does not show how many it needs."""
    kernel = mix_order_plan(rms_norm_backward, meta_inputs(rms_norm_backward, 32768), 16, 1, 1, 132, registers=128).kernels[0]
    learned = feedback.compile_outcome(kernel, Binary(128, spilled, 0, kernel.resources.smem_bytes, 0, {}, {}), H200)
    assert learned.registers == (kernel.resources.registers if heavy else REGISTERS_UNBOUNDED)


def test_a_backward_pass_is_staged_and_joined_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_mix_order", lambda *_: iter(()))
    program, _, bindings = program_of(rms_norm_backward, *meta_inputs(rms_norm_backward, 8192, rows=8192))
    made = pipeline.compile(plan(program, bindings, H200), lambda source: offline.compile(source, H200))
    first, _ = made.plan.kernels
    assert first.family == "mix-order staged" and made.sources[0].gluon
    assert sum("staged in shared memory" in load for load in first.loads) == 2
    assert made.binaries[0].smem_bytes == first.resources.smem_bytes and made.binaries[0].spill_bytes == 0
    assert made.sources[0].programs({**bindings, next(iter(bindings)): 1}) == first.schedule.splits, "each writes what it gathered"
