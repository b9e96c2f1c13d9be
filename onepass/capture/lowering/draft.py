"""A Program under construction, over atoms that may still be split or unified.

Nodes are those of the ir, with atoms in place of axes. `finish` resolves every atom to its final axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...errors import CaptureTooLong
from ...ir.budget import Budget
from ...ir.expr import BOOL, F32, I64, OPS, DType, as_dtype, result_dtype
from ...ir.monoid import MONOIDS
from ...ir.program import (
    Axis,
    Buffer,
    Builder,
    Const,
    Index,
    Load,
    Node,
    Op,
    Program,
    Reduce,
    Result,
    Store,
    Strides,
    operands,
    prune,
    with_operands,
)
from ...ir.size import Size, mul, product
from .axes import Atoms, Dim, Dims

DRAFT_BUDGET = Budget("Building a Program (one step per node)", CaptureTooLong, base=8192)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor value: the node that computes one element, and the atoms of each dim."""

    node: int
    dims: Dims


class Draft:
    """The nodes and atoms of a growing Program. Equal nodes are stored once; dtype and free atoms are known from the start."""

    def __init__(self) -> None:
        self.atoms = Atoms()
        self.src = ""  # line of user code for the nodes added next
        self._builder = Builder()
        self._dtypes: list[DType] = []
        self._free: list[frozenset[str]] = []
        self._steps = DRAFT_BUDGET.steps()

    @property
    def nodes(self) -> list[Node]:
        return self._builder.nodes

    def dtype(self, node: int) -> DType:
        """The dtype of a value."""
        return self._dtypes[node]

    def free(self, node: int) -> frozenset[str]:
        """The final atoms that a value varies over."""
        return frozenset(self.atoms.resolve(self._free[node]))

    def load(self, buffer: Buffer, strides: Strides) -> int:
        """Load an element of an input."""
        return self.add(Load(buffer.name, tuple((a, s) for a, s in strides if s != 0)), buffer.dtype)

    def const(self, value: float | int | bool, dtype: DType, scale: Size = 1) -> int:
        """A literal, rounded or wrapped to `dtype`. Narrow floats are made in fp32 and cast."""
        if dtype.is_narrow_float:
            return self.cast(self.const(value, F32, scale), dtype)
        if isinstance(scale, int) and scale != 1:
            value, scale = value * scale, 1
        return self.add(Const(as_dtype(value, dtype), dtype, scale), dtype)

    def index(self, dim: Dim) -> int:
        """The position along a dim."""
        return self.add(Index(dim), I64) if dim else self.const(0, I64)

    def op(self, name: str, *args: int) -> int:
        """Apply an op of the op table. For casts, use `cast`."""
        dtype = result_dtype(OPS[name], tuple(self.dtype(a) for a in args))
        return self.add(Op(name, args, dtype), dtype)

    def cast(self, node: int, dtype: DType) -> int:
        """Cast a value. A cast to bool tests for nonzero."""
        own = self.dtype(node)
        if own == dtype:
            return node
        if dtype is BOOL:
            wide = self.cast(node, F32) if own.is_narrow_float else node
            return self.op("ne", wide, self.const(0, self.dtype(wide)))
        return self.add(Op("cast", (node,), dtype), dtype)

    def reduce(self, monoid: str, args: tuple[int, ...], dim: Dim) -> tuple[int, ...]:
        """Reduce values over the atoms of a dim. Returns all results of the reduction."""
        node = self.add(Reduce(monoid, args, dim), self.dtype(args[0]))
        dtypes = MONOIDS[monoid].result_dtypes(self.dtype(args[0]))
        return tuple(self.add(Result(node, k), dtype) for k, dtype in enumerate(dtypes))

    def tensor(self, node: int, dims: Dims) -> Tensor:
        """A value with dims. Its atoms index one value together, so they are marked distinct."""
        self.atoms.keep_distinct(a for dim in dims for a in dim)
        return Tensor(node, dims)

    def dims(self, tensor: Tensor) -> Dims:
        """A tensor's dims in final atoms."""
        return tuple(self.atoms.resolve(dim) for dim in tensor.dims)

    def add(self, node: Node, dtype: DType) -> int:
        """Add a node, or find an equal one. Returns its position."""
        position = self._builder.add(node if node.src else replace(node, src=self.src))
        if position == len(self._dtypes):
            self._steps.spend()
            self._dtypes.append(dtype)
            self._free.append(self._free_of(node))
        return position

    def _free_of(self, node: Node) -> frozenset[str]:
        """The atoms a new node varies over. Atoms it reduces over are live while it is computed, so they are distinct too."""
        own: Iterable[str] = ()
        match node:
            case Load(strides=strides):
                own = (a for a, _ in strides)
            case Index(axes=axes) | Reduce(axes=axes):
                own = axes
            case _:
                pass
        alive = frozenset(own).union(*(self._free[o] for o in operands(node)))
        self.atoms.keep_distinct(alive)
        if isinstance(node, Reduce):
            folded = frozenset(self.atoms.resolve(node.axes))
            return frozenset(self.atoms.resolve(alive)) - folded
        return alive

    def strides(self, dims: Dims, strides: Iterable[Size]) -> Strides:
        """Strides per atom, from strides per dim."""
        found: list[tuple[str, Size]] = []
        for dim, stride in zip(dims, strides, strict=True):
            found += [(a, mul(stride, step)) for a, step in zip(dim, self.steps(dim), strict=True)]
        return tuple((a, s) for a, s in found if s != 0)

    def steps(self, dim: Dim) -> tuple[Size, ...]:
        """For each atom of a dim, the distance between neighboring positions, counted in positions of the dim."""
        return tuple(product([self.atoms.extent(a) for a in dim[i + 1 :]]) for i in range(len(dim)))

    def finish(self, name: str, buffers: tuple[Buffer, ...]) -> Program:
        """The finished Program over final axes. Inputs that are not read are dropped."""
        builder, new, names = Builder(), list[int](), dict[str, str]()
        for node in self.nodes:
            new.append(builder.add(with_operands(self._resolved(node, names), new)))
        axes = tuple(Axis(axis, self.atoms.extent(atom)) for atom, axis in names.items())
        program = prune(Program(name, axes, buffers, tuple(builder.nodes)))
        read = {n.buffer for n in program.nodes if isinstance(n, Load)}
        return replace(program, buffers=tuple(b for b in program.buffers if b.role != "input" or b.name in read))

    def _resolved(self, node: Node, names: dict[str, str]) -> Node:
        """A node over the axes its atoms have become. `names` collects the axes in order of appearance."""

        def axis(atom: str) -> str:
            return names.setdefault(atom, f"d{len(names)}")

        match node:
            case Load(strides=strides) | Store(strides=strides):
                final = ((a, s) for atom, stride in strides for a, s in self.final_strides(atom, stride))
                return replace(node, strides=tuple((axis(a), s) for a, s in final if s != 0))
            case Index(axes=axes) | Reduce(axes=axes):
                return replace(node, axes=tuple(axis(a) for a in self.atoms.resolve(axes)))
            case _:
                return node

    def final_strides(self, atom: str, stride: Size) -> Strides:
        """A stride along an atom as strides along its final atoms."""
        parts = self.atoms.final(atom)
        return tuple((a, mul(stride, step)) for a, step in zip(parts, self.steps(parts), strict=True))
