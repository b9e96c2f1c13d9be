"""Program and its parts (Axis, Buffer, Load, Reduce, Store, ...): what to compute, independent of how.

A Program is an SSA list of nodes. A value has no shape, only the set of axes it varies over: a broadcast value has fewer axes, and
a permuted or reshaped tensor is a Load or Store with other strides. Operands are positions in the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from .expr import BOOL, DTYPES, I64, OPS, DType, result_dtype
from .monoid import MONOIDS
from .size import Bindings, Size, product, symbols, value


@dataclass(frozen=True, slots=True)
class Axis:
    """An atomic axis: no pass splits it or merges it with another."""

    name: str
    extent: Size


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor in memory. Inputs have the caller's layout; outputs have the layout that the traced graph specifies."""

    name: str
    dtype: DType
    role: str  # "input" | "output" | "temp"
    shape: tuple[Size, ...] = ()
    strides: tuple[Size, ...] = ()
    aligned: bool = True  # starts at a multiple of 16 bytes


Strides: TypeAlias = tuple[tuple[str, Size], ...]  # (axis name, stride in elements); zero strides are omitted


@dataclass(frozen=True, slots=True)
class Gather:
    """One looked-up coordinate of a Load: adds `stride * values[index]`, which must lie in [0, extent)."""

    index: int
    stride: Size
    extent: Size


@dataclass(frozen=True, slots=True)
class Load:
    """Read `buffer` at offset + sum(stride * axis index) + looked-up coordinates."""

    buffer: str
    strides: Strides
    offset: Size = 0
    indexed: tuple[Gather, ...] = ()
    src: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Const:
    """A literal. `scale` multiplies it by a size that may be known only at the call, as in a mean over a symbolic axis."""

    value: float | int | bool
    dtype: DType
    scale: Size = 1
    src: str = field(default="", compare=False)

    def __eq__(self, other: object) -> bool:
        """Compare by repr: NaN equals NaN, and -0.0 differs from 0.0."""
        return isinstance(other, Const) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, DType, Size]:
        return repr(self.value), self.dtype, self.scale


@dataclass(frozen=True, slots=True)
class Index:
    """The row-major position along `axes` (arange)."""

    axes: tuple[str, ...]
    dtype: DType = I64
    src: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Op:
    """An op of the op table, applied to earlier values. `dtype` is the type of the result."""

    name: str
    args: tuple[int, ...]
    dtype: DType
    src: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce `args` over `axes` with a monoid. Result nodes read its results."""

    monoid: str
    args: tuple[int, ...]
    axes: tuple[str, ...]
    src: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Result:
    """The k-th result of a Reduce."""

    reduce: int
    k: int
    src: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Store:
    """Write a value to `buffer`, which has the value's dtype."""

    buffer: str
    value: int
    strides: Strides
    offset: Size = 0
    src: str = field(default="", compare=False)


Node: TypeAlias = Load | Const | Index | Op | Reduce | Result | Store


def operands(node: Node) -> tuple[int, ...]:
    """The earlier values a node reads."""
    match node:
        case Load(indexed=indexed):
            return tuple(g.index for g in indexed)
        case Op(args=args) | Reduce(args=args):
            return args
        case Result(reduce=reduce):
            return (reduce,)
        case Store(value=stored):
            return (stored,)
        case _:
            return ()


