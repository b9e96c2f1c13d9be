"""Plans of small, representative Programs, and the arithmetic behind them."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onepass import pipeline
from onepass.capture.function.trace import capture
from onepass.codegen.source import Source
from onepass.device import DEVICES, device
from onepass.errors import NoPlan
from onepass.ir.axes import unify_axes
from onepass.ir.oracle import evaluate
from onepass.ir.program import Load, Program, Reduce, Store
from onepass.ir.simplify import simplify, two_pass
from onepass.ir.text import parse
from onepass.pipeline import compile, generate, optimize
from onepass.plan import footprint
from onepass.plan.access import contiguous_row_stride, needs_wide_index, runs, single_stride
from onepass.plan.estimate import estimate
from onepass.plan.footprint import floor_bytes
from onepass.plan.kernel import Kernel, Space
from onepass.plan.legality import Family, Illegal, Reason, reused, space_of
from onepass.plan.legality import families as families_of
from onepass.plan.partition import Search, plan
from onepass.plan.plan import REGISTERS_UNBOUNDED, CompileOutcome, Plan
from onepass.plan.resources import ctas_per_sm, demand
from onepass.plan.schedule import Cover, Loop, MixOrder, MultiCtaMixOrder, ResidentRows, Schedule, cover, sector_span
from onepass.plan.scoring import Scored, fits_one_wave, score, scores
from onepass.plan.split import halves
from onepass.plan.variant import representative_sizes, row_class, row_class_bounds, specialize
from onepass.runtime import feedback
from onepass.runtime.binary import Binary
from onepass.runtime.compiled import Compiled
from onepass.tools.workloads import workload

H200 = device("h200")


def planned(fn: Callable[..., Any], *inputs: torch.Tensor) -> Plan:
    captured = capture(fn, inputs)
    bindings = captured.bind(inputs)
    assert bindings is not None
    return plan(*specialize(optimize(captured.program), bindings), H200)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def families(chosen: Plan) -> list[str]:
    return [kernel.family for kernel in chosen.kernels]


@pytest.mark.parametrize(
    ("fn", "shape", "expected"),
    [
        (lambda x: x.float() * 2, (8192, 4096), ["pointwise"]),
        (lambda x: torch.softmax(x, -1), (8192, 4096), ["inner"]),
        (lambda x: x.float().sum(-1), (8192, 4096), ["inner"]),
        (lambda x: torch.logsumexp(x.float(), -1), (8192, 262144), ["inner looped"]),
        (lambda x: x.float().sum(-1), (4, 1 << 20), ["inner split", "column"]),
        (lambda x: torch.softmax(x, 0), (64, 65536), ["column"]),
        (lambda x: (x.float().sum(0), x.float().sum(1)), (32768, 768), ["mix-order", "column"]),
        (lambda x: (x.float() + 1).sum(), (8192, 8192), ["inner split", "inner"]),
    ],
)
def test_the_family_fits_the_work(fn: Callable[..., Any], shape: tuple[int, ...], expected: list[str]) -> None:
    found = families(planned(fn, meta(*shape)))
    assert [f.split()[0] for f in found] == [e.split()[0] for e in expected]
    assert found[0] == expected[0]


def test_a_column_result_applied_to_the_data_takes_at_most_two_reads() -> None:
    chosen = planned(lambda x: torch.softmax(x, 0), meta(65536, 4096))
    assert chosen.dram_bytes <= 1.6 * chosen.floor_bytes


def test_every_input_crosses_dram_once_where_one_kernel_can_do_it() -> None:
    chosen = planned(
        lambda x, y: ((x.float() * y).sum(0), (x.float() * y).sum(1), (x.float() + y).amax(1)), meta(32768, 768), meta(32768, 768)
    )
    assert chosen.dram_bytes == pytest.approx(chosen.floor_bytes, rel=0.01)


def test_reductions_over_different_rows_are_refused_with_the_reason() -> None:
    chosen = planned(lambda x: (x.float().sum(0), x.float().sum(1), x.float().sum(2)), meta(256, 256, 512))
    assert {r.reason for r in chosen.refusals} & {Reason.AXES, Reason.SLOWER}
    assert all(r.cost_apart_us is not None for r in chosen.refusals)


def test_planning_is_deterministic() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.float().sum(0), torch.softmax(x, -1)

    one, two = planned(fn, meta(4096, 4096)), planned(fn, meta(4096, 4096))
    assert [str(k.schedule) for k in one.kernels] == [str(k.schedule) for k in two.kernels]


@pytest.mark.parametrize(
    ("extent", "widest", "expected"),
    [
        (5120, 4096, (4096, 1024)),
        (8192, 4096, (4096, 4096)),
        (768, 512, (512, 256)),
        (1000, 512, (512, 512)),
        (1100, 512, (512, 512, 64, 16)),
        (13, 16, (16,)),
        (1, 16, (1,)),
    ],
)
def test_tiles_of_a_cover(extent: int, widest: int, expected: tuple[int, ...]) -> None:
    assert cover(extent, widest) == expected


@pytest.mark.parametrize("extent", [512, 1027, 50257, 128256])
def test_sectors_between_the_ends_cover_the_row_wherever_it_starts(extent: int) -> None:
    for before in range(16):
        whole = (extent + before) // 16 * 16
        assert 16 + sector_span(extent, 16) >= whole


def test_occupancy_follows_the_register_file() -> None:
    assert ctas_per_sm(64, 0, 8, H200) == 4
    assert ctas_per_sm(128, 0, 16, H200) == 1
    assert ctas_per_sm(32, 200_000, 8, H200) == 1
    assert ctas_per_sm(255, 0, 16, H200) == 0
    assert ctas_per_sm(16, 0, 32, H200) == H200.threads_per_sm // 1024
    half = H200.smem_per_sm // 2
    assert ctas_per_sm(32, half, 8, H200) == 1 and ctas_per_sm(32, half - H200.smem_reserve, 8, H200) == 2


def test_ctas_that_wait_for_each_other_are_resident_at_once() -> None:
    """A loop over rows assigns them in advance, and the CTAs of one row exchange partial results."""
    alone = MixOrder(1, H200.sms, (4096,), 8)
    two = MultiCtaMixOrder((2048,), 2, H200.sms, 8)
    assert fits_one_wave(alone, 1, H200) and not fits_one_wave(two, 1, H200) and fits_one_wave(two, 2, H200)
    assert not fits_one_wave(replace(alone, split=H200.sms + 1), 1, H200)
    assert fits_one_wave(ResidentRows(1, (4096,), 8), 1, H200)


def test_if_all_spill_the_least_spilling_schedule_that_can_run_is_chosen() -> None:
    program = optimize(capture(lambda x: torch.softmax(x, -1), (meta(8192, 4096),), dynamic=False).program)
    found = scores(program, {}, H200, {})
    assert isinstance(found, list)
    fastest, *others, slowest = sorted(found, key=lambda s: s.us)
    feedback = {s.plan.scored_as: CompileOutcome(REGISTERS_UNBOUNDED, (True, 1000)) for s in others}
    feedback |= {
        slowest.plan.scored_as: CompileOutcome(REGISTERS_UNBOUNDED, (True, 8)),
        fastest.plan.scored_as: CompileOutcome(REGISTERS_UNBOUNDED, None),
    }
    best = score(program, {}, H200, feedback, spilling=True)
    assert isinstance(best, Scored) and best.plan.scored_as == slowest.plan.scored_as
    assert isinstance(score(program, {}, H200, feedback), Illegal)


def test_a_kernel_over_the_register_limit_of_a_thread_does_not_fit() -> None:
    program = two_pass(optimize(capture(lambda x: torch.softmax(x, -1), (meta(64, 53248),), dynamic=False).program))
    kernel = Kernel(program, Space((), ("d0",), ("d1",)))
    for warps in (4, 8, 16, 32):
        one = ResidentRows(1, (4096,) * 13, warps, resident=frozenset(kernel.multi_phase), packed=True)
        taken = estimate(demand(kernel), one, H200)
        assert (taken.ctas_per_sm > 0) == (taken.registers <= min(255, 65536 // (32 * warps)))
        assert warps > 4 or 255 < taken.registers < 512, "a few more than there are, which the file of an SM would have"


def test_consecutive_strides_form_one_run() -> None:
    captured = capture(lambda x: x.float().sum((1, 2)), (meta(8, 16, 32),), dynamic=False)
    program = simplify(captured.program)
    (load,) = (program.nodes[i] for i in program.of(type(program.nodes[0])))
    axes = tuple(a.name for a in program.axes)
    assert single_stride(program, axes, load.strides) == 1  # type: ignore[union-attr]
    assert len(runs(program, axes[::-1], load.strides)) == 3  # type: ignore[union-attr]


def test_unrelated_axes_are_unified() -> None:
    captured = capture(lambda x, y: (x.float().sum(0), y.float().sum(0)), (meta(64, 128), meta(64, 128)), dynamic=False)
    program = simplify(captured.program)
    assert len(program.axes) == 4 and len(unify_axes(program).axes) == 2


def test_axes_used_together_are_not_unified() -> None:
    captured = capture(lambda x: (x.float() + x.t().float()).sum(0), (meta(64, 64),), dynamic=False)
    assert len(unify_axes(simplify(captured.program)).axes) == 2


def test_a_reduced_axis_is_related_to_the_kept_axes() -> None:
    """A value that does not vary along an axis can still be summed along it."""
    program = parse("""program repeated
      axis m = 8
      axis n = 8
      input x: f32 [8] strides [1]
      output y: f32 [8] strides [1]
      output r: f32 [] strides []
      %0 = load x [m:1]
      %1 = reduce sum(%0) over n
      %2 = result %1.0
      %3 = load x [n:1]
      %4 = reduce sum(%3) over n
      %5 = result %4.0
      store y [m:1] = %2
      store r [] = %5
    """)
    inputs = {"x": torch.arange(8.0)}
    expected, found = (evaluate(p, inputs, {}) for p in (program, unify_axes(program)))
    assert torch.equal(found["y"], 8 * inputs["x"].double()) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_blocks_that_do_not_tile_are_refused() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.float().view(64, 10, 96).sum(-1) + x.float().sum(-1, keepdim=True)

    captured = capture(fn, (meta(64, 960),), dynamic=False)
    program = optimize(captured.program)
    space = space_of(program, {})
    assert isinstance(space, Illegal) or isinstance(families_of(Kernel(program, space), Kernel(program, space)), Illegal)
    assert plan(program, {}, H200).kernels


def test_blocks_are_the_innermost_columns() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.float().view(64, 4, 8, 32).amax((1, 3)) + x.float().sum(-1, keepdim=True)

    program = optimize(capture(fn, (meta(64, 1024),), dynamic=False).program)
    space = space_of(program, {})
    assert isinstance(space, Illegal) and space.reason is Reason.AXES
    assert plan(program, {}, H200).kernels


def test_values_of_a_row_loop_are_not_read_after_it() -> None:
    """A sum of row vectors is recomputed for every row, and not available after the loop over rows."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(0) * w.sum(), x.sum(1)

    program = optimize(capture(fn, (meta(64, 256), meta(256)), dynamic=False).program)
    space = space_of(program, {})
    assert not isinstance(space, Illegal)
    found = families_of(Kernel(program, space), Kernel(program, space))
    assert isinstance(found, Illegal) or Family.MIX not in found


