"""Promises of plans, checked by compiling for sm_90: one pass, no spills, rows resident in 16 bits, peeled unaligned rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass.capture.function.trace import capture
from onepass.codegen.source import Source
from onepass.device import DEVICES, Device, device
from onepass.errors import NoPlan
from onepass.ir.program import Load
from onepass.pipeline import compile, optimize
from onepass.plan.legality import Reason
from onepass.plan.partition import plan
from onepass.runtime import offline
from onepass.runtime.binary import Binary
from onepass.runtime.compiled import Compiled
from onepass.tools.workloads import workload
from tests.support.kernel_changes import assigned, first_changed

H200 = device("h200")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def compiled(fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...], on: Device = H200) -> Compiled:
    captured = capture(fn, inputs)
    bindings = captured.bind(inputs)
    assert bindings is not None
    return compile(plan(optimize(captured.program), bindings, on), lambda source: offline.compile(source, on))


def of_workload(name: str, shape: tuple[int, ...] | None = None) -> Compiled:
    chosen = workload(name)
    return compiled(chosen.function, chosen.inputs(shape))


@pytest.mark.parametrize("shape", [(4096, 8192), (8192, 8192), (16384, 16384), (2048, 8192), (98304, 512)], ids=str)
def test_rms_norm_backward_reads_its_data_once(shape: tuple[int, int]) -> None:
    chosen = workload("rms_norm_backward")
    report = onepass.explain(chosen.function, device="h200")(*chosen.inputs(shape)).to_json()
    main, join = report["kernels"]
    full = [load for load in main["loads"] if load.split()[0] in ("x", "dy")]
    assert sorted(load.split()[0] for load in full) == ["dy", "x"]
    assert all("once" in load for load in full)
    assert not any(load.split()[0] in ("x", "dy") for load in join["loads"])
    assert sum(k["dram_bytes"] for k in report["kernels"]) <= 1.06 * report["floor_bytes"]
    assert [k["spill_bytes"] for k in report["kernels"]] == [0, 0]


@pytest.mark.parametrize("k", range(1, 17))
def test_absorbing_residuals_never_spills(k: int) -> None:
    made = of_workload(f"rms_norm_backward_{k}")
    assert [b.spill_bytes for b in made.binaries] == [0] * len(made.binaries)
    assert made.plan.dram_bytes <= 1.5 * made.plan.floor_bytes


def test_block_backward_never_spills() -> None:
    made = of_workload("block_backward")
    assert [b.spill_bytes for b in made.binaries] == [0] * len(made.binaries)


@pytest.mark.parametrize("name", ["rms_norm_backward_16", "block_backward", "softmax_dim0", "layer_norm_backward"])
def test_refusals_by_cost_carry_both_costs(name: str) -> None:
    by_cost = [r for r in of_workload(name).plan.refusals if r.reason is Reason.SLOWER]
    assert by_cost
    for refusal in by_cost:
        assert refusal.cost_fused_us is not None and refusal.cost_apart_us is not None
        assert refusal.cost_fused_us >= 0.98 * refusal.cost_apart_us
        assert refusal.detail


@pytest.mark.parametrize(("name", "cols"), [("layer_norm_backward", 12288), ("add_rms_norm_backward", 16384)])
def test_rows_that_barely_fit_stay_in_registers(name: str, cols: int) -> None:
    """The estimated registers are about what 16 warps have or, for the first, slightly more; the compiler makes them fit."""
    made = of_workload(name, (8192, cols))
    kernel, binary = made.plan.kernels[0], made.binaries[0]
    assert kernel.family == "mix-order" and kernel.schedule.warps == 16 and kernel.resources.registers >= 112
    assert binary.registers <= 128 and binary.spill_bytes == 0


@pytest.mark.parametrize("cols", [8192, 16384, 32768])
def test_rms_norm_holds_its_row_in_16_bits(cols: int) -> None:
    made = compiled(lambda x, w: F.rms_norm(x, (x.shape[-1],), w), (meta(8192, cols), meta(cols)))
    (kernel,), (binary,) = made.plan.kernels, made.binaries
    assert kernel.family == "inner" and kernel.schedule.resident
    assert binary.registers <= 64 and binary.spill_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_resident_rows_need_the_opaque_zero(dtype: torch.dtype) -> None:
    """With a constant zero, the compiler keeps fp32 copies."""
    made = compiled(lambda x, w: F.rms_norm(x, (x.shape[-1],), w), (meta(8192, 32768, dtype=dtype), meta(32768, dtype=dtype)))
    (known,) = first_changed(made.plan, assigned("zero1", "tl.full([], 0, tl.int32)"))
    assert offline.compile(known, device("h200")).registers >= made.binaries[0].registers + 32


@pytest.mark.parametrize("shape", [(32768, 50257), (32768, 1027)], ids=str)
def test_unaligned_rows_are_read_with_whole_vectors(shape: tuple[int, int]) -> None:
    made = compiled(lambda x: torch.softmax(x, -1), (meta(*shape),), on=device("a100"))  # without TMA
    loads = [line for source in made.sources for line in source.text.splitlines() if "tl.load(x_ptr" in line]
    unmasked = [line for line in loads if "mask=" not in line]
    assert unmasked and len(unmasked) >= len(loads) // 3  # of a pass: the partial sectors, whole tiles, and the tail
    assert all("sector + pos" in line for line in unmasked)
    assert sum(binary.wide_loads for binary in made.binaries) >= len(unmasked)


def test_covers_are_not_padded_to_a_power_of_two() -> None:
    made = compiled(lambda x, w, b: F.layer_norm(x, (5120,), w, b), (meta(16384, 5120), meta(5120), meta(5120)))
    (kernel,) = made.plan.kernels
    assert kernel.schedule.cols.width == 5120  # type: ignore[union-attr]


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_listed_device_gets_kernels(name: str) -> None:
    chosen = workload("rms_norm_backward")
    made = compiled(chosen.function, chosen.inputs((8192, 4096)), on=device(name))
    assert all(b.registers > 0 and b.spill_bytes == 0 for b in made.binaries)


def test_a_spilling_plan_is_rejected_and_shown() -> None:
    """The compiler's result reaches the planner: the plan after a rejection avoids the rejected schedule."""
    chosen = workload("rms_norm_backward")
    inputs = chosen.inputs((8192, 8192))
    captured = capture(chosen.function, inputs)
    spilled: list[str] = []

    def pretend(source: Source) -> Binary:  # the first plan's main kernel "spills"
        binary = offline.compile(source, H200)
        if not spilled and "mix_order" in source.name:
            spilled.append(source.text)
            return type(binary)(**{**{f: getattr(binary, f) for f in binary.__slots__}, "spill_bytes": 64})
        return binary

    made = compile(plan(optimize(captured.program), captured.bind(inputs) or {}, H200), pretend)
    assert [r.spill_bytes for r in made.rejected] == [64]
    assert made.rejected[0].schedule != made.plan.kernels[0].schedule
    assert all(source.text != spilled[0] for source in made.sources)


