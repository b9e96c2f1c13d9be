"""Decide which regions of a post-grad graph onepass compiles, and replace them by calls of its op.

A region is claimed if its kernels are predicted to be no slower than Inductor's. The prediction includes the memory traffic of
values that Inductor would keep on chip by fusing across the region's boundary. Every reduction that stays with Inductor is recorded
with the reason, for reports.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..capture.graph.effects import is_ordered
from ..capture.graph.node_kinds import feed_sparse, is_reduction, tensors_of, why_unsupported
from ..capture.graph.region_program import RegionProgram
from ..capture.graph.regions import Region, find_regions
from ..capture.graph.reuse import GraphMemory, reusable
from ..capture.lowering.lower import LOWERINGS, Blocked
from ..capture.lowering.reductions import REDUCTIONS
from ..capture.lowering.schema import op_name, short_name
from ..capture.lowering.source import UNKNOWN, user_line
from ..constants import SHIPPED
from ..device import Device
from ..errors import RewriteFailed, UnsupportedOnDevice
from ..ir.program import Program
from ..pipeline import lower_region, variant_of
from ..plan.inductor_baseline import inductor_us
from ..plan.inplace import safe_inplace_pairs
from ..plan.plan import Plan
from ..plan.recost import at_sizes
from ..plan.variant import Variant
from ..stages import to_coded_error
from .plans import Plans
from .region_spec import RegionSpec, encode, places
from .rewrite import Rewriter, cyclic_regions
from .settings import CallSettings

_LOG = logging.getLogger(__name__)

DECIDES = SHIPPED.claim
MAX_ROUNDS = 64  # of finding regions; each round excludes the nodes that could not be lowered in the one before


@dataclass(frozen=True)
class ClaimOptions:
    """The options that decide which regions are claimed."""

    device: Device
    interpret: bool = False  # also claim regions of CPU tensors
    skip: frozenset[str] = frozenset()  # regions to decline: ids, or lines such as model.py:12
    max_autotune: bool = False  # Inductor may fuse a following op into a matmul
    phase: str = "forward"
    in_place: bool = True  # outputs may reuse the memory of dead inputs
    functional: bool = False  # regions return new tensors instead of filling allocated ones
    by_cost: bool = True  # False: claim whatever can be computed
    donated_inputs: frozenset[int] = frozenset()  # positions of graph inputs that the graph may overwrite
    for_calls: CallSettings = CallSettings()  # settings that the regions carry


@dataclass(frozen=True)
class ClaimedRegion:
    """A region that onepass compiles."""

    part: RegionProgram = field(repr=False)
    optimized: Program = field(repr=False)
    variant: Variant = field(repr=False)  # of calls like the traced one, if all tensors are aligned
    plan: Plan = field(repr=False)  # of the variant: what the first call runs
    at_trace: Plan = field(repr=False)  # the same kernels, with times and bytes at the sizes at trace time
    inductor_us: float
    charged_us: float  # time for values that Inductor would keep on chip
    in_place: int = 0  # outputs that reuse the memory of an input

    @property
    def id(self) -> str:
        return self.part.id

    @property
    def program(self) -> Program:
        return self.part.program

    @property
    def lines(self) -> tuple[str, ...]:
        return self.part.lines

    @property
    def bindings(self) -> Mapping[str, int]:
        return self.part.hints

    @property
    def predicted_us(self) -> float:
        return self.at_trace.predicted_us

    @property
    def floor_bytes(self) -> int:
        return self.at_trace.floor_bytes

    @property
    def reductions(self) -> int:
        return len(self.part.region.reductions)


@dataclass(frozen=True)
class Declined:
    """Reductions that stay with Inductor, and why."""

    reason: str
    lines: tuple[str, ...]
    ops: tuple[str, ...]
    id: str = ""  # of the region, if the reductions formed one
    predicted_us: float | None = None
    inductor_us: float | None = None
    error: Exception | None = None  # set if something failed; None if the region was declined by decision
    part: RegionProgram | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Claimed:
    """The outcome of claiming for one graph."""

    phase: str
    regions: tuple[ClaimedRegion, ...]
    declined: tuple[Declined, ...]


def claim(graph: fx.Graph, options: ClaimOptions, plans: Plans | None = None) -> Claimed:
    """Rewrite a graph so that onepass computes the regions worth claiming.

    `plans` holds what was planned before and receives what is planned now. Without it, the graph is planned by itself.
    """
    _drop_dead(graph)
    claims: list[ClaimedRegion] = []
    declined: list[Declined] = []
    plans = Plans() if plans is None else plans
    for device in _devices(graph, options.interpret):
        parts, failures, blocked = _parts(graph, device, options)
        outcomes = [_decide(part, options, plans) for part in parts]
        claims += [v for v in outcomes if isinstance(v, ClaimedRegion)]
        declined += [*failures, *(v for v in outcomes if isinstance(v, Declined)), *_outside_regions(graph, device, parts, blocked)]
    claims, unwritten = _rewritten(graph, claims, options)
    return Claimed(options.phase, tuple(claims), (*declined, *unwritten))


def _rewritten(graph: fx.Graph, claims: list[ClaimedRegion], options: ClaimOptions) -> tuple[list[ClaimedRegion], list[Declined]]:
    """Replace regions of a graph by calls. A region that cannot be replaced stays as it is."""
    rewriter, texts = Rewriter(graph), _texts(claims, options)
    circular = cyclic_regions(graph, [claimed.part for claimed in claims])
    calls: dict[fx.Node, ClaimedRegion] = {}
    declined: list[Declined] = []
    for k, claimed in enumerate(claims):
        try:
            if k in circular:
                raise RewriteFailed(detail="a region would have to run both before and after one of its users")
            calls[rewriter.replace(claimed.part, texts[claimed.part.key], options.functional)] = claimed
        except Exception as error:
            declined.append(_declined(claimed.part.region.reductions, "it could not be rewritten", error, claimed.part))
    done = list(calls.values())
    if options.in_place and not options.functional:
        memory = GraphMemory(graph, calls, options.donated_inputs)
        done = [_in_place(rewriter, call, claimed, memory) for call, claimed in calls.items()]
    if calls:
        rewriter.tidy()
    return done, declined


def _texts(claims: list[ClaimedRegion], options: ClaimOptions) -> dict[str, str]:
    """The text of each region, by key. Equal regions share it, with the lines of the first, so that a process sees one region."""
    first = {claimed.part.key: claimed for claimed in reversed(claims)}
    return {key: encode(RegionSpec(c.id, c.program, c.optimized, places(c.lines), options.for_calls)) for key, c in first.items()}


def _in_place(rewriter: Rewriter, call: fx.Node, claimed: ClaimedRegion, memory: GraphMemory) -> ClaimedRegion:
    """Let outputs reuse the memory of dead inputs, if the region's kernels allow it."""
    inputs: tuple[fx.Node, ...] = tuple(call.kwargs["ins"])  # type: ignore[arg-type]
    taken = reusable(claimed.part, call, inputs, safe_inplace_pairs(claimed.plan), memory)
    try:
        rewriter.reuse(claimed.part, call, taken)
    except RewriteFailed as error:  # new memory works too
        _LOG.debug("region %s does not reuse memory: %s", claimed.id, error)
        return claimed
    return replace(claimed, in_place=sum(node is not None for node in taken))


