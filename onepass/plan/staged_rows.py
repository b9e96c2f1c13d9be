"""Staging rows in shared memory via TMA: which loads qualify, how a row is cut into chunks, and the exact smem footprint.

Each staged input owns a ring buffer of `stages` rows. A row arrives in chunks of one width, plus at most one narrower rest,
and signals one mbarrier. If only one row fits, the ring holds copies instead of rows: each copy brings a few chunks and has
its own slot and mbarrier, so the next row can be prefetched into slots the last walk has freed. The only other shared memory
is for exchanging partial reductions between warps.

With `ctas_per_row` > 1, all sizes are those of one CTA's part of a row, and row vectors (weight, bias) may be staged next to
the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Device
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Reduce
from .access import contiguous_row_stride
from .kernel import Kernel
from .schedule import PIECE_ELEMS, Cover, power_of_two

HAS_TMA = (9, 0)  # first compute capability with TMA
TMA_BOX = 256  # largest side of a TMA box, in elements
# mbarriers allocated per kernel, 8 bytes each, even if fewer are used. Together they take as many bytes as the alignment of a
# ring, so the compiler can place them between rings without leaving a gap.
BARRIERS = 16
BARRIER_BYTES = 8
MIN_COPIES = 4  # copies of a row in a single-row ring, if the row has as many chunks
TMA_ALIGNMENT = 16  # bytes; TMA needs every row to start on a multiple
STAGED_DTYPES = frozenset({"f16", "bf16", "f32"})  # the types that can be staged


@dataclass(frozen=True, slots=True)
class Chunks:
    """A row in chunks: `count` of `width`, then one of `rest` (0: none), which may overhang the row."""

    width: int
    count: int
    rest: int

    @property
    def chunks_per_copy(self) -> int:
        """Chunks per copy in a ring of copies. A row takes several copies; each one costs a few CTA barriers."""
        return self.chunks_per_box(TMA_BOX, MIN_COPIES)

    @property
    def copies(self) -> int:
        """Copies per row in a ring of copies; 0 if no such ring is possible."""
        found = self.count // self.chunks_per_copy
        return found if not self.rest and 1 < found <= BARRIERS else 0

    def chunks_per_box(self, box_elems: int, min_copies: int = 1) -> int:
        """Chunks per copy, such that a row takes at least `min_copies` copies if it has as many chunks.

        A box has a power-of-two number of elements: at most 256 rows of `box_elems`, which is at most 256.
        """
        found = min(self.count & -self.count, max(1, TMA_BOX * box_elems // self.width))
        while found > 1 and self.count // found < min_copies:
            found //= 2
        return found


def chunks(cols: Cover, extent: int) -> Chunks:
    """The chunks of a covered row of `extent` elements."""
    width = cols.tiles[0]
    count = extent // width
    whole, rest = cols.tiles[:count], cols.tiles[count:]
    if not count or set(whole) != {width} or len(rest) > 1 or cols.width < extent:
        raise ValueError(f"a staged row must be chunks of one width and at most one rest, not {cols.tiles} for {extent} columns")
    return Chunks(width, count, sum(rest))


def chunk_cover(extent: int, width: int, least: int) -> Cover:
    """Cover a row with chunks of `width` and one rest of at least `least` elements."""
    rest = extent % width
    return Cover((width,) * (extent // width) + ((max(power_of_two(rest), min(width, least)),) if rest else ()))


def chunk_cover_unaligned(extent: int, width: int, least: int) -> Cover | None:
    """Cover an unaligned row with chunks of `width` and one rest; None if impossible.

    The rest leaves room for the row's offset within a piece. It holds at least one piece, so that only it contains the end of
    the tensor that the view of pieces leaves out.
    """
    over = extent % width
    rest = max(power_of_two(over + PIECE_ELEMS - 1), min(width, least))
    return Cover((width,) * (extent // width) + (rest,)) if over >= PIECE_ELEMS and rest <= width else None


def tma_stageable(kernel: Kernel) -> tuple[int, ...]:
    """Full-size loads that TMA can stage row by row, if a kernel may process one whole row after another."""
    return tuple(i for i in _whole_rows(kernel) if tma_describes(kernel, i))


def tma_stageable_unaligned(kernel: Kernel) -> tuple[int, ...]:
    """Full-size loads with unaligned rows of equal stride, which TMA can stage as pieces of the flat tensor."""
    loads = () if any(f.rows for f in kernel.folds) else _whole_rows(kernel)
    return loads if len({_step(kernel, i) for i in loads}) == 1 and loads != tma_stageable(kernel) else ()


def _whole_rows(kernel: Kernel) -> tuple[int, ...]:
    """Full-size loads of contiguous rows from the start of their tensor, if a kernel may process one whole row after another."""
    space, program = kernel.space, kernel.program
    whole = space.rows and not space.batch and not space.block
    if not whole or not isinstance(program.extent(space.cols), int):
        return ()
    return tuple(i for i in program.of(Load) if kernel.is_full[i] and _step(kernel, i))


def must_stage(kernel: Kernel) -> frozenset[int]:
    """Full-size loads that must be staged if any is, because several walks read them.

    The last walk over a row feeds all reductions over rows, including from values that earlier walks also read.
    """
    accumulated = {f.node for f in kernel.folds if f.rows}
    feeding = (i for i in kernel.program.of(Load) if kernel.is_full[i] and not accumulated.isdisjoint(kernel.uses(i)))
    return frozenset((*kernel.multi_phase, *feeding))


def tma_describes(kernel: Kernel, i: int) -> bool:
    """Whether a TMA descriptor can address this load's rows: their stride must be a multiple of 16 bytes."""
    step = _step(kernel, i)
    return step is not None and step * kernel.program.dtypes[i].size % TMA_ALIGNMENT == 0


