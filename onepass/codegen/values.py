"""Statements for a Program's nodes: loads, ops, indices, stores, and reductions within one tile.

Residency is implemented here. Later walks read a multi-phase input held in registers as its 16-bit value xor a zero that the
compiler cannot fold. Otherwise the compiler would keep the widened fp32 copy alive across the reduction instead. A bfloat16 that is
only ever widened needs no xor, because `widen` takes the zero.
"""

from __future__ import annotations

from collections.abc import Callable
from math import frexp
from typing import Protocol

from ..ir.expr import BF16, F32, F64, OPS, as_dtype
from ..ir.monoid import MONOIDS, State
from ..ir.precision import may_be_approximate
from ..ir.program import Const, Index, Load, Op, Reduce, Result, Store, operands
from ..plan.kernel import Across
from .builder import Builder
from .expr import TileAlgebra, literal, scaled_literal
from .kernel_ir import Apply, Expr, Name, RightSide, SharedLoad, TileFold, Widen
from .memory import Env, Memory
from .names import value_names
from .tile_refs import TileRef

OPAQUE = "always 0, but the compiler cannot know: each pass widens again instead of keeping fp32"


PASS_SUFFIX = "NAME_pP: computed again in pass P, counted from 0"
MANY, MOST = 99, 2**40  # a factor that is the reciprocal of an integer between these is noted as such


class Staging(Protocol):
    """Where values are read and stored if a kernel stages rows or tiles in shared memory."""

    first_rows: Expr  # condition: this CTA has the first rows

    def read(self, i: int, ref: TileRef) -> SharedLoad | None:
        """The shared memory that holds a load's tile, if any does."""

    def scalar_ref(self, ref: TileRef) -> TileRef:
        """The tile of a load that has one element per row."""

    def store_parts(self, node: Store, ref: TileRef) -> tuple[TileRef, ...]:
        """The tile of a store, or the parts that are stored apart."""


class Unstaged:
    """Values are read and stored tile by tile, in global memory."""

    first_rows = "row_block == 0"

    def read(self, i: int, ref: TileRef) -> SharedLoad | None:
        """No load is staged."""
        return None

    def scalar_ref(self, ref: TileRef) -> TileRef:
        """The tile itself."""
        return ref

    def store_parts(self, node: Store, ref: TileRef) -> tuple[TileRef, ...]:
        """The whole tile."""
        return (ref,)


