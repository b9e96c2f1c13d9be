"""Rows staged in a ring, reduced along them and down the columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...constants import SHIPPED
from ...device import Device
from ..choices import Choices
from ..cost.staged_rows import staged_rows
from ..kernel import Kernel
from ..legality import Family, Illegal, Reason, may_split
from ..resources import Demand, RegisterFit, elements_per_thread
from ..schedule import MultiCtaMixOrder, RowVectors, StagedMixOrder
from ..schedule.roles import MAX_UNROLLED_TILES
from ..staged_rows import STAGED_DTYPES, must_stage
from ..traffic import Traffic
from .family import StagedFamily
from .rows import chunks_of, refused_ring, refused_rows, ring_bytes, ring_rows

# Warps (128 registers per thread) from which walks over copies stay loops. The compiler unrolls a loop with a known trip count, and
# the unrolled loop needs more registers than the accumulators leave.
MANY_WARPS = 16
FITTED = SHIPPED.registers
FIT = RegisterFit(
    FITTED.staged_mix_order_base,
    FITTED.staged_mix_order_access,
    FITTED.staged_mix_order_live,
    FITTED.staged_mix_order_resident,
    FITTED.staged_mix_order_accumulated,
)


def candidates(kernel: Kernel, need: Demand, t: Traffic, device: Device) -> Iterator[StagedMixOrder]:
    """Inner and outer reductions over staged rows; registers accumulate the column states."""
    if not may_split(kernel, Family.MIX):
        return
    for one in ring_rows(kernel, need, t, device):
        if one.ring and len(one.tiles) <= MAX_UNROLLED_TILES:
            for where in (RowVectors.RELOAD, RowVectors.REGISTERS) if t.vectors else (RowVectors.RELOAD,):
                # Multiples of eight: with a cap of 255 ptxas spills a few words that it does not spill with 248.
                cap = one.registers // 8 * 8
                yield StagedMixOrder(one.tiles, one.warps, one.ring, where, staged=one.staged, registers=cap)


def completed(kernel: Kernel, make: Choices, schedule: StagedMixOrder) -> StagedMixOrder:
    """Walks over copies are unrolled where few warps leave registers for that."""
    unrolls = schedule.prefetch > 0 and schedule.warps < MANY_WARPS
    return replace(schedule, unroll_copies=unrolls, vector_limit=make.vector_limit)


def refused(kernel: Kernel, schedule: StagedMixOrder) -> Illegal | None:
    """Rows are staged in a ring, with all that the accumulating walk reads."""
    return refused_rows(kernel, schedule) or refused_ring(kernel, schedule) or refused_sources(kernel, schedule)


def refused_sources(kernel: Kernel, schedule: StagedMixOrder | MultiCtaMixOrder) -> Illegal | None:
    """Every load that several walks read is staged. Row vectors wait in smem if their types allow, for rows of whole chunks."""
    if not must_stage(kernel) <= schedule.staged:
        return Illegal(Reason.STORAGE, "a load that several passes use is not staged")
    if isinstance(schedule, StagedMixOrder) and schedule.unroll_copies and not schedule.prefetch:
        return Illegal(Reason.FIELDS, "walks over copies where rows are not copies")
    if schedule.row_vectors is not RowVectors.SMEM:
        return None
    if kernel.row_vectors and not row_vector_smem_bytes(kernel):
        return Illegal(Reason.STORAGE, "row vectors in smem of types that cannot be staged")
    return Illegal(Reason.STORAGE, "row vectors in smem need rows without a rest") if chunks_of(kernel, schedule).rest else None


def row_vector_smem_bytes(kernel: Kernel) -> int:
    """Bytes per column of all row vectors, if they may be staged in shared memory; 0 if not, or if there are none."""
    types = [kernel.program.dtypes[i] for i in kernel.row_vectors]
    return sum(t.size for t in types) if all(t.name in STAGED_DTYPES for t in types) else 0


def registers(need: Demand, schedule: StagedMixOrder | MultiCtaMixOrder) -> float:
    """Accumulated states, and row vectors that stay in registers."""
    once, held = elements_per_thread(schedule)
    found = FIT.of(need, once) + FIT.accumulated * need.accumulated * held
    return found + (FIT.resident * need.vectors * held if schedule.row_vectors is RowVectors.REGISTERS else 0.0)


def smem_bytes(need: Demand, schedule: StagedMixOrder | MultiCtaMixOrder, exchanged: int = 1) -> int:
    """A ring of rows, and row vectors beside it. `exchanged`: states that warps exchange at once."""
    row_vectors = int(4 * need.vectors) * schedule.cols.width if schedule.row_vectors is RowVectors.SMEM else 0
    return row_vectors + ring_bytes(need, schedule, exchanged)


FAMILY = StagedFamily(StagedMixOrder, True, candidates, completed, refused, registers, smem_bytes, staged_rows)
