"""Names: those of a program's values in kernel text, and those that kernels use themselves."""

from __future__ import annotations

import re

from ..ir.program import Load, Op, Program, Reduce
from .helpers import FUNCTIONS

# Names in the text of Triton kernels: what they import and call, indices, and values that a kernel has once.
# fmt: off
TRITON_NAMES = (
    "tl", "triton", "libdevice", *FUNCTIONS, "float", "zero", "pid", "part", "batch", "row_block", "col_block", "r", "c", "r_in",
    "c_in", "lane", "last", "whole", "before", "sector", "row_at", "u_edge", "c_edge", "edge_in", "u_start",
)
# fmt: on
# More names in the text of Gluon kernels: language and barriers, rings, rows of a loop, rows of a flat view, groups of CTAs, tiles.
# fmt: off
GLUON_NAMES = (
    *TRITON_NAMES,
    "gl", "gluon", "mbarrier", "tma", "fence_async_shared", "cta_barrier", "range", "TILE", "PIECE", "ready", "row_count", "lanes",
    "slot", "place", "turn", "ahead", "inside", "k", "r_at", "slot_first", "slot_early", "early", "early_inside",
    "row", "j", "c_at", "c_rest", "c_rest_in", "j_early", "number", "first", "phase", "at", "over", "later",
    "piece", "u_at", "u_first", "c_first", "first_in", "u_rest", "covered", "left_out", "early_piece", "ahead_piece", "shift",
    "border", "at_end", "end",
    "cta_rank", "row_next", "r_next", "r_at_next", "slot_next", "place_next", "row_later", "r_later",
    "tile", "tile_count", "whole_tiles", "first_col",
)
# fmt: on
_TARGET = re.compile(r"^\S+ (\w+) = ")


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
                found.append(f"{monoid.replace('.', '_')}{i}")
            case _:
                found.append(f"v{i}")
    return tuple(found)
