"""The functional model of Gluon kernels: correct results for correct kernels, and the matching error for each kind of bug.

Three handwritten kernels represent the kinds that are generated. They are real Gluon: the installed Triton compiles them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from onepass import errors
from onepass.codegen.source import GridDim, Param, ParamKind, Source, TensorView
from onepass.ir.expr import DTYPES
from onepass.ir.size import sym
from onepass.runtime.interpreter.gluon_memory import Cta, Descriptor, Slot
from onepass.runtime.interpreter.gluon_model import Argument, Trace, run, run_source
from onepass.runtime.module import load_text

triton = pytest.importorskip("triton")
gl = pytest.importorskip("triton.experimental.gluon.language")

HEAD = """
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

"""

ROW_SUM = (
    HEAD
    + """
@gluon.jit
def row_sum(x_desc, y, rows):
    tile: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 4, 256], x_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    mbarrier.expect(bars.index(0), 2048)
    tma.async_copy_global_to_shared(x_desc, [first, 0, 0], bars.index(0), ring.index(0))
    turn = 0
    for row in range(first, rows, step):
        slot = turn % 2
        following = row + step
        more = following < rows
        mbarrier.expect(bars.index(1 - slot), 2048, pred=more)
        tma.async_copy_global_to_shared(x_desc, [following, 0, 0], bars.index(1 - slot), ring.index(1 - slot), pred=more)
        mbarrier.wait(bars.index(slot), (turn // 2) & 1)
        x = ring.index(slot).load(tile).to(gl.float32)
        total = gl.sum(gl.sum(gl.sum(x, 2), 1), 0)
        gl.store(y + row, total)
        turn += 1
    for j in gl.static_range(2):
        mbarrier.invalidate(bars.index(j))
"""
)

SOFTMAX = (
    HEAD
    + """
@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def softmax(x_desc, y_desc, scales, rows, columns):
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    width: gl.constexpr = x_desc.block_type.shape[1]
    staged = gl.allocate_shared_memory(gl.bfloat16, [1, width], x_desc.layout)
    leaving = gl.allocate_shared_memory(gl.bfloat16, [1, width], y_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    inside = (gl.arange(0, width, layout=gl.SliceLayout(0, tile)) < columns)[None, :]
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [first, 0], bar, staged)
    phase = 0
    for row in range(first, rows, step):
        mbarrier.wait(bar, phase)
        phase = phase ^ 1
        x = gl.where(inside, staged.load(tile).to(gl.float32), float("-inf"))
        peak = gl.reduce(x, 1, _larger, keep_dims=True)
        total = gl.sum(gl.exp2((x - peak) * 1.4426950408889634), 1, keep_dims=True)
        gl.store(scales + row + gl.arange(0, 1, layout=gl.SliceLayout(1, tile))[:, None], peak)
        again = staged.load(tile).to(gl.float32)
        more = row + step < rows
        mbarrier.expect(bar, x_desc.block_type.nbytes, pred=more)
        tma.async_copy_global_to_shared(x_desc, [row + step, 0], bar, staged, pred=more)
        out = gl.exp2((again - peak) * 1.4426950408889634) / total
        tma.store_wait(0)
        leaving.store(out.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [row, 0], leaving)
    tma.store_wait(0)
    mbarrier.invalidate(bar)
"""
)

OUTER_SUM = (
    HEAD
    + """
@gluon.jit
def outer_sum(a_desc, b_desc, out, rows, stages: gl.constexpr):
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    a_ring = gl.allocate_shared_memory(gl.float32, [stages, 8, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.float32, [stages, 8, 128], b_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    column = gl.program_id(0) * 128
    for i in gl.static_range(stages):
        mbarrier.init(bars.index(i), count=1)
    for s in gl.static_range(stages - 1):
        mbarrier.expect(bars.index(s), 8192)
        tma.async_copy_global_to_shared(a_desc, [s * 8, column], bars.index(s), a_ring.index(s))
        tma.async_copy_global_to_shared(b_desc, [s * 8, column], bars.index(s), b_ring.index(s))
    a_sum = gl.zeros([128], gl.float32, gl.SliceLayout(0, tile))
    b_sum = gl.zeros([128], gl.float32, gl.SliceLayout(0, tile))
    for k in range(rows // 8):
        slot = k % stages
        mbarrier.wait(bars.index(slot), (k // stages) & 1)
        a_sum += gl.sum(a_ring.index(slot).load(tile), 0)
        b_sum += gl.sum(b_ring.index(slot).load(tile), 0)
        ahead = k + stages - 1
        more = ahead < rows // 8
        empty = ahead % stages
        mbarrier.expect(bars.index(empty), 8192, pred=more)
        tma.async_copy_global_to_shared(a_desc, [ahead * 8, column], bars.index(empty), a_ring.index(empty), pred=more)
        tma.async_copy_global_to_shared(b_desc, [ahead * 8, column], bars.index(empty), b_ring.index(empty), pred=more)
    columns = column + gl.arange(0, 128, layout=gl.SliceLayout(0, tile))
    gl.store(out + columns, a_sum * b_sum)
"""
)


@dataclass
class Case:
    """A kernel with its arguments and expected output."""

    name: str
    text: str
    signature: dict[str, str]
    arguments: dict[str, Argument]
    programs: int
    written: torch.Tensor
    expected: torch.Tensor
    constants: dict[str, int] = field(default_factory=dict)

    def run(self, text: str | None = None, **options: Any) -> Trace:
        return run(self.name, text or self.text, {**self.arguments, **self.constants}, self.programs, **options)


def layout(bits: int, rank: int) -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=rank)


def described(dtype: str, block: tuple[int, ...], bits: int) -> str:
    return f"tensordesc<{dtype}{list(block)},{layout(bits, len(block))!r}>"


def row_sum(rows: int = 11) -> Case:
    x, y = torch.randn(rows, 1024).bfloat16(), torch.empty(rows)
    block = (1, 4, 256)
    return Case(
        "row_sum",
        ROW_SUM,
        {"x_desc": described("bf16", block, 16), "y": "*fp32", "rows": "i32"},
        {"x_desc": Descriptor(x.view(rows, 4, 256), block, layout=layout(16, 3)), "y": y, "rows": rows},
        min(rows, 2),
        y,
        x.double().sum(1).float(),
    )


def softmax(rows: int = 5) -> Case:
    x, y, scales = torch.randn(rows, 1000).bfloat16(), torch.empty(rows, 1000, dtype=torch.bfloat16), torch.empty(rows)
    block, ends = (1, 1024), frozenset({1})
    kind = described("bf16", block, 16)
    return Case(
        "softmax",
        SOFTMAX,
        {"x_desc": kind, "y_desc": kind, "scales": "*fp32", "rows": "i32", "columns": "i32"},
        {
            "x_desc": Descriptor(x, block, ends, layout(16, 2)),
            "y_desc": Descriptor(y, block, ends, layout(16, 2)),
            "scales": scales,
            "rows": rows,
            "columns": 1000,
        },
        2,
        y,
        x.double().softmax(1).bfloat16(),
    )


def outer_sum(rows: int = 64) -> Case:
    a, b, out = torch.randn(rows, 256), torch.randn(rows, 256), torch.empty(288)[16:272]  # a slice, surrounded by other memory
    block, kind = (8, 128), described("fp32", (8, 128), 32)
    return Case(
        "outer_sum",
        OUTER_SUM,
        {"a_desc": kind, "b_desc": kind, "out": "*fp32", "rows": "i32", "stages": "constexpr"},
        {
            "a_desc": Descriptor(a, block, layout=layout(32, 2)),
            "b_desc": Descriptor(b, block, layout=layout(32, 2)),
            "out": out,
            "rows": rows,
        },
        2,
        out,
        (a.double().sum(0) * b.double().sum(0)).float(),
        {"stages": 3},
    )


CASES = {"row_sum": row_sum, "softmax": softmax, "outer_sum": outer_sum}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_correct_kernels_give_correct_results(make: Any) -> None:
    torch.manual_seed(0)
    case = make()
    case.run()
    # Rounded to the type of the result, to nearest: the order of sums may change the last place, and no more.
    torch.testing.assert_close(case.written, case.expected, rtol=8e-3 if case.written.dtype == torch.bfloat16 else 2e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_any_number_of_rows(rows: int) -> None:
    case = row_sum(rows)
    case.run()
    torch.testing.assert_close(case.written, case.expected, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_the_kernels_are_real_gluon(make: Any) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    case = make()
    function = load_text(case.name, case.text)
    constants = {(list(case.signature).index(k),): v for k, v in case.constants.items()}
    source = GluonASTSource(function, case.signature, constants, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert case.run().shared_bytes <= compiled.metadata.shared
    # The model assumes this: a CTA barrier between the last read of a slot and the next copy into it.
    loop = compiled.asm["ptx"].split("Loop Header", 1)[1]
    order = re.findall(r"bar\.sync|ld\.shared\.v4|cp\.async\.bulk\.tensor\.\dd\.shared", loop + loop)
    first_read = order.index("ld.shared.v4")
    refill = next(i for i, op in enumerate(order) if op.startswith("cp") and i > first_read)
    last_read = max(i for i, op in enumerate(order[:refill]) if op == "ld.shared.v4")
    assert "bar.sync" in order[last_read:refill]


def test_a_trace_counts_operations() -> None:
    case = softmax(rows=5)
    trace = case.run()
    assert trace.programs == 2 and trace.shared_bytes == 2 * 2048 + 16
    assert trace.bytes_in == trace.bytes_out == 5 * 2048
    assert {c.axes for c in trace.crossings} == {(1,)} and len(trace.crossings) == 10


@dataclass(frozen=True)
class Mutation:
    """A small change to a kernel's text, and the error it must raise."""

    what: str
    kernel: str
    old: str
    new: str
    error: type[errors.OnepassError]


WAIT = "        mbarrier.wait(bars.index(slot), (turn // 2) & 1)\n"
REFILL = SOFTMAX[SOFTMAX.index("        more = row") : SOFTMAX.index("        out = gl.exp2")]
AGAIN = SOFTMAX[SOFTMAX.index("        again =") : SOFTMAX.index("        more = row")]
READS = OUTER_SUM[OUTER_SUM.index("        a_sum +=") : OUTER_SUM.index("        ahead =")]
ISSUES = OUTER_SUM[OUTER_SUM.index("        ahead =") : OUTER_SUM.index("    columns =")]

MUTATIONS = [
    Mutation("wait removed", "row_sum", WAIT, "", errors.UseBeforeArrival),
    Mutation("wait removed", "softmax", "        mbarrier.wait(bar, phase)\n", "", errors.UseBeforeArrival),
    Mutation(
        "wait removed", "outer_sum", "        mbarrier.wait(bars.index(slot), (k // stages) & 1)\n", "", errors.UseBeforeArrival
    ),
    Mutation(
        "wait after the read",
        "row_sum",
        WAIT + "        x = ring.index(slot).load(tile).to(gl.float32)\n",
        "        x = ring.index(slot).load(tile).to(gl.float32)\n" + WAIT,
        errors.UseBeforeArrival,
    ),
    Mutation("phase not flipped", "row_sum", "(turn // 2) & 1", "0", errors.WrongPhase),
    Mutation("phase not flipped", "softmax", "        phase = phase ^ 1\n", "", errors.WrongPhase),
    Mutation("phase not flipped", "outer_sum", "(k // stages) & 1", "0", errors.WrongPhase),
    Mutation("phase flipped each turn", "row_sum", "(turn // 2) & 1", "turn & 1", errors.WrongPhase),
    Mutation("phase starts at one", "softmax", "    phase = 0\n", "    phase = 1\n", errors.WrongPhase),
    Mutation("phase is a count", "row_sum", "(turn // 2) & 1", "turn // 2", errors.WrongPhase),
    Mutation("wrong slot read", "row_sum", "ring.index(slot)", "ring.index(1 - slot)", errors.UseBeforeArrival),
    Mutation("wrong slot read", "outer_sum", "b_ring.index(slot)", "b_ring.index((slot + 1) % stages)", errors.UseBeforeArrival),
    Mutation("wrong slot refilled", "row_sum", "ring.index(1 - slot), pred", "ring.index(slot), pred", errors.RefillBeforeDrain),
    Mutation("wrong barrier waited for", "row_sum", "wait(bars.index(slot)", "wait(bars.index(1 - slot)", errors.UseBeforeArrival),
    Mutation("refill before the last read", "softmax", AGAIN + REFILL, REFILL + AGAIN, errors.RefillBeforeDrain),
    Mutation(
        "refill before the only read",
        "outer_sum",
        READS + ISSUES,
        ISSUES.replace("k + stages - 1", "k + stages") + READS,
        errors.RefillBeforeDrain,
    ),
    Mutation("refill of the slot just read", "outer_sum", "ahead % stages", "k % stages", errors.WaitsForever),
    Mutation("slot never read", "row_sum", "ring.index(slot).load(tile)", "ring.index(0).load(tile)", errors.RefillBeforeDrain),
    Mutation("expected bytes halved", "row_sum", "2048, pred", "1024, pred", errors.ExpectedBytesDiffer),
    Mutation("expected bytes doubled", "row_sum", "bars.index(0), 2048)", "bars.index(0), 4096)", errors.ExpectedBytesDiffer),
    Mutation("bytes of one input only", "outer_sum", "bars.index(s), 8192)", "bars.index(s), 4096)", errors.ExpectedBytesDiffer),
    Mutation(
        "one input's copy forgotten",
        "outer_sum",
        "        tma.async_copy_global_to_shared(b_desc, [s * 8, column], bars.index(s), b_ring.index(s))\n",
        "",
        errors.ExpectedBytesDiffer,
    ),
    Mutation(
        "nothing expected",
        "softmax",
        "        mbarrier.expect(bar, x_desc.block_type.nbytes, pred=more)\n",
        "",
        errors.WaitsForever,
    ),
    Mutation("two arrivals where one comes", "softmax", "init(bar, count=1)", "init(bar, count=2)", errors.WaitsForever),
    Mutation("off by one row", "row_sum", "[following, 0, 0]", "[following + 1, 0, 0]", errors.CopyOutOfBounds),
    Mutation("off by one row", "softmax", "[row + step, 0]", "[row + step + 1, 0]", errors.CopyOutOfBounds),
    Mutation("off by one row", "outer_sum", "[ahead * 8, column]", "[ahead * 8 + 1, column]", errors.CopyOutOfBounds),
    Mutation("off by one row, stored", "softmax", "y_desc, [row, 0]", "y_desc, [row + 1, 0]", errors.CopyOutOfBounds),
    Mutation("copy not predicated", "row_sum", "ring.index(1 - slot), pred=more", "ring.index(1 - slot)", errors.CopyOutOfBounds),
    Mutation("ring one slot short", "row_sum", "[2, 1, 4, 256]", "[1, 1, 4, 256]", errors.OutsideAllocation),
    Mutation(
        "ring one slot short",
        "outer_sum",
        "gl.float32, [stages, 8, 128], b_desc",
        "gl.float32, [stages - 1, 8, 128], b_desc",
        errors.OutsideAllocation,
    ),
    Mutation("ring turns one slot early", "outer_sum", "ahead % stages", "ahead % (stages - 1)", errors.WaitsForever),
    Mutation("ahead by the whole ring before the read", "row_sum", "slot = turn % 2", "slot = turn % 1", errors.WrongPhase),
    Mutation(
        "barrier init missing",
        "row_sum",
        "        mbarrier.init(bars.index(i), count=1)\n",
        "        pass\n",
        errors.BarrierNotInitialized,
    ),
    Mutation("barrier init missing", "softmax", "    mbarrier.init(bar, count=1)\n", "", errors.BarrierNotInitialized),
    Mutation("barrier init twice", "row_sum", "bars.index(i), count=1", "bars.index(0), count=1", errors.BarrierInitTwice),
    Mutation("fence missing", "softmax", "        fence_async_shared()\n", "", errors.MissingFence),
    Mutation("staging reused", "softmax", "        tma.store_wait(0)\n        leaving", "        leaving", errors.StagingReused),
    Mutation("store left behind", "softmax", "    tma.store_wait(0)\n    mbarrier", "    mbarrier", errors.CopyLeftBehind),
    Mutation("copy left behind", "row_sum", "range(first, rows, step)", "range(first, rows - step, step)", errors.CopyLeftBehind),
    Mutation("store unmasked", "outer_sum", "out + columns", "out + columns + 1", errors.AccessOutOfBounds),
    Mutation("store before the first", "outer_sum", "out + columns", "out + columns - 1", errors.AccessOutOfBounds),
    Mutation("block of another shape", "row_sum", "[2, 1, 4, 256]", "[2, 1, 2, 256]", errors.BlockMismatch),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.kernel}: {m.what}")
def test_wrong_kernels_are_caught(mutation: Mutation) -> None:
    case = CASES[mutation.kernel]()
    assert case.text.count(mutation.old) >= 1
    with pytest.raises(mutation.error) as caught:
        case.run(case.text.replace(mutation.old, mutation.new))
    assert type(caught.value) is mutation.error
    where = str(caught.value.fields["where"])
    assert re.match(rf"{case.name}, line \d+ \(.+\)$", where) or where == "the end of the kernel"
    assert caught.value.fields.get("slot", "a pointer")


def test_an_error_names_the_line_and_the_slot() -> None:
    message = "row_sum, line 26 (x = ring.index(slot).load(tile).to(gl.float32)): ring[0] is used before its data arrived"
    with pytest.raises(errors.UseBeforeArrival, match=re.escape(message)):
        row_sum().run(ROW_SUM.replace(WAIT, ""))


BARRIER = "gl.barrier" if hasattr(gl, "barrier") else "gl.thread_barrier"


def test_barriers_that_gluon_does_not_insert_are_required() -> None:
    refilled = SOFTMAX.replace(REFILL, f"        {BARRIER}()\n{REFILL}")
    with_barrier = refilled.replace("fence_async_shared()\n", f"fence_async_shared()\n        {BARRIER}()\n")
    softmax().run(with_barrier, explicit_barriers=True)
    with pytest.raises(errors.RefillBeforeDrain, match="no CTA barrier"):
        softmax().run(explicit_barriers=True)
    with pytest.raises(errors.UseBeforeArrival, match="no CTA barrier"):  # a TMA copy of data that threads wrote
        softmax().run(refilled, explicit_barriers=True)


PATCHED = (
    HEAD
    + f"""
@gluon.jit
def patched(x_desc, y, rows):
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    ring = gl.allocate_shared_memory(gl.float32, [1, 1, 256], x_desc.layout)
    pieces = ring._reinterpret(gl.float32, [4, 1, 64], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 1024)
    tma.async_copy_global_to_shared(x_desc, [0, 0], bar, ring.index(0))
    for row in range(0, rows):
        mbarrier.wait(bar, row & 1)
        if row > 0:
            pieces.index(row).store(gl.full([1, 64], 1.0, gl.float32, tile))
        {BARRIER}()  # written
        columns = gl.arange(0, 256, layout=gl.SliceLayout(0, tile))[None, :]
        gl.store(y + row * 256 + columns, ring.index(0).load(tile))
        fence_async_shared()
        {BARRIER}()  # read
        mbarrier.expect(bar, 1024, pred=row + 1 < rows)
        tma.async_copy_global_to_shared(x_desc, [row + 1, 0], bar, ring.index(0), pred=row + 1 < rows)
    mbarrier.invalidate(bar)
"""
)


def test_threads_may_overwrite_part_of_a_copied_slot() -> None:
    x, y = torch.randn(4, 256), torch.empty(4, 256)
    run("patched", PATCHED, {"x_desc": Descriptor(x, (1, 256)), "y": y, "rows": 4}, 1, explicit_barriers=True)
    part = torch.arange(256) // 64 == torch.arange(4)[:, None]
    assert torch.equal(torch.where(part & (torch.arange(4)[:, None] > 0), 1, x), y)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("    mbarrier.invalidate(bar)\n", "", errors.BarrierLeftBehind),
        (f"        {BARRIER}()  # written\n", "", errors.UseBeforeArrival),
        (f"        {BARRIER}()  # read\n", "", errors.RefillBeforeDrain),
        ("        fence_async_shared()\n", "", errors.MissingFence),
        ("        mbarrier.wait(bar, row & 1)\n        if row > 0:\n", "        if row >= 0:\n", errors.RefillBeforeDrain),
        ("        if row > 0:\n", "        for _ in range(2):\n", errors.RefillBeforeDrain),
        ("pieces.index(row)", "pieces.index(row + 1)", errors.OutsideAllocation),
        ("1.0, gl.float32", "1.0, gl.float16", errors.BlockMismatch),
        (", ring.index(0).load(tile)", ", gl.full([1, 256], 1.0, gl.float32, tile)", errors.RefillBeforeDrain),
    ],
)
def test_wrong_writes_by_threads_are_caught(old: str, new: str, error: type[errors.OnepassError]) -> None:
    assert PATCHED.count(old) == 1
    x, y = torch.randn(4, 256), torch.empty(4, 256)
    with pytest.raises(error):
        run("patched", PATCHED.replace(old, new), {"x_desc": Descriptor(x, (1, 256)), "y": y, "rows": 4}, 1, explicit_barriers=True)


@pytest.mark.parametrize("wide", [False, True])
def test_a_source_describes_how_it_is_run(wide: bool) -> None:
    text = ROW_SUM.replace("        turn += 1\n", f"        {BARRIER}()\n        turn += 1\n")
    text = text.replace("[first, 0", "[first + zero, 0").replace("y, rows):\n", "y, rows, zero):\n    rows = rows.to(gl.int32)\n")
    view = TensorView((sym("n"), 4, 256), (1024, 256, 1), (1, 4, 256))
    params = (
        Param("x", ParamKind.TENSOR_MAP, "x_desc", DTYPES["bf16"], view),
        Param("out", ParamKind.POINTER, "y", DTYPES["f32"]),
        Param("n", ParamKind.SIZE, "rows"),
        Param("zero", ParamKind.ZERO, "zero"),
    )
    source = Source("row_sum", text, params, (GridDim(sym("n"), max_programs=3),), 4, wide_index=wide)
    x, out = torch.randn(8, 1024).bfloat16(), torch.empty(8)
    trace = run_source(source, {"x": x, "out": out}, {"n": 8})
    assert trace.programs == 3 and trace.bytes_in == 8 * 2048
    torch.testing.assert_close(out, x.double().sum(1).float(), rtol=2e-5, atol=1e-4)


def test_a_source_may_overhang_only_where_it_masks() -> None:
    """A generated kernel masks the axes whose extent is not a multiple of the box, and no others."""
    view = TensorView((sym("n"), 4, 256), (1024, 256, 1), (1, 4, 256))
    params = (
        Param("x", ParamKind.TENSOR_MAP, "x_desc", DTYPES["bf16"], view),
        Param("out", ParamKind.POINTER, "y", DTYPES["f32"]),
        Param("n", ParamKind.SIZE, "rows"),
    )
    barriers = ROW_SUM.replace("        turn += 1\n", f"        {BARRIER}()\n        turn += 1\n")
    buffers = {"x": torch.randn(3, 1024).bfloat16(), "out": torch.empty(3)}
    source = Source("row_sum", barriers, params, (GridDim(sym("n"), max_programs=1),), 4)
    assert run_source(source, buffers, {"n": 3}).crossings == ()
    with pytest.raises(errors.CopyOutOfBounds):
        run_source(replace(source, text=barriers.replace("[following, 0, 0]", "[following, 1, 0]")), buffers, {"n": 3})


PARTS = (
    HEAD
    + f"""
@gluon.jit
def parts(y):
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring = gl.allocate_shared_memory(gl.float32, [2, 1, 256], flat)
    at = gl.arange(0, 256, layout=gl.SliceLayout(0, tile))[None, :]
    ring.index(0).store(at.to(gl.float32))
    ring.index(1).store(at.to(gl.float32) + 1)
    {BARRIER}()  # written
    both = ring._reinterpret(gl.float32, [2, 256], flat).load(tile)
    {BARRIER}()  # read
    ring.index(0).store(gl.sum(both, 0, keep_dims=True))
    {BARRIER}()
    gl.store(y + at, ring.index(0).load(tile))
"""
)


def test_parts_written_by_threads_are_read_as_a_whole() -> None:
    y = torch.empty(256)
    run("parts", PARTS, {"y": y}, 1, explicit_barriers=True)
    assert torch.equal(y, torch.arange(256) * 2.0 + 1)
    for old, error in (
        ("    ring.index(1).store(at.to(gl.float32) + 1)\n", errors.UseBeforeArrival),
        (f"    {BARRIER}()  # written\n", errors.UseBeforeArrival),
        (f"    {BARRIER}()  # read\n", errors.RefillBeforeDrain),
    ):
        assert PARTS.count(old) == 1
        with pytest.raises(error):
            run("parts", PARTS.replace(old, ""), {"y": y}, 1, explicit_barriers=True)


def barred() -> tuple[Cta, Descriptor, Slot, Slot]:
    """A CTA with an mbarrier of one arrival, a tensor, and a slot for one of its rows."""
    cta = Cta(1 << 16, lambda: "here")
    bar, slot = cta.allocate("bar", (1,), np.dtype(np.int64)), cta.allocate("slot", (1, 64), np.dtype(np.float32))
    cta.init(bar, 1)
    return cta, Descriptor(torch.zeros(2, 64), (1, 64)), bar, slot


def test_copies_over_copies_in_flight_are_caught() -> None:
    cta, source, bar, slot = barred()
    cta.arrive(bar, 1, 512)
    cta.copy_in(source, [0, 0], bar, slot)
    with pytest.raises(errors.RefillBeforeDrain, match="in flight"):
        cta.copy_in(source, [1, 0], bar, slot)


def test_arrivals_without_a_wait_are_caught() -> None:
    cta, source, bar, slot = barred()
    cta.arrive(bar, 1, 256)
    cta.copy_in(source, [0, 0], bar, slot)
    with pytest.raises(errors.WrongPhase):
        cta.arrive(bar, 1, 256)


def test_the_oldest_stores_are_waited_for() -> None:
    cta, target = Cta(1 << 16, lambda: "here"), Descriptor(torch.zeros(2, 64), (1, 64))
    slots = [cta.allocate(name, (1, 64), np.dtype(np.float32)) for name in ("first", "second")]
    for row, slot in enumerate(slots):
        cta.store(slot, np.full((1, 64), row, np.float32))
        cta.fence()
        cta.copy_out(target, [row, 0], slot)
    cta.store_wait(1)
    cta.store(slots[0], np.zeros((1, 64), np.float32))
    with pytest.raises(errors.StagingReused):
        cta.store(slots[1], np.zeros((1, 64), np.float32))


def test_shared_memory_has_a_limit() -> None:
    case = row_sum()
    assert case.run(shared_limit=4112).shared_bytes == 4112
    with pytest.raises(errors.SharedMemoryExceeded, match="bars"):
        case.run(shared_limit=4111)


def test_tensors_that_tma_cannot_describe() -> None:
    x = torch.zeros(4, 50257, dtype=torch.bfloat16)
    with pytest.raises(errors.NotForTma, match="multiples of 16 bytes"):
        Descriptor(x, (1, 256))
    with pytest.raises(errors.NotForTma, match="multiples of 16 bytes"):
        Descriptor(torch.zeros(4, 12, dtype=torch.bfloat16), (1, 8))
    with pytest.raises(errors.NotForTma, match="less than 16 bytes"):
        Descriptor(torch.zeros(4, 64, dtype=torch.bfloat16), (1, 4))
    with pytest.raises(errors.NotForTma, match="not contiguous"):
        Descriptor(torch.zeros(4, 128)[:, ::2], (1, 16))
    with pytest.raises(errors.NotForTma, match="powers of two"):
        Descriptor(torch.zeros(4, 64), (1, 48))
    with pytest.raises(errors.NotForTma, match="first element"):
        Descriptor(torch.zeros(4, 64).view(-1)[1:193].view(3, 64), (1, 16))


def test_wider_views_of_a_drained_ring() -> None:
    text = (
        HEAD
        + """
@gluon.jit
def exchange(y):
    tile: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, 256], flat)
    room = ring._reinterpret(gl.float32, [256], flat)
    at = gl.arange(0, 256, layout=tile)
    room.store(at.to(gl.float32) * 0.5)
    gl.store(y + at, room.load(tile))
"""
    )
    y = torch.empty(256)
    run("exchange", text, {"y": y}, 1)
    torch.testing.assert_close(y, torch.arange(256) * 0.5)
    with pytest.raises(errors.OutsideAllocation):
        run("exchange", text.replace("gl.float32, [256], flat", "gl.float32, [512], flat"), {"y": y}, 1)


DOWN = (
    HEAD
    + """
@gluon.jit
def down(x_desc, y, rows):
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    ring = gl.allocate_shared_memory(gl.float32, [2, 64, 32], x_desc.layout)
    strips = ring._reinterpret(gl.float32, [4, 32, 32], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 8192)
    tma.async_copy_global_to_shared(x_desc, [64, 0], bar, ring.index(1))
    mbarrier.wait(bar, 0)
    own = gl.full([16, 32], 0.0, gl.float32, tile)
    for k in range(0, 2):
        at = 64 + k * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, tile))[:, None]
        x = gl.where(at < rows, strips.index(2 + k).load(tile), 1.0)
        held = x.reshape([2, 16, 32])
        lost = held - gl.sum(held, axis=0, keep_dims=True)
        own += gl.convert_layout(gl.sum(lost, axis=0, keep_dims=True).reshape([16, 32]), tile, assert_trivial=True)
    columns = gl.arange(0, 32, layout=gl.SliceLayout(0, tile))[None, :]
    gl.store(y + columns, gl.sum(own, axis=0, keep_dims=True))
"""
)


def down(masked: frozenset[int] = frozenset({0, 1})) -> tuple[dict[str, Argument], torch.Tensor, torch.Tensor]:
    """The last of two tiles, which overhangs in rows and columns, ones in the overhanging rows, and its negative column sums."""
    x, y = torch.randn(100, 24), torch.empty(32)
    inside = torch.nn.functional.pad(x[64:], (0, 8))
    expected = -(inside.double().sum(0) + 28).float()
    return {"x_desc": Descriptor(x, (64, 32), masked, layout(32, 2)), "y": y, "rows": 100}, y, expected


def test_reductions_within_threads_of_an_overhanging_tile() -> None:
    arguments, y, expected = down()
    trace = run("down", DOWN, arguments, 1)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert [c.axes for c in trace.crossings] == [(0, 1)] and trace.bytes_in == 8192


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("[64, 0], bar", "[128, 0], bar", errors.CopyOutOfBounds),
        ("[64, 0], bar", "[100, 0], bar", errors.CopyOutOfBounds),
        ("strips.index(2 + k)", "strips.index(1 + k)", errors.UseBeforeArrival),
        ("strips.index(2 + k)", "strips.index(3 + k)", errors.OutsideAllocation),
        ("[4, 32, 32]", "[5, 32, 32]", errors.OutsideAllocation),
        ("    mbarrier.wait(bar, 0)\n", "", errors.UseBeforeArrival),
    ],
)
def test_wrong_reads_of_tiles_are_caught(old: str, new: str, error: type[errors.OnepassError]) -> None:
    assert old in DOWN
    with pytest.raises(error):
        run("down", DOWN.replace(old, new), down()[0], 1)


@pytest.mark.parametrize("masked", [frozenset(), frozenset({0}), frozenset({1})])
def test_a_tile_overhangs_only_where_the_kernel_masks(masked: frozenset[int]) -> None:
    with pytest.raises(errors.CopyOutOfBounds):
        run("down", DOWN, down(masked)[0], 1)


def test_reductions_within_threads_are_real_gluon() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {"x_desc": described("fp32", (64, 32), 32), "y": "*fp32", "rows": "i32"}
    source = GluonASTSource(load_text("down", DOWN), signature, {}, {})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert "shfl" not in ptx[: ptx.rindex("ld.shared.v4")], "within threads nothing is exchanged"


def test_operations_that_are_not_modeled_are_refused() -> None:
    text = ROW_SUM.replace("    turn = 0\n", "    turn = 0\n    gl.warp_specialize([], [])\n")
    with pytest.raises(errors.NotModeled, match="warp_specialize"):
        row_sum().run(text)
    with pytest.raises(errors.NotModeled, match="multicast"):
        row_sum().run(ROW_SUM.replace("ring.index(0))", "ring.index(0), multicast=True)"))
    with pytest.raises(errors.NotModeled, match="not contiguous"):
        row_sum().run(ROW_SUM.replace("ring.index(slot).load", "ring.index(slot).slice(0, 128, 2).load"))
