"""How a tile's columns are spread over threads: how many each takes at once, and what it can keep to itself.

Triton lays a tile out by the widest access it meets; kernels are written so that it lays all tiles of a kernel out alike.
"""

from __future__ import annotations

from ..ir.monoid import Monoid
from ..ir.program import Load, Store
from .kernel import Kernel
from .schedule import Block, Cover, Loop, Schedule


def vector(kernel: Kernel) -> int:
    """Elements a thread takes of a tile at once: 16 bytes of the narrowest full-size tensor, but never fewer than four."""
    return max_contiguous(kernel) or widest(kernel)


def widest(kernel: Kernel) -> int:
    """The same, whatever is stored beside it: what tiles of a layout that is said, not found, are read by."""
    return max(4, 16 // min(_full_sizes(kernel, Load, Store), default=4))


def chunk_vector(kernel: Kernel, schedule: Schedule) -> int:
    """What `vector` says, of a chunk of a parked row, which may have fewer for a thread."""
    assert isinstance(schedule.cols, Cover)
    return min(vector(kernel), schedule.cols.tiles[0] // (32 * schedule.warps))


def matches_tile_layout(kernel: Kernel, i: int, width: int, warps: int) -> bool:
    """Are a row vector's columns spread over threads as those of the tiles of this width that it meets?

    Then each thread loads its columns once for all the rows it has. They are where every thread takes as many elements at
    once of the one as of the other, and the vector alone gives it that many.
    """
    own = min(16 // kernel.program.dtypes[i].size, max_contiguous(kernel) or 16)
    return own == vector(kernel) and width >= 32 * warps * own


def private_state_columns(kernel: Kernel, schedule: Schedule, monoid: Monoid) -> int | None:
    """Columns of a walked tile that one thread holds, where every thread keeps a running state of its own; else None.

    Merging a tile across threads takes two exchanges through shared memory. A state of its own costs a thread a join for
    the few elements it holds, and threads meet once, at the end. How many elements a state is of would have to be counted.
    """
    match schedule.rows, schedule.cols:
        case Block(1), Loop(step) if not monoid.primitive and not monoid.tracks_count:
            held = step // (32 * schedule.warps)
            return held if held >= vector(kernel) and held % vector(kernel) == 0 else None
        case _:
            return None


def max_contiguous(kernel: Kernel) -> int | None:
    """The longest stretch of columns a thread may take, where that is less than the narrowest tensor would allow.

    A store of fp32 is 4 elements wide. Where 16-bit tensors are read 8 at a time beside it, Triton moves every stored tile
    between threads first, through shared memory: 7 such moves a row in the norm of 65536 x 512 that stores fp32 three times.
    Reading 16 bits 4 at a time costs more where that is most of what is read (H200: 15 % with five such inputs to one store).
    """
    stored = _full_sizes(kernel, Store)
    narrow = [size for size in _full_sizes(kernel, Load, Store) if size < 4]
    return 4 if max(stored, default=0) == 4 and narrow and 2 * stored.count(4) >= len(narrow) else None


def _full_sizes(kernel: Kernel, *kinds: type) -> list[int]:
    """Bytes of an element of each full-size tensor that is read or written."""
    program = kernel.program
    full = [n for n, is_full in zip(program.nodes, kernel.is_full, strict=True) if is_full]
    return [program.buffer[n.buffer].dtype.size for n in full if isinstance(n, (Load, Store)) and isinstance(n, kinds)]
