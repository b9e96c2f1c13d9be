"""Inductor baseline: estimated time of a Program if Inductor compiled it, against which a claim is judged.

Inductor computes reductions over the same axes in one kernel, together with the arithmetic around them. It launches another
kernel for each other direction, which reads the full-size inputs again. The constants were
measured on its kernels (single ops after a clean L2 flush, some also within training steps). They are the better end of each range,
so that the estimate is optimistic and no claim is justified by an unfair baseline.

The estimate is never below the time of the plan at hand. What makes a kernel slow here (short runs, strided outputs, too few
rows) makes it slow in Inductor too, and planning has considered every grouping of a single Program that Inductor uses.
Inductor may gain by fusing a Program with its neighbors; that is charged to the claim separately.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..constants import SHIPPED
from ..device import Device
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Op, Program, Reduce, Store, operands
from ..ir.size import Bindings
from .footprint import buffer_bytes, floor_bytes

INDUCTOR = SHIPPED.inductor


@dataclass(frozen=True, slots=True)
class _Direction:
    """Reductions over the same axes."""

    axes: frozenset[str]
    folds: tuple[int, ...]


def inductor_us(program: Program, bindings: Bindings, device: Device, planned_us: float = 0.0) -> float:
    """Estimated time of a captured Program under Inductor. `planned_us`, the time of its plan here, is a lower bound."""
    directions = _directions(program, bindings)
    once = floor_bytes(program, bindings)
    reread = sum(_read(program, bindings, d.folds) for d in directions if _reads_again(program, bindings, d))
    slower = max((_slowdown(program, bindings, d) for d in directions), default=INDUCTOR.short)
    slower *= INDUCTOR.unaligned if _unaligned(program, bindings) else 1.0
    separate = [_bytes_in_own_kernel(program, bindings, d) for d in _separate_directions(program, bindings, directions)]
    splits = sum(_splits(program, bindings, d, device) for d in directions)
    kernels = slower * (once + reread + sum(separate)) / device.bandwidth
    kernels += (device.launch + INDUCTOR.start_us) * len(separate)
    kernels += INDUCTOR.split_kernel_us * splits
    least = INDUCTOR.start_us + 2 * device.latency  # one wait for the data and one for a reduction
    apart = max(INDUCTOR.start_us + kernels, least)
    if len(directions) == 2 and _mixes(program, bindings, directions):
        outer = min(len(d.folds) for d in directions)
        apart = min(apart, INDUCTOR.start_us + INDUCTOR.mixed * (once + reread) / device.bandwidth + INDUCTOR.final_sum_us * outer)
    return max(apart, planned_us)


def _separate_directions(program: Program, bindings: Bindings, directions: tuple[_Direction, ...]) -> tuple[_Direction, ...]:
    """Directions that get their own kernel: all but one. That one too if it crosses rows and the Program writes rows."""
    along = [d for d in directions if d.axes & _contiguous(program, bindings)]
    main = along[:1] or ([] if _writes_rows(program, bindings) else list(directions[:1]))
    return tuple(d for d in directions if d not in main)


def _contiguous(program: Program, bindings: Bindings) -> frozenset[str]:
    """The axes along which the largest inputs are contiguous."""
    found = [
        frozenset(a for a, s in n.strides if s == 1)
        for i, n in enumerate(program.nodes)
        if isinstance(n, Load) and INDUCTOR.large_ratio * program.points(program.dims[i], bindings) >= _largest(program, bindings)
    ]
    return frozenset().union(*found)


def _unaligned(program: Program, bindings: Bindings) -> bool:
    """Whether a large input has rows that are not aligned to 16 bytes."""
    large = (
        n
        for i, n in enumerate(program.nodes)
        if isinstance(n, Load) and INDUCTOR.large_ratio * program.points(program.dims[i], bindings) >= _largest(program, bindings)
    )
    return any(isinstance(s, int) and s > 1 and s * program.buffer[n.buffer].dtype.size % 16 for n in large for _, s in n.strides)


def _largest(program: Program, bindings: Bindings) -> int:
    return max((program.points(program.dims[i], bindings) for i, n in enumerate(program.nodes) if isinstance(n, Load)), default=0)


def _writes_rows(program: Program, bindings: Bindings) -> bool:
    stores = (n for n in program.nodes if isinstance(n, Store))
    return any(
        INDUCTOR.large_ratio * program.points(program.dims[n.value], bindings) >= _largest(program, bindings) for n in stores
    )


def _bytes_in_own_kernel(program: Program, bindings: Bindings, direction: _Direction) -> int:
    """Bytes a direction reads in its own kernel: stored outputs that hold its inputs, or else all original inputs."""
    held = {_without_casts(program, n.value): n.buffer for n in program.nodes if isinstance(n, Store)}
    args = {_without_casts(program, a) for i in direction.folds for a in operands(program.nodes[i])}
    if args <= held.keys():
        moved = buffer_bytes(program, bindings)
        return sum(moved[held[a]] for a in args)
    return _read(program, bindings, direction.folds)


def _without_casts(program: Program, i: int) -> int:
    """The value under any casts."""
    node = program.nodes[i]
    return _without_casts(program, node.args[0]) if isinstance(node, Op) and node.name == "cast" else i


def _directions(program: Program, bindings: Bindings) -> tuple[_Direction, ...]:
    """Reductions of full-size data, grouped by the axes they fold. Small reductions are fused into others."""
    sizes = {i: program.points(_data(program, n), bindings) for i, n in enumerate(program.nodes) if isinstance(n, Reduce)}
    largest = max(sizes.values(), default=0)
    found: dict[frozenset[str], list[int]] = {}
    for i, size in sizes.items():
        node = program.nodes[i]
        if isinstance(node, Reduce) and INDUCTOR.large_ratio * size >= largest:
            found.setdefault(frozenset(node.axes), []).append(i)
    return tuple(_Direction(axes, tuple(folds)) for axes, folds in found.items())


def _data(program: Program, node: Reduce) -> frozenset[str]:
    return frozenset(node.axes).union(*(program.dims[a] for a in node.args))


def _read(program: Program, bindings: Bindings, folds: tuple[int, ...]) -> int:
    """Bytes of the inputs that some reductions are computed from."""
    waiting, seen, read = [*folds], set(folds), set[str]()
    while waiting:
        node = program.nodes[waiting.pop()]
        if isinstance(node, Load):
            read.add(node.buffer)
        fresh = [o for o in operands(node) if o not in seen and not isinstance(program.nodes[o], Reduce)]
        seen.update(fresh)
        waiting += fresh
    moved = buffer_bytes(program, bindings)
    return sum(moved[name] for name in read)


def _reads_again(program: Program, bindings: Bindings, direction: _Direction) -> bool:
    """Whether rows are too long to stay on chip and a full-size value depends on the reduction's result."""
    if program.points(direction.axes, bindings) <= INDUCTOR.reread_cols:
        return False
    after = set(direction.folds)
    for i, node in enumerate(program.nodes):
        if any(o in after for o in operands(node)):
            after.add(i)
            if isinstance(node, Store) and direction.axes <= frozenset(a for a, _ in node.strides):
                return True
    return False


