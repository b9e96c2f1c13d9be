"""Several CTAs per row: results in the functional model, compilation, and when the planner offers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass import errors, pipeline
from onepass.codegen import kernel_ir as ir
from onepass.codegen.row_access import columns
from onepass.device import Device, device
from onepass.plan.inplace import safe_inplace_pairs
from onepass.plan.kernel import Kernel
from onepass.plan.legality import Family, Illegal
from onepass.plan.partition import plan as best_plan
from onepass.plan.plan import CompileOutcome, Plan
from onepass.plan.schedule import Cover, Loop, MultiCtaMixOrder, RowVectors, Schedule
from onepass.plan.scoring import score, scores
from onepass.plan.staged_rows import tma_stageable
from onepass.plan.staging.multi_cta import may_span_ctas, state_words
from onepass.plan.thread_layout import vector
from onepass.runtime import offline
from onepass.runtime.compile_job import job
from onepass.runtime.compiled import Artifact, Compiled
from onepass.runtime.executable import assemble, pack_temporaries
from onepass.runtime.interpreter import gluon_model
from onepass.runtime.interpreter.coroutines import MAX_IDLE_ROUNDS, RoundRobin
from onepass.runtime.module import build
from onepass.runtime.serialize import pack, unpack
from onepass.tools.functions import add_rms_norm_backward, layer_norm_backward, rms_norm_backward
from tests.support.correctness import once
from tests.support.forced_schedules import H200, assert_as_oracle, chosen, planned, program_of, run
from tests.support.kernel_changes import FORGOTTEN, Change, assigned, fields, first_changed, unassigned, value_fields, without
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

RELOAD, REGISTERS, SMEM = RowVectors.RELOAD, RowVectors.REGISTERS, RowVectors.SMEM


def multi_cta_plan(
    fn: Callable[..., Any],
    args: tuple[Tensor, ...],
    ctas: int = 2,
    warps: int = 4,
    vectors: float = 1,
    slots: int = 3,
    groups: int = 2,
    row_vectors: RowVectors = RELOAD,
    registers: int = 0,
    on: Device = H200,
) -> Plan:
    """A plan with `ctas` CTAs per row."""
    program, _, bindings = program_of(fn, *args)
    kernel = mixed_kernel(fn, args)
    cols = kernel.program.extent(kernel.space.cols)
    assert isinstance(cols, int)
    width = int(32 * warps * vector(kernel) * vectors)
    schedule = MultiCtaMixOrder(
        (width,) * (cols // ctas // width),
        ctas,
        groups,
        warps,
        slots,
        row_vectors,
        staged=frozenset(tma_stageable(kernel)),
        registers=registers,
    )
    return planned(program, bindings, chosen(program, bindings, Family.MIX, schedule, on), on)


def check(fn: Callable[..., Any], args: tuple[Tensor, ...], **how: Any) -> None:
    """Run in the model and compare with the oracle."""
    _, tensors, bindings = program_of(fn, *args)
    assert_as_oracle(multi_cta_plan(fn, args, **how), tensors, bindings, f"{how}")


# ---- results ---------------------------------------------------------------------------------------------------------------

FUNCTIONS = [rms_norm_backward, layer_norm_backward, add_rms_norm_backward, spread_and_top, finished]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("ctas", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_every_kind_of_kernel_is_right(fn: Callable[..., Any], ctas: int, dtype: torch.dtype) -> None:
    cols = ctas * (2048 if dtype is BF16 else 1024)
    check(fn, inputs_of(fn, 7, cols, dtype), ctas=ctas)
    check(fn, inputs_of(fn, 5, cols, dtype), ctas=ctas, slots=2, row_vectors=REGISTERS)
    check(fn, inputs_of(fn, 5, cols, dtype), ctas=ctas, vectors=0.5, row_vectors=REGISTERS)
    if fn is not spread_and_top:  # which has no row vectors
        check(fn, inputs_of(fn, 5, cols, dtype), ctas=ctas, vectors=0.5, row_vectors=SMEM)


@pytest.mark.parametrize("row_vectors", [RELOAD, REGISTERS])
@pytest.mark.parametrize(("rows", "slots", "groups"), [(7, 2, 1), (7, 3, 3), (8, 3, 2), (3, 2, 5), (2, 4, 4), (19, 3, 2)])
def test_any_ring_any_number_of_groups_and_rows_per_group(rows: int, slots: int, groups: int, row_vectors: RowVectors) -> None:
    args = inputs_of(layer_norm_backward, rows, 4096, BF16)
    check(layer_norm_backward, args, slots=slots, groups=groups, row_vectors=row_vectors)


@pytest.mark.parametrize(("cols", "vectors"), [(2048, 1), (6144, 1), (16384, 1), (16384, 2), (16384, 8)])
def test_any_number_of_chunks(cols: int, vectors: int) -> None:
    check(rms_norm_backward, inputs_of(rms_norm_backward, 5, cols, BF16), vectors=vectors)


@pytest.mark.parametrize("row_vectors", [REGISTERS, SMEM], ids=["registers", "smem"])
def test_row_vectors_may_be_indexed(row_vectors: RowVectors) -> None:
    check(looked_up, inputs_of(looked_up, 3, 4096, BF16), row_vectors=row_vectors)


def test_a_row_may_have_eight_ctas() -> None:
    check(rms_norm_backward, inputs_of(rms_norm_backward, 5, 8192, BF16), ctas=8)


def named_alike(mailboxes: Tensor, cta_rank: Tensor, word0: Tensor) -> tuple[Tensor, Tensor]:
    """Names that generated kernels use themselves."""
    publish = mailboxes.float() * cta_rank
    return (publish * publish.sum(-1, keepdim=True) + word0).to(mailboxes.dtype), publish.sum(0)


def named_as_helpers(mailboxes: Tensor, cta_rank: Tensor, word0: Tensor) -> tuple[Tensor, Tensor]:
    """Names of the helper functions in a kernel's text."""
    sum_two = mailboxes * cta_rank
    widen = word0.float() + cta_rank
    total, other = sum_two.float().sum(-1, keepdim=True), widen.sum(-1, keepdim=True)
    return (sum_two * total + widen * other).to(mailboxes.dtype), sum_two.float().sum(0)


