"""Default choices: the fields of a schedule that the planner does not search, set as candidates are made.

`Choices` makes schedules of one kernel. Candidates give the sizes and where data waits; everything else that the kernel's text
depends on is decided here, or, with what is decided here, by the family that stages inputs (`staging/`). Every choice is a field of
the schedule, so other values can be tried too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir.monoid import MONOIDS
from ..ir.program import Reduce
from ..ir.size import Bindings
from .kernel import Kernel
from .l2_hints import Streams, streams
from .legality import Family
from .resources import PostReductionLoad, early_load_registers, tile_of
from .schedule import LoopedRows, MixOrder, ResidentRows, Schedule, SplitRows, WholeColumns
from .thread_layout import allows_private_states, max_contiguous, private_state_columns
from .traffic import Traffic

# Registers per thread for widened copies of resident values; beyond, values stay packed. Widening takes two or three instructions
# per value, and short rows with many inputs are bound by instructions, so a few values stay widened.
MAX_WIDENED_REGISTERS, MAX_WIDENED_REGISTERS_ROW_LOOP = 16, 32
# Registers per thread for loads issued before a reduction but used only after it. H200, norm of 65536x512 with four row vectors:
# a CTA that issues them after its reduction lives 0.8 us longer.
MAX_EARLY_REGISTERS = 16


@dataclass(frozen=True, slots=True)
class Choices:
    """The default choices for one kernel."""

    vector_limit: int
    resident: frozenset[int]
    widened: float  # registers per element of all resident loads, widened
    after_reduction: tuple[PostReductionLoad, ...]
    private_states: bool  # some reduction allows a state per thread
    streams: Streams

    # ---- choices -------------------------------------------------------------------------------------------------------

    def packs(self, elements: int, warps: int, row_loop: bool = False) -> bool:
        """Whether resident values of a tile of so many elements stay in their 16-bit storage type, widened in each walk."""
        return self.widened * elements > (MAX_WIDENED_REGISTERS_ROW_LOOP if row_loop else MAX_WIDENED_REGISTERS) * 32 * warps

    def early(self, height: int, tiles: Sequence[int], warps: int) -> frozenset[int]:
        """The loads used after a reduction that are issued with the first loads, so that they arrive with the row."""
        found, spent = [], 0.0
        for load in self.after_reduction:
            spent += early_load_registers(load, height, tiles, warps)
            if spent <= MAX_EARLY_REGISTERS:
                found.append(load.node)
        return frozenset(found)

    # ---- schedules -----------------------------------------------------------------------------------------------------

    def completed(self, kernel: Kernel, schedule: Schedule) -> Schedule:
        """A candidate that stages nothing, with everything that is not searched."""
        tile, warps = tile_of(schedule), schedule.warps
        elements = tile.resident_height * tile.resident_width
        few = schedule.sides in (Family.INNER, Family.POINTWISE)
        marked = self.streams.evict_last(elements, warps) if few else self.streams.evict_last_stores(elements)
        limited = replace(schedule, evict_last=marked, vector_limit=self.vector_limit)
        match limited:
            case ResidentRows(height, tiles):
                packs, early = self.packs(elements, warps), self.early(height, tiles, warps)
                return replace(limited, resident=self.resident, packed=packs, early_loads=early)
            case WholeColumns() | MixOrder():
                packs = self.packs(elements, warps, row_loop=isinstance(limited, MixOrder))
                return replace(limited, resident=self.resident, packed=packs)
            case LoopedRows() | SplitRows():
                # Merging a tile across threads takes two exchanges through shared memory. With its own state, a thread merges only
                # the few elements it holds, and threads exchange states once, at the end.
                return replace(limited, private_states=self.private_states and private_state_columns(kernel, limited) > 0)
            case _:
                return limited


def choices(kernel: Kernel, t: Traffic, bindings: Bindings) -> Choices:
    """The default choices for a kernel at some sizes."""
    program = kernel.program
    reduced = [node for f in kernel.folds if f.cols and isinstance(node := program.nodes[f.node], Reduce)]
    return Choices(
        vector_limit=max_contiguous(kernel) or 0,
        resident=frozenset(kernel.multi_phase),
        widened=t.resident_registers,
        after_reduction=t.after_reduction,
        private_states=any(allows_private_states(MONOIDS[node.monoid]) for node in reduced),
        streams=streams(kernel, bindings),
    )
