"""Scoring: predict the time of every schedule of one kernel and pick the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..constants import SHIPPED
from ..device import Device
from ..ir.program import Program
from ..ir.simplify import online_softmax, two_pass
from ..ir.size import Bindings
from .candidates import schedules
from .cost.model import cost, join_us
from .estimate import estimate
from .kernel import Kernel, Space
from .legality import Family, Illegal, Reason, families, space_of
from .plan import REGISTERS_UNBOUNDED, CompileFeedback, KernelPlan
from .resources import demand
from .schedule import Cover, Loop, Schedule
from .traffic import traffic


@dataclass(frozen=True, slots=True)
class Scored:
    """The best way to run one kernel, and its time including the join of partial results."""

    plan: KernelPlan
    us: float


def score(
    program: Program, bindings: Bindings, device: Device, feedback: CompileFeedback, spilling: bool = False
) -> Scored | Illegal:
    """The best schedule of one kernel. With `spilling`, falls back to the one that spilled least if none is left."""
    found = scores(program, bindings, device, feedback)
    if isinstance(found, Illegal):
        return found
    fresh = [s for s in found if (known := feedback.get(s.plan.scored_as)) is None or known.ctas_per_sm] if feedback else found
    if fresh:
        return choose(fresh)
    if found and spilling:
        return min(found, key=lambda s: (feedback[s.plan.scored_as].spilled or (True, 0), s.us))
    return Illegal(Reason.NO_SCHEDULE, f"{program.name} does not fit the registers and shared memory of one SM of {device.name}")


def choose(found: Sequence[Scored]) -> Scored:
    """The best of several schedules. Those within the accuracy of the model count as equal."""
    slowest_tie = min(s.us for s in found) * SHIPPED.cost.tie
    return min(
        (s for s in found if s.us <= slowest_tie),
        key=lambda s: (
            _stages_rows(s.plan),
            s.plan.schedule.ctas_per_row,
            _reloads_row_vectors(s.plan),
            _reads_again(s.plan),
            _register_weight(s.plan),
            s.us,
        ),
    )


def scores(program: Program, bindings: Bindings, device: Device, feedback: CompileFeedback) -> list[Scored] | Illegal:
    """Every schedule of one kernel worth scoring, with its time."""
    written = forms_of(program, bindings)
    if isinstance(written, Illegal):
        return written
    return [scored for family, form in written for scored in scored_forms(form, family, bindings, device, feedback)]


def _stages_rows(chosen: KernelPlan) -> bool:
    """Whether a schedule stages rows in shared memory. Ties prefer registers, and then fewer CTAs per row."""
    return bool(chosen.schedule.staged) and isinstance(chosen.schedule.cols, Cover)


def _reloads_row_vectors(chosen: KernelPlan) -> bool:
    """Whether a loop over staged rows that accumulates columns reloads row vectors every row. Ties prefer keeping them.

    H200, RMSNorm backward 4096x49152, four CTAs per row, predicted 0.2 % apart: 363 us with reloads, 322 us with row vectors
    in shared memory.
    """
    one = chosen.schedule
    return one.accumulates_columns and one.reloads_vectors


def _reads_again(chosen: KernelPlan) -> bool:
    """Whether a schedule reads full-size data more than once, from further away than L1: a walk of a single step finds it there.
    Ties prefer data that stays on chip, because how much of a second read hits L2 is what the model knows least.

    H200, softmax 16x65536, predicted 0.2 % apart: 7.3 us with rows in registers, 8.6 us by the best walk that reads them twice.
    """
    one, kernel = chosen.schedule, chosen.kernel
    if one.resident | one.staged >= set(kernel.multi_phase):
        return False
    cols = kernel.program.extent(kernel.space.cols)
    return not (isinstance(one.cols, Loop) and isinstance(cols, int) and cols <= one.cols.step)


def _register_weight(chosen: KernelPlan) -> int:
    """Tie-breaker: registers per thread; for a loop over rows, registers of all CTAs, because few warps reduce faster.

    For staged rows: the register cap times warps, because a lower cap makes it certain that more CTAs fit. Staged tiles are
    not weighed, because small tiles always need fewer registers. H200, sums of fp32 4096x65536: tiles of 8x64 within 64
    registers 248 us; tiles of 32x128, predicted 1 % better, 239 us.
    """
    if _stages_rows(chosen):
        return chosen.schedule.registers * chosen.schedule.warps
    if chosen.schedule.staged:
        return 0
    everywhere = chosen.schedule.warps * chosen.schedule.splits if chosen.schedule.sides is Family.MIX else 1
    return chosen.resources.registers * everywhere


@dataclass(frozen=True, slots=True)
class Form:
    """A kernel with its reductions written for one way to run it: the reduced side held on chip, or walked."""

    kernel: Kernel
    held: bool


def forms(program: Program, space: Space, family: Family) -> tuple[Form, ...]:
    """The ways to write a kernel. Held data is reduced in plain passes; walked data is merged tile by tile."""
    rows, cols = frozenset(space.rows), frozenset(space.cols)
    blocks = two_pass(program, frozenset(space.block)) if space.block else program
    walked = Form(Kernel(online_softmax(blocks), space), held=False)
    match family:
        case Family.POINTWISE:
            return (Form(Kernel(blocks, space), held=True),)
        case Family.INNER:
            return Form(Kernel(two_pass(blocks, cols), space), held=True), walked
        case Family.OUTER:
            return Form(Kernel(two_pass(blocks, rows), space), held=True), walked
        case Family.MIX:
            return (Form(Kernel(two_pass(online_softmax(blocks), cols), space), held=True),)


def forms_of(program: Program, bindings: Bindings) -> list[tuple[Family, Form]] | Illegal:
    """The ways to write a Program as one kernel, by the families that can run it."""
    space = space_of(program, bindings)
    if isinstance(space, Illegal):
        return space
    kinds = families(Kernel(program, space), Kernel(online_softmax(program), space))
    return kinds if isinstance(kinds, Illegal) else [(family, form) for family in kinds for form in forms(program, space, family)]


def scored_forms(form: Form, family: Family, bindings: Bindings, device: Device, feedback: CompileFeedback) -> list[Scored]:
    """Every candidate of a form that fits, with its time. Candidates known to spill stay if they can run at all."""
    kernel = form.kernel
    t, need = traffic(kernel, bindings), demand(kernel)
    found = []
    known_outcomes = {schedule: known for (of, schedule), known in feedback.items() if of == kernel.program}
    too_heavy: dict[str, int] = {}  # per family, because estimates of different families are not comparable
    for schedule, outcome in known_outcomes.items():
        too_heavy[schedule.family] = min(outcome.registers, too_heavy.get(schedule.family, REGISTERS_UNBOUNDED))
    for schedule in schedules(kernel, family, form.held, need, t, bindings, device):
        resources, known = estimate(need, schedule, device), known_outcomes.get(schedule)
        if known and known.ctas_per_sm:
            resources = replace(resources, ctas_per_sm=known.ctas_per_sm)
        elif known.spilled is None if known else resources.registers >= too_heavy.get(schedule.family, REGISTERS_UNBOUNDED):
            continue
        if resources.ctas_per_sm < 1 or not fits_one_wave(schedule, resources.ctas_per_sm, device):
            continue
        one = cost(kernel, schedule, resources, t, device)
        chosen = KernelPlan(kernel.program.name, kernel, schedule, resources, one, (kernel.program, schedule))
        found.append(Scored(chosen, one.us + join_us(schedule, t, device)))
    return found


def fits_one_wave(schedule: Schedule, ctas_per_sm: int, device: Device) -> bool:
    """Whether all CTAs of a loop over whole rows are resident at once. They must be, because rows are assigned statically."""
    if not (isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Cover)):
        return True
    return schedule.rows.split * schedule.ctas_per_row <= ctas_per_sm * device.sms