class Values:
    """Builds values, and tracks which are held across walks and the results of reductions."""

    def __init__(self, memory: Memory, builder: Builder, staging: Staging | None = None) -> None:
        self.memory, self.builder, self.staging = memory, builder, staging or Unstaged()
        self.kernel, self.program, self.schedule, self.language = memory.kernel, memory.program, memory.schedule, memory.language
        kernel = self.kernel
        self.names = value_names(self.program)
        # Approximate exponentials and quotients suffice for 16-bit data, unless full-size results are stored in a wider type.
        wide_results = any(kernel.is_full[i] and self.program.dtypes[i].name in ("f32", "f64") for i in self.program.of(Store))
        self.exact = wide_results or kernel.wide_data or F64 in self.program.dtypes
        self._tolerant = may_be_approximate(self.program)
        self.held: dict[tuple[int, str], Expr] = {}  # loads kept in registers, by node and tile
        self._hidden: set[tuple[int, str]] = set()  # held loads whose next widening takes a zero, by node and tile
        self._zeros: dict[int, Name] = {}  # opaque zeros, by walk
        self._first_walk: dict[str, int] = {}  # in which walk a name was first used
        self.results: dict[int, State] = {}  # results of finished reductions
        self.walk = 0  # index of the current walk
        self.in_row_loop = False  # inside a row loop, values loaded before the loop count as held

    def opaque_zeros(self, zero: Callable[[int], Expr], walks: range, held: tuple[int, ...]) -> None:
        """Make a zero for every walk, each opaque to the compiler, so that it does not reuse the values of an earlier walk."""
        if any(map(self._narrow, held)):
            for p in walks:
                self.builder.set(self._zero(p), f"({zero(p)}).to({self.language.prefix}.int32)", OPAQUE)

    def _zero(self, walk: int) -> Name:
        """The opaque zero of a walk. A user's value may have the same name."""
        if walk not in self._zeros:
            self._zeros[walk] = self.builder.fresh(f"zero{walk}")
        return self._zeros[walk]

    # ---- residency ---------------------------------------------------------------------------------------------------

    def use_resident(self, i: int, ref: TileRef, env: Env) -> Expr:
        """A resident input: loaded in the first walk that needs it, read from registers in later walks."""
        key = (i, ref.tag)
        if key in self.held:
            self._hidden.discard(key)
            return self.held[key] if self.walk == 0 else self._opaque(i, self.held[key], ref)
        self.preload(i, ref, env)
        return self.held[key]

    def preload(self, i: int, ref: TileRef, env: Env) -> None:
        """Load a value before it is needed and hold it. `env` has the values in scope and is not changed."""
        own = dict(env)
        self.with_operands(i, ref, own)
        self.held[i, ref.tag] = own[i]
        self._hidden.discard((i, ref.tag))

    def with_operands(self, i: int, ref: TileRef, env: Env) -> None:
        """Build a node after its operands that are not in `env`, such as the index of an indexed load."""
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
        if i in self.schedule.resident and not self.schedule.packed:
            return False
        return self.program.dtypes[i].size <= 2 and self.program.dtypes[i].kind != "bool"

    def _opaque(self, i: int, name: Expr, ref: TileRef) -> Expr:
        """A held 16-bit value made opaque to the compiler, so that the 16 bits stay in registers and not a widened copy."""
        dtype, node = self.program.dtypes[i], self.program.nodes[i]
        assert isinstance(node, Load)
        if not self._narrow(i):
            return name
        if self._only_widened(i):
            self._hidden.add((i, ref.tag))
            return name
        of, bits, zero = self.language.prefix, f"int{8 * dtype.size}", self._zero(self.walk)
        text = f"({name}.to({of}.{bits}, bitcast=True) ^ {zero}.to({of}.{bits})).to({of}.{dtype.kernel}, bitcast=True)"
        return self.builder.assign(self._hint(i, ref), text)

    def _only_widened(self, i: int) -> bool:
        """Whether all uses of a value widen it to float32 by `widen`."""
        readers = [j for j, node in enumerate(self.program.nodes) if i in operands(node)]
        return self.kernel.by_col[i] is not Across.BLOCK and all(self._widens(j) for j in readers)

    def _widens(self, i: int) -> bool:
        """Whether a node casts a bfloat16 to float32. Constants are written in their final type."""
        node, dtypes = self.program.nodes[i], self.program.dtypes
        return (
            isinstance(node, Op)
            and node.name == "cast"
            and dtypes[i] is F32
            and dtypes[node.args[0]] is BF16
            and not isinstance(self.program.nodes[node.args[0]], Const)
        )

    def _only_compared(self, i: int) -> bool:
        """Whether the first walk uses a value only in max and min reductions.

        The compiler then compares both halves of a register at once, if it sees the cast.
        """
        nodes, phase = self.program.nodes, self.kernel.phase
        readers = [node for j, node in enumerate(nodes) if i in operands(node) and phase[j] == 0]
        return (
            self.walk == 0
            and not self.in_row_loop
            and bool(readers)
            and all(isinstance(node, Reduce) and MONOIDS[node.monoid].fold in ("max", "min") for node in readers)
        )

    # ---- one node ----------------------------------------------------------------------------------------------------

    def node(self, i: int, ref: TileRef, env: Env) -> None:
        """Build one node for a tile and record its name."""
        node, assign = self.program.nodes[i], self.builder.assign
        hint = self._hint(i, ref)
        match node:
            case Const():
                env[i] = scaled_literal(node.value, node.scale, node.dtype, self.language)
            case Index():
                env[i] = assign(hint, self.memory.index(i, node, ref), node.src)
            case Load():
                env[i] = self._loaded(i, node, ref, env, hint)
            case Op():
                env[i] = assign(hint, self._op(i, node, ref, env), self._reciprocal(node), node.src)
            case Reduce():
                self._block_reduce(i, node, ref, env)
            case Result():
                value = self.results[node.reduce][node.k]
                env[i] = value if isinstance(value, str) else literal(value)
            case Store():
                for part in self.staging.store_parts(node, ref):
                    self.builder.add(self.memory.store(i, node, part, env, self.staging.first_rows))

    def _hint(self, i: int, ref: TileRef) -> str:
        """The name of a value of a tile, with the number of the pass if an earlier pass has computed it."""
        name = self.names[i] + ref.tag
        if self._first_walk.setdefault(name, self.walk) == self.walk:
            return name
        self.builder.explain(PASS_SUFFIX)
        return f"{name}_p{self.walk}"

    def _loaded(self, i: int, node: Load, ref: TileRef, env: Env, hint: str) -> Expr:
        """A load's value: held in registers, read from shared memory, or loaded."""
        held = self.held.get((i, ref.tag))
        self._hidden.discard((i, ref.tag))
        if held is not None:
            return self._opaque(i, held, ref) if self.in_row_loop else held
        where = self.staging.scalar_ref(ref) if self.kernel.by_col[i] is Across.NONE else ref
        return self.builder.assign(hint, self.staging.read(i, ref) or self.memory.load(i, node, where, env), node.src)

    def _op(self, i: int, node: Op, ref: TileRef, env: Env) -> RightSide:
        memory, by_col = self.memory, self.kernel.by_col
        full = by_col[i] is Across.FULL
        args = [memory.as_full(a, ref, env) if full and by_col[a] is Across.BLOCK else env[a] for a in node.args]
        if node.name == "cast" and node.dtype.is_float8 and self.program.dtypes[node.args[0]] is F64:
            args = [f"{args[0]}.to({self.language.prefix}.float32)"]  # as torch converts it; Triton has no direct conversion
        if self._widens(i) and not self._only_compared(i):
            return Widen(args[0], self._zero(self.walk) if (node.args[0], ref.tag) in self._hidden else "")
        exact, row = self.is_exact(i), OPS[node.name]
        if not row.takes_literals or exact and row.exact or all(isinstance(self.program.nodes[a], Const) for a in node.args):
            args = [memory.tensor(a, text) for a, text in zip(node.args, args, strict=True)]
        args = [self.operand(a, text) for a, text in zip(node.args, args, strict=True)]
        if node.name == "div" and not exact and (count := self._count(node.args[1])) is not None:
            return self._divided_by_count(args[0], count)
        return Apply(node.name, tuple(args), self.program.dtypes[i], exact)

    def _reciprocal(self, node: Op) -> str:
        """How a factor reads that is 1 / n for a large integer n, as in means; empty for others."""
        factors = [self.program.nodes[a] for a in node.args] if node.name == "mul" else []
        for factor in factors:
            if isinstance(factor, Const) and factor.scale == 1 and 1 / MOST < factor.value < 1 / MANY:
                count = round(1 / factor.value)
                if as_dtype(1 / count, factor.dtype) == as_dtype(factor.value, factor.dtype):
                    return f"1 / {count}"
        return ""

    def operand(self, i: int, text: Expr) -> Expr:
        """A value to compute with. A number times a size gets a name, just before its use."""
        node = self.program.nodes[i]
        return self.builder.assign(self.names[i], text) if isinstance(node, Const) and node.scale != 1 else text

    def _count(self, i: int) -> float | None:
        """The divisor of a mean, if a node is one. Simplification leaves 16-bit data no other constant divisors."""
        node = self.program.nodes[i]
        return node.value if isinstance(node, Const) and node.scale == 1 and 1 < node.value < 2**31 else None

    def _divided_by_count(self, total: Expr, count: float) -> Expr:
        """total / count, correctly rounded: a product and one correction step. Else equal values would have a nonzero variance.

        What remains of an infinite total is NaN, and then nothing is corrected.
        """
        of, each, assign = self.language.prefix, 1 / count, self.builder.assign
        if frexp(count)[0] == 0.5:
            return f"{total} * {each!r}"
        first = assign("first", f"{total} * {each!r}", f"1 / {count:.15g}")
        remainder = assign("remainder", f"{of}.fma({first}, {-count!r}, {total})")
        return f"{of}.where({remainder} == {remainder}, {of}.fma({remainder}, {each!r}, {first}), {first})"

    def is_exact(self, i: int) -> bool:
        """Whether a value must be accurate to the last bits of its type."""
        return self.exact or not self._tolerant[i]

    def _block_reduce(self, i: int, node: Reduce, ref: TileRef, env: Env) -> None:
        """A reduction within the blocks of one tile."""
        size, monoid, assign = self.memory.block_size, MONOIDS[node.monoid], self.builder.assign
        count = ref.width // size

        def folded(kind: str, text: Expr) -> TileFold:
            return TileFold(kind, text, (2,), (ref.height, count, size), (ref.height, count))

        algebra = TileAlgebra(assign, folded, lambda: f"{float(size)}", self.is_exact(i))
        args = [assign("spread", f"tl.broadcast_to({self.memory.as_full(a, ref, env)}, {ref.shape})") for a in node.args]
        self.results[i] = monoid.finalize(algebra, *monoid.merge(algebra, *monoid.lift(algebra, *args)))
