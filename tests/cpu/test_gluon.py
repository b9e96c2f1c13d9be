"""Rows staged in shared memory: the generated text, its compilation for sm_90, and its results in the functional model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass import errors, pipeline
from onepass.codegen import gluon
from onepass.codegen import kernel_ir as ir
from onepass.codegen.emit import emit
from onepass.codegen.expr import GLUON
from onepass.codegen.helpers import FUNCTIONS, definitions
from onepass.codegen.printer import Lowered, imports
from onepass.codegen.source import GridDim, ParamKind, Source, TensorView
from onepass.device import device
from onepass.ir.expr import BY_TORCH, DTYPES, OPS
from onepass.ir.oracle import evaluate
from onepass.ir.text import parse
from onepass.plan.estimate import estimate
from onepass.plan.partition import plan
from onepass.plan.resources import ctas_per_sm, demand
from onepass.plan.schedule import PIECE_ELEMS, Cover
from onepass.plan.staged_rows import Chunks, chunk_cover_unaligned, chunks, register_limit, tma_stageable, tma_stageable_unaligned
from onepass.runtime import offline
from onepass.runtime.compiled import Artifact, Compiled, Summary
from onepass.runtime.executable import allocate, argument_picker, assemble, layout
from onepass.runtime.interpreter import gluon_model, interpret
from onepass.runtime.launch import TensorMap
from onepass.runtime.serialize import pack, unpack
from onepass.tools.functions import layer_norm, rms_norm, softmax, softmax_backward
from tests.support.forced_schedules import scored
from tests.support.handwritten_kernels import kernel as by_hand
from tests.support.kernel_changes import FORGOTTEN, Change, behind, changed, fields, rewritten, value_fields, without
from tests.support.staged_kernels import BF16, F16, F32, kernel_of, meta, staged_schedule

H200 = device("h200")


def norm_inputs(fn: Callable[..., Any], cols: int, dtype: torch.dtype, rows: int = 4096) -> tuple[Tensor, ...]:
    vectors = {softmax: 0, rms_norm: 1, layer_norm: 2}[fn]
    return meta(rows, cols, dtype=dtype), *(meta(cols, dtype=dtype) for _ in range(vectors))


# ---- compilation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("cols", [16384, 32768, 65536])
@pytest.mark.parametrize("fn", [softmax, rms_norm, layer_norm])
def test_staged_rows_compile_without_spills_in_the_computed_shared_memory(
    fn: Callable[..., Any], cols: int, dtype: torch.dtype
) -> None:
    kernel, bindings = kernel_of(fn, norm_inputs(fn, cols, dtype))
    two = cols * dtype.itemsize <= 65536
    schedule = staged_schedule(kernel, slots=2 if two else 1)
    expected = estimate(demand(kernel), schedule, H200)
    if cols * dtype.itemsize > H200.smem_per_cta:
        assert expected.ctas_per_sm == 0, "what no CTA has room for is never built"
        return
    binary = offline.compile(gluon.lower(kernel, schedule, bindings, "norm").source(), H200)
    assert binary.spill_bytes == 0
    assert binary.smem_bytes == expected.smem_bytes <= H200.smem_per_cta
    assert set(binary.stores) == {16} and set(binary.loads) <= {16}
    assert binary.tma_copies and binary.mbarriers
    assert binary.registers <= schedule.registers  # the compiler uses registers that are free: only the cap is promised


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("warps", [4, 16])
def test_computed_shared_memory_is_exact_for_tails_and_any_ring(warps: int, slots: int) -> None:
    kernel, bindings = kernel_of(softmax_backward, (meta(64, 10008), meta(64, 10008)))
    schedule = staged_schedule(kernel, warps, 1, slots)
    binary = offline.compile(gluon.lower(kernel, schedule, bindings, "backward").source(), H200)
    assert binary.smem_bytes == estimate(demand(kernel), schedule, H200).smem_bytes
    assert binary.spill_bytes == 0 and set(binary.stores) == {16}


@pytest.mark.parametrize(("fn", "cols"), [(layer_norm, 1024), (softmax, 16384), (rms_norm, 32768)])
def test_barriers_keep_their_memory_if_a_cta_has_one_row(fn: Callable[..., Any], cols: int) -> None:
    kernel, bindings = kernel_of(fn, norm_inputs(fn, cols, F32))
    schedule = staged_schedule(kernel, 4, 1, 1, split=0)
    binary = offline.compile(gluon.lower(kernel, schedule, bindings, "norm").source(), H200)
    assert binary.smem_bytes == estimate(demand(kernel), schedule, H200).smem_bytes, "barriers and the exchange between warps"


def test_one_tma_copy_loads_a_row_if_its_box_allows() -> None:
    kernel, bindings = kernel_of(softmax, (meta(64, 32768),))
    source = gluon.lower(kernel, staged_schedule(kernel), bindings, "softmax").source()
    assert [p.view.box for p in source.params if p.view] == [(1, 128, 256)]
    assert "for j in" not in source.text
    source = gluon.lower(kernel, staged_schedule(kernel, slots=1), bindings, "softmax").source()
    assert [p.view.box for p in source.params if p.view] == [(1, 32, 256)]
    assert "for j in" in source.text, "a row that is alone in its ring leaves it in parts"


# ---- results ---------------------------------------------------------------------------------------------------------------


def first_of_the_greatest(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.float().argmax(-1), x.float() - x.float().amax(-1, keepdim=True)


def product_and_least(x: Tensor) -> Tensor:
    y = 1 + x.float() / 512
    return y * y.prod(-1, keepdim=True) + x.float().amin(-1, keepdim=True)


def log_softmax(x: Tensor) -> Tensor:
    return x.float() - torch.logsumexp(x.float(), -1, keepdim=True)


def less_variance(x: Tensor) -> Tensor:
    return (x.float() - x.float().var(-1, keepdim=True)).to(x.dtype)


def layer_norm_dx(x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    xhat, g = (x.float() - mean) * rstd, dy.float() * w
    return (rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))).to(x.dtype)


def inputs_of(fn: Callable[..., Any], rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(cols)
    x, dy = torch.randn(rows, cols).to(dtype), torch.randn(rows, cols).to(dtype)
    w, b = torch.randn(cols).to(dtype), torch.randn(cols).to(dtype)
    row, spread = torch.randn(rows, 1), torch.rand(rows, 1) + 0.5
    few: dict[Callable[..., Any], tuple[Tensor, ...]] = {
        rms_norm: (x, w),
        layer_norm: (x, w, b),
        softmax_backward: (x.float().softmax(-1).to(dtype), dy),
        layer_norm_dx: (x, w, row, spread, dy),
    }
    return few.get(fn, (x,))


def run_staged(fn: Callable[..., Any], args: tuple[Tensor, ...], wide: bool = False, **how: int) -> None:
    """Run in the model and compare with the oracle."""
    kernel, bindings = kernel_of(fn, args)
    schedule = staged_schedule(kernel, **how)
    source = emit(kernel, schedule, bindings, "row", H200, wide)
    program = kernel.program
    names = [b.name for b in program.buffers if b.role == "input"]
    buffers = dict(zip(names, args, strict=True))
    buffers |= {b.name: allocate(layout(b, bindings), torch.device("cpu")) for b in program.buffers if b.role == "output"}
    gluon_model.run_source(source, buffers, bindings)
    exact = evaluate(program, {n: buffers[n] for n in names}, bindings)
    for name, right in exact.items():
        actual = buffers[name]
        if actual.is_floating_point():
            eps = torch.finfo(actual.dtype).eps
            torch.testing.assert_close(actual.double(), right, rtol=2 * eps, atol=2.0**-13 * max(1.0, float(right.abs().max())))
        else:
            assert torch.equal(actual, right)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("cols", [4096, 5000, 6144, 4501])
@pytest.mark.parametrize(
    "fn",
    [
        softmax,
        rms_norm,
        layer_norm,
        softmax_backward,
        layer_norm_dx,
        first_of_the_greatest,
        product_and_least,
        log_softmax,
        less_variance,
    ],
)
def test_every_reduction_is_right_over_staged_rows(fn: Callable[..., Any], cols: int, dtype: torch.dtype) -> None:
    run_staged(fn, inputs_of(fn, 5, cols, dtype), warps=4, vectors=1, split=2)
    run_staged(fn, inputs_of(fn, 3, cols, dtype), warps=4, vectors=1, slots=1, split=0)


def squashed(x: Tensor) -> Tensor:
    y = x.float() - x.float().amax(-1, keepdim=True)
    return (torch.sigmoid(y) + torch.tanh(y) * torch.erf(y)).to(x.dtype)


def test_unary_functions_are_the_same_as_in_triton() -> None:
    args = inputs_of(squashed, 3, 2048, BF16)
    run_staged(squashed, args, warps=4, vectors=1, split=2)
    kernel, bindings = kernel_of(squashed, args)
    source = gluon.lower(kernel, staged_schedule(kernel, 4, 1), bindings, "squashed").source()
    brought = [name for name in FUNCTIONS if f"def {name}(" in source.text]
    assert brought == ["_larger", "widen", "fast_sigmoid", "fast_tanh", "fast_erf", "fold_max"]
    assert offline.compile(source, H200).spill_bytes == 0


def test_every_op_on_floats_compiles_in_gluon() -> None:
    """All rows of the op table in one kernel, with the same text as in Triton."""
    rows = [spec for name, spec in OPS.items() if spec.takes.accepts(BY_TORCH[F32]) and name not in ("cast", "where", "fma")]
    unary, binary = ([spec.reference for spec in rows if spec.arity == k] for k in (1, 2))

    def all_of_them(x: Tensor) -> Tensor:
        y = x - x.amax(-1, keepdim=True)
        found = y
        for op in unary:
            found = found + op(y)
        for two in binary:
            found = found + two(y, x)
        return found

    kernel, bindings = kernel_of(all_of_them, inputs_of(all_of_them, 3, 2048, F32))
    text = gluon.lower(kernel, staged_schedule(kernel, 4, 1), bindings, "all_of_them").source()
    assert all(f"libdevice.{name}(" in text.text for spec in rows for name in spec.libdevice if not spec.exact)
    assert offline.compile(text, H200).registers > 0


@pytest.mark.parametrize(
    "name", ["to_e5m2", "widen", "fast_exp", "fast_sigmoid", "fast_tanh", "fast_erf", "fold_prod", "fold_max", "fold_min"]
)
def test_helpers_are_the_same_as_in_triton(name: str) -> None:
    """The helpers in the text of Gluon kernels give the same bits as those that Triton kernels import."""
    given, gives = DTYPES["bf16" if name == "widen" else "f32"], DTYPES["f8e5m2" if name == "to_e5m2" else "f32"]
    odd = [math.nan, math.inf, -math.inf, 0.0, -0.0, 61439.0, 61440.0, -61440.0, 61441.0, 1e-40, 0.04, -0.04, 3.0]
    x = torch.cat([torch.tensor(odd), torch.linspace(-6, 6, 1024 - len(odd))]).to(given.torch)
    call = f"{name}({{}}, 1)" if "fold" in name else f"{name}({{}})"
    found = [torch.empty(1024, dtype=gives.torch) for _ in range(2)]
    body = ["i = tl.arange(0, 1024)[None, :]", f"y = {call.format('tl.load(x + i)')}", "tl.store(out + i, y)"]
    interpret.run(by_hand("one", {"x": given, "out": gives}, body), {"x": x, "out": found[0]}, {})
    lines = [
        "@gluon.jit",
        "def one(x, out):",
        "    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])",
        "    i = gl.arange(0, 1024, layout=gl.SliceLayout(0, TILE))[None, :]",
        f"    y = {call.format('gl.load(x + i)')}",
        "    gl.store(out + i, y)",
    ]
    parts = *imports(GLUON, frozenset({"tl", "libdevice"})), *definitions(frozenset({name}), GLUON), "\n".join(lines)
    gluon_model.run("one", "\n\n".join(parts) + "\n", {"x": x, "out": found[1]}, 1)
    torch.testing.assert_close(found[1].float(), found[0].float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cols", [2056, 2211])
@pytest.mark.parametrize(
    ("rows", "slots", "split"), [(7, 1, 1), (7, 1, 3), (7, 3, 2), (7, 4, 1), (3, 2, 3), (2, 4, 8), (2, 1, 0), (7, 1, 0)]
)
def test_any_ring_any_grid_any_number_of_rows_per_cta(rows: int, slots: int, split: int, cols: int) -> None:
    run_staged(softmax, inputs_of(softmax, rows, cols, BF16), warps=4, vectors=1, slots=slots, split=split)


def scaled_twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x * x.float().sum(1, keepdim=True) * w, w * 2


@pytest.mark.parametrize("split", [0, 2])
def test_values_that_no_row_changes_are_stored_too(split: int) -> None:
    run_staged(scaled_twice, (torch.randn(5, 4096), torch.randn(4096)), warps=4, vectors=1, slots=1, split=split)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("fn", [softmax, rms_norm, softmax_backward, layer_norm_dx, first_of_the_greatest, less_variance])
def test_every_reduction_is_right_over_a_ring_of_copies(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    run_staged(fn, inputs_of(fn, 5, 4096, dtype), warps=4, vectors=1, slots=1, split=2, prefetch=2)


@pytest.mark.parametrize("cols", [4096, 5120, 8192])
@pytest.mark.parametrize(("rows", "split", "prefetch"), [(7, 1, 1), (8, 1, 3), (7, 3, 2), (2, 8, 3), (9, 2, 7)])
def test_copies_fill_the_slots_of_the_ring_in_order(rows: int, split: int, prefetch: int, cols: int) -> None:
    run_staged(softmax, inputs_of(softmax, rows, cols, BF16), warps=4, vectors=1, slots=1, split=split, prefetch=prefetch)


@pytest.mark.parametrize("cols", [4096, 8192])
@pytest.mark.parametrize(
    ("change", "caught"),
    [
        *FORGOTTEN[:2],
        (fields(ir.Wait, lambda wait: wait.phase == "phase ^ wrapped", phase="phase"), errors.WrongPhase),
        (fields(ir.Assign, lambda node: node.value == "row + next_copy // 4 * 2", value="row + 1 * 2"), errors.CopyLeftBehind),
        (
            fields(ir.CopyAsync, lambda copy: copy.barrier.index == "copy_slot", coordinates=("prefetch_row", "0", "0")),
            AssertionError,
        ),
    ],
)
def test_a_broken_ring_of_copies_is_caught(
    cols: int, change: Change, caught: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon, "lower", lambda *args, right=gluon.lower: rewritten(right(*args), change))
    with pytest.raises(caught):
        run_staged(softmax, inputs_of(softmax, 9, cols, BF16), warps=4, vectors=1, slots=1, split=2, prefetch=3)


@pytest.mark.parametrize(("fn", "dtype"), [(softmax, F32), (rms_norm, F32), (softmax_backward, BF16)])
def test_a_ring_of_copies_compiles_without_spills(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    args = norm_inputs(fn, 32768, dtype) if fn is not softmax_backward else (meta(64, 32768), meta(64, 32768))
    kernel, bindings = kernel_of(fn, args)
    schedule = staged_schedule(kernel, 8, 1, 1, prefetch=3)
    binary = offline.compile(gluon.lower(kernel, schedule, bindings, "norm").source(), H200)
    assert binary.spill_bytes == 0 and binary.smem_bytes == estimate(demand(kernel), schedule, H200).smem_bytes


# ---- unaligned rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(2, 10))
@pytest.mark.parametrize("cols", [1089, 1131, 1151, 9281])  # three rows of 1131 leave one element over
def test_elements_past_the_flat_view_are_read(cols: int, rows: int) -> None:
    """0, 1, a few, many or 63 elements may be left over; nothing past the end of the tensor is read."""
    (x,) = inputs_of(softmax, rows, cols, BF16)
    x[-1, -1] = 4.0  # nonzero, in case it is the only one
    run_staged(softmax, (x,), warps=4, vectors=1, slots=2 - rows % 2, split=2)


@pytest.mark.parametrize(("rows", "cols", "stride"), [(64, 65, 65), (4, 96, 96), (3, 50, 51), (2, 127, 129), (1, 64, 64)])
def test_a_flat_view_covers_every_whole_piece(rows: int, cols: int, stride: int) -> None:
    """It covers nothing past the end of its tensor."""
    shape, strides = TensorView((rows, cols), (stride, 1), (1, 1, PIECE_ELEMS), piece_elems=PIECE_ELEMS).resolved({})
    pieces = ((rows - 1) * stride + cols) // PIECE_ELEMS
    assert shape == (1, pieces, PIECE_ELEMS) and strides == (pieces * PIECE_ELEMS, PIECE_ELEMS, 1)


def own_sum(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x * x.sum(1, keepdim=True) * w.sum(), w.sum()


@pytest.mark.parametrize("split", [0, 2, 5])
def test_one_row_stores_values_that_no_row_changes(split: int) -> None:
    """Rows at other offsets in a piece sum in another order, so the value would depend on the CTA that stores last."""
    args = torch.randn(5, 4501), torch.randn(4501)
    kernel, bindings = kernel_of(own_sum, args)
    schedule = staged_schedule(kernel, warps=4, vectors=1, slots=1, split=split)
    source = emit(kernel, schedule, bindings, "row", H200)
    names = [b.name for b in kernel.program.buffers]
    sums = []
    for count in (split or 5, 1):  # all CTAs, or the first one alone
        outputs = torch.empty(5, 4501), torch.full((), math.nan)
        gluon_model.run_source(replace(source, grid=(GridDim(count),)), dict(zip(names, (*args, *outputs), strict=True)), bindings)
        sums.append(outputs[1])
    assert torch.equal(*sums)


def test_far_rows_are_addressed_with_64_bits() -> None:
    """The first piece of rows more than 2 ** 31 elements after the first row."""
    (x,) = inputs_of(softmax, 3, 1089, BF16)
    kernel, bindings = kernel_of(softmax, (x,))
    schedule = staged_schedule(kernel, 4, 1, 1, 2)
    text = emit(kernel, schedule, bindings, "row", H200, True).text
    pieces = re.findall(r"(\w+)_piece = \((.*)\)\.to\(gl\.int32\)", text)
    assert {name for name, _ in pieces} == {"prologue_row", "prefetch_row"}
    assert all(counted.startswith(f"{name}.to(gl.int64) * ") for name, counted in pieces)


def odd_kernel(rows: int, slots: int) -> tuple[Lowered, dict[str, Tensor], dict[str, int]]:
    """A softmax over unaligned rows, of which the last ends within a piece, with its buffers and sizes."""
    (x,) = inputs_of(softmax, rows, 1089, BF16)
    kernel, bindings = kernel_of(softmax, (x,))
    schedule = staged_schedule(kernel, 4, 1, slots, 2)
    return gluon.lower(kernel, schedule, bindings, "row"), {"x": x, "out0": torch.empty_like(x)}, bindings


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(
    ("change", "caught"),
    [
        (without(ir.CtaBarrier), errors.UseBeforeArrival),  # reductions read what other threads wrote there
        (behind(ir.Wait, ir.If), errors.RefillBeforeDrain),  # TMA has not written there yet
        (
            value_fields(ir.Load, lambda load: load.offset == ("covered", "tail_lanes"), masks=()),
            errors.AccessOutOfBounds,
        ),  # past the end
        (
            fields(ir.Assign, lambda node: node.targets == ("tail_piece",), value=lambda node: f"32 + {node.value}"),
            errors.OutsideAllocation,
        ),
    ],
)
def test_elements_past_the_flat_view_reach_shared_memory_in_time(slots: int, change: Change, caught: type[Exception]) -> None:
    kernel, buffers, bindings = odd_kernel(5, slots)
    with pytest.raises(caught):
        gluon_model.run_source(changed(kernel, change), buffers, bindings)


def test_leaving_out_elements_past_the_flat_view_is_wrong() -> None:
    kernel, buffers, bindings = odd_kernel(5, 1)
    right = buffers["x"].float().softmax(-1)
    for source, whole in ((kernel.source(), True), (changed(kernel, fields(ir.If, condition="tail_elems > 63")), False)):
        gluon_model.run_source(source, buffers, bindings)
        wrong = (buffers["out0"].float() / right - 1).abs().amax(-1) > 2**-7
        assert wrong.tolist() == [False] * 4 + [not whole], "it is in the last row only"


def test_chunks_of_a_flat_view_have_room_for_the_shift() -> None:
    assert chunk_cover_unaligned(50257, 4096, 4096) == Cover((4096,) * 13), "1105 columns and 63 more fit into one chunk"
    assert chunk_cover_unaligned(50257, 8192, 2048) == Cover((8192,) * 6 + (2048,))
    assert chunk_cover_unaligned(65537, 4096, 1024) is None, "what is left out could be in a chunk that has no mask"
    assert chunk_cover_unaligned(8191, 4096, 1024) is None, "with the shift the rest is longer than a chunk"


@pytest.mark.parametrize("fn", [softmax, rms_norm])
@pytest.mark.parametrize(("slots", "split"), [(1, 132), (2, 132), (1, 0)])
def test_unaligned_rows_compile_without_spills(fn: Callable[..., Any], slots: int, split: int) -> None:
    kernel, bindings = kernel_of(fn, norm_inputs(fn, 50257, BF16))
    schedule = staged_schedule(kernel, 16, 1, slots, split)
    binary = offline.compile(emit(kernel, schedule, bindings, "norm", H200), H200)
    assert binary.spill_bytes == 0 and binary.tma_copies and binary.mbarriers
    assert binary.smem_bytes == estimate(demand(kernel), schedule, H200).smem_bytes <= H200.smem_per_cta
    assert 16 in binary.stores, "whole pieces are stored by vectors"


@pytest.mark.parametrize("fn", [softmax, rms_norm])
def test_unaligned_rows_leave_registers_for_two_ctas_of_16_warps(fn: Callable[..., Any]) -> None:
    """Elements outside the flat view and the masks of a row's ends must not stay in registers during a pass over the row."""
    kernel, bindings = kernel_of(fn, norm_inputs(fn, 50257, BF16))
    schedule = replace(staged_schedule(kernel, 16, 1, 1), registers=64)
    assert offline.compile(emit(kernel, schedule, bindings, "norm", H200), H200).spill_bytes == 0


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("change", "caught"), FORGOTTEN)
def test_a_broken_kernel_is_caught(slots: int, change: Change, caught: type[Exception]) -> None:
    args = inputs_of(softmax, 7, 5000, BF16)
    kernel, bindings = kernel_of(softmax, args)
    source = changed(gluon.lower(kernel, staged_schedule(kernel, 4, 1, slots, 2), bindings, "row"), change)
    buffers = {"x": args[0], "out0": torch.empty_like(args[0])}
    with pytest.raises(caught):
        gluon_model.run_source(source, buffers, bindings)


