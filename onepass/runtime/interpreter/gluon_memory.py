"""Model of the shared memory of one CTA: slots, mbarriers with phases, and copies that land only when they are waited for.

A TMA copy is issued, lands at some later time, and a wait on its mbarrier confirms that it has landed. On a GPU it may land at
once, so a kernel that forgets to wait is right most of the time. In the model it lands as late as possible: between issue and wait
its slot holds garbage, and access to the slot is an error. Every order of events that is undefined on a GPU has its own error,
which names the line of the kernel and the slot.

The compiler inserts a CTA barrier between a read of shared memory and a later copy into it. So a slot may be refilled if its last
read comes earlier in the text. For a kernel that places its barriers itself (`explicit_barriers`), the model requires them, also
between writes of threads and reads of other threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ... import errors

_GARBAGE = 0xFF  # NaN in every float type, -1 in every signed integer
_SLOT_ALIGNMENT = 16


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor: a copy moves a `block` of elements from any coordinates inside the tensor.

    A block must start inside the tensor. It may cross the end only of axes in `masked`, where TMA fills in zeros that the kernel
    must not use.
    """

    tensor: torch.Tensor
    block: tuple[int, ...]
    masked: frozenset[int] = frozenset()
    layout: Any = None  # layout of the slots it is copied to, passed through by kernels

    def __post_init__(self) -> None:
        size, strides = self.tensor.element_size(), self.tensor.stride()
        trouble = [
            what
            for what, wrong in {
                f"its block {self.block} has another rank": len(self.block) != self.tensor.dim(),
                "its rank is above 5": self.tensor.dim() > 5,
                "its first element is not at a multiple of 16 bytes": self.tensor.data_ptr() % 16,
                f"its strides {strides} are not multiples of 16 bytes": any(s * size % 16 for s in strides[:-1]),
                "its last axis is not contiguous": strides[-1] != 1,
                f"its block {self.block} has extents that are not powers of two": any(b & (b - 1) for b in self.block),
                f"its block {self.block} has less than 16 bytes per line": self.block[-1] * size < 16,
            }.items()
            if wrong
        ]
        if trouble:
            raise errors.NotForTma(shape=tuple(self.tensor.shape), detail="; ".join(trouble))

    @property
    def nbytes(self) -> int:
        """The bytes that one copy counts on its mbarrier, including filled-in zeros."""
        return math.prod(self.block) * self.tensor.element_size()

    def box(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The overlapping parts of the tensor and of a block that starts at `at`."""
        ends = [min(c + b, n) for c, b, n in zip(at, self.block, self.tensor.shape, strict=True)]
        return (
            tuple(slice(c, e) for c, e in zip(at, ends, strict=True)),
            tuple(slice(0, e - c) for c, e in zip(at, ends, strict=True)),
        )

    def crossed(self, at: Sequence[int]) -> list[int]:
        """The axes whose end is crossed by a block at `at`."""
        return [i for i, (c, b, n) in enumerate(zip(at, self.block, self.tensor.shape, strict=True)) if c + b > n]


def raw(tensor: torch.Tensor) -> np.ndarray:
    """A view of a tensor's bits as unsigned integers, because numpy has no bfloat16."""
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(signed).numpy().view(f"u{tensor.element_size()}")


@dataclass(eq=False)
class Copy:
    """A TMA copy: its range in an allocation, and the line of the kernel that issued it."""

    start: int
    end: int
    issued_at: str
    data: np.ndarray  # bytes
    overwrites: bool  # the slot held data before
    read: bool = False  # by a thread, since it landed

    def overlaps(self, slot: Slot) -> bool:
        return self.start < slot.end and slot.start < self.end


@dataclass(eq=False)
class Allocation:
    """One allocation, with the state of each of its bytes."""

    name: str
    nbytes: int
    in_flight: list[Copy] = field(default_factory=list)
    arrived: list[Copy] = field(default_factory=list)
    outgoing: list[Copy] = field(default_factory=list)  # copies to global memory

    def __post_init__(self) -> None:
        self.data = np.full(self.nbytes, _GARBAGE, np.uint8)
        self.filled = np.zeros(self.nbytes, bool)
        self.unfenced = np.zeros(self.nbytes, bool)  # written by threads, not yet visible to TMA


@dataclass(frozen=True, eq=False)
class Slot:
    """A contiguous part of an allocation with a type and a shape."""

    memory: Allocation
    name: str
    start: int  # bytes
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes(self) -> slice:
        return slice(self.start, self.end)

    def overlaps(self, other: Slot) -> bool:
        return self.memory is other.memory and self.start < other.end and other.start < self.end


@dataclass(eq=False)
class Barrier:
    """An mbarrier. A phase ends when all arrivals are in and all expected bytes have landed."""

    name: str
    count: int
    phase: int = 0
    waited: int = 0  # number of phases that have been waited for
    expected: int = 0
    issued: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count
        self.landing: list[tuple[Allocation, Copy]] = []

    def advance(self) -> None:
        """Start the next phase."""
        self.phase, self.pending, self.expected, self.issued, self.landing = self.phase + 1, self.count, 0, 0, []


@dataclass(frozen=True)
class Crossing:
    """A copy that crossed the end of its tensor: zeros were filled in, or nothing was written there."""

    where: str
    at: tuple[int, ...]
    axes: tuple[int, ...]


class Cta:
    """The shared memory of one CTA while it runs. `where` describes the current line of the kernel."""

    def __init__(self, limit: int, where: Callable[[], str], explicit_barriers: bool = False) -> None:
        self.limit, self.where, self.explicit_barriers = limit, where, explicit_barriers
        self.reads: list[Slot] = []  # by threads, since the last CTA barrier
        self.writes: list[Slot] = []
        self.allocations: list[Allocation] = []
        self.barriers: dict[tuple[Allocation, int], Barrier] = {}
        self.stores: list[tuple[Allocation, Copy]] = []  # oldest first
        self.crossings: list[Crossing] = []
        self.bytes_in = self.bytes_out = 0

    @property
    def nbytes(self) -> int:
        """Total bytes of all allocations."""
        return sum(-(-a.nbytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT for a in self.allocations)

    def allocate(self, name: str, shape: Sequence[int], dtype: np.dtype) -> Slot:
        """Allocate memory filled with garbage."""
        allocation = Allocation(name, math.prod(shape) * dtype.itemsize)
        self.allocations.append(allocation)
        if self.nbytes > self.limit:
            raise errors.SharedMemoryExceeded(where=self.where(), slot=name, taken=self.nbytes, limit=self.limit)
        return Slot(allocation, name, 0, tuple(shape), dtype)

    # Threads

    def load(self, slot: Slot) -> np.ndarray:
        """Read a slot."""
        for copy in slot.memory.in_flight:
            if copy.overlaps(slot):
                kind = errors.RefillBeforeDrain if copy.overwrites else errors.UseBeforeArrival
                raise kind(
                    where=self.where(), slot=slot.name, detail=f"it is read while the copy issued at {copy.issued_at} is in flight"
                )
        if not slot.memory.filled[slot.bytes].all():
            raise errors.UseBeforeArrival(where=self.where(), slot=slot.name, detail="it is read before anything was written there")
        self._check_barrier_between(slot, "read", self.writes, errors.UseBeforeArrival)
        for copy in slot.memory.arrived:
            copy.read = copy.read or copy.overlaps(slot)
        self.reads.append(slot)
        return slot.memory.data[slot.bytes].view(slot.dtype).reshape(slot.shape).copy()

    def store(self, slot: Slot, value: np.ndarray) -> None:
        """Write a slot from threads. If the slot is part of a copy's data, the rest of that data must still be read."""
        if value.shape != slot.shape or value.dtype.itemsize != slot.dtype.itemsize:
            raise errors.BlockMismatch(where=self.where(), slot=slot.name, detail=f"{value.shape} is written into {slot.shape}")
        self._check_free(slot)
        self._check_barrier_between(slot, "write", [*self.reads, *self.writes], errors.RefillBeforeDrain)
        self.writes.append(slot)
        slot.memory.data[slot.bytes] = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
        slot.memory.filled[slot.bytes] = slot.memory.unfenced[slot.bytes] = True
        slot.memory.arrived = [c for c in slot.memory.arrived if not (slot.start <= c.start and c.end <= slot.end)]

    def fence(self) -> None:
        """Make all earlier writes of threads visible to TMA."""
        for allocation in self.allocations:
            allocation.unfenced[:] = False

    def barrier(self) -> None:
        """Synchronize all threads."""
        self.reads, self.writes = [], []

    def _check_barrier_between(self, slot: Slot, use: str, earlier: Sequence[Slot], kind: type[errors.KernelFault]) -> None:
        """Raise if no CTA barrier separates this use of a slot from earlier uses by other threads."""
        for other in earlier if self.explicit_barriers else ():
            if other.overlaps(slot):
                raise kind(
                    where=self.where(), slot=slot.name, detail=f"no CTA barrier lies between the use of {other.name} and this {use}"
                )

    def _check_free(self, slot: Slot) -> None:
        """Raise if a copy still fills or reads a slot that is about to be overwritten."""
        for copy in slot.memory.in_flight:
            if copy.overlaps(slot):
                raise errors.RefillBeforeDrain(
                    where=self.where(), slot=slot.name, detail=f"the copy issued at {copy.issued_at} into it is still in flight"
                )
        for copy in slot.memory.outgoing:
            if copy.overlaps(slot):
                raise errors.StagingReused(where=self.where(), slot=slot.name, issued_at=copy.issued_at)

    # Copies

    def copy_in(self, source: Descriptor, at: Sequence[int], barrier: Slot, slot: Slot) -> None:
        """Issue a copy from global memory. It lands when its mbarrier's phase is waited for."""
        state, memory = self._barrier(barrier), slot.memory
        inside, part = self._box(source, at, slot)
        self._check_free(slot)
        self._check_fenced(slot)
        for copy in memory.arrived:
            if copy.overlaps(slot) and not copy.read:
                raise errors.RefillBeforeDrain(
                    where=self.where(), slot=slot.name, detail=f"the data of the copy issued at {copy.issued_at} was never read"
                )
        self._check_barrier_between(slot, "copy", [*self.reads, *self.writes], errors.RefillBeforeDrain)
        tensor = raw(source.tensor)
        data = np.zeros(source.block, tensor.dtype)
        data[part] = tensor[inside]
        copy = Copy(slot.start, slot.end, self.where(), data.view(np.uint8).reshape(-1), bool(memory.filled[slot.bytes].any()))
        if state.pending == 0 and state.issued + source.nbytes > state.expected:
            raise errors.ExpectedBytesDiffer(
                where=self.where(), slot=state.name, expected=state.expected, issued=state.issued + source.nbytes
            )
        state.issued += source.nbytes
        state.landing.append((memory, copy))
        memory.arrived = [c for c in memory.arrived if not c.overlaps(slot)]
        memory.in_flight.append(copy)
        memory.data[slot.bytes] = _GARBAGE
        self.bytes_in += source.nbytes

    def copy_out(self, target: Descriptor, at: Sequence[int], slot: Slot) -> None:
        """Issue a copy to global memory. Its slot must not change until a `store_wait`."""
        inside, part = self._box(target, at, slot)
        self._check_fenced(slot)
        raw(target.tensor)[inside] = self.load(slot).view(f"u{slot.dtype.itemsize}")[part]
        copy = Copy(slot.start, slot.end, self.where(), np.empty(0, np.uint8), True)
        slot.memory.outgoing.append(copy)
        self.stores.append((slot.memory, copy))
        self.bytes_out += target.nbytes

    def store_wait(self, pending: int) -> None:
        """Wait until at most `pending` copies to global memory still read their slots."""
        while len(self.stores) > pending:
            allocation, copy = self.stores.pop(0)
            allocation.outgoing.remove(copy)

    def _check_fenced(self, slot: Slot) -> None:
        if slot.memory.unfenced[slot.bytes].any():
            raise errors.MissingFence(where=self.where(), slot=slot.name)

    def _box(self, tensor: Descriptor, at: Sequence[int], slot: Slot) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        if slot.shape != tensor.block or slot.dtype.itemsize != tensor.tensor.element_size():
            raise errors.BlockMismatch(
                where=self.where(),
                slot=slot.name,
                detail=f"a block of {tensor.block} {tensor.tensor.dtype} and a slot of {slot.shape}",
            )
        extent = tuple(tensor.tensor.shape)
        if len(at) != len(extent):
            raise errors.BlockMismatch(where=self.where(), slot=slot.name, detail=f"coordinates {tuple(at)} and axes {extent}")
        crossed = tensor.crossed(at)
        if any(not 0 <= c < n for c, n in zip(at, extent, strict=True)) or set(crossed) - tensor.masked:
            raise errors.CopyOutOfBounds(where=self.where(), slot=slot.name, at=tuple(at), block=tensor.block, extent=extent)
        if crossed:
            self.crossings.append(Crossing(self.where(), tuple(at), tuple(crossed)))
        return tensor.box(at)

    # Barriers

    def init(self, slot: Slot, count: int) -> None:
        """Initialize a slot as an mbarrier with `count` arrivals per phase."""
        key = (slot.memory, slot.start)
        if slot.end - slot.start != 8 or slot.dtype.itemsize != 8:
            raise errors.BlockMismatch(where=self.where(), slot=slot.name, detail=f"an mbarrier is one int64, not {slot.shape}")
        if key in self.barriers:
            raise errors.BarrierInitTwice(where=self.where(), slot=slot.name)
        self.barriers[key] = Barrier(slot.name, count)

    def invalidate(self, slot: Slot) -> None:
        """Invalidate an mbarrier."""
        state = self._barrier(slot)
        if state.landing:
            raise errors.CopyLeftBehind(where=self.where(), slot=slot.name, issued_at=state.landing[0][1].issued_at)
        del self.barriers[slot.memory, slot.start]

    def arrive(self, slot: Slot, count: int = 1, expected: int = 0) -> None:
        """Arrive at an mbarrier. Its phase ends when the `expected` bytes have landed too."""
        state = self._barrier(slot)
        if state.pending < count:
            raise errors.WrongPhase(
                where=self.where(),
                slot=slot.name,
                phase=state.phase,
                detail="it already has all its arrivals and was not waited for since",
            )
        state.pending -= count
        state.expected += expected
        if state.pending == 0 and state.expected == state.issued == 0:
            state.advance()

    def wait(self, slot: Slot, parity: int) -> None:
        """Wait for a phase by its parity. The phase's copies land now."""
        state = self._barrier(slot)
        if parity not in (0, 1):
            raise errors.WrongPhase(where=self.where(), slot=slot.name, phase=state.phase, detail=f"{parity} is not a parity")
        if state.phase % 2 != parity:
            if state.phase - 1 < state.waited:
                raise errors.WrongPhase(
                    where=self.where(),
                    slot=slot.name,
                    phase=state.phase,
                    detail=f"a wait for parity {parity} returns at once, for the previous phase",
                )
            state.waited = state.phase
            return
        if state.pending:
            raise errors.WaitsForever(
                where=self.where(), slot=slot.name, phase=state.phase, missing=state.pending, count=state.count
            )
        if state.issued != state.expected:
            raise errors.ExpectedBytesDiffer(where=self.where(), slot=slot.name, expected=state.expected, issued=state.issued)
        for allocation, copy in state.landing:
            allocation.data[copy.start : copy.end] = copy.data
            allocation.filled[copy.start : copy.end] = True
            allocation.in_flight.remove(copy)
            allocation.arrived.append(copy)
        state.advance()
        state.waited = state.phase

    def _barrier(self, slot: Slot) -> Barrier:
        state = self.barriers.get((slot.memory, slot.start))
        if state is None:
            raise errors.BarrierNotInitialized(where=self.where(), slot=slot.name)
        return state

    def finish(self) -> None:
        """End the CTA. Raises if a copy is still in flight, or, with `explicit_barriers`, if an mbarrier was not invalidated."""
        for allocation in self.allocations:
            for copy in (*allocation.in_flight, *allocation.outgoing):
                raise errors.CopyLeftBehind(where="the end of the kernel", slot=allocation.name, issued_at=copy.issued_at)
        for barrier in self.barriers.values() if self.explicit_barriers else ():
            raise errors.BarrierLeftBehind(where="the end of the kernel", slot=barrier.name)
