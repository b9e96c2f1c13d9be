"""Schedule legality: decide whether a schedule can run a kernel on a device.

This is the only place that knows. Candidates yield what `check` accepts, and code generation relies on it. Predicted time and
predicted registers play no part here: a legal schedule may be slow or spill, but its results are right.
"""

from __future__ import annotations

from collections.abc import Callable

from ..device import Device
from ..ir.program import Load, Store
from .access import PART, contiguous_row_stride
from .kernel import Kernel
from .legality import Family, Illegal, Reason, accumulates_rows, may_split
from .resources import ctas_per_sm, demand, estimate, tile_of
from .schedule import SECTOR, Block, Cover, Loop, Schedule, sector_span
from .staged_rows import (
    BARRIERS,
    PIECE_ELEMS,
    TMA_BOX,
    Chunks,
    chunks,
    may_span_ctas,
    must_stage,
    row_vector_smem_bytes,
    tma_stageable,
    tma_stageable_unaligned,
)
from .staged_tiles import strips, tile_stageable
from .thread_layout import chunk_vector, explicit_vector

MAX_WARPS = 32  # 1024 threads
MAX_TILE_ELEMS = 1 << 20  # of a Triton tensor
MIN_REGISTERS = 16  # smallest register cap
HAS_TMA = (9, 0)  # first compute capability with TMA


def check(kernel: Kernel, schedule: Schedule, device: Device, emitted: bool = False) -> Illegal | None:
    """Why a schedule cannot run a kernel on a device; None if it can.

    `emitted`: the kernel is as it will be emitted, so that a split reduction has become partial states. Before that, the kernel
    must only be one that can be split.
    """
    for rule in (_sizes, _roles, _fields, _sectors, _in_registers, _staging, _row_vectors):
        if found := rule(kernel, schedule):
            return found
    return _split(kernel, schedule, emitted) or _limits(kernel, schedule, device)


# ---- sizes and roles ------------------------------------------------------------------------------------------------------------


