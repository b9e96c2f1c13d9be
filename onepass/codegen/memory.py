"""Global memory: addresses, masks, loads and stores of one tile, and values that vary by block of columns."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.expr import I64, OPS
from ..ir.program import Const, Index, Load, Op, Store
from ..ir.size import Bindings, Size, product
from ..plan.access import PART, contiguous_row_stride, row_stride, runs
from ..plan.kernel import Across, Kernel
from ..plan.schedule import Block, Schedule
from ..plan.thread_layout import matches_tile_layout
from . import kernel_ir as ir
from .expr import is_bare, run_text, size_text
from .kernel_ir import Expr, Language, Name
from .names import SPLIT
from .tile_refs import TileRef

Env = dict[int, Expr]  # what each value in scope is called: a name or a literal


class Memory:
    """Makes loads and stores of tiles."""

    def __init__(self, kernel: Kernel, schedule: Schedule, bindings: Bindings, language: Language) -> None:
        self.kernel, self.program, self.schedule, self.language = kernel, kernel.program, schedule, language
        self.sector_row_stride = row_stride(kernel, bindings) if schedule.sector_elems else None

    def load(self, i: int, node: Load, ref: TileRef, env: Env) -> ir.Load:
        """A load of a tile. Indexed loads are masked where an index is outside of its dimension."""
        where, masks, full = self.address(i, node, ref), self._masks(i, ref), self.kernel.by_col[i] is Across.FULL
        for gather in node.indexed:
            at = self.as_full(gather.index, ref, env) if full else self.tensor(gather.index, env[gather.index])
            step = "" if gather.stride == 1 else f" * {size_text(gather.stride)}"
            where.append(f"{at}{step}")
            masks += [f"{at} >= 0", f"{at} < {size_text(gather.extent)}"]
        if (
            full
            and not self.kernel.by_row[i]
            and ref.height > 1
            and not matches_tile_layout(self.kernel, i, ref.width, self.schedule.warps, self.schedule.vector_limit)
        ):
            # Give it the shape of a full tile: a [1, width] load would get narrow accesses and a layout conversion.
            where.append(self._zeros(ref.height))
        other, evict_last = self._masked_value(i) if masks else "", i in self.schedule.evict_last
        return ir.Load(pointer(node), tuple(where), tuple(masks), other, evict_last)

    def store(self, i: int, node: Store, ref: TileRef, env: Env, first_rows: Expr) -> ir.Store:
        """A store of a tile. `first_rows` is the condition that a CTA has the first rows."""
        where = self.address(i, node, ref)
        if not self.kernel.by_row[i] and (ref.height > 1 or self.kernel.by_col[i] is Across.NONE):
            where.append(self._zeros(ref.height))
        masks = self._masks(i, ref)
        row_per_cta = isinstance(self.schedule.rows, Block) or self.schedule.sector_elems
        if not self.kernel.by_row[i] and self.kernel.space.rows and row_per_cta:
            # All rows compute this value and the first stores it: rows at other offsets in a sector sum in another order.
            masks.append(first_rows)
        full = self.kernel.by_col[i] is Across.FULL
        stored = self.as_full(node.value, ref, env) if full else self.tensor(node.value, env[node.value])
        return ir.Store(pointer(node), tuple(where), stored, tuple(masks), i in self.schedule.evict_last, node.src)

    def index(self, i: int, node: Index, ref: TileRef) -> Expr:
        """The position of each element along some axes."""
        extents = [self.program.axis[a].extent for a in node.axes]
        strides = tuple((axis, product(extents[k + 1 :])) for k, axis in enumerate(node.axes))
        terms = self._offsets(strides, ref, i) or [self._zeros(1)]
        text = " + ".join(terms)
        users = [self.program.nodes[u] for u in self.program.users[i]]
        # Indices that are only compared keep 32 bits, because a tile of 64-bit indices costs registers.
        compared = all(isinstance(u, Op) and OPS[u.name].compares for u in users)
        if node.dtype is not I64 or compared:
            return text
        return f"{text if isinstance(terms[-1], Name) and len(terms) == 1 else f'({text})'}.to({self.language.prefix}.int64)"

    def _masked_value(self, i: int) -> Expr:
        """The value of masked-off lanes of a load: zero, or NaN for an indexed load of floats, so that an index out of range shows.

        The literal has the load's type where integers do not convert to it.
        """
        dtype, node = self.program.dtypes[i], self.program.nodes[i]
        found = isinstance(node, Load) and bool(node.indexed) and dtype.is_float
        if dtype.is_float8:
            bits = self.language.full("[1, 1]", "127" if found else "0", "int8")  # 127: NaN in every 8-bit type
            return f"{bits}.to({self.language.prefix}.{dtype.kernel}, bitcast=True)"
        return 'float("nan")' if found else "0"

    def _zeros(self, height: int) -> Expr:
        """A column of zero indices."""
        shape = f"[{height}, 1]"
        return self.language.full(shape, "0", "int32") if self.language.layout else f"tl.zeros({shape}, tl.int32)"

    # ---- addresses -----------------------------------------------------------------------------------------------------

    def follows_sectors(self, node: Load | Store, ref: TileRef) -> bool:
        """Whether the elements of a tile are counted from the start of their row's first sector."""
        starts_there = ref.aligned and isinstance(node.offset, int) and node.offset % self.schedule.sector_elems == 0
        return bool(starts_there) and contiguous_row_stride(self.kernel, node) == self.sector_row_stride

    def address(self, i: int, node: Load | Store, ref: TileRef) -> list[Expr]:
        """The offset of each element from the start of its buffer, as terms of a sum."""
        follows = self.follows_sectors(node, ref)
        parts = ["sector", str(ref.aligned)] if follows else self._offsets(node.strides, ref, i)
        return parts + ([size_text(node.offset)] if node.offset != 0 else [])

    def _offsets(self, strides: tuple[tuple[str, Size], ...], ref: TileRef, i: int) -> list[Expr]:
        """The terms that each side adds to an address."""
        space = self.kernel.space
        by_block = self.kernel.by_col[i] is Across.BLOCK
        cols = tuple(a for a in space.cols if a not in space.block) if by_block else space.cols
        col = self._block_index(ref) if by_block else ref.col
        split = PART in self.program.axis and PART not in (*space.rows, *space.cols, *space.batch)
        sides = ((space.batch, "batch"), (space.rows, ref.row), (cols, col), ((PART,) if split else (), SPLIT))
        return [
            run_text(index, run, by_block and side is cols) for side, index in sides for run in runs(self.program, side, strides)
        ]

    def _masks(self, i: int, ref: TileRef) -> list[Expr]:
        cols = self.kernel.by_col[i]
        found = [*ref.row_mask] if self.kernel.by_row[i] else []
        if cols is Across.FULL:
            found += ref.col_mask
        if cols is Across.BLOCK and ref.col_mask:
            blocks = self.program.extent(tuple(a for a in self.kernel.space.cols if a not in self.kernel.space.block))
            found.append(f"{self._block_index(ref)} < {size_text(blocks)}")
        return found

    # ---- shapes --------------------------------------------------------------------------------------------------------

    def tensor(self, i: int, text: Expr) -> Expr:
        """A value as a tensor, for functions that do not accept bare numbers."""
        node = self.program.nodes[i]
        if isinstance(node, Const) and node.scale == 1 and is_bare(node.value, node.dtype):
            return self.language.full("[1, 1]", text, node.dtype.kernel)
        return text

    @property
    def block_size(self) -> int:
        """Columns per block, if the kernel reduces within blocks."""
        size = self.program.extent(self.kernel.space.block)
        assert isinstance(size, int)
        return size

    def _block_index(self, ref: TileRef) -> Expr:
        count = ref.width // self.block_size
        return f"{ref.col_start} // {self.block_size} + tl.arange(0, {count})[None, :]"

    def as_full(self, i: int, ref: TileRef, env: Mapping[int, Expr]) -> Expr:
        """A value repeated for every column of its block, if it varies by block."""
        if self.kernel.by_col[i] is not Across.BLOCK:
            return self.tensor(i, env[i])
        size, height, count = self.block_size, ref.height, ref.width // self.block_size
        # A value that all rows share may have one row or all rows.
        whole = env[i] if self.kernel.by_row[i] or height == 1 else f"tl.broadcast_to({env[i]}, [{height}, {count}])"
        cube = f"tl.broadcast_to(tl.reshape({whole}, [{height}, {count}, 1]), [{height}, {count}, {size}])"
        return f"tl.reshape({cube}, {ref.shape})"


def pointer(node: Load | Store) -> Name:
    """The kernel parameter of a load's or store's buffer."""
    return Name(f"{node.buffer}_ptr")
