"""The schedules worth scoring for a kernel: a few dozen points of the space, by family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ..device import Device
from ..ir.monoid import MONOIDS
from ..ir.program import Load, Reduce, Store
from ..ir.size import Bindings, value
from .access import row_stride, streams_rows
from .cost import Traffic
from .kernel import Kernel
from .lanes import vector
from .lanes import widest as widest_vector
from .legality import Family, may_split
from .parked import (
    BARRIERS,
    BOX,
    FLAT,
    bytes_beside,
    chunks,
    columns_ahead,
    cut,
    cut_flat,
    exchanged,
    exchanged_by_parts,
    may_share,
    parkable,
    parkable_flat,
    register_limit,
    shared_bytes,
    wanted,
)
from .schedule import SECTOR, Block, Cover, Loop, Schedule, cover, power_of_two, sector_span
from .tiled import LEAST_LINE, LEAST_STAGES, MOST_STAGES, rows_at_once, tileable, told
from .tiled import shared_bytes as tile_bytes

MOST_HELD = 128  # elements a thread may hold of a resident row
MOST_ALONE = 8192  # columns that one CTA holds while most of the card is idle
MOST_TILES = 24  # unrolled tiles in one kernel's text

HAS_TMA = (9, 0)  # the first compute capability that has it
MOST_SLOTS = 4  # rows that a ring has room for
MOST_HERE = 8  # CTAs that share an SM, each with a ring
LEAST_PART = 4096  # columns of a row that a CTA takes together with others
LEAST_TURNS = 4  # rows that such CTAs take one after the other: in the first turn and the last nothing overlaps


def schedules(kernel: Kernel, family: Family, held: bool, t: Traffic, bindings: Bindings, device: Device) -> Iterator[Schedule]:
    """All candidates of one family: those that hold the folded side on chip, or those that walk it."""
    match family, held:
        case Family.POINTWISE, _:
            yield from _pointwise(kernel, t, bindings)
        case Family.INNER, True:
            yield from _inner_resident(kernel, t, bindings, device)
            yield from _inner_parked(kernel, t, device)
        case Family.INNER, False:
            yield from _inner_looped(kernel, t, bindings, device)
        case Family.OUTER, True:
            yield from _columns_resident(kernel, t)
        case Family.OUTER, False:
            yield from _outer(kernel, t, device)
            yield from _outer_parked(kernel, t, device)
        case Family.MIX, _:
            yield from _mix(kernel, t, device)
            yield from _mixed_parked(kernel, t, device)
            yield from _mixed_shared(kernel, t, device)


def lead_of(kernel: Kernel, bindings: Bindings) -> int:
    """Elements of a sector where rows start inside one, else 0."""
    step = row_stride(kernel, bindings)
    if step is None or _short(kernel, bindings):
        return 0
    sizes = [kernel.program.buffer[n.buffer].dtype.size for i, n in enumerate(kernel.program.nodes)
             if isinstance(n, (Load, Store)) and kernel.is_full[i] and streams_rows(kernel, n) == step]
    smallest = min(sizes)
    aligned = isinstance(step, int) and step * smallest % SECTOR == 0
    return 0 if aligned else SECTOR // smallest


def _short(kernel: Kernel, bindings: Bindings) -> bool:
    """Rows too short to be worth reading by sectors."""
    return kernel.program.points(kernel.space.cols, bindings) < 512 or bool(kernel.space.block)


def _fits_blocks(kernel: Kernel, tiles: tuple[int, ...]) -> bool:
    size = kernel.program.extent(kernel.space.block) if kernel.space.block else 1
    return isinstance(size, int) and all(t % size == 0 for t in tiles)


def _static_cols(kernel: Kernel) -> int | None:
    extent = kernel.program.extent(kernel.space.cols)
    return extent if isinstance(extent, int) else None


def _heights(cols: int, rows: int, warps: int) -> list[int]:
    """Rows per tile: one for long rows; for short ones as many as give each thread a few vectors."""
    found = [1]
    if cols <= 4096:
        found += [h for h in (2, 4, 8, 16, 32, 64) if h <= max(1, power_of_two(rows)) and 4 <= h * cols / (32 * warps) <= 64]
    return found


def _inner_resident(kernel: Kernel, t: Traffic, bindings: Bindings, device: Device) -> Iterator[Schedule]:
    cols = _static_cols(kernel)
    if cols is None or _is_alone(kernel, t, device):
        return
    lead, vec = lead_of(kernel, bindings), vector(kernel)
    for warps in (1, 2, 4, 8, 16, 32):
        for height in [1] if lead else _heights(cols, t.rows, warps):
            held = height * cols / (32 * warps)
            if held > MOST_HELD or (held < 1 and warps > 1):
                continue
            for per_thread in (vec, 2 * vec, 4 * vec):
                widest = max(16, min(power_of_two(cols), 32 * warps * per_thread // height))
                if height > 1:  # at least a warp's width, so that no row is cut between threads of different rows
                    widest = min(power_of_two(cols), max(32 * vec, widest))
                least = 32 * warps * vec // height
                tiles = _sector_cover(cols, lead, min(widest, power_of_two(cols) // 4), least) if lead else cover(cols, widest)
                if len(tiles) <= MOST_TILES and _fits_blocks(kernel, tiles) and _even(tiles, least):
                    yield Schedule(Block(height), Cover(tiles), warps, lead=lead, resident=frozenset(kernel.multi_phase))


def _inner_parked(kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    """Rows in shared memory, for reductions along them: one row a CTA, or one after another.

    CTAs of one row each share the work better: SMs are not equally fast, and whoever is done gets the next row. H200, softmax
    8192 x 32768: 258 us, where 132 to 396 CTAs that take rows in turn need 275 to 290.
    """
    for each in _parked(kernel, t, device):
        assert isinstance(each.cols, Cover)
        if 2 * each.cols.tiles[0] <= t.cols:  # registers hold what is shorter
            yield each
            if each.stages == 1 and not each.ahead:
                yield replace(each, rows=Block(1))


def _mixed_parked(kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    """Rows in shared memory, for reductions along them and down their columns, of which registers hold the states."""
    if not may_split(kernel, Family.MIX):
        return
    for each in _parked(kernel, t, device):
        assert isinstance(each.cols, Cover)
        if len(each.cols.tiles) <= MOST_TILES:
            # 255 is no multiple of eight, and within it ptxas spills a few words that it does not spill within 248.
            gathers = replace(each, gathers=True, registers=each.registers // 8 * 8)
            yield from (replace(gathers, hoisted=hoisted) for hoisted in ((False, True) if t.vectors else (False,)))


def _mixed_shared(kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    """The same where several CTAs take a row together.

    Of 16-bit rows that are all parked, a thread may also take half as much at once: it needs fewer registers, and as much time.
    H200, LayerNorm backward of 8192 x 16384: 247 us, where whole vectors spill; of 4096 x 65536: 449, with whole vectors 481.
    """
    cols, twice, able = _static_cols(kernel), wanted(kernel), frozenset(parkable(kernel))
    if device.capability < HAS_TMA or cols is None or not twice or not twice <= able:
        return
    if not may_split(kernel, Family.MIX) or not may_share(kernel):
        return
    vec, exchange = vector(kernel), exchanged_by_parts(kernel)
    for parked in (twice,) if twice == able else (twice, able):
        element = sum(kernel.program.dtypes[i].size for i in parked)
        halves = (vec // 2,) if vec > 4 and len(parked) == kernel.full_loads else ()
        for share, warps, each in product((2, 4, 8), (8, 16), (*halves, vec, 2 * vec, 4 * vec)):
            part, width = cols // share, 32 * warps * each
            if part < LEAST_PART or cols % share or part % width or part // width > MOST_TILES:
                continue
            covered = Cover((width,) * (part // width))
            for slots, (hoisted, beside) in product(range(2, MOST_SLOTS + 1), _where_vectors_wait(kernel)):
                smem = shared_bytes(element, covered, slots, exchange, warps) + beside * part
                fit = device.smem_per_sm // (smem + device.smem_reserve) if smem <= device.smem_per_cta else 0
                for here in range(1, min(2, fit) + 1):
                    groups = here * device.sms // share
                    if groups and t.rows >= LEAST_TURNS * groups:  # a card may have fewer SMs than CTAs share a row
                        yield Schedule(Loop(1, groups), covered, warps, slots, parked=parked, gathers=True, shared=share,
                                       hoisted=hoisted, beside=beside > 0,
                                       registers=register_limit(warps, here, device) // 8 * 8)


def _where_vectors_wait(kernel: Kernel) -> Iterator[tuple[bool, int]]:
    """Row vectors wait nowhere, in registers, or in shared memory: whether in registers, and bytes of a column of shared memory."""
    yield False, 0
    if kernel.row_vectors:
        yield True, 0
    if beside := bytes_beside(kernel):
        yield False, beside


def _parked(kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    """Rows in shared memory, where something is needed twice, TMA can bring all that is, and a CTA has room for it."""
    cols, twice = _static_cols(kernel), wanted(kernel)
    flat = not twice <= frozenset(parkable(kernel))
    able = frozenset(parkable_flat(kernel) if flat else parkable(kernel))
    if device.capability < HAS_TMA or cols is None or not twice or not twice <= able:
        return
    vec, exchange = vector(kernel), exchanged(kernel)
    for parked in (twice,) if twice == able else (twice, able):
        element = sum(kernel.program.dtypes[i].size for i in parked)
        for warps in (4, 8, 16):
            for width in (32 * warps * vec * k for k in (1, 2, 4)):
                if width > cols:
                    continue
                covered = (cut_flat if flat else cut)(cols, width, 32 * warps * vec)
                if covered is None:
                    continue
                for slots in range(1, MOST_SLOTS + 1):
                    smem = shared_bytes(element, covered, slots, exchange, warps)
                    if smem > device.smem_per_cta:
                        break
                    most = min(MOST_HERE, device.smem_per_sm // (smem + device.smem_reserve))
                    for here in sorted({1, min(2, most), most}):
                        split = max(1, min(here * device.sms, t.rows))
                        registers = register_limit(warps, here, device)
                        one = Schedule(Loop(1, split), covered, warps, slots, lead=FLAT if flat else 0, parked=parked,
                                       registers=registers)
                        yield one
                        room = min(device.smem_per_cta, device.smem_per_sm // here - device.smem_reserve) - smem
                        yield from (replace(one, ahead=n) for n in _ahead(one, cols, room // element))


def _ahead(one: Schedule, cols: int, room: int) -> list[int]:
    """How many copies of the next row a ring has places for beside those of one row: all that there is room for, and half of them.
    Where there is room for a whole row, another schedule has a place for it."""
    assert isinstance(one.cols, Cover)
    copies = 0 if one.lead or one.stages > 1 else chunks(one.cols, cols).copies
    if not copies or room >= cols:
        return []
    most = min(room // columns_ahead(one.cols, 1), BARRIERS - copies)
    return [n for n in sorted({most, most // 2}) if n]


def _is_alone(kernel: Kernel, t: Traffic, device: Device) -> bool:
    """Long rows, too few to keep the card busy: many CTAs had better walk parts of each, where nothing needs the whole."""
    return 8 * t.rows * t.batch < device.sms and t.cols > MOST_ALONE and may_split(kernel, Family.INNER)


def _sector_cover(cols: int, lead: int, widest: int, least: int) -> tuple[int, ...]:
    """Whole tiles, then one that overhangs: its mask changes only between sectors, so it is read with vectors all the same."""
    span = sector_span(cols, lead)
    rest = span % widest
    return (widest,) * (span // widest) + ((max(power_of_two(rest), min(widest, least)),) if rest else ())


def _even(tiles: tuple[int, ...], least: int) -> bool:
    """Does every thread get a vector of every tile? Where not, Triton lays the tiles out differently and moves data between."""
    return len(tiles) == 1 or min(tiles) >= least


def _inner_looped(kernel: Kernel, t: Traffic, bindings: Bindings, device: Device) -> Iterator[Schedule]:
    lead, vec = lead_of(kernel, bindings), vector(kernel)
    splits = may_split(kernel, Family.INNER)
    for warps in (4, 8, 16):
        for per_thread in (vec, 2 * vec):
            width = 32 * warps * per_thread
            if width > power_of_two(t.cols) or not _fits_blocks(kernel, (width,)):
                continue
            for stages in (1, 2, 4):
                yield Schedule(Block(1), Loop(width), warps, stages, lead=lead)
            if splits and not lead:
                blocks = t.cols // width
                for target in (1, 2, 4):
                    k = min(blocks, -(-target * device.sms // max(t.rows, 1)))
                    pipelines = (1,) if k == blocks else (1, 4)  # in one turn there is nothing to overlap
                    yield from (Schedule(Block(1), Loop(width, k), warps, stages) for stages in pipelines if k > 1)
    if t.cols <= 32 * 4 * vec:  # short rows that cannot be held whole
        width = max(16, power_of_two(t.cols))
        for height in (8, 4, 2, 1) if _fits_blocks(kernel, (width,)) else ():
            if height * width <= max(width, 4096):
                yield Schedule(Block(height), Loop(width), 4)


def _columns_resident(kernel: Kernel, t: Traffic) -> Iterator[Schedule]:
    rows = kernel.program.extent(kernel.space.rows)
    if not isinstance(rows, int):
        return
    for width in (4, 8, 16, 32, 64, 128):
        if not min(4 * vector(kernel), power_of_two(t.cols)) <= width <= 2 * power_of_two(t.cols):
            continue  # at least 64 bytes of a row, or it is half-used sectors
        for warps in (1, 2, 4, 8, 16, 32):
            held = rows * width / (32 * warps)
            if not 2 <= held <= MOST_HELD and not (warps == 1 and held < 2):
                continue
            tiles = cover(rows, max(16, min(power_of_two(rows), 32 * warps * 16 // width)))
            if len(tiles) <= MOST_TILES:
                yield Schedule(Cover(tiles), Block(width), warps, resident=frozenset(kernel.multi_phase))


def _outer(kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    vec = vector(kernel)
    may = may_split(kernel, Family.OUTER)
    least = 1 if all(MONOIDS[_monoid(kernel, f.node)].primitive for f in kernel.folds) else min(64, power_of_two(t.rows))
    # Two warps for few rows that are written as well, all in one turn. H200, dx and dw of RMSNorm and LayerNorm backward of
    # 16 x 65536 once the rows' sums are known: 1.4 and 3.3 us less than with four. Longer walks, and plain sums, take longer so.
    for warps in (2, 4, 8) if t.full_out else (4, 8):
        for width in (32, 64, 128, 256, 512):
            if width > max(32, power_of_two(t.cols)):
                continue
            lanes = max(least, 32 * warps * vec // width)  # merges of small tiles would add up their roundings
            for step in sorted({min(lanes * deep, power_of_two(t.rows)) for deep in (1, 2, 4) if deep == 1 or t.unit * deep <= 32}):
                if warps == 2 and step < t.rows:
                    continue
                yield Schedule(Loop(step), Block(width), warps)
                if may:
                    col_blocks = -(-t.cols // width) * t.batch
                    turns = max(1, t.rows // step)
                    for target in (1, 2, 4):
                        k = min(turns, max(1, round(target * device.sms / col_blocks)))
                        if k > 1:
                            yield Schedule(Loop(step, k), Block(width), warps)


def _outer_parked(kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    """Tiles of columns through shared memory, where TMA can bring all that is full-size. A tile that leaves room for no second one
    is made shorter, down to one vector a thread; where even that leaves none, there is no such schedule.

    Partial results that another kernel has just written are in L2, and a ring only takes its time to start: H200, two sums of
    264 x 5120 of them take 7 us so, and 2.5 by threads that load them.
    """
    able = frozenset(tileable(kernel))
    if device.capability < HAS_TMA or not able or _is_near(kernel):
        return
    vec, exchange, may = widest_vector(kernel), exchanged(kernel, down=True), may_split(kernel, Family.OUTER)
    sizes = [kernel.program.dtypes[i].size for i in able]
    least = LEAST_LINE // min(sizes)
    most = max(least, power_of_two(t.cols))
    for warps in (4, 8):
        for width in (w for w in (16, 32, 64, 128, 256) if max(least, vec) <= w <= most):
            lowest = rows_at_once(width, vec, warps)
            for tall in (lowest * k for k in (1, 2, 4, 8)):
                if tall > min(BOX, max(lowest, power_of_two(t.rows))):
                    break
                for stages in (LEAST_STAGES, 3, 4, MOST_STAGES):
                    one = Schedule(Loop(tall), Block(width), warps, stages, parked=able)
                    smem = tile_bytes(one, vec, sum(sizes), exchange)
                    if smem > device.smem_per_cta:
                        break
                    here = min(MOST_HERE, device.smem_per_sm // (smem + device.smem_reserve))
                    if here * smem >= device.bytes_in_flight:  # or nothing is gained
                        yield from _shared_by(one, sorted({1, min(2, here), here}), may, t, device)


def _is_near(kernel: Kernel) -> bool:
    """Does a kernel read partial results of another only?"""
    return all(kernel.program.buffer[n.buffer].role == "temp" for i, n in enumerate(kernel.program.nodes)
               if isinstance(n, Load) and kernel.is_full[i])


def _shared_by(one: Schedule, heres: list[int], may: bool, t: Traffic, device: Device) -> Iterator[Schedule]:
    """The same with its rows shared, where they may be, by as many CTAs as give every SM so many; and not shared."""
    assert isinstance(one.rows, Loop) and isinstance(one.cols, Block)
    blocks, tiles = -(-t.cols // one.cols.size), -(-t.rows // one.rows.step)
    splits = {1: min(heres[-1], -(-blocks // device.sms))}
    for here in reversed(heres) if may else ():
        if (split := min(tiles, round(here * device.sms / blocks))) > 1:
            splits[split] = here
    for split, here in sorted(splits.items()):
        yield told(replace(one, rows=replace(one.rows, split=split)), here, device)


def _monoid(kernel: Kernel, i: int) -> str:
    node = kernel.program.nodes[i]
    assert isinstance(node, Reduce)
    return node.monoid


def _mix(kernel: Kernel, t: Traffic, device: Device) -> Iterator[Schedule]:
    cols = _static_cols(kernel)
    if cols is None or not may_split(kernel, Family.MIX):
        return
    vec = vector(kernel)
    resident = frozenset(kernel.multi_phase)
    for warps in (2, 4, 8, 16):
        for height in (1, 2, 4, 8, 16, 32, 64, 128):
            held = height * cols / (32 * warps)
            # H200: RMSNorm backward 8192 x 8192 takes 98 us with 16 elements a thread and 108 with 64; LayerNorm backward
            # 16384 x 5120 is best with 40.
            most = 40 if cols <= 16384 else 64
            if not 4 <= held <= most and not (warps == 2 and held < 4) or height > max(1, power_of_two(t.rows)):
                continue
            widths = {min(power_of_two(cols), max(32 * vec, 32 * warps * vec * k // height)) for k in (1, 2, 4)}
            for widest in sorted(widths):
                tiles = cover(cols, widest)
                if len(tiles) > 8 or not _fits_blocks(kernel, tiles) or not _even(tiles, 32 * warps * vec // height):
                    continue
                for stages, per_sm in ((1, 1), (1, 2), (1, 4), (2, 2), (3, 1), (3, 2), (3, 4), (4, 1)):
                    split = max(1, min(per_sm * device.sms // t.batch, -(-t.rows // height)))
                    for hoisted in (True,) if stages > 1 else (False, True):  # a pipeline would copy them for every row
                        yield Schedule(Loop(height, split), Cover(tiles), warps, stages, resident=resident, hoisted=hoisted)


def _pointwise(kernel: Kernel, t: Traffic, bindings: Bindings) -> Iterator[Schedule]:
    vec = vector(kernel)
    if lead := lead_of(kernel, bindings):
        for warps in (4, 8):
            for per_thread in (vec, 2 * vec):
                yield Schedule(Block(1), Loop(32 * warps * per_thread), warps, lead=lead)
    for warps in (4, 8):
        for area in (32 * warps * vec, 64 * warps * vec):
            width = power_of_two(min(t.cols, area))
            if _fits_blocks(kernel, (width,)):
                yield Schedule(Block(max(1, min(area // width, power_of_two(t.rows)))), Block(width), warps)
    if kernel.space.block:
        size = value(kernel.program.extent(kernel.space.block), bindings)
        yield Schedule(Block(4), Block(max(size, 512)), 4)
