"""What Gluon kernels that read rings in shared memory have in common: their frame, their barriers, how a place is freed."""

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
    """A kernel around its body. Those who write one say what it is given, how many CTAs there are, and the body."""

    def __init__(self, kernel: Kernel, schedule: Schedule, name: str, wide: bool, own_names: Iterable[str]) -> None:
        assert schedule.stages <= BARRIERS
        self.kernel, self.schedule, self.name, self.wide = kernel, schedule, name, wide
        self.program, self.slots = kernel.program, schedule.stages
        self.rows, extent = self.program.extent(kernel.space.rows), self.program.extent(kernel.space.cols)
        assert isinstance(extent, int)
        self.extent = extent
        self.barriers = 0
        pointers = (f"{b.name}_ptr" for b in self.program.buffers)
        self.w = Writer((*RESERVED, *FUNCTIONS, *OWN_NAMES, *own_names, *self.program.symbols, *pointers))
        self.mailboxes = self.w.fresh("mailboxes_ptr")  # memory that is 0 when the kernel starts

    @abstractmethod
    def _maps(self) -> list[Param]:
        """Tensors as TMA sees them."""

    @abstractmethod
    def _grid(self) -> tuple[GridDim, ...]:
        """How many CTAs there are."""

    @abstractmethod
    def _body(self) -> None:
        """All lines of the kernel."""

    def _cleared(self) -> tuple[Buffer, ...]:
        """Memory of its own that must be 0 when it starts."""
        return ()

    def source(self) -> Source:
        """The whole kernel."""
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
        parked = self.schedule.staged
        used = {n.buffer for i, n in enumerate(self.program.nodes) if isinstance(n, (Load, Store)) and i not in parked}
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
        """A tensor as TMA sees it: rows of columns, or rows of rows of as many columns as a box has."""
        last = taken[-1]
        if len(taken) == 2:
            return TensorView((self.rows, self.extent), (self._step(i), 1), taken)
        return TensorView((self.rows, self.extent // last, last), (self._step(i), last, 1), taken)

    def _step(self, i: int) -> Size:
        step = contiguous_row_stride(self.kernel, self._load_of(i))
        assert step is not None
        return step

    def _barriers(self, places: int) -> None:
        """A barrier for every place. TMA is another party to shared memory, so it must be told that they are ready."""
        self.barriers = places
        self.w.line(f"ready = gl.allocate_shared_memory(gl.int64, [{BARRIERS}, 1], mbarrier.MBarrierLayout())")
        with self.w.block(f"for slot_first in gl.static_range({places})"):
            self.w.line("mbarrier.init(ready.index(slot_first), count=1)")
        self.w.line("fence_async_shared()")

    def _end_barriers(self) -> None:
        """At the end of a kernel, which has a barrier of the CTA after its last wait.

        A barrier that is not ended lives only up to its last wait, as far as the compiler knows, which then lets threads exchange
        what they reduce in the same memory. The hardware does not allow that: H200, norm of 16384 x 1024, one row a CTA, 4 to 27
        rows of every launch were wrong.
        """
        with self.w.block(f"for slot_first in gl.static_range({self.barriers})"):
            self.w.line("mbarrier.invalidate(ready.index(slot_first))")

    def _phase(self) -> str:
        """Which of its two phases the barrier of this turn's place is in."""
        return f"turn // {self.slots} & 1" if self.slots > 1 else "turn & 1"

    def _release(self) -> None:
        """Every thread has read what it wanted, and TMA may write there."""
        self.w.line("fence_async_shared()")
        self.w.line("cta_barrier()")
