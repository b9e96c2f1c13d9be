"""Splitting Programs: extract the sub-Program of one kernel, and split a reduction into partial states and their join."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.monoid import MONOIDS
from ..ir.program import Axis, Buffer, Builder, Load, Node, Program, Reduce, Result, Store, operands, prune, with_operands
from ..ir.size import Size, mul
from .access import PART
from .kernel import Kernel


def _layout(program: Program, axes: tuple[str, ...]) -> tuple[tuple[Size, ...], tuple[tuple[str, Size], ...]]:
    """Shape and strides of a new contiguous tensor over some axes."""
    shape = tuple(program.axis[a].extent for a in axes)
    strides: list[tuple[str, Size]] = []
    step: Size = 1
    for axis, extent in zip(reversed(axes), reversed(shape)):
        strides.append((axis, step))
        step = mul(step, extent)
    return shape, tuple(reversed(strides))


def temporary(program: Program, name: str, dtype_of: int, axes: tuple[str, ...]) -> tuple[Buffer, tuple[tuple[str, Size], ...]]:
    """A temporary buffer for the value at `dtype_of`, over some axes."""
    shape, strides = _layout(program, axes)
    return Buffer(name, program.dtypes[dtype_of], "temp", shape, tuple(s for _, s in strides)), strides


@dataclass(frozen=True, slots=True)
class Cut:
    """Extracts the sub-Programs of kernels. `order` is the order of axes in temporaries."""

    program: Program
    order: tuple[str, ...]

    def axes_of(self, i: int) -> tuple[str, ...]:
        dims = self.program.dims[i]
        return tuple(a for a in self.order if a in dims)

    def temp_name(self, result: Result) -> str:
        return f"r{result.reduce}_{result.k}"

    def extract(self, roots: frozenset[int], name: str) -> Program:
        """The sub-Program that computes `roots` (Reduces and Stores), reading other kernels' results from temporaries."""
        program, builder = self.program, Builder()
        new: dict[int, int] = {}
        temps: dict[str, Buffer] = {}

        def visit(root: int) -> int:
            waiting = [root]  # iterative, because chains can be longer than Python's recursion limit
            while waiting:
                i = waiting[-1]
                node = program.nodes[i]
                elsewhere = isinstance(node, Result) and node.reduce not in roots
                fresh = [] if elsewhere or i in new else [o for o in operands(node) if o not in new]
                if fresh:
                    waiting += reversed(fresh)
                    continue
                waiting.pop()
                if i in new:
                    continue
                if elsewhere:
                    assert isinstance(node, Result)
                    buffer, strides = temporary(program, self.temp_name(node), i, self.axes_of(i))
                    temps[buffer.name] = buffer
                    node = Load(buffer.name, strides, src=node.src)
                new[i] = builder.add(with_operands(node, new))
            return new[root]

        for i in sorted(roots):
            visit(i)
            if isinstance(program.nodes[i], Reduce):
                for user in program.users[i]:
                    if self._leaves(user, roots):
                        result = program.nodes[user]
                        assert isinstance(result, Result)
                        buffer, strides = temporary(program, self.temp_name(result), user, self.axes_of(user))
                        temps[buffer.name] = buffer
                        builder.add(Store(buffer.name, visit(user), strides, src=result.src))
        touched = {n.buffer for n in builder.nodes if isinstance(n, (Load, Store))}
        buffers = (*(b for b in program.buffers if b.name in touched), *temps.values())
        return prune(Program(name, program.axes, buffers, tuple(builder.nodes)))

    def _leaves(self, result: int, roots: frozenset[int]) -> bool:
        """Whether another kernel reads a reduction's result."""
        program = self.program
        todo, seen = list(program.users[result]), set()
        while todo:
            i = todo.pop()
            if i in seen:
                continue
            seen.add(i)
            node = program.nodes[i]
            if isinstance(node, (Reduce, Store)):
                if i not in roots:
                    return True
            else:
                todo.extend(program.users[i])
        return False


