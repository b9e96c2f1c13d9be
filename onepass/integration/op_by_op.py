"""The rest of a graph run op by op, without Inductor's code generation: the setting rest="eager"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import compat
from ..capture.graph.effects import is_seeded
from ..capture.lowering.source import user_line
from ..errors import NoEagerKernel, SeededRandom
from .failure import describe_error, format_lines

# Inductor options. Its caches are useless, because it compiles nothing. Its seeded random ops need its code generation, so torch's
# own random ops replace them; AOTAutograd makes a backward that recomputes them draw the same numbers.
OPTIONS = {"force_disable_caches": True, "fallback_random": True}


def run_op_by_op(module: fx.GraphModule, inputs: Sequence[Any], *, is_inference: bool = False, **_: Any) -> Any:
    """Apply Inductor's passes to a graph, and ours, and return it as a function that runs op by op."""
    run = compat.run_without_codegen(module, inputs, is_inference, copy_overwritten_arguments)
    seeded = next((node for node in module.graph.nodes if is_seeded(node)), None)
    if seeded is not None:
        raise SeededRandom(op=seeded.target, lines=format_lines((user_line(seeded.stack_trace),)))

    def checked(args: list[Any]) -> Any:
        try:
            return run(args)
        except NotImplementedError as error:
            raise NoEagerKernel(error=describe_error(error)) from error

    checked._boxed_call = True  # type: ignore[attr-defined]  # as `run`: torch hands over its list of arguments
    return checked


def copy_overwritten_arguments(graph: fx.Graph) -> None:
    """Give each in-place op a copy of every other argument that lies in the memory it overwrites.

    Inductor's passes make ops in-place and may leave `x.index_put_(i, x)`: Inductor computes the second `x` anew, but torch's
    kernels refuse such calls, or read what they have just written.
    """
    for node in list(graph.nodes):
        written = _written_positions(node.target)
        overwritten = {_storage(node.args[k]) for k in written if k < len(node.args)} - {None}

        def apart(argument: fx.Node, node: fx.Node = node, overwritten: set[int | None] = overwritten) -> fx.Node:
            if _storage(argument) not in overwritten:
                return argument
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (argument,))
            copy.meta = dict(argument.meta)
            return copy

        if overwritten:
            node.args = tuple(a if k in written else fx.node.map_arg(a, apart) for k, a in enumerate(node.args))


def _storage(argument: Any) -> int | None:
    tensor = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return compat.storage_key(tensor) if isinstance(tensor, torch.Tensor) else None


def _written_positions(target: Any) -> frozenset[int]:
    """The arguments that an op of torch's own overwrites."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return frozenset()
    arguments = target._schema.arguments
    return frozenset(k for k, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
