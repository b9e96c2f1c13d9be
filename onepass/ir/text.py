"""Print and parse Programs: parse(show(p)) == p.

The text has one line per axis, buffer and node, in order. A `;` is equivalent to a line break. A value's number is its position in
the list. A comment after a node names the source line it came from. Types of ops are inferred from their operands; only casts
spell theirs out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NoReturn

from ..errors import ParseError
from .expr import DTYPES, OPS, DType, result_dtype
from .monoid import MONOIDS
from .program import Axis, Buffer, Const, Gather, Index, Load, Node, Op, Program, Reduce, Result, Store, Strides
from .size import Size, parse_size

ROLES = ("input", "output", "temp")


def show(program: Program) -> str:
    """The Program as text."""
    lines = [f"axis {a.name} = {a.extent}" for a in program.axes]
    lines += [
        f"{b.role} {b.name}: {b.dtype} [{_sizes(b.shape)}] strides [{_sizes(b.strides)}]{'' if b.aligned else UNALIGNED}"
        for b in program.buffers
    ]
    lines += [_commented(_statement(i, node), node.src) for i, node in enumerate(program.nodes)]
    return "\n".join([f"program {program.name}", *(f"  {line}" for line in lines)]) + "\n"


def one_line(text: str) -> str:
    """A Program's text on one line, which `parse` also accepts. Inductor quotes it in one-line comments."""
    return "; ".join(line.partition("#")[0].strip() for line in text.splitlines())


def _statement(i: int, node: Node) -> str:
    return _node(node) if isinstance(node, Store) else f"%{i} = {_node(node)}"


def _commented(line: str, src: str) -> str:
    return f"{line:<40}  # {' '.join(src.split())}" if src else line


def _node(node: Node) -> str:
    match node:
        case Load(buffer=buffer, strides=strides, offset=offset, indexed=indexed):
            looked_up = "".join(f" gather(%{g.index} * {g.stride} < {g.extent})" for g in indexed)
            return f"load {buffer} {_address(strides, offset)}{looked_up}"
        case Const(value=value, dtype=dtype, scale=scale):
            return f"const {_literal(value)}{'' if scale == 1 else f' * {scale}'} : {dtype}"
        case Index(axes=axes, dtype=dtype):
            return f"index ({', '.join(axes)}) : {dtype}"
        case Op(name="cast", args=args, dtype=dtype):
            return f"cast {dtype} {_values(args, ' ')}"
        case Op(name=name, args=args):
            return f"{name} {_values(args, ' ')}"
        case Reduce(monoid=monoid, args=args, axes=axes):
            return f"reduce {monoid}({_values(args, ', ')}) over {', '.join(axes)}".rstrip()
        case Result(reduce=reduce, k=k):
            return f"result %{reduce}.{k}"
        case Store(buffer=buffer, value=stored, strides=strides, offset=offset):
            return f"store {buffer} {_address(strides, offset)} = %{stored}"


def _sizes(sizes: tuple[Size, ...]) -> str:
    return ", ".join(str(s) for s in sizes)


def _values(positions: tuple[int, ...], between: str) -> str:
    return between.join(f"%{p}" for p in positions)


def _address(strides: Strides, offset: Size) -> str:
    steps = ", ".join(f"{axis}:{stride}" for axis, stride in strides)
    return f"[{steps}]" + ("" if offset == 0 else f" + {offset}")


def _literal(value: float | int | bool) -> str:
    """repr of a literal as a plain Python number (the repr of a numpy scalar includes its type)."""
    return repr(value) if isinstance(value, (bool, int)) else repr(float(value))