@pytest.mark.parametrize(
    ("fn", "is_reused"),
    [
        (lambda x: x.sum(0), False),
        (lambda x: x.sum(0) * 2 + 1, False),
        (lambda x: torch.softmax(x, 0), True),
        (lambda x: x.sum(0).amax(), True),
        (lambda x: (x * 2 - x.amax(0)).sum(1), True),
    ],
    ids=["sum", "scaled", "softmax", "extreme", "rows"],
)
def test_whether_a_reduction_over_rows_is_reused(fn: Callable[..., Any], is_reused: bool) -> None:
    program = optimize(capture(fn, (meta(64, 256, dtype=torch.float32),), dynamic=False).program)
    rows = program.nodes[next(program.of(Reduce))].axes  # type: ignore[union-attr]
    cols = tuple(a.name for a in program.axes if a.name not in rows)
    kernel = Kernel(program, Space((), rows, cols))
    roots = frozenset(f.node for f in kernel.folds if f.rows and not f.cols)
    assert roots and reused(kernel, roots, along_rows=True) == is_reused


def test_a_reduction_applied_to_the_data_is_not_split() -> None:
    program = optimize(capture(lambda x: torch.softmax(x, -1), (meta(4, 1 << 20),), dynamic=False).program)
    found = scores(program, {}, H200, {})
    assert isinstance(found, list) and found and all(s.plan.schedule.splits == 1 for s in found)