@pytest.mark.parametrize("vectors", [1, 2])  # with one chunk, names have no suffix
@pytest.mark.parametrize("fn", [named_alike, named_as_helpers])
def test_user_names_may_clash_with_names_in_kernels(fn: Callable[..., Any], vectors: int) -> None:
    x, w, _, dy = inputs_of(rms_norm_backward, 5, 4096, BF16)
    check(fn, (x, w, dy), row_vectors=REGISTERS, vectors=vectors)


def test_a_single_row_is_right() -> None:
    """A program of one row is a different program, so the kernel for more rows gets one row."""
    args = inputs_of(rms_norm_backward, 7, 4096, BF16)
    _, tensors, bindings = program_of(rms_norm_backward, *args)
    alone = {name: x[:1] if len(x) == 7 else x for name, x in tensors.items()}
    assert_as_oracle(multi_cta_plan(rms_norm_backward, args, groups=3), alone, dict.fromkeys(bindings, 1), "one row")


@pytest.mark.parametrize("fn", [layer_norm_backward, spread_and_top])
def test_64_bit_element_offsets_are_right(fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.forced_schedules.generate", lambda plan: pipeline.generate(plan, wide=True))
    check(fn, inputs_of(fn, 5, 4096, BF16), row_vectors=REGISTERS)
    source = pipeline.generate(multi_cta_plan(fn, inputs_of(fn, 5, 8192, BF16), warps=8, row_vectors=REGISTERS), wide=True)[0]
    assert offline.compile(source, H200).spill_bytes == 0


def test_mailboxes_are_cleared_before_every_launch() -> None:
    """Memory starts nonzero: a mailbox that was not cleared would be taken for a state."""
    args = inputs_of(rms_norm_backward, 7, 4096, BF16)
    _, tensors, bindings = program_of(rms_norm_backward, *args)
    plan = multi_cta_plan(rms_norm_backward, args)
    executable = assemble(Compiled(plan, pipeline.generate(plan), ()).artifact, torch.device("cpu"), frozenset())

    def call(*_: Tensor) -> tuple[Tensor, ...]:
        return tuple(executable(tensors, bindings).values())

    for first, again in zip(once(call, ()), once(call, (), garbage=True), strict=True):
        assert torch.equal(first, again) and not first.isnan().any()


def test_an_output_may_take_the_memory_of_an_input() -> None:
    args = inputs_of(rms_norm_backward, 7, 4096, BF16)
    _, tensors, bindings = program_of(rms_norm_backward, *args)
    plan = multi_cta_plan(rms_norm_backward, args)
    pairs = safe_inplace_pairs(plan)
    assert {taken for _, taken in pairs} >= {"x", "dy"}
    executable = assemble(Compiled(plan, pipeline.generate(plan), ()).artifact, torch.device("cpu"), frozenset())
    apart = executable(tensors, bindings)
    for out, taken in pairs:
        own = {name: x.clone() for name, x in tensors.items()}
        outputs = {name: own[taken] if name == out else torch.empty_like(x) for name, x in apart.items()}
        executable.run_into({**own, **outputs}, bindings)
        assert all(torch.equal(outputs[name], apart[name]) for name in apart)


# ---- broken kernels --------------------------------------------------------------------------------------------------------


def run_changed(change: Change, monkeypatch: pytest.MonkeyPatch, slots: int = 2) -> None:
    """Run a changed kernel, and compare with the oracle."""
    args = inputs_of(rms_norm_backward, 9, 8192, BF16)
    _, tensors, bindings = program_of(rms_norm_backward, *args)
    plan = multi_cta_plan(rms_norm_backward, args, slots=slots)
    monkeypatch.setattr("tests.support.forced_schedules.generate", lambda plan: first_changed(plan, change))
    assert_as_oracle(plan, tensors, bindings, "changed")


def waits_for_next(wait: ir.Wait) -> bool:
    return wait.phase == "(iteration + 1) // 2 & 1"


@pytest.mark.parametrize(
    ("change", "caught"),
    [
        *FORGOTTEN[:2],
        (without(ir.Publish), errors.NeverPublished),
        (fields(ir.Publish, word="row_index_next * 2"), errors.NeverPublished),  # into the mailbox of another CTA
        (fields(ir.Publish, word="split_id * 2 + cta_rank"), errors.NeverPublished),  # for another row
        (
            fields(ir.If, lambda node: node.condition == "row + 2 < row_count", condition="row + 4 < row_count"),
            errors.NeverPublished,
        ),  # not for the last row
        (assigned("slot_next", "iteration % 2"), errors.WrongPhase),  # the next row has no slot of its own
        (fields(ir.Wait, waits_for_next, phase="iteration // 2 & 1"), errors.WrongPhase),
        (assigned("prefetch_row", "row + 1"), errors.CopyLeftBehind),
        (without(ir.Invalidate), errors.BarrierLeftBehind),
        (value_fields(ir.Load, lambda load: load.offset == ("row_index_later",), masks=()), errors.AccessOutOfBounds),
    ],
)
def test_a_broken_kernel_is_caught(change: Change, caught: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(caught):
        run_changed(change, monkeypatch)


@pytest.mark.parametrize(
    "change",
    [
        fields(ir.For, lambda loop: (loop.index, loop.stop) == ("k", "4"), stop="3"),  # published before the pass ends
        fields(ir.Poll, words=lambda poll: poll.words[:1]),  # used before they have arrived
        value_fields(ir.Received, lambda part: part.word == "word1", word=ir.Name("word0")),  # its own state instead of the other's
        assigned("lanes", columns("", 1024)),  # columns of another CTA
        fields(
            ir.CopyAsync,
            lambda copy: copy.coordinates[1] == "cta_rank * 16",
            coordinates=lambda copy: (copy.coordinates[0], "0", "0"),
        ),
        fields(
            ir.Assign, lambda node: (*node.targets, node.value) == ("row_later", "row + 4"), value="row + 2"
        ),  # a per-row load, from another row
        unassigned("rstd", "rstd_1"),
        unassigned("rstd_1", "rstd_2"),
    ],
)
def test_other_changes_give_wrong_results(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="changed"):
        run_changed(change, monkeypatch)


def test_a_deadlock_names_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.NeverPublished, match=r"line \d+ \(word[01] = gl\.load\(.*group of 2"):
        run_changed(without(ir.Publish), monkeypatch)


def test_a_row_of_zeros_is_published() -> None:
    """Without the flag bit, a state of zero would be polled forever."""
    x, w, rstd, dy = inputs_of(rms_norm_backward, 5, 4096, BF16)
    check(rms_norm_backward, (x, w, rstd, torch.zeros_like(dy)))


def test_coroutines_run_while_any_makes_progress() -> None:
    round_robin = RoundRobin(2, RuntimeError)

    def work() -> None:
        for _ in range(3 * MAX_IDLE_ROUNDS):
            round_robin.made_progress()
            round_robin.yield_turn()

    round_robin.run([work, work])


def divides_by_zero() -> None:
    _ = 1 // 0


def test_no_coroutine_runs_after_a_failure() -> None:
    round_robin, seen = RoundRobin(3, RuntimeError), list[str]()

    def waits() -> None:
        round_robin.yield_turn()
        seen.append("went on")

    with pytest.raises(ZeroDivisionError):
        round_robin.run([waits, divides_by_zero, lambda: seen.append("began")])
    assert not seen


def test_coroutines_run_in_order_and_a_failure_ends_all() -> None:
    round_robin, seen = RoundRobin(3, RuntimeError), []

    def work(me: int, times: int) -> None:
        for k in range(times):
            seen.append((me, k))
            round_robin.made_progress()
            round_robin.yield_turn()

    round_robin.run([lambda: work(0, 2), lambda: work(1, 1), lambda: work(2, 3)])
    assert seen == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (2, 2)]
    failing = RoundRobin(2, RuntimeError)
    with pytest.raises(ZeroDivisionError):
        failing.run([failing.yield_turn, divides_by_zero])


