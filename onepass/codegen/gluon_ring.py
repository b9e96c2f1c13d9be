"""Base class of emitters of Gluon kernels with shared-memory rings: parameters, mbarriers, and freeing of slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from ..ir.program import Buffer, Load, Store
from ..ir.size import Size
from ..plan.access import contiguous_row_stride
from ..plan.kernel import Kernel
from ..plan.schedule import Schedule
from ..plan.staged_rows import BARRIERS
from .gluon_helpers import FUNCTIONS, called_definitions
from .source import GridDim, Param, ParamKind, Source, TensorView
from .triton import RESERVED
from .writer import Writer

HEADER = (
    "import triton.language as tl",
    "from triton.experimental import gluon",
    "from triton.experimental.gluon import language as gl",
    "from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma",
    "from triton.language.extra import libdevice",
)
OWN_NAMES = ("gl", "gluon", "mbarrier", "tma", "fence_async_shared", "cta_barrier", "TILE", "ready", "row_count", "slot",
       "place", "turn", "ahead", "inside", "k", "r_at", "lanes", "range", "slot_first", "slot_early", "early", "early_inside")


class RingEmitter(ABC):
    """Emits a kernel around its body. Subclasses give the tensor maps, the grid and the body."""

    def __init__(self, kernel: Kernel, schedule: Schedule, name: str, wide: bool, own_names: Iterable[str]) -> None:
        self.kernel, self.schedule, self.name, self.wide = kernel, schedule, name, wide
        self.program, self.slots = kernel.program, schedule.stages
        self.rows, extent = self.program.extent(kernel.space.rows), self.program.extent(kernel.space.cols)
        assert isinstance(extent, int)
        self.extent = extent
        self.barriers = 0
        pointers = (f"{b.name}_ptr" for b in self.program.buffers)
        self.w = Writer((*RESERVED, *FUNCTIONS, *OWN_NAMES, *own_names, *self.program.symbols, *pointers))
        self.mailboxes = self.w.fresh("mailboxes_ptr")  # zeroed memory

    @abstractmethod
    def _maps(self) -> list[Param]:
        """The tensor map parameters."""

    @abstractmethod
    def _grid(self) -> tuple[GridDim, ...]:
        """The launch grid."""

    @abstractmethod
    def _body(self) -> None:
        """Emit the body of the kernel."""

    def _cleared(self) -> tuple[Buffer, ...]:
        """Extra buffers that must be zero at launch."""
        return ()

    def source(self) -> Source:
        """The complete kernel."""
        params = self._params()
        self.w.line('@gluon.jit(do_not_specialize=["zero"])')
        with self.w.block(f"def {self.name}({', '.join(p.text_name for p in params)})"):
            self.w.line(f'"""{self.schedule}"""')
            self._body()
            self._end_barriers()
        fresh = frozenset(b.name for b in self.program.buffers if b.role != "input")
        body = self.w.done()
        text = "\n\n\n".join(("\n".join(HEADER), *called_definitions(body), body))
        cleared = self._cleared()
        return Source(self.name, text, params, self._grid(), self.schedule.warps, max_registers=self.schedule.registers or None,
                      wide_index=self.wide, fresh=fresh.union(b.name for b in cleared), gluon=True, cleared=cleared,
                      ctas_per_group=self.schedule.ctas_per_row)

    def _params(self) -> tuple[Param, ...]:
        staged = self.schedule.staged
        used = {n.buffer for i, n in enumerate(self.program.nodes) if isinstance(n, (Load, Store)) and i not in staged}
        pointers = [Param(b.name, ParamKind.POINTER, f"{b.name}_ptr", b.dtype) for b in self.program.buffers if b.name in used]
        pointers += [Param(b.name, ParamKind.POINTER, self.mailboxes, b.dtype) for b in self._cleared()]
        sizes = [Param(s, ParamKind.SIZE, s) for s in self.program.symbols]
        return (*pointers, *self._maps(), *sizes, Param("zero", ParamKind.ZERO, "zero"))

    def _load_of(self, i: int) -> Load:
        node = self.program.nodes[i]
        assert isinstance(node, Load)
        return node

    def _map(self, i: int, name: str, taken: tuple[int, ...]) -> Param:
        return Param(self._load_of(i).buffer, ParamKind.TENSOR_MAP, name, self.program.dtypes[i], self._view(i, taken))

    def _view(self, i: int, taken: tuple[int, ...]) -> TensorView:
        """A tensor as TMA sees it: rows of columns, or rows of lines as wide as a box."""
        last = taken[-1]
        if len(taken) == 2:
            return TensorView((self.rows, self.extent), (self._step(i), 1), taken)
        return TensorView((self.rows, self.extent // last, last), (self._step(i), last, 1), taken)

    def _step(self, i: int) -> Size:
        step = contiguous_row_stride(self.kernel, self._load_of(i))
        assert step is not None
        return step

    def _barriers(self, places: int) -> None:
        """Initialize one mbarrier per slot. The fence makes them visible to TMA, which uses the async proxy."""
        self.barriers = places
        self.w.line(f"ready = gl.allocate_shared_memory(gl.int64, [{BARRIERS}, 1], mbarrier.MBarrierLayout())")
        with self.w.block(f"for slot_first in gl.static_range({places})"):
            self.w.line("mbarrier.init(ready.index(slot_first), count=1)")
        self.w.line("fence_async_shared()")

    def _end_barriers(self) -> None:
        """Invalidate the mbarriers at the end of the kernel, where a CTA barrier follows the last wait.

        Without this the compiler takes an mbarrier's last wait for its last use, and reuses its memory for exchanges between
        threads in reductions. The hardware does not allow that: H200, norm 16384x1024, one row per CTA, 4 to 27 rows per launch
        were wrong.
        """
        with self.w.block(f"for slot_first in gl.static_range({self.barriers})"):
            self.w.line("mbarrier.invalidate(ready.index(slot_first))")

    def _phase(self) -> str:
        """Text of the parity of the current slot's mbarrier."""
        return f"turn // {self.slots} & 1" if self.slots > 1 else "turn & 1"

    def _release(self) -> None:
        """Wait until all threads have read, so that TMA may overwrite the slot."""
        self.w.line("fence_async_shared()")
        self.w.line("cta_barrier()")