def test_no_tile_cuts_a_block() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.float().view(256, 8, 1024).amax(-1) + x.float().sum(-1, keepdim=True)

    program = optimize(capture(fn, (meta(256, 8192),), dynamic=False).program)
    found = scores(program, {}, H200, {})
    assert isinstance(found, list) and found and found[0].plan.kernel.space.block
    for cols in (s.plan.schedule.cols for s in found):
        widths = cols.tiles if isinstance(cols, Cover) else (cols.step if isinstance(cols, Loop) else cols.size,)
        assert all(width % 1024 == 0 for width in widths)


def in_turn(programs: tuple[Program, ...], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stores of Programs that run one after another and pass temporaries on."""
    memory = dict(inputs)
    for each in programs:
        stored = {n.buffer for n in each.nodes if isinstance(n, Store)}
        assert not stored & memory.keys()
        buffers = tuple(replace(b, role="output" if b.name in stored else "input") for b in each.buffers)
        memory |= evaluate(replace(each, buffers=buffers), {b.name: memory[b.name] for b in buffers if b.role == "input"}, {})
    return memory


CUT = {
    "a norm": lambda x: (x - x.mean(1, keepdim=True)) * x.var(1, keepdim=True).rsqrt(),
    "both ways": lambda x: (x * x.sum(1, keepdim=True).exp(), (x * x.sum(1, keepdim=True).exp()).sum(0), x.amax(0) + 1),
    "columns used on the data": lambda x: torch.softmax(x, 0).argmax(1),
    "results of two axes": lambda x: (x.view(2, 5, 9) - x.view(2, 5, 9).mean(-1, keepdim=True)).amax((0, 2)),
    "positions and states": lambda x: (x.argmax(0), x.var(0), x.logsumexp(0), (x.sum(0) / 3).prod()),
}


@pytest.mark.parametrize("name", CUT)
def test_kernels_extracted_from_a_program_compute_its_results(name: str) -> None:
    x = torch.randn(10, 9, generator=torch.Generator().manual_seed(0)) / 4
    program = optimize(capture(CUT[name], (x,), dynamic=False).program)
    search = Search(program, {}, H200, {})
    pieces = tuple(search.cut.extract(group, f"k{k}") for k, group in enumerate(search._ordered(search.seeds)))
    found = in_turn(pieces, {"x": x})
    for output, expected in evaluate(program, {"x": x}, {}).items():
        torch.testing.assert_close(found[output], expected)
    left, read = ({n.buffer for each in pieces for n in each.nodes if isinstance(n, kind)} for kind in (Store, Load))
    assert {b for b in left if b.startswith("r")} <= read, "a temporary is written that no kernel reads"


@pytest.mark.parametrize("name", ["both ways", "positions and states"])
def test_partial_states_and_their_join_compute_the_whole_reduction(name: str) -> None:
    x = torch.randn(10, 9, generator=torch.Generator().manual_seed(0)) / 4
    program = optimize(capture(CUT[name], (x,), dynamic=False).program)
    rows, cols = (a.name for a in program.axes)
    split = halves(Kernel(program, Space((), (rows,), (cols,))), 1, (rows, cols))
    found = in_turn((split.first, split.join), {"x": x})
    for output, expected in evaluate(program, {"x": x}, {}).items():
        torch.testing.assert_close(found[output], expected)
    assert not any(isinstance(n, Load) and n.buffer == "x" for n in split.join.nodes), "the data is read once"
    kept = [i for i, node in enumerate(program.nodes) if isinstance(node, Load) and i in split.moved]
    assert kept and all(split.first.nodes[split.moved[i]] == program.nodes[i] for i in kept)


def test_a_split_kernel_stages_its_own_loads() -> None:
    """In the whole Program, a vector that only the join reads comes between the loads."""
    chosen = planned(
        lambda x, w, y: (x.sum(0) * w, y.sum(0)),
        *(meta(*shape, dtype=torch.float32) for shape in ((65536, 1024), (1024,), (65536, 1024))),
    )
    main = chosen.kernels[0]
    assert main.schedule.splits > 1 and len(main.schedule.staged) == 2
    assert all(isinstance(main.program.nodes[i], Load) and main.kernel.is_full[i] for i in main.schedule.staged)


def test_one_stride_along_two_axes() -> None:
    program = parse(
        "program p; axis a = 4; axis b = 8; input x: f32 [4, 8] strides [8, 1]; output y: f32 [4] strides [1]; "
        "%0 = load x [a:8, b:1]; %1 = reduce sum(%0) over b; %2 = result %1.0; store y [a:1] = %2"
    )
    of = lambda **strides: single_stride(program, ("a", "b"), tuple(strides.items()))  # noqa: E731
    assert of(a=8, b=1) == 1 and of(a=16, b=2) == 2 and of() == 0
    assert of(b=1) is None and of(a=1) is None and of(a=9, b=1) is None and of(a=1, b=4) is None


def test_indexed_rows_have_no_contiguous_stride() -> None:
    program = parse(
        "program p; axis m = 64; axis n = 256; input t: i64 [64] strides [1]; input x: f32 [64, 256] strides [256, 1]; "
        "output y: f32 [64, 256] strides [256, 1]; %0 = load t [m:1]; %1 = load x [m:256, n:1] gather(%0 * 256 < 1); "
        "store y [m:256, n:1] = %1"
    )
    kernel = Kernel(program, Space((), ("m",), ("n",)))
    of_table, looked_up, stored = (contiguous_row_stride(kernel, node) for node in program.nodes)  # type: ignore[arg-type]
    assert (of_table, looked_up, stored) == (None, None, 256)


def test_addresses_that_need_64_bits() -> None:
    def wide(load: str, extent: int = 4) -> bool:
        return needs_wide_index(
            parse(
                f"program p; axis a = {extent}; input t: i64 [4] strides [1]; input x: f32 [4] strides [1]; "
                f"output y: f32 [{extent}] strides [1]; %0 = load t [a:1]; %1 = load x {load}; "
                "store y [a:1] = %1"
            ),
            {},
        )

    limit = 2**31 - 2**20
    assert not wide("[a:1]") and not wide(f"[a:1] + {limit - 100}") and not wide(f"[] gather(%0 * 1000 < {limit // 1000 - 1})")
    assert wide(f"[a:1] + {limit}") and wide(f"[] gather(%0 * 1000 < {limit // 1000 + 1})") and wide(f"[a:{limit // 3 + 1}]")
    assert wide("[a:1]", limit + 1), "lanes past the end are counted, too"


def test_a_merge_around_a_third_kernel_would_be_a_cycle() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        off = x - x.mean(1, keepdim=True)
        return (off * (off * off).amax(1, keepdim=True)).prod(1)

    program = optimize(capture(fn, (meta(64, 256, dtype=torch.float32),), dynamic=False).program)
    search = Search(program, {}, H200, {})
    groups = search.seeds
    first, middle, last = sorted(groups, key=min)
    assert search._feeds(first, middle) and search._feeds(middle, last)
    assert search._between(first, last, groups) and not search._between(first, middle, groups)


def test_a_row_class_is_planned_the_same_for_every_count_in_it() -> None:
    captured = capture(lambda x: x.float().sum(0), (meta(4096, 512),))
    program = optimize(captured.program)
    assert program.symbols == ("s0",)
    ends = (0, *row_class_bounds(H200), 10**6)
    classes = [(low + 1, high) for low, high in pairwise(ends)]
    for low, high in classes:
        assert representative_sizes(program, {"s0": low}, H200) == representative_sizes(program, {"s0": high}, H200)
    assert len({row_class({"s0": n}, H200) for each in classes for n in each}) == len(classes) == 7


@pytest.mark.parametrize("rows", [2, 100, 132, 133, 256, 1024, 4096, 8192, 16384, 32768, 65536])
def test_a_class_is_planned_for_about_as_many_rows(rows: int) -> None:
    program = optimize(capture(lambda x: x.float().sum(0), (meta(4096, 512),)).program)
    planned = representative_sizes(program, {"s0": rows}, H200)["s0"]
    assert rows / 2 <= planned <= max(4 * rows, H200.sms // 8)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_bounds_of_row_classes_increase(name: str) -> None:
    found = row_class_bounds(device(name))
    assert found[0] > 0 and all(a < b for a, b in pairwise(found))


def test_a_row_count_is_fixed_only_if_rows_are_read_again_after_a_reduction() -> None:
    again = optimize(capture(lambda x: torch.softmax(x, 0), (meta(64, 512),)).program)
    summed = optimize(capture(lambda x: (torch.softmax(x, 1), x.float().sum(0)), (meta(64, 512),)).program)
    assert specialize(again, {"s0": 64})[0].symbols == () and specialize(again, {"s0": 64})[1] == {}
    assert specialize(summed, {"s0": 64})[0] == summed and specialize(summed, {"s0": 64})[1] == {"s0": 64}


# ---- feedback from the compiler --------------------------------------------------------------------------------------------


def binary(registers: int = 64, spilled: int = 0, smem: int = 0, in_loop: bool = False) -> Binary:
    return Binary(registers, spilled, spilled // 2, smem, 0, {}, {}, in_loop)


def compiled_with(inputs: tuple[torch.Tensor, ...], fn: Callable[..., Any], measure: Callable[[Source], Binary]) -> Compiled:
    captured = capture(fn, inputs)
    return compile(plan(*specialize(optimize(captured.program), captured.bind(inputs) or {}), H200), measure)


NORMS = [
    (lambda x, w: torch.nn.functional.layer_norm(x, x.shape[-1:], w, w), (meta(4096, 5120), meta(5120))),
    (lambda x, w: (x.float().var(1), (x * w).float().sum(0)), (meta(4096, 768), meta(768))),
]


@pytest.mark.parametrize(("fn", "inputs"), NORMS)
@pytest.mark.parametrize("registers", [32, 255])
def test_if_everything_spills_the_least_spilling_plan_is_chosen(
    fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...], registers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spills(source: Source) -> int:
        return 64 + zlib.crc32(source.text.encode()) % 512

    totals: list[int] = []

    def written(chosen: Plan, wide: bool) -> tuple[Source, ...]:
        sources = generate(chosen, wide)
        totals.append(sum(map(spills, sources)))
        return sources

    monkeypatch.setattr(pipeline, "generate", written)
    made = compiled_with(inputs, fn, lambda source: binary(registers, spills(source)))
    assert sum(b.spill_bytes for b in made.binaries) == min(totals)
    assert len(totals) > 1 and made.rejected


def test_a_spill_in_a_loop_is_worse_than_a_larger_one_outside() -> None:
    fn, inputs = NORMS[0]
    seen: list[str] = []

    def measure(source: Source) -> Binary:
        seen.append(source.text)
        return binary(255, 512) if len(seen) == 1 else binary(255, 8, in_loop=True)

    assert [source.text for source in compiled_with(inputs, fn, measure).sources] == seen[:1]


def test_a_small_spill_with_registers_to_spare_rules_out_only_that_schedule() -> None:
    fn, inputs = NORMS[0]
    seen: list[int] = []

    def measure(source: Source) -> Binary:
        seen.append(0)
        return binary(72, 48) if len(seen) < 5 else binary()

    made = compiled_with(inputs, fn, measure)
    assert [b.spill_bytes for b in made.binaries] == [0] * len(made.binaries)
    assert len(made.rejected) == 4


def test_a_few_spilled_words_rule_out_only_that_schedule() -> None:
    """All registers and two words more: schedules that are estimated to be heavier may need fewer."""
    chosen, seen = workload("add_layer_norm_backward"), list[str]()

    def measure(source: Source) -> Binary:
        seen.extend([source.text] if "mix_order" in source.name else [])
        return binary(255, 16, in_loop=True) if len(seen) < 3 and "mix_order" in source.name else binary(168)

    made = compiled_with(chosen.inputs((16384, 5120)), chosen.function, measure)
    rejected = [r.schedule.cols for r in made.rejected]
    assert rejected == [Cover((1024,) * 5), Cover((2048, 2048, 1024))] and made.plan.kernels[0].schedule.cols == Cover((4096, 1024))


def test_ctas_of_a_row_loop_must_fit_with_their_actual_registers() -> None:
    """Rows are assigned in advance: CTAs that start after the others delay the kernel."""
    chosen, heavy = workload("rms_norm_backward"), set[str]()

    def measure(source: Source) -> Binary:
        if "mix_order" in source.name and len(heavy) < 2:
            heavy.add(source.text)
            return binary(255)
        return binary()

    made = compiled_with(chosen.inputs((98304, 512)), chosen.function, measure)
    assert [(r.registers, r.spill_bytes) for r in made.rejected] == [(255, 0)] * 2
    assert not {source.text for source in made.sources} & heavy


def test_among_plans_without_spills_one_whose_ctas_fit_is_chosen() -> None:
    """Regardless of which was tried first."""
    chosen = workload("rms_norm_backward")
    made = compiled_with(chosen.inputs((98304, 512)), chosen.function, lambda source: binary(255))
    assert made.rejected and feedback.defects(made) == (False, 0, False)


def test_a_kernel_with_half_the_predicted_occupancy_is_scored_again() -> None:
    chosen = workload("log_softmax")
    inputs, seen = chosen.inputs((8192, 32768)), list[str]()

    def measure(source: Source) -> Binary:
        seen.append(source.text)
        return binary(128 if len(seen) == 1 else 64)

    made = compiled_with(inputs, chosen.function, measure)
    assert [(r.registers, r.spill_bytes) for r in made.rejected] == [(128, 0)]
    assert len(seen) == 2 and [s.text for s in made.sources] == seen[1:]


def test_if_no_kernel_has_its_predicted_occupancy_the_best_is_chosen() -> None:
    chosen = workload("log_softmax")
    tried: list[str] = []

    def measure(source: Source) -> Binary:
        tried.append(source.text)
        return binary(128)

    made = compiled_with(chosen.inputs((8192, 32768)), chosen.function, measure)
    (kernel,) = made.plan.kernels
    assert feedback.defects(made) == (False, 0, False)
    assert made.rejected and kernel.schedule not in [r.schedule for r in made.rejected]
    assert len(tried) <= pipeline.MAX_ATTEMPTS and made.sources[0].text == tried[-1]


def test_unrelated_reductions_share_launches() -> None:
    """Fourteen variances do not fit into one kernel, and fourteen kernels would be fourteen launches."""
    inputs = tuple(meta(4096, 256) for _ in range(14))
    made = compiled_with(inputs, lambda *xs: tuple(r for x in xs for r in torch.var_mean(x.float(), 0)), lambda source: binary())
    main = [k for k in made.plan.kernels if "join" not in k.name]
    assert 1 < len(main) <= 5
    assert sum(sum(b.role == "input" for b in k.program.buffers) for k in main) == 14


def test_a_kernel_that_spills_rules_out_heavier_ones_of_its_family_alone() -> None:
    """Resident rows of 131072 are estimated to be lighter than a loop over them, which does not spill."""

    def measure(source: Source) -> Binary:
        return binary(64, 556) if '"""inner: ' in source.text else binary()

    made = compiled_with((meta(396, 131072),), lambda x: x.float().sum(-1), measure)
    assert not any(b.spill_bytes for b in made.binaries)


def test_a_kernel_that_does_not_fit_is_never_chosen() -> None:
    fn, inputs = NORMS[0]
    with pytest.raises(NoPlan):
        compiled_with(inputs, fn, lambda source: binary(smem=1 << 20))


# ---- little work -----------------------------------------------------------------------------------------------------------


def schedules_of(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Schedule]:
    case = workload(name)
    return [k.schedule for k in planned(case.function, *case.inputs(shape, dtype)).kernels]


def test_few_long_rows_are_read_without_a_pipeline_and_their_columns_by_two_warps() -> None:
    """H200, 16 x 65536: 7.0 us, where a pipeline and tiles in shared memory take 9.0."""
    sums, _, columns = schedules_of("rms_norm_backward", (16, 65536))
    assert sums.family == "inner split" and sums.stages == 1
    assert columns.family == "outer" and columns.warps == 2 and columns.rows == Loop(16)
    assert all(s.warps > 2 for s in schedules_of("outer_sum_1", (16, 65536), torch.float32)), "plain sums gain nothing by it"


@pytest.mark.parametrize("rows", [16, 256])
def test_few_rows_stay_in_registers(rows: int) -> None:
    """H200, 16 x 4096: 2.0 us; loading a row by TMA first would take 0.4 us more."""
    assert [s.family for s in schedules_of("softmax", (rows, 4096))] == ["inner"]


def test_a_sum_of_a_small_tensor_has_few_splits() -> None:
    """H200, fp32 4096 x 256: 3.9 us with 8 splits, 5.5 to 6.8 us with 264 to 528."""
    assert schedules_of("outer_sum_1", (4096, 256), torch.float32)[0].splits <= 33


# ---- what L2 evicts last ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "loads", "stores"),
    [
        ("softmax", (16384, 4096), False, True),
        ("softmax", (131072, 4096), True, True),  # much larger than L2
        ("rms_norm_backward", (8192, 8192), False, True),
        ("softmax", (1024, 65536), False, False),  # a row fills its SM
        ("rms_norm_fp8", (8192, 8192), False, False),  # results of one byte
        ("rms_norm_backward", (8192, 32768), False, False),  # rows staged one after another
        ("cross_entropy", (8192, 50264), False, False),  # writes nothing of full size
    ],
)
def test_which_workloads_evict_last(name: str, shape: tuple[int, ...], loads: bool, stores: bool) -> None:
    chosen = workload(name)
    made = planned(chosen.function, *chosen.inputs(shape))
    text = [line for source in generate(made) for line in source.text.splitlines() if "evict_last" in line]
    assert any("l.load(" in line for line in text) == loads
    assert any("l.store(" in line for line in text) == stores


