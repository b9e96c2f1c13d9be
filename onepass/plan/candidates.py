"""Schedule candidates: the few dozen schedules per kernel family that are worth scoring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ..device import Device
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Reduce, Store
from ..ir.size import Bindings, value
from .access import contiguous_row_stride, row_stride
from .choices import Choices, choices
from .cost import Traffic
from .kernel import Kernel
from .legality import Family, may_split
from .schedule import SECTOR, Cover, Ring, RowVectors, Schedule, cover, power_of_two, sector_span
from .staged_rows import (
    BARRIERS,
    TMA_BOX,
    chunk_cover,
    chunk_cover_unaligned,
    chunks,
    exchange_bytes,
    has_two_sums,
    may_span_ctas,
    must_stage,
    prefetched_columns,
    register_limit,
    row_vector_smem_bytes,
    smem_bytes,
    tma_stageable,
    tma_stageable_unaligned,
)
from .staged_tiles import MAX_STAGES, MIN_LINE_BYTES, MIN_STAGES, register_cap, rows_at_once, tile_stageable
from .staged_tiles import smem_bytes as tile_bytes
from .thread_layout import explicit_vector, vector

MAX_ELEMS_PER_THREAD = 128  # of a resident row
MAX_COLS_UNDERFILLED = 8192  # columns per CTA while most of the GPU is idle
MAX_UNROLLED_TILES = 24  # limits the length of a kernel's text

HAS_TMA = (9, 0)  # first compute capability with TMA
MAX_RING_ROWS = 4  # rows per ring
MAX_RINGS_PER_SM = 8  # CTAs per SM that each own a ring
MIN_COLS_PER_CTA = 4096  # columns per CTA if several CTAs share a row
MIN_ROWS_PER_GROUP = 4  # rows per group of CTAs that share rows; nothing overlaps in the first row and the last


def schedules(kernel: Kernel, family: Family, held: bool, t: Traffic, bindings: Bindings, device: Device) -> Iterator[Schedule]:
    """All candidates of one family. `held`: the reduced side is held on chip; otherwise it is walked."""
    make = choices(kernel, t, bindings)
    match family, held:
        case Family.POINTWISE, _:
            yield from _pointwise(make, kernel, t, bindings)
        case Family.INNER, True:
            yield from _inner_resident(make, kernel, t, bindings, device)
            yield from _inner_staged(make, kernel, t, device)
        case Family.INNER, False:
            yield from _inner_looped(make, kernel, t, bindings, device)
        case Family.OUTER, True:
            yield from _column_resident(make, kernel, t)
        case Family.OUTER, False:
            yield from _outer(make, kernel, t, device)
            yield from _outer_staged(make, kernel, t, device)
        case Family.MIX, _:
            yield from _mix_order(make, kernel, t, device)
            yield from _mix_order_staged(make, kernel, t, device)
            yield from _mix_order_multi_cta(make, kernel, t, device)


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


def _inner_resident(make: Choices, kernel: Kernel, t: Traffic, bindings: Bindings, device: Device) -> Iterator[Schedule]:
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
                    yield make.resident_rows(height, tiles, warps, sector)


def _inner_staged(make: Choices, kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    """Inner reductions over staged rows: one row per CTA, or a loop over rows.

    With one row per CTA the load is balanced dynamically, because SMs are not equally fast. H200, softmax 8192x32768: 258 us;
    132 to 396 CTAs that loop over rows 275 to 290 us.
    """
    for one in _staged_rows(kernel, t, device):
        if 2 * one.tiles[0] <= t.cols:  # registers hold what is shorter
            yield make.staged_rows(one.tiles, one.warps, one.ring, one.unaligned, one.staged, one.registers)
            if one.ring.stages == 1 and not one.ring.prefetch:
                yield make.staged_rows(one.tiles, one.warps, None, one.unaligned, one.staged, one.registers)


def _mix_order_staged(make: Choices, kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    """Inner and outer reductions over staged rows; registers accumulate the column states."""
    if not may_split(kernel, Family.MIX):
        return
    for one in _staged_rows(kernel, t, device):
        if len(one.tiles) <= MAX_UNROLLED_TILES:
            for where in (RowVectors.RELOAD, RowVectors.REGISTERS) if t.vectors else (RowVectors.RELOAD,):
                # Multiples of eight: with a cap of 255 ptxas spills a few words that it does not spill with 248.
                yield make.staged_mix_order(one.tiles, one.warps, one.ring, where, one.staged, one.registers // 8 * 8)


def _mix_order_multi_cta(make: Choices, kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    """Inner and outer reductions over staged rows, with several CTAs per row.

    If all inputs are staged 16-bit rows, half vectors are tried too: they need fewer registers and take as long. H200,
    LayerNorm backward 8192x16384: 247 us, where whole vectors spill; 4096x65536: 449 us, whole vectors 481 us.
    """
    cols, required, stageable = _static_cols(kernel), must_stage(kernel), frozenset(tma_stageable(kernel))
    if device.capability < HAS_TMA or cols is None or not required or not required <= stageable:
        return
    if not may_split(kernel, Family.MIX) or not may_span_ctas(kernel):
        return
    vec, exchange = vector(kernel), exchange_bytes(kernel) * (2 if has_two_sums(kernel) else 1)
    for staged in (required,) if required == stageable else (required, stageable):
        element = sum(kernel.program.dtypes[i].size for i in staged)
        half_vectors = (vec // 2,) if vec > 4 and len(staged) == kernel.full_loads else ()
        for ctas_per_row, warps, per_thread in product((2, 4, 8), (8, 16), (*half_vectors, vec, 2 * vec, 4 * vec)):
            part_cols, width = cols // ctas_per_row, 32 * warps * per_thread
            if part_cols < MIN_COLS_PER_CTA or cols % ctas_per_row or part_cols % width or part_cols // width > MAX_UNROLLED_TILES:
                continue
            covered = Cover((width,) * (part_cols // width))
            for stages, (where, vector_bytes) in product(range(2, MAX_RING_ROWS + 1), _row_vector_placements(kernel)):
                smem = smem_bytes(element, covered, stages, exchange, warps) + vector_bytes * part_cols
                fitting = device.smem_per_sm // (smem + device.smem_reserve) if smem <= device.smem_per_cta else 0
                for ctas_per_sm in range(1, min(2, fitting) + 1):
                    groups = ctas_per_sm * device.sms // ctas_per_row
                    if groups and t.rows >= MIN_ROWS_PER_GROUP * groups:  # a card may have fewer SMs than CTAs share a row
                        yield make.multi_cta_mix_order(
                            covered.tiles,
                            ctas_per_row,
                            groups,
                            warps,
                            stages,
                            where,
                            staged,
                            register_limit(warps, ctas_per_sm, device) // 8 * 8,
                        )


def _row_vector_placements(kernel: Kernel) -> Iterator[tuple[RowVectors, int]]:
    """Placements of row vectors, each with its bytes per column in shared memory."""
    yield RowVectors.RELOAD, 0
    if kernel.row_vectors:
        yield RowVectors.REGISTERS, 0
    if smem_bytes_per_col := row_vector_smem_bytes(kernel):
        yield RowVectors.SMEM, smem_bytes_per_col


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows in a ring buffer, before a family is chosen for them."""

    tiles: tuple[int, ...]
    warps: int
    ring: Ring
    unaligned: bool
    staged: frozenset[int]
    registers: int