def _sizes(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Every size is a power of two where Triton needs one, and at least 1."""
    for side, role in (("rows", schedule.rows), ("columns", schedule.cols)):
        widths = role.tiles if isinstance(role, Cover) else (role.size if isinstance(role, Block) else role.step,)
        if not widths or not all(map(_is_power_of_two, widths)):
            return _illegal(Reason.SIZES, f"tiles of {_listed(widths)} {side}: every size must be a power of two")
        if isinstance(role, Loop) and role.split < 1:
            return _illegal(Reason.SIZES, f"{role.split} CTAs share the {side}: at least one must")
    if not _is_power_of_two(schedule.warps) or schedule.warps > MAX_WARPS:
        return _illegal(Reason.SIZES, f"{schedule.warps} warps: a power of two up to {MAX_WARPS} is possible")
    if schedule.stages < 1 or schedule.prefetch < 0 or schedule.sector_elems < 0 or schedule.ctas_per_row < 1:
        return _illegal(Reason.SIZES, "stages and CTAs per row are at least 1, prefetched copies and sectors at least 0")
    tile = tile_of(schedule)
    if tile.height * tile.width > MAX_TILE_ELEMS:
        return _illegal(Reason.SIZES, f"a tile of {tile.height} x {tile.width} has more than {MAX_TILE_ELEMS} elements")
    return None


def _roles(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """The roles of both sides fit the reductions, and the tiles fit the sides."""
    over_rows, over_cols = any(f.rows for f in kernel.folds), any(f.cols for f in kernel.folds)
    staged_inner = bool(schedule.staged) and not schedule.accumulates_columns
    match schedule.rows, schedule.cols:
        case Block(), Block():
            wrong = "a reduction needs a side that is covered or walked" if over_rows or over_cols else ""
        case Block(), Loop() if schedule.sector_elems and not over_rows:
            wrong = ""  # also of a kernel without reductions, whose rows start inside sectors
        case (Block(), Cover() | Loop()):
            wrong = "reductions over rows need rows that are covered or walked" if over_rows else _none("columns", over_cols)
        case Cover() | Loop(), Block():
            wrong = "reductions over columns need columns that are covered or walked" if over_cols else _none("rows", over_rows)
        case Loop(), Cover() if staged_inner:
            wrong = "this loop over rows accumulates no reductions over rows" if over_rows else _none("columns", over_cols)
        case Loop(), Cover():
            wrong = "" if accumulates_rows(kernel) else "reductions over rows do not end with the loop, or there are none"
        case _:
            wrong = "no kernel family has these roles"
    if not wrong and isinstance(schedule.rows, (Cover, Loop)) and isinstance(schedule.cols, Block) and kernel.space.block:
        wrong = "block reductions need columns that are covered or walked"
    return _illegal(Reason.ROLES, f"{_named(schedule)}: {wrong}") if wrong else _tiles(kernel, schedule)


def _none(side: str, there: bool) -> str:
    return "" if there else f"there is no reduction over {side}"


def _tiles(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Covers cover their side, every tile has something to do, and block reductions end inside a tile."""
    program, space = kernel.program, kernel.space
    for side, role, axes in (("rows", schedule.rows, space.rows), ("columns", schedule.cols, space.cols)):
        extent = program.extent(axes)
        if not isinstance(role, Cover):
            continue
        if not isinstance(extent, int):
            return _illegal(Reason.SIZES, f"the number of {side} is not known, so no tiles can cover them")
        if side == "columns" and schedule.ctas_per_row > 1:
            if extent % schedule.ctas_per_row:
                return _illegal(Reason.SIZES, f"{extent} columns are not divisible by {schedule.ctas_per_row} CTAs per row")
            extent //= schedule.ctas_per_row
        if side == "columns" and schedule.sector_elems and not schedule.staged:
            extent = sector_span(extent, schedule.sector_elems)
        if not role.width - role.tiles[-1] < extent <= role.width:
            return _illegal(Reason.SIZES, f"tiles of {_listed(role.tiles)} do not cover {extent} {side}, or one of them is empty")
    size = program.extent(space.block)
    cols = schedule.cols
    widths = cols.tiles if isinstance(cols, Cover) else (cols.size if isinstance(cols, Block) else cols.step,)
    if space.block and not (isinstance(size, int) and all(w % size == 0 for w in widths)):
        return _illegal(Reason.SIZES, f"blocks of {size} columns do not end inside tiles of {_listed(widths)}")
    return None


# ---- fields ---------------------------------------------------------------------------------------------------------------------


def _fields(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Fields that have no meaning in the family are at their defaults."""
    row_loop = isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Cover)
    looped = isinstance(schedule.rows, Loop) or isinstance(schedule.cols, Loop)
    staged_row_loop = row_loop and bool(schedule.staged)
    for wrong, detail in (
        (schedule.stages > 1 and not looped, "pipeline stages without a loop"),
        (schedule.prefetch and not (staged_row_loop and schedule.stages == 1), "prefetch without a ring of one row"),
        (schedule.accumulates_columns and not staged_row_loop, "accumulates_columns without a loop over staged rows"),
        (schedule.ctas_per_row > 1 and not schedule.accumulates_columns,
         "several CTAs per row without staged rows that accumulate over rows"),
        (schedule.registers and not schedule.staged, "a register cap without staged loads"),
        (schedule.hoisted and not row_loop, "row vectors in registers without a loop over rows"),
        (schedule.hoisted and schedule.staged and not schedule.accumulates_columns,
         "row vectors in registers of a loop over staged rows that accumulates nothing"),
        (schedule.beside and not schedule.accumulates_columns, "row vectors in smem without staged rows that accumulate over rows"),
        (schedule.hoisted and schedule.beside, "row vectors both in registers and in smem"),
    ):
        if wrong:
            return _illegal(Reason.FIELDS, detail)
    return None


def _sectors(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Rows are read from sector starts only where a CTA reads single rows that may start inside a sector."""
    sector = schedule.sector_elems
    if not sector or schedule.staged:
        return None
    if not _is_power_of_two(sector) or sector > SECTOR:
        return _illegal(Reason.SIZES, f"sectors of {sector} elements: a power of two up to {SECTOR} is possible")
    match schedule.rows, schedule.cols:
        case Block(1), Cover() | Loop(split=1):
            pass
        case _:
            return _illegal(Reason.FIELDS, "sectors are read where a CTA covers or walks a row that it does not share")
    if kernel.space.block:
        return _illegal(Reason.FIELDS, "sectors of rows with block reductions")
    moved: dict[object, int] = {}
    for i, node in enumerate(kernel.program.nodes):
        if isinstance(node, (Load, Store)) and kernel.is_full[i] and (step := contiguous_row_stride(kernel, node)) is not None:
            moved[step] = moved.get(step, 0) + kernel.program.buffer[node.buffer].dtype.size
    steps = [step for step, size in moved.items() if size == max(moved.values())]
    if all(isinstance(step, int) and step % sector == 0 for step in steps):
        return _illegal(Reason.FIELDS, f"sectors of {sector} elements where no row starts inside one")
    return None


# ---- where inputs wait ----------------------------------------------------------------------------------------------------------


def _in_registers(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Resident loads are needed in several phases, on a side that is covered by unrolled tiles."""
    if not schedule.resident:
        return None
    if schedule.staged:
        return _illegal(Reason.STORAGE, "some loads are resident and some are staged")
    if not (isinstance(schedule.rows, Cover) or isinstance(schedule.cols, Cover)):
        return _illegal(Reason.STORAGE, "loads are resident where neither side is covered")
    if not schedule.resident <= frozenset(kernel.multi_phase):
        return _illegal(Reason.STORAGE, "only full-size loads that several phases use are resident")
    return None


def _staging(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Staged loads are what TMA can describe, as rows or as tiles, and their rings have mbarriers."""
    if not schedule.staged:
        return None
    if schedule.stages > BARRIERS:
        return _illegal(Reason.STORAGE, f"a ring of {schedule.stages} slots: there are {BARRIERS} mbarriers")
    match schedule.rows, schedule.cols:
        case Loop(), Block():
            return _staged_tiles(kernel, schedule)
        case (Block(1) | Loop(step=1)), Cover():
            return _staged_rows(kernel, schedule)
        case _:
            return _illegal(Reason.STORAGE, "only whole rows, one at a time, or tiles of a walk down the columns are staged")


def _staged_tiles(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Tiles of all full-size inputs are staged, in a shape that threads and TMA can read."""
    if schedule.staged != frozenset(tile_stageable(kernel)):
        return _illegal(Reason.STORAGE, "staged tiles need every full-size input, each of which TMA can describe, and one pass")
    if schedule.sector_elems:
        return _illegal(Reason.FIELDS, "sectors of staged tiles")
    sizes = sum(kernel.program.dtypes[i].size for i in schedule.staged)
    return _raises(lambda: strips(schedule, explicit_vector(kernel), sizes))


def _staged_rows(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Rows are staged in chunks that every thread has a part of."""
    unaligned = bool(schedule.sector_elems)
    stageable = frozenset(tma_stageable_unaligned(kernel) if unaligned else tma_stageable(kernel))
    extent, cols = kernel.program.extent(kernel.space.cols), schedule.cols
    if not schedule.staged <= stageable or unaligned and schedule.accumulates_columns:
        return _illegal(Reason.STORAGE, f"TMA cannot describe all staged loads as rows{' of pieces' if unaligned else ''}")
    if unaligned and schedule.sector_elems != PIECE_ELEMS:
        return _illegal(Reason.SIZES, f"unaligned rows are staged in pieces of {PIECE_ELEMS}, not {schedule.sector_elems}")
    if schedule.accumulates_columns and not must_stage(kernel) <= schedule.staged:
        return _illegal(Reason.STORAGE, "a load that several passes use is not staged")
    if isinstance(schedule.rows, Block) and schedule.stages > 1:
        return _illegal(Reason.FIELDS, "a ring of several rows where a CTA has one")
    assert isinstance(cols, Cover) and isinstance(extent, int), "roles and tiles are checked before"
    if found := _raises(lambda: chunks(cols, extent // schedule.ctas_per_row)):
        return found
    shape = chunks(cols, extent // schedule.ctas_per_row)
    if shape.width < 32 * schedule.warps:
        return _illegal(Reason.SIZES, f"chunks of {shape.width} columns leave some of {32 * schedule.warps} threads without any")
    if shape.rest and shape.rest < min(shape.width, 32 * schedule.warps * chunk_vector(kernel, schedule)):
        return _illegal(Reason.SIZES, f"a rest of {shape.rest} columns leaves some of {32 * schedule.warps} threads without any")
    return _unaligned(shape, extent) if unaligned else _ring(kernel, schedule, shape, extent)


def _unaligned(shape: Chunks, extent: int) -> Illegal | None:
    """Unaligned rows end in a rest that has room for the offset of a row, and for the end of the tensor."""
    over = extent - shape.count * shape.width
    if over < PIECE_ELEMS or not over + PIECE_ELEMS - 1 <= shape.rest <= shape.width or shape.width % PIECE_ELEMS:
        return _illegal(Reason.SIZES, f"chunks of {shape.width} and a rest of {shape.rest} do not fit unaligned rows of {extent}")
    return None


def _ring(kernel: Kernel, schedule: Schedule, shape: Chunks, extent: int) -> Illegal | None:
    """Prefetched copies fit their mbarriers; a row that several CTAs share is cut evenly."""
    if schedule.prefetch and not shape.copies:
        return _illegal(Reason.SIZES, "prefetch of rows that are not several whole copies")
    if schedule.prefetch and shape.copies + schedule.prefetch > BARRIERS:
        return _illegal(Reason.SIZES, f"{schedule.prefetch} copies prefetched by a row of {shape.copies}: {BARRIERS} mbarriers")
    if schedule.ctas_per_row == 1:
        return None
    if not may_span_ctas(kernel):
        return _illegal(Reason.ROLES, "these reductions cannot be exchanged between several CTAs per row")
    if shape.rest or extent % TMA_BOX or shape.width % TMA_BOX:
        return _illegal(Reason.SIZES, f"parts of a row that are not chunks of one width in boxes of {TMA_BOX}")
    if schedule.stages < 2:
        return _illegal(Reason.STORAGE, "several CTAs per row stage two rows at once")
    return None


def _row_vectors(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Row vectors wait in shared memory if there are any, their types can be staged, and chunks have one width."""
    if not schedule.beside:
        return None
    if not row_vector_smem_bytes(kernel):
        return _illegal(Reason.STORAGE, "there are no row vectors, or not of types that can be staged")
    assert isinstance(schedule.cols, Cover), "fields are checked before"
    if len(set(schedule.cols.tiles)) > 1 or schedule.cols.width * schedule.ctas_per_row != kernel.extent(kernel.space.cols):
        return _illegal(Reason.STORAGE, "row vectors in smem need chunks of one width that share the row evenly")
    return None


# ---- several CTAs, and limits of a device ---------------------------------------------------------------------------------------


def _split(kernel: Kernel, schedule: Schedule, emitted: bool) -> Illegal | None:
    """Partial results are joined: by a kernel of their own, which reads as many as there are."""
    space, splits = kernel.space, schedule.splits
    stores = any(PART in dict(n.strides) for n in kernel.program.nodes if isinstance(n, Store))
    if stores and PART not in (*space.batch, *space.rows, *space.cols):
        parts = kernel.program.extent((PART,))
        return None if parts == splits else _illegal(Reason.SPLIT, f"{splits} CTAs share what leaves {parts} partial states")
    if splits == 1:
        return None
    family = Family.INNER if isinstance(schedule.cols, Loop) else Family.OUTER
    if not may_split(kernel, family):
        return _illegal(Reason.SPLIT, f"{splits} CTAs share a reduction whose partial states cannot be joined")
    return _illegal(Reason.SPLIT, f"{splits} CTAs share a reduction that leaves no partial states") if emitted else None


def _limits(kernel: Kernel, schedule: Schedule, device: Device) -> Illegal | None:
    """A CTA fits the device, and CTAs that wait for each other run at once."""
    if schedule.staged and device.capability < HAS_TMA:
        return _illegal(Reason.DEVICE, f"loads are staged by TMA, which {device.title} does not have")
    threads, cap = 32 * schedule.warps, schedule.registers
    if cap and not MIN_REGISTERS <= cap <= min(device.registers_per_thread, device.registers_per_sm // threads):
        return _illegal(Reason.DEVICE, f"a cap of {cap} registers for {threads} threads of one register file")
    smem = estimate(demand(kernel), schedule, device).smem_bytes
    if smem > device.smem_per_cta:
        return _illegal(Reason.DEVICE, f"{smem} bytes of shared memory: a CTA can have {device.smem_per_cta}")
    if schedule.ctas_per_row == 1:
        return None
    assert isinstance(schedule.rows, Loop), "fields are checked before"
    registers = cap or min(device.registers_per_thread, device.registers_per_sm // threads)
    ctas, at_once = schedule.rows.split * schedule.ctas_per_row, ctas_per_sm(registers, smem, schedule.warps, device) * device.sms
    if ctas > at_once:  # a CTA would wait for one that never starts
        return _illegal(Reason.DEVICE, f"{ctas} CTAs that wait for each other: {at_once} run at once")
    return None


# ---- words ----------------------------------------------------------------------------------------------------------------------


def _illegal(reason: Reason, detail: str) -> Illegal:
    return Illegal(reason, detail)


def _raises(make: Callable[[], object]) -> Illegal | None:
    """The refusal of a shape that its own constructor refuses."""
    try:
        make()
    except ValueError as error:
        return _illegal(Reason.SIZES, str(error))
    return None


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _listed(sizes: tuple[int, ...]) -> str:
    return "+".join(map(str, sizes)) or "no"


def _named(schedule: Schedule) -> str:
    return f"rows {type(schedule.rows).__name__}, columns {type(schedule.cols).__name__}"