# One pattern per kind of line. Sizes contain no spaces, and names contain none of the punctuation used here.
_SIZE = r"([^\s,\]]+)"
_ADDRESS = r"\[(.*?)\](?: \+ (\S+))?"
_PROGRAM = re.compile(r"program (.+)")
_AXIS = re.compile(rf"axis (\S+) = {_SIZE}")
UNALIGNED = " unaligned"
_BUFFER = re.compile(rf"({'|'.join(ROLES)}) (\S+): (\w+) \[(.*)\] strides \[(.*)\]( unaligned)?")
_VALUE = re.compile(r"%(\d+) = (\w+) ?(.*)")
_STORE = re.compile(rf"store (\S+) {_ADDRESS} = %(\d+)")
_GATHER = re.compile(r"gather\(%(\d+) \* (\S+) < (\S+)\)")
_LOAD = re.compile(rf"(\S+) {_ADDRESS}((?: gather\(%\d+ \* \S+ < \S+\))*)")
_CONST = re.compile(r"(\S+)(?: \* (\S+))? : (\w+)")
_INDEX = re.compile(r"\((.*)\) : (\w+)")
_REDUCE = re.compile(r"([\w.]+)\((.*)\) over ?(.*)")
_RESULT = re.compile(r"%(\d+)\.(\d+)")
_CAST = re.compile(r"(\w+) %(\d+)")
_ARGS = re.compile(r"%\d+(?: %\d+)*")


def parse(text: str) -> Program:
    """Parse the text of a Program. Raises ParseError with the line number if the text is invalid."""
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), start=1):
        statements, _, comment = line.partition("#")
        for statement in filter(None, map(str.strip, statements.split(";"))):
            try:
                reader.line(statement, comment.strip())
            except _LineError as wrong:
                raise ParseError(line=number, detail=str(wrong), text=line.strip()) from None
    if reader.name is None:
        raise ParseError(line=1, detail="the first line must be `program NAME`", text=text[:40])
    return Program(reader.name, tuple(reader.axes), tuple(reader.buffers.values()), tuple(reader.nodes))


class _LineError(Exception):
    """A line that does not parse. `parse` adds the line number."""


def _wrong(detail: str) -> NoReturn:
    raise _LineError(detail)


