"""Schedule candidates: the few dozen schedules per kernel family that are worth scoring."""

from __future__ import annotations

from collections.abc import Iterator

from ..device import Device
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Reduce, Store
from ..ir.size import Bindings, value
from .access import contiguous_row_stride, row_stride
from .choices import choices
from .kernel import Kernel
from .legality import Family, may_split
from .resources import Demand
from .schedule import (
    SECTOR,
    LoopedRows,
    MixOrder,
    Outer,
    Pointwise,
    ResidentRows,
    RowVectors,
    Schedule,
    SplitRows,
    WholeColumns,
    cover,
    power_of_two,
    sector_span,
)
from .schedule.roles import MAX_UNROLLED_TILES
from .staged_rows import HAS_TMA
from .staging import FAMILIES
from .thread_layout import vector
from .traffic import Traffic

MAX_ELEMS_PER_THREAD = 128  # of a resident row
MAX_COLS_UNDERFILLED = 8192  # columns per CTA while most of the GPU is idle


def schedules(
    kernel: Kernel, family: Family, held: bool, need: Demand, t: Traffic, bindings: Bindings, device: Device
) -> Iterator[Schedule]:
    """All candidates of one family. `held`: the reduced side is held on chip; otherwise it is walked."""
    make = choices(kernel, t, bindings)
    yield from (make.completed(kernel, one) for one in _in_registers(kernel, family, held, t, bindings, device))
    for staged in FAMILIES if device.capability >= HAS_TMA else ():
        if staged.record.sides is family and staged.held is held:
            yield from (staged.completed(kernel, make, one) for one in staged.candidates(kernel, need, t, device))


def _in_registers(kernel: Kernel, family: Family, held: bool, t: Traffic, bindings: Bindings, device: Device) -> Iterator[Schedule]:
    match family, held:
        case Family.POINTWISE, _:
            return _pointwise(kernel, t, bindings)
        case Family.INNER, True:
            return _inner_resident(kernel, t, bindings, device)
        case Family.INNER, False:
            return _inner_looped(kernel, t, bindings, device)
        case Family.OUTER, True:
            return _column_resident(kernel, t)
        case Family.OUTER, False:
            return _outer(kernel, t, device)
        case _:
            return _mix_order(kernel, t, device)


def sector_elems_of(kernel: Kernel, bindings: Bindings) -> int:
    """Elements per sector if rows start inside sectors; otherwise 0."""
    step = row_stride(kernel, bindings)
    if step is None or _short(kernel, bindings):
        return 0
    sizes = [
        kernel.program.buffer[n.buffer].dtype.size
        for i, n in enumerate(kernel.program.nodes)
        if isinstance(n, (Load, Store)) and kernel.is_full[i] and contiguous_row_stride(kernel, n) == step
    ]
    smallest = min(sizes)
    aligned = isinstance(step, int) and step * smallest % SECTOR == 0
    return 0 if aligned else SECTOR // smallest


def _short(kernel: Kernel, bindings: Bindings) -> bool:
    """Whether rows are too short to be worth reading by sectors."""
    return kernel.program.points(kernel.space.cols, bindings) < 512 or bool(kernel.space.block)


def _fits_blocks(kernel: Kernel, tiles: tuple[int, ...]) -> bool:
    size = kernel.program.extent(kernel.space.block) if kernel.space.block else 1
    return isinstance(size, int) and all(t % size == 0 for t in tiles)


def _static_cols(kernel: Kernel) -> int | None:
    extent = kernel.program.extent(kernel.space.cols)
    return extent if isinstance(extent, int) else None


def _heights(cols: int, rows: int, warps: int) -> list[int]:
    """Rows per tile: one for long rows; for short rows, as many as give each thread a few vectors."""
    found = [1]
    if cols <= 4096:
        found += [h for h in (2, 4, 8, 16, 32, 64) if h <= max(1, power_of_two(rows)) and 4 <= h * cols / (32 * warps) <= 64]
    return found