def _drop_dead(graph: fx.Graph) -> None:
    """Erase unused nodes that have no effects. Otherwise a region would write an output that only a dead node reads."""
    for node in reversed(list(graph.nodes)):
        known = node.op == "call_function" and (op_name(node.target) in LOWERINGS or node.target is operator.getitem)
        if known and not node.users and not is_ordered(node):
            graph.erase_node(node)


def _devices(graph: fx.Graph, interpret: bool) -> tuple[torch.device, ...]:
    """The devices of the graph on which regions can run."""
    allowed = ("cuda", "cpu") if interpret else ("cuda",)
    found = dict.fromkeys(t.device for n in graph.nodes for t in tensors_of(n))
    return tuple(d for d in found if d.type in allowed)


def _parts(
    graph: fx.Graph, device: torch.device, options: ClaimOptions
) -> tuple[list[RegionProgram], list[Declined], dict[fx.Node, str]]:
    """Find the regions on a device and lower them. Nodes that cannot be lowered are excluded, and regions are found again."""
    blocked = feed_sparse(graph)
    known: dict[Region, RegionProgram] = {}
    for _ in range(MAX_ROUNDS):
        regions = find_regions(graph, device, blocked, options.max_autotune)
        parts: list[RegionProgram] = []
        failures: list[Declined] = []
        before = frozenset(blocked)
        for region in regions:
            try:
                if region not in known:
                    known[region] = lower_region(graph, region)
                parts.append(known[region])
            except Blocked as refusal:
                if before.issuperset(refusal.nodes):  # already excluded, but the region needs them: drop the region
                    failures.append(_declined(region.reductions, str(refusal.error)))
                    blocked |= dict.fromkeys(region.nodes, str(refusal.error))
                blocked |= dict.fromkeys(refusal.nodes, str(refusal.error))
            except Exception as error:
                coded = to_coded_error(error, "capturing a region")
                failures.append(_declined(region.reductions, "it could not be captured", coded))
        if len(blocked) == len(before):
            break
    return parts, failures, blocked