def test_only_full_size_streams_are_evicted_last() -> None:
    made = planned(lambda x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w), meta(131072, 4096), meta(4096))
    (kernel,) = made.kernels
    assert {kernel.program.nodes[i].buffer for i in kernel.schedule.evict_last} == {"x", "out0"}  # type: ignore[union-attr]


# ---- the floor -------------------------------------------------------------------------------------------------------------


@given(distance=st.integers(-40, 40), walks=st.lists(st.tuples(st.integers(1, 12), st.integers(2, 6)), max_size=3))
def test_views_found_disjoint_share_no_element(distance: int, walks: list[tuple[int, int]]) -> None:
    steps = [range(0, stride * extent, stride) for stride, extent in walks]
    one = {sum(at) for at in itertools.product(*steps)}
    other = {distance + at for at in one}
    reached = footprint._can_reach(distance, sorted(walks, reverse=True), footprint.COMPARE_VIEWS.steps())
    assert reached or not one & other
    if len(one) == math.prod(len(s) for s in steps):  # no view overlaps itself
        nested = all(s >= sum(t * (n - 1) for t, n in walks if t < s) for s, _ in walks)
        assert not nested or reached == bool(one & other)


def test_the_floor_counts_two_halves_of_a_tensor_once_each() -> None:
    def halves(x: Tensor) -> Tensor:
        return (x[:, :64] * x[:, 64:]).sum(1)

    def overlapping(x: Tensor) -> Tensor:
        return (x[:, :64] * x[:, 32:96]).sum(1)

    x = torch.ones(1024, 128)
    assert floor_bytes(optimize(capture(halves, (x,), dynamic=False).program), {}) == 4 * 1024 * (128 + 1)
    assert floor_bytes(optimize(capture(overlapping, (x,), dynamic=False).program), {}) == 4 * 1024 * (64 + 1)


