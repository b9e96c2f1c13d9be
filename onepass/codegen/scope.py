"""What the parts of one Gluon kernel's lowering share: the kernel, its schedule, its names and parameters."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.program import Buffer, Load, Store
from ..ir.size import Size
from ..plan.access import contiguous_row_stride
from ..plan.kernel import Kernel
from ..plan.schedule import Schedule
from . import kernel_ir as ir
from .builder import Builder
from .expr import GLUON, size_factor, size_text
from .names import GLUON_NAMES, description
from .printer import Lowered
from .source import GridDim, Param, ParamKind, Source, TensorView


class Scope:
    """A kernel that stages loads in shared memory, and the statements that its lowering has built."""

    def __init__(self, kernel: Kernel, schedule: Schedule, name: str, wide: bool) -> None:
        self.kernel, self.schedule, self.name, self.wide = kernel, schedule, name, wide
        self.program = kernel.program
        self.rows, extent = self.program.extent(kernel.space.rows), self.program.extent(kernel.space.cols)
        assert isinstance(extent, int)
        self.extent = extent
        pointers = (f"{b.name}_ptr" for b in self.program.buffers)
        self.builder = Builder((*GLUON_NAMES, *self.program.symbols, *pointers))
        self.mailboxes = self.builder.fresh("mailboxes_ptr")  # zeroed memory

    def load_of(self, i: int) -> Load:
        """A node that is a load."""
        node = self.program.nodes[i]
        assert isinstance(node, Load)
        return node

    def row_stride(self, i: int) -> Size:
        """Elements from one row of a staged load to the next."""
        step = contiguous_row_stride(self.kernel, self.load_of(i))
        assert step is not None
        return step

    def count_rows(self) -> None:
        """Name the number of rows. TMA counts in 32 bits."""
        narrowed = self.wide and not isinstance(self.rows, int)
        self.builder.set("row_count", f"{size_factor(self.rows)}.to(gl.int32)" if narrowed else size_text(self.rows))

    def tensor_map(self, i: int, name: str, box: tuple[int, ...]) -> Param:
        """The parameter through which TMA copies boxes of a staged load."""
        return Param(self.load_of(i).buffer, ParamKind.TENSOR_MAP, name, self.program.dtypes[i], self._view(i, box))

    def _view(self, i: int, box: tuple[int, ...]) -> TensorView:
        """A tensor as TMA sees it: rows of columns, or rows of lines as wide as a box."""
        last = box[-1]
        if len(box) == 2:
            return TensorView((self.rows, self.extent), (self.row_stride(i), 1), box)
        return TensorView((self.rows, self.extent // last, last), (self.row_stride(i), last, 1), box)

    def lowered(
        self, maps: Iterable[Param], grid: tuple[GridDim, ...], cleared: tuple[Buffer, ...] = (), reads_staged: bool = False
    ) -> Lowered:
        """The finished kernel. `cleared` are extra buffers; `reads_staged`: it also reads staged loads by address."""
        params = self._params(tuple(maps), cleared, reads_staged)
        kernel = ir.Kernel(
            self.name,
            description(self.kernel, self.schedule),
            tuple(p.text_name for p in params),
            self.builder.done(),
            GLUON,
            self.builder.legend,
        )
        fresh = frozenset(b.name for b in (*self.program.buffers, *cleared) if b.role != "input")
        blank = Source(
            self.name,
            "",
            params,
            grid,
            self.schedule.warps,
            max_registers=self.schedule.registers or None,
            wide_index=self.wide,
            fresh=fresh,
            gluon=True,
            cleared=cleared,
            ctas_per_group=self.schedule.ctas_per_row,
        )
        return Lowered(kernel, blank)

    def _params(self, maps: tuple[Param, ...], cleared: tuple[Buffer, ...], reads_staged: bool) -> tuple[Param, ...]:
        buffers, nodes = self.program.buffers, tuple(enumerate(self.program.nodes))
        staged = {n.buffer for i, n in nodes if isinstance(n, (Load, Store)) and i in self.schedule.staged}
        used = {n.buffer for i, n in nodes if isinstance(n, (Load, Store)) and i not in self.schedule.staged}
        named = [b for b in buffers if b.name in used]
        first = [b for b in buffers if b.name in staged - used] if reads_staged else []
        pointers = [Param(b.name, ParamKind.POINTER, f"{b.name}_ptr", b.dtype) for b in (*first, *named)]
        pointers += [Param(b.name, ParamKind.POINTER, self.mailboxes, b.dtype) for b in cleared]
        sizes = [Param(s, ParamKind.SIZE, s) for s in self.program.symbols]
        return (*pointers, *maps, *sizes, Param("zero", ParamKind.ZERO, "zero"))
