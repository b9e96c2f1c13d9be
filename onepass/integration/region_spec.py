"""A region as a graph carries it: one text, which any process can run.

The graph that calls a region may come from a cache, so its process may not be the one that captured and optimized the region. The
text starts with a digest of the rest, by which a process finds a region that it has already parsed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..ir.program import Program
from ..ir.text import one_line, parse, show
from ..stages import stage
from .settings import CallSettings

MAX_LINES = 3  # lines of user code that a graph carries for each region
DIGEST_DIGITS = 32
MAX_DECODED = 1024  # texts whose Programs are kept


@dataclass(frozen=True)
class RegionSpec:
    """Everything a process needs to run a region."""

    id: str  # a short id for reports, the same in every process
    captured: Program  # the reference for results, which fallbacks compute
    program: Program  # the same, optimized, from which kernels are made
    lines: tuple[str, ...] = ()  # of user code, such as model.py:12
    settings: CallSettings = CallSettings()


def encode(spec: RegionSpec) -> str:
    """The text of a region: a digest, and a line of JSON."""
    fields: dict[str, Any] = {
        "id": spec.id,
        "captured": one_line(show(spec.captured)),
        "program": one_line(show(spec.program)),
        "lines": spec.lines,
        "settings": spec.settings.given,
    }
    body = json.dumps(fields)
    return f"{hashlib.sha256(body.encode()).hexdigest()[:DIGEST_DIGITS]} {body}"


def digest_of(text: str) -> str:
    """The digest that identifies an encoded region. Cheap, because every call needs it."""
    return text[:DIGEST_DIGITS]


@lru_cache(maxsize=MAX_DECODED)
@stage("reading a region")
def decode(text: str) -> RegionSpec:
    """The inverse of `encode`. Programs have no lines of user code."""
    fields = json.loads(text[DIGEST_DIGITS:])
    return RegionSpec(
        fields["id"],
        parse(fields["captured"]),
        parse(fields["program"]),
        tuple(fields["lines"]),
        CallSettings(**fields["settings"]),
    )


def places(lines: Sequence[str]) -> tuple[str, ...]:
    """The first lines of user code, without their text."""
    return tuple(line.split(" ")[0] for line in lines[:MAX_LINES])
