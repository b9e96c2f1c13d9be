"""A region's Program, as the text its op takes, with tensors to call the op on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.integration.region_spec import RegionSpec, encode
from onepass.integration.settings import CallSettings
from onepass.ir.text import parse
from onepass.pipeline import optimize

ROWS = """program rows
  axis m = s0
  axis n = 24
  input in0: bf16 [s0, 24] strides [24, 1]
  input in1: f32 [24] strides [1]
  output out0: bf16 [s0, 24] strides [24, 1]
  output out1: f32 [s0] strides [1]
  %0 = load in0 [m:24, n:1]
  %1 = cast f32 %0
  %2 = mul %1 %1
  %3 = reduce sum(%2) over n
  %4 = result %3.0
  %5 = const 1.0 : f32
  %6 = add %4 %5
  %7 = rsqrt %6
  %8 = load in1 [n:1]
  %9 = mul %1 %7
  %10 = mul %9 %8
  %11 = cast bf16 %10
  store out0 [m:24, n:1] = %11
  store out1 [m:1] = %7
"""


def region(name: str, program: str = ROWS, lines: tuple[str, ...] = (), **settings: Any) -> str:
    """The text of a region, as a graph carries it."""
    captured = parse(program)
    return encode(RegionSpec(name, captured, optimize(captured), lines, CallSettings(**settings)))


def inputs(rows: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 24, generator=generator).bfloat16(), torch.randn(24, generator=generator)]


def outputs(rows: int) -> list[Tensor]:
    return [torch.empty(rows, 24, dtype=torch.bfloat16), torch.empty(rows)]


def expected(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.float().square().sum(-1) + 1).rsqrt()
    return (x.float() * scale[:, None] * w).bfloat16(), scale


def assert_filled(outs: list[Tensor], ins: list[Tensor]) -> None:
    for actual, wanted in zip(outs, expected(*ins), strict=True):
        torch.testing.assert_close(actual, wanted)
