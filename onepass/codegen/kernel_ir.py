"""The kernel IR: what a lowering builds from steps, and a printer turns into Triton or Gluon text once.

Arithmetic, indices and masks are expression text. Whatever touches memory, synchronizes, loops, or moves data between threads is a
node of its own, so code and tests find it by type: `statements` walks a kernel, `rewrite` makes a changed copy.

Triton kernels use tiles of [height, width] in registers, and only `Load`, `Store`, `TileFold`, `For` and arithmetic. Gluon kernels
also stage data in shared memory. They use this part of Gluon, and `runtime/interpreter/gluon_model` has to model all of it:

- `gl.program_id`, `range`, `gl.static_range`, arithmetic, comparisons, `&`, `|`, `^`, `~`, scalars mixed with tensors, `.to`, also
  with `bitcast=True`
- `gl.BlockedLayout`, `gl.SliceLayout`; every tensor is in layout `TILE`, except one piece of a flat view, [1, 64], in `PIECE`.
  Tensors of staged rows are [1, width] or [1, 1]; those of staged tiles also [height, width] and [height, 1]
- `gl.arange(0, n, layout=)` with `[None, :]` or `[:, None]`, `gl.full`, `.broadcast_to`, `gl.where`, `gl.abs`, `gl.maximum`,
  `gl.minimum` and the other functions of one value in the op table, `libdevice`
- `TileFold` and `TwoSums` along either axis: `gl.sum(x, axis=, keep_dims=True)`, or `gl.reduce` of one tile or of two,
  also with `keep_dims=True`; `gl.max` of one element, to convert it to a scalar
- `.reshape(shape)` of a tensor to three axes and back, where each thread holds the whole first axis, and folds along that axis;
  `gl.convert_layout(x, TILE, assert_trivial=True)` of the result, which asserts that no data moves between threads
- `Load` and `Store` with and without mask; a volatile `Load` of one word that other CTAs write, in a `Poll`
- `Alloc`, `Slot`, and `SharedLoad` in layout `TILE`; `View` of a whole ring: the same bytes in the same order, as chunks, pieces or
  strips instead of copies
- `SharedStore` into a piece that has arrived, or a whole walk, under an `If` whose condition is a scalar, and so the same for all
  threads; `SharedStore` into memory of `gl.SwizzledSharedLayout(1, 1, 1, [1, 0])`, from which each thread reads what it stored
- `InitBarrier` with one arrival, `Expect`, `Wait`, `Invalidate` of mbarriers
- `CopyAsync`; copies of staged tiles may cross the end of a tensor, along rows and columns
- `Release` between the last read of a slot and its refill; `CtaBarrier` also after a wait, after stores of threads, and inside a
  walk that refills slots while it reads
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ..ir.expr import DType


@dataclass(frozen=True, slots=True)
class Language:
    """How Triton and Gluon differ in the text of single values."""

    prefix: str  # module of the built-in functions
    jit: str  # decorator of a function
    layout: str = ""  # layout of a new tensor, where the language wants one

    def full(self, shape: str, value: str, dtype: str) -> str:
        """A tensor filled with one value."""
        return f"{self.prefix}.full({shape}, {value}, {self.prefix}.{dtype}{', ' + self.layout if self.layout else ''})"

    def broadcast(self, text: str, shape: str) -> str:
        """A tensor broadcast along its axes of extent 1."""
        return f"{text}.broadcast_to({shape})" if self.layout else f"{self.prefix}.broadcast_to({text}, {shape})"


class Name(str):
    """The name of a variable: an expression that costs nothing to repeat."""

    __slots__ = ()


class Sum(str):
    """A sum or difference, which is no operand of a product."""

    __slots__ = ()


Expr = str  # arithmetic as text, or more exactly a Name or a Sum

# ---- values: the right-hand sides of assignments ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Apply:
    """A row of the op table applied to expressions. `exact` selects the form that is accurate to the last bits of fp32."""

    op: str
    args: tuple[Expr, ...]
    dtype: DType
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Widen:
    """bfloat16 to float32. `zero` is an opaque 0 that makes each widening a value of its own."""

    value: Expr
    zero: Expr = ""


@dataclass(frozen=True, slots=True)
class Load:
    """A read of global memory, at a pointer plus the sum of `offset`. All of `masks` must hold: names or comparisons."""

    pointer: Name
    offset: tuple[Expr, ...] = ()  # each at most a product
    masks: tuple[Expr, ...] = ()
    other: Expr = ""  # the value of masked-off lanes
    evict_last: bool = False
    volatile: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """One part of shared memory, by its index."""

    memory: Name
    index: Expr


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """A read of shared memory into registers. With `shape`, the memory is seen in that shape."""

    slot: Slot
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TileFold:
    """A primitive fold of a tile along some axes, one after another. It may move data between threads.

    With `cube`, the operand is seen in that shape first, and the result in shape `gives`.
    """

    kind: str  # sum, prod, max or min
    value: Expr
    axes: tuple[int, ...]
    cube: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TwoSums:
    """The sums of two tiles along an axis, in one exchange between threads."""

    values: tuple[Expr, Expr]
    axis: int


@dataclass(frozen=True, slots=True)
class Received:
    """The state in a mailbox word that another CTA published."""

    word: Name
    dtype: DType


RightSide = Expr | Apply | Widen | Load | SharedLoad | TileFold | TwoSums | Received

# ---- statements ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    """An assignment to a name, or to several. `notes` are comments, such as the line of user code that the value comes from."""

    targets: tuple[Name, ...]
    value: RightSide
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Advance:
    """A counter goes up by a constant."""

    counter: Name
    by: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A constexpr layout of tensors: elements per thread, threads per warp and warps per CTA, along rows and columns."""

    name: Name
    per_thread: tuple[int, int]
    threads: tuple[int, int]
    warps: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Store:
    """A write to global memory, where a Load would read."""

    pointer: Name
    offset: tuple[Expr, ...]
    value: Expr
    masks: tuple[Expr, ...] = ()
    evict_last: bool = False
    src: str = ""


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A write of registers to shared memory, whose slot is seen as `shape` if there is one."""

    slot: Slot
    value: Expr | Load
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Alloc:
    """Shared memory, as an array of slots along the first axis."""

    name: Name
    dtype: str
    shape: tuple[int, ...]
    layout: Expr


@dataclass(frozen=True, slots=True)
class View:
    """Shared memory seen in another shape: the same bytes in the same order."""

    name: Name
    of: Name
    dtype: str
    shape: tuple[int, ...]
    layout: Expr


@dataclass(frozen=True, slots=True)
class InitBarrier:
    """Makes an mbarrier with one arrival per phase."""

    barrier: Slot


@dataclass(frozen=True, slots=True)
class Invalidate:
    """Ends the life of an mbarrier."""

    barrier: Slot


@dataclass(frozen=True, slots=True)
class Expect:
    """One arrival at an mbarrier, whose phase ends once so many bytes have come."""

    barrier: Slot
    bytes: int
    pred: Name


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits until the phase of this parity is over."""

    barrier: Slot
    phase: Expr


