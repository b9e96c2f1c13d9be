"""8-bit floats, and types without arithmetic in onepass: computed as in torch, or refused with a code, never a crash."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass import errors
from onepass.device import device
from onepass.integration.claim import ClaimOptions, claim
from onepass.pipeline import generate
from onepass.plan.legality import Family
from onepass.runtime import offline
from onepass.runtime.interpreter.builder import narrowed
from onepass.tools.check import as_tuple
from tests.support.correctness import randoms
from tests.support.forced_schedules import H200, assert_as_oracle, chosen, planned, program_of
from tests.support.staged_kernels import kernel_of, staged_schedule

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
A100 = device("a100")


def assert_same(actual: Any, eager: Any) -> None:
    """Check that every number is the same, and NaNs are in the same places."""
    for a, b in zip(as_tuple(actual), as_tuple(eager), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-6, atol=1e-7, equal_nan=True)


def numbers() -> Tensor:
    """Zeros, limits, midpoints between neighbors and values just beyond, at both ends of the range, and numbers of every size."""
    ends = [448, 449, 463.9, 464, 464.1, 479, 480, 500, 1e9, 57344, 61439, 61440, 61441, 65535, 65536, float("inf"), float("nan")]
    small = [0.0, 2**-9, 2**-10, 2**-10 * 1.001, 2**-11, 2**-16, 2**-17, 2**-17 * 1.001, 2**-18, 1e-30, 1.0625, 1.1875, 1.125]
    of_every_size = randoms(0, (1000,)) * torch.logspace(-6, 5, 1000)
    edges = torch.tensor([*ends, *small])
    return torch.cat([edges, -edges, of_every_size])


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's conversion. e4m3, which has no infinity, saturates at its largest number since 2.13; before, it overflowed to NaN."""
    x = x.float()
    return (x.clamp(-448, 448) if dtype is E4M3 else x).to(dtype)


MASKED: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.float().softmax(-1),
    "to its own type": lambda x: x.float().softmax(-1).to(x.dtype),
    "column sums": lambda x: (x.float().sum(0), x.float().amax(0)),
    "both sums": lambda x: (x.float().sum(0), x.float().sum(1)),
    "a copy": lambda x: x.clone(),
    "transposed": lambda x: x.t().contiguous(),
    "parts": lambda x: torch.cat([x, x], 1),
    "padded": lambda x: F.pad(x.float(), (1, 2)).to(x.dtype),
    "chosen": lambda x: torch.where(x.float() > 0, x, x.clone()),
    "compared": lambda x: x == x,
    "as truths": lambda x: x.to(torch.bool),
    "as integers": lambda x: x.to(torch.int32),
}


@FLOAT8
@pytest.mark.parametrize("name", MASKED)
def test_loads_and_stores_that_need_a_mask(name: str, dtype: torch.dtype) -> None:
    x = randoms(0, (5, 33)).to(dtype)
    assert_same(onepass.fuse(MASKED[name])(x), MASKED[name](x))


@FLOAT8
def test_masked_kernels_compile(dtype: torch.dtype) -> None:
    for name in ("softmax", "to its own type", "transposed"):
        report: Any = onepass.explain(MASKED[name], device="h200")(torch.empty(256, 33, dtype=dtype, device="meta"))
        assert "mask" in report.sources[0].text


@FLOAT8
def test_masked_loads_next_to_staged_rows(dtype: torch.dtype) -> None:
    def scaled(x: Tensor, y: Tensor) -> Tensor:
        return (x.float().softmax(-1) * y.float()).to(x.dtype)

    args = randoms(0, (3, 2056)).bfloat16(), randoms(1, (3, 2056)).to(dtype)
    kernel, _ = kernel_of(scaled, args)
    program, tensors, bindings = program_of(scaled, *args)
    plan = planned(program, bindings, chosen(program, bindings, Family.INNER, staged_schedule(kernel, warps=4, vectors=1)))
    assert_as_oracle(plan, tensors, bindings, "next to staged rows")
    (source,) = generate(plan)
    assert source.gluon and "mask=" in source.text and offline.compile(source, H200).spill_bytes == 0


@FLOAT8
@pytest.mark.parametrize("to", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool], ids=str)
def test_every_bit_pattern_is_decoded(dtype: torch.dtype, to: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    x = codes if to.is_floating_point or to is torch.bool else codes[codes.float().isfinite()]
    assert_same(onepass.fuse(lambda x: x.to(to))(x), x.to(to))


@FLOAT8
@pytest.mark.parametrize(
    "source",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool],
    ids=str,
)
def test_every_type_is_rounded_as_torch_does(source: torch.dtype, dtype: torch.dtype) -> None:
    x = numbers().to(source) if source.is_floating_point else torch.arange(-600, 600).to(source)
    assert_same(onepass.fuse(lambda x: x.to(dtype))(x), rounded(x, dtype))
    compiled: Any = onepass.explain(lambda x: x.to(dtype), device="h200")(torch.empty(512, 33, dtype=source, device="meta"))
    assert compiled.kernels


