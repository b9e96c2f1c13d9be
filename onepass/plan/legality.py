"""Fusion legality: decide whether results may share a kernel, and which kernel families can run it.

Legality never weighs cost. See `cost` and `partition` for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ..device import Device
from ..errors import UnsupportedOnDevice
from ..ir.monoid import MONOIDS, Stage
from ..ir.program import Const, Op, Program, Reduce, operands
from ..ir.size import Bindings
from .access import PART
from .kernel import Across, Kernel, Space, contiguous_axis, memory_order


class Family(Enum):
    """Kernel families, by the sides they walk."""

    POINTWISE = "pointwise"
    INNER = "inner"  # whole rows; no reduction over rows
    OUTER = "outer"  # tiles of columns; no reduction over columns
    MIX = "mix-order"  # a loop over whole rows that also accumulates reductions over rows


class Reason(Enum):
    """Why a merge or a schedule was refused."""

    AXES = "the reductions do not fold the same rows or columns"
    WALKS = "no value varies over all axes, so one kernel would recompute each result for every position of the others"
    ORDER = "a reduction over rows is used on the data again, and the data also needs whole rows at once"
    CYCLE = "a third kernel depends on one of the two and feeds the other"
    SLOWER = "one kernel is predicted to be slower than two"
    NO_SCHEDULE = "no schedule fits the registers and shared memory of an SM"
    FAMILY = "the family of the schedule does not compute the reductions"
    SIZES = "the sizes of the schedule do not fit each other or the data"
    FIELDS = "a field of the schedule has no meaning in its family"
    STORAGE = "inputs cannot wait where the schedule puts them"
    SPLIT = "partial results of the schedule cannot be joined"
    DEVICE = "the schedule exceeds a limit of the device"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A merge that was not made, with the fused and separate costs where both are known."""

    reason: Reason
    between: tuple[str, str]
    detail: str
    cost_fused_us: float | None = None
    cost_apart_us: float | None = None


@dataclass(frozen=True, slots=True)
class Illegal:
    """Why a set of results cannot be one kernel."""

    reason: Reason
    detail: str


def space_of(program: Program, bindings: Bindings) -> Space | Illegal:
    """Group a sub-Program's axes so that every reduction folds rows, columns, both, or blocks of columns."""
    everything = frozenset(a.name for a in program.axes if a.name != PART or _folds_part(program))
    if not _is_walked_together(program, everything):
        return Illegal(Reason.WALKS, f"no value varies over all of {_list([everything])}")
    order = memory_order(program, bindings)
    sets = {frozenset(n.axes) for n in program.nodes if isinstance(n, Reduce)}
    near = contiguous_axis(program, bindings)
    if near is not None and near not in everything:
        near = None
    outer = [s for s in sets if near not in s]
    inner = sorted((s for s in sets if near in s), key=len)
    if len(outer) > 1:
        outer = sorted(outer, key=len)
        if any(s != outer[-1] for s in outer):
            return Illegal(Reason.AXES, f"reductions over {_list(outer)} walk different rows")
    rows = outer[0] if outer else frozenset()
    pure = [s for s in inner if not s & rows and s != everything]
    if outer:
        cols = pure[-1] if pure else _fast_side(everything - rows, rows, order)
    elif inner:
        cols = pure[-1] if pure else inner[-1]
        rows = everything - cols
    else:
        cols = frozenset({near}) if near is not None else frozenset()
        rows = everything - cols
    return _checked(sets, everything, rows, cols, order)


def _is_walked_together(program: Program, everything: frozenset[str]) -> bool:
    """Whether some value or reduction input varies over every axis.

    Otherwise the space is a product of unrelated walks and has far more points than any of them.
    """
    domains = (program.dims[i] | frozenset(n.axes if isinstance(n, Reduce) else ()) for i, n in enumerate(program.nodes))
    return any(domain >= everything for domain in domains)


def _folds_part(program: Program) -> bool:
    return any(PART in n.axes for n in program.nodes if isinstance(n, Reduce))


def _fast_side(kept: frozenset[str], rows: frozenset[str], order: dict[str, int]) -> frozenset[str]:
    """The axes kept by an outer reduction that are faster in memory than the reduced rows."""
    inside = frozenset(a for a in kept if order[a] > max(order[r] for r in rows))
    return inside or kept