@dataclass(frozen=True)
class Program:
    """Axes, buffers and an SSA list of nodes."""

    name: str
    axes: tuple[Axis, ...]
    buffers: tuple[Buffer, ...]
    nodes: tuple[Node, ...]

    @cached_property
    def axis(self) -> dict[str, Axis]:
        return {a.name: a for a in self.axes}

    @cached_property
    def buffer(self) -> dict[str, Buffer]:
        return {b.name: b for b in self.buffers}

    @cached_property
    def dims(self) -> tuple[frozenset[str], ...]:
        """The axes that each value varies over. For a Store, the axes that its value or its address varies over."""
        found: list[frozenset[str]] = []
        for node in self.nodes:
            own: frozenset[str] = frozenset()
            match node:
                case Load(strides=strides) | Store(strides=strides):
                    own = frozenset(a for a, _ in strides)
                case Index(axes=axes):
                    own = frozenset(axes)
                case _:
                    pass
            for operand in operands(node):
                own |= found[operand]
            if isinstance(node, Reduce):
                own -= frozenset(node.axes)
            found.append(own)
        return tuple(found)

    @cached_property
    def dtypes(self) -> tuple[DType, ...]:
        """The type of each value. A Reduce has the type of its first argument."""
        found: list[DType] = []
        for node in self.nodes:
            match node:
                case Load(buffer=name):
                    found.append(self.buffer[name].dtype)
                case Const(dtype=dtype) | Index(dtype=dtype):
                    found.append(dtype)
                case Op(name=name, args=args, dtype=dtype):
                    found.append(result_dtype(OPS[name], tuple(found[a] for a in args), dtype))
                case Reduce(args=args):
                    found.append(found[args[0]])
                case Result(reduce=reduce, k=k):
                    owner = self.nodes[reduce]
                    assert isinstance(owner, Reduce)
                    found.append(MONOIDS[owner.monoid].result_dtypes(found[owner.args[0]])[k])
                case Store(value=stored):
                    found.append(found[stored])
        return tuple(found)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that read each value."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for operand in dict.fromkeys(operands(node)):
                found[operand].append(i)
        return tuple(tuple(u) for u in found)

    def of(self, *kinds: type) -> Iterator[int]:
        """Positions of the nodes of the given types."""
        return (i for i, n in enumerate(self.nodes) if isinstance(n, kinds))

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """All symbols in the Program's sizes, sorted."""
        sizes: list[Size] = [axis.extent for axis in self.axes]
        for buffer in self.buffers:
            sizes += [*buffer.shape, *buffer.strides]
        for node in self.nodes:
            match node:
                case Load(strides=strides, offset=offset, indexed=indexed):
                    sizes += [offset, *(s for _, s in strides), *(s for g in indexed for s in (g.stride, g.extent))]
                case Store(strides=strides, offset=offset):
                    sizes += [offset, *(s for _, s in strides)]
                case Const(scale=scale):
                    sizes.append(scale)
                case _:
                    pass
        return tuple(sorted({name for size in sizes for name in symbols(size)}))

    def extent(self, axes: "tuple[str, ...] | frozenset[str]") -> Size:
        """The product of the extents of some axes."""
        return product([self.axis[a].extent for a in sorted(axes)])

    def points(self, axes: "tuple[str, ...] | frozenset[str]", bindings: Bindings) -> int:
        """The product of the extents of some axes, as a number."""
        return value(self.extent(axes), bindings)

    def is_empty(self, bindings: Bindings) -> bool:
        """Whether some axis has extent 0. There is then nothing to iterate over, though empty reductions still have results."""
        return any(value(axis.extent, bindings) == 0 for axis in self.axes)

    def __str__(self) -> str:
        from .text import show  # `text` imports this module

        return show(self)


class Builder:
    """Collects the nodes of a new Program, and deduplicates equal nodes."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._seen: dict[Node, int] = {}

    def add(self, node: Node) -> int:
        """The position of `node`, which is added if new. Stores are never deduplicated."""
        if not isinstance(node, Store) and node in self._seen:
            return self._seen[node]
        self.nodes.append(node)
        self._seen[node] = len(self.nodes) - 1
        return len(self.nodes) - 1


def with_operands(node: Node, new: "dict[int, int] | list[int] | tuple[int, ...]") -> Node:
    """A copy of a node with its operands mapped through `new`."""
    match node:
        case Load(indexed=indexed) if indexed:
            return replace(node, indexed=tuple(replace(g, index=new[g.index]) for g in indexed))
        case Op(name, args, dtype, src):  # without replace(): this dominates planning time, and replace() is slower
            return Op(name, tuple([new[a] for a in args]), dtype, src)
        case Reduce(monoid, args, axes, src):
            return Reduce(monoid, tuple([new[a] for a in args]), axes, src)
        case Result(reduce, k, src):
            return Result(new[reduce], k, src)
        case Store(buffer, stored, strides, offset, src):
            return Store(buffer, new[stored], strides, offset, src)
        case _:
            return node


def prune(program: Program) -> Program:
    """Remove dead code: nodes that no Store depends on, then unused axes and temporaries."""
    live: set[int] = set()
    for i in reversed(range(len(program.nodes))):
        if isinstance(program.nodes[i], Store) or i in live:
            live.add(i)
            live |= set(operands(program.nodes[i]))
    builder = Builder()
    new: dict[int, int] = {}
    for i, node in enumerate(program.nodes):
        if i in live:
            new[i] = builder.add(with_operands(node, new))
    used = {a for n in builder.nodes if isinstance(n, (Load, Store)) for a, _ in n.strides}
    used |= {a for n in builder.nodes if isinstance(n, (Index, Reduce)) for a in n.axes}
    touched = {n.buffer for n in builder.nodes if isinstance(n, (Load, Store))}
    return Program(
        program.name,
        tuple(a for a in program.axes if a.name in used),
        tuple(b for b in program.buffers if b.role != "temp" or b.name in touched),
        tuple(builder.nodes),
    )


# fmt: off
__all__ = ["Axis", "BOOL", "Bindings", "Buffer", "Builder", "Const", "DTYPES", "DType", "Gather", "Index", "Load", "Node",
           "Op", "Program", "Reduce", "Result", "Size", "Store", "Strides", "operands", "prune", "with_operands"]
# fmt: on
