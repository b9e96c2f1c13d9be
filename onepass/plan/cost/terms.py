"""The terms of a predicted time.

Each kernel family has a record of terms: what takes time, each in us, and `us`, the one formula that combines them. Costing a
candidate only makes such a record and evaluates it. Names and sources are annotations of its fields, which `terms` reads when
someone asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Protocol, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Label:
    """What a field of a record of terms is."""

    name: str
    source: str  # traffic, device facts and constants that it is computed from
    factor: bool = False  # multiplies times instead of being one
    hidden: bool = False  # says how other terms combine


@dataclass(frozen=True, slots=True)
class Term:
    """One named part of a predicted time."""

    name: str
    us: float  # the time it takes by itself; for a slowdown, the time it adds
    adds_us: float  # how much shorter the predicted time would be without it: little, if it is hidden behind others
    source: str


class Terms(Protocol):
    """A record of terms of one kernel family, whose fields are annotated with labels."""

    @property
    def us(self) -> float:
        """The predicted time."""

    @property
    def limits(self) -> tuple[tuple[str, float], ...]:
        """The times of the resources that work at once. The largest limits the kernel."""

    def _asdict(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Cost:
    """A predicted time and the terms it is made of."""

    us: float
    dram_bytes: float
    in_flight: float  # bytes outstanding per SM
    record: Terms
    correction: float = 1.0  # measured on this card for the kernel family; part of `us`

    @staticmethod
    def of(record: Terms, dram_bytes: float, in_flight: float) -> "Cost":
        """The cost that a record of terms adds up to."""
        return Cost(record.us, dram_bytes, in_flight, record)

    def corrected(self, correction: float) -> "Cost":
        """The cost times a correction measured on this card."""
        return self if correction == 1.0 else replace(self, us=self.us * correction, correction=correction)

    @property
    def limits(self) -> tuple[tuple[str, float], ...]:
        """The times of the resources that work at once, by name."""
        return self.record.limits

    @property
    def limit(self) -> str:
        """The limiting resource."""
        return max(self.limits, key=lambda named: named[1])[0]

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms that take any time, in the order of the formula."""
        return terms(self.record)


def terms(record: Terms) -> tuple[Term, ...]:
    """The terms of a record that take any time."""
    found, whole, values = [], record.us, record._asdict()
    build: Callable[..., Terms] = type(record)
    for field, label in labels(type(record)).items():
        neutral = 1.0 if label.factor else 0.0
        if label.hidden or values[field] == neutral:
            continue
        adds = whole - build(**{**values, field: neutral}).us
        found.append(Term(label.name, adds if label.factor else values[field], adds, label.source))
    return tuple(found)


@cache
def labels(kind: type) -> dict[str, Label]:
    """The labels of a record's fields."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        assert get_origin(hint) is Annotated, f"{kind.__name__}.{name} has no label"
        found[name] = get_args(hint)[1]
    return found


def limits(memory: float, issue: float, special: float, latency: float, l1: float | None = None) -> tuple[tuple[str, float], ...]:
    """The times of the resources that work at once, by name."""
    also = () if l1 is None else (("L1", l1),)
    return ("memory", memory), ("issue", issue), ("special functions", special), *also, ("latency", latency)


def soft_max(*times: float, sharpness: float) -> float:
    """Soft maximum: times close to each other add up."""
    return float(sum(t**sharpness for t in times) ** (1 / sharpness))
