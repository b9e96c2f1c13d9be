"""The graph pass: claims regions of a post-grad graph, and restores the graph if that fails."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from .. import compat
from ..capture.lowering.source import UNKNOWN, user_line
from ..device import Device, device
from ..errors import GraphFallback, OnepassError, PythonWrapperRequired, text_of
from ..pipeline import generate
from ..runtime.cache import versions
from ..runtime.card import MIN_CAPABILITY, local_device
from ..stages import stage
from . import journal, region_op, repro
from .claim import Claimed, ClaimedRegion, ClaimOptions, Declined, claim
from .engine import INTERPRETER_DEVICE, Kernels
from .failure import describe_error, format_lines, is_fatal, raise_coded, report_fallback, reproducer, warn_once
from .plans import PLANS, Plans
from .settings import Settings

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegionPass:
    """The pass over graphs, with its settings."""

    settings: Settings

    def __call__(self, graph: fx.Graph, is_inference: bool | None) -> None:
        """Claim regions of a graph. Unless on_error="raise", errors that are not fatal are reported and the graph is restored."""
        phase = phase_of(graph, is_inference)
        before, started = copy_graph(graph), time.perf_counter()
        try:
            where = device_of(graph, self.settings.interpret)
            if where is None or self._needs_python_wrapper(graph, phase, where):
                return
            compat.call_directly(torch.ops.onepass.region.default, region_op.definition)
            claimed = claim_all(graph, claim_options(graph, self.settings, phase), PLANS)
            self._report_failures(claimed.declined, graph, phase)
        except Exception as error:
            if self.settings.on_error == "raise" or is_fatal(error):
                raise_coded(error, f"A {phase} graph", lines_of(graph), "changed")
            _restore(graph, before)
            self._report_graph_failure(graph, phase, error, time.perf_counter() - started)
            return
        took = time.perf_counter() - started
        journal.graph(journal.GraphRecord(phase, str(where), claimed.regions, claimed.declined, took))
        _log_outcome(claimed, took)
        _prepare(claimed.regions)

    def _needs_python_wrapper(self, graph: fx.Graph, phase: str, where: torch.device) -> bool:
        """Whether to decline the whole graph, because Inductor generates a wrapper that cannot call regions (such as C++)."""
        by = compat.non_python_wrapper()
        if by is not None:
            happened = PythonWrapperRequired(phase=phase, lines=format_lines(lines_of(graph)), by=by)
            warn_once(("graph", by), happened)
            journal.graph(journal.GraphRecord(phase, str(where), (), (), 0.0, describe_error(happened)))
        return by is not None

    def _report_graph_failure(self, graph: fx.Graph, phase: str, error: Exception, took: float) -> None:
        name = "graph_" + hashlib.sha256(str(graph).encode()).hexdigest()[:10]
        where = reproducer(partial(repro.write_graph, graph, text_of(error), phase, name, self.settings))
        lines = lines_of(graph)
        happened = GraphFallback(phase=phase, lines=format_lines(lines), error=describe_error(error), repro=where)
        warn_once((name, "claimed"), happened)
        journal.graph(journal.GraphRecord(phase, "", (), (), took, describe_error(error)))
        _LOG.debug("no regions of a %s graph were claimed", phase, exc_info=error)

    def _report_failures(self, declined: tuple[Declined, ...], graph: fx.Graph, phase: str) -> None:
        """Report the regions that were declined because of an error."""
        for each in declined:
            if each.error is None:
                continue
            if self.settings.on_error == "raise" or is_fatal(each.error):
                raise_coded(each.error, f"Region {each.id}".rstrip(), each.lines, each.reason.removeprefix("it could not be "))
            name = each.id or "graph_" + hashlib.sha256(repr((each.reason, each.lines)).encode()).hexdigest()[:10]
            stage = each.reason.removeprefix("it could not be ")
            report_fallback(name, each.lines, stage, each.error, partial(self._write_repro, each, name, graph, phase))

    def _write_repro(self, declined: Declined, name: str, graph: fx.Graph, phase: str) -> str:
        what = text_of(declined.error) if declined.error else declined.reason
        if declined.part is None:
            return repro.write_graph(graph, what, phase, name, self.settings)
        where = repro.Layout(str(declined.part.outputs[0].meta["val"].device))
        return repro.write_region(name, what, declined.part.program, declined.part.hints, where)

    def uuid(self) -> str:
        """The cache key of the pass: everything besides the graph that the rewritten graph depends on."""
        settings = self.settings
        card = device(INTERPRETER_DEVICE) if settings.interpret else None
        cards = [local_device(i) for i in range(torch.cuda.device_count())]
        # Torch's own key does not include which inputs a backward graph may overwrite.
        facts = (versions(), settings.graph_key, card, cards, sorted(compat.donated_inputs()))
        return "onepass " + hashlib.sha256(repr(facts).encode()).hexdigest()


def phase_of(graph: fx.Graph, is_inference: bool | None) -> str:
    """The phase of a graph: forward, backward or inference. Only backward graphs have inputs that AOTAutograd names tangents."""
    if any(node.op == "placeholder" and str(node.target).startswith("tangents") for node in graph.nodes):
        return "backward"
    return "inference" if is_inference else "forward"


def device_of(graph: fx.Graph, interpret: bool) -> torch.device | None:
    """The first device of a graph that onepass has kernels for."""
    vals = (node.meta.get("val") for node in graph.nodes)
    found = dict.fromkeys(val.device for val in vals if isinstance(val, torch.Tensor))
    return next((where for where in found if is_supported(where, interpret)), None)


def is_supported(where: torch.device, interpret: bool) -> bool:
    """Whether kernels can run on a device: GPUs of compute capability 8.0 or later, and CPUs if `interpret` is set."""
    if where.type == "cuda":
        facts = local_device(where.index or 0)
        return facts is not None and facts.capability >= MIN_CAPABILITY
    return where.type == "cpu" and interpret


def claim_options(graph: fx.Graph, settings: Settings, phase: str) -> ClaimOptions:
    """The options for claiming regions of a graph."""
    where = device_of(graph, settings.interpret)
    facts: Device | None = local_device(where.index or 0) if where is not None and where.type == "cuda" else None
    # Torch looks for ops that write in branches and loop bodies, and fails at one that takes a list of tensors.
    functional = settings.functional or not _can_fill_planned_memory() or compat.is_branch_or_body(graph)
    # The inputs of a nested graph belong to the outer graph, which may still read them.
    owns_inputs = phase == "backward" and settings.rest == "inductor" and compat.is_outermost(graph)
    target = facts or device(INTERPRETER_DEVICE)
    return ClaimOptions(
        target,
        settings.interpret,
        frozenset(settings.skip),
        compat.max_autotune(),
        phase,
        settings.in_place and not functional,
        functional,
        settings.by_cost,
        compat.donated_inputs() if owns_inputs else frozenset(),
        settings.for_calls,
    )


def _can_fill_planned_memory() -> bool:
    """Whether this version of torch lets an op fill memory that Inductor plans."""
    try:
        compat.auto_functionalized_call("outs", [])
    except ImportError:
        _LOG.warning(
            "regions return new tensors and need more memory: in this version of torch no op can fill memory that Inductor plans"
        )
        return False
    return True


@stage("claiming regions of a graph")
def claim_all(graph: fx.Graph, options: ClaimOptions, plans: Plans | None = None) -> Claimed:
    """Claim regions, and check that the rewritten graph is valid."""
    claimed = claim(graph, options, plans)
    graph.lint()
    return claimed


def lines_of(graph: fx.Graph) -> tuple[str, ...]:
    """The lines of user code that a graph came from."""
    found = dict.fromkeys(user_line(node.stack_trace) for node in graph.nodes if node.op == "call_function")
    found.pop(UNKNOWN, None)
    return tuple(found)


def _prepare(regions: tuple[ClaimedRegion, ...]) -> None:
    """Start compiling regions in the background while Inductor compiles the rest. Interpreted kernels do not need it."""
    for region in {r.part.key: r for r in regions}.values():
        where = region.part.outputs[0].meta["val"].device
        if where.type != "cuda":
            continue
        buffers = frozenset(b.name for b in region.program.buffers)
        try:
            Kernels(region.optimized, f"region {region.id}").prepare(region.bindings, where, buffers)
        except Exception as error:
            _LOG.debug("region %s could not be compiled ahead", region.id, exc_info=error)


def _log_outcome(claimed: Claimed, took: float) -> None:
    """Write the outcome to the log, and to torch's structured trace together with Programs and kernels."""
    rows = [f"{claimed.phase} graph: {len(claimed.regions)} regions claimed, {len(claimed.declined)} declined, {took:.2f} s"]
    rows += [
        f"  {r.id}: {r.predicted_us:.1f} us, Inductor {r.inductor_us:.1f} us, at {format_lines(r.lines)}" for r in claimed.regions
    ]
    rows += [f"  declined: {', '.join(each.ops)} at {format_lines(each.lines)}: {each.reason}" for each in claimed.declined]
    _LOG.info("%s", "\n".join(rows))
    compat.trace_artifact(f"onepass_{claimed.phase}_regions", lambda: "\n".join(rows) + "\n")
    for region in {r.id: r for r in claimed.regions}.values():
        compat.trace_artifact(f"onepass_region_{region.id}", partial(_full_text, region))


def _full_text(region: ClaimedRegion) -> str:
    """A region's Program, and the kernels that calls like the traced one run."""
    try:
        texts = [source.text for source in generate(region.plan)]
    except OnepassError as error:  # the region's first call has the same error and falls back to Inductor
        texts = [str(error)]
    return "\n\n".join([str(region.program), *texts])


# ---- copying and restoring graphs --------------------------------------------------------------------------------------------


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph with its own nodes."""
    copy = fx.Graph(tracer_cls=getattr(graph, "_tracer_cls", None))
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        made[node] = copy.node_copy(node, made.__getitem__)
    return copy


def _restore(graph: fx.Graph, before: fx.Graph) -> None:
    """Restore a graph from its copy, with new nodes."""
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    made: dict[fx.Node, fx.Node] = {}
    for node in before.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.lint()
