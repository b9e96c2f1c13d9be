"""Reads and writes the data file of constants.

Each entry has a value, its unit, what it scales with, how it was obtained and from which measurements, and its meaning. A name that
the records do not know, or one that is missing, is an error, so that file and code cannot drift apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

from .records import Constants

SHIPPED_FILE = Path(__file__).parent / "h200.json"
# How a value was obtained.
BASES = ("fitted", "kept", "measured", "read", "assumed")


class BadConstants(ValueError):
    """A data file does not hold the constants that the code reads."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A constant as the data file describes it."""

    value: float
    unit: str
    scales_with: str
    basis: str
    data: tuple[str, ...]  # result files that support the value
    meaning: str


Entries: TypeAlias = Mapping[str, Mapping[str, Entry]]  # by section and name


def read(path: Path = SHIPPED_FILE) -> tuple[str, Entries]:
    """The device of a data file, and its entries."""
    try:
        raw = json.loads(path.read_text())
        return raw.pop("device"), {
            section: {name: _entry(section, name, found) for name, found in entries.items()} for section, entries in raw.items()
        }
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise BadConstants(f"{path.name}: {error}") from None


def _entry(section: str, name: str, found: Mapping[str, Any]) -> Entry:
    wanted = [f.name for f in fields(Entry)]
    if list(found) != wanted:
        raise BadConstants(f"{section}.{name} has the fields {', '.join(found)}, not {', '.join(wanted)}")
    entry = Entry(**{**found, "data": tuple(found["data"])})
    if entry.basis not in BASES:
        raise BadConstants(f"{section}.{name} is {entry.basis!r}, not one of {', '.join(BASES)}")
    if (entry.basis in ("fitted", "kept", "measured")) != bool(entry.data):
        raise BadConstants(f"{section}.{name} is {entry.basis}, which does not go with its data {list(entry.data)}")
    return entry


def parse(device: str, entries: Entries) -> Constants:
    """The records of some entries. Raises if a name is unknown or missing, or a value does not have the type of its field."""
    kinds = {name: kind for name, kind in get_type_hints(Constants).items() if name != "device"}
    _same_names("sections", entries, kinds)
    found = {}
    for section, kind in kinds.items():
        types = get_type_hints(kind)
        _same_names(section, entries[section], types)
        values = {name: entry.value for name, entry in entries[section].items()}
        for name, value in values.items():
            whole_if_needed = isinstance(value, int) if types[name] is int else isinstance(value, int | float) and isfinite(value)
            if isinstance(value, bool) or not whole_if_needed:
                raise BadConstants(f"{section}.{name} is {value!r}, not a number of type {types[name].__name__}")
        found[section] = kind(**{name: types[name](value) for name, value in values.items()})
    return Constants(device=device, **found)


def _same_names(what: str, given: Mapping[str, object], known: Mapping[str, object]) -> None:
    unknown, missing = sorted(given.keys() - known.keys()), sorted(known.keys() - given.keys())
    if unknown or missing:
        raise BadConstants(f"{what}: unknown {', '.join(unknown) or 'none'}; missing {', '.join(missing) or 'none'}")


def load(path: Path = SHIPPED_FILE) -> Constants:
    """The constants of a data file."""
    return parse(*read(path))


def with_values(entries: Entries, section: str, values: Mapping[str, float]) -> Entries:
    """Entries with other values in one section."""
    changed = {name: Entry(**{**asdict(e), "value": values.get(name, e.value)}) for name, e in entries[section].items()}
    return {**entries, section: changed}


def text_of(device: str, entries: Entries) -> str:
    """The text of a data file: one line per constant."""
    sections = []
    for section, found in entries.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(asdict(entry))}" for name, entry in found.items())
        sections.append(f" {json.dumps(section)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join([f' "device": {json.dumps(device)}', *sections]) + "\n}\n"


SHIPPED = load()
