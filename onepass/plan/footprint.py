"""The bytes a Program cannot help moving."""

from __future__ import annotations

from ..errors import PlanTooLong
from ..ir.budget import Budget, Steps
from ..ir.program import Load, Program
from ..ir.size import Bindings, product, value

# Steps for all views of a tensor; those not looked at when they are spent are taken to overlap. 100 halves of one tensor take 5000.
COMPARING = Budget("Comparing views of a tensor", PlanTooLong, most=16384)
MOST_TRIED = 8  # steps along one axis that might bring two views together; views that interleave like this are taken to overlap


def floor_bytes(program: Program, bindings: Bindings) -> int:
    """The fewest bytes a Program can move: every input once, every output once."""
    roles = {b.name: b.role for b in program.buffers}
    return sum(size for name, size in buffer_bytes(program, bindings).items() if roles[name] != "temp")


def buffer_bytes(program: Program, bindings: Bindings) -> dict[str, int]:
    """The bytes of every tensor that a Program touches: what it reads of inputs, all of outputs."""
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
    """Elements of one tensor that some loads read: the sum for views that have nothing in common, such as two halves; else the
    largest, so that nothing is counted twice."""
    counted: list[int] = []
    largest, steps = 0, COMPARING.steps()
    for i in loads:
        largest = max(largest, _points(program, bindings, i))
        if all(_apart(program, bindings, i, other, steps) for other in counted):
            counted.append(i)
    return max(largest, sum(_points(program, bindings, i) for i in counted))


def _points(program: Program, bindings: Bindings, load: int) -> int:
    node = program.nodes[load]
    assert isinstance(node, Load)
    return program.points(program.dims[load] if node.indexed else frozenset(a for a, _ in node.strides), bindings)


def _apart(program: Program, bindings: Bindings, one: int, other: int, steps: Steps) -> bool:
    """Have two loads of a tensor no element in common, for certain?"""
    a, b = program.nodes[one], program.nodes[other]
    assert isinstance(a, Load) and isinstance(b, Load)
    if a.indexed or b.indexed or dict(a.strides) != dict(b.strides):
        return False
    walks = sorted(((abs(value(s, bindings)), value(program.axis[axis].extent, bindings)) for axis, s in a.strides), reverse=True)
    return not _reaches(value(a.offset, bindings) - value(b.offset, bindings), [(s, n) for s, n in walks if s and n > 1],
                        steps)


def _reaches(distance: int, walks: list[tuple[int, int]], steps: Steps) -> bool:
    """Can steps along axes of (stride, extent), the longest stride first, make up a distance? True where that is hard to tell."""
    steps.note()
    if steps.spent:
        return True
    if not walks:
        return distance == 0
    (stride, extent), *rest = walks
    within = sum(s * (n - 1) for s, n in rest)  # what the other axes span
    first, last = max(1 - extent, -((within - distance) // stride)), min(extent - 1, (distance + within) // stride)
    return last - first >= MOST_TRIED or any(_reaches(distance - stride * k, rest, steps) for k in range(first, last + 1))