@pytest.mark.parametrize("cols", [4096, 4501])
@pytest.mark.parametrize("split", [2, 0])
def test_64_bit_element_offsets_are_right(split: int, cols: int) -> None:
    run_staged(rms_norm, inputs_of(rms_norm, 5, cols, BF16), wide=True, warps=4, vectors=1, slots=1, split=split)


# ---- the text --------------------------------------------------------------------------------------------------------------

GOLDEN = """\
    iteration = 0
    for row in range(split_id, row_count, 2):
        slot = iteration % 2
        first_chunk = slot * 2
        row_index = row
        rows = row_index + gl.arange(0, 1, layout=gl.SliceLayout(1, TILE))[:, None]
        mbarrier.wait(ready.index(slot), iteration // 2 & 1)
        cta_barrier()
        max2_acc = gl.full([1, 1024], float("-inf"), gl.float32, TILE)
        for k in range(0, 2):
            cols = k * 1024 + lanes
            x = x_chunks.index(first_chunk + k).load(TILE)
            cast1 = x.to(gl.float32)
            max2_acc = gl.maximum(max2_acc, cast1, propagate_nan=tl.PropagateNan.ALL)
        x_rest = x_rest_ring.index(slot).load(TILE)
        cast1_rest = x_rest.to(gl.float32)
        masked = gl.where(cols_rest_in, cast1_rest, float("-inf"))
        max2_acc_1 = gl.maximum(max2_acc, masked, propagate_nan=tl.PropagateNan.ALL)
        max2 = fold_max(max2_acc_1, 1)
        for k in range(0, 2):
            cols = k * 1024 + lanes
            x_p1 = x_chunks.index(first_chunk + k).load(TILE)
            cast1_p1 = widen(x_p1)
            sub4 = cast1_p1 - max2
            cast5 = sub4.to(gl.bfloat16)
            gl.store(out0_ptr + (rows * 2056 + cols), cast5)
        x_rest_p1 = x_rest_ring.index(slot).load(TILE)
        cast1_rest_p1 = widen(x_rest_p1)
        sub4_rest = cast1_rest_p1 - max2
        cast5_rest = sub4_rest.to(gl.bfloat16)
        gl.store(out0_ptr + (rows * 2056 + cols_rest), cast5_rest, mask=cols_rest_in)
        fence_async_shared()
        cta_barrier()
        prefetch_row = row + 4
        prefetch_in = prefetch_row < row_count
        mbarrier.expect(ready.index(slot), 6144, pred=prefetch_in)
        tma.async_copy_global_to_shared(x_tiles, [prefetch_row, 0], ready.index(slot), x_ring.index(slot), pred=prefetch_in)
        tma.async_copy_global_to_shared(x_rest_tile, [prefetch_row, 2048], ready.index(slot), \
x_rest_ring.index(slot), pred=prefetch_in)
        iteration += 1
    for each_slot in gl.static_range(2):
        mbarrier.invalidate(ready.index(each_slot))
"""