def _step(kernel: Kernel, i: int) -> int | None:
    """The row stride of a load, in elements; None if TMA cannot stage it. The load must start at its tensor's aligned start."""
    node, dtype = kernel.program.nodes[i], kernel.program.dtypes[i]
    assert isinstance(node, Load)
    step = contiguous_row_stride(kernel, node)
    starts = kernel.program.buffer[node.buffer].aligned and node.offset == 0
    return step if starts and dtype.name in STAGED_DTYPES and isinstance(step, int) else None


def tma_box_shape(extent: int, width: int, unaligned: bool = False) -> tuple[int, ...]:
    """The TMA box of a chunk. Boxes of 256-element rows need one message, others many; unaligned rows come in pieces."""
    if unaligned:
        return 1, width // PIECE_ELEMS, PIECE_ELEMS
    return (1, width // TMA_BOX, TMA_BOX) if extent % TMA_BOX == 0 and width % TMA_BOX == 0 else (1, width)


def exchange_bytes(kernel: Kernel, down: bool = False) -> int:
    """Bytes each warp exchanges to finish the largest reduction along rows, or with `down` along columns."""
    found = [0]
    for fold in (f for f in kernel.folds if (f.rows if down else f.cols)):
        node = kernel.program.nodes[fold.node]
        assert isinstance(node, Reduce)
        found += [d.size for d in MONOIDS[node.monoid].state_dtypes(kernel.program.dtypes[node.args[0]])]
    return max(found)


def prefetched_columns(cols: Cover, prefetch: int) -> int:
    """Columns of the next row held by `prefetch` copies in a single-row ring. Only rows without a rest are prefetched so."""
    return prefetch * cols.tiles[0] * Chunks(cols.tiles[0], len(cols.tiles), 0).chunks_per_copy


def smem_bytes(element_bytes: int, cols: Cover, slots: int, exchange_bytes: int, warps: int, prefetch: int = 0) -> int:
    """Shared memory of a CTA: rings of all staged inputs, mbarriers, warp exchange. Excludes the driver's reserve."""
    exchange = _round_up(exchange_bytes * warps, TMA_ALIGNMENT) if warps > 1 else 0
    return (slots * cols.width + prefetched_columns(cols, prefetch)) * element_bytes + exchange + BARRIERS * BARRIER_BYTES


def register_limit(warps: int, ctas_per_sm: int, device: Device) -> int:
    """The largest register cap per thread that lets `ctas_per_sm` CTAs share an SM.

    Without a cap, ptxas prefers a round register count and spills a few words; with a cap it does not.
    """
    return min(device.registers_per_thread, device.registers_per_sm // (32 * warps * ctas_per_sm) // 8 * 8)


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to
