"""Traffic: what a kernel must move and compute under any schedule: bytes by kind, issue slots, special functions."""

from __future__ import annotations

from collections.abc import Iterator
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
    """What a kernel must move and compute under any schedule. Sizes are bytes unless stated otherwise."""

    batch: int
    rows: int
    cols: int
    full_in: float  # full-size inputs, each read once
    full_out: float
    multi_phase: float  # part of full_in that is needed on both sides of a reduction, times its extra phases
    vectors: float  # row vectors, each read once
    vector_bytes_per_elem: float  # row vector bytes read per element, over all phases
    vector_loads_per_elem: int  # row vector elements read per element, over all phases
    after_reduction: tuple[PostReductionLoad, ...]  # loads used after a reduction
    small: float  # per-row values and scalars, in and out, once
    temps: float  # partial results and results of other kernels, which stay in L2
    issue_slots: float  # per element, if values used in several phases are recomputed in each
    issue_slots_resident: float  # per element, if such values stay in registers
    mufu: float  # special-function operations per element
    inner_folds: int  # reductions over columns
    composite_folds: int  # reductions whose states take more than one operation to merge
    outer_states: int  # state components of reductions over rows
    input_bytes_per_elem: int  # of all full-size inputs together
    resident_registers: float  # per element: all multi-phase inputs together, widened to 32 bits
    vector: int  # adjacent elements per thread of a tile
    unaligned: int  # full-size accesses with rows not aligned to 16 bytes; element-wise unless read by sectors

    @property
    def elements(self) -> float:
        return float(self.batch) * self.rows * self.cols

    @property
    def once(self) -> float:
        """Every input once, every output once: the floor."""
        return self.full_in + self.full_out + self.vectors + self.small


def traffic(kernel: Kernel, bindings: Bindings) -> Traffic:
    """Count a kernel's bytes and operations."""
    batch, rows, cols = kernel.counts(bindings)
    moved = _bytes_by_kind(kernel, bindings)
    issue_slots, issue_slots_resident, mufu = _operations(kernel)
    vector_bytes, vector_loads = _row_vector_reads(kernel)
    return Traffic(
        batch=batch,
        rows=rows,
        cols=cols,
        full_in=moved.full_in,
        full_out=moved.full_out,
        multi_phase=moved.multi_phase,
        vectors=moved.vectors,
        vector_bytes_per_elem=vector_bytes,
        vector_loads_per_elem=vector_loads,
        after_reduction=loads_after_reduction(kernel),
        small=moved.small,
        temps=moved.temps,
        issue_slots=issue_slots,
        issue_slots_resident=issue_slots_resident,
        mufu=mufu,
        inner_folds=sum(1 for f in kernel.folds if f.cols),
        composite_folds=sum(1 for f in kernel.folds if not f.block and not monoid_of(kernel, f).primitive),
        outer_states=sum(len(monoid_of(kernel, f).state) for f in kernel.folds if f.rows),
        input_bytes_per_elem=int(moved.input_bytes) or _input_bytes_without_full(kernel),
        resident_registers=demand(kernel).resident_registers,
        vector=vector(kernel),
        unaligned=_unaligned(kernel),
    )


@dataclass(slots=True)
class _Bytes:
    """Bytes of a kernel's loads and stores by kind, while they are added up. The fields are those of Traffic."""

    full_in: float = 0.0
    full_out: float = 0.0
    multi_phase: float = 0.0
    vectors: float = 0.0
    small: float = 0.0
    temps: float = 0.0
    input_bytes: float = 0.0  # per element, of full-size inputs


def _bytes_by_kind(kernel: Kernel, bindings: Bindings) -> _Bytes:
    sums = _Bytes()
    for i, node, moved in _accesses(kernel, bindings):
        buffer = kernel.program.buffer[node.buffer]
        if buffer.role == "temp":
            sums.temps += moved
            sums.input_bytes += buffer.dtype.size if kernel.is_full[i] and isinstance(node, Load) else 0
        elif kernel.is_full[i]:
            if isinstance(node, Load):
                sums.full_in += moved
                sums.input_bytes += buffer.dtype.size
                sums.multi_phase += moved * (len(kernel.use_phases(i)) - 1 if i in kernel.multi_phase else 0)
            else:
                sums.full_out += moved
        elif not kernel.by_row[i] and kernel.by_col[i] is Across.FULL:
            sums.vectors += moved
        else:
            sums.small += moved
    return sums


