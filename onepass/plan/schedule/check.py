"""Schedule legality: decide whether a schedule can run a kernel on a device.

This is the only place that knows; it asks families that stage inputs for rules of their own (`staging/`). Candidates yield what
`check` accepts, and code generation begins with it. Predicted time and predicted registers play no part here: a legal schedule may
be slow or spill, but its results are right.
"""

from __future__ import annotations

from ...device import Device
from ...ir.monoid import MONOIDS
from ...ir.program import Load, Reduce, Store
from ..access import PART, contiguous_row_stride
from ..estimate import estimate
from ..kernel import Kernel
from ..legality import Family, Illegal, Reason, accumulates_rows, may_split
from ..resources import ctas_per_sm, demand, tile_of
from ..staged_rows import HAS_TMA
from ..staging import staged_family
from ..thread_layout import allows_private_states, explicit_vector, private_state_columns
from .base import RowVectors
from .families import LoopedRows, MixOrder, MultiCtaMixOrder, ResidentRows, Schedule, SplitRows
from .roles import SECTOR, Block, Cover, Loop, Role, is_power_of_two, sector_span

MAX_WARPS = 32  # 1024 threads
MAX_TILE_ELEMS = 1 << 20  # of a Triton tensor
MIN_REGISTERS = 16  # smallest register cap


def check(kernel: Kernel, schedule: Schedule, device: Device, emitted: bool = False) -> Illegal | None:
    """Why a schedule cannot run a kernel on a device; None if it can.

    `emitted`: the kernel is as it will be emitted, so that a split reduction has become partial states. Before that, the kernel
    must only be one that can be split.
    """
    for rule in (_sizes, _reductions, _tiles, _sectors, _accesses, _in_registers, _states):
        if found := rule(kernel, schedule):
            return found
    family = staged_family(schedule)
    own = family.refused(kernel, schedule) if family else None
    return own or _split(kernel, schedule, emitted) or _limits(kernel, schedule, device)


# ---- sizes and reductions -------------------------------------------------------------------------------------------------------


