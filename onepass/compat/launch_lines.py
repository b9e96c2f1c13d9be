"""Make Inductor's Python wrapper call a function directly for an op, instead of through torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def call_directly(op: Any, define: Callable[[str], tuple[str, str]]) -> bool:
    """Let Inductor's Python wrapper call a function for `op`, whose last argument is a text that is known at compile time.

    `define(text)` returns the name of the function, which takes the other arguments, and lines that define it at the top of the
    wrapper. Inductor plans memory and order as for any op. False if this torch lacks what that takes: then the op is dispatched.
    """
    try:
        from torch._inductor import lowering

        constraint = lowering.tag_to_layout_constraint(lowering.get_layout_constraint_tag(op))
        call = _node_class(define)
        if op not in lowering.lowerings:
            lowering.make_fallback(op, layout_constraint=constraint, warn=False)
        lowering.lowerings[op] = lambda *args, **kwargs: call.create(op, *args, **kwargs)
    except (ImportError, AttributeError, TypeError):
        return False
    return True


def _node_class(define: Callable[[str], tuple[str, str]]) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    class DirectCall(ir.FallbackKernel):  # type: ignore[misc, unused-ignore]  # Inductor's class is known at run time alone
        def codegen(self, wrapper: Any) -> None:
            """Write the call, and the definition of what it calls at the top."""
            given, named = self.unflatten_args(self.inputs, self.constant_args)
            if V.graph.cpp_wrapper or named or not isinstance(given[-1], str):
                super().codegen(wrapper)
                return
            name, lines = define(given[-1])
            root = wrapper
            while hasattr(root, "parent_wrapper"):  # that of a subgraph or partition has no header of its own
                root = root.parent_wrapper
            if lines not in root.header.getvalue():
                root.header.splice(lines)
            self.codegen_comment(wrapper)
            wrapper.writeline(f"{name}({', '.join(self.codegen_args()[:-1])})")

    return DirectCall