class _Reader:
    """Parser state: the axes, buffers and nodes of the lines read so far."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.axes: list[Axis] = []
        self.buffers: dict[str, Buffer] = {}
        self.nodes: list[Node] = []
        self.dtypes: list[DType] = []  # of each node, as Program.dtypes gives them

    def line(self, text: str, src: str) -> None:
        """Parse one statement. `src` is its comment."""
        if self.name is None:
            self.name = _match(_PROGRAM, text, "the first line must be `program NAME`")[0]
        elif text.startswith("axis "):
            name, extent = _match(_AXIS, text, "expected `axis NAME = SIZE`")
            self.axes.append(Axis(name, _size(extent)))
        elif text.startswith(ROLES):
            self.buffer(text)
        elif text.startswith("store "):
            self.store(text, src)
        else:
            self.value(text, src)

    def buffer(self, text: str) -> None:
        role, name, dtype, shape, strides, crooked = _match(_BUFFER, text, "expected `ROLE NAME: DTYPE [SIZES] strides [SIZES]`")
        self.buffers[name] = Buffer(name, _dtype(dtype), role, _size_list(shape), _size_list(strides), crooked != UNALIGNED)

    def store(self, text: str, src: str) -> None:
        name, steps, offset, stored = _match(_STORE, text, "expected `store BUFFER [AXIS:STRIDE, ...] + OFFSET = %VALUE`")
        self.add(Store(name, self.position(stored), _strides(steps), _size(offset or "0"), src), self.dtypes[int(stored)])

    def value(self, text: str, src: str) -> None:
        number, kind, rest = _match(_VALUE, text, "expected `axis`, a buffer, `store` or `%N = ...`")
        if int(number) != len(self.nodes):
            _wrong(f"the next value is %{len(self.nodes)}")
        read = _KINDS.get(kind)
        if read is not None:
            read(self, rest, src)
        elif kind in OPS:
            self.op(kind, rest, src)
        else:
            _wrong(f"no op is called {kind}")

    def add(self, node: Node, dtype: DType) -> None:
        self.nodes.append(node)
        self.dtypes.append(dtype)

    def position(self, text: str) -> int:
        """The position of an operand, which must be an earlier value."""
        if int(text) >= len(self.nodes):
            _wrong(f"%{text} is not an earlier value")
        return int(text)

    def positions(self, text: str) -> tuple[int, ...]:
        return tuple(self.position(p) for p in re.findall(r"%(\d+)", text))

    def load(self, text: str, src: str) -> None:
        name, steps, offset, looked_up = _match(_LOAD, text, "expected `load BUFFER [AXIS:STRIDE, ...] + OFFSET`")
        if name not in self.buffers:
            _wrong(f"no buffer is called {name}")
        indexed = tuple(Gather(self.position(i), _size(step), _size(extent)) for i, step, extent in _GATHER.findall(looked_up))
        self.add(Load(name, _strides(steps), _size(offset or "0"), indexed, src), self.buffers[name].dtype)

    def const(self, text: str, src: str) -> None:
        value, scale, dtype = _match(_CONST, text, "expected `const VALUE * SCALE : DTYPE`")
        self.add(Const(_number(value), _dtype(dtype), _size(scale or "1"), src), _dtype(dtype))

    def index(self, text: str, src: str) -> None:
        axes, dtype = _match(_INDEX, text, "expected `index (AXIS, ...) : DTYPE`")
        self.add(Index(_names(axes), _dtype(dtype), src), _dtype(dtype))

    def reduce(self, text: str, src: str) -> None:
        monoid, args, axes = _match(_REDUCE, text, "expected `reduce MONOID(%A, ...) over AXIS, ...`")
        positions = self.positions(args)
        if monoid not in MONOIDS or not positions:
            _wrong(f"no reduction is called {monoid}" if monoid not in MONOIDS else "a reduction needs a value")
        self.add(Reduce(monoid, positions, _names(axes), src), self.dtypes[positions[0]])

    def result(self, text: str, src: str) -> None:
        owner, k = _match(_RESULT, text, "expected `result %REDUCE.K`")
        node = self.nodes[self.position(owner)]
        if not isinstance(node, Reduce):
            _wrong(f"%{owner} is not a reduce")
        dtypes = MONOIDS[node.monoid].result_dtypes(self.dtypes[int(owner)])
        if int(k) >= len(dtypes):
            _wrong(f"{node.monoid} has {len(dtypes)} results")
        self.add(Result(int(owner), int(k), src), dtypes[int(k)])

    def cast(self, text: str, src: str) -> None:
        dtype, arg = _match(_CAST, text, "expected `cast DTYPE %A`")
        self.add(Op("cast", (self.position(arg),), _dtype(dtype), src), _dtype(dtype))

    def op(self, name: str, text: str, src: str) -> None:
        _match(_ARGS, text, f"expected `{name} %A ...`")
        args = self.positions(text)
        if len(args) != OPS[name].arity:
            _wrong(f"{name} takes {OPS[name].arity} operands")
        dtype = result_dtype(OPS[name], tuple(self.dtypes[a] for a in args))
        self.add(Op(name, args, dtype, src), dtype)


_KINDS: dict[str, Callable[[_Reader, str, str], None]] = {
    "load": _Reader.load,
    "const": _Reader.const,
    "index": _Reader.index,
    "reduce": _Reader.reduce,
    "result": _Reader.result,
    "cast": _Reader.cast,
}


def _match(pattern: re.Pattern[str], text: str, expected: str) -> tuple[str, ...]:
    found = pattern.fullmatch(text)
    if found is None:
        _wrong(expected)
    return found.groups()


def _dtype(text: str) -> DType:
    return DTYPES[text] if text in DTYPES else _wrong(f"no dtype is called {text}")


def _size(text: str) -> Size:
    factors = text.split("*")
    if not all(re.fullmatch(r"-?\d+|[A-Za-z_]\w*", f) for f in factors):
        _wrong(f"{text} is not a size")
    return parse_size(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _size_list(text: str) -> tuple[Size, ...]:
    return tuple(_size(part) for part in _names(text))


def _strides(text: str) -> Strides:
    pairs = [part.partition(":") for part in _names(text)]
    return tuple((axis, _size(stride)) for axis, _, stride in pairs)


def _number(text: str) -> float | int | bool:
    """Parse a literal. NaN is always the object math.nan, so that Programs with NaNs compare equal."""
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    try:
        number = float(text)
    except ValueError:
        _wrong(f"{text} is not a number")
    return math.nan if math.isnan(number) else number
