"""Kernel text of a Program's nodes: loads, ops, indices, stores, and reductions within one tile.

Residency is implemented here. Later walks read a multi-phase input held in registers as its 16-bit value xor a zero that the
compiler cannot fold. Otherwise the compiler would keep the widened fp32 copy alive across the reduction instead. A bfloat16 that is
only ever widened needs no xor, because `widen` takes the zero.
"""

from __future__ import annotations

import re
from math import frexp

from ..ir.expr import BF16, F32, F64, I64, OPS
from ..ir.monoid import MONOIDS, State
from ..ir.precision import may_be_approximate
from ..ir.program import Const, Index, Load, Op, Program, Reduce, Result, Store, operands
from ..ir.size import Bindings, Size, product
from ..plan.access import PART, contiguous_row_stride, row_stride, runs
from ..plan.kernel import Across, Kernel
from ..plan.l2_hints import l2_evict_last
from ..plan.resources import keeps_packed
from ..plan.schedule import Block, Schedule
from ..plan.thread_layout import matches_tile_layout
from .expr import TRITON, Language, TileAlgebra, op_text, run_text, scaled_literal, size_text
from .tile_refs import TileRef
from .writer import Writer

Env = dict[int, str]  # the name of each value in scope


class Values:
    """Emits values, and tracks which are held across walks and the results of reductions."""

    first_rows = "(row_block == 0)"  # condition: this CTA has the first rows

    def __init__(self, kernel: Kernel, schedule: Schedule, bindings: Bindings, writer: Writer, language: Language = TRITON) -> None:
        self.kernel, self.schedule, self.writer, self.language = kernel, schedule, writer, language
        self.program = kernel.program
        self.names = value_names(self.program)
        # Approximate exponentials and quotients suffice for 16-bit data, unless full-size results are stored in a wider type.
        wide_results = any(kernel.is_full[i] and self.program.dtypes[i].name in ("f32", "f64") for i in self.program.of(Store))
        self.exact = wide_results or kernel.wide_data or F64 in self.program.dtypes
        self._tolerant = may_be_approximate(self.program)
        self.sector_row_stride = row_stride(kernel, bindings) if schedule.sector_elems else None
        self.l2_evict_last = l2_evict_last(kernel, schedule, bindings)
        self.held: dict[tuple[int, str], str] = {}  # loads kept in registers, by node and tile
        self.results: dict[int, State] = {}  # results of finished reductions
        resident = [self.program.dtypes[i] for i in schedule.resident]
        self.keeps_packed = keeps_packed(schedule, sum(max(1, d.size // 4) for d in resident))
        self.walk = 0  # index of the current walk
        self.in_row_loop = False  # inside a row loop, values loaded before the loop count as held

    # ---- naming ------------------------------------------------------------------------------------------------------

    def assign(self, hint: str, text: str, note: str = "") -> str:
        """Assign a value to a fresh name and return the name."""
        name = self.writer.fresh(hint)
        self.writer.line(f"{name} = {text}", note)
        return name

    def opaque_zeros(self, form: str, walks: range, held: tuple[int, ...]) -> None:
        """Emit a zero for every walk, each opaque to the compiler, so that it does not reuse the values of an earlier walk."""
        if any(map(self._narrow, held)):
            for p in walks:
                self.writer.line(f"zero{p} = ({form.format(p)}).to({self.language.prefix}.int32)")

    # ---- residency ---------------------------------------------------------------------------------------------------

    def use_resident(self, i: int, ref: TileRef, env: Env) -> str:
        """A resident input: loaded in the first walk that needs it, read from registers in later walks."""
        key = (i, ref.tag)
        if key in self.held:
            return self.held[key] if self.walk == 0 else self._opaque(i, self.held[key], ref)
        self.preload(i, ref, env)
        return self.held[key]

    def preload(self, i: int, ref: TileRef, env: Env) -> None:
        """Load a value before it is needed and hold it. `env` has the values in scope and is not changed."""
        own = dict(env)
        self.with_operands(i, ref, own)
        self.held[i, ref.tag] = own[i]

    def with_operands(self, i: int, ref: TileRef, env: Env) -> None:
        """Emit a node after its operands that are not in `env`, such as the index of an indexed load."""
        for needed in self._missing_operands(i, env):
            self.node(needed, ref, env)
        self.node(i, ref, env)

    def _missing_operands(self, i: int, env: Env) -> list[int]:
        """The transitive operands of a node that `env` lacks, in order. Results of reductions over tiles are always in scope."""
        found: set[int] = set()
        todo = [i]
        while todo:
            at = todo.pop()
            node = self.program.nodes[at]
            left = isinstance(node, Result) and node.reduce not in self.kernel.within_blocks
            fresh = [o for o in operands(node) if o not in env and o not in found] if not left else []
            found.update(fresh)
            todo += fresh
        return sorted(found)

    def _narrow(self, i: int) -> bool:
        """Whether a held value is narrower than a register, so that a widened copy would cost more. (A bool cannot be widened.)"""
        if i in self.schedule.resident and not self.keeps_packed:
            return False
        return self.program.dtypes[i].size <= 2 and self.program.dtypes[i].kind != "bool"

    def _opaque(self, i: int, name: str, ref: TileRef) -> str:
        """A held 16-bit value made opaque to the compiler, so that the 16 bits stay in registers and not a widened copy."""
        dtype, node = self.program.dtypes[i], self.program.nodes[i]
        assert isinstance(node, Load)
        if not self._narrow(i):
            return name
        if self._only_widened(i):
            return f"{name}, zero{self.walk}"
        of, bits = self.language.prefix, f"int{8 * dtype.size}"
        text = f"({name}.to({of}.{bits}, bitcast=True) ^ zero{self.walk}.to({of}.{bits})).to({of}.{dtype.kernel}, bitcast=True)"
        return self.assign(f"{node.buffer}{ref.tag}_again", text)

    def _only_widened(self, i: int) -> bool:
        """Whether all uses of a value widen it to float32 by `widen`."""
        readers = [j for j, node in enumerate(self.program.nodes) if i in operands(node)]
        return self.kernel.by_col[i] is not Across.BLOCK and all(self._widens(j) for j in readers)

    def _widens(self, i: int) -> bool:
        """Whether a node casts a bfloat16 to float32. Constants are emitted in their final type."""
        node, dtypes = self.program.nodes[i], self.program.dtypes
        return (isinstance(node, Op) and node.name == "cast" and dtypes[i] is F32 and dtypes[node.args[0]] is BF16
                and not isinstance(self.program.nodes[node.args[0]], Const))

    def _only_compared(self, i: int) -> bool:
        """Whether the first walk uses a value only in max and min reductions.

        The compiler then compares both halves of a register at once, if it sees the cast.
        """
        nodes, phase = self.program.nodes, self.kernel.phase
        readers = [node for j, node in enumerate(nodes) if i in operands(node) and phase[j] == 0]
        return self.walk == 0 and not self.in_row_loop and bool(readers) and all(
            isinstance(node, Reduce) and MONOIDS[node.monoid].fold in ("max", "min") for node in readers)

    # ---- one node ----------------------------------------------------------------------------------------------------

    def node(self, i: int, ref: TileRef, env: Env) -> None:
        """Emit one node for a tile and record its name."""
        node = self.program.nodes[i]
        hint = self.names[i] + ref.tag
        match node:
            case Const():
                env[i] = scaled_literal(node.value, node.scale, node.dtype, self.language)
            case Index():
                env[i] = self.assign(hint, self._index(i, node, ref), node.src)
            case Load():
                held = self.held.get((i, ref.tag))
                if held is None:
                    env[i] = self.assign(hint, self._load(i, node, ref, env), node.src)
                else:
                    env[i] = self._opaque(i, held, ref) if self.in_row_loop else held
            case Op():
                env[i] = self.assign(hint, self._op(i, node, ref, env), node.src)
            case Reduce():
                self._block_reduce(i, node, ref, env)
            case Result():
                env[i] = self.results[node.reduce][node.k]
            case Store():
                self._store(i, node, ref, env)

    def _op(self, i: int, node: Op, ref: TileRef, env: Env) -> str:
        full = self.kernel.by_col[i] is Across.FULL
        args = [self.as_full(a, ref, env) if full and self.kernel.by_col[a] is Across.BLOCK else env[a] for a in node.args]
        if node.name == "cast" and node.dtype.is_float8 and self.program.dtypes[node.args[0]] is F64:
            args = [f"{args[0]}.to({self.language.prefix}.float32)"]  # as torch converts it; Triton has no direct conversion
        if self._widens(i) and not self._only_compared(i):
            return f"widen({args[0]})"
        if not OPS[node.name].takes_literals or all(isinstance(self.program.nodes[a], Const) for a in node.args):
            args = [self.tensor(a, text) for a, text in zip(node.args, args, strict=True)]
        exact = self.is_exact(i)
        if node.name == "div" and not exact and (count := self._count(node.args[1])) is not None:
            return self._divided_by_count(args[0], count)
        if exact and OPS[node.name].exact:
            args = [self.tensor(a, text) for a, text in zip(node.args, args, strict=True)]
        return op_text(node.name, tuple(args), self.program.dtypes[i], exact, self.language)

    def _count(self, i: int) -> float | None:
        """The divisor of a mean, if a node is one. Simplification leaves 16-bit data no other constant divisors."""
        node = self.program.nodes[i]
        return node.value if isinstance(node, Const) and node.scale == 1 and 1 < node.value < 2**31 else None

    def _divided_by_count(self, total: str, count: float) -> str:
        """total / count, correctly rounded: a product and one correction step. Else equal values would have a nonzero variance.

        What remains of an infinite total is NaN, and then nothing is corrected.
        """
        of, each = self.language.prefix, 1 / count
        if frexp(count)[0] == 0.5:
            return f"({total} * {each!r})"
        first = self.assign("first", f"{total} * {each!r}")
        remainder = self.assign("remainder", f"{of}.fma({first}, {-count!r}, {total})")
        return f"{of}.where({remainder} == {remainder}, {of}.fma({remainder}, {each!r}, {first}), {first})"

    def is_exact(self, i: int) -> bool:
        """Whether a value must be accurate to the last bits of its type."""
        return self.exact or not self._tolerant[i]

    def tensor(self, i: int, text: str) -> str:
        """A literal as a tensor, for functions that do not accept bare numbers."""
        node = self.program.nodes[i]
        if isinstance(node, Const) and node.scale == 1 and not text.startswith(f"{self.language.prefix}.full"):
            return self.language.full("[1, 1]", text, node.dtype.kernel)
        return text

    def _index(self, i: int, node: Index, ref: TileRef) -> str:
        extents = [self.program.axis[a].extent for a in node.axes]
        strides = tuple((axis, product(extents[k + 1 :])) for k, axis in enumerate(node.axes))
        text = " + ".join(self._offsets(strides, ref, i)) or self._zeros(1)
        users = [self.program.nodes[u] for u in self.program.users[i]]
        # Indices that are only compared keep 32 bits, because a tile of 64-bit indices costs registers.
        compared = all(isinstance(u, Op) and OPS[u.name].compares for u in users)
        return f"({text})" + (f".to({self.language.prefix}.int64)" if node.dtype is I64 and not compared else "")

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _load(self, i: int, node: Load, ref: TileRef, env: Env) -> str:
        where = self._address(i, node, ref)
        masks, full = self._masks(i, ref), self.kernel.by_col[i] is Across.FULL
        for gather in node.indexed:
            at = self.as_full(gather.index, ref, env) if full else self.tensor(gather.index, env[gather.index])
            step = "" if gather.stride == 1 else f" * {size_text(gather.stride)}"
            where = f"{where} + {at}{step}" if where else f"{at}{step}"
            masks.append(f"({at} >= 0) & ({at} < {size_text(gather.extent)})")
        if full and not self.kernel.by_row[i] and ref.height > 1 \
                and not matches_tile_layout(self.kernel, i, ref.width, self.schedule.warps):
            # Give it the shape of a full tile: a [1, width] load would get narrow accesses and a layout conversion.
            where = f"{where} + {self._zeros(ref.height)}"
        pointer = f"{node.buffer}_ptr" + (f" + ({where})" if where else "")
        mask = f", mask={' & '.join(masks)}, other={self._masked_value(i)}" if masks else ""
        return f"{self.language.prefix}.load({pointer}{mask}{self._eviction_policy(i)})"

    def _masked_value(self, i: int) -> str:
        """The value of masked-off lanes of a load: zero, or NaN for an indexed load of floats, so that an index out of range shows.

        The literal has the load's type where integers do not convert to it.
        """
        dtype, node = self.program.dtypes[i], self.program.nodes[i]
        found = isinstance(node, Load) and bool(node.indexed) and dtype.is_float
        if dtype.is_float8:
            bits = self.language.full("[1, 1]", "127" if found else "0", "int8")  # 127: NaN in every 8-bit type
            return f"{bits}.to({self.language.prefix}.{dtype.kernel}, bitcast=True)"
        return 'float("nan")' if found else "0"

    def _store(self, i: int, node: Store, ref: TileRef, env: Env) -> None:
        where = self._address(i, node, ref)
        if not self.kernel.by_row[i] and (ref.height > 1 or self.kernel.by_col[i] is Across.NONE):
            where = f"{where + ' + ' if where else ''}{self._zeros(ref.height)}"
        masks = self._masks(i, ref)
        row_per_cta = isinstance(self.schedule.rows, Block) or self.schedule.sector_elems
        if not self.kernel.by_row[i] and self.kernel.space.rows and row_per_cta:
            # All rows compute this value and the first stores it: rows at other offsets in a sector sum in another order.
            masks.append(self.first_rows)
        mask = f", mask={' & '.join(masks)}" if masks else ""
        full = self.kernel.by_col[i] is Across.FULL
        stored = self.as_full(node.value, ref, env) if full else self.tensor(node.value, env[node.value])
        options = mask + self._eviction_policy(i)
        self.writer.line(f"{self.language.prefix}.store({node.buffer}_ptr + ({where}), {stored}{options})", node.src)

    def _eviction_policy(self, i: int) -> str:
        """The argument that makes L2 evict the lines of a load or store last, if the plan says so."""
        return ', eviction_policy="evict_last"' if i in self.l2_evict_last else ""

    def _zeros(self, height: int) -> str:
        """A column of zero indices."""
        shape = f"[{height}, 1]"
        return self.language.full(shape, "0", "int32") if self.language.layout else f"tl.zeros({shape}, tl.int32)"

    def _address(self, i: int, node: Load | Store, ref: TileRef) -> str:
        follows = ref.aligned and isinstance(node.offset, int) and node.offset % self.schedule.sector_elems == 0
        if follows and contiguous_row_stride(self.kernel, node) == self.sector_row_stride:
            parts = ["sector", str(ref.aligned)]
        else:
            parts = self._offsets(node.strides, ref, i)
        return " + ".join(parts + ([size_text(node.offset)] if node.offset != 0 else []))

    def _offsets(self, strides: tuple[tuple[str, Size], ...], ref: TileRef, i: int) -> list[str]:
        """The terms that each side adds to an address."""
        space = self.kernel.space
        by_block = self.kernel.by_col[i] is Across.BLOCK
        cols = tuple(a for a in space.cols if a not in space.block) if by_block else space.cols
        col = self._block_index(ref) if by_block else ref.col
        split = PART in self.program.axis and PART not in (*space.rows, *space.cols, *space.batch)
        sides = ((space.batch, "batch"), (space.rows, ref.row), (cols, col), ((PART,) if split else (), PART))
        return [run_text(index, run) for side, index in sides for run in runs(self.program, side, strides)]

    def _masks(self, i: int, ref: TileRef) -> list[str]:
        cols = self.kernel.by_col[i]
        found = [ref.row_mask] if self.kernel.by_row[i] and ref.row_mask else []
        if cols is Across.FULL and ref.col_mask:
            found.append(ref.col_mask)
        if cols is Across.BLOCK and ref.col_mask:
            blocks = self.program.extent(tuple(a for a in self.kernel.space.cols if a not in self.kernel.space.block))
            found.append(f"({self._block_index(ref)} < {size_text(blocks)})")
        return found

    # ---- blocks of columns -------------------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Columns per block, if the kernel reduces within blocks."""
        size = self.program.extent(self.kernel.space.block)
        assert isinstance(size, int)
        return size

    def _block_index(self, ref: TileRef) -> str:
        count = ref.width // self.block_size
        return f"({ref.col_start} // {self.block_size} + tl.arange(0, {count})[None, :])"

    def as_full(self, i: int, ref: TileRef, env: Env) -> str:
        """A value repeated for every column of its block, if it varies by block."""
        if self.kernel.by_col[i] is not Across.BLOCK:
            return self.tensor(i, env[i])
        size, height, count = self.block_size, ref.height, ref.width // self.block_size
        # A value that all rows share may have one row or all rows.
        whole = env[i] if self.kernel.by_row[i] or height == 1 else f"tl.broadcast_to({env[i]}, [{height}, {count}])"
        cube = f"tl.broadcast_to(tl.reshape({whole}, [{height}, {count}, 1]), [{height}, {count}, {size}])"
        return f"tl.reshape({cube}, {ref.shape})"

    def _block_reduce(self, i: int, node: Reduce, ref: TileRef, env: Env) -> None:
        """A reduction within the blocks of one tile."""
        size, monoid = self.block_size, MONOIDS[node.monoid]
        count = ref.width // size

        def folded(kind: str, text: str) -> str:
            cube = f"tl.reshape({text}, [{ref.height}, {count}, {size}])"
            return f"tl.reshape({fold_text(kind, cube, 2)}, [{ref.height}, {count}])"

        algebra = TileAlgebra(self.assign, folded, lambda: f"{float(size)}", self.is_exact(i))
        args = [self.assign("spread", f"tl.broadcast_to({self.as_full(a, ref, env)}, {ref.shape})") for a in node.args]
        self.results[i] = monoid.finalize(algebra, *monoid.merge(algebra, *monoid.lift(algebra, *args)))


def fold_text(kind: str, text: str, axis: int, language: Language = TRITON) -> str:
    """A primitive fold of a tile along one axis, with the axis kept."""
    return f"{language.prefix}.sum({text}, axis={axis}, keep_dims=True)" if kind == "sum" else f"fold_{kind}({text}, {axis})"


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
