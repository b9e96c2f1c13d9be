"""Program -> Plan: which results share a kernel, by predicted time alone.

Every reduction and every store starts as a kernel of its own. The pair whose merge gains most is merged, until no merge
gains. There are no caps on reads, no ratios of rows to columns, and splitting a reduction is just another schedule that
competes. Every merge that was looked at and not made is kept as a Refusal with both costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ..device import Device
from ..errors import NoPlan
from ..ir.program import Load, Program, Reduce, Result, Store, operands
from ..ir.simplify import online_softmax, two_pass
from ..ir.size import Bindings
from .candidates import schedules
from .cost import Traffic, cost, join_cost, last_block_cost, lower_bound, traffic
from .kernel import Kernel, memory_order
from .legality import Family, Illegal, Reason, Refusal, families, space_of
from .plan import KernelPlan, Lessons, Plan
from .resources import estimate
from .schedule import Cover, Loop, Schedule
from .split import Cut, halves

GAIN = 0.98  # a merge must be predicted to save this much, or the model's error decides
NEAR = 1.01  # schedules this close to the best are equals, and of equals the one with the fewest registers is taken
OTHERS = 12  # schedules kept in reserve for a kernel that the compiler spills


@dataclass(frozen=True, slots=True)
class Scored:
    """The best way to run one kernel, with what its partial results cost to join."""

    plan: KernelPlan
    us: float


def plan(program: Program, bindings: Bindings, device: Device, lessons: Lessons = MappingProxyType({})) -> Plan:
    """Decide everything about a Program on a device, for one set of sizes, heeding what compiling earlier plans showed."""
    search = _Search(program, bindings, device, lessons)
    groups = search.run()
    kernels = [k for group in groups for k in search.kernels(group)]
    return Plan(program, device, bindings, _named(kernels, program.name), tuple(search.refusals))


def _named(kernels: list[KernelPlan], stem: str) -> tuple[KernelPlan, ...]:
    """Name each kernel after what it computes and how."""
    found = []
    for k, kernel in enumerate(kernels):
        kind = "join" if kernel.program.name.endswith("_join") else kernel.family.replace("-", "_").replace(" ", "_")
        name = f"{stem}_{kind}" if len(kernels) == 1 else f"{stem}_{k}_{kind}"
        found.append(replace(kernel, name=name, others=tuple(replace(o, name=name) for o in kernel.others)))
    return tuple(found)


def score(program: Program, bindings: Bindings, device: Device, lessons: Lessons) -> Scored | Illegal:
    """The best schedule of one kernel."""
    space = space_of(program, bindings)
    if isinstance(space, Illegal):
        return space
    kernel = Kernel(program, space)
    kinds = families(kernel, bindings)
    if isinstance(kinds, Illegal):
        return kinds
    found: list[Scored] = []
    for family in kinds:
        found.extend(_scored(kernel, family, bindings, device, lessons))
    if not found:
        return Illegal(Reason.NO_SCHEDULE, f"{kernel.program.name} holds too much for one SM of {device.name}")
    near = min(s.us for s in found) * NEAR
    found.sort(key=lambda s: (s.us > near, s.plan.resources.registers if s.us <= near else s.us, s.us, str(s.plan.schedule)))
    best = found[0]
    return Scored(replace(best.plan, others=tuple(s.plan for s in found[1 : OTHERS + 1])), best.us)


def _scored(kernel: Kernel, family: Family, bindings: Bindings, device: Device, lessons: Lessons) -> list[Scored]:
    """Every candidate of a family that fits, with its time."""
    forms = {True: _form(kernel, family, True, bindings), False: _form(kernel, family, False, bindings)}
    counted = {held: traffic(form, bindings) for held, form in forms.items()}
    found = []
    for schedule in schedules(forms[True], family, counted[True], bindings, device):
        held = isinstance(schedule.cols, Cover) or isinstance(schedule.rows, Cover)
        form, t = forms[held], counted[held]
        learned = lessons.get((form.program, schedule)) if lessons else None
        resources = estimate(form, schedule, device, learned.registers if learned else None)
        if learned and learned.spills:
            continue
        if resources.ctas_per_sm < 1 or not _resident_grid_fits(schedule, resources.ctas_per_sm, device):
            continue
        one = cost(form, schedule, resources, t, device)
        found.append(Scored(KernelPlan(form.program.name, form, schedule, resources, one, form.program), one.us + _join(schedule, t, device)))
    return found


def _resident_grid_fits(schedule: Schedule, ctas_per_sm: int, device: Device) -> bool:
    """A loop over rows wants all its CTAs on the card at once."""
    looped = isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Cover)
    return not looped or schedule.splits <= ctas_per_sm * device.sms


def _form(kernel: Kernel, family: Family, held: bool, bindings: Bindings) -> Kernel:
    """The same kernel with its reductions written for rows kept on chip (two plain passes) or walked (one merge a tile)."""
    program = kernel.program
    if not held:
        program = online_softmax(program)
    else:
        side = kernel.space.rows if family is Family.OUTER else kernel.space.cols
        program = two_pass(program, frozenset(side))
        if kernel.space.block:
            program = two_pass(program, frozenset(kernel.space.block))
    return Kernel(program, kernel.space)


def _join(schedule: Schedule, t: Traffic, device: Device) -> float:
    if schedule.splits <= 1:
        return 0.0
    length = t.cols * t.batch if isinstance(schedule.rows, Loop) else t.rows * t.batch
    return join_cost(max(t.outer_states, 1), schedule.splits, length, device)


@dataclass
class _Search:
    program: Program
    bindings: Bindings
    device: Device
    lessons: Lessons
    refusals: list[Refusal] = field(default_factory=list)
    _memo: dict[frozenset[int], Scored | Illegal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = memory_order(self.program, self.bindings)
        self.cut = Cut(self.program, tuple(sorted(order, key=order.__getitem__)))
        self.needs = _reductions_needed(self.program)

    def scored(self, group: frozenset[int]) -> Scored | Illegal:
        if group not in self._memo:
            self._memo[group] = score(self.cut.extract(group, self._name(group)), self.bindings, self.device, self.lessons)
        return self._memo[group]

    def _name(self, group: frozenset[int]) -> str:
        return f"{self.program.name}_{min(group)}"

    def run(self) -> list[frozenset[int]]:
        """The groups, in an order they can run in."""
        whole = frozenset(self.program.of(Reduce, Store))
        together = self.scored(whole)
        if isinstance(together, Scored):
            bound = lower_bound(traffic(together.plan.kernel, self.bindings), self.device)
            if together.us <= 1.03 * bound or len(whole) == 1:
                return self._accepted([whole])
        groups = self._agglomerate(self._seeds())
        apart = self._total(groups)
        if isinstance(together, Scored) and together.us < apart:
            return self._accepted([whole])
        if isinstance(together, Scored) and len(groups) > 1:
            self._refuse(Reason.SLOWER, groups[0], whole, together.us, apart, "everything in one kernel")
        elif isinstance(together, Illegal) and len(groups) > 1 and not self.refusals:
            self.refusals.append(Refusal(together.reason, (self._label(groups[0]), self._label(groups[-1])), together.detail,
                                         None, apart))
        return self._accepted(self._ordered(groups))

    def _total(self, groups: list[frozenset[int]]) -> float:
        total = self.device.launch * (len(groups) - 1)
        for group in groups:
            found = self.scored(group)
            if isinstance(found, Illegal):
                raise NoPlan(what=self._label(group), device=self.device.name, detail=found.detail)
            total += found.us
        return total

    def _seeds(self) -> list[frozenset[int]]:
        """One kernel a reduction; a store of something no larger than a reduction's result goes with its reduction."""
        groups = {i: {i} for i in self.program.of(Reduce)}
        seeds = []
        for i in self.program.of(Store):
            node = self.program.nodes[i]
            assert isinstance(node, Store)
            owners = sorted(self.needs[i])
            if owners and self.program.dims[i] <= self.program.dims[owners[-1]]:
                groups[owners[-1]].add(i)
            else:
                seeds.append(frozenset({i}))
        return [*(frozenset(g) for g in groups.values()), *seeds]

    def _agglomerate(self, groups: list[frozenset[int]]) -> list[frozenset[int]]:
        """Merge the best pair until none gains."""
        refused: dict[frozenset[int], Refusal] = {}
        while True:
            best: tuple[float, frozenset[int], frozenset[int]] | None = None
            for a, b in self._pairs(groups):
                gain = self._gain(a, b, groups, refused)
                if gain is not None and (best is None or gain > best[0]):
                    best = (gain, a, b)
            if best is None:
                self.refusals.extend(refused.values())
                return groups
            _, a, b = best
            groups = [g for g in groups if g not in (a, b)] + [a | b]
            refused = {k: r for k, r in refused.items() if not (k & (a | b))}

    def _pairs(self, groups: list[frozenset[int]]) -> list[tuple[frozenset[int], frozenset[int]]]:
        """Pairs that have something to share: a large input, or one's result is the other's operand."""
        reads = {g: self._reads(g) for g in groups}
        return [(a, b) for k, a in enumerate(groups) for b in groups[k + 1 :]
                if reads[a] & reads[b] or self._feeds(a, b) or self._feeds(b, a)]

    def _reads(self, group: frozenset[int]) -> frozenset[str]:
        seen: set[int] = set()
        todo, found = list(group), set()
        while todo:
            i = todo.pop()
            if i in seen:
                continue
            seen.add(i)
            node = self.program.nodes[i]
            if isinstance(node, Load):
                found.add(node.buffer)
            if not (isinstance(node, Result) and node.reduce not in group):
                todo.extend(operands(node))
        return frozenset(found)

    def _feeds(self, a: frozenset[int], b: frozenset[int]) -> bool:
        return any(self.needs[i] & a for i in b)

    def _gain(self, a: frozenset[int], b: frozenset[int], groups: list[frozenset[int]], refused: dict[frozenset[int], Refusal]) -> float | None:
        """What merging two kernels saves, or None; a refusal is noted."""
        one, two = self.scored(a), self.scored(b)
        if isinstance(one, Illegal) or isinstance(two, Illegal):
            return None
        apart = one.us + two.us + self.device.launch
        if self._between(a, b, groups):
            refused[a | b] = self._refusal(Reason.CYCLE, a, b, None, apart, "a third kernel depends on one and feeds the other")
            return None
        merged = self.scored(a | b)
        if isinstance(merged, Illegal):
            refused[a | b] = self._refusal(merged.reason, a, b, None, apart, merged.detail)
            return None
        if merged.us >= apart * GAIN:
            detail = f"{merged.plan.schedule}; {merged.plan.resources.registers} registers, limited by {merged.plan.cost.limit}"
            refused[a | b] = self._refusal(Reason.SLOWER, a, b, merged.us, apart, detail)
            return None
        return apart - merged.us

    def _between(self, a: frozenset[int], b: frozenset[int], groups: list[frozenset[int]]) -> bool:
        """Would merging a and b make a cycle with a third kernel?"""
        merged = a | b
        reach, todo = set(), [g for g in groups if g not in (a, b) and self._feeds(merged, g)]
        while todo:
            g = todo.pop()
            if g in reach:
                continue
            reach.add(g)
            if self._feeds(g, merged):
                return True
            todo.extend(h for h in groups if h not in (a, b) and self._feeds(g, h))
        return False

    def _ordered(self, groups: list[frozenset[int]]) -> list[frozenset[int]]:
        done: list[frozenset[int]] = []
        left = sorted(groups, key=min)
        while left:
            ready = next(g for g in left if not any(self._feeds(h, g) for h in left if h is not g))
            done.append(ready)
            left.remove(ready)
        return done

    def _label(self, group: frozenset[int]) -> str:
        """What a kernel computes, in few words."""
        names = []
        for i in sorted(group):
            node = self.program.nodes[i]
            names.append(f"{node.monoid} over {' '.join(node.axes)}" if isinstance(node, Reduce) else node.buffer)  # type: ignore[union-attr]
        return ", ".join(dict.fromkeys(names))

    def _refusal(self, reason: Reason, a: frozenset[int], b: frozenset[int], fused: float | None, apart: float, detail: str) -> Refusal:
        return Refusal(reason, (self._label(a), self._label(b)), detail, fused, apart)

    def _refuse(self, reason: Reason, a: frozenset[int], b: frozenset[int], fused: float | None, apart: float, detail: str) -> None:
        self.refusals.append(self._refusal(reason, a, b, fused, apart, detail))

    def _accepted(self, groups: list[frozenset[int]]) -> list[frozenset[int]]:
        for group in groups:
            found = self.scored(group)
            if isinstance(found, Illegal):
                raise NoPlan(what=self._label(group), device=self.device.name, detail=found.detail)
            self._note_join(found, group)
        return groups

    def _note_join(self, found: Scored, group: frozenset[int]) -> None:
        """Joining partial results in the last block instead of a second kernel is a merge too, and is refused by cost."""
        schedule = found.plan.schedule
        if schedule.splits <= 1:
            return
        t = traffic(found.plan.kernel, self.bindings)
        length = t.cols * t.batch if isinstance(schedule.rows, Loop) else t.rows * t.batch
        states = max(t.outer_states, 1)
        apart = found.us
        fused = found.plan.cost.us + last_block_cost(states, schedule.splits, length, self.device)
        if fused >= apart:
            detail = f"the last CTA would read {schedule.splits} partial rows of {length} by itself"
            self.refusals.append(Refusal(Reason.SLOWER, (self._label(group), "the sum of its partial results"), detail, fused, apart))

    def kernels(self, group: frozenset[int]) -> list[KernelPlan]:
        """The kernels of a group: one, or one and those that join its partial results."""
        found = self.scored(group)
        assert isinstance(found, Scored)
        return with_join(found.plan, self.bindings, self.device, self.cut.order, self.lessons)


