"""Run a Gluon kernel on CPU tensors with a functional model of the GPU, because Gluon has no interpreter.

Arithmetic, pointers and masks come from the interpreter of Triton kernels. Shared memory, mbarriers and TMA copies come from
`gluon_memory`, which raises on every order of events that is undefined on a GPU. Layouts say which thread holds which element and
do not change results, so the model ignores them; the compiler checks them.

CTAs run one after the other, so races between them are not modeled. The CTAs of a group, which exchange states through global
memory, run round-robin: a CTA yields when a volatile load reads a word that is still 0. If all CTAs of a group only poll such
words, the model raises a deadlock error. Warp specialization, clusters and multicast are not supported.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch

from ... import compat, errors
from ...codegen.source import Param, ParamKind, Source
from ...stages import stage
from ..module import load_text
from .coroutines import RoundRobin
from .gluon_memory import Crossing, Cta, Descriptor
from .gluon_values import KernelDescriptor, SharedMemory, hashable, integer, truth, unwrapped
from .interpret import _ONE_AT_A_TIME, _Engine

HOPPER_SHARED = 232_448  # maximum bytes of shared memory of a CTA on sm_90

Argument = torch.Tensor | Descriptor | np.integer | int | float


@dataclass(frozen=True)
class Trace:
    """Counters of one kernel run, over all CTAs."""

    programs: int = 0
    shared_bytes: int = 0  # allocated by the kernel's text, maximum over CTAs; the compiler adds scratch for reductions
    bytes_in: int = 0  # copied by TMA
    bytes_out: int = 0
    crossings: tuple[Crossing, ...] = ()  # copies that crossed the end of a tensor on a masked axis

    def plus(self, cta: Cta) -> Trace:
        return Trace(
            self.programs + 1,
            max(self.shared_bytes, cta.nbytes),
            self.bytes_in + cta.bytes_in,
            self.bytes_out + cta.bytes_out,
            (*self.crossings, *cta.crossings),
        )


@stage("running a kernel in the model of shared memory")
def run_source(
    source: Source, buffers: Mapping[str, torch.Tensor], bindings: Mapping[str, int], *, shared_limit: int = HOPPER_SHARED
) -> Trace:
    """Execute a generated kernel over its whole grid. `buffers` are CPU tensors, written in place. `bindings` are the sizes."""
    size = np.int64 if source.wide_index else np.int32

    def argument(param: Param) -> Argument:
        match param.kind:
            case ParamKind.POINTER:
                return buffers[param.name]
            case ParamKind.TENSOR_MAP:
                return _descriptor(param, buffers[param.name], bindings)
            case ParamKind.SIZE:
                return size(bindings[param.name])
            case ParamKind.ZERO:
                return np.int32(0)

    return run(
        source.name,
        source.text,
        {p.text_name: argument(p) for p in source.params},
        source.programs(bindings),
        shared_limit=shared_limit,
        warps=source.warps,
        explicit_barriers=True,
        ctas_per_group=source.ctas_per_group,
    )


def _descriptor(param: Param, buffer: torch.Tensor, bindings: Mapping[str, int]) -> Descriptor:
    """The TMA descriptor of a buffer. Generated kernels mask the axes whose extent is not a multiple of the box."""
    assert param.view is not None
    shape, strides = param.view.resolved(bindings)
    masked = frozenset(i for i, (n, b) in enumerate(zip(shape, param.view.box, strict=True)) if n % b)
    return Descriptor(torch.as_strided(buffer, shape, strides), param.view.box, masked)


def run(
    name: str,
    text: str,
    arguments: Mapping[str, Argument],
    programs: int,
    *,
    shared_limit: int = HOPPER_SHARED,
    warps: int = 4,
    explicit_barriers: bool = False,
    ctas_per_group: int = 1,
) -> Trace:
    """Execute the kernel called `name` that `text` defines. Tensors are written in place.

    `arguments` maps parameter names to values: a tensor is passed as its pointer, a Descriptor as a TMA descriptor. Groups of
    `ctas_per_group` consecutive CTAs may wait for each other.
    """
    engine, function = _engine(), load_text(name, text)
    constant = {p.name for p in function.params if p.is_constexpr}
    bound = {k: v if k in constant else engine.bind(v) for k, v in arguments.items()}
    kernel = engine.interpreted(function.fn)
    with _ONE_AT_A_TIME, engine.operators(), np.errstate(all="ignore"):
        engine.begin(name, function.fn.__code__.co_filename, arguments, warps)
        engine.builder.set_grid_dim(programs, 1, 1)
        trace = Trace()
        for first in range(0, programs, ctas_per_group):
            group = range(first, min(first + ctas_per_group, programs))
            engine.round_robin = RoundRobin(len(group), engine.deadlock)
            ctas = [Cta(shared_limit, engine.where, explicit_barriers) for _ in group]
            engine.round_robin.run([partial(engine.run_cta, kernel, bound, p, cta) for p, cta in zip(group, ctas, strict=True)])
            for cta in ctas:
                trace = trace.plus(cta)
    return trace


@cache
def _engine() -> GluonEngine:
    return GluonEngine(compat.triton_interpreter(), compat.gluon_language("model Gluon kernels"))


class GluonEngine(_Engine):
    """The interpreter of Triton kernels, with the functions of Gluon bound to the model."""

    def __init__(self, parts: compat.InterpreterParts, gluon: Any) -> None:
        super().__init__(parts)
        self.gluon = gluon
        self.builder.__class__ = _checked(type(self.builder))
        self.builder.engine = self
        self.cta = Cta(0, self.where)
        self.round_robin = RoundRobin(1, RuntimeError)
        self.begin("", "", {}, 0)
        # Kernels reach a function through its module or import it directly, so it is found by identity, not by name.
        self._models = {
            getattr(module, name): model
            for module, models in self._modeled()
            for name, model in models.items()
            if hasattr(module, name)
        }

    def begin(self, name: str, filename: str, arguments: Mapping[str, Argument], warps: int) -> None:
        """Start a kernel: record the memory that it may access."""
        self.kernel, self.filename, self.warps = name, filename, warps
        tensors = [a for a in arguments.values() if isinstance(a, torch.Tensor)]
        self.buffers = [(t.data_ptr(), t.data_ptr() + _extent(t)) for t in tensors]

    def run_cta(self, kernel: Callable[..., Any], bound: Mapping[str, Any], program: int, cta: Cta) -> None:
        """Run one CTA from start to end."""
        self.switch_to(program, cta)
        with np.errstate(all="ignore"):
            kernel(**bound)
        cta.finish()

    def switch_to(self, program: int, cta: Cta) -> None:
        """Make this CTA the current one."""
        self.program, self.cta = program, cta
        self.builder.set_grid_idx(program, 0, 0)

    def deadlock(self) -> Exception:
        """The error for a group whose CTAs all wait."""
        return errors.NeverPublished(where=self.where(), count=self.round_robin.count)

    def volatile_read(self, words: np.ndarray) -> None:
        """Yield after a volatile load if one of the words is still 0."""
        if not words.all():
            current = self.program, self.cta
            self.round_robin.yield_turn()
            self.switch_to(*current)

    def bind(self, value: Argument) -> Any:
        """An argument as the kernel sees it."""
        tl = self.language
        if isinstance(value, Descriptor):
            return KernelDescriptor(self, value)
        if isinstance(value, torch.Tensor):
            return self.tensor(np.array(value.data_ptr(), dtype=np.uint64), tl.pointer_type(self.dtype(value.dtype)))
        if isinstance(value, float):
            return self.tensor(np.array(value, dtype=np.float32), tl.float32)
        wide = value.itemsize == 8 if isinstance(value, np.integer) else not -(1 << 31) <= value < 1 << 31
        return self.tensor(np.array(value, dtype=np.int64 if wide else np.int32), tl.int64 if wide else tl.int32)

    def dtype(self, of: torch.dtype) -> Any:
        """The Triton type of a torch dtype."""
        named = {torch.bool: "int1", torch.float8_e4m3fn: "float8e4nv", torch.float8_e5m2: "float8e5"}
        return getattr(self.language, named.get(of, str(of).removeprefix("torch.")))

    def numpy_type(self, dtype: Any) -> np.dtype[Any]:
        """The numpy type that stores values of a type. Narrow floats are stored as bits."""
        found: np.dtype[Any] = np.dtype(self.parts.runtime._get_np_dtype(dtype))
        return found

    def line(self) -> int:
        """The current line number of the kernel's text."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.filename:
            frame = frame.f_back  # type: ignore[assignment]
        return frame.f_lineno if frame is not None else 0

    def assigned(self, otherwise: str) -> str:
        """The variable that the current line assigns to."""
        found = re.match(r"\s*(\w+)\s*=[^=]", linecache.getline(self.filename, self.line()))
        return found[1] if found else otherwise

    def where(self) -> str:
        """The current line, for an error message."""
        return f"{self.kernel}, line {self.line()} ({linecache.getline(self.filename, self.line()).strip()})"

    def bound(self, value: Any) -> Any:
        """A Gluon object as an interpreted function sees it."""
        if isinstance(value, ModuleType) and value.__name__.startswith("triton.experimental.gluon.language"):
            return self.namespace(value)
        if callable(value) and hashable(value) and value in self._models:
            return self._models[value]
        if getattr(value, "__module__", "").startswith("triton.experimental.gluon.") and self.language.core.is_builtin(value):
            return getattr(self.namespace(self.language), value.__name__, partial(self.refuse, value.__name__))
        return super().bound(value)

    def refuse(self, what: str, *_: Any, **__: Any) -> NoReturn:
        """Raise the error for a part of Gluon that is not modeled."""
        raise errors.NotModeled(where=self.where(), what=what)

    def namespace(self, module: ModuleType) -> SimpleNamespace:
        """A module of Gluon, bound to the model."""
        name = module.__name__
        if not name.startswith("triton.experimental.gluon.") or name in self._namespaces:
            return super().namespace(module)
        self._namespaces[name] = namespace = SimpleNamespace()
        triton = vars(super().namespace(self.language)) if module is self.gluon else {}
        for key, value in vars(module).items():
            if not key.startswith("__"):
                forwarded = key in triton and (not hashable(value) or value not in self._models)
                setattr(namespace, key, triton[key] if forwarded else self.bound(value))
        return namespace

    def _modeled(self) -> list[tuple[Any, dict[str, Callable[..., Any]]]]:
        """The modeled functions by module. Names that the installed release lacks are skipped by the caller."""
        language: dict[str, Callable[..., Any]] = {
            "allocate_shared_memory": self.allocate,
            "arange": self.arange,
            "full": self.full,
            "zeros": self.zeros,
            "convert_layout": _passed_through,
            "set_auto_layout": _passed_through,
            "static_assert": _static_assert,
            "barrier": self.barrier,
            "thread_barrier": self.barrier,
            "num_warps": lambda: self.warps,
            "num_ctas": lambda: 1,
        }
        mbarrier: dict[str, Callable[..., Any]] = {
            "init": self.init,
            "invalidate": lambda mbarrier: self.cta.invalidate(mbarrier.slot),
            "expect": self.expect,
            "arrive": self.arrive,
            "wait": self.wait,
            "allocate_mbarrier": self.allocate_mbarrier,
        }
        tma: dict[str, Callable[..., Any]] = {
            "async_copy_global_to_shared": self.copy_in,
            "async_copy_shared_to_global": self.copy_out,
            "store_wait": lambda pendings: self.cta.store_wait(integer(pendings)),
        }
        hopper = self.gluon.nvidia.hopper
        return [
            (self.gluon, language),
            (hopper.mbarrier, mbarrier),
            (hopper.tma, tma),
            (hopper, {"fence_async_shared": lambda cluster=False: self.cta.fence()}),
        ]

    def barrier(self, *, cluster: Any = False) -> None:
        self.cta.barrier()

    def allocate(self, element_ty: Any, shape: Any, layout: Any, value: Any = None) -> SharedMemory:
        """gl.allocate_shared_memory. The allocation is named after the variable it is assigned to."""
        element = unwrapped(element_ty)
        name = self.assigned(f"the allocation of line {self.line()}")
        slot = self.cta.allocate(name, [integer(s) for s in unwrapped(shape)], self.numpy_type(element))
        shared = SharedMemory(self, slot, element, unwrapped(layout))
        if value is not None:
            shared.store(value)
        return shared

    def allocate_mbarrier(self, batch: Any = None, two_ctas: bool = False) -> SharedMemory:
        """Memory for one mbarrier, or for `batch` of them."""
        count = unwrapped(batch)
        return self.allocate(self.language.int64, [1] if count is None else [count, 1], None)

    def arange(self, start: Any, end: Any, layout: Any = None) -> Any:
        return self.namespace(self.language).arange(integer(start), integer(end))

    def full(self, shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        return self.namespace(self.language).full([integer(s) for s in unwrapped(shape)], value, unwrapped(dtype))

    def zeros(self, shape: Any, dtype: Any, layout: Any = None) -> Any:
        return self.full(shape, 0, dtype)

    def init(self, mbarrier: SharedMemory, count: Any) -> None:
        self.cta.init(mbarrier.slot, integer(count))

    def expect(self, mbarrier: SharedMemory, bytes_per_cta: Any = None, pred: Any = True, **named: Any) -> None:
        """mbarrier.expect. Its second parameter has another name in each of two releases."""
        if truth(pred):
            self.cta.arrive(mbarrier.slot, 1, integer(named.get("bytes", bytes_per_cta)))

    def arrive(self, mbarrier: SharedMemory, *, count: Any = 1, pred: Any = True) -> None:
        if truth(pred):
            self.cta.arrive(mbarrier.slot, integer(count))

    def wait(self, mbarrier: SharedMemory, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        if truth(pred):
            self.cta.wait(mbarrier.slot, integer(phase))

    def copy_in(
        self,
        tensor_desc: KernelDescriptor,
        coord: Any,
        barrier: SharedMemory,
        result: SharedMemory,
        pred: Any = True,
        multicast: Any = False,
    ) -> None:
        """tma.async_copy_global_to_shared."""
        if unwrapped(multicast):
            self.refuse("multicast")
        if truth(pred):
            self.cta.copy_in(tensor_desc.descriptor, [integer(c) for c in coord], barrier.slot, result.slot)

    def copy_out(self, tensor_desc: KernelDescriptor, coord: Any, src: SharedMemory) -> None:
        self.cta.copy_out(tensor_desc.descriptor, [integer(c) for c in coord], src.slot)


def _checked(builder: type) -> type:
    """The interpreter's builder with a bounds check of every access to global memory against the kernel's buffers."""

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        _check_bounds(self.engine, ptrs, mask, "read")
        found = builder.create_masked_load(self, ptrs, mask, *rest)  # type: ignore[attr-defined]
        if rest[-1]:  # volatile
            self.engine.volatile_read(found.data)
        return found

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check_bounds(self.engine, ptrs, mask, "write")
        self.engine.round_robin.made_progress()
        return builder.create_masked_store(self, ptrs, value, mask, *rest)  # type: ignore[attr-defined]

    checks = {"create_masked_load": create_masked_load, "create_masked_store": create_masked_store}
    return type("CheckedBuilder", (builder,), checks)


def _check_bounds(engine: GluonEngine, ptrs: Any, mask: Any, use: str) -> None:
    size = engine.numpy_type(ptrs.get_element_ty()).itemsize
    lanes = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)]
    good = np.zeros(lanes.shape, bool)
    for start, end in engine.buffers:
        good |= (lanes >= start) & (lanes + np.uint64(size) <= end)
    if not good.all():
        raise errors.AccessOutOfBounds(where=engine.where(), count=int((~good).sum()), use=use)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()


def _passed_through(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _static_assert(condition: Any, message: str = "") -> None:
    assert condition, message
