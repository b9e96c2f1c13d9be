"""Rows staged in rings of several CTAs, a range of columns each, reduced along them and down the columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...device import Device
from ...ir.monoid import MONOIDS
from ...ir.program import Reduce, Store
from ..choices import Choices
from ..cost.staged_rows import staged_rows
from ..kernel import Across, Kernel
from ..legality import Family, Illegal, Reason, may_split
from ..resources import Demand
from ..schedule import MultiCtaMixOrder, RowVectors
from ..schedule.roles import MAX_UNROLLED_TILES
from ..staged_rows import TMA_BOX, must_stage, register_limit, tma_stageable
from ..thread_layout import vector
from ..traffic import Traffic
from . import mix_order
from .family import StagedFamily
from .rows import MAX_RING_ROWS, chunks_of, refused_rows

MIN_COLS_PER_CTA = 4096  # columns per CTA if several CTAs share a row
MIN_ROWS_PER_GROUP = 4  # rows per group of CTAs that share rows; nothing overlaps in the first row and the last
STATE_BYTES = 4  # bytes of a state exchanged between CTAs; one store writes it together with its flag


def candidates(kernel: Kernel, need: Demand, t: Traffic, device: Device) -> Iterator[MultiCtaMixOrder]:
    """Inner and outer reductions over staged rows, with several CTAs per row.

    If all inputs are staged 16-bit rows, half vectors are tried too: they need fewer registers and take as long. H200,
    LayerNorm backward 8192x16384: 247 us, where whole vectors spill; 4096x65536: 449 us, whole vectors 481 us.
    """
    cols, required, stageable = t.cols, must_stage(kernel), frozenset(tma_stageable(kernel))
    if not required or not required <= stageable:
        return
    if not may_split(kernel, Family.MIX) or not may_span_ctas(kernel):
        return
    vec, two_sums, places = vector(kernel), has_two_sums(kernel), [*_row_vector_places(kernel)]
    for staged in (required,) if required == stageable else (required, stageable):
        half_vectors = (vec // 2,) if vec > 4 and len(staged) == kernel.full_loads else ()
        for ctas_per_row, warps, per_thread in product((2, 4, 8), (8, 16), (*half_vectors, vec, 2 * vec, 4 * vec)):
            part_cols, width = cols // ctas_per_row, 32 * warps * per_thread
            if part_cols < MIN_COLS_PER_CTA or cols % ctas_per_row or part_cols % width or part_cols // width > MAX_UNROLLED_TILES:
                continue
            tiles = (width,) * (part_cols // width)
            for stages, where in product(range(2, MAX_RING_ROWS + 1), places):
                one = MultiCtaMixOrder(tiles, ctas_per_row, 1, warps, stages, where, two_sums, staged)
                smem = smem_bytes(need, one)
                fitting = device.smem_per_sm // (smem + device.smem_reserve) if smem <= device.smem_per_cta else 0
                for ctas_per_sm in range(1, min(2, fitting) + 1):
                    groups = ctas_per_sm * device.sms // ctas_per_row
                    if groups and t.rows >= MIN_ROWS_PER_GROUP * groups:  # a card may have fewer SMs than CTAs share a row
                        yield replace(one, groups=groups, registers=register_limit(warps, ctas_per_sm, device) // 8 * 8)


def _row_vector_places(kernel: Kernel) -> Iterator[RowVectors]:
    yield RowVectors.RELOAD
    if kernel.row_vectors:
        yield RowVectors.REGISTERS
    if mix_order.row_vector_smem_bytes(kernel):
        yield RowVectors.SMEM


def completed(kernel: Kernel, make: Choices, schedule: MultiCtaMixOrder) -> MultiCtaMixOrder:
    """Two sums along a row are exchanged together."""
    return replace(schedule, folds_two_sums=has_two_sums(kernel), vector_limit=make.vector_limit)


def refused(kernel: Kernel, schedule: MultiCtaMixOrder) -> Illegal | None:
    """Rows are staged in equal parts, with all that the accumulating walk reads, and their states can be exchanged."""
    return refused_rows(kernel, schedule) or mix_order.refused_sources(kernel, schedule) or _shared(kernel, schedule)


def _shared(kernel: Kernel, schedule: MultiCtaMixOrder) -> Illegal | None:
    """A row that several CTAs share is cut evenly, and its states can be exchanged."""
    if not may_span_ctas(kernel):
        return Illegal(Reason.FAMILY, "these reductions cannot be exchanged between several CTAs per row")
    if schedule.folds_two_sums and not has_two_sums(kernel):
        return Illegal(Reason.FIELDS, "two sums at once where a row does not have exactly two sums")
    shape, extent = chunks_of(kernel, schedule), kernel.program.extent(kernel.space.cols)
    assert isinstance(extent, int)
    if shape.rest or extent % TMA_BOX or shape.width % TMA_BOX:
        return Illegal(Reason.SIZES, f"parts of a row that are not chunks of one width in boxes of {TMA_BOX}")
    if schedule.stages < 2:
        return Illegal(Reason.STORAGE, "several CTAs per row stage two rows at once")
    return None


def may_span_ctas(kernel: Kernel) -> bool:
    """Whether several CTAs may share each row.

    The first of two walks must complete all reductions along rows, with states that can be exchanged in 32-bit words. The
    last walk does everything else: it writes full-size results and accumulates per-column ones. A result of one number per
    row, or one number overall, has no owner among the CTAs.
    """
    program = kernel.program
    along, down = [f for f in kernel.folds if not f.rows], [f for f in kernel.folds if f.rows]
    after = kernel.computed_from({f.node for f in down})
    if not along or not down or kernel.space.block:
        return False
    if any(kernel.phase[f.node] or not _has_word_states(kernel, f.node) for f in along):
        return False
    if any(f.cols or kernel.phase[f.node] > 1 or kernel.by_col[f.node] is not Across.FULL for f in down):
        return False
    stores = [i for i in program.of(Store) if i not in after]
    return bool(stores) and all(kernel.is_full[i] and kernel.phase[i] == 1 for i in stores)


def _has_word_states(kernel: Kernel, i: int) -> bool:
    """Whether all states of a reduction are 32-bit words."""
    node = kernel.program.nodes[i]
    assert isinstance(node, Reduce)
    return all(d.size == STATE_BYTES for d in MONOIDS[node.monoid].state_dtypes(kernel.program.dtypes[node.args[0]]))


def state_words(kernel: Kernel) -> int:
    """The number of 32-bit words of state a CTA sends to the other CTAs of its row."""
    found = 0
    for fold in kernel.folds:
        node = kernel.program.nodes[fold.node]
        assert isinstance(node, Reduce)
        found += 0 if fold.rows else len(MONOIDS[node.monoid].state)
    return found


def has_two_sums(kernel: Kernel) -> bool:
    """Whether the reductions along rows are exactly two sums."""
    along = [kernel.program.nodes[f.node] for f in kernel.folds if not f.rows]
    return len(along) == 2 and all(isinstance(node, Reduce) and MONOIDS[node.monoid].primitive == "sum" for node in along)


def smem_bytes(need: Demand, schedule: MultiCtaMixOrder) -> int:
    """As without other CTAs, but two sums take the exchange of both."""
    return mix_order.smem_bytes(need, schedule, exchanged=2 if schedule.folds_two_sums else 1)


FAMILY = StagedFamily(MultiCtaMixOrder, True, candidates, completed, refused, mix_order.registers, smem_bytes, staged_rows)
