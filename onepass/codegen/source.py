"""The output of code generation: the text of one kernel and what is needed to launch it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..ir.expr import DType
from ..ir.program import Buffer
from ..ir.size import Bindings, Size, value


class ParamKind(Enum):
    """What a kernel parameter is bound to at launch."""

    POINTER = "a buffer of the plan, by name"
    TENSOR_MAP = "a buffer of the plan as a TMA descriptor; it must start at a multiple of 16 bytes"
    SIZE = "a symbol's value"
    ZERO = "the integer 0, unknown to the compiler: it keeps 16-bit values from being held in registers as fp32"


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor as TMA sees it: extents, strides (the last is 1), and the box of elements of one copy."""

    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    box: tuple[int, ...]
    piece_elems: int = 0  # flat view of unaligned rows: one long row of whole pieces of this many elements

    def resolved(self, bindings: Bindings) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Extents and strides for concrete sizes."""
        shape, strides = (tuple(value(s, bindings) for s in sizes) for sizes in (self.shape, self.strides))
        if not self.piece_elems:
            return shape, strides
        pieces = (sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1) // self.piece_elems
        return (1, pieces, self.piece_elems), (pieces * self.piece_elems, self.piece_elems, 1)


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter. `name` is the buffer or symbol it is bound to, `text_name` its name in the kernel."""

    name: str
    kind: ParamKind
    text_name: str
    dtype: DType | None = None  # of a pointer or a tensor map
    view: TensorView | None = None  # of a tensor map


@dataclass(frozen=True, slots=True)
class GridDim:
    """ceil(extent / step) programs, at most `max_programs`."""

    extent: Size
    step: int = 1
    max_programs: int | None = None

    def count(self, bindings: Bindings) -> int:
        blocks = -(-value(self.extent, bindings) // self.step)
        return blocks if self.max_programs is None else min(blocks, self.max_programs)


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel as text.

    The text is a module that stands alone: imports, helper functions, and last the kernel, a function with
    `@triton.jit(do_not_specialize=["zero"])` or `@gluon.jit` and the same argument.
    """

    name: str
    text: str
    params: tuple[Param, ...]
    grid: tuple[GridDim, ...]  # the launch grid is one-dimensional: the product of these
    warps: int
    stages: int = 1
    max_registers: int | None = None
    wide_index: bool = False  # sizes are passed as i64
    fresh: frozenset[str] = frozenset()  # buffers allocated by the plan, which are always aligned
    gluon: bool = False
    cleared: tuple[Buffer, ...] = ()  # extra buffers that must be zero at launch
    ctas_per_group: int = 1  # consecutive CTAs that wait for each other

    def programs(self, bindings: Bindings) -> int:
        total = 1
        for dim in self.grid:
            total *= dim.count(bindings)
        return total
