"""Thread layout of a tile's columns: how many adjacent elements a thread takes, and which states it can keep to itself.

Triton picks a tile's layout by its widest access. Kernels are written so that all tiles of a kernel get the same layout.
"""

from __future__ import annotations

from ..ir.monoid import Monoid
from ..ir.program import Load, Store
from .kernel import Kernel
from .schedule import Block, Cover, Loop, Schedule


def vector(kernel: Kernel) -> int:
    """Adjacent elements per thread: 16 bytes of the narrowest full-size tensor, at least 4 elements."""
    return max_contiguous(kernel) or explicit_vector(kernel)


def explicit_vector(kernel: Kernel) -> int:
    """Vector width under an explicit layout, where Triton chooses none: fp32 stores do not limit it."""
    return max(4, 16 // min(_full_sizes(kernel, Load, Store), default=4))


def chunk_vector(kernel: Kernel, schedule: Schedule) -> int:
    """Vector width of a chunk of a staged row, which may be too narrow for `vector`."""
    assert isinstance(schedule.cols, Cover)
    return min(vector(kernel), schedule.cols.tiles[0] // (32 * schedule.warps))


def matches_tile_layout(kernel: Kernel, i: int, width: int, warps: int) -> bool:
    """Whether a row vector's columns lie on the same threads as those of the tiles of this width.

    If so, each thread loads its columns once for all its rows. This needs the same vector width for both, and tiles at least
    one vector per thread wide.
    """
    own = min(16 // kernel.program.dtypes[i].size, max_contiguous(kernel) or 16)
    return own == vector(kernel) and width >= 32 * warps * own


def private_state_columns(kernel: Kernel, schedule: Schedule, monoid: Monoid) -> int | None:
    """Columns of a walked tile per thread, if each thread keeps its own running state; otherwise None.

    Merging a tile across threads takes two exchanges through shared memory. With its own state, a thread merges only the few
    elements it holds, and threads exchange states once, at the end. Monoids that count elements are excluded, because each
    state would need its own count.
    """
    match schedule.rows, schedule.cols:
        case Block(1), Loop(step) if not monoid.primitive and not monoid.tracks_count:
            held = step // (32 * schedule.warps)
            return held if held >= vector(kernel) and held % vector(kernel) == 0 else None
        case _:
            return None


def max_contiguous(kernel: Kernel) -> int | None:
    """Limit on adjacent columns per thread, if it is below what the narrowest tensor allows; otherwise None.

    fp32 stores are 4 elements wide. If 16-bit tensors are read 8 at a time next to them, Triton converts the layout of every
    stored tile through shared memory: 7 conversions per row in a norm of 65536x512 with three fp32 stores. Reading 16-bit
    tensors 4 at a time costs more if they dominate (H200: 15 % with five such inputs and one store).
    """
    stored = _full_sizes(kernel, Store)
    narrow = [size for size in _full_sizes(kernel, Load, Store) if size < 4]
    return 4 if max(stored, default=0) == 4 and narrow and 2 * stored.count(4) >= len(narrow) else None


def _full_sizes(kernel: Kernel, *kinds: type) -> list[int]:
    """Element sizes of the full-size tensors that are read or written."""
    program = kernel.program
    full = [n for n, is_full in zip(program.nodes, kernel.is_full, strict=True) if is_full]
    return [program.buffer[n.buffer].dtype.size for n in full if isinstance(n, (Load, Store)) and isinstance(n, kinds)]
