"""The engine of rewrites: a draft of the new Program, and the rules applied to each of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

from ..errors import SimplifyTooLong
from .budget import Budget
from .expr import DType
from .monoid import MONOIDS
from .precision import feeds_discontinuity, may_be_approximate
from .program import Builder, Const, Index, Load, Node, Op, Program, Reduce, Result, Store, operands, with_operands

REWRITE_BUDGET = Budget("Rewriting a Program by rules", SimplifyTooLong, base=256, per_item=16)  # items: nodes


class Draft:
    """A Program being rewritten: the nodes rewritten so far."""

    def __init__(self, program: Program, rules: "tuple[Rule, ...]") -> None:
        self.program, self.rules = program, rules
        self.source = 0  # position of the node being rewritten in the original Program
        self.stored: set[int] = set()  # values that are stored to memory
        self._builder = Builder()
        self._dims: list[frozenset[str]] = []
        self._steps = REWRITE_BUDGET.steps(len(program.nodes))

    @property
    def nodes(self) -> list[Node]:
        return self._builder.nodes

    @cached_property
    def feeds_discontinuity(self) -> tuple[bool, ...]:
        """For each value of the original Program, whether it reaches a discontinuous op elementwise."""
        return feeds_discontinuity(self.program)

    @cached_property
    def may_be_approximate(self) -> tuple[bool, ...]:
        """For each value of the original Program, whether it may be approximate."""
        return may_be_approximate(self.program)

    def add(self, node: Node) -> int:
        """The position of `node` after applying the rules to it."""
        better = self._apply_rules(node)
        while better is not None:
            if isinstance(better, int):
                return better
            self._steps.spend()
            node, better = better, self._apply_rules(better)
        at = self._builder.add(node)
        if at == len(self._dims):
            self._dims.append(self._varies(node))
        return at

    def _apply_rules(self, node: Node) -> Node | int | None:
        """The result of the first rule that applies to a node."""
        return next((better for rule in self.rules if (better := rule(self, node)) is not None), None)

    def _varies(self, node: Node) -> frozenset[str]:
        own = frozenset[str]().union(*(self._dims[o] for o in operands(node)))
        match node:
            case Load(strides=strides):
                return own | {axis for axis, _ in strides}
            case Index(axes=axes):
                return own | set(axes)
            case Reduce(axes=axes):
                return own - set(axes)
            case _:
                return own

    def varies(self, at: int, axes: tuple[str, ...]) -> bool:
        """Whether a value varies over any of `axes`."""
        return not self._dims[at].isdisjoint(axes)

    def dtype(self, at: int) -> DType:
        """The type of a value."""
        match self.nodes[at]:
            case Load(buffer=name):
                return self.program.buffer[name].dtype
            case Const(dtype=dtype) | Index(dtype=dtype) | Op(dtype=dtype):
                return dtype
            case Reduce(args=args):
                return self.dtype(args[0])
            case Result(reduce=owner, k=k):
                node = self.nodes[owner]
                assert isinstance(node, Reduce)
                return MONOIDS[node.monoid].result_dtypes(self.dtype(owner))[k]
            case Store(value=stored):
                return self.dtype(stored)

    def op(self, at: int, *names: str) -> Op | None:
        """The op at a position, if it has one of these names."""
        node = self.nodes[at]
        return node if isinstance(node, Op) and node.name in names else None

    def number(self, at: int) -> float | int | bool | None:
        """The literal at a position, if it is one."""
        match self.nodes[at]:
            case Const(value=number, scale=1):
                return number
        return None


Rule: TypeAlias = Callable[[Draft, Node], "Node | int | None"]


def sweep(program: Program, rules: tuple[Rule, ...]) -> Program:
    """Apply the rules to all nodes in order. Nodes that a rule adds are rewritten too."""
    draft, new = Draft(program, rules), dict[int, int]()
    stored = {node.value for node in program.nodes if isinstance(node, Store)}
    for i, node in enumerate(program.nodes):
        draft.source = i
        new[i] = draft.add(with_operands(node, new))
        if i in stored:
            draft.stored.add(new[i])
    return replace(program, nodes=tuple(draft.nodes))