def _slowdown(program: Program, bindings: Bindings, direction: _Direction) -> float:
    if program.points(direction.axes, bindings) <= INDUCTOR.resident_cols:
        return INDUCTOR.short
    monoids = [MONOIDS[n.monoid] for i in direction.folds if isinstance(n := program.nodes[i], Reduce)]
    folds = {m.fold for m in monoids}
    if any(m.mufu for m in monoids) or {"max", "sum"} <= folds:
        return INDUCTOR.exponentials
    return INDUCTOR.moments if any(m.tracks_count for m in monoids) else INDUCTOR.long


def _splits(program: Program, bindings: Bindings, direction: _Direction, device: Device) -> bool:
    """Whether there are too few results to fill the GPU, so that the reduction takes two kernels."""
    node = program.nodes[direction.folds[0]]
    assert isinstance(node, Reduce)
    kept = _data(program, node) - direction.axes
    few = program.points(kept, bindings) < INDUCTOR.results_per_sm * device.sms
    return few and program.points(direction.axes, bindings) > INDUCTOR.resident_cols


def _mixes(program: Program, bindings: Bindings, directions: tuple[_Direction, ...]) -> bool:
    """Whether Inductor's own heuristics allow both directions in one pass."""
    cols, rows = sorted(program.points(d.axes, bindings) for d in directions)
    return (
        rows >= max(INDUCTOR.mix_rows, INDUCTOR.mix_rows_per_col * cols)
        and cols <= INDUCTOR.mix_cols
        and rows * cols >= INDUCTOR.mix_elements
    )