def less_greatest(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True)


def test_the_generated_text() -> None:
    kernel, bindings = kernel_of(less_greatest, (meta(16, 2056),))
    text = gluon.lower(kernel, staged_schedule(kernel, 4, 1, 2, 2), bindings, "less").source().text
    rows = text[text.index("    iteration = 0") :]
    assert re.sub("  # .*", "", rows) == GOLDEN


# ---- the plan --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "shape", "dtype", "offered"),
    [
        ("h200", (8192, 32768), BF16, True),
        ("a100", (8192, 32768), BF16, False),  # no TMA
        ("h200", (8192, 50257), BF16, True),  # unaligned rows
        ("h200", (8192, 65537), BF16, False),  # the tail after the whole chunks is too short
        ("h200", (8192, 50264), BF16, True),
        ("h200", (8192, 65536), F32, False),  # more shared memory than a CTA can have
        ("h200", (8192, 32768), torch.float64, False),
    ],
)
def test_rows_are_staged_where_tma_can_load_them(on: str, shape: tuple[int, int], dtype: torch.dtype, offered: bool) -> None:
    where = device(on)
    kernel, bindings = kernel_of(softmax, (meta(*shape, dtype=dtype),))
    found = [s.plan for s in scored(kernel.program, bindings, where) if s.plan.schedule.staged]
    assert bool(found) is offered
    for each in found:
        assert each.resources.smem_bytes <= where.smem_per_cta and each.schedule.splits == 1
        assert each.resources.ctas_per_sm * (each.resources.smem_bytes + where.smem_reserve) <= where.smem_per_sm
    assert plan(kernel.program, bindings, where).kernels, "what cannot be staged has another plan"