@dataclass(frozen=True, slots=True)
class Halves:
    """A split kernel: the Program of partial states, the Program that joins them, and where the first has the kernel's nodes."""

    first: Program
    join: Program
    moved: dict[int, int]  # from nodes of the kernel to nodes of `first`, for nodes that are there


def halves(kernel: Kernel, splits: int, order: tuple[str, ...]) -> Halves:
    """Split a kernel whose reductions several CTAs share into partial states and the Program that joins them and finishes.

    before: y = f(reduce sum(x) over m)
    after:  p[part] = reduce sum.partial(x) over m   |   y = f(reduce sum.merge(p) over part)
    """
    program = kernel.program
    split = {f.node for f in kernel.folds if not f.block and _is_split(kernel, f.node)}
    first, second = Builder(), Builder()
    new_first: dict[int, int] = {}
    new_second: dict[int, int] = {}
    temps: dict[str, Buffer] = {}
    part = Axis(PART, splits)
    widened = replace(program, axes=(*program.axes, part))
    after = _after(program, split)
    for i, node in enumerate(program.nodes):
        if i in split:
            assert isinstance(node, Reduce)
            args = tuple(new_first[a] for a in node.args)
            inside = first.add(Reduce(f"{node.monoid}.partial", args, node.axes, node.src))
            states = []
            for k, dtype in enumerate(MONOIDS[node.monoid].state_dtypes(program.dtypes[node.args[0]])):
                axes = (PART, *(a for a in order if a in program.dims[i]))
                shape, strides = _layout(widened, axes)
                buffer = Buffer(
                    f"partial{len(temps)}_{program.name.rpartition('_')[2]}", dtype, "temp", shape, tuple(s for _, s in strides)
                )
                temps[buffer.name] = buffer
                first.add(Store(buffer.name, first.add(Result(inside, k, node.src)), strides, src=node.src))
                states.append(second.add(Load(buffer.name, strides, src=node.src)))
            new_second[i] = second.add(Reduce(f"{node.monoid}.merge", tuple(states), (PART,), node.src))
        elif i in after:
            new_second[i] = second.add(with_operands(node, new_second))
        else:
            new_first[i] = first.add(with_operands(node, new_first))
            if not isinstance(node, Store):
                new_second[i] = second.add(with_operands(node, new_second)) if _portable(node, new_second) else -1
    partial = _program(program.name, widened, temps, first.nodes)
    kept = _kept(first.nodes, partial.nodes)
    moved = {i: kept[j] for i, j in new_first.items() if j in kept}
    return Halves(partial, _program(f"{program.name}_join", widened, temps, second.nodes), moved)


def _kept(nodes: list[Node], pruned: tuple[Node, ...]) -> dict[int, int]:
    """Where each node is after dead nodes were removed. The others keep their order, and no two nodes are equal."""
    new: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if all(o in new for o in operands(node)) and len(new) < len(pruned) and with_operands(node, new) == pruned[len(new)]:
            new[i] = len(new)
    return new


def _portable(node: Node, new: dict[int, int]) -> bool:
    return all(new.get(o, -1) >= 0 for o in operands(node))


def _is_split(kernel: Kernel, i: int) -> bool:
    fold = next(f for f in kernel.folds if f.node == i)
    over_rows = any(f.rows for f in kernel.folds)
    return fold.rows if over_rows else True


def _after(program: Program, roots: set[int]) -> set[int]:
    found: set[int] = set()
    for i, node in enumerate(program.nodes):
        if any(o in roots or o in found for o in operands(node)):
            found.add(i)
    return found


def _program(name: str, program: Program, temps: dict[str, Buffer], nodes: list[Node]) -> Program:
    touched = {n.buffer for n in nodes if isinstance(n, (Load, Store))}
    buffers = tuple(b for b in (*program.buffers, *temps.values()) if b.name in touched)
    pruned = prune(Program(name, program.axes, buffers, tuple(nodes)))
    still = {n.buffer for n in pruned.nodes if isinstance(n, (Load, Store))}
    return replace(pruned, buffers=tuple(b for b in pruned.buffers if b.name in still))
