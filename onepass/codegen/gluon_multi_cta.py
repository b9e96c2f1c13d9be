"""Rows that a group of several CTAs processes together, in mix-order kernels.

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

from ..ir.expr import I64
from ..ir.monoid import State
from ..ir.program import Buffer, Load
from ..ir.size import mul
from ..plan.schedule import MultiCtaMixOrder
from ..plan.staging.multi_cta import state_words
from .expr import literal
from .folds import Running
from .kernel_ir import CtaBarrier, Expr, If, Name, Poll, Publish, Received, Slot, Wait
from .kernel_ir import Load as GlobalLoad
from .memory import Env
from .names import SPLIT
from .rings import parity
from .row_copies import READY
from .row_walks import RowWalks
from .scope import Scope
from .staged_values import RowNames, StagedRows
from .tile_refs import Segment, TileRef

NEXT = "_next"  # suffix of the names of the row whose first walk runs one iteration early
NEXT_ROW = RowNames("row_index_next", "slot_next", "first_chunk_next")
LATER_ROW = RowNames("row_index_later")  # the row after the next, whose scalars are loaded


def mailboxes(scope: Scope) -> Buffer:
    """The mailboxes of a kernel."""
    count = mul(scope.rows, scope.schedule.ctas_per_row * state_words(scope.kernel))
    return Buffer(f"mailboxes of {scope.name}", I64, "temp", (count,), (1,))


class RowGroups:
    """Processes rows whose reductions several CTAs share."""

    def __init__(self, walks: RowWalks, staging: StagedRows) -> None:
        schedule = walks.scope.schedule
        assert walks.accumulation is not None and isinstance(schedule, MultiCtaMixOrder)
        self.walks, self.at, self.staging, self.accumulation = walks, walks.at, staging, walks.accumulation
        self.scope, self.builder, self.values, self.folds = walks.scope, walks.builder, walks.values, walks.folds
        self.words = state_words(self.scope.kernel)  # per CTA and row
        self.ctas, self.two_sums = schedule.ctas_per_row, schedule.folds_two_sums
        self.running: dict[int, Running] = {}  # reductions along rows
        uniform = [i for walk in walks.steps.walks for i in walk.uniform]
        self.scalars = [i for i in uniform if isinstance(self.scope.program.nodes[i], Load) and not self.scope.load_of(i).indexed]
        self.current: Env = {}  # names of the current row's scalars
        self.next: Env = {}

    def open(self, env: Env, tiles: list[Segment]) -> None:
        """Load the scalars of two rows, and do the first walk over the first."""
        self.current, self.next = self._prefetch_scalars(SPLIT), self._prefetch_scalars(f"{SPLIT} + {self.at.split}")
        self._first_walk(SPLIT, "iteration", {**env, **self.current}, tiles)

    def row(self, outside: Env, tiles: list[Segment]) -> None:
        """The first walk over the next row, and the last walk over this one, once the states of all its CTAs are there."""
        walks, (first, last), env = self.walks, self.walks.steps.walks, {**outside, **self.current}
        self.accumulation.zeros(range(1, 2), Name("row"))
        walks.ring.enter_row()
        at = walks.name_row("")
        walks.uniform(first, at, env)
        words = self._read_mailboxes()
        self._first_walk(f"row + {self.at.split}", "(iteration + 1)", {**outside, **self.next}, tiles)
        self.builder.add(Poll(tuple(name for name, _ in words), tuple(load for _, load in words)))
        later = self._prefetch_scalars(f"row + {2 * self.at.split}")
        self._read_out([name for name, _ in words], at)
        self.values.walk = 1
        walks.uniform(last, at, env)
        walks.walk(last, env, at, tiles, first=False, last=True)
        walks.ring.leave_row()
        for i in self.scalars:
            self.builder.set(self.current[i], self.next[i])
            self.builder.set(self.next[i], later[i])
        walks.ring.advance()

    def _prefetch_scalars(self, row: Expr) -> Env:
        """Load the scalars of a row, if the row exists.

        Loads at the start of an iteration would stall there, because the compiler moves uniform values to uniform registers before
        the branch. H200, LayerNorm backward 8192x32768: 421 us with the loads before the last walk, 450 us at the start.
        """
        env: Env = {}
        if self.scalars:
            self.builder.set("row_later", row)
            self.builder.set("row_index_later", "row_later.to(gl.int64)" if self.scope.wide else "row_later")
            self.staging.names = LATER_ROW
            for i in self.scalars:
                self.values.node(i, TileRef(row="row_index_later", row_mask=("row_later < row_count",)), env)
            self.staging.names = RowNames()
        return env

    def _first_walk(self, row: Expr, turn: Expr, outside: Env, tiles: list[Segment]) -> None:
        """Do the first walk over a row, if the row exists, and publish its partial states. No other value outlives the walk."""
        walk, env, put, slots = self.walks.steps.walks[0], dict(outside), self.builder.set, self.at.slots
        self.values.walk, self.staging.names = 0, NEXT_ROW
        with self.builder.block(If(f"{row} < row_count")):
            put("row_next", row)
            self.accumulation.zeros(range(1), Name("row_next"))
            put("slot_next", f"{turn} % {slots}")
            if self.at.cols.count > 1:
                put("first_chunk_next", f"slot_next * {self.at.cols.count}")
            at = self.walks.name_row(NEXT)
            self.walks.uniform(walk, at, env)
            self.builder.add(Wait(Slot(READY, "slot_next"), parity(turn, slots)))
            self.builder.add(CtaBarrier())  # without this barrier Triton inserts one per chunk
            self.walks.walk(walk, env, at, tiles, first=True, last=False, finish=self._publish)
        self.staging.names = RowNames()

    # ---- the exchange ---------------------------------------------------------------------------------------------------

    def _publish(self, running: dict[int, Running], ref: TileRef) -> None:
        """Publish the partial states after the first walk."""
        self.running = running
        states = [component for state in self.folds.totals(list(running.values()), ref, self.two_sums) for component in state]
        assert len(states) == self.words
        for k, component in enumerate(states):
            own = "cta_rank" if self.words == 1 else f"(cta_rank * {self.words} + {k})" if k else f"cta_rank * {self.words}"
            word = f"row_index_next * {self.ctas * self.words} + {own}"
            self.builder.add(Publish(self.scope.mailboxes, word, component if isinstance(component, str) else literal(component)))

    def _read_mailboxes(self) -> list[tuple[Name, GlobalLoad]]:
        """Read the current row's mailboxes once: names, and the load that each is assigned from."""
        count = self.ctas * self.words
        loads = [
            GlobalLoad(self.scope.mailboxes, (f"row_index * {count}", *([str(k)] if k else [])), volatile=True)
            for k in range(count)
        ]
        return [(self.builder.assign(f"word{k}", load), load) for k, load in enumerate(loads)]

    def _read_out(self, words: list[Name], at: TileRef) -> None:
        """Merge the partial states of all CTAs of the row and read out the results."""
        first = 0
        for state in self.running.values():
            parts: list[State] = []
            dtypes = state.monoid.state_dtypes(state.dtype)
            for p in range(self.ctas):
                here = words[p * self.words + first :]
                hint = f"{self.values.names[state.fold.node]}_cta{p}"
                parts.append(tuple(self.builder.assign(hint, Received(name, dtype)) for name, dtype in zip(here, dtypes)))
            self.folds.leave(state, at, self.folds.join_states(state, parts))
            first += len(dtypes)
