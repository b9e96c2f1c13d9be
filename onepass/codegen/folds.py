"""Reductions across tiles as lines of a kernel: where running states live, how a tile enters, how a result is read out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..ir.expr import F32, DType
from ..ir.monoid import MONOIDS, Accumulated, Monoid, State, Value
from ..ir.program import Const, Reduce
from ..plan.kernel import Across, Fold, Kernel
from ..plan.staged_rows import folds_two_sums
from ..plan.thread_layout import private_state_columns, vector
from .expr import COMBINE, TileAlgebra, growth, join, literal, op_text
from .tile_refs import TileRef
from .values import Env, Values, fold_text


@dataclass
class Running:
    """One reduction under way. Its states are kept by tile, by tile shape, or as one (see Folds.key)."""

    fold: Fold
    monoid: Monoid
    dtype: DType
    axes: tuple[int, ...]  # of a tile
    across: Across  # how what it folds varies along the columns
    compensated: bool  # what grows carries what rounding took from it
    exact: bool  # exponentials and quotients have all digits
    states: dict[str, State] = field(default_factory=dict)
    compensation: dict[str, dict[int, str]] = field(default_factory=dict)  # what rounding has taken, by component of each state
    by_lane: dict[str, int] = field(default_factory=dict)  # of the states that every thread has one of, how many there are


class Folds:
    """Writes reductions."""

    def __init__(self, kernel: Kernel, values: Values, row_loop: bool) -> None:
        self.kernel, self.values, self.row_loop, self.language = kernel, values, row_loop, values.language

    def running(self, fold: Fold) -> Running:
        """A reduction that nothing has entered yet."""
        node = self._node(fold)
        axes = ((1,) if fold.cols else ()) + ((0,) if fold.rows else ())
        dtype = self.kernel.program.dtypes[node.args[0]]
        monoid = MONOIDS[node.monoid]
        # What runs over fp32 data for long loses more than eager's tree does; over 16-bit data, less than a rounded result shows.
        compensated = self.kernel.is_full_precision[fold.node] and bool(monoid.accumulating) and dtype is F32
        exact = self.values.is_exact(fold.node)
        across = max((self.kernel.by_col[a] for a in node.args), key=lambda a: a.value)
        return Running(fold, monoid, dtype, axes, across, compensated, exact)

    def start(self, running: Running, refs: Iterable[TileRef]) -> None:
        """States that a loop carries must exist before it: the identity, for every kind of tile it meets."""
        for ref in refs:
            key = self.key(running, ref)
            if key not in running.states:
                shape = self._running_shape(running, ref)
                running.states[key] = self._identity(running, shape)
                if running.compensated:
                    running.compensation[key] = {k: self.values.assign("lost", self.language.full(shape, "0.0", "float32"))
                                         for k in running.monoid.accumulating}

    def key(self, running: Running, ref: TileRef) -> str:
        """Which of the running states a tile feeds: its own where results vary by tile, else one for all tiles of its shape."""
        if self.row_loop and running.fold.rows and not running.fold.cols:
            return "1" if running.across is Across.NONE else ref.tag
        by_lane = running.monoid.primitive or self._lane_shape(running, ref) is not None
        return self._running_shape(running, ref) if by_lane else ""

    def feed(self, running: Running, ref: TileRef, env: Env, unrolled: bool) -> None:
        """Let a tile enter: elementwise where one primitive fold is all a reduction is, else by one merge a tile.

        `once`: the line is written in straight code, so the new state may have a new name; a loop must reassign the old.
        """
        counted: dict[str, Value] = {}
        algebra = self._algebra(running, ref, counted)
        args = (self._broadcast(a, running, ref, env) for a in self._node(running.fold).args)
        entered = self._masked_to_identity(running, running.monoid.lift(algebra, *args), ref, counted)
        entered = self._tile_state(running, entered, ref, algebra)
        key = self.key(running, ref)
        before = running.states.get(key)
        if before is None:
            running.states[key] = tuple(x if isinstance(x, str) else literal(x) for x in entered)
            return
        if key in running.compensation:
            self._add_compensated(running, before, entered, running.compensation[key])
            return
        merged = self._merged_text(running, before, entered)
        if unrolled:
            named = zip(self._hints(running), merged, strict=True)
            running.states[key] = tuple(self.values.assign(hint, text) for hint, text in named)
        else:
            for name, text in zip(before, merged, strict=True):
                self.values.writer.line(f"{name} = {text}")

    def finish(self, running: Running, ref: TileRef) -> None:
        """Read a reduction out: fold what its lanes hold, join what its tiles hold."""
        self.leave(running, ref, self.total(running, ref))

    def total(self, running: Running, ref: TileRef) -> State:
        """One state of all that entered."""
        algebra = self._algebra(running, ref, {})
        held = [self._compensated(state, running.compensation.get(key, {})) for key, state in running.states.items()]
        states = [self._fold_lanes(running, key, state, algebra) for key, state in zip(running.states, held)]
        return self.join_states(running, states)

    def totals(self, running: Sequence[Running], ref: TileRef) -> list[State]:
        """The same of all that is reduced along a row; two sums are folded at once, so that threads meet half as often. H200,
        LayerNorm backward of 8192 x 32768, rows shared by two CTAs: 421 us without, 413 so."""
        if not folds_two_sums(self.kernel):
            return [self.total(state, ref) for state in running]
        held: list[Value] = []
        for state in running:
            ((key, lanes),) = state.states.items()
            held += self._compensated(lanes, state.compensation.get(key, {}))
        names = [self.values.writer.fresh("all_sum") for _ in held]
        self.values.writer.line(f"{', '.join(names)} = sum_two({', '.join(map(str, held))}, 1)")
        return [(name,) for name in names]

    def join_states(self, running: Running, states: Sequence[State]) -> State:
        """One state of several, joined in their order."""
        total = states[0]
        for other in states[1:]:
            total = join(running.monoid, total, other, self.values.assign, running.exact, self.language)
        return total

    def leave(self, running: Running, ref: TileRef, total: State) -> None:
        """What a reduction gives, out of its whole state."""
        algebra = self._algebra(running, ref, {})
        hint = self.values.names[running.fold.node]
        self.values.results[running.fold.node] = tuple(
            x if isinstance(x, str) and x.isidentifier() else self.values.assign(hint, x if isinstance(x, str) else literal(x))
            for x in running.monoid.finalize(algebra, *total))

    def _tile_state(self, running: Running, entered: State, ref: TileRef, algebra: TileAlgebra) -> State:
        """What a tile's elements add to a running state: themselves where lanes are folded last, else one state of them all."""
        if lanes := self._lane_shape(running, ref):
            entered = tuple(self.values.assign("lanes", f"tl.reshape({x}, {list(lanes)})") if isinstance(x, str) else x
                            for x in entered)
            running.by_lane[self.key(running, ref)] = lanes[2]
            return running.monoid.merge(self._within_threads(running), *entered)
        return entered if running.monoid.primitive else running.monoid.merge(algebra, *entered)

    def _fold_lanes(self, running: Running, key: str, state: State, algebra: TileAlgebra) -> State:
        """One state out of those that lanes hold at the end."""
        if key in running.by_lane:
            state = tuple(self.values.assign("lanes", f"tl.reshape({x}, [1, {running.by_lane[key]}])") for x in state)
        return running.monoid.merge(algebra, *state) if running.monoid.primitive or key in running.by_lane else state

    def _add_compensated(self, running: Running, before: State, entered: State, compensation: dict[int, str]) -> None:
        """Join a state with another in place, remembering what rounding takes; what is infinite has lost nothing."""
        line = self.values.writer.line
        joined = growth(running.monoid, before, entered, self.values.assign, running.exact, self.language)
        for k, (name, part) in enumerate(zip(before, joined, strict=True)):
            if not isinstance(part, Accumulated):
                line(f"{name} = {part}")
                continue
            held, owed = name, compensation[k]
            if part.scale != 1:
                held, owed = (self.values.assign(hint, f"{x} * {part.scale}")
                              for hint, x in (("held", name), ("owed", compensation[k])))
            term = self.values.assign("term", f"{part.by} - {owed}")
            raised = self.values.assign("raised", f"{held} + {term}")
            of = self.language.prefix
            line(f'{compensation[k]} = {of}.where({of}.abs({raised}) < float("inf"), ({raised} - {held}) - {term}, 0.0)')
            line(f"{name} = {raised}")

    def _compensated(self, state: State, compensation: dict[int, str]) -> State:
        return tuple(f"({x} - {compensation[k]})" if k in compensation else x for k, x in enumerate(state))

    # ---- parts ---------------------------------------------------------------------------------------------------------

    def _node(self, fold: Fold) -> Reduce:
        node = self.kernel.program.nodes[fold.node]
        assert isinstance(node, Reduce)
        return node

    def _hints(self, running: Running) -> list[str]:
        return [f"{self.values.names[running.fold.node]}_{part}" for part in running.monoid.state]

    def _identity(self, running: Running, shape: str) -> State:
        starts, dtypes = running.monoid.identity(running.dtype), running.monoid.state_dtypes(running.dtype)
        return tuple(self.values.assign(hint, self.language.full(shape, literal(start), dtype.kernel))
                     for hint, start, dtype in zip(self._hints(running), starts, dtypes, strict=True))

    def _entering_shape(self, running: Running, ref: TileRef) -> tuple[int, int]:
        """The shape of what enters from one tile."""
        if 1 in running.axes or running.across is Across.FULL:
            return ref.height, ref.width
        return ref.height, ref.width // self.values.block_size if running.across is Across.BLOCK else 1

    def _running_shape(self, running: Running, ref: TileRef) -> str:
        """The shape of a running state: a whole tile where lanes are folded last, else one lane per result."""
        height, width = self._entering_shape(running, ref)
        if running.monoid.primitive:
            return f"[{height}, {width}]"
        if lanes := self._lane_shape(running, ref):
            return f"[1, 1, {lanes[2]}, 1]"
        return f"[{1 if 0 in running.axes else height}, {1 if 1 in running.axes else width}]"

    def _lane_shape(self, running: Running, ref: TileRef) -> tuple[int, int, int, int] | None:
        """A tile's columns as [1, stretches, threads, elements side by side], where threads keep states of their own."""
        along_row = running.axes == (1,) and ref.height == 1
        held = private_state_columns(self.kernel, self.values.schedule, running.monoid) if along_row else None
        threads = 32 * self.values.schedule.warps
        if held is None or ref.width != held * threads:
            return None
        side_by_side = vector(self.kernel)
        return 1, held // side_by_side, threads, side_by_side

    def _within_threads(self, running: Running) -> TileAlgebra:
        """Folds what a thread holds of a tile that is shaped by threads."""
        def folded(kind: str, text: str) -> str:
            return fold_text(kind, fold_text(kind, text, 3), 1)

        return TileAlgebra(self.values.assign, folded, lambda: "0", running.exact)

    def _broadcast(self, i: int, running: Running, ref: TileRef, env: Env) -> str:
        """A value spread over the axes it is folded along, and over the columns of others that enter with it."""
        if self.kernel.by_col[i] is Across.BLOCK and (1 in running.axes or running.across is Across.FULL):
            return self.values.as_full(i, ref, env)
        lacks_rows = 0 in running.axes and ref.height > 1 and not self.kernel.by_row[i]
        lacks_cols = 1 in running.axes and self.kernel.by_col[i] is Across.NONE
        if lacks_rows or lacks_cols or isinstance(self.kernel.program.nodes[i], Const):
            height, width = self._entering_shape(running, ref)
            return self.values.assign("spread", self.language.broadcast(self.values.tensor(i, env[i]), f"[{height}, {width}]"))
        return env[i]

    def _masked_to_identity(self, running: Running, entered: State, ref: TileRef, counted: dict[str, Value]) -> State:
        """Lanes outside become the identity: f(0) is not 0 in general. A number counts for every lane of the tile.

        Numbers that were spread over the lanes inside are noted in `counted`, because their sum is known without a fold.
        """
        masks = [m for m, axis in ((ref.row_mask, 0), (ref.col_mask, 1)) if m and axis in running.axes]
        if not masks:
            return entered
        inside = " & ".join(masks)
        height, width = self._entering_shape(running, ref)
        whole = self.language.broadcast(inside, f"[{height}, {width}]")

        def masked(x: Value, identity: Value) -> str:
            lanes, kept = (inside, x) if isinstance(x, str) else (whole, literal(x))
            name = self.values.assign("inside", f"{self.language.prefix}.where({lanes}, {kept}, {literal(identity)})")
            if not isinstance(x, str) and identity == 0:
                counted[name] = x
            return name

        return tuple(x if x == e else masked(x, e) for x, e in zip(entered, running.monoid.identity(running.dtype), strict=True))

    def _merged_text(self, running: Running, before: State, entered: State) -> State:
        if running.monoid.primitive:
            return (op_text(COMBINE[running.monoid.primitive], (before[0], entered[0]), running.dtype, language=self.language),)
        return join(running.monoid, before, entered, self.values.assign, running.exact, self.language)

    def _algebra(self, running: Running, ref: TileRef, counted: dict[str, Value]) -> TileAlgebra:
        def folded(kind: str, text: str) -> str:
            if kind == "sum" and text in counted:
                return f"{literal(counted[text])} * {self._lane_count(running, ref, masked=True)}"
            for axis in running.axes:
                text = fold_text(kind, text, axis, self.language)
            return text

        return TileAlgebra(self.values.assign, folded, lambda: self._lane_count(running, ref, masked=False), running.exact,
                           self.language)

    def _lane_count(self, running: Running, ref: TileRef, masked: bool) -> str:
        """How many lanes of a tile are folded into one: of all, or of those inside.

        Never by folding a mask: Triton 3.6 computes such a mask anew in the layout of its sum, whole in every thread.
        """
        height, width = self._entering_shape(running, ref)
        sizes = [(height, ref.row_count)] if 0 in running.axes else []
        sizes += [(width, ref.col_count)] if 1 in running.axes else []
        return " * ".join(count if masked and count else str(float(size)) for size, count in sizes)
