"""The shared memory of one CTA as a model: slots, barriers with phases, and copies that arrive only when they are waited for.

A copy by TMA is an event in three parts: it is issued, it lands at some time, and a wait on its barrier says that it has landed.
A GPU may land it at once, so that a kernel which forgets to wait is right most of the time. Here it always lands at the last
moment: between issue and wait its slot holds garbage, and touching it is an error. Every order of events that a GPU need not
forgive has an error of its own, which names the line of the kernel and the slot.

The compiler puts a barrier of the CTA between a read of shared memory and a copy into it that follows in the text. So a slot is
drained once the last read of it comes before the refill in the order of the text; a kernel that promises to say its barriers itself
is held to it (`says_barriers`), also between what threads write and what other threads read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .. import errors

_GARBAGE = 0xFF  # a NaN in every floating type, -1 in every signed integer
_SLOT_ALIGNMENT = 16


@dataclass(frozen=True)
class Descriptor:
    """A tensor as TMA sees it: `block` elements a copy, from any coordinates inside.

    A block may cross the end of the axes in `masked`, where zeros are filled in and the kernel must not use them; in the
    others it may not. It must start inside everywhere.
    """

    tensor: torch.Tensor
    block: tuple[int, ...]
    masked: frozenset[int] = frozenset()
    layout: Any = None  # of the slots it is copied to; kernels hand it on

    def __post_init__(self) -> None:
        size, strides = self.tensor.element_size(), self.tensor.stride()
        trouble = [what for what, wrong in {
            f"its block {self.block} has another rank": len(self.block) != self.tensor.dim(),
            "its rank is above 5": self.tensor.dim() > 5,
            "its first element is not at a multiple of 16 bytes": self.tensor.data_ptr() % 16,
            f"its strides {strides} are not multiples of 16 bytes": any(s * size % 16 for s in strides[:-1]),
            "its last axis is not contiguous": strides[-1] != 1,
            f"its block {self.block} is not of powers of two": any(b & (b - 1) for b in self.block),
            f"its block {self.block} has less than 16 bytes a line": self.block[-1] * size < 16,
        }.items() if wrong]
        if trouble:
            raise errors.NotForTma(shape=tuple(self.tensor.shape), detail="; ".join(trouble))

    @property
    def nbytes(self) -> int:
        """What one copy counts on its barrier: zeros that are filled in count too."""
        return math.prod(self.block) * self.tensor.element_size()

    def box(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the tensor and the part of the block that meet when the block starts at `at`."""
        ends = [min(c + b, n) for c, b, n in zip(at, self.block, self.tensor.shape, strict=True)]
        return (tuple(slice(c, e) for c, e in zip(at, ends, strict=True)),
                tuple(slice(0, e - c) for c, e in zip(at, ends, strict=True)))

    def crossed(self, at: Sequence[int]) -> list[int]:
        """The axes whose end a block at `at` crosses."""
        return [i for i, (c, b, n) in enumerate(zip(at, self.block, self.tensor.shape, strict=True)) if c + b > n]


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a tensor as unsigned integers: numpy has no bfloat16. Shares its memory."""
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(signed).numpy().view(f"u{tensor.element_size()}")


@dataclass(eq=False)
class Copy:
    """A copy by TMA: where in an allocation, and since which line of the kernel."""

    start: int
    end: int
    issued_at: str
    data: np.ndarray  # bytes
    overwrites: bool  # something was in the slot already
    read: bool = False  # since it arrived

    def overlaps(self, slot: Slot) -> bool:
        return self.start < slot.end and slot.start < self.end


@dataclass(eq=False)
class Allocation:
    """One allocation, with what happens to each of its bytes."""

    name: str
    nbytes: int
    in_flight: list[Copy] = field(default_factory=list)
    arrived: list[Copy] = field(default_factory=list)
    outgoing: list[Copy] = field(default_factory=list)  # to global memory

    def __post_init__(self) -> None:
        self.data = np.full(self.nbytes, _GARBAGE, np.uint8)
        self.filled = np.zeros(self.nbytes, bool)
        self.unfenced = np.zeros(self.nbytes, bool)  # written by threads, not yet seen by TMA


@dataclass(frozen=True, eq=False)
class Slot:
    """A contiguous part of an allocation, seen with a type and a shape."""

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
    """An mbarrier. A phase ends when all arrivals are in and every byte expected has landed."""

    name: str
    count: int
    phase: int = 0
    waited: int = 0  # phases before this one have been waited for
    expected: int = 0
    issued: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count
        self.landing: list[tuple[Allocation, Copy]] = []

    def advance(self) -> None:
        """Begin the next phase."""
        self.phase, self.pending, self.expected, self.issued, self.landing = self.phase + 1, self.count, 0, 0, []


@dataclass(frozen=True)
class Crossing:
    """A copy that met the end of its tensor: zeros were filled in, or nothing was written there."""

    where: str
    at: tuple[int, ...]
    axes: tuple[int, ...]


class Cta:
    """The shared memory of one CTA while it runs. `where` says which line of the kernel is at work."""

    def __init__(self, limit: int, where: Callable[[], str], explicit_barriers: bool = False) -> None:
        self.limit, self.where, self.explicit_barriers = limit, where, explicit_barriers
        self.reads: list[Slot] = []  # by threads, since the last barrier of the CTA
        self.writes: list[Slot] = []
        self.allocations: list[Allocation] = []
        self.barriers: dict[tuple[Allocation, int], Barrier] = {}
        self.stores: list[tuple[Allocation, Copy]] = []  # oldest first
        self.crossings: list[Crossing] = []
        self.bytes_in = self.bytes_out = 0

    @property
    def nbytes(self) -> int:
        """Of all allocations together."""
        return sum(-(-a.nbytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT for a in self.allocations)

    def allocate(self, name: str, shape: Sequence[int], dtype: np.dtype) -> Slot:
        """A new allocation, full of garbage."""
        allocation = Allocation(name, math.prod(shape) * dtype.itemsize)
        self.allocations.append(allocation)
        if self.nbytes > self.limit:
            raise errors.SharedMemoryExceeded(where=self.where(), slot=name, taken=self.nbytes, limit=self.limit)
        return Slot(allocation, name, 0, tuple(shape), dtype)

    # Threads

    def load(self, slot: Slot) -> np.ndarray:
        """What is in a slot."""
        for copy in slot.memory.in_flight:
            if copy.overlaps(slot):
                kind = errors.RefillBeforeDrain if copy.overwrites else errors.UseBeforeArrival
                raise kind(where=self.where(), slot=slot.name,
                           detail=f"it is read while the copy issued at {copy.issued_at} is in flight")
        if not slot.memory.filled[slot.bytes].all():
            raise errors.UseBeforeArrival(where=self.where(), slot=slot.name, detail="it is read before anything was written there")
        self._check_barrier_between(slot, "read", self.writes, errors.UseBeforeArrival)
        for copy in slot.memory.arrived:
            copy.read = copy.read or copy.overlaps(slot)
        self.reads.append(slot)
        return slot.memory.data[slot.bytes].view(slot.dtype).reshape(slot.shape).copy()

    def store(self, slot: Slot, value: np.ndarray) -> None:
        """Threads write a slot. Where it is part of what a copy brought, the rest of that is still to be read."""
        if value.shape != slot.shape or value.dtype.itemsize != slot.dtype.itemsize:
            raise errors.BlockMismatch(where=self.where(), slot=slot.name, detail=f"{value.shape} is written into {slot.shape}")
        self._check_free(slot)
        self._check_barrier_between(slot, "write", [*self.reads, *self.writes], errors.RefillBeforeDrain)
        self.writes.append(slot)
        slot.memory.data[slot.bytes] = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
        slot.memory.filled[slot.bytes] = slot.memory.unfenced[slot.bytes] = True
        slot.memory.arrived = [c for c in slot.memory.arrived if not (slot.start <= c.start and c.end <= slot.end)]

    def fence(self) -> None:
        """What threads wrote so far is seen by TMA."""
        for allocation in self.allocations:
            allocation.unfenced[:] = False

    def barrier(self) -> None:
        """All threads have come this far."""
        self.reads, self.writes = [], []

    def _check_barrier_between(self, slot: Slot, use: str, earlier: Sequence[Slot], kind: type[errors.KernelFault]) -> None:
        """A slot is about to be used: a barrier must lie between that and what other threads may be doing there."""
        for other in earlier if self.explicit_barriers else ():
            if other.overlaps(slot):
                raise kind(where=self.where(), slot=slot.name,
                           detail=f"no barrier of the CTA lies between the use of {other.name} and this {use}")

    def _check_free(self, slot: Slot) -> None:
        """A slot is about to be overwritten: no copy may be filling it or reading it."""
        for copy in slot.memory.in_flight:
            if copy.overlaps(slot):
                raise errors.RefillBeforeDrain(where=self.where(), slot=slot.name,
                                               detail=f"the copy issued at {copy.issued_at} into it is still in flight")
        for copy in slot.memory.outgoing:
            if copy.overlaps(slot):
                raise errors.StagingReused(where=self.where(), slot=slot.name, issued_at=copy.issued_at)

    # Copies

    def copy_in(self, source: Descriptor, at: Sequence[int], barrier: Slot, slot: Slot) -> None:
        """Issue a copy from global memory. It lands when its barrier's phase is waited for."""
        state, memory = self._barrier(barrier), slot.memory
        inside, part = self._box(source, at, slot)
        self._check_free(slot)
        self._check_fenced(slot)
        for copy in memory.arrived:
            if copy.overlaps(slot) and not copy.read:
                raise errors.RefillBeforeDrain(where=self.where(), slot=slot.name,
                                               detail=f"what the copy issued at {copy.issued_at} brought was never read")
        self._check_barrier_between(slot, "copy", [*self.reads, *self.writes], errors.RefillBeforeDrain)
        tensor = raw(source.tensor)
        data = np.zeros(source.block, tensor.dtype)
        data[part] = tensor[inside]
        copy = Copy(slot.start, slot.end, self.where(), data.view(np.uint8).reshape(-1), bool(memory.filled[slot.bytes].any()))
        if state.pending == 0 and state.issued + source.nbytes > state.expected:
            raise errors.ExpectedBytesDiffer(where=self.where(), slot=state.name, expected=state.expected,
                                             issued=state.issued + source.nbytes)
        state.issued += source.nbytes
        state.landing.append((memory, copy))
        memory.arrived = [c for c in memory.arrived if not c.overlaps(slot)]
        memory.in_flight.append(copy)
        memory.data[slot.bytes] = _GARBAGE
        self.bytes_in += source.nbytes

    def copy_out(self, target: Descriptor, at: Sequence[int], slot: Slot) -> None:
        """Issue a copy to global memory. Its slot must stay as it is until a `store_wait`."""
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
            raise errors.BlockMismatch(where=self.where(), slot=slot.name,
                                       detail=f"a block of {tensor.block} {tensor.tensor.dtype} and a slot of {slot.shape}")
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
        """Make a slot a barrier of `count` arrivals a phase."""
        key = (slot.memory, slot.start)
        if slot.end - slot.start != 8 or slot.dtype.itemsize != 8:
            raise errors.BlockMismatch(where=self.where(), slot=slot.name, detail=f"a barrier is one int64, not {slot.shape}")
        if key in self.barriers:
            raise errors.BarrierInitTwice(where=self.where(), slot=slot.name)
        self.barriers[key] = Barrier(slot.name, count)

    def invalidate(self, slot: Slot) -> None:
        """End a barrier's life."""
        state = self._barrier(slot)
        if state.landing:
            raise errors.CopyLeftBehind(where=self.where(), slot=slot.name, issued_at=state.landing[0][1].issued_at)
        del self.barriers[slot.memory, slot.start]

    def arrive(self, slot: Slot, count: int = 1, expected: int = 0) -> None:
        """One or more arrivals at a barrier; bytes that are `expected` must land too before its phase ends."""
        state = self._barrier(slot)
        if state.pending < count:
            raise errors.WrongPhase(where=self.where(), slot=slot.name, phase=state.phase,
                                    detail="it has all its arrivals already and was not waited for since")
        state.pending -= count
        state.expected += expected
        if state.pending == 0 and state.expected == state.issued == 0:
            state.advance()

    def wait(self, slot: Slot, parity: int) -> None:
        """Wait for a phase by its parity; what was copied under it has then landed."""
        state = self._barrier(slot)
        if parity not in (0, 1):
            raise errors.WrongPhase(where=self.where(), slot=slot.name, phase=state.phase, detail=f"{parity} is no parity")
        if state.phase % 2 != parity:
            if state.phase - 1 < state.waited:
                raise errors.WrongPhase(where=self.where(), slot=slot.name, phase=state.phase,
                                        detail=f"a wait for parity {parity} is answered at once by the phase before")
            state.waited = state.phase
            return
        if state.pending:
            raise errors.WaitsForever(where=self.where(), slot=slot.name, phase=state.phase, missing=state.pending,
                                      count=state.count)
        if state.issued != state.expected:
            raise errors.ExpectedBytesDiffer(where=self.where(), slot=slot.name, expected=state.expected, issued=state.issued)
        for allocation, copy in state.landing:
            allocation.data[copy.start:copy.end] = copy.data
            allocation.filled[copy.start:copy.end] = True
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
        """The CTA ends: nothing may still be on its way, nor a barrier be left of a kernel that says its own."""
        for allocation in self.allocations:
            for copy in (*allocation.in_flight, *allocation.outgoing):
                raise errors.CopyLeftBehind(where="the end of the kernel", slot=allocation.name, issued_at=copy.issued_at)
        for barrier in self.barriers.values() if self.explicit_barriers else ():
            raise errors.BarrierLeftBehind(where="the end of the kernel", slot=barrier.name)