def _checked(
    sets: set[frozenset[str]], everything: frozenset[str], rows: frozenset[str], cols: frozenset[str], order: dict[str, int]
) -> Space | Illegal:
    def by_order(axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(axes, key=order.__getitem__))

    ordered = by_order(cols)
    blocks = {s for s in sets if s not in (rows, cols, rows | cols)}
    if len(blocks) > 1 or any(frozenset(ordered[len(ordered) - len(s) :]) != s for s in blocks):
        return Illegal(Reason.AXES, f"reductions over {_list(sets)} fold different parts of the same data")
    block = by_order(next(iter(blocks))) if blocks else ()
    return Space(by_order(everything - rows - cols), by_order(rows), ordered, block)


def _list(sets: "set[frozenset[str]] | list[frozenset[str]]") -> str:
    return ", ".join("(" + " ".join(sorted(s)) + ")" for s in sorted(sets, key=sorted))


def families(kernel: Kernel, walked: Kernel) -> tuple[Family, ...] | Illegal:
    """The kernel families that can run a kernel. `walked` is the same kernel with its reductions rewritten for walks."""
    space, folds = kernel.space, kernel.folds
    if space.block:
        size = kernel.program.extent(space.block)
        if not isinstance(size, int) or size & (size - 1):
            return Illegal(Reason.AXES, f"blocks of {size} columns do not tile a kernel: the size must be a constant power of two")
        if any(f.block and kernel.by_col[f.node] is Across.NONE for f in folds):
            return Illegal(Reason.AXES, "the result of a block reduction does not depend on the block")
    over_rows = [f for f in folds if f.rows]
    over_cols = [f for f in folds if f.cols]
    if not over_rows and not over_cols:
        return (Family.POINTWISE,)
    found = []
    if not over_rows:
        found.append(Family.INNER)
    if not over_cols and not space.block:
        found.append(Family.OUTER)
    if accumulates_rows(walked):
        found.append(Family.MIX)
    if not found:
        return Illegal(Reason.ORDER, "reductions over rows and over columns both feed values that vary by row")
    return tuple(found)


def accumulates_rows(walked: Kernel) -> bool:
    """Whether a loop over rows can accumulate all reductions over rows: there are some, and nothing in the loop reads them."""
    accumulated = frozenset(f.node for f in walked.folds if f.rows)
    return bool(accumulated) and not reused(walked, accumulated, along_rows=True) and not _needs_past_rows(walked)


def reused(kernel: Kernel, roots: frozenset[int], along_rows: bool) -> bool:
    """Whether any of these reductions feeds another reduction, or a value that varies along the side they fold."""
    after: set[int] = set(roots)
    for i, node in enumerate(kernel.program.nodes):
        if any(o in after for o in operands(node)):
            after.add(i)
            varies = kernel.by_row[i] if along_rows else kernel.by_col[i] is not Across.NONE
            if varies or isinstance(node, Reduce):
                return True
    return False


CONVERTS_FLOAT8 = (8, 9)  # first compute capability with fp8 conversions


def check_types(program: Program, device: Device) -> None:
    """Raise if a Program converts to fp8 types that the device cannot convert.

    Before sm_89, conversions to e5m2 go through half precision and round twice, wrongly for ties. Conversions from e5m2 are
    exact.
    """
    for node, dtype in zip(program.nodes, program.dtypes, strict=True):
        made = isinstance(node, Const) or isinstance(node, Op) and node.name == "cast"
        if device.capability < CONVERTS_FLOAT8 and dtype.is_float8 and (made or dtype.name == "f8e4m3"):
            needed = ".".join(map(str, CONVERTS_FLOAT8))
            raise UnsupportedOnDevice(what=program.name, dtype=dtype.torch, device=device.title, needed=needed)


def _needs_past_rows(kernel: Kernel) -> bool:
    """Whether a value computed after the loop over rows reads a per-row reduction result, which no longer exists by then."""
    accumulated = {f.node for f in kernel.folds if f.rows}
    inside = {f.node for f in kernel.folds if not f.rows}
    after: set[int] = set()
    for i, node in enumerate(kernel.program.nodes):
        sources = operands(node)
        if any(o in inside for o in sources) and i not in accumulated:
            inside.add(i)
        if any(o in accumulated or o in after for o in sources):
            after.add(i)
            if any(o in inside and o not in after for o in sources):
                return True
    return False


def may_split(kernel: Kernel, family: Family) -> bool:
    """Whether several CTAs may share each reduction and leave partial states for a second kernel to join."""
    if any(MONOIDS[n.monoid].stage is Stage.MERGE for n in kernel.program.nodes if isinstance(n, Reduce)):
        return False  # a join is never split again
    roots = frozenset(f.node for f in kernel.folds if not f.block and (f.rows or family is Family.INNER))
    return bool(roots) and not reused(kernel, roots, along_rows=family is not Family.INNER)