def test_a_plan_that_does_not_fit_is_not_chosen_even_if_all_others_spill() -> None:
    captured = capture(lambda x: x.softmax(-1), (torch.zeros(64, 1024),))
    seen: list[str] = []

    def pretend(source: Source) -> Binary:
        seen.append(source.text)
        fits = source.text != seen[0]
        return Binary(32, 64 * fits, 0, 1024 if fits else H200.smem_per_cta + 1, 0, {}, {})

    made = compile(plan(optimize(captured.program), {"s0": 64}, H200), pretend)
    assert all(b.smem_bytes <= H200.smem_per_cta for b in made.binaries)
    assert [r.smem_bytes > H200.smem_per_cta for r in made.rejected].count(True) == 1

    def never_fits(source: Source) -> Binary:
        return Binary(32, 0, 0, H200.smem_per_cta + 1, 0, {}, {})

    with pytest.raises(NoPlan, match="more shared memory than a CTA can have"):
        compile(plan(optimize(captured.program), {"s0": 64}, H200), never_fits)


def test_every_input_is_loaded_by_some_kernel() -> None:
    made = of_workload("three_norms_shared_weight_backward")
    read = {n.buffer for k in made.plan.kernels for n in k.program.nodes if isinstance(n, Load)}
    assert {b.name for b in made.plan.program.buffers if b.role == "input"} <= read
