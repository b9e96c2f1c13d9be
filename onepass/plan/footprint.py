"""The bytes a Program must move: every input once, every output once."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import PlanTooLong
from ..ir.budget import Budget, Steps
from ..ir.program import Load, Program
from ..ir.size import Bindings, product, value

# Comparison steps for all views of one tensor. When they run out, the remaining views are assumed to overlap. 100 halves of
# one tensor take 5000 steps.
COMPARE_VIEWS = Budget("Comparing views of a tensor", PlanTooLong, base=16384)
MAX_STEPS_TRIED = 8  # steps tried along one axis; views that interleave more finely are assumed to overlap


class Footprint(NamedTuple):
    """The fewest bytes a Program can move: every input once, every output once."""

    read: int
    written: int

    @property
    def bytes(self) -> int:
        """Both together."""
        return self.read + self.written


def footprint(program: Program, bindings: Bindings) -> Footprint:
    """The fewest bytes a Program can move."""
    roles = {b.name: b.role for b in program.buffers}
    moved = buffer_bytes(program, bindings)
    read, written = (sum(size for name, size in moved.items() if roles[name] == role) for role in ("input", "output"))
    return Footprint(read, written)


def floor_bytes(program: Program, bindings: Bindings) -> int:
    """The fewest bytes a Program can move, in and out."""
    return footprint(program, bindings).bytes


def buffer_bytes(program: Program, bindings: Bindings) -> dict[str, int]:
    """Bytes moved per tensor: the elements read of each input, and all of each output."""
    loads: dict[str, list[int]] = {name: [] for name in program.buffer}
    for i, node in enumerate(program.nodes):
        if isinstance(node, Load):
            loads[node.buffer].append(i)
    moved = {name: program.buffer[name].dtype.size * _elements_read(program, bindings, found) for name, found in loads.items()}
    for buffer in program.buffers:
        if buffer.role == "output":
            moved[buffer.name] = value(product(list(buffer.shape)), bindings) * buffer.dtype.size
    return moved


def _elements_read(program: Program, bindings: Bindings, loads: list[int]) -> int:
    """Elements of one tensor that a set of loads reads.

    Disjoint views, such as two halves, add up. For overlapping views the largest counts, so that no element is counted twice.
    """
    counted: list[int] = []
    largest, steps = 0, COMPARE_VIEWS.steps()
    for i in loads:
        largest = max(largest, _points(program, bindings, i))
        if all(_are_disjoint(program, bindings, i, other, steps) for other in counted):
            counted.append(i)
    return max(largest, sum(_points(program, bindings, i) for i in counted))


def _points(program: Program, bindings: Bindings, load: int) -> int:
    node = program.nodes[load]
    assert isinstance(node, Load)
    return program.points(program.dims[load] if node.indexed else frozenset(a for a, _ in node.strides), bindings)


def _are_disjoint(program: Program, bindings: Bindings, one: int, other: int, steps: Steps) -> bool:
    """Whether two loads of a tensor provably have no element in common."""
    a, b = program.nodes[one], program.nodes[other]
    assert isinstance(a, Load) and isinstance(b, Load)
    if a.indexed or b.indexed or dict(a.strides) != dict(b.strides):
        return False
    walks = sorted(((abs(value(s, bindings)), value(program.axis[axis].extent, bindings)) for axis, s in a.strides), reverse=True)
    return not _can_reach(value(a.offset, bindings) - value(b.offset, bindings), [(s, n) for s, n in walks if s and n > 1], steps)


def _can_reach(distance: int, walks: list[tuple[int, int]], steps: Steps) -> bool:
    """Whether steps along axes of (stride, extent), longest stride first, can add up to a distance. True if undecided."""
    steps.count()
    if steps.exhausted:
        return True
    if not walks:
        return distance == 0
    (stride, extent), *rest = walks
    within = sum(s * (n - 1) for s, n in rest)  # distance spanned by the remaining axes
    first, last = max(1 - extent, -((within - distance) // stride)), min(extent - 1, (distance + within) // stride)
    return last - first >= MAX_STEPS_TRIED or any(_can_reach(distance - stride * k, rest, steps) for k in range(first, last + 1))
