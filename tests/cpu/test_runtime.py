"""The runtime: kernel text interpreted on CPU tensors and compiled for GPUs without having one."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import math
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepass import compat
from onepass.codegen.source import GridDim, Source
from onepass.device import DEVICES, device
from onepass.errors import CompileFailed, CompilerUnavailable, UnknownDevice
from onepass.ir import expr
from onepass.ir.expr import BOOL, DTYPES, OPS, DType, compute_dtype
from onepass.ir.size import sym
from onepass.runtime import card, cubin_info, launch, module, offline
from onepass.runtime.binary import count_access, parse_log, spills_in_loop
from onepass.runtime.compile_job import job
from onepass.runtime.interpreter import interpret, ptx
from tests.support.handwritten_kernels import kernel
from tests.support.processes import run_python

pytest.importorskip("triton")

F32, F64, I32 = DTYPES["f32"], DTYPES["f64"], DTYPES["i32"]
N = 32


# ------------------------------------------------------------------------------------------------------------- op table

FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    3.7,
    -3.7,
    0.1,
    1e-6,
    -1e-6,
    12.25,
    -12.25,
    30.0,
    -30.0,
    88.0,
    100.0,
    2.0,
    3.0,
    -7.0,
    7.0,
    0.999,
    1.001,
    1e4,
    -1e4,
    math.inf,
    -math.inf,
    math.nan,
    6.02e23,
]
INTEGERS = [
    0,
    1,
    -1,
    2,
    -2,
    3,
    -3,
    7,
    -7,
    8,
    100,
    -100,
    127,
    -128,
    255,
    256,
    1000,
    -1000,
    32767,
    -32768,
    65536,
    -65536,
    5,
    -5,
    9,
    -9,
    11,
    -11,
    13,
    -13,
    2**20,
    -(2**20),
]
CASES = [(op, dtype) for dtype in (F32, F64, I32, DTYPES["i64"], BOOL) for op in sorted(OPS) if OPS[op].takes.accepts(dtype)]


def operand_values(dtype: DType, position: int) -> torch.Tensor:
    """Operands that pair all kinds of values; divisors are never the integer zero."""
    if dtype is BOOL:
        return torch.tensor([(i >> position) & 1 for i in range(N)]).bool()
    values = FLOATS if dtype.is_float else INTEGERS
    turned = torch.tensor(values[position * 5 :] + values[: position * 5], dtype=dtype.torch)
    return turned if dtype.is_float or position == 0 else torch.where(turned == 0, 4, turned)


def op_operands(name: str, dtype: DType) -> list[tuple[DType, torch.Tensor]]:
    args = [(dtype, operand_values(dtype, i)) for i in range(OPS[name].arity)]
    if name == "where":
        args[0] = (BOOL, operand_values(BOOL, 0))
    return args


def op_text(name: str, args: list[str], result: DType, exact: bool) -> str:
    text = OPS[name].exact if exact and OPS[name].exact else OPS[name].text
    return text.format(*args, L="tl", T=f"tl.{compute_dtype(result).kernel}")


def test_every_row_of_the_op_table_is_tested() -> None:
    assert {op for op, _ in CASES} == set(OPS)


def test_an_incomplete_op_table_is_refused() -> None:
    """The interpreter must know each function that a text calls, and each row exists once."""
    row = OPS["expm1"]
    assert expr._table(row) == {"expm1": row}
    for rows in [(replace(row, libdevice={}),), (replace(row, text="fast_exp({0}) - 1"),), (row, row)]:
        with pytest.raises(ValueError, match="op table"):
            expr._table(*rows)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda v: str(v))
def test_op_rows_are_interpreted_correctly(name: str, dtype: DType, exact: bool) -> None:
    """Functions that are accurate only to 16 bits are not used on fp64."""
    if exact and not (OPS[name].exact and dtype.is_float):
        pytest.skip("there is one text")
    operands = op_operands(name, dtype)
    expected = OPS[name].reference(*(value for _, value in operands))
    result = {d.torch: d for d in DTYPES.values()}[expected.dtype]
    pointers = {f"a{i}": d for i, (d, _) in enumerate(operands)} | {"out": result}
    body = [f"i = tl.arange(0, {N})"]
    body += [f"x{i} = tl.load(a{i} + i)" for i in range(len(operands))]
    body += [f"y = {op_text(name, [f'x{i}' for i in range(len(operands))], result, exact or dtype is F64)}", "tl.store(out + i, y)"]
    got = torch.empty(N, dtype=result.torch)
    buffers = {f"a{i}": value for i, (_, value) in enumerate(operands)} | {"out": got}
    interpret.run(kernel(f"op_{name}", pointers, body), buffers, {})
    tolerance = {"f32": 4e-7 if exact or not OPS[name].exact else 1e-5, "f64": 1e-15}.get(result.name, 0)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("dtype", "exact"), [(F32, False), (F32, True), (F64, True), (I32, False), (BOOL, False)], ids=str)
def test_op_rows_compile(dtype: DType, exact: bool) -> None:
    ops = [op for op, of in CASES if of is dtype]
    body = [f"i = tl.arange(0, {N})", *(f"x{i} = tl.load(a{i} + i)" for i in range(3))]
    for at, name in enumerate(ops):
        args = ["x0", "x1", "x2"][: OPS[name].arity]
        if name == "where":
            args[0] = "(x0 != x1)"
        body.append(f"tl.store(out + {at * N} + i, {op_text(name, args, dtype, exact or dtype is F64)}.to(tl.{dtype.kernel}))")
    source = kernel("every_op", {"a0": dtype, "a1": dtype, "a2": dtype, "out": dtype}, body, warps=1)
    assert offline.compile(source, DEVICES["h200"]).registers > 0


# ---------------------------------------------------------------------------------------------------------- interpreting


def awkward_floats() -> torch.Tensor:
    """Values that stress rounding: many exponents, ties in both directions, NaN, infinities, both zeros."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = raw.view(torch.float32)
    values[:8] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3.4e38, 1.00390625, 1.01171875])
    values[8:1032] = torch.linspace(-500, 500, 1024)
    values[1032:2056] = torch.logspace(-12, 5, 1024)
    return values


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.is_narrow_float], ids=str)
def test_narrow_floats_round_as_torch(dtype: DType) -> None:
    body = [
        "i = tl.arange(0, 4096)",
        f"y = tl.load(x + i).to(tl.{dtype.kernel})",
        "tl.store(narrow + i, y)",
        "tl.store(wide + i, y.to(tl.float32))",
    ]
    values = awkward_floats()
    narrow, wide = torch.empty(4096, dtype=dtype.torch), torch.empty(4096)
    source = kernel("round_trip", {"x": F32, "narrow": dtype, "wide": F32}, body)
    interpret.run(source, {"x": values, "narrow": narrow, "wide": wide}, {})
    limits = torch.finfo(dtype.torch)  # the hardware's conversions to 8 bits saturate
    expected = (values.clamp(limits.min, limits.max) if dtype.size == 1 else values).to(dtype.torch)
    torch.testing.assert_close(wide, expected.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(narrow.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [F32, F64, I32, DTYPES["i64"]], ids=str)
def test_folds(kind: str, axis: int, dtype: DType) -> None:
    rows, columns = 8, 64
    x = torch.randint(-2, 3, (rows, columns), generator=torch.Generator().manual_seed(0)).to(dtype.torch)
    if dtype.is_float:
        x[3, 5] = math.nan
    shape = (1, columns) if axis == 0 else (rows, 1)
    out = torch.empty(shape, dtype=dtype.torch)
    body = [
        f"r = tl.arange(0, {rows})[:, None]",
        f"c = tl.arange(0, {columns})[None, :]",
        f"x = tl.load(x + r * {columns} + c)",
        f"y = tl.sum(x, {axis}, keep_dims=True)" if kind == "sum" else f"y = fold_{kind}(x, {axis})",
        f"tl.store(out + {'c' if axis == 0 else 'r'}, y)",
    ]
    interpret.run(kernel("fold", {"x": dtype, "out": dtype}, body), {"x": x, "out": out}, {})
    reference: Any = {"sum": torch.sum, "prod": torch.prod, "max": torch.amax, "min": torch.amin}[kind]
    torch.testing.assert_close(out, reference(x, axis, keepdim=True).to(dtype.torch), equal_nan=True)


def test_loops_sizes_and_grid() -> None:
    """A column loop with a symbolic bound, a masked tail, a size and zero used in arithmetic, several programs."""
    body = [
        "row = tl.program_id(0)",
        "acc = 0.0",
        "for start in tl.range(0, s1, 16, num_stages=2):",
        "    c = start.to(tl.int64) + tl.arange(0, 16)",
        "    v = tl.load(x + row * s1 + c, mask=c < s1, other=0.0)",
        "    acc += tl.sum(v, 0)",
        "tl.store(out + row + zero, acc)",
    ]
    x, out = torch.randn(5, 37), torch.full((5,), math.nan)
    source = kernel("row_sum", {"x": F32, "out": F32}, body, grid=(GridDim(sym("s0")),), sizes=("s0", "s1"))
    interpret.run(source, {"x": x, "out": out}, {"s0": 5, "s1": 37})
    torch.testing.assert_close(out, x.sum(1))


def test_the_language_a_kernel_may_use() -> None:
    """All of it in one kernel, which must compile and give the right sums."""
    body = [
        "ROWS: tl.constexpr = 4",
        "row = tl.program_id(0).to(tl.int64)",
        "r = tl.expand_dims(tl.arange(0, ROWS), 1)",
        "c = tl.max_contiguous(tl.multiple_of(tl.arange(0, 8), 8), 8)[None, :]",
        "total, most = tl.zeros((ROWS, 8), tl.float32), tl.full((ROWS, 8), -float('inf'), tl.float32)",
        "blocks = tl.cdiv(s0, 8)",
        "for k in range(blocks):",
        "    at = k * 8 + c",
        "    live = (at < s0) & (r < ROWS)",
        "    v = tl.load(x + r * s0 + at, mask=live, other=0.0, eviction_policy='evict_first')",
        "    total += tl.where(live, v, 0.0)",
        "    most = tl.maximum(most, tl.where(live, v, -float('inf')))",
        "for k in tl.static_range(3):",
        "    total = total + k",
        "n = blocks",
        "while n > 0:",
        "    n -= 1",
        "if n == 0:",
        "    total = total - 3.0",
        "else:",
        "    total = total * 0.0",
        "flat = tl.sum(tl.reshape(tl.trans(total), (ROWS * 8,)))",
        "tl.debug_barrier()",
        "tl.atomic_add(out, flat + tl.cast(row, tl.float32))",
        "tl.store(out + 1, tl.max(tl.ravel(most)))",
    ]
    x = torch.arange(4 * 13).reshape(4, 13).float() % 11
    out = torch.zeros(2)
    source = kernel("surface", {"x": F32, "out": F32}, body, sizes=("s0",))
    interpret.run(source, {"x": x, "out": out}, {"s0": 13})
    assert out.tolist() == [x.sum(), x.max()]
    assert offline.compile(source, DEVICES["h200"]).registers > 0


def test_library_functions_of_scalars_and_tiles() -> None:
    body = ["i = tl.arange(0, 8)", "v = tl.load(x + i)", "tl.store(out + i, libdevice.pow(2.0, v) + libdevice.tanh(0.5))"]
    x, out = torch.arange(8.0), torch.empty(8)
    interpret.run(kernel("mixed", {"x": F32, "out": F32}, body), {"x": x, "out": out}, {})
    torch.testing.assert_close(out, 2.0**x + math.tanh(0.5))


def test_an_empty_grid_writes_nothing() -> None:
    out = torch.ones(4)
    source = kernel("nothing", {"out": F32}, ["tl.store(out, 0.0)"], grid=(GridDim(sym("s0")),), sizes=("s0",))
    interpret.run(source, {"out": out}, {"s0": 0})
    assert out.tolist() == [1, 1, 1, 1]


def test_a_fused_multiply_add_rounds_once() -> None:
    body = ["i = tl.arange(0, 4)", "tl.store(out + i, tl.fma(tl.load(x + i), tl.load(x + i), tl.load(y + i)))"]
    x, y, out = torch.full((4,), 1 + 2.0**-12), torch.full((4,), -1 - 2.0**-11), torch.empty(4)
    interpret.run(kernel("fma", {"x": F32, "y": F32, "out": F32}, body), {"x": x, "y": y, "out": out}, {})
    assert out.tolist() == [2.0**-24] * 4, "what rounding the product would lose"


def test_the_opaque_zero_keeps_a_value_in_16_bits() -> None:
    """A xor with an unknown zero keeps a row in its storage type."""
    bf16 = DTYPES["bf16"]
    body = [
        "i = tl.arange(0, 64)",
        "raw = tl.load(x + i).to(tl.int16, bitcast=True)",
        "kept = raw ^ zero.to(tl.int16)",
        "tl.store(out + i, kept.to(tl.bfloat16, bitcast=True).to(tl.float32))",
    ]
    x, out = torch.randn(64).bfloat16(), torch.empty(64)
    interpret.run(kernel("held", {"x": bf16, "out": F32}, body), {"x": x, "out": out}, {})
    assert torch.equal(out, x.float())


@pytest.mark.parametrize("hidden", ["", ", zero"])
@pytest.mark.parametrize("shape", [(1 << 16,), (3, 5), (1, 1)])
def test_every_bfloat16_is_widened_to_itself(shape: tuple[int, ...], hidden: str) -> None:
    """With the instructions used on a card."""
    count = math.prod(shape)
    x, out = torch.arange(count).to(torch.int16).view(torch.bfloat16), torch.empty(count)
    size = 1 << (count - 1).bit_length()
    body = [
        f"i = tl.arange(0, {size})",
        f"y = widen(tl.load(x + i, mask=i < {count}){hidden})",
        f"tl.store(out + i, y, mask=i < {count})",
    ]
    source = kernel("widened", {"x": DTYPES["bf16"], "out": F32}, body)
    interpret.run(source, {"x": x, "out": out}, {})
    assert torch.equal(out.view(torch.int32), x.to(torch.float32).view(torch.int32))
    ptx_text = module.build(job(source, 90)).asm["ptx"]
    assert ("cvt.f32.bf16" in ptx_text) is (count == 1)  # a single value is not a pair
    assert count == 1 or ptx_text.count("lop3.b32") >= ptx_text.count("mad.lo.u32") > 0


@given(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3), st.integers(0, 255))
def test_lop3_computes_any_function_of_three_bits(words: list[int], table: int) -> None:
    a, b, c = (np.array([w], dtype=np.uint32) for w in words)
    (found,) = ptx.run(f"lop3.b32 $0, $1, $2, $3, {table:#x};", [a, b, c], 1)
    bits = [table >> (4 * (words[0] >> k & 1) + 2 * (words[1] >> k & 1) + (words[2] >> k & 1)) & 1 for k in range(32)]
    assert int(found[0]) == sum(bit << k for k, bit in enumerate(bits))


