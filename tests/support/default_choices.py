"""Handwritten schedules, completed with the planner's default choices."""

from __future__ import annotations

from onepass.ir.size import Bindings
from onepass.plan.choices import choices
from onepass.plan.kernel import Kernel
from onepass.plan.schedule import (
    LoopedRows,
    MixOrder,
    MultiCtaMixOrder,
    Outer,
    Pointwise,
    ResidentRows,
    Schedule,
    SplitRows,
    StagedMixOrder,
    StagedRows,
    StagedTiles,
    WholeColumns,
)
from onepass.plan.traffic import traffic


def completed(kernel: Kernel, s: Schedule, bindings: Bindings) -> Schedule:
    """A schedule with the sizes and staging of another and the default choices of a candidate."""
    make = choices(kernel, traffic(kernel, bindings), bindings)
    match s:
        case ResidentRows():
            return make.resident_rows(s.height, s.tiles, s.warps, s.sector_elems)
        case LoopedRows():
            return make.looped_rows(s.height, s.step, s.warps, s.stages, s.sector_elems)
        case SplitRows():
            return make.split_rows(s.height, s.step, s.split, s.warps, s.stages)
        case WholeColumns():
            return make.whole_columns(s.tiles, s.width, s.warps)
        case Outer():
            return make.outer(s.step, s.width, s.warps, s.split, s.stages)
        case MixOrder():
            return make.mix_order(s.step, s.split, s.tiles, s.warps, s.stages, s.row_vectors)
        case StagedRows():
            return make.staged_rows(s.tiles, s.warps, s.ring, s.unaligned, s.staged, s.registers)
        case StagedMixOrder():
            return make.staged_mix_order(s.tiles, s.warps, s.ring, s.row_vectors, s.staged, s.registers)
        case MultiCtaMixOrder():
            return make.multi_cta_mix_order(
                s.tiles, s.ctas_per_row, s.groups, s.warps, s.stages, s.row_vectors, s.staged, s.registers
            )
        case StagedTiles():
            return make.staged_tiles(s.step, s.width, s.warps, s.stages, s.split, s.staged, s.registers)
        case Pointwise():
            return make.pointwise(s.height, s.width, s.warps)
