"""Generated kernels compared with the oracle: random Programs under random schedules, and every kind of schedule by name."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note, settings
from hypothesis import strategies as st

import onepass
from onepass.capture.function.trace import capture
from onepass.codegen import kernel_ir as ir
from onepass.codegen.builder import Builder
from onepass.codegen.expr import GLUON, TRITON
from onepass.codegen.helpers import FUNCTIONS
from onepass.codegen.names import GLUON_NAMES, TRITON_NAMES
from onepass.codegen.printer import imports, print_kernel
from onepass.codegen.source import ParamKind
from onepass.ir.program import Op, Reduce, prune
from onepass.ir.size import value
from onepass.ir.text import parse
from onepass.pipeline import generate, optimize
from onepass.plan.legality import Family
from onepass.plan.partition import plan
from onepass.plan.schedule import Cover, LoopedRows, Outer, ResidentRows, Schedule
from onepass.runtime import executable
from onepass.runtime.interpreter import interpret
from tests.support.forced_schedules import H200, assert_as_oracle, candidates, chosen, planned, program_of, run
from tests.support.processes import run_python
from tests.support.random_programs import Case, programs
from tests.support.schedule_kinds import KINDS, both, column_softmax, norm, row_sums

EACH = 3  # schedules of a family per example


@given(programs(), st.integers(0, 2**32))
@settings(max_examples=150)
def test_any_program_under_any_schedule(case: Case, seed: int) -> None:
    program = optimize(case.program)
    note(str(program))
    inputs = case.make_inputs(seed % 1000)
    best = plan(program, case.bindings, H200)
    assert_as_oracle(best, inputs, case.bindings, "the best plan")
    for family, plans in candidates(program, case.bindings):
        for kernel in random.Random(seed).sample(plans, min(EACH, len(plans))):
            assert_as_oracle(planned(program, case.bindings, kernel), inputs, case.bindings, f"{family}: {kernel.schedule}")


# ---- every kind of schedule, by name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_schedule(kind: str, dtype: torch.dtype) -> None:
    function, family, (rows, cols), schedule = KINDS[kind]
    if isinstance(schedule, (ResidentRows, LoopedRows)) and schedule.sector_elems:
        schedule = replace(schedule, sector_elems=32 // dtype.itemsize)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, cols, generator=generator).to(dtype)
    w = torch.randn(cols, generator=generator).to(dtype)
    widened = lambda x, w: function(x.float(), w.float())  # noqa: E731
    held = isinstance(schedule.rows, Cover)  # which needs a number of rows known in advance
    program, tensors, bindings = program_of(widened, x, w, dynamic=False if held else None)
    assert_as_oracle(planned(program, bindings, chosen(program, bindings, family, schedule)), tensors, bindings, str(schedule))


MARGIN, MARK = 4096, 0x5A  # bytes on either side of an allocation, and their value


@pytest.mark.parametrize(
    "kind",
    [
        "pointwise",
        "column, overhanging",
        "outer, tail",
        "inner, overhanging",
        "inner, odd rows",
        "inner looped, odd rows",
        "inner looped, rows a tile",
        "mix-order, overhanging",
        "blocks, overhanging",
    ],
)
def test_no_store_lands_outside_of_its_output(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stray store into the next row is overwritten later, so it shows only after the last row."""
    function, family, (rows, cols), schedule = KINDS[kind]
    allocate, kept = executable.allocate, []

    def within_margins(*args: Any) -> torch.Tensor:
        made = allocate(*args)
        room = torch.full((made.untyped_storage().nbytes() + 2 * MARGIN,), MARK, dtype=torch.uint8)
        kept.append(room)
        return torch.empty(0, dtype=made.dtype).set_(room.untyped_storage(), MARGIN // made.itemsize, made.shape, made.stride())

    monkeypatch.setattr(executable, "allocate", within_margins)
    held = isinstance(schedule.rows, Cover)
    program, tensors, bindings = program_of(function, torch.randn(rows, cols), torch.randn(cols), dynamic=False if held else None)
    run(planned(program, bindings, chosen(program, bindings, family, schedule)), tensors, bindings)
    assert kept and all((room[:MARGIN] == MARK).all() and (room[-MARGIN:] == MARK).all() for room in kept)


def shared_sum(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * x.sum(1, keepdim=True) * w.sum(), w.sum()


def test_one_row_stores_values_that_all_rows_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at other offsets in a sector are summed in another order, and which CTA stores last is undetermined."""
    program, tensors, bindings = program_of(shared_sum, torch.randn(4, 1027), torch.randn(1027))
    schedule = ResidentRows(1, (256,) * 4, 1, sector_elems=8)
    plan = planned(program, bindings, chosen(program, bindings, Family.INNER, schedule))
    forwards = run(plan, tensors, bindings)
    monkeypatch.setattr(interpret, "program_order", lambda programs: reversed(range(programs)))
    backwards = run(plan, tensors, bindings)
    assert all(torch.equal(forwards[name], backwards[name]) for name in forwards)


BLOCKS = """program blocks
  axis m = s0
  axis b = 6
  axis n = 8
  axis a = 13
  input x: f32 [s0, 6, 8] strides [48, 8, 1]
  input w: f32 [6, 8] strides [8, 1]
  input v: f32 [6] strides [1]
  input u: f32 [13] strides [1]
  output y: f32 [s0, 6, 8] strides [48, 8, 1]
  output z: f32 [s0, 6] strides [6, 1]
  output p: f32 [s0] strides [1]
  output q: f32 [s0] strides [1]
  output r: f32 [] strides []
  output s: f32 [s0] strides [1]
  output t: f32 [13] strides [1]
  %0 = load x [m:48, b:8, n:1]
  %1 = load w [b:8, n:1]
  %2 = load v [b:1]
  %3 = reduce max(%1) over n
  %4 = result %3.0
  %5 = reduce max(%0) over n
  %6 = result %5.0
  %7 = add %4 %2
  %8 = add %6 %7
  %9 = mul %0 %2
  %10 = reduce sum(%8) over b, n
  %11 = result %10.0
  %12 = reduce welford(%8) over b, n
  %13 = result %12.1
  %14 = reduce sum(%6) over m, b, n
  %15 = result %14.0
  %16 = load u [a:1]
  %17 = reduce sum(%0) over b, n
  %18 = result %17.0
"""
STORES = {
    "y": "y [m:48, b:8, n:1] = %9",
    "z": "z [m:6, b:1] = %8",
    "p": "p [m:1] = %11",
    "q": "q [m:1] = %13",
    "r": "r [] = %15",
    "s": "s [m:1] = %18",
    "t": "t [a:1] = %16",
}


@pytest.mark.parametrize("rows", [3, 64])
@pytest.mark.parametrize("stored", ["yzs", "zp", "yq", "rt", "yzpq"])
def test_values_per_block_are_used_and_reduced_as_columns(stored: str, rows: int) -> None:
    """A value per block of columns is repeated for the columns of its block where a use needs that."""
    made = parse(BLOCKS + "".join(f"  store {STORES[name]}\n" for name in stored))
    program = prune(replace(made, buffers=tuple(b for b in made.buffers if b.role == "input" or b.name in stored)))
    inputs = {b.name: torch.randn([value(s, {"s0": rows}) for s in b.shape]) for b in program.buffers if b.role == "input"}
    bindings = {"s0": rows} if "s0" in program.symbols else {}
    assert_as_oracle(plan(program, bindings, H200), inputs, bindings, "the best plan")
    for family, plans in candidates(program, bindings):
        for kernel in random.Random(rows).sample(plans, min(EACH, len(plans))):
            assert_as_oracle(planned(program, bindings, kernel), inputs, bindings, f"{family}: {kernel.schedule}")


# ---- the text itself -------------------------------------------------------------------------------------------------------


@given(programs())
@settings(max_examples=40)
def test_text_is_python_and_the_same_every_time(case: Case) -> None:
    program = optimize(case.program)
    first, second = (generate(plan(program, case.bindings, H200)) for _ in range(2))
    assert first == second
    for source in first:
        functions = [node for node in ast.parse(source.text).body if isinstance(node, ast.FunctionDef)]
        *helpers, kernel = functions
        assert kernel.name == source.name and {f.name for f in helpers} <= set(FUNCTIONS)
        assert [a.arg for a in kernel.args.args] == [p.text_name for p in source.params]


def imported(tree: ast.Module) -> set[str]:
    lines = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [ast.unparse(node) for node in lines if "onepass" in ast.unparse(node)]
    return {name.asname or name.name.split(".")[0] for node in lines for name in node.names}


def needless_parentheses(kernel: ast.FunctionDef, text: str) -> list[str]:
    """Lines of a kernel with more parentheses than Python needs. Sums under `&` are easier to read with them."""
    lines = [line.split("  # ")[0].strip() for line in text.splitlines()[kernel.body[0].end_lineno :]]
    code = [line for line in lines if line and not line.endswith(":") and " & (" not in line]
    return [line for line in code if line.count("(") > ast.unparse(ast.parse(line)).count("(")]


@given(programs())
@settings(max_examples=40)
def test_text_is_self_contained_and_has_nothing_superfluous(case: Case) -> None:
    for source in generate(plan(optimize(case.program), case.bindings, H200)):
        tree = ast.parse(source.text)
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert imported(tree) <= read
        *helpers, kernel = (node for node in tree.body if isinstance(node, ast.FunctionDef))
        assert {f.name for f in helpers} <= read
        assert not needless_parentheses(kernel, source.text)


@pytest.mark.parametrize("function", [norm, both, row_sums, column_softmax])
def test_kernel_lines_name_the_user_code_they_came_from(function: Callable[..., Any]) -> None:
    """Every line of user code that a kernel computes is named in its text, in a comment at the end of a line."""
    program, _, bindings = program_of(function, torch.randn(64, 96), torch.randn(96))
    text = "\n".join(source.text for source in generate(plan(program, bindings, H200)))
    for source in {node.src for node in program.nodes if isinstance(node, (Op, Reduce)) and node.src}:
        noted = [line for line in text.splitlines() if source in line]
        assert noted, f"{source} is nowhere in the text"
        assert len(noted) <= len(generate(plan(program, bindings, H200))), "a kernel notes it once"
        assert all(line.count(source) == 1 and line.index("#") < line.index(source) for line in noted)


GUARDED = """
import ctypes, mmap, sys
import torch
import onepass

PAGE, UNTOUCHABLE = mmap.PAGESIZE, 0
FUNCTIONS = (lambda x: torch.softmax(x, -1), lambda x: x.sum(-1), lambda x: (x.sum(-1), x.sum(0)), lambda x: x.logsumexp(0))
libc = ctypes.CDLL(None, use_errno=True)

def guarded(values, at_end):
    # values at the very start or very end of pages whose neighbours may not be touched
    size = values.numel() * values.element_size()
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (base, base + (pages + 1) * PAGE):
        assert libc.mprotect(ctypes.c_void_p(page), PAGE, UNTOUCHABLE) == 0
    first = PAGE + (pages * PAGE - size if at_end else 0)
    placed = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=first).view(values.shape)
    placed.copy_(values)
    return placed

for dtype in (torch.float32, torch.bfloat16):
    for cols in (1027, 515):
        for at_end in (False, True):
            x = guarded(torch.randn(4, cols).to(dtype), at_end)
            for function in FUNCTIONS:
                onepass.fuse(function)(x)
print("untouched")
"""


def test_no_address_outside_a_tensor_is_touched() -> None:
    """Rows of odd length, read by sectors, at both ends of a memory mapping: a stray read would crash the process."""
    done = run_python(GUARDED)
    assert done.returncode == 0 and "untouched" in done.stdout, done.stderr[-2000:]


def fused_right(fn: Callable[..., Any], *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(onepass.fuse(fn)(*inputs), fn(*inputs))


@pytest.mark.parametrize(
    "function,shape,family,schedule",
    [
        (lambda x: x.float().sum((1, 2)), (7, 2, 5), Family.INNER, LoopedRows(1, 256, 4, sector_elems=16)),
        (lambda x: x.float().sum((1, 2)), (7, 9, 5), Family.INNER, LoopedRows(1, 16, 4, sector_elems=16)),
        (lambda x: x.float().sum(0), (40, 3, 2), Family.OUTER, Outer(64, 1, 4, split=4)),
        (lambda x: x.float().sum(0), (40, 3, 2), Family.OUTER, Outer(8, 16, 4, split=2)),
    ],
    ids=["row within a sector", "row of several sectors", "columns one by one, split", "blocks of columns, split"],
)
def test_a_kernel_is_right_at_other_sizes_than_it_was_planned_for(
    function: Callable[..., Any], shape: tuple[int, ...], family: Family, schedule: Schedule
) -> None:
    """All calls of a row class share kernels, whichever symbolic sizes make up its row count."""
    x = torch.randn(shape).bfloat16()
    program, inputs, sizes = program_of(function, x)
    assert len(program.symbols) == 2
    others = dict.fromkeys(program.symbols, 260)
    one = chosen(program, others, family, schedule)
    assert_as_oracle(planned(program, others, one), inputs, sizes, str(schedule))


def test_inputs_may_have_the_names_of_indices() -> None:
    """The columns of unaligned rows are called cols_main and pos_main, which may also be tiles of inputs called cols and pos."""
    fused_right(
        lambda cols, pos, b: (cols + b) * pos, torch.randn(4, 1001)[:, :1000], torch.randn(4, 1001)[:, :1000], torch.randn(1000)
    )


def test_inputs_may_have_the_names_of_zeros() -> None:
    """The second pass widens rows with a zero called zero1."""

    def normed(zero1: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = zero1.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(zero1.dtype)

    fused_right(normed, torch.randn(4, 1024, dtype=torch.bfloat16), torch.randn(1024, dtype=torch.bfloat16))


def test_values_may_have_the_names_of_imports() -> None:
    for language, reserved in ((TRITON, TRITON_NAMES), (GLUON, GLUON_NAMES)):
        lines = imports(language, frozenset({"tl", "libdevice"}))
        imported = {
            name.asname or name.name
            for line in lines
            for node in ast.parse(line).body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in node.names
        }
        assert imported | set(FUNCTIONS) <= set(reserved)

    def named(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        widen = x.float() * w
        return (widen + b.float()).sum(-1)

    x, w, b = (torch.randn(shape).bfloat16() for shape in ((8, 300), (300,), (8, 300)))
    fused_right(named, x, w, b)


def test_numbered_names_are_unique() -> None:
    """Tiles are numbered too: of two loads of x, the second load and the second tile of the first would both be x_1."""
    builder = Builder(("taken",))
    hints = ("x", "x", "x_1", "x", "x_1", "x_2", "y_1", "y", "y", "taken", "taken_1", "taken")
    assert len({builder.fresh(hint) for hint in hints}) == len(hints)

    def two_loads(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.narrow(1, 4, 6) - 1, x.softmax(0).gather(1, at)

    x, at = torch.randn(17, 13, 8), torch.randint(0, 13, (17, 5, 8))
    torch.testing.assert_close(onepass.fuse(two_loads, dynamic=False)(x, at), two_loads(x, at))


def test_row_numbers_are_split_into_symbolic_axes() -> None:
    """Rows are three axes, and each tensor has a different one; a row number is divided by a product of sizes."""
    x, first, second, third = (torch.randn(shape) for shape in ((3, 5, 7, 8), (3, 1, 1, 8), (5, 1, 8), (7, 8)))
    fn = lambda x, a, b, c: (x + a) * b - c  # noqa: E731
    fused = onepass.fuse(fn, dynamic=True)
    torch.testing.assert_close(fused(x, first, second, third), fn(x, first, second, third))
    program, _, bindings = program_of(fn, x, first, second, third, dynamic=True)
    assert "// (s1 * s2)" in "".join(source.text for source in generate(plan(program, bindings, H200)))


def test_a_symbolic_number_of_column_blocks() -> None:
    """The CTA index is split into columns, as many as the call has rows, and rows."""
    fn = lambda x: (x.t() + 1).contiguous()  # noqa: E731
    for rows in (1, 70, 64, 200):
        x = torch.randn(rows, 33)
        fused_right(fn, x)
    program, _, bindings = program_of(fn, x)
    assert "% tl.cdiv(s0, " in "".join(source.text for source in generate(plan(program, bindings, H200)))


@pytest.mark.parametrize("first", [8, 5])
def test_slices_of_unaligned_rows_start_at_their_offsets(first: int) -> None:
    """The slice starts a whole number of sectors after the row's start, or not."""
    x = torch.randn(5, 1027)
    program, tensors, bindings = program_of(lambda x: torch.softmax(x[:, first : first + 1001] * x[:, :1001], -1), x)
    for schedule in (ResidentRows(1, (256,) * 4, 1, sector_elems=8), LoopedRows(1, 256, 2, sector_elems=8)):
        assert_as_oracle(planned(program, bindings, chosen(program, bindings, Family.INNER, schedule)), tensors, bindings, "parts")


def test_positions_of_extremes_have_64_bits() -> None:
    def squares(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(x.shape[0])
        return at * at + x, (at * at).sum()

    fused_right(squares, torch.ones(50000, dtype=torch.int64))


def test_only_buffers_of_the_plan_are_declared_aligned() -> None:
    """An input may have any address. Only buffers that the plan allocates are declared aligned."""
    for fn in (both, row_sums, column_softmax):
        program, _, bindings = program_of(fn, torch.randn(600, 96), torch.randn(96))
        inputs = {b.name for b in program.buffers if b.role == "input"}
        for source in generate(plan(program, bindings, H200)):
            given = {p.name for p in source.params if p.kind is ParamKind.POINTER}
            assert source.fresh & given == given - inputs


FAR = """
import torch
import onepass

FAR = 2**30 + 64
rows = torch.empty(2 * FAR + 64, dtype=torch.uint8).as_strided((3, 16), (FAR, 1))
rows.copy_(torch.arange(48).reshape(3, 16))
y = torch.ones(16, 3, dtype=torch.int32)
assert torch.equal(onepass.fuse(lambda x, y: (y + x.t()).sum(1))(rows, y), (y + rows.t()).sum(1))
planes = rows.view(3, 4, 4)
assert torch.equal(onepass.fuse(lambda x: x.sum(1))(planes), planes.sum(1))
print("there")
"""


def test_far_elements_are_addressed_with_64_bits() -> None:
    """Columns and batches 2 ** 30 bytes apart, in sparsely mapped memory: a wrong address would crash the process."""
    done = run_python(FAR)
    assert done.returncode == 0 and "there" in done.stdout, done.stderr[-2000:]


def test_generated_text_is_parsed_again_if_other_threads_interfere(monkeypatch: pytest.MonkeyPatch) -> None:
    def disturbed(*_: object, **__: object) -> ast.Module:
        raise SystemError("AST constructor recursion depth mismatch (before=69, after=48)")

    monkeypatch.setattr(ast, "parse", disturbed)
    right, wrong = (ir.Kernel("f", "a kernel", ("x",), (ir.Assign((ir.Name("y"),), value),), TRITON) for value in ("x", "return"))
    assert print_kernel(right).endswith('def f(x):\n    """a kernel"""\n    y = x\n')
    with pytest.raises(SyntaxError):
        print_kernel(wrong)


@pytest.mark.parametrize("fold", [torch.argmax, torch.argmin])
def test_argmax_along_an_axis_the_values_do_not_depend_on(fold: Callable[..., torch.Tensor]) -> None:
    fused_right(lambda x: fold(x, 0), torch.randn(1, 40).expand(100, 40))


@pytest.mark.parametrize("shape", [(70, 13), (3, 1027), (2, 5, 1001)], ids=str)
def test_valid_lanes_are_counted_without_a_reduction(shape: tuple[int, ...]) -> None:
    """Triton 3.6 would recompute a summed mask in the layout of its sum, in every thread."""
    x = torch.randn(shape)
    for dims in ((-1,), (0,), tuple(range(len(shape)))):
        fn = lambda x, dims=dims: torch.var_mean(x, dims, correction=0)  # noqa: E731
        captured = capture(fn, (x,))
        texts = [s.text for s in generate(plan(optimize(captured.program), captured.bind((x,)) or {}, H200))]
        for text in texts:
            spread = set(re.findall(r"(\w+) = tl\.where\(tl\.broadcast_to\(", text))
            assert not spread & set(re.findall(r"tl\.sum\((\w+),", text))
        fused_right(fn, x)


def parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b], 1)