def test_a_long_softmax_is_staged_and_compiles() -> None:
    kernel, bindings = kernel_of(softmax, (meta(32768, 50264),))
    made = pipeline.compile(plan(kernel.program, bindings, H200), lambda source: offline.compile(source, H200))
    (chosen,) = made.plan.kernels
    assert chosen.family == "inner staged" and made.sources[0].gluon
    assert "staged in shared memory" in chosen.loads[0]
    assert made.binaries[0].smem_bytes <= chosen.resources.smem_bytes and made.binaries[0].spill_bytes == 0


def test_a_staged_plan_runs_where_kernels_are_interpreted() -> None:
    x = inputs_of(softmax, 5, 2048, BF16)
    kernel, bindings = kernel_of(softmax, x)
    best = min((s for s in scored(kernel.program, bindings) if s.plan.schedule.staged), key=lambda s: s.us)
    chosen = replace(plan(kernel.program, bindings, H200), kernels=(replace(best.plan, name="row"),))
    made = Compiled(chosen, pipeline.generate(chosen), ()).artifact
    (out,) = assemble(made, torch.device("cpu"), frozenset())({"x": x[0]}, bindings).values()
    torch.testing.assert_close(out.float(), x[0].float().softmax(-1), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("tiles", "extent", "expected"),
    [
        ((4096, 4096), 8192, Chunks(4096, 2, 0)),
        ((4096, 4096, 1024), 9000, Chunks(4096, 2, 1024)),
        ((4096, 4096), 8000, Chunks(4096, 1, 4096)),
    ],
)
def test_a_row_is_chunks_and_a_tail(tiles: tuple[int, ...], extent: int, expected: Chunks) -> None:
    assert chunks(Cover(tiles), extent) == expected


