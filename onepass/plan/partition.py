"""Program -> Plan: which results share a kernel, by predicted time alone.

Every reduction and every store starts as a kernel of its own. The pair whose merge gains most is merged, until no merge
gains. There are no caps on reads, no ratios of rows to columns, and splitting a reduction is just another schedule that
competes. Every merge that was looked at and not made is kept as a Refusal with both costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType

from ..device import Device
from ..errors import NoPlan
from ..ir.program import Load, Program, Reduce, Result, Store, operands
from ..ir.simplify import online_softmax, two_pass
from ..ir.size import Bindings
from ..stages import stage
from .candidates import schedules
from .cost import PER_PART, PER_TILED_PART, RAMP, Traffic, another, cost, join_cost, last_block_cost, lower_bound, traffic
from .footprint import buffer_bytes
from .kernel import Kernel, Space, memory_order
from .legality import Family, Illegal, Reason, Refusal, check_types, families, space_of
from .plan import ANY_WEIGHT, KernelPlan, Lessons, Plan
from .resources import demand, estimate
from .schedule import Block, Cover, Loop, Schedule
from .split import Cut, halves

GAIN = 0.98  # a merge must be predicted to save this much, or the model's error decides
NEAR = 1.03  # schedules this close to the best are equals, and of equals the one with the fewest registers is taken


@dataclass(frozen=True, slots=True)
class Scored:
    """The best way to run one kernel, with what its partial results cost to join."""

    plan: KernelPlan
    us: float


@stage("planning kernels")
def plan(program: Program, bindings: Bindings, device: Device, lessons: Lessons = MappingProxyType({})) -> Plan:
    """Decide everything about a Program on a device, for one set of sizes, heeding what compiling earlier plans showed."""
    check_types(program, device)
    search = Search(program, bindings, device, lessons)
    return search.assembled(search.run(), {})


def _named(kernels: list[KernelPlan], stem: str) -> tuple[KernelPlan, ...]:
    """Name each kernel after what it computes and how."""
    found = []
    for k, kernel in enumerate(kernels):
        kind = "join" if "_join" in kernel.program.name else kernel.family.replace("-", "_").replace(" ", "_")
        name = f"{stem}_{kind}" if len(kernels) == 1 else f"{stem}_{k}_{kind}"
        found.append(replace(kernel, name=name))
    return tuple(found)


def score(program: Program, bindings: Bindings, device: Device, lessons: Lessons, spilling: bool = False) -> Scored | Illegal:
    """The best schedule of one kernel. `spilling`: where none is left, the one that was seen to spill least."""
    found = scores(program, bindings, device, lessons)
    if isinstance(found, Illegal):
        return found
    fresh = [s for s in found if (known := lessons.get(s.plan.scored_as)) is None or known.ctas_per_sm] if lessons else found
    if fresh:
        near = min(s.us for s in fresh) * NEAR
        return min((s for s in fresh if s.us <= near),
                   key=lambda s: (_parks_rows(s.plan), s.plan.schedule.shared, _loads_anew(s.plan), _weight(s.plan), s.us))
    if found and spilling:
        return min(found, key=lambda s: (lessons[s.plan.scored_as].spilled or (True, 0), s.us))
    return Illegal(Reason.NO_SCHEDULE, f"{program.name} holds too much for one SM of {device.name}")


def scores(program: Program, bindings: Bindings, device: Device, lessons: Lessons) -> list[Scored] | Illegal:
    """Every schedule of one kernel that is worth scoring, with its time."""
    space = space_of(program, bindings)
    if isinstance(space, Illegal):
        return space
    found: list[Scored] = []
    kinds = families(Kernel(program, space), Kernel(online_softmax(program), space))
    if isinstance(kinds, Illegal):
        return kinds
    for family in kinds:
        for form in forms(program, space, family):
            found.extend(_scored(form, family, bindings, device, lessons))
    return found


def _parks_rows(chosen: KernelPlan) -> bool:
    """Rows that registers hold as well need no shared memory; nor need CTAs share rows that each can as well have alone."""
    return bool(chosen.schedule.parked) and isinstance(chosen.schedule.cols, Cover)


def _loads_anew(chosen: KernelPlan) -> bool:
    """Whoever gathers over parked rows had better keep its row vectors. H200, RMSNorm backward of 4096 x 49152 by four CTAs a row,
    predicted 0.2 % apart: 363 us where they are loaded anew in every turn, 322 where they wait in shared memory."""
    one = chosen.schedule
    return one.gathers and not (one.hoisted or one.beside)


def _weight(chosen: KernelPlan) -> int:
    """What equals are told apart by: registers a thread; in a loop over rows those of all CTAs, for few warps reduce faster.

    Of parked rows, those a CTA may take at most: the less, the more CTAs are sure to fit. Tiles that pass through shared memory
    need few, and the fewer the smaller they are: there the prediction decides. H200, sums of fp32 4096 x 65536: tiles of 8 x 64
    within 64 registers took 248 us, those of 32 x 128, predicted 1 % better, 239.
    """
    if _parks_rows(chosen):
        return chosen.schedule.registers * chosen.schedule.warps
    if chosen.schedule.parked:
        return 0
    everywhere = chosen.schedule.warps * chosen.schedule.splits if chosen.family.startswith("mix-order") else 1
    return chosen.resources.registers * everywhere


@dataclass(frozen=True, slots=True)
class Form:
    """A kernel with its reductions written for one way of running: the folded side held on chip, or walked."""

    kernel: Kernel
    held: bool


def forms(program: Program, space: Space, family: Family) -> tuple[Form, ...]:
    """How a kernel can be written. What is held is read in plain passes; what is walked enters by one merge a tile."""
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


def _scored(form: Form, family: Family, bindings: Bindings, device: Device, lessons: Lessons) -> list[Scored]:
    """Every candidate of a form that fits, with its time; of those that were seen to spill or not to fit, those that can run."""
    kernel = form.kernel
    t, need = traffic(kernel, bindings), demand(kernel)
    found = []
    mine = {schedule: known for (of, schedule), known in lessons.items() if of == kernel.program}
    too_heavy: dict[str, int] = {}  # by family: estimates of different ones are not on one scale
    for schedule, learned in mine.items():
        too_heavy[schedule.family] = min(learned.registers, too_heavy.get(schedule.family, ANY_WEIGHT))
    for schedule in schedules(kernel, family, form.held, t, bindings, device):
        resources, known = estimate(need, schedule, device), mine.get(schedule)
        if known and known.ctas_per_sm:
            resources = replace(resources, ctas_per_sm=known.ctas_per_sm)
        elif known.spilled is None if known else resources.registers >= too_heavy.get(schedule.family, ANY_WEIGHT):
            continue
        if resources.ctas_per_sm < 1 or not runs_at_once(schedule, resources.ctas_per_sm, device):
            continue
        one = cost(kernel, schedule, resources, t, device)
        chosen = KernelPlan(kernel.program.name, kernel, schedule, resources, one, (kernel.program, schedule))
        found.append(Scored(chosen, one.us + _join(schedule, t, device)))
    return found


def runs_at_once(schedule: Schedule, ctas_per_sm: int, device: Device) -> bool:
    """Whether so many CTAs on an SM are all that a loop over rows has: it shares out the rows beforehand."""
    if not (isinstance(schedule.rows, Loop) and isinstance(schedule.cols, Cover)):
        return True
    return schedule.rows.split * schedule.shared <= ctas_per_sm * device.sms


def _join(schedule: Schedule, t: Traffic, device: Device) -> float:
    if schedule.splits <= 1:
        return 0.0
    length = t.cols * t.batch if isinstance(schedule.rows, Loop) else t.rows * t.batch
    part = PER_TILED_PART if schedule.parked and isinstance(schedule.cols, Block) else 0.0 if t.inner else PER_PART
    return join_cost(max(t.outer_states, 1), schedule.splits, length, device) + part * schedule.splits


@dataclass
class Search:
    """The search for one Program's groups, and what it saw."""

    program: Program
    bindings: Bindings
    device: Device
    lessons: Lessons
    refusals: list[Refusal] = field(default_factory=list)
    _memo: dict[frozenset[int], Scored | Illegal] = field(default_factory=dict)
    _moved: dict[frozenset[int], frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = memory_order(self.program, self.bindings)
        self.cut = Cut(self.program, tuple(sorted(order, key=order.__getitem__)))
        self.needs = _reductions_needed(self.program)
        self.bytes_of = buffer_bytes(self.program, self.bindings)
        self.seeds = self._seeds()

    def scored(self, group: frozenset[int]) -> Scored | Illegal:
        if group not in self._memo:
            kernel = self.cut.extract(group, self._name(group))
            last_resort = group in self.seeds  # what cannot be taken apart is rather slow than not computed
            self._memo[group] = score(kernel, self.bindings, self.device, self.lessons, spilling=last_resort)
        return self._memo[group]

    def _name(self, group: frozenset[int]) -> str:
        return f"{self.program.name}_{min(group)}"

    def run(self) -> list[frozenset[int]]:
        """The groups, in an order they can run in; none where a function returns only what it was given, or plain values."""
        whole = frozenset(self.program.of(Reduce, Store))
        if not whole:
            return []
        together = self.scored(whole)
        if isinstance(together, Scored) and (len(whole) == 1 or together.plan.predicted_us <= self._least_apart(together)):
            return self._accepted([whole])
        groups = self._agglomerate(self.seeds)
        apart = self._total(groups)
        if isinstance(together, Scored) and together.us < apart:
            return self._accepted([whole])
        if isinstance(together, Scored) and len(groups) > 1:
            self.refusals.append(self._refusal(Reason.SLOWER, groups[0], whole, together.us, apart, "everything in one kernel"))
        elif isinstance(together, Illegal) and len(groups) > 1 and not self.refusals:
            self.refusals.append(Refusal(together.reason, (self._label(groups[0]), self._label(groups[-1])), together.detail,
                                         None, apart))
        return self._accepted(self._ordered(groups))

    def _least_apart(self, together: Scored) -> float:
        """No two or more kernels can be predicted to be faster: they start twice, and read something large once more.

        What is read once more is at least the narrowest of the large inputs that tie the results together.
        """
        tied: list[set[int]] = []
        units = self.seeds
        narrowest = 0.0
        for name in sorted(self.bytes_of, key=lambda n: -self.bytes_of[n]):
            joined = {k for k, unit in enumerate(units) if name in self.reads(unit)}
            if len(joined) > 1 and not any(joined <= t for t in tied):
                narrowest = self.bytes_of[name]
                touching = [t for t in tied if t & joined]
                tied = [t for t in tied if not t & joined] + [joined.union(*touching)]
        whole = len(tied) == 1 and len(tied[0]) == len(units)
        bound = lower_bound(traffic(together.plan.kernel, self.bindings), self.device)
        return 1.05 * bound + (narrowest / self.device.bandwidth if whole else 0.0) + 2 * RAMP + self.device.launch

    def _total(self, groups: list[frozenset[int]]) -> float:
        total = another(self.device) * (len(groups) - 1)
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
        """Merge the best pair until none gains. Pairs are scored in the order of what their bytes allow them to gain."""
        while True:
            refused: list[Refusal] = []
            best: tuple[float, frozenset[int], frozenset[int]] | None = None
            for hope, a, b in sorted(self._pairs(groups), key=lambda p: -p[0]):
                if best is not None and hope <= best[0]:
                    break
                gain = self._gain(a, b, groups)
                if isinstance(gain, Refusal):
                    refused.append(gain)
                elif best is None or gain > best[0]:
                    best = (gain, a, b)
            if best is None:
                self.refusals.extend(refused)
                return groups
            groups = [g for g in groups if g not in best[1:]] + [best[1] | best[2]]

    def _pairs(self, groups: list[frozenset[int]]) -> list[tuple[float, frozenset[int], frozenset[int]]]:
        """Pairs that have something to share (an input, or one's result as the other's operand), with the most they can gain.

        Those that only walk alike share a launch; of these every group is paired with the next one, for any other would do as well.
        """
        found = []
        for k, a in enumerate(groups):
            tied = [b for b in groups[k + 1 :] if self.reads(a) & self.reads(b) or self._feeds(a, b) or self._feeds(b, a)]
            walks = self._walks(a)
            alike = (b for b in groups[k + 1 :] if b not in tied and walks and walks == self._walks(b))
            for b in (*tied, *islice(alike, 1)):
                one, two = self.scored(a), self.scored(b)
                if isinstance(one, Scored) and isinstance(two, Scored):
                    least = sum(self.bytes_of[name] for name in self.reads(a) | self.reads(b)) / self.device.bandwidth
                    found.append((one.us + two.us + another(self.device) - least, a, b))
        return found

    def _walks(self, group: frozenset[int]) -> frozenset[tuple[tuple[str, ...], frozenset[str]]]:
        """Over which axes a group reduces, and which are left."""
        nodes = self.program.nodes
        return frozenset((node.axes, self.program.dims[i]) for i in group if isinstance(node := nodes[i], Reduce))

    def reads(self, group: frozenset[int]) -> frozenset[str]:
        """The tensors a group moves."""
        if group not in self._moved:
            self._moved[group] = self._reads(group)
        return self._moved[group]

    def _reads(self, group: frozenset[int]) -> frozenset[str]:
        seen: set[int] = set()
        todo, found = list(group), set()
        while todo:
            i = todo.pop()
            if i in seen:
                continue
            seen.add(i)
            node = self.program.nodes[i]
            if isinstance(node, (Load, Store)):
                found.add(node.buffer)
            if not (isinstance(node, Result) and node.reduce not in group):
                todo.extend(operands(node))
        return frozenset(found)

    def _feeds(self, a: frozenset[int], b: frozenset[int]) -> bool:
        return any(self.needs[i] & a for i in b)

    def _gain(self, a: frozenset[int], b: frozenset[int], groups: list[frozenset[int]]) -> float | Refusal:
        """What merging two kernels saves, or why it is not done."""
        one, two = self.scored(a), self.scored(b)
        assert isinstance(one, Scored) and isinstance(two, Scored)
        apart = one.us + two.us + another(self.device)
        if self._between(a, b, groups):
            return self._refusal(Reason.CYCLE, a, b, None, apart, "a third kernel depends on one and feeds the other")
        merged = self.scored(a | b)
        if isinstance(merged, Illegal):
            return self._refusal(merged.reason, a, b, None, apart, merged.detail)
        if merged.us >= apart * GAIN:
            detail = f"{merged.plan.schedule}; {merged.plan.resources.registers} registers, limited by {merged.plan.cost.limit}"
            return self._refusal(Reason.SLOWER, a, b, merged.us, apart, detail)
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

    def _refusal(self, reason: Reason, a: frozenset[int], b: frozenset[int], fused: float | None, apart: float,
                 detail: str) -> Refusal:
        return Refusal(reason, (self._label(a), self._label(b)), detail, fused, apart)

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
            between = (self._label(group), "the sum of its partial results")
            self.refusals.append(Refusal(Reason.SLOWER, between, detail, fused, apart))

    def assembled(self, groups: list[frozenset[int]], instead: Mapping[frozenset[int], Scored]) -> Plan:
        """The plan of some groups in order, each run the best way or the one given instead."""
        kernels: list[KernelPlan] = []
        for group in groups:
            found = instead.get(group) or self.scored(group)
            assert isinstance(found, Scored)
            kernels += with_join(found.plan, self.bindings, self.device, self.cut.order, self.lessons)
        return Plan(self.program, self.device, self.bindings, _named(kernels, self.program.name), tuple(self.refusals))

    def others(self, group: frozenset[int]) -> list[Scored]:
        """Every way to run a group."""
        found = scores(self.cut.extract(group, self._name(group)), self.bindings, self.device, self.lessons)
        return [] if isinstance(found, Illegal) else found

    def partitions(self, chosen: list[frozenset[int]]) -> list[list[frozenset[int]]]:
        """Ways to group that the search did not take: all in one kernel, what merging pairs found, each result by itself."""
        whole = [frozenset(self.program.of(Reduce, Store))]
        met = [whole, self._ordered(self._agglomerate(self.seeds)), self._ordered(self.seeds)]
        legal = [groups for groups in met if all(isinstance(self.scored(g), Scored) for g in groups)]
        return [g for k, g in enumerate(legal) if set(g) != set(chosen) and all(set(g) != set(h) for h in legal[:k])]


def with_join(chosen: KernelPlan, bindings: Bindings, device: Device, order: tuple[str, ...],
              lessons: Lessons) -> list[KernelPlan]:
    """A kernel whose reductions are split, as two: partial states, and the plan of their join."""
    if chosen.schedule.splits <= 1:
        return [chosen]
    first, rest = halves(chosen.kernel, chosen.schedule.splits, order)
    kernel = Kernel(first, _remaining(chosen.kernel.space, first))
    held = frozenset(kernel.multi_phase) if chosen.schedule.resident else frozenset[int]()
    parked = frozenset(first.nodes.index(chosen.program.nodes[i]) for i in chosen.schedule.parked)
    main = replace(chosen, kernel=kernel, schedule=replace(chosen.schedule, resident=held, parked=parked))
    joined = plan(rest, bindings, device, lessons)
    return [main, *joined.kernels]


def _remaining(space: Space, program: Program) -> Space:
    """A space without the axes that only the joining kernels still have."""
    return Space(*(tuple(a for a in side if a in program.axis) for side in (space.batch, space.rows, space.cols, space.block)))


def _reductions_needed(program: Program) -> tuple[frozenset[int], ...]:
    """The reductions each node depends on."""
    found: list[frozenset[int]] = []
    for node in program.nodes:
        own: frozenset[int] = frozenset()
        for o in operands(node):
            own |= found[o] | (frozenset({o}) if isinstance(program.nodes[o], Reduce) else frozenset())
        found.append(own)
    return tuple(found)
