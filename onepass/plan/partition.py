"""Partitioning: decide by predicted time which results share a kernel.

Every reduction and every store starts as its own kernel. Repeatedly, the pair with the largest gain is merged; with very many
results, every pair that gains. There are no limits on the number of inputs and no row-to-column ratios. Splitting a reduction
is just another schedule. Every rejected merge is kept as a Refusal with both costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import TypeAlias

from ..constants import SHIPPED
from ..device import Device
from ..errors import CyclicKernels, NoPlan, PlanTooLong
from ..ir.budget import Budget
from ..ir.program import Load, Program, Reduce, Result, Store, operands
from ..ir.size import Bindings
from ..stages import stage
from .cost.model import extra_kernel_us, last_block_cost, lower_bound
from .footprint import buffer_bytes
from .kernel import Kernel, Space, memory_order
from .legality import Illegal, Reason, Refusal, check_types
from .plan import CompileFeedback, KernelPlan, Plan
from .schedule import Loop, renumbered
from .scoring import Scored, score, scores
from .split import Cut, halves
from .traffic import traffic

MERGE_GAIN = 0.98  # a merge must be predicted to save 2 %, or the model's error decides
# Limits on scored kernels, about 5 ms each: until the search stops looking for the best merge (the largest named workload
# needs 49), and until it stops merging.
THOROUGH = Budget("Searching for the best merge of two kernels", PlanTooLong, base=64)
SCORINGS = Budget("Searching for kernels to merge", PlanTooLong, base=32, per_item=2)  # plus `each` per result
SIZE = Budget("Planning a Program (one step a node)", PlanTooLong, base=4096)

Pair: TypeAlias = tuple[float, frozenset[int], frozenset[int]]  # two groups, and an upper bound on the gain of merging them


@stage("planning kernels")
def plan(program: Program, bindings: Bindings, device: Device, feedback: CompileFeedback = MappingProxyType({})) -> Plan:
    """Plan a Program on a device for one set of sizes. `feedback` holds the outcomes of compiling earlier plans."""
    check_types(program, device)
    SIZE.steps().spend(len(program.nodes))
    search = Search(program, bindings, device, feedback)
    return search.assemble(search.run(), {})


def _named(kernels: list[KernelPlan], stem: str) -> tuple[KernelPlan, ...]:
    """Name each kernel after its Program and family."""
    found = []
    for k, kernel in enumerate(kernels):
        kind = "join" if "_join" in kernel.program.name else kernel.family.replace("-", "_").replace(" ", "_").lower()
        name = f"{stem}_{kind}" if len(kernels) == 1 else f"{stem}_{k}_{kind}"
        found.append(replace(kernel, name=name))
    return tuple(found)


@dataclass
class Search:
    """The search for the kernels of one Program, with its refusals and memoized scores."""

    program: Program
    bindings: Bindings
    device: Device
    feedback: CompileFeedback
    refusals: list[Refusal] = field(default_factory=list)
    _memo: dict[frozenset[int], Scored | Illegal] = field(default_factory=dict)
    _moved: dict[frozenset[int], frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = memory_order(self.program, self.bindings)
        self.cut = Cut(self.program, tuple(sorted(order, key=order.__getitem__)))
        self.needs = _reductions_needed(self.program)
        self.bytes_of = buffer_bytes(self.program, self.bindings)
        self.seeds = self._seeds()
        self.thorough, self.scorings = THOROUGH.steps(), SCORINGS.steps(len(self.seeds))

    def scored(self, group: frozenset[int]) -> Scored | Illegal:
        """The best way to run a group, or why there is none. Memoized."""
        if group not in self._memo:
            self.thorough.count()
            self.scorings.count()
            kernel = self.cut.extract(group, self._name(group))
            last_resort = group in self.seeds  # a group that cannot be split further may spill rather than fail
            self._memo[group] = score(kernel, self.bindings, self.device, self.feedback, spilling=last_resort)
        return self._memo[group]

    def _name(self, group: frozenset[int]) -> str:
        return f"{self.program.name}_{min(group)}"

    def run(self) -> list[frozenset[int]]:
        """The groups in an executable order. Empty if a function returns only its inputs or plain values."""
        whole = frozenset(self.program.of(Reduce, Store))
        if not whole:
            return []
        together = self.scored(whole)
        if isinstance(together, Scored) and (len(whole) == 1 or together.plan.predicted_us <= self._separate_lower_bound(together)):
            return self._accepted([whole])
        groups = self._agglomerate(self.seeds)
        apart = self._total(groups)
        if isinstance(together, Scored) and together.us < apart:
            return self._accepted([whole])
        if isinstance(together, Scored) and len(groups) > 1:
            self.refusals.append(self._refusal(Reason.SLOWER, groups[0], whole, together.us, apart, "everything in one kernel"))
        elif isinstance(together, Illegal) and len(groups) > 1 and not self.refusals:
            self.refusals.append(
                Refusal(together.reason, (self._label(groups[0]), self._label(groups[-1])), together.detail, None, apart)
            )
        return self._accepted(self._ordered(groups))

    def _separate_lower_bound(self, together: Scored) -> float:
        """A lower bound on the time of two or more kernels: they launch twice, and read a large input once more.

        That input is at least the smallest of the large inputs that connect all results.
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
        again = narrowest / self.device.bandwidth if whole else 0.0
        return 1.05 * bound + again + 2 * SHIPPED.cost.launch_us + self.device.launch

    def _total(self, groups: list[frozenset[int]]) -> float:
        total = extra_kernel_us(self.device) * (len(groups) - 1)
        for group in groups:
            found = self.scored(group)
            if isinstance(found, Illegal):
                raise NoPlan(what=self._label(group), device=self.device.name, detail=found.detail)
            total += found.us
        return total

    def _seeds(self) -> list[frozenset[int]]:
        """One kernel per reduction. A store no larger than a reduction's result joins the kernel of that reduction."""
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
        """Merge groups until no merge gains: the best pair at a time, or every gaining pair if there are too many to score.

        Pairs are scored in the order of their upper bounds.
        """
        while True:
            pairs = sorted(self._pairs(groups), key=lambda p: -p[0])
            unscored = sum(a | b not in self._memo for _, a, b in pairs)
            merge = self._best_merged if unscored <= self.thorough.remaining else self._all_merged
            merged, refused = merge(groups, pairs)
            if merged == groups:
                self.refusals.extend(refused)
                return groups
            groups = merged

    def _best_merged(self, groups: list[frozenset[int]], pairs: list[Pair]) -> tuple[list[frozenset[int]], list[Refusal]]:
        """The groups after merging the pair with the largest gain."""
        refused: list[Refusal] = []
        best: tuple[float, frozenset[int], frozenset[int]] | None = None
        for hope, a, b in pairs:
            if best is not None and hope <= best[0]:
                break
            gain = self._gain(a, b, groups)
            if isinstance(gain, Refusal):
                refused.append(gain)
            elif best is None or gain > best[0]:
                best = (gain, a, b)
        return (groups, refused) if best is None else (_with_merged(groups, *best[1:]), refused)

    def _all_merged(self, groups: list[frozenset[int]], pairs: list[Pair]) -> tuple[list[frozenset[int]], list[Refusal]]:
        """The groups after merging every pair that gains, each group at most once.

        This can halve their number, whereas each merge of only the best pair would require new pairs to be scored.
        """
        refused: list[Refusal] = []
        merged: set[frozenset[int]] = set()
        for _, a, b in pairs:
            if a in merged or b in merged or a | b not in self._memo and self.scorings.exhausted:
                continue
            gain = self._gain(a, b, groups)
            if isinstance(gain, Refusal):
                refused.append(gain)
            else:
                merged |= {a, b}
                groups = _with_merged(groups, a, b)
        return groups, refused

    def _pairs(self, groups: list[frozenset[int]]) -> list[Pair]:
        """Pairs that share an input or depend on each other, with the upper bound of their gain.

        Groups that only walk the same axes would share a launch. Each of these is paired with just the next one; any other
        would do as well.
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
                    found.append((one.us + two.us + extra_kernel_us(self.device) - least, a, b))
        return found

    def _walks(self, group: frozenset[int]) -> frozenset[tuple[tuple[str, ...], frozenset[str]]]:
        """The axes a group reduces over, and those that remain, per reduction."""
        nodes = self.program.nodes
        return frozenset((node.axes, self.program.dims[i]) for i in group if isinstance(node := nodes[i], Reduce))

    def reads(self, group: frozenset[int]) -> frozenset[str]:
        """The tensors a group loads or stores."""
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
        """The time saved by merging two kernels, or why they are not merged."""
        one, two = self.scored(a), self.scored(b)
        assert isinstance(one, Scored) and isinstance(two, Scored)
        apart = one.us + two.us + extra_kernel_us(self.device)
        if self._between(a, b, groups):
            return self._refusal(Reason.CYCLE, a, b, None, apart, "a third kernel depends on one and feeds the other")
        merged = self.scored(a | b)
        if isinstance(merged, Illegal):
            return self._refusal(merged.reason, a, b, None, apart, merged.detail)
        if merged.us >= apart * MERGE_GAIN:
            detail = f"{merged.plan.schedule}; {merged.plan.resources.registers} registers, limited by {merged.plan.cost.limit}"
            return self._refusal(Reason.SLOWER, a, b, merged.us, apart, detail)
        return apart - merged.us

    def _between(self, a: frozenset[int], b: frozenset[int], groups: list[frozenset[int]]) -> bool:
        """Whether merging a and b creates a cycle with a third kernel."""
        merged = a | b
        seen, todo = set(), [g for g in groups if g not in (a, b) and self._feeds(merged, g)]
        while todo:
            g = todo.pop()
            if g in seen:
                continue
            seen.add(g)
            if self._feeds(g, merged):
                return True
            todo.extend(h for h in groups if h not in (a, b) and self._feeds(g, h))
        return False

    def _ordered(self, groups: list[frozenset[int]]) -> list[frozenset[int]]:
        home = {i: group for group in groups for i in group}
        waits = {group: {home[r] for i in group for r in self.needs[i]} - {group} for group in groups}
        done: list[frozenset[int]] = []
        pending = sorted(groups, key=min)
        while pending:
            ready = next((g for g in pending if waits[g].issubset(done)), None)
            if ready is None:
                raise CyclicKernels(what=self.program.name)
            done.append(ready)
            pending.remove(ready)
        return done

    def _label(self, group: frozenset[int]) -> str:
        """A short description of what a kernel computes."""
        names = []
        for i in sorted(group):
            node = self.program.nodes[i]
            names.append(f"{node.monoid} over {' '.join(node.axes)}" if isinstance(node, Reduce) else node.buffer)  # type: ignore[union-attr]
        return ", ".join(dict.fromkeys(names))

    def _refusal(
        self, reason: Reason, a: frozenset[int], b: frozenset[int], fused: float | None, apart: float, detail: str
    ) -> Refusal:
        return Refusal(reason, (self._label(a), self._label(b)), detail, fused, apart)

    def _accepted(self, groups: list[frozenset[int]]) -> list[frozenset[int]]:
        for group in groups:
            found = self.scored(group)
            if isinstance(found, Illegal):
                raise NoPlan(what=self._label(group), device=self.device.name, detail=found.detail)
            self._note_join(found, group)
        return groups

    def _note_join(self, found: Scored, group: frozenset[int]) -> None:
        """Record the refusal to join partial results in the last CTA instead of a second kernel, if that would be slower."""
        schedule = found.plan.schedule
        if schedule.splits <= 1:
            return
        t = traffic(found.plan.kernel, self.bindings)
        length = t.cols * t.batch if isinstance(schedule.rows, Loop) else t.rows * t.batch
        states = max(t.outer_states, 1)
        apart = found.us
        fused = found.plan.cost.us + last_block_cost(states, schedule.splits, length)
        if fused >= apart:
            detail = f"the last CTA would have to read all {schedule.splits} partial rows of {length} elements"
            between = (self._label(group), "the join of its partial results")
            self.refusals.append(Refusal(Reason.SLOWER, between, detail, fused, apart))

    def assemble(self, groups: list[frozenset[int]], instead: Mapping[frozenset[int], Scored]) -> Plan:
        """The plan of some groups in order, with replacement schedules from `instead`."""
        kernels: list[KernelPlan] = []
        for group in groups:
            found = instead.get(group) or self.scored(group)
            assert isinstance(found, Scored)
            kernels += with_join(found.plan, self.bindings, self.device, self.cut.order, self.feedback)
        return Plan(self.program, self.device, self.bindings, _named(kernels, self.program.name), tuple(self.refusals))

    def others(self, group: frozenset[int]) -> list[Scored]:
        """Every way to run a group."""
        found = scores(self.cut.extract(group, self._name(group)), self.bindings, self.device, self.feedback)
        return [] if isinstance(found, Illegal) else found

    def other_partitions(self, chosen: list[frozenset[int]]) -> list[list[frozenset[int]]]:
        """Groupings the search did not choose: one kernel, the result of pairwise merging, and separate kernels."""
        whole = [frozenset(self.program.of(Reduce, Store))]
        met = [whole, self._ordered(self._agglomerate(self.seeds)), self._ordered(self.seeds)]
        legal = [groups for groups in met if all(isinstance(self.scored(g), Scored) for g in groups)]
        return [g for k, g in enumerate(legal) if set(g) != set(chosen) and all(set(g) != set(h) for h in legal[:k])]


def _with_merged(groups: list[frozenset[int]], a: frozenset[int], b: frozenset[int]) -> list[frozenset[int]]:
    return [g for g in groups if g not in (a, b)] + [a | b]


def with_join(
    chosen: KernelPlan, bindings: Bindings, device: Device, order: tuple[str, ...], feedback: CompileFeedback
) -> list[KernelPlan]:
    """Split a kernel with split reductions into one that computes partial states and the plan of their join."""
    if chosen.schedule.splits <= 1:
        return [chosen]
    split = halves(chosen.kernel, chosen.schedule.splits, order)
    kernel = Kernel(split.first, _remaining(chosen.kernel.space, split.first))
    main = replace(chosen, kernel=kernel, schedule=renumbered(chosen.schedule, split.moved))
    joined = plan(split.join, bindings, device, feedback)
    return [main, *joined.kernels]


def _remaining(space: Space, program: Program) -> Space:
    """A space without the axes that only the join kernels still have."""
    return Space(*(tuple(a for a in side if a in program.axis) for side in (space.batch, space.rows, space.cols, space.block)))


def _reductions_needed(program: Program) -> tuple[frozenset[int], ...]:
    """For each node: the reductions it depends on."""
    found: list[frozenset[int]] = []
    for node in program.nodes:
        own: frozenset[int] = frozenset()
        for o in operands(node):
            own |= found[o] | (frozenset({o}) if isinstance(program.nodes[o], Reduce) else frozenset())
        found.append(own)
    return tuple(found)
