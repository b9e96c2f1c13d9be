"""Rows parked in shared memory: which loads TMA can bring there, in what pieces, and every byte that takes.

A row is cut into chunks of one width and at most one narrower rest; a ring has several rows' worth of them for every parked
input. One barrier a row tells when all of its chunks have arrived. Where a ring has room for one whole row only, it is a ring of
copies instead: each brings a few chunks, and has a place and a barrier of its own. What a second row does not fit into can then
still hold copies of the next one. Nothing else lives in shared memory but what threads exchange to finish a reduction.

Rows may be shared by several CTAs, a part of the columns each. Then all of this is said of a part, and row vectors may wait beside
the ring, that part of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Device
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Reduce, Store, operands
from .access import contiguous_row_stride
from .kernel import Across, Kernel
from .schedule import Cover, power_of_two

TMA_BOX = 256  # elements that one side of a TMA box may have
# Barriers that are asked for, of 8 bytes each, however few are used: as many bytes as rings are aligned to, so that the compiler
# can place them anywhere among the rings and leave no gap.
BARRIERS = 16
BARRIER_BYTES = 8
MIN_COPIES = 4  # in which a row that is alone in its ring comes and goes, where it has as many chunks
TMA_ALIGNMENT = 16  # bytes that every row must start on for TMA to describe it
PIECE_ELEMS = 64  # elements of a piece of a flat view: rows are brought from the piece that they start in
STAGED_DTYPES = frozenset({"f16", "bf16", "f32"})  # the types that are parked
STATE_BYTES = 4  # bytes of a state that CTAs exchange: with its flag it is what one store writes


@dataclass(frozen=True, slots=True)
class Chunks:
    """A row in pieces: `count` of `width`, then one of `rest` (0: none), which may overhang the row."""

    width: int
    count: int
    rest: int

    @property
    def apart(self) -> int:
        """Chunks of a copy in a ring of copies: as many as leave a row in several. Every copy costs a few barriers of the CTA."""
        return self.at_once(TMA_BOX, MIN_COPIES)

    @property
    def copies(self) -> int:
        """In how many copies a row comes to a ring of copies; 0 where there can be no such ring."""
        found = self.count // self.apart
        return found if not self.rest and 1 < found <= BARRIERS else 0

    def at_once(self, along: int, parts: int = 1) -> int:
        """Chunks that one copy brings, where a row comes in so many parts or more if it has the chunks.

        A box has a power of two of elements, at most 256 rows of `along`, which is at most 256.
        """
        found = min(self.count & -self.count, max(1, TMA_BOX * along // self.width))
        while found > 1 and self.count // found < parts:
            found //= 2
        return found


def chunks(cols: Cover, extent: int) -> Chunks:
    """The pieces a covered row of so many elements stands for."""
    width = cols.tiles[0]
    count = extent // width
    whole, rest = cols.tiles[:count], cols.tiles[count:]
    if not count or set(whole) != {width} or len(rest) > 1 or cols.width < extent:
        raise ValueError(f"a parked row is chunks of one width and one rest, not {cols.tiles} for {extent} columns")
    return Chunks(width, count, sum(rest))


def chunk_cover(extent: int, width: int, least: int) -> Cover:
    """A row as chunks of `width` and one rest of at least `least` elements."""
    rest = extent % width
    return Cover((width,) * (extent // width) + ((max(power_of_two(rest), min(width, least)),) if rest else ()))


def chunk_cover_unaligned(extent: int, width: int, least: int) -> Cover | None:
    """The same for rows that start anywhere in a piece of the flat view: the rest has room for what the row is shifted by, and
    holds at least one piece, so that what the view leaves out at a tensor's end is in no other chunk. None where that cannot be."""
    over = extent % width
    rest = max(power_of_two(over + PIECE_ELEMS - 1), min(width, least))
    return Cover((width,) * (extent // width) + (rest,)) if over >= PIECE_ELEMS and rest <= width else None


def tma_stageable(kernel: Kernel) -> tuple[int, ...]:
    """The full-size loads that TMA can bring, row by row, where a kernel may run one whole row after another."""
    return tuple(i for i in _whole_rows(kernel) if tma_describes(kernel, i))


def tma_stageable_unaligned(kernel: Kernel) -> tuple[int, ...]:
    """The full-size loads whose rows start anywhere, but all alike: TMA brings pieces of the flat tensor that a row lies in."""
    loads = () if any(f.rows for f in kernel.folds) else _whole_rows(kernel)
    return loads if len({_step(kernel, i) for i in loads}) == 1 and loads != tma_stageable(kernel) else ()


def _whole_rows(kernel: Kernel) -> tuple[int, ...]:
    """Full-size loads of contiguous rows, from their tensor's beginning on, where a kernel may run one whole row after another."""
    space, program = kernel.space, kernel.program
    whole = space.rows and not space.batch and not space.block
    if not whole or not isinstance(program.extent(space.cols), int):
        return ()
    return tuple(i for i in program.of(Load) if kernel.is_full[i] and _step(kernel, i))


def must_stage(kernel: Kernel) -> frozenset[int]:
    """The full-size loads that must be parked if any is: walks read them more than once.

    The last walk over a row feeds all that is gathered over rows, also from what is needed in earlier ones.
    """
    accumulated = {f.node for f in kernel.folds if f.rows}
    feeding = (i for i in kernel.program.of(Load) if kernel.is_full[i] and not accumulated.isdisjoint(kernel.uses(i)))
    return frozenset((*kernel.multi_phase, *feeding))


def may_span_ctas(kernel: Kernel) -> bool:
    """May several CTAs take every row together?

    The first of two walks has to finish all that is reduced along rows, in states that can be exchanged word by word; the last does
    all else: it writes what is full-size and gathers what varies by column. Whatever is one number for a row, or for all, has no
    owner among the CTAs.
    """
    program = kernel.program
    along, down = [f for f in kernel.folds if not f.rows], [f for f in kernel.folds if f.rows]
    after = _after(kernel, {f.node for f in down})
    if not along or not down or kernel.space.block or any(kernel.phase[f.node] or not _has_word_states(kernel, f.node) for f in along):
        return False
    if any(f.cols or kernel.phase[f.node] > 1 or kernel.by_col[f.node] is not Across.FULL for f in down):
        return False
    stores = [i for i in program.of(Store) if i not in after]
    return bool(stores) and all(kernel.is_full[i] and kernel.phase[i] == 1 for i in stores)


def _has_word_states(kernel: Kernel, i: int) -> bool:
    node = kernel.program.nodes[i]
    assert isinstance(node, Reduce)
    return all(d.size == STATE_BYTES for d in MONOIDS[node.monoid].state_dtypes(kernel.program.dtypes[node.args[0]]))


def _after(kernel: Kernel, roots: set[int]) -> set[int]:
    """All that is computed from some nodes."""
    found: set[int] = set()
    for i, node in enumerate(kernel.program.nodes):
        if any(o in roots or o in found for o in operands(node)):
            found.add(i)
    return found


def row_vector_smem_bytes(kernel: Kernel) -> int:
    """Of a column of all row vectors together, where they may wait in shared memory; 0 where they may not, or there are none."""
    types = [kernel.program.dtypes[i] for i in kernel.row_vectors]
    return sum(t.size for t in types) if all(t.name in STAGED_DTYPES for t in types) else 0


def state_words(kernel: Kernel) -> int:
    """How many words of state a CTA hands to those that it shares a row with."""
    found = 0
    for fold in kernel.folds:
        node = kernel.program.nodes[fold.node]
        assert isinstance(node, Reduce)
        found += 0 if fold.rows else len(MONOIDS[node.monoid].state)
    return found


def tma_describes(kernel: Kernel, i: int) -> bool:
    """Can a tensor map say where this load's rows are? They step by whole 16 bytes."""
    step = _step(kernel, i)
    return step is not None and step * kernel.program.dtypes[i].size % TMA_ALIGNMENT == 0


def _step(kernel: Kernel, i: int) -> int | None:
    """The elements from row to row of a load that starts with its tensor, on 16 bytes; None where TMA has no use for it."""
    node, dtype = kernel.program.nodes[i], kernel.program.dtypes[i]
    assert isinstance(node, Load)
    step = contiguous_row_stride(kernel, node)
    starts = kernel.program.buffer[node.buffer].aligned and node.offset == 0
    return step if starts and dtype.name in STAGED_DTYPES and isinstance(step, int) else None


def tma_box_shape(extent: int, width: int, flat: bool = False) -> tuple[int, ...]:
    """A chunk as TMA copies it: by rows of 256 elements in one message where the row divides so, else as it is, in many; of a flat
    view, by its pieces."""
    if flat:
        return 1, width // PIECE_ELEMS, PIECE_ELEMS
    return (1, width // TMA_BOX, TMA_BOX) if extent % TMA_BOX == 0 and width % TMA_BOX == 0 else (1, width)


def exchange_bytes(kernel: Kernel, down: bool = False) -> int:
    """Bytes that each warp leaves for the others to finish the largest of a kernel's folds along rows, or `down` its columns."""
    found = [0]
    for fold in (f for f in kernel.folds if (f.rows if down else f.cols)):
        node = kernel.program.nodes[fold.node]
        assert isinstance(node, Reduce)
        found += [d.size for d in MONOIDS[node.monoid].state_dtypes(kernel.program.dtypes[node.args[0]])]
    return max(found)


def exchange_bytes_multi_cta(kernel: Kernel) -> int:
    """The same along rows that several CTAs take together, of which two sums are folded at once."""
    return exchange_bytes(kernel) * (2 if folds_two_sums(kernel) else 1)


def folds_two_sums(kernel: Kernel) -> bool:
    """Are two sums all that is reduced along rows?"""
    along = [kernel.program.nodes[f.node] for f in kernel.folds if not f.rows]
    return len(along) == 2 and all(isinstance(node, Reduce) and MONOIDS[node.monoid].primitive == "sum" for node in along)


def prefetched_columns(cols: Cover, ahead: int) -> int:
    """Columns of the next row that so many copies bring to a ring of one row. Only rows without a rest come so."""
    return ahead * cols.tiles[0] * Chunks(cols.tiles[0], len(cols.tiles), 0).apart


def smem_bytes(element_bytes: int, cols: Cover, slots: int, exchange_bytes: int, warps: int, ahead: int = 0) -> int:
    """Shared memory of a CTA: rings of all parked inputs, barriers, what warps exchange. The driver's reserve comes on top."""
    exchange = _round_up(exchange_bytes * warps, TMA_ALIGNMENT) if warps > 1 else 0
    return (slots * cols.width + prefetched_columns(cols, ahead)) * element_bytes + exchange + BARRIERS * BARRIER_BYTES


def register_limit(warps: int, here: int, device: Device) -> int:
    """The most registers of a thread with which so many CTAs share an SM.

    Told nothing, ptxas rather spills a few words than leaves a round number; told the most, it does not.
    """
    return min(device.registers_per_thread, device.registers_per_sm // (32 * warps * here) // 8 * 8)


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to
