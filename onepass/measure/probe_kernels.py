"""Kernels that `onepass calibrate` times, each bound by one resource. Imports triton, so only probes.py imports this module."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tiles", "passes"])
def walk(data: tl.tensor, sums: tl.tensor, tiles: tl.tensor, passes: tl.tensor, HEIGHT: tl.constexpr, WIDTH: tl.constexpr) -> None:
    """Read float32 tiles of HEIGHT x WIDTH, `passes` times, with at most HEIGHT loads per thread in flight.

    Loads bypass L1. In every pass a different program reads a given tile, so that no cache near an SM can serve it.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    inside = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((WIDTH,), tl.float32)
    for turn in range(passes):
        for tile in range((program + turn * 37) % programs, tiles, programs):
            total += tl.sum(tl.load(data + tile * (HEIGHT * WIDTH) + inside, cache_modifier=".cg"), 0)
    tl.store(sums + program, tl.sum(total, 0))


@triton.jit
def touch(sums: tl.tensor) -> None:
    """A minimal kernel: one store per program."""
    tl.store(sums + tl.program_id(0), 0.0)


@triton.jit
def fill(partials: tl.tensor, columns: tl.tensor, WIDTH: tl.constexpr) -> None:
    """Write one partial row per program."""
    row = partials + tl.program_id(0) * columns
    for start in range(0, columns, WIDTH):
        tl.store(row + start + tl.arange(0, WIDTH), tl.full((WIDTH,), 1.0, tl.float32))


@triton.jit
def join(
    partials: tl.tensor, results: tl.tensor, rows: tl.tensor, columns: tl.tensor, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    """Sum partial rows in a fixed order, WIDTH columns per program."""
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in range(0, rows, HEIGHT):
        row = start + tl.arange(0, HEIGHT)
        total += tl.load(partials + row[:, None] * columns + cols[None, :], mask=(row < rows)[:, None], other=0.0)
    tl.store(results + cols, tl.sum(total, 0))


@triton.jit
def ticks(found: tl.tensor, turns: tl.tensor) -> None:
    """Measure the clock cycles and nanoseconds of a chain of `turns` dependent operations.

    The chain depends on the first clock reading and the second reading depends on its result, so the compiler cannot move them.
    """
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    began = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    x = ((cycles + began) % 7).to(tl.float32)
    for _ in range(turns):
        x = x * 0.999 + 0.001
    last = x.to(tl.int64)
    cycles_then = tl.inline_asm_elementwise(
        "{ .reg .u64 t; mov.u64 t, $1; mov.u64 $0, %clock64; }", "=l,l", [last], dtype=tl.int64, is_pure=False, pack=1
    )
    ended = tl.inline_asm_elementwise(
        "{ .reg .u64 t; mov.u64 t, $1; mov.u64 $0, %globaltimer; }", "=l,l", [last], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(found, cycles_then - cycles)
    tl.store(found + 1, ended - began)
    tl.store(found + 2, last)
