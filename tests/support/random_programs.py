"""Small legal Programs with inputs to run them on: hypothesis strategies, and a helper for handwritten ones.

Results must not depend on rounding: values stay within a known bound and away from poles, and ops that decide between
two results (comparisons, argmax) read only values that are exact in every precision: loaded ones, indices, integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from onepass.ir.expr import BOOL, DTYPES, F32, I64, DType
from onepass.ir.program import (
    Axis,
    Buffer,
    Builder,
    Const,
    Gather,
    Index,
    Load,
    Op,
    Program,
    Reduce,
    Result,
    Store,
    operands,
    prune,
)
from onepass.ir.size import Bindings, Size, mul, sym, value
from onepass.ir.text import parse

EXTENTS = (1, 2, 3, 7, 8, 13, 16, 17, 33)
MOST_POINTS = 4096
INPUT_DTYPES = tuple(DTYPES[n] for n in ("f32", "bf16", "f16", "i64", "bool"))
INPUT_BOUND = 3.0
MOST = 8.0  # floats are scaled back below this
UNARY = ("neg", "abs", "tanh", "sigmoid", "sin", "cos", "erf", "exp", "expm1", "rsqrt", "sqrt", "log", "log1p", "reciprocal")


class Case(NamedTuple):
    """A Program, tensors for it (CPU, by seed), and the values of its symbols."""

    program: Program
    make_inputs: Callable[[int], dict[str, torch.Tensor]]
    bindings: Bindings


@dataclass(frozen=True)
class Val:
    """A value of the Program being made."""

    at: int
    dtype: DType
    dims: frozenset[str]
    bound: float  # no element is larger in magnitude
    exact: bool  # the same in every precision


@dataclass(frozen=True)
class Input:
    """A tensor to make: `lead` elements of its storage precede it."""

    buffer: Buffer
    lead: int


@st.composite
def programs(draw: st.DrawFn, symbolic: bool = True) -> Case:
    """Programs of 1-3 axes, 1-4 inputs and 1-4 reductions; the first axis may be symbolic."""
    extents = draw(st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=3).filter(lambda e: prod(e) <= MOST_POINTS))
    rows: Size = sym("s0") if symbolic and draw(st.booleans()) else extents[0]
    axes = tuple(Axis(name, extent) for name, extent in zip("abc", [rows, *extents[1:]], strict=False))
    maker = Maker(draw, axes, {"s0": extents[0]})
    for _ in range(draw(st.integers(1, 4))):
        maker.input()
    for _ in range(draw(st.integers(1, 4))):
        maker.pointwise(draw(st.integers(0, 3)))
        maker.reduce()
    maker.pointwise(draw(st.integers(1, 4)))
    maker.outputs_of_reductions()
    for _ in range(draw(st.integers(1, 2))):
        maker.output(lambda v: True)
    return maker.case()


class Maker:
    """Builds a Program while drawing its parts."""

    def __init__(self, draw: st.DrawFn, axes: tuple[Axis, ...], bindings: Bindings) -> None:
        self.draw, self.axes, self.bindings = draw, axes, bindings
        self.extent = {a.name: a.extent for a in axes}
        self.builder = Builder()
        self.inputs: list[Input] = []
        self.outputs: list[Buffer] = []
        self.values: list[Val] = []
        self.reduced: set[int] = set()

    def case(self) -> Case:
        buffers = (*(i.buffer for i in self.inputs), *self.outputs)
        program = prune(Program("made", self.axes, buffers, tuple(self.builder.nodes)))
        bindings = {name: self.bindings[name] for name in program.symbols}
        specs = tuple(self.inputs)
        return Case(program, lambda seed: {s.buffer.name: tensor(s, bindings, seed + i) for i, s in enumerate(specs)}, bindings)

    # Drawing

    def one(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def pick(self, accept: Callable[[Val], bool]) -> Val | None:
        """Some value that fits; later ones are more likely."""
        fitting = [v for v in self.values if accept(v)]
        return self.draw(st.sampled_from(fitting[::-1])) if fitting else None

    def subset(self, names: list[str]) -> tuple[str, ...]:
        """A nonempty subset, in any order."""
        return tuple(self.draw(st.permutations(names)))[: self.draw(st.integers(1, len(names)))]

    # Memory

    def layout(self, order: list[str], pad: int) -> tuple[dict[str, Size], dict[str, Size]]:
        """Shape and strides per axis, for memory that runs through `order` with its fastest axis padded."""
        shape: dict[str, Size] = {}
        strides: dict[str, Size] = {}
        step: Size = 1
        for i, axis in enumerate(reversed(order)):
            extent = self.extent[axis]
            shape[axis] = extent + pad if i == 0 and isinstance(extent, int) else extent
            strides[axis], step = step, mul(step, shape[axis])
        return shape, strides

    def input(self) -> None:
        """One more input and a value loaded from it; the first is a float that varies over every axis."""
        first = not self.inputs
        dtype = self.one(*INPUT_DTYPES[: 3 if first else 5])
        names = [a.name for a in self.axes]
        order = self.draw(st.permutations(names)) if first else list(self.subset(names))
        pad = self.one(0, 0, 1, 3) if isinstance(self.extent[order[-1]], int) else 0
        shape, strides = self.layout(order, pad)
        logical = [a for a in names if a in order]
        sizes, steps = tuple(shape[a] for a in logical), tuple(strides[a] for a in logical)
        buffer = Buffer(f"x{len(self.inputs)}", dtype, "input", sizes, steps)
        self.inputs.append(Input(buffer, lead=self.one(0, 0, 1)))
        at = self.builder.add(Load(buffer.name, tuple((a, strides[a]) for a in logical), pad))
        loaded = Val(at, dtype, frozenset(logical), INPUT_BOUND if dtype.is_float else 4.0, exact=True)
        self.values.append(self.op("cast", loaded, dtype=F32) if dtype.is_narrow_float else loaded)

    def outputs_of_reductions(self) -> None:
        """Store unused results of reductions, so that no reduction is dropped."""
        unread = {v.at for v in self.values} - {o for n in self.builder.nodes for o in operands(n)}
        for at in sorted(unread & self.reduced):
            self.output(lambda v, at=at: v.at == at)  # type: ignore[misc]  # of a lambda with a default

    def output(self, accept: Callable[[Val], bool]) -> None:
        """Store some value that no output contains yet, sometimes narrowed or repeated along an axis."""
        stored = {n.value for n in self.builder.nodes if isinstance(n, Store)}
        val = self.pick(lambda v: v.at not in stored and not isinstance(self.builder.nodes[v.at], Load) and accept(v))
        if val is None:
            return
        names = [a.name for a in self.axes]
        over = set(val.dims) | ({self.one(*names)} if self.one(False, False, False, True) else set())
        narrow = ["f32", "bf16", "f16"] if val.bound < 3e4 else ["f32", "bf16"]
        val = self.op("cast", val, dtype=DTYPES[self.one(*narrow)]) if val.dtype == F32 else val
        logical = [a for a in names if a in over]
        shape, strides = self.layout(self.draw(st.permutations(logical)), pad=0)
        name = f"y{len(self.outputs)}"
        sizes, steps = tuple(shape[a] for a in logical), tuple(strides[a] for a in logical)
        self.outputs.append(Buffer(name, val.dtype, "output", sizes, steps))
        self.builder.add(Store(name, val.at, tuple((a, strides[a]) for a in logical)))

    # Values

    def const(self, number: float, dtype: DType = F32, scale: Size = 1) -> Val:
        at = self.builder.add(Const(number, dtype, scale))
        return Val(at, dtype, frozenset(), abs(number) * value(scale, self.bindings), exact=True)

    def op(self, name: str, *args: Val, dtype: DType | None = None, bound: float = MOST) -> Val:
        """An op whose result has the given bound (a cast keeps its argument's)."""
        gives = dtype or args[-1].dtype
        kept = gives.kind != "float" or (name == "cast" and args[0].bound < 2**24)
        at = self.builder.add(Op(name, tuple(a.at for a in args), gives))
        dims = frozenset[str]().union(*(a.dims for a in args))
        return Val(at, gives, dims, args[0].bound if name == "cast" else bound, kept and all(a.exact for a in args))

    def scaled(self, val: Val) -> Val:
        """The value scaled back within bounds by a power of two."""
        factor = 1.0
        while val.bound * factor > MOST:
            factor /= 2
        return val if factor == 1 else self.op("mul", val, self.const(factor), bound=val.bound * factor)

    def away_from_zero(self, val: Val) -> Val:
        """|x| + 0.5"""
        return self.op("add", self.op("abs", val, bound=val.bound), self.const(0.5), bound=val.bound + 0.5)

    def pointwise(self, count: int) -> None:
        """Some more values, one element at a time."""
        for _ in range(count):
            make = self.one(self.unary, self.binary, self.compare, self.choose, self.whole, self.lookup)
            made = make()
            if made is not None:
                self.values.append(self.scaled(made) if made.dtype == F32 else made)

    def float(self) -> Val:
        found = self.pick(lambda v: v.dtype == F32)
        assert found is not None  # the first input is a float
        return found

    def unary(self) -> Val:
        x = self.float()
        match name := self.one(*UNARY):
            case "neg" | "abs":
                return self.op(name, x, bound=x.bound)
            case "exp" | "expm1":
                return self.op(name, self.op("minimum", x, self.const(2.0), bound=x.bound), bound=7.4)
            case "rsqrt" | "sqrt" | "log" | "log1p" | "reciprocal":
                return self.op(name, self.away_from_zero(x), bound=3.0)
            case _:
                return self.op(name, x, bound=1.0)

    def binary(self) -> Val:
        x, y = self.float(), self.float()
        match name := self.one("add", "sub", "mul", "div", "maximum", "minimum", "scale"):
            case "add" | "sub":
                return self.op(name, x, y, bound=x.bound + y.bound)
            case "mul":
                return self.op(name, x, y, bound=x.bound * y.bound)
            case "div":
                return self.op(name, x, self.away_from_zero(y), bound=2 * x.bound)
            case "scale":
                return self.op("mul", x, self.const(self.one(1.0, 0.1, -1.25, 3.0)), bound=3 * x.bound)
            case _:
                return self.op(name, x, y, bound=max(x.bound, y.bound))

    def compare(self) -> Val:
        """A boolean from exact values: indices, integers, loaded floats."""
        x = self.pick(lambda v: v.exact and v.dtype in (F32, I64)) if self.one(True, False) else None
        x = x or self.index()
        const = self.const(self.one(0.0, 1.0, -0.5) if x.dtype == F32 else self.one(0, 1, 2), x.dtype)
        return self.op(self.one("eq", "ne", "lt", "le", "gt", "ge"), x, const, dtype=BOOL, bound=1.0)

    def choose(self) -> Val:
        condition = self.pick(lambda v: v.dtype == BOOL) or self.compare()
        x, y = self.float(), self.float()
        return replace(self.op("where", condition, x, y, bound=max(x.bound, y.bound)), exact=False)

    def index(self) -> Val:
        axes = self.subset([a.name for a in self.axes])
        points = prod(value(self.extent[a], self.bindings) for a in axes)
        return Val(self.builder.add(Index(axes)), I64, frozenset(axes), float(points), exact=True)

    def lookup(self) -> Val:
        """An element of a table for every index, which may be any integer value; the table may have an axis of its own."""
        index = self.pick(lambda v: v.dtype == I64) if self.one(True, False) else None
        extent, dtype = self.one(*EXTENTS), self.one(*INPUT_DTYPES[:4])
        index = self.op("maximum", index or self.index(), self.const(0, I64), bound=MOST_POINTS)
        index = self.op("minimum", index, self.const(extent - 1, I64), bound=extent)
        along = self.one(None, None, *(a.name for a in self.axes))
        shape, strides = ((self.extent[along], extent), (extent, 1)) if along else ((extent,), (1,))
        buffer = Buffer(f"x{len(self.inputs)}", dtype, "input", shape, strides)
        self.inputs.append(Input(buffer, lead=0))
        steps = ((along, strides[0]),) if along else ()
        at = self.builder.add(Load(buffer.name, steps, 0, (Gather(index.at, 1, extent),)))
        loaded = Val(at, dtype, index.dims | {a for a, _ in steps}, INPUT_BOUND if dtype.is_float else 4.0, exact=True)
        return self.op("cast", loaded, dtype=F32) if dtype.is_narrow_float else loaded

    def whole(self) -> Val:
        """Integer and boolean arithmetic, or a conversion back to floats."""
        x = self.pick(lambda v: v.dtype in (I64, BOOL)) or self.index()
        y = self.pick(lambda v: v.dtype == x.dtype) or x
        if x.bound * y.bound > 1e4 or self.one(True, False):
            return self.op("cast", x, dtype=F32)
        if x.dtype == BOOL:
            return self.op(self.one("and", "or", "xor"), x, y, bound=1.0)
        bound = max(x.bound * y.bound, x.bound + y.bound)
        return self.op(self.one("add", "sub", "mul", "maximum", "minimum"), x, y, bound=bound)

    # Reductions

    def reduce(self) -> None:
        """A reduction of some value, over axes it has (rarely over others), with its results scaled within bounds."""
        x = self.pick(lambda v: True)
        assert x is not None
        names = [a.name for a in self.axes]
        rarely = self.one(*(False,) * 7, True)
        axes = self.subset(names if rarely or not x.dims else sorted(x.dims))
        match x.dtype:
            case d if d == BOOL:
                self.fold(self.one("any", "all"), x, axes)
            case d if d == I64:
                self.fold(self.one("sum", "max", "min", "any", "all"), x, axes)
            case _:
                arg = ("argmax", "argmin") if x.exact else ()
                self.fold(self.one("sum", "sum", "max", "min", "prod", "welford", "moments", "logsumexp", *arg), x, axes)

    def fold(self, monoid: str, x: Val, axes: tuple[str, ...]) -> None:
        points = prod(value(self.extent[a], self.bindings) for a in axes)
        args = [self.near_one(x) if monoid == "prod" else x]
        if monoid.startswith("arg"):
            args.append(Val(self.builder.add(Index(axes)), I64, frozenset(axes), float(points), exact=True))
        owner = self.builder.add(Reduce(monoid, tuple(a.at for a in args), axes))
        dims = frozenset[str]().union(*(a.dims for a in args)) - set(axes)
        for k, (dtype, bound) in enumerate(_results(monoid, args[0], points)):
            exact = dtype != F32 or (x.exact and monoid in ("max", "min"))
            result = Val(self.builder.add(Result(owner, k)), dtype, dims, bound, exact)
            if dtype == F32 and bound > MOST:
                result = self.averaged(result, axes, points)
            self.values.append(self.scaled(result) if dtype == F32 else result)
            self.reduced.add(self.values[-1].at)

    def near_one(self, x: Val) -> Val:
        """1 + tanh(x)/128, so that a product of thousands stays finite."""
        small = self.op("mul", self.op("tanh", x, bound=1.0), self.const(2.0**-7), bound=2.0**-7)
        return self.op("add", self.const(1.0), small, bound=1 + 2.0**-7)

    def averaged(self, val: Val, axes: tuple[str, ...], points: int) -> Val:
        """The value divided by the number of reduced elements, symbolic or not."""
        count = self.const(1.0)
        for axis in axes:
            extent = self.extent[axis]
            factor = self.const(float(extent)) if isinstance(extent, int) else self.const(1.0, scale=extent)
            count = self.op("mul", count, factor, bound=count.bound * factor.bound)
        return self.op("div", val, count, bound=val.bound / points)


def _results(monoid: str, x: Val, points: int) -> list[tuple[DType, float]]:
    """Type and bound of each result."""
    match monoid:
        case "sum":
            return [(x.dtype, x.bound * points)]
        case "prod":
            return [(x.dtype, x.bound**points)]
        case "any" | "all":
            return [(BOOL, 1.0)]
        case "argmax" | "argmin":
            return [(I64, float(points))]
        case "welford" | "moments":
            return [(x.dtype, x.bound), (x.dtype, x.bound**2 * points)]
        case "logsumexp":
            return [(x.dtype, x.bound), (x.dtype, float(points))]
        case _:
            return [(x.dtype, x.bound)]


def tensor(spec: Input, bindings: Bindings, seed: int) -> torch.Tensor:
    """A CPU tensor laid out as the buffer says."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [value(s, bindings) for s in spec.buffer.shape]
    strides = [value(s, bindings) for s in spec.buffer.strides]
    count = spec.lead + prod(sizes)
    dtype = spec.buffer.dtype
    if dtype.is_float:
        flat = torch.randn(count, generator=generator).clamp(-INPUT_BOUND, INPUT_BOUND)
    else:
        flat = torch.randint(0 if dtype == BOOL else -4, 2 if dtype == BOOL else 5, (count,), generator=generator)
    return flat.to(dtype.torch).as_strided(sizes, strides, spec.lead)


HEADER = """\
program small
  axis m = s0
  axis n = 8
  input x: f32 [s0, 8] strides [8, 1]
  input h: bf16 [s0, 8] strides [8, 1]
  input t: i64 [s0] strides [1]
  output y: f32 [s0, 8] strides [8, 1]
  output r: f32 [s0] strides [1]
  output b: bf16 [s0, 8] strides [8, 1]
"""


def small(body: str) -> Program:
    """A Program over [s0, 8] from its nodes, one per line."""
    return parse(HEADER + body)


def small_inputs(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, h = (torch.randn(rows, 8, generator=generator) for _ in range(2))
    return {"x": x, "h": h.bfloat16(), "t": torch.randint(0, 8, (rows,), generator=generator)}
