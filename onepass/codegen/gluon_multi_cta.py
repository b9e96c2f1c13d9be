"""Steps -> Gluon source, for kernels that park rows and gather over them, where several CTAs take every row together.

A CTA has a part of the columns: of every row in its ring, of the gathered states in its registers. What the first walk over a row
reduces is then a state of a part. CTAs that share rows exchange those through global memory: each has a word for every state of
every row, in memory that is 0 at the launch, and puts 32 bits of state and a flag into it by one store. All read the words of all,
their own too, and join them in one order, so that they come to the same bits. `volatile` keeps the compiler from reading once for
ever; no fence is needed, for a word is all that is exchanged.

Words take their time through L2, and so rows overlap: in a row's turn a CTA looks at the row's words, walks over the next row for
the first time and publishes what it reduced there, and only then waits for what is still missing of the row itself. So two rows are
in the ring at once, and a third is on its way where there is a place for it. What is read once a row comes from L2 too, or from
DRAM: it is asked for a turn before the row's first walk, and handed on until the last.

A CTA waits only for those of its own group, which have neighbouring numbers. Cards start CTAs in the order of their numbers: whom a
CTA waits for is running, or is started before any later group. Groups wait for no other group. So there is an end as long as a card
has room for one group, also beside other kernels; that all groups are there at once only makes it fast.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import I64
from ..ir.monoid import State
from ..ir.program import Buffer, Load
from ..ir.size import Bindings, mul
from ..plan.kernel import Kernel
from ..plan.schedule import Schedule
from ..plan.staged_rows import must_stage, state_words
from .folds import Running
from .gluon import REFILL, FillNames
from .gluon_mix_order import MixOrderEmitter
from .source import GridDim, Source
from .steps import Walk
from .tile_refs import TileRef
from .values import Env


def emit(kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool = False) -> Source:
    """The source of one kernel whose rows several CTAs share; `wide` makes it count elements in 64 bits."""
    assert schedule.accumulates_columns and must_stage(kernel) <= schedule.staged and schedule.ctas_per_row > 1
    return _MultiCtaEmitter(kernel, schedule, bindings, name, wide).source()


NEXT = "_next"  # marks names of the row that is walked before its turn


class _MultiCtaEmitter(MixOrderEmitter):
    own_names = ("cta_rank", "row_next", "r_next", "r_at_next", "slot_next", "place_next", "row_later", "r_later")

    def __init__(self, kernel: Kernel, schedule: Schedule, bindings: Bindings, name: str, wide: bool) -> None:
        super().__init__(kernel, schedule, bindings, name, wide)
        assert self.slots > 1, "two rows are there at once"
        assert not self.cols.rest and self.extent == schedule.ctas_per_row * self.cols.width * self.cols.count
        assert len(self.steps.walks) == 2 and not self.steps.row_folds and not self.steps.trailing
        self.state_words = state_words(kernel)  # of one CTA, for one row
        self.running: dict[int, Running] = {}  # what is reduced along rows
        uniform = [i for walk in self.steps.walks for i in walk.uniform]
        self.scalar_loads = [i for i in uniform if isinstance(self.program.nodes[i], Load) and not self._load_of(i).indexed]
        self.scalar_names: Env = {}  # what those are called of this turn's row
        self.next_scalar_names: Env = {}  # and of the row that is walked before its turn

    def _cleared(self) -> tuple[Buffer, ...]:
        count = mul(self.rows, self.schedule.ctas_per_row * state_words(self.kernel))
        return (Buffer(f"mailboxes of {self.name}", I64, "temp", (count,), (1,)),)

    def _grid(self) -> tuple[GridDim, ...]:
        return (GridDim(self.split * self.schedule.ctas_per_row),)

    def _name_cta(self) -> None:
        self.w.line(f"part = gl.program_id(0) // {self.schedule.ctas_per_row}")  # a group is what leaves one partial result
        self.w.line(f"cta_rank = gl.program_id(0) % {self.schedule.ctas_per_row}")

    def _first_column(self) -> str:
        return f"cta_rank * {self.extent // self.schedule.ctas_per_row} + "

    def _coordinates(self, names: FillNames, taken: tuple[int, ...], along: str) -> str:
        assert len(taken) == 3
        before = f"cta_rank * {self.extent // self.schedule.ctas_per_row // taken[-1]}"
        return super()._coordinates(names, taken, before if along == "0" else f"{before} + {along}")

    # ---- rows ----------------------------------------------------------------------------------------------------------

    def _before_rows(self, env: Env) -> None:
        self.scalar_names, self.next_scalar_names = self._prefetch_scalars("part"), self._prefetch_scalars(f"part + {self.split}")
        self._first_walk("part", "turn", {**env, **self.scalar_names})

    def _prefetch_scalars(self, row: str) -> Env:
        """Ask for what is read once a row, if there is such a row.

        Asked for at the beginning of a turn it would be waited for there, since the compiler moves what all threads have in common
        to registers of another kind before it branches. H200, LayerNorm backward of 8192 x 32768: 450 us so, 421 where it is asked
        for before the last walk.
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
        """Walk over a row before its turn, if there is such a row, and publish what it gives. Nothing else is left of it."""
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
            w.line("cta_barrier()")  # told of none here, the compiler puts one into the loop over chunks
            self._walk(walk, env, [replace(t, ref=t.ref.at_rows(at)) for t in self._tiles_of(walk)], waits=True, refills=False)
        values.row, values.slot, values.place = "r", "slot", "place"

    def _uniform(self, walk: Walk, at: TileRef, env: Env) -> None:
        """What does not vary along a row, but for what has been read."""
        for i in walk.uniform:
            if i not in env:
                self.values.node(i, at, env)

    def _name_row(self, tag: str) -> TileRef:
        """Name where a row is, for what follows of it."""
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

    # ---- what is exchanged ---------------------------------------------------------------------------------------------

    def _finish(self, running: dict[int, Running], ref: TileRef) -> None:
        """After the first walk: publish what this part of the row gives."""
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
        """Words of a row."""
        return self.schedule.ctas_per_row * self.state_words

    def _read_mailboxes(self) -> list[tuple[str, str]]:
        """Read the words of this turn's row, which may be there by now: names, and the text that reads each."""
        count = self._words_per_row()
        texts = [f"gl.load({self.mailboxes} + (r * {count} + {k}), volatile=True)" for k in range(count)]
        return [(self.values.assign(f"word{k}", text), text) for k, text in enumerate(texts)]

    def _wait_for_mailboxes(self, seen: list[tuple[str, str]]) -> None:
        """Read them again until none is missing."""
        with self.w.block("while " + " | ".join(f"({name} == 0)" for name, _ in seen)):
            for name, text in seen:
                self.w.line(f"{name} = {text}")

    def _read_out_parts(self, seen: list[tuple[str, str]], at: TileRef) -> None:
        """Read out what all parts of the row give together."""
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
