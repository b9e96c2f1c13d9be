"""Steps -> Gluon source, for mix-order kernels in which a group of several CTAs processes each row.

A CTA owns a part of the columns: of every row in its ring, and of the accumulators in its registers. The first walk over a row
gives partial states, which the CTAs of a group exchange through mailboxes in global memory. A mailbox is a 64-bit word per state,
row and CTA. It is 0 at launch and receives 32 bits of state and a flag in one store. Every CTA reads all mailboxes of the row, its
own included, and merges them in the same order, so all CTAs get identical bits. Loads are `volatile` so that the compiler does not
hoist them out of the polling loop. No fence is needed, because the word is all that is exchanged.

The exchange takes an L2 round trip, so rows overlap: in the iteration of a row a CTA reads the row's mailboxes, does the first walk
over the next row and publishes its states, and only then polls for missing words of the current row. So the ring holds two rows at
once, and a third is in flight where there is a slot for it. Per-row scalars are loaded one iteration before the row's first walk
and kept until the last walk.

A CTA waits only for CTAs of its own group, which have consecutive indices. GPUs start CTAs in the order of their indices, so the
CTAs that it waits for are running or start before any later group. Groups do not wait for each other. So the kernel finishes as
long as the GPU has room for one group, even next to other kernels. Co-residency of all groups matters only for speed.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import I64
from ..ir.monoid import State
from ..ir.program import Buffer, Load
from ..ir.size import Bindings, mul
from ..plan.kernel import Kernel
from ..plan.schedule import Schedule
from ..plan.staged_rows import state_words
from .folds import Running
from .gluon import REFILL, FillNames
from .gluon_mix_order import MixOrderEmitter
from .source import GridDim, Source
from .steps import Walk
from .tile_refs import TileRef
from .values import Env


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel with several CTAs per row. `wide` selects 64-bit element indices."""
    return _MultiCtaEmitter(kernel, schedule, bindings, name, wide).source()


NEXT = "_next"  # suffix of the names of the row whose first walk runs one iteration early


