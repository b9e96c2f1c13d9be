"""Legality of staged rows and tiles: what TMA can describe, in chunks that every thread has a part of, with enough mbarriers."""

from __future__ import annotations

from ..kernel import Kernel
from ..legality import Illegal, Reason
from ..staged_rows import (
    BARRIERS,
    TMA_BOX,
    Chunks,
    chunks,
    has_two_sums,
    may_span_ctas,
    must_stage,
    row_vector_smem_bytes,
    tma_stageable,
    tma_stageable_unaligned,
)
from ..staged_tiles import strips, tile_stageable
from ..thread_layout import access_vector, chunk_vector
from .base import RowVectors
from .families import MixOrder, MultiCtaMixOrder, Schedule, StagedMixOrder, StagedRows, StagedTiles
from .roles import PIECE_ELEMS, is_power_of_two


def staging(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Staged loads are what TMA can describe, as rows or as tiles, and row vectors wait where the family has a place for them."""
    match schedule:
        case StagedTiles():
            return _staged_tiles(kernel, schedule)
        case StagedRows(unaligned=True):
            return _staged_rows(kernel, schedule) or _unaligned(kernel, schedule)
        case StagedRows():
            return _staged_rows(kernel, schedule) or _ring(kernel, schedule)
        case StagedMixOrder():
            return _staged_rows(kernel, schedule) or _ring(kernel, schedule) or _mix_order(kernel, schedule)
        case MultiCtaMixOrder():
            return _staged_rows(kernel, schedule) or _mix_order(kernel, schedule) or _multi_cta(kernel, schedule)
        case MixOrder(row_vectors=RowVectors.SMEM):
            return Illegal(Reason.STORAGE, "row vectors in smem beside rows in registers")
        case _:
            return None


def _staged_tiles(kernel: Kernel, schedule: StagedTiles) -> Illegal | None:
    """Tiles of all full-size inputs are staged, in a shape that threads and TMA can read."""
    if not schedule.staged or schedule.staged != frozenset(tile_stageable(kernel)):
        return Illegal(Reason.STORAGE, "staged tiles need every full-size input, each of which TMA can describe, and one pass")
    if not is_power_of_two(schedule.strip_rows):
        return Illegal(Reason.SIZES, f"strips of {schedule.strip_rows} rows: every size must be a power of two")
    try:
        strips(schedule, access_vector(kernel, schedule))
    except ValueError as error:
        return Illegal(Reason.SIZES, str(error))
    return _barriers(schedule.stages)


def _barriers(slots: int) -> Illegal | None:
    return Illegal(Reason.STORAGE, f"a ring of {slots} slots: there are {BARRIERS} mbarriers") if slots > BARRIERS else None


def _staged_rows(kernel: Kernel, schedule: StagedRows | StagedMixOrder | MultiCtaMixOrder) -> Illegal | None:
    """Rows are staged in chunks that every thread has a part of."""
    unaligned = isinstance(schedule, StagedRows) and schedule.unaligned
    stageable = frozenset(tma_stageable_unaligned(kernel) if unaligned else tma_stageable(kernel))
    if not schedule.staged:
        return Illegal(Reason.STORAGE, "nothing is staged")
    if not schedule.staged <= stageable:
        return Illegal(Reason.STORAGE, f"TMA cannot describe all staged loads as rows{' of pieces' if unaligned else ''}")
    try:
        shape = _chunks(kernel, schedule)
    except ValueError as error:
        return Illegal(Reason.SIZES, str(error))
    threads = 32 * schedule.warps
    if shape.width < threads:
        return Illegal(Reason.SIZES, f"chunks of {shape.width} columns leave some of {threads} threads without any")
    if shape.rest and shape.rest < min(shape.width, threads * chunk_vector(kernel, schedule)):
        return Illegal(Reason.SIZES, f"a rest of {shape.rest} columns leaves some of {threads} threads without any")
    return _barriers(schedule.stages)


def _chunks(kernel: Kernel, schedule: StagedRows | StagedMixOrder | MultiCtaMixOrder) -> Chunks:
    """The chunks of a row, or of a CTA's part of it. ValueError if these tiles are none."""
    extent = kernel.program.extent(kernel.space.cols)
    assert isinstance(extent, int), "tiles are checked before"
    return chunks(schedule.cols, extent // schedule.ctas_per_row)


def _unaligned(kernel: Kernel, schedule: StagedRows) -> Illegal | None:
    """Unaligned rows end in a rest that has room for the offset of a row, and for the end of the tensor."""
    shape, extent = _chunks(kernel, schedule), kernel.program.extent(kernel.space.cols)
    assert isinstance(extent, int)
    over = extent - shape.count * shape.width
    if over < PIECE_ELEMS or not over + PIECE_ELEMS - 1 <= shape.rest <= shape.width or shape.width % PIECE_ELEMS:
        return Illegal(Reason.SIZES, f"chunks of {shape.width} and a rest of {shape.rest} do not fit unaligned rows of {extent}")
    return Illegal(Reason.FIELDS, "prefetch of unaligned rows") if schedule.prefetch else None


def _ring(kernel: Kernel, schedule: StagedRows | StagedMixOrder) -> Illegal | None:
    """Copies of the next row are prefetched where a ring has one row of several whole copies, and mbarriers for all."""
    if not schedule.prefetch:
        return None
    if schedule.stages > 1:
        return Illegal(Reason.FIELDS, "prefetch without a ring of one row")
    shape = _chunks(kernel, schedule)
    if not shape.copies:
        return Illegal(Reason.SIZES, "prefetch of rows that are not several whole copies")
    if shape.copies + schedule.prefetch > BARRIERS:
        return Illegal(Reason.SIZES, f"{schedule.prefetch} copies prefetched by a row of {shape.copies}: {BARRIERS} mbarriers")
    return None


def _mix_order(kernel: Kernel, schedule: StagedMixOrder | MultiCtaMixOrder) -> Illegal | None:
    """Every load that several walks read is staged. Row vectors wait in smem if their types allow, for rows of whole chunks."""
    if not must_stage(kernel) <= schedule.staged:
        return Illegal(Reason.STORAGE, "a load that several passes use is not staged")
    if isinstance(schedule, StagedMixOrder) and schedule.unroll_copies and not schedule.prefetch:
        return Illegal(Reason.FIELDS, "walks over copies where rows are not copies")
    if schedule.row_vectors is not RowVectors.SMEM:
        return None
    if kernel.row_vectors and not row_vector_smem_bytes(kernel):
        return Illegal(Reason.STORAGE, "row vectors in smem of types that cannot be staged")
    return Illegal(Reason.STORAGE, "row vectors in smem need rows without a rest") if _chunks(kernel, schedule).rest else None


def _multi_cta(kernel: Kernel, schedule: MultiCtaMixOrder) -> Illegal | None:
    """A row that several CTAs share is cut evenly, and its states can be exchanged."""
    if not may_span_ctas(kernel):
        return Illegal(Reason.FAMILY, "these reductions cannot be exchanged between several CTAs per row")
    if schedule.folds_two_sums and not has_two_sums(kernel):
        return Illegal(Reason.FIELDS, "two sums at once where a row does not have exactly two sums")
    shape, extent = _chunks(kernel, schedule), kernel.program.extent(kernel.space.cols)
    assert isinstance(extent, int)
    if shape.rest or extent % TMA_BOX or shape.width % TMA_BOX:
        return Illegal(Reason.SIZES, f"parts of a row that are not chunks of one width in boxes of {TMA_BOX}")
    if schedule.stages < 2:
        return Illegal(Reason.STORAGE, "several CTAs per row stage two rows at once")
    return None
