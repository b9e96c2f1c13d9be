"""Memory access patterns: the strides of a load or store along each side of a kernel's iteration space."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.program import Load, Program, Store
from ..ir.size import Bindings, Size, mul, product, value
from .kernel import Kernel

PART = "part"  # name of the axis of partial results; its index is the CTA that wrote them


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent axes of one side that a tensor walks with a single stride: index // inner % size * stride."""

    inner: Size  # positions spanned by the axes after the run
    size: Size
    stride: Size
    first: bool  # no axis precedes the run, so no modulo is needed


def runs(program: Program, side: tuple[str, ...], strides: tuple[tuple[str, Size], ...]) -> tuple[Run, ...]:
    """Merge a side's axes into runs of one stride each. Runs of stride 0 are left out."""
    stride = dict(strides)
    groups: list[tuple[list[str], Size]] = []
    for axis in side:
        step = stride.get(axis, 0)
        if groups and groups[-1][1] == mul(step, program.axis[axis].extent):
            groups[-1] = ([*groups[-1][0], axis], step)
        else:
            groups.append(([axis], step))
    found = []
    for k, (axes, step) in enumerate(groups):
        after = [program.axis[a].extent for group, _ in groups[k + 1 :] for a in group]
        if step != 0:
            found.append(Run(product(after), program.extent(tuple(axes)), step, first=k == 0))
    return tuple(found)


def single_stride(program: Program, side: tuple[str, ...], strides: tuple[tuple[str, Size], ...]) -> Size | None:
    """A tensor's stride along a side; None if its address needs divisions."""
    found = runs(program, side, strides)
    if not found:
        return 0
    whole = len(found) == 1 and found[0].first and found[0].inner == 1
    return found[0].stride if whole else None


def contiguous_row_stride(kernel: Kernel, node: Load | Store) -> Size | None:
    """The distance between rows of a tensor with contiguous rows; None for other tensors."""
    if isinstance(node, Load) and node.indexed:
        return None
    if single_stride(kernel.program, kernel.space.cols, node.strides) != 1 or any(a in kernel.space.batch for a, _ in node.strides):
        return None
    step = single_stride(kernel.program, kernel.space.rows, node.strides)
    return None if step is None or step == 0 else step


def row_stride(kernel: Kernel, bindings: Bindings) -> Size | None:
    """The row stride of the tensors that move the most bytes along contiguous rows."""
    moved: dict[Size, int] = {}
    for i, node in enumerate(kernel.program.nodes):
        if isinstance(node, (Load, Store)) and kernel.is_full[i] and (step := contiguous_row_stride(kernel, node)) is not None:
            moved[step] = moved.get(step, 0) + kernel.program.buffer[node.buffer].dtype.size
    return max(moved, key=lambda step: (moved[step], value(step, bindings))) if moved else None


def needs_wide_index(program: Program, bindings: Bindings) -> bool:
    """Whether any element offset exceeds 32 bits. Counts masked lanes past the end too."""
    margin = 1 << 20
    for node in program.nodes:
        if isinstance(node, (Load, Store)):
            last = value(node.offset, bindings)
            for axis, stride in node.strides:
                last += (value(program.axis[axis].extent, bindings) - 1) * value(stride, bindings)
            for gather in node.indexed if isinstance(node, Load) else ():
                last += value(gather.extent, bindings) * value(gather.stride, bindings)
            if last + margin >= 2**31:
                return True
    return False
