"""Change the IR of kernels: leave out a statement, or replace it. The printed text is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onepass import errors
from onepass.codegen import kernel_ir as ir
from onepass.codegen.emit import lower
from onepass.codegen.printer import Lowered
from onepass.codegen.source import Source
from onepass.plan.plan import Plan

Change = Callable[[ir.Statement], ir.Statement | tuple[ir.Statement, ...]]


def lowered(plan: Plan) -> list[Lowered]:
    """The kernels of a plan, in IR."""
    return [lower(k.kernel, k.schedule, plan.bindings, k.name, plan.device) for k in plan.kernels]


def rewritten(kernel: Lowered, change: Change) -> Lowered:
    """A kernel with a change applied to every statement, which must change it."""
    body = ir.rewrite(kernel.kernel.body, change)
    if body == kernel.kernel.body:
        raise ValueError("no statement was changed")
    return replace(kernel, kernel=replace(kernel.kernel, body=body))


def changed(kernel: Lowered, change: Change) -> Source:
    """The source of a kernel with a change applied to every statement."""
    return rewritten(kernel, change).source()


def first_changed(plan: Plan, change: Change) -> tuple[Source, ...]:
    """The sources of a plan, with its first kernel changed."""
    first, *rest = lowered(plan)
    return changed(first, change), *(each.source() for each in rest)


# ---- changes ---------------------------------------------------------------------------------------------------------------


def always(_: Any) -> bool:
    return True


def without(kind: type) -> Change:
    """Leave out all statements of a kind."""
    return lambda node: () if isinstance(node, kind) else node


def without_barriers(node: ir.Statement) -> ir.Statement | tuple[ir.Statement, ...]:
    """Leave out all CTA barriers, including those that free a slot."""
    match node:
        case ir.CtaBarrier():
            return ()
        case ir.Release():
            return ir.Fence()
        case _:
            return node


def fields(kind: type, when: Callable[[Any], bool] = always, **new: Any) -> Change:
    """Replace fields of the statements of a kind. A value that is a function is called with the statement."""

    def change(node: ir.Statement) -> ir.Statement:
        return _with(node, new) if isinstance(node, kind) and when(node) else node

    return change


def value_fields(kind: type, when: Callable[[Any], bool] = always, **new: Any) -> Change:
    """Replace fields of the values of a kind that statements compute."""

    def change(node: ir.Statement) -> ir.Statement:
        if not isinstance(node, ir.Assign | ir.SharedStore) or not isinstance(node.value, kind) or not when(node.value):
            return node
        return replace(node, value=_with(node.value, new))

    return change


def _with(node: Any, new: dict[str, Any]) -> Any:
    return replace(node, **{name: value(node) if callable(value) else value for name, value in new.items()})


def assigned(target: str, value: str) -> Change:
    """Assign another value to a name, everywhere."""
    return fields(ir.Assign, lambda node: node.targets == (target,), value=value)


def unassigned(target: str, value: str) -> Change:
    """Leave out the assignment of this value to a name."""
    return lambda node: () if node == ir.Assign((ir.Name(target),), value) else node


def behind(first: type, second: type) -> Change:
    """In loops over rows, move the first statement of one kind after the first of another."""

    def change(node: ir.Statement) -> ir.Statement:
        if not isinstance(node, ir.For) or node.index != "row":
            return node
        moved, after = (next(each for each in node.body if isinstance(each, kind)) for kind in (first, second))
        rest = [each for each in node.body if each is not moved]
        at = rest.index(after) + 1
        return replace(node, body=(*rest[:at], moved, *rest[at:]))

    return change


# Omissions in a kernel with a ring, and the errors by which the model detects them.
FORGOTTEN: list[tuple[Change, type[errors.OnepassError]]] = [
    (without(ir.Wait), errors.UseBeforeArrival),
    (without_barriers, errors.RefillBeforeDrain),
    (fields(ir.Wait, phase="0"), errors.WrongPhase),
    (assigned("prefetch_row", "row + 1"), errors.CopyLeftBehind),
    (without(ir.Invalidate), errors.BarrierLeftBehind),
]