def _accesses(kernel: Kernel, bindings: Bindings) -> Iterator[tuple[int, Load | Store, float]]:
    """The stores and distinct loads of a kernel, each with the bytes it moves."""
    program = kernel.program
    seen: set[tuple[str, object]] = set()
    for i, node in enumerate(program.nodes):
        if not isinstance(node, (Load, Store)):
            continue
        indexed = isinstance(node, Load) and node.indexed
        key = (node.buffer, i if indexed else node.offset)
        if isinstance(node, Load) and key in seen:
            continue
        seen.add(key)
        if indexed:
            yield i, node, SECTOR * float(program.points(program.dims[i], bindings))
        else:
            points = program.points(frozenset(a for a, _ in node.strides), bindings)
            yield i, node, program.buffer[node.buffer].dtype.size * float(points) / _sector_use(kernel, node, bindings)


def _row_vector_reads(kernel: Kernel) -> tuple[float, int]:
    """Bytes and loads of row vectors per element, with one load in every walk that uses a vector."""
    read = [(kernel.program.dtypes[i].size, len(kernel.use_phases(i))) for i in kernel.row_vectors]
    return float(sum(size * times for size, times in read)), sum(times for _, times in read)


def _input_bytes_without_full(kernel: Kernel) -> int:
    """Input bytes per element of a kernel without full-size inputs: one row, or one column."""
    loads = [(i, n) for i, n in enumerate(kernel.program.nodes) if isinstance(n, Load) and (n.strides or n.indexed)]
    return sum(SECTOR if n.indexed else kernel.program.dtypes[i].size for i, n in loads) or 4


def _unaligned(kernel: Kernel) -> int:
    """The number of full-size accesses along rows that are not aligned to 16 bytes."""
    found = 0
    for i, node in enumerate(kernel.program.nodes):
        if isinstance(node, (Load, Store)) and kernel.is_full[i]:
            step, size = contiguous_row_stride(kernel, node), kernel.program.buffer[node.buffer].dtype.size
            found += isinstance(step, int) and step * size % 16 != 0
    return found


def monoid_of(kernel: Kernel, fold: Fold) -> Monoid:
    """The monoid of a reduction."""
    node = kernel.program.nodes[fold.node]
    assert isinstance(node, Reduce)
    return MONOIDS[node.monoid]


def _operations(kernel: Kernel) -> tuple[float, float, float]:
    """Issue slots per element, with values used in several phases recomputed and then kept; special functions per element."""
    recomputed = kept = mufu = 0.0
    for i, node in enumerate(kernel.program.nodes):
        if not kernel.is_full[i]:
            continue
        if isinstance(node, Op):
            times = max(1, len(kernel.use_phases(i)))
            recomputed += OPS[node.name].issue_slots * times
            kept += OPS[node.name].issue_slots
            mufu += OPS[node.name].mufu * times
        elif isinstance(node, (Load, Store)):
            recomputed += 0.4
            kept += 0.4
    for fold in kernel.folds:
        monoid = monoid_of(kernel, fold)
        recomputed += 1 if monoid.primitive else 4
        kept += 1 if monoid.primitive else 4
        mufu += monoid.mufu
    return recomputed, kept, mufu


def _sector_use(kernel: Kernel, node: Load | Store, bindings: Bindings) -> float:
    """The fraction of the touched 32-byte sectors that an access uses."""
    size = kernel.program.buffer[node.buffer].dtype.size
    along = [a for a, s in node.strides if s == 1]
    if not along or not any(a in kernel.space.cols or a in kernel.space.rows for a in along):
        return 1.0 if not node.strides else max(size / SECTOR, min(1.0, size * 4 / SECTOR))
    run = size * value(kernel.program.axis[along[0]].extent, bindings)
    if single_stride(kernel.program, kernel.space.cols, node.strides) == 1:
        run = size * kernel.program.points(kernel.space.cols, bindings)
    if along[0] in kernel.space.rows and any(a in kernel.space.cols for a, _ in node.strides):
        return 0.5  # strided access: uses whole sectors only if a tile is several rows high
    return 1.0 if run % SECTOR == 0 or run >= 1024 else run / (SECTOR * ceil(run / SECTOR) + SECTOR / 2)
