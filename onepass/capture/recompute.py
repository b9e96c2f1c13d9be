"""Values that the forward graph saves for the backward, and which of them the backward had better compute again.

AOTAutograd splits the joint graph before anything is fused. It saves every sum of a residual stream, although a sum of saved
values costs nothing in a kernel that reads those values anyway. Here such a value is dropped from what is saved and computed
again, where that moves fewer bytes:

    forward   one write less, unless a later kernel of the forward reads the value too
    backward  one read less in every kernel that reads it, one more for each part that the kernel does not read yet

A part may also be a value that is not saved so far but that the forward writes anyway, for a later kernel: a norm's input, say,
which the residual stream goes on from, instead of the normed row. It is then saved in the dropped value's place.

Kernels are not known yet either. Nodes are taken to share one if as many kernels that cannot be fused (matmuls, attention) lie
before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .node_kinds import NodeKind, kinds, nbytes, tensors_of
from .pointwise import POINTWISE
from .schema import op_name
from .views import VIEWS

MAX_OPS = 8  # of arithmetic to compute a value again: more would crowd the registers of the kernel that does
MIN_BYTES = 1 << 20  # that a change must save to be made: fewer are moved in less time than a kernel takes to start
Level = int | fx.Node  # kernels before a node; or the node that reads for itself
Levels = frozenset[Level]


@dataclass(frozen=True)
class Recomputed:
    """A value that is no longer saved."""

    name: str
    nbytes: int
    traffic_saved: int  # bytes that forward and backward together no longer move


def recompute(forward: fx.Graph, backward: fx.Graph, outputs: int, device: torch.device,
              min_bytes: int = MIN_BYTES) -> tuple[Recomputed, ...]:
    """Change both graphs so that the backward computes again what is cheaper so. The first `outputs` results are the user's."""
    saved = _saved(forward, backward, outputs)
    rewriter = _Rewriter(forward, backward, saved, frozenset(_results(forward)[:outputs]), device)
    recomputed = tuple(result for node in saved if (result := rewriter.drop(node, min_bytes)) is not None)
    if recomputed:
        _change_outputs(forward, {result.name for result in recomputed}, rewriter.replacements, outputs)
        forward.lint()
        backward.lint()
    return recomputed


def _results(forward: fx.Graph) -> list[Any]:
    return list(forward.output_node().args[0])  # type: ignore[arg-type]


def _saved(forward: fx.Graph, backward: fx.Graph, outputs: int) -> dict[fx.Node, fx.Node]:
    """What is saved, in the order the forward makes it, with the input of the backward that takes it."""
    results = _results(forward)[outputs:]
    inputs = [node for node in backward.nodes if node.op == "placeholder"]
    by_node = {a: b for a, b in zip(results, inputs, strict=False) if isinstance(a, fx.Node) and a.name == b.name}
    return {node: by_node[node] for node in forward.nodes if node in by_node}