def _staged_rows(kernel: Kernel, t: Traffic, device: Device) -> Iterator[_Rows]:
    """Staged rows, if some load is needed twice and TMA can stage all such loads within a CTA's shared memory."""
    cols, required = _static_cols(kernel), must_stage(kernel)
    unaligned = not required <= frozenset(tma_stageable(kernel))
    stageable = frozenset(tma_stageable_unaligned(kernel) if unaligned else tma_stageable(kernel))
    if device.capability < HAS_TMA or cols is None or not required or not required <= stageable:
        return
    vec, exchange = vector(kernel), exchange_bytes(kernel)
    for staged in (required,) if required == stageable else (required, stageable):
        element = sum(kernel.program.dtypes[i].size for i in staged)
        for warps in (4, 8, 16):
            for width in (32 * warps * vec * k for k in (1, 2, 4)):
                if width > cols:
                    continue
                covered = (chunk_cover_unaligned if unaligned else chunk_cover)(cols, width, 32 * warps * vec)
                if covered is None:
                    continue
                for stages in range(1, MAX_RING_ROWS + 1):
                    smem = smem_bytes(element, covered, stages, exchange, warps)
                    if smem > device.smem_per_cta:
                        break
                    max_ctas = min(MAX_RINGS_PER_SM, device.smem_per_sm // (smem + device.smem_reserve))
                    for ctas_per_sm in sorted({1, min(2, max_ctas), max_ctas}):
                        split = max(1, min(ctas_per_sm * device.sms, t.rows))
                        registers = register_limit(warps, ctas_per_sm, device)
                        room = min(device.smem_per_cta, device.smem_per_sm // ctas_per_sm - device.smem_reserve) - smem
                        depths = [] if unaligned or stages > 1 else _prefetch_depths(covered, cols, room // element)
                        for prefetch in (0, *depths):
                            yield _Rows(covered.tiles, warps, Ring(split, stages, prefetch), unaligned, staged, registers)


def _prefetch_depths(covered: Cover, cols: int, room: int) -> list[int]:
    """Copies of the next row to prefetch into a single-row ring: as many as fit, and half as many.

    If a whole row fits, another schedule gives it a slot.
    """
    copies = chunks(covered, cols).copies
    if not copies or room >= cols:
        return []
    deepest = min(room // prefetched_columns(covered, 1), BARRIERS - copies)
    return [n for n in sorted({deepest, deepest // 2}) if n]


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


def _inner_looped(make: Choices, kernel: Kernel, t: Traffic, bindings: Bindings, device: Device) -> Iterator[Schedule]:
    sector, vec = sector_elems_of(kernel, bindings), vector(kernel)
    splits = may_split(kernel, Family.INNER)
    for warps in (4, 8, 16):
        for per_thread in (vec, 2 * vec):
            width = 32 * warps * per_thread
            if width > power_of_two(t.cols) or not _fits_blocks(kernel, (width,)):
                continue
            for stages in (1, 2, 4):
                yield make.looped_rows(1, width, warps, stages, sector)
            if splits and not sector:
                blocks = t.cols // width
                for target in (1, 2, 4):
                    split = min(blocks, -(-target * device.sms // max(t.rows, 1)))
                    pipelines = (1,) if split == blocks else (1, 4)  # a single step leaves nothing to overlap
                    yield from (make.split_rows(1, width, split, warps, stages) for stages in pipelines if split > 1)
    if t.cols <= 32 * 4 * vec:  # short rows that cannot be held on chip
        width = max(16, power_of_two(t.cols))
        for height in (8, 4, 2, 1) if _fits_blocks(kernel, (width,)) else ():
            if height * width <= max(width, 4096):
                yield make.looped_rows(height, width, 4)


def _column_resident(make: Choices, kernel: Kernel, t: Traffic) -> Iterator[Schedule]:
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
                yield make.whole_columns(tiles, width, warps)


def _outer(make: Choices, kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
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
                yield make.outer(step, width, warps)
                if splits:
                    col_blocks = -(-t.cols // width) * t.batch
                    steps = max(1, t.rows // step)
                    for target in (1, 2, 4):
                        split = min(steps, max(1, round(target * device.sms / col_blocks)))
                        if split > 1:
                            yield make.outer(step, width, warps, split)


def _outer_staged(make: Choices, kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    """Outer reductions over staged tiles of columns, if TMA can stage all full-size inputs.

    Tiles get shorter, down to one vector per thread, until two fit; if even those do not fit, there is no such schedule.
    Partial results of another kernel are in L2 already, and a ring only adds startup time: H200, two sums of 264x5120
    partials 7 us staged, 2.5 us with plain loads.
    """
    stageable = frozenset(tile_stageable(kernel))
    if device.capability < HAS_TMA or not stageable or _reads_only_partials(kernel):
        return
    vec, exchange, splits = explicit_vector(kernel), exchange_bytes(kernel, down=True), may_split(kernel, Family.OUTER)
    sizes = [kernel.program.dtypes[i].size for i in stageable]
    min_width = MIN_LINE_BYTES // min(sizes)
    max_width = max(min_width, power_of_two(t.cols))
    for warps in (4, 8):
        for width in (w for w in (16, 32, 64, 128, 256) if max(min_width, vec) <= w <= max_width):
            min_height = rows_at_once(width, vec, warps)
            for height in (min_height * k for k in (1, 2, 4, 8)):
                if height > min(TMA_BOX, max(min_height, power_of_two(t.rows))):
                    break
                for stages in (MIN_STAGES, 3, 4, MAX_STAGES):
                    smem = tile_bytes(make.staged_tiles(height, width, warps, stages, 1, stageable), vec, sum(sizes), exchange)
                    if smem > device.smem_per_cta:
                        break
                    max_ctas = min(MAX_RINGS_PER_SM, device.smem_per_sm // (smem + device.smem_reserve))
                    if max_ctas * smem < device.bytes_in_flight:  # staging gains nothing
                        continue
                    for split, ctas in _row_splits(height, width, sorted({1, min(2, max_ctas), max_ctas}), splits, t, device):
                        cap = register_cap(len(stageable), warps, ctas, device)
                        yield make.staged_tiles(height, width, warps, stages, split, stageable, cap)


def _reads_only_partials(kernel: Kernel) -> bool:
    """Whether a kernel reads only partial results of another kernel."""
    return all(
        kernel.program.buffer[n.buffer].role == "temp"
        for i, n in enumerate(kernel.program.nodes)
        if isinstance(n, Load) and kernel.is_full[i]
    )


def _row_splits(
    height: int, width: int, ctas_per_sm: list[int], may_split_rows: bool, t: Traffic, device: Device
) -> list[tuple[int, int]]:
    """How many CTAs share the rows of a column, each with its CTAs per SM: one, and where allowed as many as fill the SMs."""
    blocks, tiles = -(-t.cols // width), -(-t.rows // height)
    splits = {1: min(ctas_per_sm[-1], -(-blocks // device.sms))}
    for ctas in reversed(ctas_per_sm) if may_split_rows else ():
        if (split := min(tiles, round(ctas * device.sms / blocks))) > 1:
            splits[split] = ctas
    return sorted(splits.items())


def _monoid(kernel: Kernel, i: int) -> str:
    node = kernel.program.nodes[i]
    assert isinstance(node, Reduce)
    return node.monoid


def _mix_order(make: Choices, kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
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
                        yield make.mix_order(height, split, tiles, warps, stages)
                    yield make.mix_order(height, split, tiles, warps, stages, RowVectors.REGISTERS)


def _pointwise(make: Choices, kernel: Kernel, t: Traffic, bindings: Bindings) -> Iterator[Schedule]:
    vec = vector(kernel)
    if sector := sector_elems_of(kernel, bindings):
        for warps in (4, 8):
            for per_thread in (vec, 2 * vec):
                yield make.looped_rows(1, 32 * warps * per_thread, warps, sector_elems=sector)
    for warps in (4, 8):
        for area in (32 * warps * vec, 64 * warps * vec):
            width = power_of_two(min(t.cols, area))
            if _fits_blocks(kernel, (width,)):
                yield make.pointwise(max(1, min(area // width, power_of_two(t.rows))), width, warps)
    if kernel.space.block:
        size = value(kernel.program.extent(kernel.space.block), bindings)
        yield make.pointwise(4, max(size, 512), 4)
