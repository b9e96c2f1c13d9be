"""Names: those of a program's values in kernel text, and those that kernels use themselves."""

from __future__ import annotations

import re

from ..ir.program import Load, Op, Program, Reduce
from ..ir.size import Size
from ..plan.kernel import Kernel
from ..plan.schedule import Schedule
from .helpers import FUNCTIONS

SPLIT = "split_id"  # which share of the rows or columns a CTA, or a group of CTAs, has

# Names in the text of Triton kernels: what they import and call, indices, and values that a kernel has once.
# fmt: off
TRITON_NAMES = (
    "tl", "triton", "libdevice", *FUNCTIONS, "float", "zero", "pid", SPLIT, "batch", "row_block", "col_block",
    "row", "row_start", "rows", "rows_in", "col_start", "cols", "cols_in",
    "lane", "last", "whole", "before", "sector", "row_offset", "pos_edge", "cols_edge", "edge_in", "pos_start",
)
# fmt: on
# More names in the text of Gluon kernels: language and barriers, rings, rows of a loop, rows of a flat view, groups of CTAs, tiles.
# fmt: off
GLUON_NAMES = (
    *TRITON_NAMES,
    "gl", "gluon", "mbarrier", "tma", "fence_async_shared", "cta_barrier", "range", "TILE", "PIECE", "ready", "row_count", "lanes",
    "slot", "first_chunk", "first_strip", "iteration", "prefetch_row", "prefetch_tile", "prefetch_in", "k", "j", "each_slot",
    "prologue_slot", "prologue_row", "prologue_tile", "prologue_in", "prologue_j",
    "row_index", "cols_rest", "cols_rest_in", "copies_done", "first_slot", "phase", "copy_slot", "wrapped", "next_copy",
    "pos", "pos_rest", "cols_first", "first_in", "covered", "prologue_row_piece", "prefetch_row_piece", "shift", "border",
    "tail_elems", "tail_lanes", "tail_piece",
    "cta_rank", "row_next", "row_index_next", "rows_next", "slot_next", "first_chunk_next", "row_later", "row_index_later",
    "tile", "tile_count", "whole_tiles", "first_col",
)
# fmt: on
_TARGET = re.compile(r"^\S+ (\w+) = ")
_STAGE = re.compile(r"\..*")  # of a split reduction, behind its name


def value_names(program: Program) -> tuple[str, ...]:
    """The name of each value: the user's name if it is the result of a source line, else one after its buffer or op."""
    last = {n.src: i for i, n in enumerate(program.nodes) if n.src and isinstance(n, (Op, Load))}
    found = []
    for i, node in enumerate(program.nodes):
        target = _TARGET.match(node.src)
        match node:
            case _ if target and last.get(node.src) == i and target[1].isascii():
                found.append(target[1])
            case Load(buffer=buffer):
                found.append(buffer)
            case Op(name=name):
                found.append(f"{name}{i}")
            case Reduce(monoid=monoid):
                found.append(f"{_STAGE.sub('', monoid)}{i}")
            case _:
                found.append(f"v{i}")
    return tuple(found)


def description(kernel: Kernel, schedule: Schedule) -> str:
    """The docstring of a kernel: its family in words, the sizes of its sides, and the schedule."""
    about = (type(schedule).__doc__ or "").strip()
    space, extent = kernel.space, kernel.program.extent
    sides = (("rows", space.rows), ("columns", space.cols), ("batch", space.batch))
    sizes = ", ".join(f"{what}: {_readable(extent(axes))}" for what, axes in sides if axes)
    how = str(schedule).removeprefix(f"{schedule.family}: ")
    return f"{schedule.family}: {about[:1].lower()}{about[1:]}\n\n{sizes}\nschedule: {how}"


def _readable(size: Size) -> str:
    return str(size).replace("*", " * ")