def _inner_resident(kernel: Kernel, t: Traffic, bindings: Bindings, device: Device) -> Iterator[Schedule]:
    cols = _static_cols(kernel)
    if cols is None or _underfills(kernel, t, device):
        return
    sector, vec = sector_elems_of(kernel, bindings), vector(kernel)
    for warps in (1, 2, 4, 8, 16, 32):
        for height in [1] if sector else _heights(cols, t.rows, warps):
            held = height * cols / (32 * warps)
            if held > MAX_ELEMS_PER_THREAD or (held < 1 and warps > 1):
                continue
            for per_thread in (vec, 2 * vec, 4 * vec):
                widest = max(16, min(power_of_two(cols), 32 * warps * per_thread // height))
                if height > 1:  # at least a warp wide, so that threads of different rows do not share a row
                    widest = min(power_of_two(cols), max(32 * vec, widest))
                least = 32 * warps * vec // height
                tiles = _sector_cover(cols, sector, min(widest, power_of_two(cols) // 4), least) if sector else cover(cols, widest)
                if len(tiles) <= MAX_UNROLLED_TILES and _fits_blocks(kernel, tiles) and _every_thread_has_vector(tiles, least):
                    yield ResidentRows(height, tiles, warps, sector)


def _underfills(kernel: Kernel, t: Traffic, device: Device) -> bool:
    """Whether rows are long and too few to fill the GPU. Then splitting them is better, if no result needs a whole row."""
    return 8 * t.rows * t.batch < device.sms and t.cols > MAX_COLS_UNDERFILLED and may_split(kernel, Family.INNER)


def _sector_cover(cols: int, sector: int, widest: int, least: int) -> tuple[int, ...]:
    """Whole tiles, then one that overhangs. Its mask changes only at sector boundaries, so it is still read in vectors."""
    span = sector_span(cols, sector)
    rest = span % widest
    return (widest,) * (span // widest) + ((max(power_of_two(rest), min(widest, least)),) if rest else ())


def _every_thread_has_vector(tiles: tuple[int, ...], least: int) -> bool:
    """Whether every thread gets a vector of every tile. If not, Triton picks other layouts and converts between them."""
    return len(tiles) == 1 or min(tiles) >= least


def _inner_looped(kernel: Kernel, t: Traffic, bindings: Bindings, device: Device) -> Iterator[Schedule]:
    sector, vec = sector_elems_of(kernel, bindings), vector(kernel)
    splits = may_split(kernel, Family.INNER)
    for warps in (4, 8, 16):
        for per_thread in (vec, 2 * vec):
            width = 32 * warps * per_thread
            if width > power_of_two(t.cols) or not _fits_blocks(kernel, (width,)):
                continue
            for stages in (1, 2, 4):
                yield LoopedRows(1, width, warps, stages, sector)
            if splits and not sector:
                blocks = t.cols // width
                for target in (1, 2, 4):
                    split = min(blocks, -(-target * device.sms // max(t.rows, 1)))
                    pipelines = (1,) if split == blocks else (1, 4)  # a single step leaves nothing to overlap
                    yield from (SplitRows(1, width, split, warps, stages) for stages in pipelines if split > 1)
    if t.cols <= 32 * 4 * vec:  # short rows that cannot be held on chip
        width = max(16, power_of_two(t.cols))
        for height in (8, 4, 2, 1) if _fits_blocks(kernel, (width,)) else ():
            if height * width <= max(width, 4096):
                yield LoopedRows(height, width, 4)


def _column_resident(kernel: Kernel, t: Traffic) -> Iterator[Schedule]:
    rows = kernel.program.extent(kernel.space.rows)
    if not isinstance(rows, int):
        return
    for width in (4, 8, 16, 32, 64, 128):
        if not min(4 * vector(kernel), power_of_two(t.cols)) <= width <= 2 * power_of_two(t.cols):
            continue  # at least 64 bytes of a row, or sectors are only half used
        for warps in (1, 2, 4, 8, 16, 32):
            held = rows * width / (32 * warps)
            if not 2 <= held <= MAX_ELEMS_PER_THREAD and not (warps == 1 and held < 2):
                continue
            tiles = cover(rows, max(16, min(power_of_two(rows), 32 * warps * 16 // width)))
            if len(tiles) <= MAX_UNROLLED_TILES:
                yield WholeColumns(tiles, width, warps)


def _outer(kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    vec = vector(kernel)
    splits = may_split(kernel, Family.OUTER)
    min_rows = 1 if all(MONOIDS[_monoid(kernel, f.node)].primitive for f in kernel.folds) else min(64, power_of_two(t.rows))
    # Two warps if there are few rows, all in one step, and full-size results. H200, dx and dw of RMSNorm and LayerNorm
    # backward 16x65536 after the row sums: 1.4 and 3.3 us faster than with four warps. Longer walks and plain sums are slower
    # with two.
    for warps in (2, 4, 8) if t.full_out else (4, 8):
        for width in (32, 64, 128, 256, 512):
            if width > max(32, power_of_two(t.cols)):
                continue
            rows = max(min_rows, 32 * warps * vec // width)  # merging small tiles would accumulate rounding errors
            depths = [d for d in (1, 2, 4) if d == 1 or t.input_bytes_per_elem * d <= 32]
            for step in sorted({min(rows * d, power_of_two(t.rows)) for d in depths}):
                if warps == 2 and step < t.rows:
                    continue
                yield Outer(step, width, warps)
                if splits:
                    col_blocks = -(-t.cols // width) * t.batch
                    steps = max(1, t.rows // step)
                    for target in (1, 2, 4):
                        split = min(steps, max(1, round(target * device.sms / col_blocks)))
                        if split > 1:
                            yield Outer(step, width, warps, split)


def _monoid(kernel: Kernel, i: int) -> str:
    node = kernel.program.nodes[i]
    assert isinstance(node, Reduce)
    return node.monoid


def _mix_order(kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    cols = _static_cols(kernel)
    if cols is None or not may_split(kernel, Family.MIX):
        return
    vec = vector(kernel)
    for warps in (2, 4, 8, 16):
        for height in (1, 2, 4, 8, 16, 32, 64, 128):
            held = height * cols / (32 * warps)
            # Cap on elements per thread. H200: RMSNorm backward 8192x8192 98 us with 16, 108 us with 64; LayerNorm backward
            # 16384x5120 is best with 40.
            max_held = 40 if cols <= 16384 else 64
            if not 4 <= held <= max_held and not (warps == 2 and held < 4) or height > max(1, power_of_two(t.rows)):
                continue
            widths = {min(power_of_two(cols), max(32 * vec, 32 * warps * vec * k // height)) for k in (1, 2, 4)}
            for widest in sorted(widths):
                tiles = cover(cols, widest)
                if len(tiles) > 8 or not _fits_blocks(kernel, tiles):
                    continue
                if not _every_thread_has_vector(tiles, 32 * warps * vec // height):
                    continue
                for stages, per_sm in ((1, 1), (1, 2), (1, 4), (2, 2), (3, 1), (3, 2), (3, 4), (4, 1)):
                    split = max(1, min(per_sm * device.sms // t.batch, -(-t.rows // height)))
                    if stages == 1:  # a pipeline would copy them for every row
                        yield MixOrder(height, split, tiles, warps, stages)
                    yield MixOrder(height, split, tiles, warps, stages, row_vectors=RowVectors.REGISTERS)


def _pointwise(kernel: Kernel, t: Traffic, bindings: Bindings) -> Iterator[Schedule]:
    vec = vector(kernel)
    if sector := sector_elems_of(kernel, bindings):
        for warps in (4, 8):
            for per_thread in (vec, 2 * vec):
                yield LoopedRows(1, 32 * warps * per_thread, warps, sector_elems=sector)
    for warps in (4, 8):
        for area in (32 * warps * vec, 64 * warps * vec):
            width = power_of_two(min(t.cols, area))
            if _fits_blocks(kernel, (width,)):
                yield Pointwise(max(1, min(area // width, power_of_two(t.rows))), width, warps)
    if kernel.space.block:
        size = value(kernel.program.extent(kernel.space.block), bindings)
        yield Pointwise(4, max(size, 512), 4)