def two_tables(s: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention scores with relative positions looked up in two tables, and the positions themselves."""
    r = torch.arange(s.shape[-2])[:, None] - torch.arange(s.shape[-1])[None]
    at = (r + 8).clamp(0, 15)
    along, down = (torch.gather(t, -1, i.expand(s.shape)) for t, i in ((a, at), (b, (8 - r).clamp(0, 15))))
    return (s + along + down.transpose(-1, -2)).softmax(-1), at


LOOKUPS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "softmax of parts": (lambda a, b: parts(a, b).softmax(1), ((5, 2), (5, 3))),
    "variance of parts": (lambda a, b: parts(a, b).var(1), ((5, 2), (5, 3))),
    "norm of parts": (lambda a, b: F.layer_norm(parts(a, b), (65,)), ((6, 40), (6, 25))),
    "norm of a padded row": (lambda a: F.layer_norm(F.pad(a, (1, 2)), (36,)), ((7, 33),)),
    "softmax of a row written to": (lambda a, b: a.slice_scatter(b, 1, 3, 6).softmax(1), ((5, 9), (5, 3))),
    "the table an index of which a row finds": (
        lambda a, b: b.gather(0, a.argmax(1, keepdim=True).expand(5, 7)).softmax(1),
        ((5, 9), (9, 7)),
    ),
    "two tables": (two_tables, ((4, 8, 8), (4, 8, 16), (4, 8, 16))),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_indexed_values_may_be_reduced_and_reused(name: str) -> None:
    function, shapes = LOOKUPS[name]
    fused_right(function, *(torch.randn(shape) for shape in shapes))
