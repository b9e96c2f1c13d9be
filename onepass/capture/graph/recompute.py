"""Chooses values that the backward recomputes instead of loading what the forward saved, and rewrites both graphs.

AOTAutograd partitions the joint graph before fusion. It saves every sum of a residual stream, although a kernel that already
reads the summands can recompute the sum for free. Here a saved value is dropped and recomputed in the backward where that
reduces memory traffic:

    forward   one write less, unless a later kernel of the forward reads the value too
    backward  one read less in every kernel that reads it, one more for each operand that the kernel does not read yet

An operand may also be a value that is not saved yet but that the forward writes anyway for a later kernel, such as a norm's
input that the residual stream continues from. It is then saved in place of the dropped value.

Kernels are not known at this point. Two nodes are assumed to share a kernel if the same number of unfusible kernels (matmuls,
attention) precedes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...constants import SHIPPED
from ..lowering.pointwise import POINTWISE
from ..lowering.schema import op_name
from ..lowering.views import VIEWS
from .node_kinds import NodeKind, classify_nodes, nbytes, tensors_of

MAX_OPS = SHIPPED.claim.recomputed_ops
MIN_BYTES = SHIPPED.claim.recompute_bytes
Level = int | fx.Node  # number of unfusible kernels before a node, or the node itself if it reads the value alone
Levels = frozenset[Level]


@dataclass(frozen=True)
class Recomputed:
    """A value that is no longer saved."""

    name: str
    nbytes: int
    traffic_saved: int  # bytes that forward and backward together no longer move


def recompute(
    forward: fx.Graph, backward: fx.Graph, outputs: int, device: torch.device, min_bytes: int = MIN_BYTES
) -> tuple[Recomputed, ...]:
    """Make the backward recompute values where that is cheaper. The first `outputs` results of the forward are the user's."""
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
    """Saved values in the order the forward computes them, with the backward inputs that receive them."""
    results = _results(forward)[outputs:]
    inputs = [node for node in backward.nodes if node.op == "placeholder"]
    by_node = {a: b for a, b in zip(results, inputs, strict=False) if isinstance(a, fx.Node) and a.name == b.name}
    return {node: by_node[node] for node in forward.nodes if node in by_node}


class _Rewriter:
    """Rewrites both graphs while saved values are dropped one by one, in the order the forward computes them."""

    def __init__(
        self, forward: fx.Graph, backward: fx.Graph, saved: dict[fx.Node, fx.Node], users: frozenset[Any], device: torch.device
    ) -> None:
        self.users = users  # results returned to the user, who may modify them
        self.replacements: dict[str, fx.Node] = {}  # name of a dropped value -> the value saved in its place
        self.in_backward = dict(saved)  # forward node -> backward node: an input, or recomputed
        # forward values that the backward reads to obtain each value
        self.origins: dict[fx.Node, tuple[fx.Node, ...]] = {node: (node,) for node in saved}
        self.kinds = classify_nodes(forward, device, {})
        self.level = _levels(forward, self.kinds)
        self.rank = {node: i for i, node in enumerate(forward.nodes)}
        of_inputs = _readers(backward, classify_nodes(backward, device, {}))
        self.reads = {node: of_inputs[given] for node, given in saved.items()}
        self.order = {node: i for i, node in enumerate(backward.nodes)}

    def drop(self, node: fx.Node, min_bytes: int) -> Recomputed | None:
        """Recompute a saved value if that reduces traffic."""
        if node in self.users or _must_be_saved(node) or not tensors_of(node) or not self._is_read_by_kernels(node):
            return None
        from_saved = self._recompute_from(node, self._chain(node), min_bytes)
        return from_saved or self._recompute_from(node, self._chain(node, nbytes(node)), min_bytes)

    def _is_read_by_kernels(self, node: fx.Node) -> bool:
        return bool(self.reads[node]) and all(isinstance(level, int) for level in self.reads[node])

    def _recompute_from(self, node: fx.Node, chain: list[fx.Node], min_bytes: int) -> Recomputed | None:
        """Recompute a value with these ops if that reduces traffic."""
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
        """The ops, in order, that compute a value from saved values; empty if there are none. With a `limit`, also from values
        of at most that many bytes that are written anyway."""
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
        """Whether a value can be saved in place of a dropped one of `limit` bytes: the forward writes it to memory anyway."""
        policy = getattr(node.meta.get("recompute"), "name", "SAVE")  # activation checkpointing's policy
        return (
            self.kinds[node] is NodeKind.FUSIBLE
            and len(tensors_of(node)) == 1
            and nbytes(node) <= limit
            and node not in self.users
            and policy.endswith("SAVE")
            and self._is_written_anyway(node)
        )

    def _save_replacement(self, node: fx.Node, replacement: fx.Node) -> None:
        """Give the backward an input for a value that is saved in place of a dropped one."""
        old = self.in_backward[node]
        with old.graph.inserting_before(old):
            given = old.graph.placeholder(replacement.name)
        given.meta = {**replacement.meta, **{key: old.meta[key] for key in ("desc",) if key in old.meta}}
        self.order[given] = self.order[old]
        self.in_backward[replacement], self.origins[replacement], self.reads[replacement] = given, (replacement,), frozenset()
        self.replacements[node.name] = replacement

    def _is_written_anyway(self, node: fx.Node) -> bool:
        """Whether the forward writes a value regardless, because a kernel other than the one computing it reads it."""
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
        """Copy a chain of ops into the backward, before the first use of the value, and drop the backward's input."""
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
        """Move an operand and what computes it before the node that now needs it."""
        if operand.op != "placeholder" and self.order[operand] > self.order[first]:
            for needed in operand.all_input_nodes:
                self._move_before(needed, first)
            first.prepend(operand)
            self.order[operand] = self.order[first]


def _must_be_saved(node: fx.Node) -> bool:
    """Whether an activation checkpointing policy of the user requires saving the value."""
    return getattr(node.meta.get("recompute"), "name", "") == "MUST_SAVE"


def _is_pointwise(node: fx.Node) -> bool:
    return node.op == "call_function" and (op_name(node.target) in POINTWISE or op_name(node.target) in VIEWS)


def _levels(graph: fx.Graph, of: Mapping[fx.Node, NodeKind]) -> dict[fx.Node, int]:
    """For each node, the largest number of unfusible kernels on a path to it."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found[node] = max((found[n] + _is_own_kernel(n, of) for n in node.all_input_nodes), default=0)
    return found


def _is_own_kernel(node: fx.Node, of: Mapping[fx.Node, NodeKind]) -> bool:
    return node.op == "call_function" and of[node] is NodeKind.EXTERN and bool(tensors_of(node))


def _readers(graph: fx.Graph, of: Mapping[fx.Node, NodeKind]) -> dict[fx.Node, Levels]:
    """For every backward node computed only from saved values, the levels of the kernels that read it."""
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
    """Remove dropped values from the forward's results, or return their replacements."""
    output = forward.output_node()
    before = _results(forward)
    names = [getattr(result, "name", "") if i >= outputs else "" for i, result in enumerate(before)]
    stays = [name not in dropped or name in replacements for name in names]
    described = output.meta.get("desc")
    if isinstance(described, (list, tuple)) and len(described) == len(before):
        output.meta["desc"] = type(described)(d for d, stay in zip(described, stays, strict=True) if stay)
    output.args = (tuple(replacements.get(name, result) for name, result, stay in zip(names, before, stays, strict=True) if stay),)
