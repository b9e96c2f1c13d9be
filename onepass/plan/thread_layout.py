"""Thread layout of a tile's columns: how many adjacent elements a thread takes, and which states it can keep to itself.

Triton picks a tile's layout by its widest access. Kernels are written so that all tiles of a kernel get the same layout.
"""

from __future__ import annotations

from ..ir.monoid import Monoid
from ..ir.program import Load, Store
from .kernel import Kernel
from .schedule import Cover, LoopedRows, Schedule, SplitRows


def vector(kernel: Kernel) -> int:
    """Adjacent elements per thread, as the planner chooses: 16 bytes of the narrowest full-size tensor, at least 4 elements."""
    return max_contiguous(kernel) or explicit_vector(kernel)


def access_vector(kernel: Kernel, schedule: Schedule) -> int:
    """Adjacent elements per thread under a schedule."""
    return schedule.vector_limit or explicit_vector(kernel)


def explicit_vector(kernel: Kernel) -> int:
    """Vector width that the types allow. Under an explicit layout, where Triton chooses none, fp32 stores do not limit it."""
    return max(4, 16 // min(_full_sizes(kernel, Load, Store), default=4))


def chunk_vector(kernel: Kernel, schedule: Schedule) -> int:
    """Vector width of a chunk of a staged row, which may be too narrow for `vector`."""
    assert isinstance(schedule.cols, Cover)
    return min(access_vector(kernel, schedule), schedule.cols.tiles[0] // (32 * schedule.warps))


def matches_tile_layout(kernel: Kernel, i: int, width: int, warps: int, vector_limit: int) -> bool:
    """Whether a row vector's columns lie on the same threads as those of the tiles of this width.

    If so, each thread loads its columns once for all its rows. This needs the same vector width for both, and tiles at least
    one vector per thread wide.
    """
    own = min(16 // kernel.program.dtypes[i].size, vector_limit or 16)
    return own == (vector_limit or explicit_vector(kernel)) and width >= 32 * warps * own


def allows_private_states(monoid: Monoid) -> bool:
    """Whether each thread can keep its own state of a walk. Not if the monoid counts elements: each state would need a count.

    A primitive fold keeps one value per lane anyway.
    """
    return not monoid.primitive and not monoid.tracks_count


def private_state_columns(kernel: Kernel, schedule: Schedule) -> int:
    """Columns of a walked tile per thread, where each thread keeps its own states; 0 if a thread has no whole vectors of a tile."""
    match schedule:
        case LoopedRows(height=1) | SplitRows(height=1):
            held, least = schedule.step // (32 * schedule.warps), access_vector(kernel, schedule)
            return held if held >= least and held % least == 0 else 0
        case _:
            return 0


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
