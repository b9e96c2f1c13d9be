"""What a kernel must move and compute, whatever its schedule: bytes of every kind, issue slots, special functions."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..ir.expr import OPS
from ..ir.monoid import MONOIDS, Monoid
from ..ir.program import Load, Op, Reduce, Store
from ..ir.size import Bindings, value
from .access import contiguous_row_stride, single_stride
from .kernel import Across, Fold, Kernel
from .resources import PostReductionLoad, demand, loads_after_reduction
from .schedule import SECTOR
from .thread_layout import vector


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a kernel must move, whatever its schedule; bytes."""

    batch: int
    rows: int
    cols: int
    full_in: float  # full-size inputs, each once
    full_out: float
    multi_phase: float  # of full_in, what is needed on both sides of a reduction; times the extra phases
    vectors: float  # row vectors, once
    beside: float  # bytes of row vectors that every element meets, in all phases
    vector_loads_per_elem: int  # elements of row vectors that every element meets, in all phases
    after_reduction: tuple[PostReductionLoad, ...]  # loads that are needed after a reduction
    thin: float  # column vectors and scalars in and out, once
    temps: float  # partial results and other kernels' results: they stay in L2
    slots: float  # issue slots per element, where what is needed in several phases is computed in each
    issue_slots_resident: float  # the same, where it stays in registers
    mufu: float  # special-function operations per element
    inner: int  # reductions over columns
    merged: int  # of all reductions, those whose states take more than one operation to merge
    outer_states: int  # state components of reductions over rows
    unit: int  # bytes per element of all full-size inputs together
    words: float  # registers per element of all multi-phase inputs together, widened
    vector: int  # elements a thread takes of a tile at once
    unaligned: int  # full-size accesses whose rows do not start on 16 bytes: element by element, unless read by sectors

    @property
    def elements(self) -> float:
        return float(self.batch) * self.rows * self.cols

    @property
    def once(self) -> float:
        """Every input once, every output once: the floor."""
        return self.full_in + self.full_out + self.vectors + self.thin


def traffic(kernel: Kernel, bindings: Bindings) -> Traffic:
    """Count a kernel's bytes and operations."""
    program = kernel.program
    batch, rows, cols = kernel.counts(bindings)
    full_in = full_out = multi = vectors = thin = temps = unit = 0.0
    seen: set[tuple[str, object]] = set()
    for i, node in enumerate(program.nodes):
        if not isinstance(node, (Load, Store)):
            continue
        size = program.buffer[node.buffer].dtype.size
        if isinstance(node, Load) and node.indexed:
            moved = SECTOR * float(program.points(program.dims[i], bindings))
        else:
            points = program.points(frozenset(a for a, _ in node.strides), bindings)
            moved = size * float(points) / _sector_use(kernel, node, bindings)
        key = (node.buffer, node.offset if not (isinstance(node, Load) and node.indexed) else i)
        if isinstance(node, Load) and key in seen:
            continue
        seen.add(key)
        if program.buffer[node.buffer].role == "temp":
            temps += moved
            unit += size if kernel.is_full[i] and isinstance(node, Load) else 0
        elif kernel.is_full[i]:
            if isinstance(node, Load):
                full_in += moved
                unit += size
                multi += moved * (len(kernel.use_phases(i)) - 1 if i in kernel.multi_phase else 0)
            else:
                full_out += moved
        elif not kernel.by_row[i] and kernel.by_col[i] is Across.FULL:
            vectors += moved
        else:
            thin += moved
    slots, once, mufu = _operations(kernel)
    inner = sum(1 for f in kernel.folds if f.cols)
    states = sum(len(monoid_of(kernel, f).state) for f in kernel.folds if f.rows)
    merged = sum(1 for f in kernel.folds if not f.block and not monoid_of(kernel, f).primitive)
    met = [(program.dtypes[i].size, len(kernel.use_phases(i))) for i in kernel.row_vectors]
    beside, vector_loads_per_elem = sum(size * times for size, times in met), sum(times for _, times in met)
    return Traffic(
        batch=batch, rows=rows, cols=cols, full_in=full_in, full_out=full_out, multi_phase=multi, vectors=vectors,
        beside=float(beside), vector_loads_per_elem=vector_loads_per_elem, after_reduction=loads_after_reduction(kernel), thin=thin, temps=temps, slots=slots, issue_slots_resident=once,
        mufu=mufu, inner=inner, merged=merged, outer_states=states, unit=int(unit) or _in_flight_alone(kernel),
        words=demand(kernel).resident_registers, vector=vector(kernel), unaligned=_unaligned(kernel))


def _in_flight_alone(kernel: Kernel) -> int:
    """Bytes per element where there is one row, or one column, and so nothing full-size."""
    loads = [(i, n) for i, n in enumerate(kernel.program.nodes) if isinstance(n, Load) and (n.strides or n.indexed)]
    return sum(SECTOR if n.indexed else kernel.program.dtypes[i].size for i, n in loads) or 4


def _unaligned(kernel: Kernel) -> int:
    """Full-size accesses along rows that do not start on 16 bytes."""
    found = 0
    for i, node in enumerate(kernel.program.nodes):
        if isinstance(node, (Load, Store)) and kernel.is_full[i]:
            step, size = contiguous_row_stride(kernel, node), kernel.program.buffer[node.buffer].dtype.size
            found += isinstance(step, int) and step * size % 16 != 0
    return found


def monoid_of(kernel: Kernel, fold: Fold) -> Monoid:
    """What a reduction merges its states by."""
    node = kernel.program.nodes[fold.node]
    assert isinstance(node, Reduce)
    return MONOIDS[node.monoid]


def _operations(kernel: Kernel) -> tuple[float, float, float]:
    """Issue slots per element, with what is needed in several phases computed in each or once; special functions."""
    slots = once = mufu = 0.0
    for i, node in enumerate(kernel.program.nodes):
        if not kernel.is_full[i]:
            continue
        if isinstance(node, Op):
            times = max(1, len(kernel.use_phases(i)))
            slots += OPS[node.name].issue_slots * times
            once += OPS[node.name].issue_slots
            mufu += OPS[node.name].mufu * times
        elif isinstance(node, (Load, Store)):
            slots += 0.4
            once += 0.4
    for fold in kernel.folds:
        monoid = monoid_of(kernel, fold)
        slots += 1 if monoid.primitive else 4
        once += 1 if monoid.primitive else 4
        mufu += 0 if monoid.primitive or "exp" not in monoid.name else 1
    return slots, once, mufu


def _sector_use(kernel: Kernel, node: Load | Store, bindings: Bindings) -> float:
    """The useful share of the 32-byte sectors an access touches."""
    size = kernel.program.buffer[node.buffer].dtype.size
    along = [a for a, s in node.strides if s == 1]
    if not along or not any(a in kernel.space.cols or a in kernel.space.rows for a in along):
        return 1.0 if not node.strides else max(size / SECTOR, min(1.0, size * 4 / SECTOR))
    run = size * value(kernel.program.axis[along[0]].extent, bindings)
    if single_stride(kernel.program, kernel.space.cols, node.strides) == 1:
        run = size * kernel.program.points(kernel.space.cols, bindings)
    if along[0] in kernel.space.rows and any(a in kernel.space.cols for a, _ in node.strides):
        return 0.5  # across the grain: whole sectors only where a tile is several rows high
    return 1.0 if run % SECTOR == 0 or run >= 1024 else run / (SECTOR * ceil(run / SECTOR) + SECTOR / 2)