def _sizes(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Every size is a power of two where Triton needs one, and at least 1."""
    for side, role in (("rows", schedule.rows), ("columns", schedule.cols)):
        widths = _widths(role)
        if not widths or not all(map(is_power_of_two, widths)):
            return Illegal(Reason.SIZES, f"tiles of {_listed(widths)} {side}: every size must be a power of two")
        if isinstance(role, Loop) and role.split < 1:
            return Illegal(Reason.SIZES, f"{role.split} CTAs share the {side}: at least one must")
    if not is_power_of_two(schedule.warps) or schedule.warps > MAX_WARPS:
        return Illegal(Reason.SIZES, f"{schedule.warps} warps: a power of two up to {MAX_WARPS} is possible")
    if schedule.stages < 1 or schedule.prefetch < 0 or schedule.sector_elems < 0:
        return Illegal(Reason.SIZES, "stages are at least 1, prefetched copies and sectors at least 0")
    sharing = {SplitRows: schedule.splits, MultiCtaMixOrder: schedule.ctas_per_row}.get(type(schedule), 2)
    if sharing < 2:
        return Illegal(Reason.SIZES, f"{sharing} CTAs per row in a family of at least two")
    tile = tile_of(schedule)
    if tile.height * tile.width > MAX_TILE_ELEMS:
        return Illegal(Reason.SIZES, f"a tile of {tile.height} x {tile.width} has more than {MAX_TILE_ELEMS} elements")
    return None


def _reductions(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """The family computes the kernel's reductions."""
    over_rows, over_cols = any(f.rows for f in kernel.folds), any(f.cols for f in kernel.folds)
    wrong = ""
    match schedule.sides:
        case Family.POINTWISE:
            wrong = "a reduction needs a side that is covered or walked" if over_rows or over_cols else ""
        case Family.INNER:
            without = isinstance(schedule, LoopedRows) and schedule.sector_elems  # also runs a kernel without reductions
            wrong = "" if over_cols or without else "there is no reduction over columns"
            wrong = "reductions over rows need rows that are covered or walked" if over_rows else wrong
        case Family.OUTER:
            wrong = "" if over_rows else "there is no reduction over rows"
            wrong = "block reductions need columns that are covered or walked" if kernel.space.block else wrong
            wrong = "reductions over columns need columns that are covered or walked" if over_cols else wrong
        case Family.MIX:
            wrong = "" if accumulates_rows(kernel) else "reductions over rows do not end with the loop, or there are none"
    return Illegal(Reason.FAMILY, f"{schedule.family}: {wrong}") if wrong else None


def _tiles(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Covers cover their side, every tile has something to do, and block reductions end inside a tile."""
    program, space = kernel.program, kernel.space
    for side, role, axes in (("rows", schedule.rows, space.rows), ("columns", schedule.cols, space.cols)):
        extent = program.extent(axes)
        if not isinstance(role, Cover):
            continue
        if not isinstance(extent, int):
            return Illegal(Reason.SIZES, f"the number of {side} is not known, so no tiles can cover them")
        if extent % schedule.ctas_per_row:
            return Illegal(Reason.SIZES, f"{extent} columns are not divisible by {schedule.ctas_per_row} CTAs per row")
        extent //= schedule.ctas_per_row
        if isinstance(schedule, ResidentRows) and schedule.sector_elems:
            extent = sector_span(extent, schedule.sector_elems)
        if not role.width - role.tiles[-1] < extent <= role.width:
            return Illegal(Reason.SIZES, f"tiles of {_listed(role.tiles)} do not cover {extent} {side}, or one of them is empty")
    size, widths = program.extent(space.block), _widths(schedule.cols)
    if space.block and not (isinstance(size, int) and all(w % size == 0 for w in widths)):
        return Illegal(Reason.SIZES, f"blocks of {size} columns do not end inside tiles of {_listed(widths)}")
    return None


def _sectors(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Rows are read from sector starts only where a CTA reads single rows that may start inside a sector."""
    if not isinstance(schedule, (ResidentRows, LoopedRows)) or not schedule.sector_elems:
        return None
    sector = schedule.sector_elems
    if not is_power_of_two(sector) or sector > SECTOR:
        return Illegal(Reason.SIZES, f"sectors of {sector} elements: a power of two up to {SECTOR} is possible")
    if schedule.height > 1:
        return Illegal(Reason.FIELDS, "sectors are read where a CTA takes one row")
    if kernel.space.block:
        return Illegal(Reason.FIELDS, "sectors of rows with block reductions")
    moved: dict[object, int] = {}
    for i, node in enumerate(kernel.program.nodes):
        if isinstance(node, (Load, Store)) and kernel.is_full[i] and (step := contiguous_row_stride(kernel, node)) is not None:
            moved[step] = moved.get(step, 0) + kernel.program.buffer[node.buffer].dtype.size
    steps = [step for step, size in moved.items() if size == max(moved.values())]
    if all(isinstance(step, int) and step % sector == 0 for step in steps):
        return Illegal(Reason.FIELDS, f"sectors of {sector} elements where no row starts inside one")
    return None


# ---- choices --------------------------------------------------------------------------------------------------------------------


def _accesses(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Hints on accesses name accesses, and no access is wider than its types allow."""
    limit, widest, nodes = schedule.vector_limit, explicit_vector(kernel), kernel.program.nodes
    if limit and not (is_power_of_two(limit) and limit <= widest):
        return Illegal(Reason.SIZES, f"accesses of {limit} elements: a power of two up to {widest} is possible")
    accesses = frozenset(i for i, node in enumerate(nodes) if isinstance(node, (Load, Store)))
    if not schedule.evict_last <= accesses - schedule.staged:
        return Illegal(Reason.STORAGE, "only loads and stores that are not staged have an eviction policy")
    return None


def _in_registers(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Resident loads are needed in several phases, early loads only after a reduction."""
    if not schedule.resident <= frozenset(kernel.multi_phase):
        return Illegal(Reason.STORAGE, "only full-size loads that several phases use are resident")
    if schedule.packed and not schedule.resident:
        return Illegal(Reason.FIELDS, "packed values where none is resident")
    if not schedule.early_loads <= frozenset(kernel.after_reduction):
        return Illegal(Reason.STORAGE, "only loads along the columns that are used after a reduction are issued early")
    if isinstance(schedule, MixOrder) and schedule.row_vectors is RowVectors.SMEM:
        return Illegal(Reason.STORAGE, "row vectors in smem beside rows in registers")
    return None


def _states(kernel: Kernel, schedule: Schedule) -> Illegal | None:
    """Threads keep private states of reductions that allow it, where they have whole vectors of a single row."""
    if not schedule.private_states:
        return None
    monoids = [MONOIDS[node.monoid] for f in kernel.folds if f.cols and isinstance(node := kernel.program.nodes[f.node], Reduce)]
    if not any(map(allows_private_states, monoids)):
        return Illegal(Reason.FIELDS, "private states where every reduction is one fold, or counts its elements")
    if not private_state_columns(kernel, schedule):
        return Illegal(Reason.SIZES, f"private states of {32 * schedule.warps} threads that have no whole vectors of one row")
    return None


# ---- several CTAs, and limits of a device ---------------------------------------------------------------------------------------


def _split(kernel: Kernel, schedule: Schedule, emitted: bool) -> Illegal | None:
    """Partial results are joined: by a kernel of their own, which reads as many as there are."""
    space, splits = kernel.space, schedule.splits
    stores = any(PART in dict(n.strides) for n in kernel.program.nodes if isinstance(n, Store))
    if stores and PART not in (*space.batch, *space.rows, *space.cols):
        parts = kernel.program.extent((PART,))
        return None if parts == splits else Illegal(Reason.SPLIT, f"{splits} CTAs share what leaves {parts} partial states")
    if splits == 1:
        return None
    if not may_split(kernel, schedule.sides):
        return Illegal(Reason.SPLIT, f"{splits} CTAs share a reduction whose partial states cannot be joined")
    return Illegal(Reason.SPLIT, f"{splits} CTAs share a reduction that leaves no partial states") if emitted else None


def _limits(kernel: Kernel, schedule: Schedule, device: Device) -> Illegal | None:
    """A CTA fits the device, and CTAs that wait for each other run at once."""
    if schedule.staged and device.capability < HAS_TMA:
        return Illegal(Reason.DEVICE, f"loads are staged by TMA, which {device.title} does not have")
    threads, cap = 32 * schedule.warps, schedule.registers
    if cap and not MIN_REGISTERS <= cap <= min(device.registers_per_thread, device.registers_per_sm // threads):
        return Illegal(Reason.DEVICE, f"a cap of {cap} registers for {threads} threads of one register file")
    smem = estimate(demand(kernel), schedule, device).smem_bytes
    if smem > device.smem_per_cta:
        return Illegal(Reason.DEVICE, f"{smem} bytes of shared memory: a CTA can have {device.smem_per_cta}")
    if schedule.ctas_per_row == 1:
        return None
    registers = cap or min(device.registers_per_thread, device.registers_per_sm // threads)
    ctas, at_once = schedule.splits * schedule.ctas_per_row, ctas_per_sm(registers, smem, schedule.warps, device) * device.sms
    if ctas > at_once:  # a CTA would wait for one that never starts
        return Illegal(Reason.DEVICE, f"{ctas} CTAs that wait for each other: {at_once} run at once")
    return None


def _widths(role: Role) -> tuple[int, ...]:
    return role.tiles if isinstance(role, Cover) else (role.size if isinstance(role, Block) else role.step,)


def _listed(sizes: tuple[int, ...]) -> str:
    return "+".join(map(str, sizes)) or "no"
