"""Reductions across tiles: running states, how a tile updates them, and how the result is read out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..ir.expr import F32, DType
from ..ir.monoid import MONOIDS, Accumulated, Monoid, State, Value
from ..ir.program import Const, Reduce
from ..plan.kernel import Across, Fold, Kernel
from ..plan.thread_layout import access_vector, allows_private_states, private_state_columns
from .expr import COMBINE, TileAlgebra, conjunction, growth, join, literal
from .kernel_ir import Apply, Assign, Expr, Name, RightSide, Sum, TileFold, TwoSums
from .memory import Env
from .tile_refs import TileRef
from .values import Values

Key: TypeAlias = str | tuple[int, ...]  # of a state: the tag of its tile, the shape of its tiles, or "" where there is one


@dataclass
class Running:
    """A reduction in progress. It keeps one state per tile, one per tile shape, or one in all (see Folds.key)."""

    fold: Fold
    monoid: Monoid
    dtype: DType
    axes: tuple[int, ...]  # reduced axes of a tile
    across: Across  # how the operands vary along the columns
    compensated: bool  # accumulators use compensated (Kahan) summation
    exact: bool  # exponentials and quotients are accurate to the last bits
    states: dict[Key, State] = field(default_factory=dict)
    compensation: dict[Key, dict[int, str]] = field(default_factory=dict)  # rounding error so far, by component of each state
    by_lane: dict[Key, int] = field(default_factory=dict)  # number of states, where each thread keeps its own


class Folds:
    """Emits reductions."""

    def __init__(self, kernel: Kernel, values: Values, row_loop: bool) -> None:
        self.kernel, self.values, self.builder, self.row_loop = kernel, values, values.builder, row_loop
        self.language = values.language

    def running(self, fold: Fold) -> Running:
        """A reduction before its first element."""
        node = self._node(fold)
        axes = ((1,) if fold.cols else ()) + ((0,) if fold.rows else ())
        dtype = self.kernel.program.dtypes[node.args[0]]
        monoid = MONOIDS[node.monoid]
        # A long running sum of fp32 data rounds more than eager's tree; for 16-bit data the rounded result hides the difference.
        compensated = self.kernel.is_full_precision[fold.node] and bool(monoid.accumulating) and dtype is F32
        exact = self.values.is_exact(fold.node)
        across = max((self.kernel.by_col[a] for a in node.args), key=lambda a: a.value)
        return Running(fold, monoid, dtype, axes, across, compensated, exact)

    def start(self, running: Running, refs: Iterable[TileRef]) -> None:
        """Initialize the states that a loop carries to the identity, one for each kind of tile in the loop."""
        for ref in refs:
            key = self.key(running, ref)
            if key not in running.states:
                shape = str([*self._running_shape(running, ref)])
                running.states[key] = self._identity(running, shape, ref.tag if key == ref.tag else "")
                if running.compensated:
                    running.compensation[key] = {
                        k: self.builder.assign("lost", self.language.full(shape, "0.0", "float32"))
                        for k in running.monoid.accumulating
                    }

    def key(self, running: Running, ref: TileRef) -> Key:
        """The state that a tile updates: its own where results vary by tile, else the one of all tiles of its shape."""
        if self.row_loop and running.fold.rows and not running.fold.cols:
            return "1" if running.across is Across.NONE else ref.tag
        by_lane = running.monoid.primitive or self._lane_shape(running, ref) is not None
        return self._running_shape(running, ref) if by_lane else ""

    def feed(self, running: Running, ref: TileRef, env: Env, unrolled: bool) -> None:
        """Add a tile to its state: elementwise where the reduction is one primitive fold, else by one merge per tile.

        `unrolled`: the line runs once, so the new state gets a new name. Inside a loop the old name is reassigned.
        """
        counted: dict[str, Value] = {}
        algebra = self._algebra(running, ref, counted)
        args = (self._broadcast(a, running, ref, env) for a in self._node(running.fold).args)
        entered = self._masked_to_identity(running, running.monoid.lift(algebra, *args), ref, counted)
        entered = self._tile_state(running, entered, ref, algebra)
        key = self.key(running, ref)
        before = running.states.get(key)
        if before is None:
            running.states[key] = tuple(map(_expr, entered))
            return
        if key in running.compensation:
            self._add_compensated(running, before, entered, running.compensation[key])
            return
        merged = self._merged(running, before, entered)
        if unrolled:
            named = zip(self._hints(running, ""), merged, strict=True)
            running.states[key] = tuple(self.builder.assign(hint, value) for hint, value in named)
        else:
            for name, value in zip(before, merged, strict=True):
                self.builder.set(str(name), value)

    def finish(self, running: Running, ref: TileRef) -> None:
        """Read out a reduction: fold its lanes and merge the states of its tiles."""
        self.leave(running, ref, self.total(running, ref))

    def total(self, running: Running, ref: TileRef) -> State:
        """The state of all elements."""
        algebra = self._algebra(running, ref, {}, "" if len(running.states) == 1 else "_part")
        held = [self._compensated(state, running.compensation.get(key, {})) for key, state in running.states.items()]
        states = [self._fold_lanes(running, key, state, algebra) for key, state in zip(running.states, held)]
        return self.join_states(running, states)

    def totals(self, running: Sequence[Running], ref: TileRef, together: bool) -> list[State]:
        """The state of all elements, for every reduction along a row.

        `together`: two sums are folded in one exchange between threads. H200, LayerNorm backward 8192x32768, 2 CTAs per row:
        413 us, 421 us with an exchange for each sum.
        """
        if not together:
            return [self.total(state, ref) for state in running]
        held: list[Value] = []
        for state in running:
            ((key, lanes),) = state.states.items()
            held += self._compensated(lanes, state.compensation.get(key, {}))
        names = tuple(self.builder.fresh(self.values.names[state.fold.node]) for state in running)
        first, second = map(_expr, held)
        self.builder.add(Assign(names, TwoSums((first, second), 1)))
        return [(name,) for name in names]

    def join_states(self, running: Running, states: Sequence[State]) -> State:
        """Several states merged into one, in order."""
        total, name = states[0], self.values.names[running.fold.node]

        def assign(op: str, value: RightSide) -> Name:
            return self.builder.assign(name if running.monoid.primitive else op, value)

        for other in states[1:]:
            total = join(running.monoid, total, other, assign, running.exact)
        return total

    def leave(self, running: Running, ref: TileRef, total: State) -> None:
        """Assign the results of a reduction from its final state."""
        algebra = self._algebra(running, ref, {})
        hint = self.values.names[running.fold.node]
        self.values.results[running.fold.node] = tuple(
            x if isinstance(x, Name) else self.builder.assign(hint, _expr(x)) for x in running.monoid.finalize(algebra, *total)
        )

    def _tile_state(self, running: Running, entered: State, ref: TileRef, algebra: TileAlgebra) -> State:
        """What a tile merges into the running state: its elements where lanes are folded at the end, else one state of the tile."""
        if lanes := self._lane_shape(running, ref):
            entered = tuple(
                self.builder.assign("lanes", f"tl.reshape({x}, {list(lanes)})") if isinstance(x, str) else x for x in entered
            )
            running.by_lane[self.key(running, ref)] = lanes[2]
            return running.monoid.merge(self._within_threads(running), *entered)
        return entered if running.monoid.primitive else running.monoid.merge(algebra, *entered)

    def _fold_lanes(self, running: Running, key: Key, state: State, algebra: TileAlgebra) -> State:
        """Fold the per-lane states into one after the last tile."""
        if key in running.by_lane:
            state = tuple(self.builder.assign("lanes", f"tl.reshape({x}, [1, {running.by_lane[key]}])") for x in state)
        return running.monoid.merge(algebra, *state) if running.monoid.primitive or key in running.by_lane else state

    def _add_compensated(self, running: Running, before: State, entered: State, compensation: dict[int, str]) -> None:
        """Merge a state in place with compensated summation. An infinite sum has no compensation."""
        joined = growth(running.monoid, before, entered, self.builder.assign, running.exact)
        for k, (name, part) in enumerate(zip(before, joined, strict=True)):
            if not isinstance(part, Accumulated):
                self.builder.set(str(name), str(part))
                continue
            held, owed = name, compensation[k]
            if part.scale != 1:
                held, owed = (
                    self.builder.assign(hint, f"{x} * {part.scale}") for hint, x in (("held", name), ("owed", compensation[k]))
                )
            term = self.builder.assign("term", f"{part.by} - {owed}")
            raised = self.builder.assign("raised", f"{held} + {term}")
            of = self.language.prefix
            lost = f'{of}.where({of}.abs({raised}) < float("inf"), {raised} - {held} - {term}, 0.0)'
            self.builder.set(compensation[k], lost)
            self.builder.set(str(name), raised)

    def _compensated(self, state: State, compensation: dict[int, str]) -> State:
        return tuple(Sum(f"{x} - {compensation[k]}") if k in compensation else x for k, x in enumerate(state))

    # ---- parts ---------------------------------------------------------------------------------------------------------

    def _node(self, fold: Fold) -> Reduce:
        node = self.kernel.program.nodes[fold.node]
        assert isinstance(node, Reduce)
        return node

    def _hints(self, running: Running, tag: str) -> list[str]:
        """The names of a running state."""
        name, parts = self.values.names[running.fold.node], running.monoid.state
        return [f"{name}_{'acc' if running.monoid.primitive else part}{tag}" for part in parts]

    def fold_name(self, running: Running, suffix: str) -> Callable[[str], str]:
        """What a fold is called, by its kind: after the reduction, and its kind where a reduction has several folds."""
        name, primitive = self.values.names[running.fold.node], running.monoid.primitive
        return lambda kind: f"{name}{'' if primitive else '_' + kind}{suffix}"

    def _identity(self, running: Running, shape: str, tag: str) -> State:
        starts, dtypes = running.monoid.identity(running.dtype), running.monoid.state_dtypes(running.dtype)
        return tuple(
            self.builder.assign(hint, self.language.full(shape, literal(start), dtype.kernel))
            for hint, start, dtype in zip(self._hints(running, tag), starts, dtypes, strict=True)
        )

    def _entering_shape(self, running: Running, ref: TileRef) -> tuple[int, int]:
        """The shape of the operands of one tile."""
        if 1 in running.axes or running.across is Across.FULL:
            return ref.height, ref.width
        return ref.height, ref.width // self.values.memory.block_size if running.across is Across.BLOCK else 1

    def _running_shape(self, running: Running, ref: TileRef) -> tuple[int, ...]:
        """The shape of a running state: a whole tile where lanes are folded at the end, else one lane per result."""
        height, width = self._entering_shape(running, ref)
        if running.monoid.primitive:
            return height, width
        if lanes := self._lane_shape(running, ref):
            return 1, 1, lanes[2], 1
        return 1 if 0 in running.axes else height, 1 if 1 in running.axes else width

    def _lane_shape(self, running: Running, ref: TileRef) -> tuple[int, int, int, int] | None:
        """A tile's columns as [1, repeats, threads, vector elements], where each thread keeps its own state."""
        schedule = self.values.schedule
        if not schedule.private_states or not allows_private_states(running.monoid) or running.axes != (1,) or ref.height != 1:
            return None
        held, threads = private_state_columns(self.kernel, schedule), 32 * schedule.warps
        if ref.width != held * threads:
            return None
        side_by_side = access_vector(self.kernel, schedule)
        return 1, held // side_by_side, threads, side_by_side

    def _within_threads(self, running: Running) -> TileAlgebra:
        """An algebra that folds the elements each thread holds of a tile reshaped by threads."""
        return TileAlgebra(
            self.builder.assign,
            lambda kind, value: TileFold(kind, value, (3, 1)),
            lambda: "0",
            running.exact,
            self.fold_name(running, "_thread"),
        )

    def _broadcast(self, i: int, running: Running, ref: TileRef, env: Env) -> str:
        """A value broadcast along the reduced axes, and along the columns of the other operands."""
        if self.kernel.by_col[i] is Across.BLOCK and (1 in running.axes or running.across is Across.FULL):
            return self.values.memory.as_full(i, ref, env)
        lacks_rows = 0 in running.axes and ref.height > 1 and not self.kernel.by_row[i]
        lacks_cols = 1 in running.axes and self.kernel.by_col[i] is Across.NONE
        if lacks_rows or lacks_cols or isinstance(self.kernel.program.nodes[i], Const):
            height, width = self._entering_shape(running, ref)
            text = self.values.operand(i, self.values.memory.tensor(i, env[i]))
            return self.builder.assign("spread", self.language.broadcast(text, f"[{height}, {width}]"))
        return env[i]

    def _masked_to_identity(self, running: Running, entered: State, ref: TileRef, counted: dict[str, Value]) -> State:
        """Set masked-off lanes to the identity, because f(0) is not 0 in general. A constant counts for every lane of the tile.

        `counted` records constants that were masked: their sum is known without a fold.
        """
        masks = [m for of_side, axis in ((ref.row_mask, 0), (ref.col_mask, 1)) if axis in running.axes for m in of_side]
        if not masks:
            return entered
        inside = conjunction(masks)
        height, width = self._entering_shape(running, ref)
        whole = self.language.broadcast(inside, f"[{height}, {width}]")

        def masked(x: Value, identity: Value) -> str:
            lanes, kept = (inside, x) if isinstance(x, str) else (whole, literal(x))
            name = self.builder.assign("masked", f"{self.language.prefix}.where({lanes}, {kept}, {literal(identity)})")
            if not isinstance(x, str) and identity == 0:
                counted[name] = x
            return name

        return tuple(x if x == e else masked(x, e) for x, e in zip(entered, running.monoid.identity(running.dtype), strict=True))

    def _merged(self, running: Running, before: State, entered: State) -> tuple[RightSide, ...]:
        if running.monoid.primitive:
            return (Apply(COMBINE[running.monoid.primitive], (_expr(before[0]), _expr(entered[0])), running.dtype),)
        return tuple(map(_expr, join(running.monoid, before, entered, self.builder.assign, running.exact)))

    def _algebra(self, running: Running, ref: TileRef, counted: dict[str, Value], suffix: str = "") -> TileAlgebra:
        def folded(kind: str, value: Expr) -> RightSide:
            if kind == "sum" and value in counted:
                return f"{literal(counted[value])} * {self._lane_count(running, ref, masked=True)}"
            return TileFold(kind, value, running.axes)

        own = ref.tag if self.row_loop and not running.fold.cols else ""  # columns have results of their own
        name = self.fold_name(running, own + suffix)
        return TileAlgebra(self.builder.assign, folded, lambda: self._lane_count(running, ref, masked=False), running.exact, name)

    def _lane_count(self, running: Running, ref: TileRef, masked: bool) -> str:
        """The number of lanes folded into one: all lanes, or those inside the mask.

        The mask is never summed: Triton 3.6 recomputes it in the layout of the sum, in full in every thread.
        """
        height, width = self._entering_shape(running, ref)
        sizes = [(height, ref.row_count)] if 0 in running.axes else []
        sizes += [(width, ref.col_count)] if 1 in running.axes else []
        return " * ".join(count if masked and count else str(float(size)) for size, count in sizes)


def _expr(value: Value) -> Expr:
    """A component of a state as an expression."""
    return value if isinstance(value, str) else literal(value)
