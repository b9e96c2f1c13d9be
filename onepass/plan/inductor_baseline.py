"""What a Program would cost if it were left to Inductor: the yardstick a claim is held against.

Inductor computes reductions over the same axes in one kernel together with the arithmetic around them, and starts another
kernel for every other direction, which reads the full-size inputs again. The figures are of its kernels on an H200 (torch 2.11,
2026-11; single ops after a clean L2 flush, the last four lines also within training steps), and what is used is from the better
end of each range, so that a claim is not flattered:

    norms and softmax backward, rows up to 1024        1.02-1.05 times the floor
    the same, longer rows                              1.02-1.27; from 65536 columns on every phase reads again: 1.5
    mean and variance in one pass, longer rows         1.27-1.99
    softmax and cross-entropy forward, longer rows     2.27-3.0: two exponentials an element
    two directions in one kernel                       1.15, and 9-10 us more for each sum of partial results
    a sum over rows                                    two kernels, the second 5-10 us; what it sums is read again, if it
                                                       is an output of another kernel
    rows that do not start on 16 bytes                 1.7 times that (GPT-2, 50257 columns)

It is never taken to be faster than the plan at hand: what makes a kernel slow here (short runs, strided outputs, too few rows)
makes it slow there, and whatever Inductor does with a Program alone, planning has looked at. What it may do better is to compute
a Program together with its neighbours; that is charged to the claim apart from this.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Device
from ..ir.program import Load, Op, Program, Reduce, Store, operands
from ..ir.size import Bindings
from .footprint import buffer_bytes, floor_bytes

RESIDENT_COLS, REREAD_COLS = 1024, 32768  # columns up to which a row is held for certain, and beyond which it is read again
SHORT, LONG, MOMENTS, EXPONENTIALS, MIXED = 1.05, 1.1, 1.25, 2.2, 1.15  # times the floor
UNALIGNED = 1.6
START_US = 1.0  # us from launch to the first bytes and from the last to the end
SPLIT_KERNEL_US = 4.5  # us for the second of two kernels that a split reduction takes
FINAL_SUM_US = 9.0  # us for the sum of partial results of a mix-order kernel, a kernel of ATen's
MIX_ROWS, MIX_ELEMENTS, MIX_COLS = 4096, 5 << 20, 16384  # where two directions share a kernel
RESULTS_PER_SM = 64  # results an SM needs for a reduction not to be split into two kernels


@dataclass(frozen=True, slots=True)
class _Direction:
    """Reductions over the same axes."""

    axes: frozenset[str]
    folds: tuple[int, ...]


def inductor_us(program: Program, bindings: Bindings, device: Device, planned_us: float = 0.0) -> float:
    """Predicted time of a Program, as it was captured, under Inductor. `planned_us` is what its plan here would take."""
    directions = _directions(program, bindings)
    once = floor_bytes(program, bindings)
    reread = sum(_read(program, bindings, d.folds) for d in directions if _reads_again(program, bindings, d))
    slower = max((_slowdown(program, bindings, d) for d in directions), default=SHORT)
    slower *= UNALIGNED if _unaligned(program, bindings) else 1.0
    beside = [_bytes_in_own_kernel(program, bindings, d) for d in _separate_directions(program, bindings, directions)]
    splits = sum(_splits(program, bindings, d, device) for d in directions)
    kernels = slower * (once + reread + sum(beside)) / device.bandwidth + (device.launch + START_US) * len(beside) + SPLIT_KERNEL_US * splits
    least = START_US + 2 * device.latency  # a kernel that waits for its data once and for a reduction once
    apart = max(START_US + kernels, least)
    if len(directions) == 2 and _mixes(program, bindings, directions):
        outer = min(len(d.folds) for d in directions)
        apart = min(apart, START_US + MIXED * (once + reread) / device.bandwidth + FINAL_SUM_US * outer)
    return max(apart, planned_us)


def _separate_directions(program: Program, bindings: Bindings, directions: tuple[_Direction, ...]) -> tuple[_Direction, ...]:
    """Directions that get a kernel of their own: all but one, and that one too if it runs across rows and rows are written."""
    along = [d for d in directions if d.axes & _contiguous(program, bindings)]
    main = along[:1] or ([] if _writes_rows(program, bindings) else list(directions[:1]))
    return tuple(d for d in directions if d not in main)


def _contiguous(program: Program, bindings: Bindings) -> frozenset[str]:
    """The axes along which the largest inputs lie in memory."""
    found = [frozenset(a for a, s in n.strides if s == 1) for i, n in enumerate(program.nodes)
             if isinstance(n, Load) and 8 * program.points(program.dims[i], bindings) >= _largest(program, bindings)]
    return frozenset().union(*found)


def _unaligned(program: Program, bindings: Bindings) -> bool:
    """Whether some large input is read in rows that start anywhere."""
    large = (n for i, n in enumerate(program.nodes) if isinstance(n, Load)
             and 8 * program.points(program.dims[i], bindings) >= _largest(program, bindings))
    return any(isinstance(s, int) and s > 1 and s * program.buffer[n.buffer].dtype.size % 16 for n in large for _, s in n.strides)


def _largest(program: Program, bindings: Bindings) -> int:
    return max((program.points(program.dims[i], bindings) for i, n in enumerate(program.nodes) if isinstance(n, Load)), default=0)


def _writes_rows(program: Program, bindings: Bindings) -> bool:
    stores = (n for n in program.nodes if isinstance(n, Store))
    return any(8 * program.points(program.dims[n.value], bindings) >= _largest(program, bindings) for n in stores)


def _bytes_in_own_kernel(program: Program, bindings: Bindings, direction: _Direction) -> int:
    """Bytes a direction reads in a kernel of its own: an output that holds what it folds, or all that is computed from."""
    held = {_without_casts(program, n.value): n.buffer for n in program.nodes if isinstance(n, Store)}
    args = {_without_casts(program, a) for i in direction.folds for a in operands(program.nodes[i])}
    if args <= held.keys():
        moved = buffer_bytes(program, bindings)
        return sum(moved[held[a]] for a in args)
    return _read(program, bindings, direction.folds)


def _without_casts(program: Program, i: int) -> int:
    """A value without casts around it."""
    node = program.nodes[i]
    return _without_casts(program, node.args[0]) if isinstance(node, Op) and node.name == "cast" else i


def _directions(program: Program, bindings: Bindings) -> tuple[_Direction, ...]:
    """Reductions of full-size data by the axes they fold; small ones ride along with others."""
    sizes = {i: program.points(_data(program, n), bindings) for i, n in enumerate(program.nodes) if isinstance(n, Reduce)}
    largest = max(sizes.values(), default=0)
    found: dict[frozenset[str], list[int]] = {}
    for i, size in sizes.items():
        node = program.nodes[i]
        if isinstance(node, Reduce) and 8 * size >= largest:
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
    """Whether rows are too long to hold, and something full-size is computed once their results are known."""
    if program.points(direction.axes, bindings) <= REREAD_COLS:
        return False
    after = set(direction.folds)
    for i, node in enumerate(program.nodes):
        if any(o in after for o in operands(node)):
            after.add(i)
            if isinstance(node, Store) and direction.axes <= frozenset(a for a, _ in node.strides):
                return True
    return False


def _slowdown(program: Program, bindings: Bindings, direction: _Direction) -> float:
    if program.points(direction.axes, bindings) <= RESIDENT_COLS:
        return SHORT
    monoids = {n.monoid for i in direction.folds if isinstance(n := program.nodes[i], Reduce)}
    if "logsumexp" in monoids or "max" in monoids and "sum" in monoids:
        return EXPONENTIALS
    return LONG if monoids.isdisjoint(("welford", "moments")) else MOMENTS


def _splits(program: Program, bindings: Bindings, direction: _Direction, device: Device) -> bool:
    """Whether too few results are left to fill the card, so that a reduction takes two kernels."""
    node = program.nodes[direction.folds[0]]
    assert isinstance(node, Reduce)
    kept = _data(program, node) - direction.axes
    return program.points(kept, bindings) < RESULTS_PER_SM * device.sms and program.points(direction.axes, bindings) > RESIDENT_COLS


def _mixes(program: Program, bindings: Bindings, directions: tuple[_Direction, ...]) -> bool:
    """Whether Inductor's own gates let it fold both directions in one pass."""
    cols, rows = sorted(program.points(d.axes, bindings) for d in directions)
    return rows >= max(MIX_ROWS, 2 * cols) and cols <= MIX_COLS and rows * cols >= MIX_ELEMENTS