def test_ctas_of_a_group_exchange_states_in_the_model() -> None:
    text = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def swap(box_ptr, out_ptr):
    me = gl.program_id(0)
    gl.store(box_ptr + me, (me + 1).to(gl.int64))
    other = me ^ 1
    word = gl.load(box_ptr + other, volatile=True)
    while word == 0:
        word = gl.load(box_ptr + other, volatile=True)
    gl.store(out_ptr + me, word)
"""
    boxes, out = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    gluon_model.run("swap", text, {"box_ptr": boxes, "out_ptr": out}, 4, ctas_per_group=2)
    assert out.tolist() == [2, 1, 4, 3]
    with pytest.raises(errors.NeverPublished):  # one CTA after the other
        gluon_model.run("swap", text, {"box_ptr": boxes.zero_(), "out_ptr": out}, 4)


# ---- text and compilation --------------------------------------------------------------------------------------------------


def test_the_states_of_a_row_are_awaited_after_the_next_row_is_reduced() -> None:
    source = pipeline.generate(multi_cta_plan(rms_norm_backward, meta_inputs(rms_norm_backward, 8192), warps=8, groups=66))[0]
    loop = source.text[source.text.index("for row in range(split_id, row_count, 66)") :]
    order = [
        "word0 = gl.load(mailboxes_ptr + row_index * 2, volatile=True)",
        "if row + 66 < row_count:",
        "mbarrier.wait(ready.index(slot_next), (iteration + 1) // 3 & 1)",
        "publish(mailboxes_ptr, row_index_next * 2 + cta_rank, ",
        "while (word0 == 0) | (word1 == 0):",
        "row_later = row + 132",
        "= published(word0, gl.float32)",
        "gl.store(out0_ptr",
        "fence_async_shared()",
        "prefetch_row = row + 198",
        "rstd = rstd_1",
        "iteration += 1",
    ]
    assert [loop.index(line) for line in order] == sorted(loop.index(line) for line in order)
    assert source.programs({"s0": 1}) == 132 and source.ctas_per_group == 2
    (boxes,) = source.cleared
    assert boxes.dtype.name == "i64" and str(boxes.shape[0]) == "2*s0" and boxes.name in source.fresh


@pytest.mark.parametrize(
    ("fn", "cols", "dtype", "ctas", "warps", "vectors", "slots", "row_vectors"),
    [
        (rms_norm_backward, 32768, BF16, 2, 8, 4, 3, REGISTERS),
        (rms_norm_backward, 32768, BF16, 2, 16, 1, 3, REGISTERS),
        (rms_norm_backward, 32768, BF16, 2, 8, 1, 2, RELOAD),
        (rms_norm_backward, 32768, BF16, 4, 8, 1, 4, REGISTERS),
        (rms_norm_backward, 65536, BF16, 4, 8, 4, 3, REGISTERS),
        (rms_norm_backward, 32768, F32, 4, 8, 1, 3, REGISTERS),
        (layer_norm_backward, 32768, BF16, 2, 8, 1, 3, REGISTERS),
        (layer_norm_backward, 32768, BF16, 2, 8, 4, 3, RELOAD),
        (add_rms_norm_backward, 32768, BF16, 2, 8, 1, 2, RELOAD),
    ],
)
def test_kernels_compile_without_spills_in_the_computed_shared_memory(
    fn: Callable[..., Any], cols: int, dtype: torch.dtype, ctas: int, warps: int, vectors: int, slots: int, row_vectors: RowVectors
) -> None:
    most = min(248, 65536 // (32 * warps))
    plan = multi_cta_plan(fn, meta_inputs(fn, cols, dtype), ctas, warps, vectors, slots, 132 // ctas, row_vectors, most)
    source = pipeline.generate(plan)[0]
    binary, expected = offline.compile(source, H200), plan.kernels[0].resources
    assert binary.spill_bytes == 0 and binary.registers <= most
    assert binary.smem_bytes == expected.smem_bytes <= H200.smem_per_cta and expected.ctas_per_sm >= 1
    assert set(binary.stores) == {16} and set(binary.loads) == {4, 8, 16}  # one number per row, mailboxes, the rest in vectors
    published = build(job(source, 90)).asm["ptx"].count("atom.global.gpu.relaxed.exch.b64")
    assert published == 2 * state_words(plan.kernels[0].kernel), "a word is written once for the first row, and once in the loop"


def test_half_vectors_leave_registers_for_a_second_cta() -> None:
    """Two states per column and half of the registers for a CTA: with whole vectors a few words are spilled."""
    plan = multi_cta_plan(layer_norm_backward, meta_inputs(layer_norm_backward, 16384), 2, 8, 0.5, 3, 132, registers=128)
    source = pipeline.generate(plan)[0]
    binary = offline.compile(source, H200)
    assert "gl.BlockedLayout([1, 4], [1, 32], [1, 8], [1, 0])" in source.text
    assert binary.spill_bytes == 0 and binary.registers <= 128 and set(binary.stores) == {8, 16} and set(binary.loads) == {4, 8}
    assert plan.kernels[0].resources.ctas_per_sm == 2


def test_row_vectors_in_shared_memory_are_read_once_and_cost_no_registers() -> None:
    plan = multi_cta_plan(
        layer_norm_backward, meta_inputs(layer_norm_backward, 16384), 2, 8, 0.5, 3, 132, registers=128, row_vectors=SMEM
    )
    source, kernel = pipeline.generate(plan)[0], plan.kernels[0]
    binary = offline.compile(source, H200)
    assert binary.spill_bytes == 0 and binary.smem_bytes == kernel.resources.smem_bytes == 3 * 2 * 16384 + 16384 + 192
    assert kernel.resources.ctas_per_sm == 2
    before, rows = source.text.split("for row in range")
    assert before.count("gl.load(w_ptr") == before.count("w_beside.index(") - before.count("w_beside.index(k)") == 8
    assert "gl.load(w_ptr" not in rows and "w_beside.index(k).load(TILE)" in rows
    assert "w bf16 per column, kept in shared memory (16.0 KiB)" in kernel.loads
    assert "row vectors in smem" in str(kernel.schedule)


# ---- the plan --------------------------------------------------------------------------------------------------------------


def offered(fn: Callable[..., Any], args: tuple[Tensor, ...], on: Device = H200) -> list[Schedule]:
    program, _, bindings = program_of(fn, *args)
    found = scores(program, bindings, on, {})
    assert not isinstance(found, Illegal)
    return [s.plan.schedule for s in found if s.plan.schedule.ctas_per_row > 1]


@pytest.mark.parametrize(
    ("cols", "dtype", "rows", "offered_counts"),
    [
        (32768, BF16, 8192, {2, 4, 8}),
        (65536, BF16, 4096, {4, 8}),  # half a row per CTA: two do not fit
        (131072, BF16, 4096, {8}),
        (16384, BF16, 8192, {2, 4}),  # one CTA has room for three rows: the cost decides
        (16384, F32, 8192, {2, 4}),  # a CTA takes at least 4096 columns
        (32776, BF16, 8192, set()),  # a CTA takes whole chunks
        (32768, BF16, 80, {8}),  # a group needs several rows
        (32768, BF16, 60, set()),
    ],
)
def test_the_numbers_of_ctas_per_row_that_are_offered(cols: int, dtype: torch.dtype, rows: int, offered_counts: set[int]) -> None:
    found = offered(rms_norm_backward, meta_inputs(rms_norm_backward, cols, dtype, rows))
    assert {s.ctas_per_row for s in found} == offered_counts
    for each in found:
        assert each.family == "mix-order multi-CTA" and f"{each.ctas_per_row} CTAs per row" in str(each)
        assert isinstance(each.rows, Loop) and each.splits == each.rows.split
        assert isinstance(each.cols, Cover) and each.cols.width * each.ctas_per_row == cols and each.stages >= 2
        assert each.splits * each.ctas_per_row in (132, 264, 128, 256)


@pytest.mark.parametrize(
    ("fn", "dtype", "halves"),
    [(rms_norm_backward, BF16, True), (rms_norm_backward, F32, False), (add_rms_norm_backward, BF16, True)],
)
def test_half_vectors_are_offered_if_all_inputs_are_staged_in_16_bits(
    fn: Callable[..., Any], dtype: torch.dtype, halves: bool
) -> None:
    found = offered(fn, meta_inputs(fn, 32768, dtype, 8192))
    loads = max(len(s.staged) for s in found)
    half = [s for s in found if isinstance(s.cols, Cover) and s.cols.tiles[0] < 32 * s.warps * (8 if dtype is BF16 else 4)]
    assert bool(half) is halves and all(len(s.staged) == loads for s in half)


def test_cards_without_tma_have_one_cta_per_row() -> None:
    assert not offered(rms_norm_backward, meta_inputs(rms_norm_backward, 32768, rows=8192), device("a100"))


def late_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    """A reduction along rows that depends on another one."""
    y = x.float()
    return (y - y.mean(-1, keepdim=True)).square().sum(-1, keepdim=True).mul(y).to(x.dtype), y.sum(0)


def in_64_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """A state of 64 bits, which does not fit a mailbox word."""
    return (x * x.double().sum(-1, keepdim=True)).to(x.dtype), x.float().sum(0)


@pytest.mark.parametrize(
    ("fn", "may"),
    [
        (rms_norm_backward, True),
        (layer_norm_backward, True),
        (spread_and_top, True),
        (late_sum, False),
        (in_64_bits, False),
        (all_else, False),
        (totals, False),
        (stored_early, False),
    ],
)
def test_which_functions_can_have_several_ctas_per_row(fn: Callable[..., Any], may: bool) -> None:
    kernel: Kernel = mixed_kernel(fn, inputs_of(fn, 7, 4096, BF16))
    assert may_span_ctas(kernel) is may


@pytest.mark.parametrize(
    ("fn", "rows", "cols", "ctas", "ctas_per_sm"),
    [
        (rms_norm_backward, 8192, 32768, 2, 1),
        (rms_norm_backward, 4096, 65536, 4, 1),
        (layer_norm_backward, 8192, 32768, 2, 1),
        (rms_norm_backward, 24 * 132, 32768, 2, 1),  # the representative of 8192 rows
        (rms_norm_backward, 8192, 16384, 1, 1),
        (layer_norm_backward, 8192, 8192, 1, 1),
        (layer_norm_backward, 8192, 16384, 2, 2),  # two states per column: with one CTA per row, no second CTA fits an SM
    ],
)
def test_default_plans(fn: Callable[..., Any], rows: int, cols: int, ctas: int, ctas_per_sm: int) -> None:
    program, _, bindings = program_of(fn, *meta_inputs(fn, cols, rows=rows))
    chosen_plan = best_plan(program, bindings, H200)
    first = chosen_plan.kernels[0]
    assert first.schedule.ctas_per_row == ctas
    if ctas > 1:
        assert len(chosen_plan.kernels) == 2, "one kernel, and the join of its partial results"
        assert first.schedule.warps == 8 and first.schedule.stages == 3
        assert first.resources.ctas_per_sm == ctas_per_sm


def test_one_cta_per_row_wins_ties() -> None:
    args = meta_inputs(add_rms_norm_backward, 16384, F32, 4096)
    program, _, bindings = program_of(add_rms_norm_backward, *args)
    found = scores(program, bindings, H200, {})
    assert not isinstance(found, Illegal)
    alone, together = (min(s.us for s in found if (s.plan.schedule.ctas_per_row > 1) is several) for several in (False, True))
    assert together < alone < 1.03 * together and best_plan(program, bindings, H200).kernels[0].schedule.ctas_per_row == 1


@pytest.mark.parametrize(
    ("rows", "cols", "ctas", "warps", "vectors", "ctas_per_sm", "row_vectors", "us"),
    [
        (8192, 32768, 2, 8, 4, 1, REGISTERS, 408),
        (8192, 32768, 2, 16, 0.5, 1, REGISTERS, 412),
        (8192, 32768, 4, 8, 0.5, 2, REGISTERS, 390),
        (8192, 32768, 4, 8, 0.5, 2, RELOAD, 441),
        (4096, 65536, 4, 8, 0.5, 1, REGISTERS, 408),
        (4096, 65536, 4, 16, 0.5, 1, REGISTERS, 442),
    ],
)
def test_predictions_are_near_measurements(
    rows: int, cols: int, ctas: int, warps: int, vectors: float, ctas_per_sm: int, row_vectors: RowVectors, us: float
) -> None:
    """H200, Triton 3.6.0; bench/results/h200/trials.json."""
    plan = multi_cta_plan(
        rms_norm_backward,
        meta_inputs(rms_norm_backward, cols, rows=rows),
        ctas,
        warps,
        vectors,
        3,
        132 * ctas_per_sm // ctas,
        row_vectors,
    )
    assert abs(plan.predicted_us / us - 1) < 0.05


def test_reports_show_the_ctas_per_row() -> None:
    first = multi_cta_plan(layer_norm_backward, meta_inputs(layer_norm_backward, 8192), 2, 8).kernels[0]
    assert "x bf16 once, staged in shared memory (24.0 KiB), 1/2 of a row per CTA" in first.loads
    assert "mailbox i64[rows, 4]: partial row results exchanged between the 2 CTAs of a row" in first.loads


# ---- serialization ---------------------------------------------------------------------------------------------------------


def test_cleared_buffers_round_trip_and_come_first_in_memory() -> None:
    plan = multi_cta_plan(rms_norm_backward, meta_inputs(rms_norm_backward, 8192), 2, 8)
    made = Compiled(plan, pipeline.generate(plan), ()).artifact
    back = unpack("key", pack("key", made))
    assert isinstance(back, Artifact) and back == made and back.cleared == made.cleared and back.sources[0].ctas_per_group == 2
    words_there, (first, *_) = pack_temporaries((*made.cleared, *made.temporaries), {"s0": 100})
    cleared, _ = pack_temporaries(made.cleared, {"s0": 100})
    assert first == 0 and 100 * 2 * 2 <= cleared < words_there


def test_results_do_not_depend_on_the_timing_of_ctas() -> None:
    args = inputs_of(rms_norm_backward, 9, 8192, BF16)
    _, tensors, bindings = program_of(rms_norm_backward, *args)
    first, second = (run(multi_cta_plan(rms_norm_backward, args, slots=slots), tensors, bindings) for slots in (2, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_keeping_row_vectors_on_chip_wins_ties() -> None:
    """If registers are full, shared memory is used, though plans that reload vectors need less and are predicted as fast."""
    program, _, bindings = program_of(rms_norm_backward, *meta_inputs(rms_norm_backward, 49152, rows=32 * 132))
    found = scores(program, bindings, H200, {})
    assert not isinstance(found, Illegal)
    spilling = {s.plan.scored_as: CompileOutcome(1000, (True, 100)) for s in found if s.plan.schedule.row_vectors is REGISTERS}
    left = [s for s in found if s.plan.schedule.row_vectors is not REGISTERS]
    anew = min((s for s in left if s.plan.schedule.row_vectors is RELOAD), key=lambda s: s.us)
    taken = score(program, bindings, H200, spilling)
    assert not isinstance(taken, Illegal)
    assert taken.plan.schedule.row_vectors is SMEM and anew.us < 1.03 * min(s.us for s in left)
    assert anew.plan.schedule.registers * anew.plan.schedule.warps < taken.plan.schedule.registers * taken.plan.schedule.warps
