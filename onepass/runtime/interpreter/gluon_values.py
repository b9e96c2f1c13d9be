"""The values that a Gluon kernel handles in the functional model: descriptors, shared memory, and constants unwrapped."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ... import errors
from .gluon_memory import Descriptor, Slot

if TYPE_CHECKING:
    from .gluon_model import GluonEngine


class KernelDescriptor:
    """A TMA descriptor as a kernel sees it."""

    def __init__(self, engine: GluonEngine, descriptor: Descriptor) -> None:
        self.descriptor, self.layout = descriptor, descriptor.layout
        self.dtype = engine.dtype(descriptor.tensor.dtype)
        self.shape, self.strides = list(descriptor.tensor.shape), list(descriptor.tensor.stride())
        self.block_shape = list(descriptor.block)
        self.block_type = engine.language.block_type(self.dtype, self.block_shape)
        self.nbytes_per_cta = descriptor.nbytes


class SharedMemory:
    """A shared_memory_descriptor as a kernel sees it."""

    def __init__(self, engine: GluonEngine, slot: Slot, dtype: Any, layout: Any) -> None:
        self.engine, self.slot, self.dtype, self.layout = engine, slot, dtype, layout
        self.shape = list(slot.shape)
        self.rank, self.numel = len(self.shape), math.prod(self.shape)

    def load(self, layout: Any = None) -> Any:
        return self.engine.tensor(self.engine.cta.load(self.slot), self.dtype)

    def store(self, value: Any) -> None:
        """Store from threads into the slot."""
        if value.dtype != self.dtype:
            raise errors.BlockMismatch(where=self.engine.where(), slot=self.slot.name, detail=f"{value.dtype} into {self.dtype}")
        self.engine.cta.store(self.slot, value.handle.data)

    def index(self, index: Any) -> SharedMemory:
        return self._part(integer(index), 1, 0, self.slot.shape[1:], f"[{integer(index)}]")

    def slice(self, start: Any, length: Any, dim: Any = 0) -> SharedMemory:
        """A range of an axis. Only contiguous slices are supported: all earlier axes must have extent 1."""
        first, count, axis = integer(start), integer(length), integer(dim)
        if any(n != 1 for n in self.slot.shape[:axis]):
            self.engine.refuse("a slice of shared memory that is not contiguous")
        shape = (*self.slot.shape[:axis], count, *self.slot.shape[axis + 1 :])
        return self._part(first, count, axis, shape, f"[{first}:{first + count}]")

    def reshape(self, shape: Any) -> SharedMemory:
        return self._as(self.dtype, shape, self.layout, self.slot.name)

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> SharedMemory:
        return self._as(unwrapped(dtype), shape, unwrapped(layout), self.engine.assigned(self.slot.name))

    def permute(self, order: Any) -> SharedMemory:
        return self.engine.refuse("a transposed view of shared memory")

    def _keep_alive(self) -> None:
        pass

    def _part(self, first: int, count: int, axis: int, shape: tuple[int, ...], label: str) -> SharedMemory:
        """`count` elements of an axis from `first` on. Raises if they are out of range."""
        slot, extent = self.slot, self.slot.shape[axis]
        if first < 0 or first + count > extent:
            raise errors.OutsideAllocation(where=self.engine.where(), detail=label, slot=slot.name, shape=slot.shape)
        step = math.prod(slot.shape[axis + 1 :]) * slot.dtype.itemsize
        part = replace(slot, name=slot.name + label, start=slot.start + first * step, shape=shape)
        return SharedMemory(self.engine, part, self.dtype, self.layout)

    def _as(self, dtype: Any, shape: Any, layout: Any, name: str) -> SharedMemory:
        """The same bytes, from the start, with another type and shape."""
        extents = tuple(integer(s) for s in unwrapped(shape))
        seen = replace(self.slot, name=name, shape=extents, dtype=self.engine.numpy_type(dtype))
        if seen.end > self.slot.end:
            raise errors.OutsideAllocation(
                where=self.engine.where(), detail=f"a view of {seen.shape} {dtype}", slot=seen.name, shape=self.slot.shape
            )
        return SharedMemory(self.engine, seen, dtype, layout)


def hashable(value: Any) -> bool:
    """Whether a value of a kernel can be a key."""
    return getattr(type(value), "__hash__", None) is not None and not isinstance(value, tuple | list | dict)


def unwrapped(value: Any) -> Any:
    """The value of a constexpr, or the value itself."""
    return value.value if type(value).__name__ == "constexpr" else value


def integer(value: Any) -> int:
    """The Python integer of a constexpr or a scalar tensor."""
    value = unwrapped(value)
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


def truth(value: Any) -> bool:
    """The Python bool of a constexpr or a scalar tensor."""
    return bool(integer(value))