def test_unsigned_bytes_stay_positive() -> None:
    body = ["i = tl.arange(0, 256)", "v = tl.load(x + i).to(tl.uint8)", "tl.store(out + i, v.to(tl.float32))"]
    x, out = torch.arange(256, dtype=torch.int32), torch.empty(256)
    interpret.run(kernel("bytes", {"x": I32, "out": F32}, body), {"x": x, "out": out}, {})
    assert torch.equal(out, x.float())


IMPORT_ORDER = """
import json, os, sys
import torch._dynamo
import triton, triton.language as tl, triton.language.semantic
from triton.language.extra import libdevice
owners = (tl, tl.core, tl.standard, tl.math, tl.tensor, tl.dtype, libdevice)
before = [dict(vars(owner)) for owner in owners]
sys.path.insert(0, sys.argv[1])
import test_runtime as t
t.test_loops_sizes_and_grid()
t.test_folds("max", 1, t.F32)
changed = [f"{owner.__name__}.{name}" for owner, old in zip(owners, before) for name in old.keys() | vars(owner).keys()
           if old.get(name) is not vars(owner).get(name)]
print(json.dumps({"changed": changed, "jit": type(tl.sum).__name__, "env": "TRITON_INTERPRET" in os.environ}))
"""


@pytest.mark.parametrize("interpret_set", [False, True])
def test_import_order_does_not_matter_and_triton_is_not_modified(interpret_set: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret_set else {}
    done = run_python(IMPORT_ORDER, os.path.dirname(__file__), env=environment)
    assert done.returncode == 0, done.stderr
    kind = "InterpretedFunction" if interpret_set else "JITFunction"
    assert json.loads(done.stdout.splitlines()[-1]) == {"changed": [], "jit": kind, "env": interpret_set}


def test_compiling_in_another_thread_while_interpreting() -> None:
    """Interpreted operators must not reach a compilation that runs at the same time."""
    source = kernel(
        "either",
        {"x": F32},
        ["i = tl.arange(0, 64)[None, :]", "v = tl.load(x + i) * 2 + 1", "tl.store(x + i, fold_max(v, 1) - v)"],
        grid=(GridDim(400),),
    )
    thread = threading.Thread(target=interpret.run, args=(source, {"x": torch.randn(64)}, {}))
    thread.start()
    built = 0
    while thread.is_alive():
        work = job(replace(source, warps=1 << built % 3), 90, frozenset() if built % 2 else None)
        assert module.build(work).asm["cubin"]
        built += 1
    thread.join()
    assert built


def test_several_threads_may_interpret_at_once() -> None:
    """Each thread runs its own grid: an interpreter has one position in one grid."""
    source = kernel("numbers", {"out": I32}, ["i = tl.program_id(0)", "tl.store(out + i, i * 3)"], grid=(GridDim(200),))
    outs, failures = [torch.full((200,), -1, dtype=torch.int32) for _ in range(4)], []

    def work(out: torch.Tensor) -> None:
        try:
            interpret.run(source, {"out": out}, {})
        except Exception as failure:
            failures.append(failure)

    threads, interval = [threading.Thread(target=work, args=(out,)) for out in outs], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures and all(torch.equal(out, 3 * torch.arange(200, dtype=torch.int32)) for out in outs)


def test_wide_sizes_do_not_wrap_around() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    source = kernel("size", {"out": DTYPES["i64"]}, ["tl.store(out, s0 + 1)"], sizes=("s0",))
    interpret.run(replace(source, wide_index=True), {"out": out}, {"s0": 2**33})
    assert out.item() == 2**33 + 1


def test_parsing_disturbed_by_other_threads_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.11 counts the recursion of all threads' parsers together; Triton wraps the error if it comes from a called function."""
    parse, calls = ast.parse, itertools.count(1)

    def disturbed(*given: Any, **more: Any) -> Any:
        if (call := next(calls)) % 2 and call < 20:
            raise SystemError("AST constructor recursion depth mismatch (before=69, after=48)")
        return parse(*given, **more)

    source = kernel(
        "disturbed", {"x": F32}, ["i = tl.arange(0, 64)[None, :]", "v = tl.load(x + i)", "tl.store(x + i, fold_max(v, 1) - v)"]
    )
    monkeypatch.setattr(ast, "parse", disturbed)
    x = torch.arange(64.0)
    interpret.run(source, {"x": x}, {})
    assert x.tolist() == [63.0 - k for k in range(64)] and next(calls) > 2
    assert module.build(job(source, 90, None)).asm["cubin"]
    monkeypatch.setattr(ast, "parse", lambda *_: (_ for _ in ()).throw(SystemError("something else")))
    with pytest.raises(SystemError, match="something else"):
        compat.retry_parse(lambda: ast.parse(""))


def test_interpretation_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    interpret._warn_once.cache_clear()
    source = kernel("quiet", {"out": F32}, ["tl.store(out, 1.0)"])
    for _ in range(2):
        interpret.run(source, {"out": torch.empty(1)}, {})
    assert [r.name for r in caplog.records] == ["onepass.interpret"]


def test_text_is_loaded_once_and_its_source_is_readable() -> None:
    source = kernel("loaded", {"out": F32}, ["tl.store(out, 1.0)"])
    function = module.load(source)
    assert function is module.load(replace(source, warps=8))
    assert inspect.getsource(function.fn).endswith("tl.store(out, 1.0)\n")
    other = module.load(kernel("loaded", {"out": F32}, ["tl.store(out, 2.0)"]))
    for each, stored in ((function, "1.0"), (other, "2.0")):  # also if another text has the same name
        assert inspect.getsource(each.fn).endswith(f"tl.store(out, {stored})\n")


# ------------------------------------------------------------------------------------------------------ offline compiling


def row_kernel(columns: int = 4096, loop: bool = False) -> Source:
    """Subtract a row's maximum, once or in a loop over rows: a load, a fold and a store of bf16."""
    body = [
        f"c = tl.arange(0, {columns})[None, :]",
        "for row in tl.range(tl.program_id(0), s0, 132):" if loop else "if True:\n        row = tl.program_id(0)",
        f"    v = tl.load(x + row * {columns} + c).to(tl.float32)",
        f"    tl.store(out + row * {columns} + c, (v - fold_max(v, 1)).to(tl.bfloat16))",
    ]
    bf16 = DTYPES["bf16"]
    return kernel("row_max", {"x": bf16, "out": bf16}, body, grid=(GridDim(sym("s0")),), sizes=("s0",))


def test_offline_binary_on_several_devices() -> None:
    devices = [DEVICES[name] for name in ("a100", "rtx4090", "h200", "b200", "rtx5090")]
    for binary in offline.compile_many([(row_kernel(), d) for d in devices]):
        assert 16 < binary.registers <= 255
        assert (binary.spill_bytes, binary.stack_bytes, binary.spills_in_loop) == (0, 0, False)
        assert binary.wide_loads == binary.wide_stores == 4  # 32 elements of 2 bytes a thread
        assert binary.loads == binary.stores == {16: 4}
        assert binary.smem_bytes > 0 and binary.barriers > 0  # four warps share their maxima


def test_offline_results_are_cached() -> None:
    source = row_kernel(1024)
    assert offline.compile(source, DEVICES["h200"]) is offline.compile(source, DEVICES["h100"])


def test_a_misaligned_buffer_is_not_read_in_wide_loads() -> None:
    binary = offline.compile(row_kernel(), DEVICES["h200"], frozenset({"out"}))
    assert (binary.wide_loads, binary.wide_stores) == (0, 4)


def test_spills_are_detected_and_located() -> None:
    straight = offline.compile(replace(row_kernel(), max_registers=24), DEVICES["h200"])
    assert straight.registers <= 24 and straight.spill_bytes > 0 and not straight.spills_in_loop
    looped = offline.compile(replace(row_kernel(loop=True), max_registers=24), DEVICES["h200"])
    assert looped.spill_bytes > 0 and looped.spills_in_loop


def test_a_worker_caches_the_launcher_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Triton compiles a launcher per signature; without a driver to link with, there is none."""
    created = []
    kernel = SimpleNamespace(src="types", metadata="more")
    driver = SimpleNamespace(make_launcher=None, CudaLauncher=lambda *of: created.append(of))
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", driver)
    compat.compile_launcher_stub(kernel)
    assert created == [("types", "more")]
    driver.CudaLauncher = lambda *of: 1 / 0
    compat.compile_launcher_stub(kernel)
    del driver.make_launcher
    driver.CudaLauncher = lambda *of: created.append(of)
    compat.compile_launcher_stub(kernel)
    assert len(created) == 1


def test_without_an_assembler_all_local_memory_counts_as_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(asm={"cubin": b"", "ptx": ".target sm_90a\n"})
    monkeypatch.setattr(launch, "_prepared", lambda work, device: SimpleNamespace(_kernel=loaded))
    monkeypatch.setattr(compat, "triton_usage", lambda kernel: (64, 48, 128))
    monkeypatch.setattr(compat, "ptxas", lambda target: "false")
    found = launch._binary.__wrapped__(SimpleNamespace(target=90), 0)
    assert (found.registers, found.spill_bytes, found.smem_bytes) == (64, 48, 128)
    with pytest.raises(RuntimeError, match="ptxas reported no register count"):
        cubin_info.read_spills(b"", ".target sm_90a\n", 0, 90)


def test_a_stack_array_does_not_count_as_a_spill() -> None:
    """The slow path of sin may keep an array in local memory. Compiled twice: Triton's cache must not change the result."""
    source = kernel("sine", {"x": F32}, ["i = tl.arange(0, 128)", "tl.store(x + i, tl.sin(tl.load(x + i)))"])
    binary = offline.compile(source, DEVICES["h200"])
    assert binary.spill_bytes == 0
    offline._measured.cache_clear()
    assert offline.compile(source, DEVICES["h200"]) == binary


def test_wide_sizes_and_fold_instructions() -> None:
    source = row_kernel(loop=True)
    ptx = module.build(job(replace(source, wide_index=True), 90)).asm["ptx"]
    assert "max.NaN.f32" in ptx
    assert ".param .u64 row_max_param_2" in ptx and ".param .u32 row_max_param_3" in ptx


@pytest.mark.parametrize(("broken", "complaint"), [("4096)", "power of 2"), ("fold_max(v, 1)", "undefined is not defined")])
def test_a_compile_failure_quotes_the_compiler(broken: str, complaint: str) -> None:
    replacement = {"4096)": "4097)", "fold_max(v, 1)": "undefined"}[broken]
    source = row_kernel()
    with pytest.raises(CompileFailed, match=f"ONEPASS-301.*{complaint}"):
        offline.compile(replace(source, text=source.text.replace(broken, replacement)), DEVICES["h200"])
    assert offline.compile(source, DEVICES["h200"]).registers > 0  # the worker is still alive


def test_a_worker_that_dies_is_replaced() -> None:
    fatal = kernel("fatal", {"x": F32}, ["tl.store(x, 0.0)"])
    fatal = replace(fatal, text="import os, sys\nif 'pytest' not in sys.modules:\n    os._exit(3)\n" + fatal.text)
    with pytest.raises(CompileFailed, match="ended with status 3"):
        offline.compile(fatal, DEVICES["h200"])
    assert offline.compile(row_kernel(512), DEVICES["h200"]).registers > 0


def test_lack_of_resources_is_not_blamed_on_the_kernel(tmp_path: Path) -> None:
    """The failure is not cached either: the same kernel compiles once there is disk space."""
    room = tmp_path / "room"
    needy = kernel("needy", {"x": F32}, ["tl.store(x, 0.0)"])
    needy = replace(needy, text=f"print('warning: a file is missing')\nopen({str(room)!r}).close()\n{needy.text}")
    with pytest.raises(CompilerUnavailable, match=r"ONEPASS-330.*No such file"):
        offline.compile(needy, DEVICES["h200"])
    room.touch()
    assert offline.compile(needy, DEVICES["h200"]).registers > 0


def test_workers_do_not_import_torch() -> None:
    nosy = kernel("nosy", {"x": F32}, ["tl.store(x, 0.0)"])
    nosy = replace(nosy, text="import sys\nassert 'torch' not in sys.modules\n" + nosy.text)
    assert offline.compile(nosy, DEVICES["h200"]).registers > 0


def test_reading_ptx_sass_and_logs() -> None:
    ptx = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ];
    ld.global.nc.b16 { %rs1 }, [ %rd3 + 0 ];
    cp.async.cg.shared.global [ %r9 + 0 ], [ %rd4 + 0 ], 0x10, %r8;
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];
    st.global.v2.b32 [ %rd1 + 0 ], { %r1, %r2 };
    """
    assert count_access(ptx) == ({16: 3, 2: 1}, {8: 1})
    sass = "/*0000*/ MOV R1, R3 ;\n/*0010*/ {0} [R1], R2 ;\n/*0020*/ @P0 BRA {1} ;\n/*0030*/ EXIT ;\n/*0040*/ BRA 0x40;"
    assert spills_in_loop(sass.replace("{0}", "STL").replace("{1}", "0x10"))
    assert not spills_in_loop(sass.replace("{0}", "STL").replace("{1}", "0x30"))
    assert not spills_in_loop(sass.replace("{0}", "STG").replace("{1}", "0x10"))
    usage = parse_log("8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\nptxas info : Used 32 registers")
    assert usage is not None and (usage.registers, usage.stack_bytes, usage.spill_bytes) == (32, 8, 32)
    assert parse_log("") is None


# ------------------------------------------------------------------------------------------------------------------ card


def properties(**changes: object) -> SimpleNamespace:
    base = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "L2_cache_size": 60 << 20,
        "memory_clock_rate": 3201000,
        "memory_bus_width": 6144,
        "clock_rate": 1980000,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048,
        "shared_memory_per_multiprocessor": 233472,
        "shared_memory_per_block_optin": 232448,
    }
    return SimpleNamespace(**(base | changes))


def test_cards_are_recognized_by_name_and_size() -> None:
    assert card.identify(properties()) is DEVICES["h200"]
    assert card.identify(properties(name="NVIDIA H100 80GB HBM3")) is DEVICES["h100"]
    assert card.identify(properties(name="NVIDIA A100-SXM4-80GB", major=8, multi_processor_count=108)) is DEVICES["a100"]
    assert card.identify(properties(name="NVIDIA GeForce RTX 5090", major=12, multi_processor_count=170)) is DEVICES["rtx5090"]
    assert card.identify(properties(name="NVIDIA L40S", minor=9, major=8, multi_processor_count=142)) is DEVICES["l40s"]
    for other in (
        properties(name="NVIDIA GH200 480GB"),
        properties(name="NVIDIA H100 PCIe", multi_processor_count=114),
        properties(name="NVIDIA GeForce RTX 4090 Laptop GPU", major=8, minor=9, multi_processor_count=76),
    ):
        assert card.identify(other) not in DEVICES.values()


def test_an_unlisted_card_is_described_by_its_driver() -> None:
    found = card.identify(
        properties(
            name="NVIDIA L40",
            minor=9,
            major=8,
            multi_processor_count=142,
            memory_clock_rate=9001000,
            memory_bus_width=384,
            shared_memory_per_block_optin=101376,
        )
    )
    assert (found.name, found.capability, found.sms, found.smem_per_cta) == ("nvidia-l40", (8, 9), 142, 101376)
    assert found.bandwidth == pytest.approx(0.93 * 864e3, rel=0.01) and found.source.startswith("driver query")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h200", "h200"),
        ("H200", "h200"),
        ("NVIDIA H200 SXM", "h200"),
        ("RTX 5090", "rtx5090"),
        ("rtx-4090", "rtx4090"),
        ("GeForce RTX 4090", "rtx4090"),
        ("nvidia l40s", "l40s"),
        ("A100", "a100"),
        ("NVIDIA A100 SXM 80GB", "a100"),
    ],
)
def test_a_device_is_found_by_any_spelling_of_its_name(spelling: str, name: str) -> None:
    assert device(spelling) is DEVICES[name]


@pytest.mark.parametrize("spelling", ["", "5090", "rtx", "h200s", "nvidia", "GH200", "RTX 5090 Ti"])
def test_shorter_and_longer_names_find_no_device(spelling: str) -> None:
    with pytest.raises(UnknownDevice):
        device(spelling)


def test_doctor_facts_are_plain_and_complete() -> None:
    facts = card.doctor_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["usable"]["interpret"]["ok"] and facts["usable"]["offline"]["ok"] and facts["ptxas"]
    assert facts["usable"]["launch"]["ok"] == torch.cuda.is_available()
    assert facts["usable"]["launch"]["ok"] or facts["usable"]["launch"]["why"]
    assert facts["versions"]["torch"] and facts["versions"]["triton"]