@pytest.mark.parametrize(("tiles", "extent"), [((4096, 2048, 1024), 7000), ((4096,), 4097), ((4096,), 100)])
def test_covers_that_are_not_chunks_and_a_tail_are_refused(tiles: tuple[int, ...], extent: int) -> None:
    with pytest.raises(ValueError, match="chunks of one width"):
        chunks(Cover(tiles), extent)


# ---- launching -------------------------------------------------------------------------------------------------------------


def short_source() -> tuple[Source, dict[str, int]]:
    kernel, bindings = kernel_of(rms_norm, (meta(16, 4096), meta(4096)))
    return gluon.lower(kernel, staged_schedule(kernel, 4, 1), bindings, "rms").source(), bindings


def test_a_tensor_map_is_an_address_with_its_view() -> None:
    source, bindings = short_source()
    kinds = [p.kind for p in source.params]
    assert kinds == [ParamKind.POINTER, ParamKind.POINTER, ParamKind.TENSOR_MAP, ParamKind.SIZE, ParamKind.ZERO]
    places = {p.name: i for i, p in enumerate(source.params) if p.kind in (ParamKind.POINTER, ParamKind.TENSOR_MAP)}
    places |= {f"size {name}": 3 for name in bindings} | {"size ": 4}
    args = argument_picker(source, places, bindings)([64, 128, 256, 16, 0])
    assert list(args) == [64, 128, TensorMap(256, (16, 16, 256), (4096, 256, 1)), 16, 0]


