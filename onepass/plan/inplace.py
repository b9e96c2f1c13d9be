"""In-place analysis: which outputs of a plan may reuse the memory of an input.

This is safe if every element is read for the last time before it is written. Three conditions must hold in the kernel that
writes; earlier kernels have finished.

- The same CTA reads and writes each element. Load and store have the same address map, which names every axis of the kernel.
  So an element belongs to one point of the iteration space, and a point to one CTA, even if several CTAs share a row, because
  each owns distinct columns. Masked lanes touch no memory.
- The walk that writes an element is the last one that reads it. Pipelined loads and walks over a row ahead of its turn happen
  earlier still. What they load is not overwritten yet, because only an element's own tile writes it, once.
- No thread reads an element after another thread wrote it. If a tile has at least one element per thread, one thread reads
  each element, and its store depends on that read. Threads share the elements of a smaller tile, and the store depends on
  only one of the reads. Then a reduction that synchronizes all warps must lie between.

Pairs that cannot be proven safe this way are left out.
"""

from __future__ import annotations

from ..ir.program import Buffer, Load, Program, Store, Strides
from ..ir.size import Bindings, Size, mul, product, value
from .kernel import Across, Kernel
from .plan import KernelPlan, Plan
from .schedule import Block, Cover, Loop, Role, Schedule

WARP = 32  # threads