@FLOAT8
def test_the_interpreter_converts_as_the_hardware_does(dtype: torch.dtype) -> None:
    """cvt.rn.satfinite saturates at the largest number of either type, so a kernel must produce infinity itself."""
    codes = torch.from_numpy(narrowed(np.array([1e9, -np.inf, np.nan, 1.0], np.float32), dtype)).view(dtype)
    most = torch.finfo(dtype).max
    assert_same(codes.float(), torch.tensor([most, -most, float("nan"), 1.0]))


@FLOAT8
def test_constants(dtype: torch.dtype) -> None:
    values = (2.5, 0.0, 448.0, 1.0625, float("nan"), *([float("inf"), -float("inf")] if dtype is E5M2 else []))
    fn = lambda x: tuple(torch.full_like(x, v, dtype=dtype) for v in values)  # noqa: E731
    assert_same(onepass.fuse(fn)(torch.zeros(3, 5)), tuple(rounded(torch.full((3, 5), v), dtype) for v in values))


# ---- unsupported cards -------------------------------------------------------------------------------------------------------

NARROW: dict[str, tuple[Callable[[Tensor], Any], torch.dtype]] = {
    "from e4m3": (lambda x: x.float().sum(-1), E4M3),
    "to e4m3": (lambda x: x.to(E4M3), torch.float32),
    "a copy of e4m3": (lambda x: x.clone(), E4M3),
    "to e5m2": (lambda x: x.to(E5M2), torch.float32),
    "through e4m3": (lambda x: x.to(E4M3).float(), torch.float32),
    "constants": (lambda x: torch.zeros_like(x), E5M2),
}


@pytest.mark.parametrize("name", NARROW)
def test_cards_without_fp8_conversions_refuse_them(name: str) -> None:
    fn, dtype = NARROW[name]
    with pytest.raises(errors.UnsupportedOnDevice, match=r"ONEPASS-305.*float8.*8\.9"):
        onepass.explain(fn, device="a100")(torch.empty(64, 33, dtype=dtype, device="meta"))


@pytest.mark.parametrize("fn", [lambda x: x.float().softmax(-1), lambda x: x.t().contiguous()])
def test_reading_and_copying_e5m2_is_exact_on_any_card(fn: Callable[[Tensor], Tensor]) -> None:
    report: Any = onepass.explain(fn, device="a100")(torch.empty(64, 33, dtype=E5M2, device="meta"))
    assert report.kernels


def test_a_region_a_card_cannot_convert_stays_with_inductor_without_a_warning() -> None:
    from onepass.compat import fake_mode, trace_graph

    mode = fake_mode()
    with mode:
        x = torch.empty(64, 64)
    graph = trace_graph(lambda x: [x.softmax(-1).to(E4M3)], [x], mode).graph
    claimed = claim(graph, ClaimOptions(A100, interpret=True, by_cost=False))
    assert not claimed.regions and [(left.error, "ONEPASS-305" in left.reason) for left in claimed.declined] == [(None, True)]


OTHERS = (
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
)


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_other_types_are_refused_by_name(dtype: torch.dtype) -> None:
    x, y = torch.zeros(4, 4, dtype=dtype), torch.ones(4, 4)
    for fn, arg in (
        (lambda x: x, x),
        (lambda x: x.float().sum(-1), x),
        (lambda y: y.to(dtype), y),
        (lambda y: y.to(dtype).float().sum(-1), y),
        (lambda y: (y.sum(), torch.zeros(3, dtype=dtype)), y),
    ):
        with pytest.raises(errors.UnsupportedDtype, match=str(dtype)):
            onepass.fuse(fn)(arg)
        with pytest.raises(errors.UnsupportedDtype, match=str(dtype)):
            onepass.explain(fn)(arg.to("meta"))


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fnuz], ids=str)
def test_unsupported_types_in_a_model_stay_with_inductor_without_a_warning(dtype: torch.dtype) -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.float().softmax(-1), y.to(dtype).float().amax(-1), y.softmax(-1), y.sum(-1).to(dtype)

    x, y = torch.ones(64, 64).to(dtype), torch.rand(64, 64)
    compiled = torch.compile(model, backend=onepass.backend, options={"interpret": True, "rest": "eager", "by_cost": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.OnepassWarning)
        assert_same(compiled(x, y), model(x, y))