def _decide(part: RegionProgram, options: ClaimOptions, plans: Plans) -> ClaimedRegion | Declined:
    """Claim or decline a region by the plan that its first call will run. Times are those at the sizes at trace time."""
    reductions = part.region.reductions
    if named := options.skip & {part.id, part.key, *(line.split(" ")[0] for line in part.lines)}:
        return _declined(reductions, f"skipped by name ({', '.join(sorted(named))})", part=part)
    try:
        program = plans.optimized(part.program)
        variant = variant_of(program, part.hints, options.device)
        chosen = plans.plan(program, variant)
        here = at_sizes(chosen, part.hints)
        inductor = inductor_us(part.program, part.hints, options.device, here.predicted_us)
    except UnsupportedOnDevice as refusal:
        return _declined(reductions, str(refusal), None, part)
    except Exception as error:
        return _declined(reductions, "it could not be planned", to_coded_error(error, "deciding on a region"), part)
    charged = part.region.lost_fusion_bytes / options.device.bandwidth
    if options.by_cost and here.predicted_us + charged > max(DECIDES.equal_ratio * inductor, inductor + DECIDES.equal_us):
        detail = f"{here.predicted_us:.1f} us" + (f" plus {charged:.1f} us for values Inductor keeps on chip" if charged else "")
        reason = f"no gain: {detail}, Inductor {inductor:.1f} us"
        return _declined(reductions, reason, None, part, here.predicted_us + charged, inductor)
    return ClaimedRegion(part, program, variant, chosen, here, inductor, charged)


def _outside_regions(
    graph: fx.Graph, device: torch.device, parts: list[RegionProgram], blocked: Mapping[fx.Node, str]
) -> list[Declined]:
    """The reductions on a device that are in no region, with reasons."""
    inside = {n for part in parts for n in part.region.nodes}
    found = []
    for node in graph.nodes:
        if is_reduction(node) and node not in inside and any(t.device == device for t in tensors_of(node)):
            name = op_name(node.target)
            missing = "" if name in REDUCTIONS else f"onepass does not support {name}"
            reason = missing or blocked.get(node) or why_unsupported(node, device) or "its operands cannot be part of a Program"
            found.append(_declined((node,), reason))
    return found


def _declined(
    reductions: tuple[fx.Node, ...],
    reason: str,
    error: Exception | None = None,
    part: RegionProgram | None = None,
    predicted_us: float | None = None,
    inductor_us: float | None = None,
) -> Declined:
    lines = dict.fromkeys(user_line(n.stack_trace) for n in reductions)
    lines.pop(UNKNOWN, None)
    ops = tuple(short_name(n.target) for n in reductions)
    return Declined(reason, tuple(lines), ops, part.id if part else "", predicted_us, inductor_us, error, part)