@pytest.mark.parametrize(
    ("extent", "one", "other", "elements"),
    [
        (4, "[n:2]", "[n:1] + 1", 4),
        (4, "[n:1] + 1", "[n:2]", 4),
        (2, "[n:1]", "[n:1] + 1", 2),
        (2, "[n:1]", "[n:1] + 2", 4),
        (4, "[n:2]", "[n:2] + 1", 8),
    ],
)
def test_the_floor_counts_no_element_twice(extent: int, one: str, other: str, elements: int) -> None:
    program = parse(
        f"program p; axis n = {extent}; input x: f32 [16] strides [1]; output y: f32 [{extent}] strides [1]; "
        f"%0 = load x {one}; %1 = load x {other}; %2 = add %0 %1; store y [n:1] = %2"
    )
    assert floor_bytes(program, {}) == 4 * (elements + extent)


@pytest.mark.parametrize("sms", [1, 2, 3])
def test_cards_of_very_few_sms_have_plans(sms: int) -> None:
    """Fewer SMs than CTAs per row, and fewer than any default assumes."""

    def scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * x.sum(-1, keepdim=True)
        return y, y.amax(0)

    whole = planned(scaled, meta(5, 16384))
    found = scores(whole.program, whole.bindings, replace(H200, sms=sms), {})
    assert isinstance(found, list) and all(math.isfinite(s.us) and s.plan.schedule.splits >= 1 for s in found)