@dataclass(frozen=True, slots=True)
class CopyAsync:
    """A TMA copy from global to shared memory, which arrives at an mbarrier."""

    map: Name
    coordinates: tuple[Expr, ...]
    barrier: Slot
    into: Slot
    pred: Name | None


@dataclass(frozen=True, slots=True)
class Fence:
    """Orders accesses of threads before later ones of TMA, which uses the async proxy."""


@dataclass(frozen=True, slots=True)
class CtaBarrier:
    """Waits for all threads of the CTA."""


@dataclass(frozen=True, slots=True)
class Release:
    """A fence and a CTA barrier: all threads have read, so TMA may overwrite."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Hands 32 bits of state to the other CTAs of a row, through a mailbox word."""

    mailboxes: Name
    word: Expr
    value: Expr


@dataclass(frozen=True, slots=True)
class Poll:
    """Reads mailbox words again until none of them is 0."""

    words: tuple[Name, ...]
    loads: tuple[Load, ...]


class Loop(Enum):
    """How a loop is compiled."""

    RANGE = "range"  # Gluon's loop, which the compiler unrolls where the trip count is known and small
    UNROLLED = "static_range"
    PIPELINED = "tl.range"  # Triton's loop, with loads issued `stages` iterations ahead


@dataclass(frozen=True, slots=True)
class For:
    """A loop over range(start, stop, step)."""

    index: Name
    start: Expr
    stop: Expr
    step: int | None = None
    kind: Loop = Loop.RANGE
    stages: int = 1
    body: tuple[Statement, ...] = ()


@dataclass(frozen=True, slots=True)
class If:
    """Statements under a scalar condition."""

    condition: Expr
    body: tuple[Statement, ...] = ()


Statement = (
    Assign
    | Advance
    | Layout
    | Store
    | SharedStore
    | Alloc
    | View
    | InitBarrier
    | Invalidate
    | Expect
    | Wait
    | CopyAsync
    | Fence
    | CtaBarrier
    | Release
    | Publish
    | Poll
    | For
    | If
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: its parameters by name, and its body."""

    name: str
    doc: str
    params: tuple[str, ...]
    body: tuple[Statement, ...]
    language: Language
    legend: str = ""  # what suffixes of names mean


# ---- finding and changing nodes --------------------------------------------------------------------------------------------


def statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """All statements, in the order of the text, with those inside loops and branches."""
    for each in body:
        yield each
        if isinstance(each, For | If):
            yield from statements(each.body)


def values(body: tuple[Statement, ...]) -> Iterator[RightSide]:
    """The values of all statements that have one."""
    for each in statements(body):
        if isinstance(each, Assign | Store | SharedStore):
            yield each.value


def rewrite(body: tuple[Statement, ...], change: Callable[[Statement], Statement | tuple[Statement, ...]]) -> tuple[Statement, ...]:
    """A body with every statement replaced by what `change` makes of it: itself, another, several, or none.

    A loop or branch is given to `change` after its own statements.
    """
    found: list[Statement] = []
    for each in body:
        inner: Any = replace(each, body=rewrite(each.body, change)) if isinstance(each, For | If) else each
        made = change(inner)
        found += made if isinstance(made, tuple) else (made,)
    return tuple(found)
