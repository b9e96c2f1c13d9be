"""Steps -> Gluon source, for schedules that stage rows in shared memory.

A CTA processes its rows one after another, or a single row. Walks read the chunks of a row from a ring in shared memory
(`rings`), in a loop that the compiler does not unroll, so registers never hold more than one chunk. The parts of the lowering are
made here and given to each other: how rows lie in memory (`row_access`), the copies that stage them (`row_copies`), the ring,
what a loop over rows accumulates (`gluon_mix_order`), and the order in which rows are processed, alone or by a group of CTAs
(`gluon_multi_cta`).
"""

from __future__ import annotations

from ..ir.program import Buffer
from ..ir.size import Bindings
from ..plan.kernel import Kernel
from ..plan.schedule import PIECE_ELEMS, Schedule
from ..plan.staged_rows import TMA_BOX
from ..plan.thread_layout import chunk_vector
from .expr import GLUON
from .folds import Folds
from .gluon_mix_order import Accumulation, walk_from
from .gluon_multi_cta import RowGroups, mailboxes
from .kernel_ir import Expr, Layout, Name
from .memory import Env, Memory
from .names import SPLIT
from .printer import Lowered
from .rings import CopyRing, Ring, RowRing, end_barriers, make_barriers
from .row_access import FIRST, AlignedRows, FlatRows, RowAccess
from .row_copies import Geometry, RowCopies, geometry
from .row_walks import EachRow, Rows, RowWalks
from .scope import Scope
from .source import GridDim
from .staged_values import RowParts, StagedRows
from .steps import steps
from .tile_refs import TileRef
from .values import Values


def lower(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Lowered:
    """One kernel that stages rows, put together from its parts."""
    scope, flat = Scope(kernel, schedule, name, wide), bool(schedule.sector_elems)
    at = geometry(schedule, scope.extent, PIECE_ELEMS if flat else TMA_BOX)
    memory = Memory(kernel, schedule, bindings, GLUON)
    access: RowAccess = FlatRows(scope, at.cols, memory) if flat else AlignedRows(scope, at.cols)
    copies = RowCopies(scope, at, access)
    numbers: dict[str, int | Expr] = {"": Name("k") if at.cols.count > 1 else 0, FIRST: 0}
    staging = StagedRows(copies.memory, access, at.cols.count, numbers)
    values = Values(memory, scope.builder, staging)
    folds = Folds(kernel, values, row_loop=not at.one_row)
    ring: Ring = (
        CopyRing(scope.builder, at, copies, walk_from(schedule)) if at.prefetch else RowRing(scope.builder, at, copies, numbers)
    )
    parts = RowParts(scope, at, steps(kernel, schedule), values, folds)
    accumulation = Accumulation(parts, staging, numbers) if at.accumulates else None
    walks = RowWalks(parts, ring, access, accumulation)
    rows: Rows = RowGroups(walks, staging) if schedule.ctas_per_row > 1 else EachRow(walks)
    _body(walks, copies, rows)
    return scope.lowered(copies.maps(), _grid(scope, at), _cleared(scope), reads_staged=flat)


def _body(walks: RowWalks, copies: RowCopies, rows: Rows) -> None:
    scope, builder, ring = walks.scope, walks.builder, walks.ring
    along = chunk_vector(scope.kernel, scope.schedule)
    builder.add(Layout(Name("TILE"), (1, along), (1, 32), (1, scope.schedule.warps)))
    scope.count_rows()
    _name_cta(scope, walks.at)
    copies.allocate()
    make_barriers(builder, ring.slots)
    walks.access.view_tails(copies.memory)
    tiles = walks.access.tiles()
    env: Env = {}
    for i in walks.steps.constants:
        walks.values.node(i, TileRef(), env)
    ring.fill()
    if walks.at.one_row:
        walks.row(env, tiles)
    else:
        walks.loop(rows, env, tiles)
    end_barriers(builder, ring.slots)


def _name_cta(scope: Scope, at: Geometry) -> None:
    """Name this CTA's row, or its share of the rows. A group of CTAs has one share and writes one partial result."""
    ctas, put = scope.schedule.ctas_per_row, scope.builder.set
    put("row" if at.one_row else SPLIT, "gl.program_id(0)" if ctas == 1 else f"gl.program_id(0) // {ctas}")
    if ctas > 1:
        put("cta_rank", f"gl.program_id(0) % {ctas}")


def _grid(scope: Scope, at: Geometry) -> tuple[GridDim, ...]:
    if at.one_row:
        return (GridDim(scope.rows),)
    if at.accumulates:  # the join kernel reads the states of every CTA
        return (GridDim(at.split * scope.schedule.ctas_per_row),)
    return (GridDim(scope.rows, max_programs=at.split),)


def _cleared(scope: Scope) -> tuple[Buffer, ...]:
    return (mailboxes(scope),) if scope.schedule.ctas_per_row > 1 else ()
