"""Ops with effects that must keep their order: random draws, writes, collectives, and calls to unknown code.

Rewriting a graph keeps two guarantees. Ordered ops keep their order, and no op moves across a write to memory that others
may read. An op not known to be free of effects counts as ordered.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

# Namespaces whose ops have only the effects that schema and tags declare. Any other op may count calls, communicate with
# other ranks, or draw random numbers.
_DECLARES_EFFECTS = frozenset({"aten", "prims", "onepass"})
_SEEDED = frozenset({"prims.inductor_lookup_seed", "prims.inductor_random", "prims.inductor_randint"})
# Higher-order ops that write only to their own memory. What they call may still draw random numbers or have other effects.
# fmt: off
_FUNCTIONAL = frozenset({"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional", "invoke_subgraph",
                         "cond", "while_loop", "while_loop_stack_output", "scan", "associative_scan", "map_impl",
                         "flex_attention", "flex_attention_backward", "run_and_save_rng_state", "run_with_rng_state",
                         "graphsafe_run_with_rng_state", "with_effects", "wrap", "wrap_activation_checkpoint",
                         "tag_activation_checkpoint", "wrap_with_autocast", "wrap_with_set_grad_enabled", "hints_wrapper",
                         "out_dtype", "foreach_map", "inline_asm_elementwise"})
# fmt: on


def writes(node: fx.Node) -> bool:
    """Whether a node may write to memory that others read."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return node.target.name() not in _FUNCTIONAL
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def is_ordered(node: fx.Node) -> bool:
    """Whether a node must keep its position relative to other ordered nodes."""
    if node.op != "call_function":
        return writes(node)
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return not _calls_region(node)
    if writes(node) or node.is_impure():
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False  # arithmetic on sizes
    return target.namespace not in _DECLARES_EFFECTS or torch.Tag.nondeterministic_seeded in target.tags or is_seeded(node)


def is_seeded(node: fx.Node) -> bool:
    """Whether a node turns a seed into random numbers. Run eagerly, it would draw other numbers than in Inductor."""
    return str(getattr(node.target, "overloadpacket", "")) in _SEEDED


def _calls_region(node: fx.Node) -> bool:
    """Whether a higher-order op calls a region compiled by onepass. Regions have no effects."""
    called = node.args[0] if node.args else None
    return isinstance(called, torch._ops.OpOverload) and called.namespace == "onepass"


def epochs(nodes: Iterable[fx.Node]) -> list[int]:
    """For each node, the number of writes up to and including it."""
    found, seen = [], 0
    for node in nodes:
        seen += writes(node)
        found.append(seen)
    return found


def used_across_write(node: fx.Node, epoch: dict[fx.Node, int]) -> bool:
    """Whether a node is used, on the other side of a write, by an op that could be in a region. The inputs of the node may have
    changed by then."""
    return any(user.op == "call_function" and not writes(user) and epoch[user] != epoch[node] for user in node.users)
