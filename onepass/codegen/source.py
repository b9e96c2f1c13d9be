"""What code generation hands on: the text of one kernel and all that is needed to launch it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..ir.expr import DType
from ..ir.program import Buffer
from ..ir.size import Bindings, Size, value


class ParamKind(Enum):
    """What a kernel parameter is bound to at a launch."""

    POINTER = "a buffer of the plan, by name"
    TENSOR_MAP = "a buffer of the plan as TMA sees it; it must start on 16 bytes"
    SIZE = "a symbol's value"
    ZERO = "the integer 0, which the compiler must not know: it keeps 16-bit values from being widened and held"


@dataclass(frozen=True, slots=True)
class TensorView:
    """How TMA sees a tensor: extents, strides (the last is 1), and the box of elements that one copy brings."""

    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    box: tuple[int, ...]
    piece_elems: int = 0  # rows that start anywhere are seen as one long row, cut into whole pieces of so many elements

    def resolved(self, bindings: Bindings) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Extents and strides for given sizes."""
        shape, strides = (tuple(value(s, bindings) for s in sizes) for sizes in (self.shape, self.strides))
        if not self.piece_elems:
            return shape, strides
        pieces = (sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1) // self.piece_elems
        return (1, pieces, self.piece_elems), (pieces * self.piece_elems, self.piece_elems, 1)


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter, in order. `name` is the buffer or symbol it is bound to; the text calls it `text_name`."""

    name: str
    kind: ParamKind
    text_name: str
    dtype: DType | None = None  # of a pointer or a tensor map
    view: TensorView | None = None  # of a tensor map


@dataclass(frozen=True, slots=True)
class GridDim:
    """ceil(extent / step) programs, at most `most`."""

    extent: Size
    step: int = 1
    max_programs: int | None = None

    def count(self, bindings: Bindings) -> int:
        blocks = -(-value(self.extent, bindings) // self.step)
        return blocks if self.max_programs is None else min(blocks, self.max_programs)


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel as text. The text is a whole module: imports, then one `@triton.jit(do_not_specialize=["zero"])` function,
    or `@gluon.jit` where it is Gluon.
    """

    name: str
    text: str
    params: tuple[Param, ...]
    grid: tuple[GridDim, ...]  # the launch grid is one-dimensional: the product of these
    warps: int
    stages: int = 1
    max_registers: int | None = None
    wide_index: bool = False  # sizes are passed as i64
    fresh: frozenset[str] = frozenset()  # buffers the plan allocates: always aligned
    gluon: bool = False
    cleared: tuple[Buffer, ...] = ()  # memory beside the plan's buffers that must be 0 at the launch
    ctas_per_group: int = 1  # CTAs with neighbouring numbers that wait for each other

    def programs(self, bindings: Bindings) -> int:
        total = 1
        for dim in self.grid:
            total *= dim.count(bindings)
        return total