class _Rewriter:
    """Both graphs, while values are dropped one by one in the order the forward makes them."""

    def __init__(self, forward: fx.Graph, backward: fx.Graph, saved: dict[fx.Node, fx.Node], users: frozenset[Any],
                 device: torch.device) -> None:
        self.users = users  # what is the user's own, who may change it
        self.replacements: dict[str, fx.Node] = {}  # by the name of a value that is no longer saved, what is saved in its place
        self.in_backward = dict(saved)  # of the forward -> as the backward has it: an input, or computed again
        self.origins: dict[fx.Node, tuple[fx.Node, ...]] = {node: (node,) for node in saved}  # what the backward reads to have it
        self.kinds = kinds(forward, device, {})
        self.level = _levels(forward, self.kinds)
        self.rank = {node: i for i, node in enumerate(forward.nodes)}
        of_inputs = _readers(backward, kinds(backward, device, {}))
        self.reads = {node: of_inputs[given] for node, given in saved.items()}
        self.order = {node: i for i, node in enumerate(backward.nodes)}

    def drop(self, node: fx.Node, min_bytes: int) -> Recomputed | None:
        """Compute a saved value again, if that moves fewer bytes."""
        if node in self.users or _must_be_saved(node) or not tensors_of(node) or not self._is_read_by_kernels(node):
            return None
        return self._recompute_from(node, self._chain(node), min_bytes) or self._recompute_from(node, self._chain(node, nbytes(node)), min_bytes)

    def _is_read_by_kernels(self, node: fx.Node) -> bool:
        return bool(self.reads[node]) and all(isinstance(level, int) for level in self.reads[node])

    def _recompute_from(self, node: fx.Node, chain: list[fx.Node], min_bytes: int) -> Recomputed | None:
        """Compute a value again by these ops, if that moves fewer bytes."""
        levels = self.reads[node]
        ends = dict.fromkeys(n for op in chain for n in op.all_input_nodes if n not in chain)
        unsaved = [n for n in ends if n not in self.in_backward]
        operands = dict.fromkeys(p for n in ends for p in self.origins.get(n, (n,)))
        moved = nbytes(node) * (len(levels) + (not self._is_written_anyway(node)))
        moved -= sum(nbytes(operand) * len(levels - self.reads.get(operand, frozenset())) for operand in operands)
        if not chain or len(unsaved) > 1 or moved < min_bytes:
            return None
        for replacement in unsaved:
            self._save_replacement(node, replacement)
        self._replace(node, chain)
        self.origins[node] = tuple(operands)
        for operand in operands:
            self.reads[operand] |= levels
        return Recomputed(node.name, nbytes(node), moved)

    def _chain(self, node: fx.Node, limit: int = 0) -> list[fx.Node]:
        """The ops to this value from saved ones, in order, or also from others that are written anyway and of at most `room` bytes;
        none where it cannot be had from them alone."""
        chain: set[fx.Node] = set()
        pending = [node]
        while pending:
            op = pending.pop()
            if op in chain or op is not node and (op in self.in_backward or limit and self._can_replace(op, limit)):
                continue
            chain.add(op)
            pending += op.all_input_nodes
            if not _is_pointwise(op) or sum(self.kinds[n] is NodeKind.FUSIBLE for n in chain) > MAX_OPS:
                return []
        return sorted(chain, key=self.rank.__getitem__)

    def _can_replace(self, node: fx.Node, limit: int) -> bool:
        """Whether this value may be saved, in the memory that it has anyway, where something of `room` bytes no longer is."""
        policy = getattr(node.meta.get("recompute"), "name", "SAVE")  # of activation checkpointing
        return (self.kinds[node] is NodeKind.FUSIBLE and len(tensors_of(node)) == 1 and nbytes(node) <= limit and node not in self.users
                and policy.endswith("SAVE") and self._is_written_anyway(node))

    def _save_replacement(self, node: fx.Node, replacement: fx.Node) -> None:
        """Make room in the backward for another value in the place of a saved one."""
        old = self.in_backward[node]
        with old.graph.inserting_before(old):
            given = old.graph.placeholder(replacement.name)
        given.meta = {**replacement.meta, **{key: old.meta[key] for key in ("desc",) if key in old.meta}}
        self.order[given] = self.order[old]
        self.in_backward[replacement], self.origins[replacement], self.reads[replacement] = given, (replacement,), frozenset()
        self.replacements[node.name] = replacement

    def _is_written_anyway(self, node: fx.Node) -> bool:
        """Whether the forward writes this value in any case, because a kernel other than the one that makes it needs it."""
        pending = list(node.users)
        while pending:
            user = pending.pop()
            if user.op == "output":
                continue
            if self.kinds[user] is NodeKind.EXTERN or self.level[user] > self.level[node]:
                return True
            if self.kinds[user] is NodeKind.FREE:
                pending += user.users
        return False

    def _replace(self, node: fx.Node, chain: list[fx.Node]) -> None:
        """The ops of a chain in the backward, in front of the first that uses the value."""
        old = self.in_backward[node]
        first = min(old.users, key=self.order.__getitem__)
        copies: dict[fx.Node, fx.Node] = {}
        for op in chain:
            for operand in op.all_input_nodes:
                if operand not in copies:
                    self._move_before(self.in_backward[operand], first)
            with old.graph.inserting_before(first):
                copies[op] = old.graph.node_copy(op, lambda n: copies[n] if n in copies else self.in_backward[n])
            self.order[copies[op]] = self.order[first]
        old.replace_all_uses_with(copies[node])
        old.graph.erase_node(old)
        self.in_backward[node] = copies[node]

    def _move_before(self, operand: fx.Node, first: fx.Node) -> None:
        """Move what computes a part to the front of where it is needed now."""
        if operand.op != "placeholder" and self.order[operand] > self.order[first]:
            for needed in operand.all_input_nodes:
                self._move_before(needed, first)
            first.prepend(operand)
            self.order[operand] = self.order[first]


def _must_be_saved(node: fx.Node) -> bool:
    """Whether the user said so, by a policy of activation checkpointing."""
    return getattr(node.meta.get("recompute"), "name", "") == "MUST_SAVE"


def _is_pointwise(node: fx.Node) -> bool:
    return node.op == "call_function" and (op_name(node.target) in POINTWISE or op_name(node.target) in VIEWS)


def _levels(graph: fx.Graph, of: Mapping[fx.Node, NodeKind]) -> dict[fx.Node, int]:
    """How many kernels that stay alone lie before each node, on the longest way."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found[node] = max((found[n] + _is_own_kernel(n, of) for n in node.all_input_nodes), default=0)
    return found


def _is_own_kernel(node: fx.Node, of: Mapping[fx.Node, NodeKind]) -> bool:
    return node.op == "call_function" and of[node] is NodeKind.EXTERN and bool(tensors_of(node))


def _readers(graph: fx.Graph, of: Mapping[fx.Node, NodeKind]) -> dict[fx.Node, Levels]:
    """For every node that follows from saved values alone, the levels of the kernels that read it."""
    level = _levels(graph, of)
    given = {node for node in graph.nodes if node.op == "placeholder" and not str(node.target).startswith("tangents")}
    for node in graph.nodes:
        if node.op == "call_function" and of[node] is not NodeKind.EXTERN and all(n in given for n in node.all_input_nodes):
            given.add(node)
    found: dict[fx.Node, Levels] = {}
    for node in reversed(list(graph.nodes)):
        reads: set[Level] = set()
        for user in node.users:
            if user in given:
                reads |= found[user]
            else:
                reads.add(user if user.op == "output" or of[user] is NodeKind.EXTERN else level[user])
        found[node] = frozenset(reads)
    return found


def _change_outputs(forward: fx.Graph, dropped: set[str], replacements: Mapping[str, fx.Node], outputs: int) -> None:
    """Take values off what the forward gives, or give others in their place."""
    output = forward.output_node()
    before = _results(forward)
    names = [getattr(result, "name", "") if i >= outputs else "" for i, result in enumerate(before)]
    stays = [name not in dropped or name in replacements for name in names]
    described = output.meta.get("desc")
    if isinstance(described, (list, tuple)) and len(described) == len(before):
        output.meta["desc"] = type(described)(d for d, stay in zip(described, stays, strict=True) if stay)
    output.args = (tuple(replacements.get(name, result) for name, result, stay in zip(names, before, stays, strict=True) if stay),)