def safe_inplace_pairs(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Pairs (output, input) that may share memory when exactly this plan runs."""
    buffers = plan.program.buffers
    outputs, inputs = ([b for b in buffers if b.role == role] for role in ("output", "input"))
    return tuple(
        (out.name, taken.name)
        for out in outputs
        for taken in inputs
        if _alike(out, taken) and _may_take(plan, out.name, taken.name)
    )


def _alike(a: Buffer, b: Buffer) -> bool:
    """Whether two buffers cover the same bytes. Dense tensors may differ in shape if they have as many elements."""
    same = (a.shape, a.strides) == (b.shape, b.strides)
    return a.dtype == b.dtype and (same or product(list(a.shape)) == product(list(b.shape)) and _is_dense(a) and _is_dense(b))


def _is_dense(buffer: Buffer) -> bool:
    """Whether a buffer is contiguous, its last dimension fastest."""
    step: Size = 1
    for extent, stride in zip(reversed(buffer.shape), reversed(buffer.strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step = mul(step, extent)
    return True


def _may_take(plan: Plan, output: str, taken: str) -> bool:
    writers = [(k, i) for k, each in enumerate(plan.kernels) for i in _accesses(each.program, Store, output)]
    if len(writers) != 1 or any(_accesses(each.program, Load, output) for each in plan.kernels):
        return False
    at, store = writers[0]
    if any(_accesses(later.program, Load, taken) for later in plan.kernels[at + 1 :]):
        return False
    writer = plan.kernels[at]
    return all(
        _is_owned(writer, load, store, plan.bindings) and _is_read_in_time(writer, load, store)
        for load in _accesses(writer.program, Load, taken)
    )


def _accesses(program: Program, kind: type[Load] | type[Store], buffer: str) -> tuple[int, ...]:
    nodes = program.nodes
    return tuple(i for i in program.of(kind) if nodes[i].buffer == buffer)  # type: ignore[union-attr]


# ---- between CTAs ------------------------------------------------------------------------------------------------------------


def _is_owned(plan: KernelPlan, load: int, store: int, bindings: Bindings) -> bool:
    """Whether each address belongs to one point of the iteration space, the same for the load and the store."""
    kernel, program = plan.kernel, plan.program
    read, written = program.nodes[load], program.nodes[store]
    assert isinstance(read, Load) and isinstance(written, Store)
    if read.indexed or read.offset != written.offset or dict(read.strides) != dict(written.strides):
        return False
    space = kernel.space
    everything = {a for a in (*space.batch, *space.rows, *space.cols) if program.axis[a].extent != 1}
    named = {a for a, _ in read.strides}
    if not all(_has_own_lane(kernel, i) for i in (load, store)):
        return False
    return everything <= named and _is_one_to_one(program, read.strides, bindings)


def _has_own_lane(kernel: Kernel, i: int) -> bool:
    """Whether a value has a lane of its own for every column of a tile, and for every row if there are rows."""
    return kernel.by_col[i] is Across.FULL and (kernel.by_row[i] or not kernel.space.rows)


def _is_one_to_one(program: Program, strides: Strides, bindings: Bindings) -> bool:
    """Whether no two points have the same address."""
    reach = 0
    for stride, extent in sorted((value(s, bindings), value(program.axis[a].extent, bindings)) for a, s in strides):
        if extent > 1:
            if stride <= reach:
                return False
            reach += (extent - 1) * stride
    return True


# ---- between walks, and between threads --------------------------------------------------------------------------------------


def _is_read_in_time(plan: KernelPlan, load: int, store: int) -> bool:
    kernel, schedule = plan.kernel, plan.schedule
    if _is_after_the_rows(kernel, schedule, store):
        return False
    phases, last = kernel.use_phases(load), kernel.phase[store]
    if not phases or max(phases) > last:
        return False
    read_in = {min(phases)} if load in schedule.resident else phases
    one_reader = min(_areas(kernel, schedule)) >= WARP * schedule.warps
    return all(
        _is_awaited(kernel, load, store, phase) and (one_reader or phase < last and _meet_in_folds(kernel, schedule))
        for phase in read_in
    )


def _is_after_the_rows(kernel: Kernel, schedule: Schedule, store: int) -> bool:
    """Whether a store needs a result of the finished loop over rows, so that no walk of that loop writes it."""
    row_loop = isinstance(schedule.rows, Loop) and not isinstance(schedule.cols, Block)
    return row_loop and any(f.rows and store in _reached(kernel.program, f.node, through=True) for f in kernel.folds)


def _is_awaited(kernel: Kernel, load: int, store: int, phase: int) -> bool:
    """Whether a store depends on what one phase's walk loads. (A fold of a row depends on every element of the row.)"""
    program = kernel.program
    folded = {f.node for f in kernel.folds if not f.block}
    for i in _reached(program, load, through=False, but=frozenset(folded)):
        if i == store and kernel.phase[store] == phase:
            return True
        if i in folded and kernel.phase[i] == phase and store in _reached(program, i, through=True):
            return True
    return False


def _reached(program: Program, start: int, through: bool, but: frozenset[int] = frozenset()) -> set[int]:
    """All nodes computed from a value. With `through`, includes nodes past reductions; otherwise stops at those in `but`."""
    found: set[int] = set()
    todo = [start]
    while todo:
        at = todo.pop()
        if at != start and at in but and not through:
            continue
        for user in program.users[at]:
            if user not in found:
                found.add(user)
                todo.append(user)
    return found


def _meet_in_folds(kernel: Kernel, schedule: Schedule) -> bool:
    """Whether all warps take part in every row reduction, and so synchronize after reading its tiles.

    This holds for single-row tiles that span the whole CTA. The small tile of partial sectors at a row's ends is read before
    them.
    """
    rows = schedule.rows
    one_row = not kernel.space.rows or rows == Block(1) or isinstance(rows, Loop) and rows.step == 1
    return one_row and not isinstance(schedule.cols, Block) and min(_tiles(schedule.cols)) >= WARP * schedule.warps


def _areas(kernel: Kernel, schedule: Schedule) -> list[int]:
    """The number of elements of each kind of tile."""
    edges = [2 * schedule.sector_elems] if schedule.sector_elems else []  # partial sectors at a row's ends
    heights = _tiles(schedule.rows) if kernel.space.rows else [1]
    return [height * width for height in heights for width in (*_tiles(schedule.cols), *edges)]


def _tiles(role: Role) -> list[int]:
    match role:
        case Block(size):
            return [size]
        case Cover(tiles):
            return list(tiles)
        case Loop(step):
            return [step]