def test_a_source_with_tensor_maps_round_trips() -> None:
    source, _ = short_source()
    made = Artifact((), (source,), (), (), Summary((), 0, 0.0, (), ()), ())
    assert unpack("key", pack("key", made)) == made


def test_rows_that_do_not_start_at_16_bytes_are_not_staged() -> None:
    kernel, bindings = kernel_of(softmax, (meta(8192, 32768),))
    crooked = replace(kernel.program, buffers=tuple(replace(b, aligned=b.role == "output") for b in kernel.program.buffers))
    assert parse(str(crooked)) == crooked
    assert any(s.plan.schedule.staged for s in scored(kernel.program, bindings))
    assert not any(s.plan.schedule.staged for s in scored(crooked, bindings))


def test_views_that_start_inside_a_tensor_are_not_staged() -> None:
    """A tensor map has no offset."""
    whole, _ = kernel_of(softmax, (meta(8192, 32768),))
    part, _ = kernel_of(lambda x: torch.softmax(x[:, 4096:], -1), (meta(8192, 36864),))
    assert tma_stageable(whole) and not tma_stageable(part) and not tma_stageable_unaligned(part)


@pytest.mark.parametrize("warps", [1, 4, 8, 16])
def test_as_many_ctas_fit_as_the_register_cap_allows(warps: int) -> None:
    for here in (n for n in (1, 2, 3, 4, 8) if 32 * warps * n <= H200.threads_per_sm):
        limit = register_limit(warps, here, H200)
        assert limit <= H200.registers_per_thread and ctas_per_sm(limit, 0, warps, H200) >= here