def with_join(chosen: KernelPlan, bindings: Bindings, device: Device, order: tuple[str, ...], lessons: Lessons) -> list[KernelPlan]:
    """A kernel whose reductions are split, as two: partial states, and the plan of their join."""
    if chosen.schedule.splits <= 1:
        return [chosen]
    first, rest = halves(chosen.kernel, chosen.schedule.splits, order)
    main = replace(chosen, kernel=Kernel(first, chosen.kernel.space), schedule=_moved(chosen, first))
    joined = plan(rest, bindings, device, lessons)
    return [main, *joined.kernels]


def _moved(chosen: KernelPlan, first: Program) -> Schedule:
    """The schedule with its resident loads at their new positions."""
    kernel = Kernel(first, chosen.kernel.space)
    return replace(chosen.schedule, resident=frozenset(kernel.multi_phase) if chosen.schedule.resident else frozenset())


def _reductions_needed(program: Program) -> tuple[frozenset[int], ...]:
    """The reductions each node depends on."""
    found: list[frozenset[int]] = []
    for node in program.nodes:
        own: frozenset[int] = frozenset()
        for o in operands(node):
            own |= found[o] | (frozenset({o}) if isinstance(program.nodes[o], Reduce) else frozenset())
        found.append(own)
    return tuple(found)
