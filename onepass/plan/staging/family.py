"""What planning has to know of a kernel family that stages inputs in shared memory.

Of families in registers the roles of the two sides say enough. What a family stages, in what pieces and next to what, only the
family itself can say, in one record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...device import Device
from ..choices import Choices
from ..cost.case import Case
from ..cost.terms import Cost
from ..kernel import Kernel
from ..legality import Illegal, Reason
from ..resources import Demand
from ..schedule.base import Common
from ..staged_rows import BARRIERS
from ..traffic import Traffic

MAX_RINGS_PER_SM = 8  # CTAs per SM that each own a ring

S = TypeVar("S", bound=Common)


@dataclass(frozen=True, slots=True)
class StagedFamily(Generic[S]):
    """One family: its record, and the functions that planning asks."""

    record: type[S]
    held: bool  # the reduced side is held on chip; otherwise it is walked
    candidates: Callable[[Kernel, Demand, Traffic, Device], Iterator[S]]  # the sizes worth scoring on a device with TMA
    completed: Callable[[Kernel, Choices, S], S]  # a candidate with the choices that are not searched
    refused: Callable[[Kernel, S], Illegal | None]  # why a schedule of valid sizes cannot run a kernel
    registers: Callable[[Demand, S], float]  # per thread, as predicted
    smem_bytes: Callable[[Demand, S], int]  # of a CTA, exactly
    cost: Callable[[Case], Cost]


def too_many_slots(slots: int) -> Illegal | None:
    """A ring has an mbarrier per slot."""
    return Illegal(Reason.STORAGE, f"a ring of {slots} slots: there are {BARRIERS} mbarriers") if slots > BARRIERS else None