class _MultiCtaEmitter(MixOrderEmitter):
    own_names = ("cta_rank", "row_next", "r_next", "r_at_next", "slot_next", "place_next", "row_later", "r_later")

    def __init__(self, kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool) -> None:
        super().__init__(kernel, schedule, bindings, name, wide)
        self.state_words = state_words(kernel)  # per CTA and row
        self.running: dict[int, Running] = {}  # reductions along rows
        uniform = [i for walk in self.steps.walks for i in walk.uniform]
        self.scalar_loads = [i for i in uniform if isinstance(self.program.nodes[i], Load) and not self._load_of(i).indexed]
        self.scalar_names: Env = {}  # names of the current row's scalars
        self.next_scalar_names: Env = {}

    def _cleared(self) -> tuple[Buffer, ...]:
        count = mul(self.rows, self.schedule.ctas_per_row * state_words(self.kernel))
        return (Buffer(f"mailboxes of {self.name}", I64, "temp", (count,), (1,)),)

    def _grid(self) -> tuple[GridDim, ...]:
        return (GridDim(self.split * self.schedule.ctas_per_row),)

    def _name_cta(self) -> None:
        self.w.line(f"part = gl.program_id(0) // {self.schedule.ctas_per_row}")  # the group, which writes one partial result
        self.w.line(f"cta_rank = gl.program_id(0) % {self.schedule.ctas_per_row}")

    def _first_column(self) -> str:
        return f"cta_rank * {self.extent // self.schedule.ctas_per_row} + "

    def _coordinates(self, names: FillNames, taken: tuple[int, ...], along: str) -> str:
        before = f"cta_rank * {self.extent // self.schedule.ctas_per_row // taken[-1]}"
        return super()._coordinates(names, taken, before if along == "0" else f"{before} + {along}")

    # ---- rows ----------------------------------------------------------------------------------------------------------

    def _before_rows(self, env: Env) -> None:
        self.scalar_names, self.next_scalar_names = self._prefetch_scalars("part"), self._prefetch_scalars(f"part + {self.split}")
        self._first_walk("part", "turn", {**env, **self.scalar_names})

    def _prefetch_scalars(self, row: str) -> Env:
        """Load the scalars of a row, if the row exists.

        Loads at the start of an iteration would stall there, because the compiler moves uniform values to uniform registers before
        the branch. H200, LayerNorm backward 8192x32768: 421 us with the loads before the last walk, 450 us at the start.
        """
        env: Env = {}
        if self.scalar_loads:
            self.w.line(f"row_later = {row}")
            self.w.line("r_later = row_later.to(gl.int64)" if self.wide else "r_later = row_later")
            self.values.row = "r_later"
            for i in self.scalar_loads:
                self.values.node(i, TileRef(row="r_later", row_mask="(row_later < row_count)"), env)
            self.values.row = "r"
        return env

    def _first_walk(self, row: str, turn: str, outside: Env) -> None:
        """Do the first walk over a row, if the row exists, and publish its partial states. No other value outlives the walk."""
        w, values, walk, env = self.w, self.values, self.steps.walks[0], dict(outside)
        values.walk, values.row, values.slot, values.place = 0, "r_next", "slot_next", "place_next"
        with w.block(f"if {row} < row_count"):
            w.line(f"row_next = {row}")
            values.opaque_zeros("zero & (row_next + {})", range(1), self.steps.vectors_in_registers)
            w.line(f"slot_next = {turn} % {self.slots}")
            if self.cols.count > 1:
                w.line(f"place_next = slot_next * {self.cols.count}")
            at = self._name_row(NEXT)
            self._uniform(walk, at, env)
            w.line(f"mbarrier.wait(ready.index(slot_next), {turn} // {self.slots} & 1)")
            w.line("cta_barrier()")  # without this barrier Triton inserts one per chunk
            self._walk(walk, env, [replace(t, ref=t.ref.at_rows(at)) for t in self._tiles_of(walk)], waits=True, refills=False)
        values.row, values.slot, values.place = "r", "slot", "place"

    def _uniform(self, walk: Walk, at: TileRef, env: Env) -> None:
        """Emit the values that do not vary along a row, except those already loaded."""
        for i in walk.uniform:
            if i not in env:
                self.values.node(i, at, env)

    def _name_row(self, tag: str) -> TileRef:
        """Name the index of a row."""
        self.w.line(f"r{tag} = row{tag}.to(gl.int64)" if self.wide else f"r{tag} = row{tag}")
        self.w.line(f"r_at{tag} = r{tag} + gl.arange(0, 1, layout=gl.SliceLayout(1, TILE))[:, None]")
        return TileRef(row=f"r_at{tag}")

    def _row(self, outside: Env) -> None:
        w, (first, last), env = self.w, self.steps.walks, {**outside, **self.scalar_names}
        self.values.opaque_zeros("zero & (row + {})", range(1, 2), self.steps.vectors_in_registers)
        self._row_slot()
        at = self._name_row("")
        self._uniform(first, at, env)
        seen = self._read_mailboxes()
        self._first_walk(f"row + {self.split}", "(turn + 1)", {**outside, **self.next_scalar_names})
        self._wait_for_mailboxes(seen)
        later = self._prefetch_scalars(f"row + {2 * self.split}")
        self._read_out_parts(seen, at)
        self.values.walk = 1
        self._uniform(last, at, env)
        self._walk(last, env, [replace(t, ref=t.ref.at_rows(at)) for t in self._tiles_of(last)], waits=False, refills=False)
        self._release()
        self._fill(REFILL, f"row + {self.slots * self.split}")
        for i in self.scalar_loads:
            w.line(f"{self.scalar_names[i]} = {self.next_scalar_names[i]}")
            w.line(f"{self.next_scalar_names[i]} = {later[i]}")
        w.line("turn += 1")

    # ---- the exchange ---------------------------------------------------------------------------------------------------

    def _finish(self, running: dict[int, Running], ref: TileRef) -> None:
        """Publish the partial states after the first walk, or read out the reductions of a later walk."""
        if self.values.walk:
            super()._finish(running, ref)
            return
        self.running = running
        states = [component for state in self.folds.totals(list(running.values()), ref) for component in state]
        assert len(states) == self.state_words
        for k, component in enumerate(states):
            word = f"r_next * {self._words_per_row()} + (cta_rank * {self.state_words} + {k})"
            self.w.line(f"publish({self.mailboxes}, {word}, {component})")

    def _words_per_row(self) -> int:
        """Mailbox words of one row, of all its CTAs."""
        return self.schedule.ctas_per_row * self.state_words

    def _read_mailboxes(self) -> list[tuple[str, str]]:
        """Read the current row's mailboxes once: names, and the load that each is assigned from."""
        count = self._words_per_row()
        texts = [f"gl.load({self.mailboxes} + (r * {count} + {k}), volatile=True)" for k in range(count)]
        return [(self.values.assign(f"word{k}", text), text) for k, text in enumerate(texts)]

    def _wait_for_mailboxes(self, seen: list[tuple[str, str]]) -> None:
        """Poll the mailboxes until every word is there."""
        with self.w.block("while " + " | ".join(f"({name} == 0)" for name, _ in seen)):
            for name, text in seen:
                self.w.line(f"{name} = {text}")

    def _read_out_parts(self, seen: list[tuple[str, str]], at: TileRef) -> None:
        """Merge the partial states of all CTAs of the row and read out the results."""
        first = 0
        for state in self.running.values():
            parts: list[State] = []
            dtypes = state.monoid.state_dtypes(state.dtype)
            for p in range(self.schedule.ctas_per_row):
                here = seen[p * self.state_words + first:]
                parts.append(tuple(self.values.assign(f"part{p}", f"published({name}, gl.{dtype.kernel})")
                                   for (name, _), dtype in zip(here, dtypes)))
            self.folds.leave(state, at, self.folds.join_states(state, parts))
            first += len(dtypes)
