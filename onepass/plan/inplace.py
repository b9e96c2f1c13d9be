"""Which outputs of a plan may take the memory of an input: every element is read for the last time before it is written.

Three things must hold in the kernel that writes, for every element of the shared memory; kernels before it have ended.

- One CTA reads it, and the same CTA writes it: load and store have one address map, which names every axis of the kernel, so
  that an element belongs to one point of the space, and a point to one CTA, also where several share a row: each has columns of
  its own. Lanes outside the data touch no memory.
- The walk that writes it is the last that reads it. Loads that a pipeline issues early, and walks over a row before its turn, are
  earlier still, and what they fetch has not been written, because an element is written once, by its own tile.
- Of the CTA's threads, none reads it after another has written it. Where a tile has an element for every thread, one thread
  reads each, and the store waits for that thread because what is stored is computed from what was read. A smaller tile is
  read by several threads, and the store waits for one of them; there a fold in which all warps meet has to lie between.

What cannot be shown this way is left out, right or wrong.
"""

from __future__ import annotations

from ..ir.program import Buffer, Load, Program, Store, Strides
from ..ir.size import Bindings, Size, mul, product, value
from .kernel import Across, Kernel
from .plan import KernelPlan, Plan
from .schedule import Block, Cover, Loop, Role, Schedule

WARP = 32  # threads


def safe_inplace_pairs(plan: Plan) -> tuple[tuple[str, str], ...]:
    """(output, input): those that may be one piece of memory when this very plan runs."""
    buffers = plan.program.buffers
    outputs, inputs = ([b for b in buffers if b.role == role] for role in ("output", "input"))
    return tuple((out.name, taken.name) for out in outputs for taken in inputs
                 if _alike(out, taken) and _may_take(plan, out.name, taken.name))


def _alike(a: Buffer, b: Buffer) -> bool:
    """Are these the same bytes? A tensor without gaps may have other dims than another with as many elements."""
    same = (a.shape, a.strides) == (b.shape, b.strides)
    return a.dtype == b.dtype and (same or product(list(a.shape)) == product(list(b.shape)) and _is_dense(a) and _is_dense(b))


def _is_dense(buffer: Buffer) -> bool:
    """Do elements follow each other without gaps, the last dim fastest?"""
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
    if any(_accesses(later.program, Load, taken) for later in plan.kernels[at + 1:]):
        return False
    writer = plan.kernels[at]
    return all(_is_owned(writer, load, store, plan.bindings) and _is_read_in_time(writer, load, store)
               for load in _accesses(writer.program, Load, taken))


def _accesses(program: Program, kind: type[Load] | type[Store], buffer: str) -> tuple[int, ...]:
    nodes = program.nodes
    return tuple(i for i in program.of(kind) if nodes[i].buffer == buffer)  # type: ignore[union-attr]


# ---- between CTAs ------------------------------------------------------------------------------------------------------------


def _is_owned(plan: KernelPlan, load: int, store: int, bindings: Bindings) -> bool:
    """Does each address belong to one point of the kernel's space, for the load and for the store alike?"""
    kernel, program = plan.kernel, plan.program
    read, written = program.nodes[load], program.nodes[store]
    assert isinstance(read, Load) and isinstance(written, Store)
    if read.indexed or read.offset != written.offset or dict(read.strides) != dict(written.strides):
        return False
    space = kernel.space
    everything = {a for a in (*space.batch, *space.rows, *space.cols) if program.axis[a].extent != 1}
    named = {a for a, _ in read.strides}
    return everything <= named and all(_has_own_lane(kernel, i) for i in (load, store)) and _is_one_to_one(program, read.strides, bindings)


def _has_own_lane(kernel: Kernel, i: int) -> bool:
    """Has a value its own lane for every column of a tile, and for every row where there are any?"""
    return kernel.by_col[i] is Across.FULL and (kernel.by_row[i] or not kernel.space.rows)


def _is_one_to_one(program: Program, strides: Strides, bindings: Bindings) -> bool:
    """Have no two points the same address?"""
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
    return all(_is_awaited(kernel, load, store, phase) and (one_reader or phase < last and _meet_in_folds(kernel, schedule))
               for phase in read_in)


def _is_after_the_rows(kernel: Kernel, schedule: Schedule, store: int) -> bool:
    """Is something stored that a loop over rows had to end for? No walk of that loop writes it."""
    row_loop = isinstance(schedule.rows, Loop) and not isinstance(schedule.cols, Block)
    return row_loop and any(f.rows and store in _reached(kernel.program, f.node, through=True) for f in kernel.folds)


def _is_awaited(kernel: Kernel, load: int, store: int, phase: int) -> bool:
    """Is what is stored computed from what the walk of a phase reads? (A fold of a row takes in every element of the row.)"""
    program = kernel.program
    folded = {f.node for f in kernel.folds if not f.block}
    for i in _reached(program, load, through=False, but=frozenset(folded)):
        if i == store and kernel.phase[store] == phase:
            return True
        if i in folded and kernel.phase[i] == phase and store in _reached(program, i, through=True):
            return True
    return False


def _reached(program: Program, start: int, through: bool, but: frozenset[int] = frozenset()) -> set[int]:
    """All that is computed from a value; `through` reductions too, else up to those in `but`."""
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
    """Do all warps take part in every fold of a row, and so wait for each other once its tiles are read?

    They do where tiles are single rows and lie across the whole CTA; the small tile of a row's broken ends comes first.
    """
    rows = schedule.rows
    one_row = not kernel.space.rows or rows == Block(1) or isinstance(rows, Loop) and rows.step == 1
    return one_row and not isinstance(schedule.cols, Block) and min(_tiles(schedule.cols)) >= WARP * schedule.warps


def _areas(kernel: Kernel, schedule: Schedule) -> list[int]:
    """How many elements each kind of tile has."""
    edges = [2 * schedule.sector_elems] if schedule.sector_elems else []  # the broken sectors at a row's ends are a tile of their own
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
