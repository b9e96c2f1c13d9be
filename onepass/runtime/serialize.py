"""Serialization of artifacts and GPU measurements: JSON with a checksum, read back strictly.

Values are written by their run-time type and read by the type their dataclass declares. Data that does not match the declaration
exactly is rejected. A dataclass is written with its name, which tells the alternatives of a union apart. Names in a file are never
resolved to code: classes come only from the declarations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..ir.expr import DTYPES, DType
from ..ir.size import Sym, parse_size
from .compiled import Artifact

SCHEMA = 3  # version of the file format; the meaning of the data is covered by the key, which includes the package's sources

CLASS = "class"  # key of a dataclass's name, which no field can have


class CorruptEntry(Exception):
    """A file whose content is not what was written. Users see a coded error instead."""


def pack(key: str, value: Any) -> bytes:
    """Encode an entry as the content of its file."""
    return _with_checksum(key, json.dumps(_to_json(value), separators=(",", ":")).encode())


def unpack(key: str, content: bytes, declared: type[Any] = Artifact) -> Any:
    """Decode a file as an instance of `declared`. CorruptEntry if any byte differs from what was written under this key."""
    _, _, body = content.partition(b"\n")
    if _with_checksum(key, body) != content:
        raise CorruptEntry("the checksum, the key or the schema does not match")
    try:
        return _from_json(declared, json.loads(body))
    except Exception as error:  # a value that does not match may make a class or a parser raise anything
        raise CorruptEntry(f"it is not readable ({type(error).__name__}: {error})") from None


def _with_checksum(key: str, body: bytes) -> bytes:
    """The file content: a header line with schema, key and checksum, then the body. Readers compare all of it."""
    head = {"schema": SCHEMA, "key": key, "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(head).encode() + b"\n" + body


def _to_json(value: Any) -> Any:
    """Convert a value to JSON data."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case DType():
            return value.name
        case Sym():
            return str(value)
        case Enum():
            return value.name
        case tuple():
            return [_to_json(v) for v in value]
        case frozenset():
            return sorted(_to_json(v) for v in value)
        case Mapping():
            return [[_to_json(k), _to_json(v)] for k, v in value.items()]
        case _ if is_dataclass(value):
            return {CLASS: type(value).__name__} | {f.name: _to_json(getattr(value, f.name)) for f in fields(value) if f.init}
    raise TypeError(f"{type(value).__name__} cannot be stored")


def _from_json(declared: Any, data: Any) -> Any:
    """Convert JSON data to the declared type. ValueError if it does not match."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin in (Union, UnionType):
        return _from_union(arguments, data)
    if origin is tuple:
        return _from_tuple(arguments, _list(data))
    if origin is frozenset:
        return frozenset(_from_json(arguments[0], d) for d in _list(data))
    if origin is Mapping:
        pair = tuple[arguments[0], arguments[1]]  # type: ignore[valid-type]
        return dict(_from_json(pair, d) for d in _list(data))
    return _from_plain(declared, data)


def _from_plain(declared: Any, data: Any) -> Any:
    if declared is DType and isinstance(data, str) and data in DTYPES:
        return DTYPES[data]
    if declared is Sym and isinstance(data, str) and isinstance(size := parse_size(data), Sym):
        return size
    if declared is float and type(data) is int:  # the sum of an empty sequence of floats is the integer 0
        return float(data)
    if declared in (bool, int, float, str, type(None)) and type(data) is declared:
        return data
    if isinstance(declared, type) and issubclass(declared, Enum) and isinstance(data, str) and data in declared.__members__:
        return declared[data]
    if isinstance(declared, type) and is_dataclass(declared) and declared not in (DType, Sym) and isinstance(data, dict):
        hints = _declarations(declared)
        if data.keys() == {CLASS, *hints} and data[CLASS] == declared.__name__:
            return declared(**{name: _from_json(hint, data[name]) for name, hint in hints.items()})
    raise ValueError(f"not a {getattr(declared, '__name__', declared)}: {str(data)[:40]!r}")


def _from_union(choices: tuple[Any, ...], data: Any) -> Any:
    for choice in choices:
        try:
            return _from_json(choice, data)
        except ValueError:
            continue
    raise ValueError(f"fits none of its types: {str(data)[:40]!r}")


def _from_tuple(arguments: tuple[Any, ...], data: list[Any]) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_from_json(arguments[0], d) for d in data)
    if len(arguments) != len(data):
        raise ValueError(f"{len(data)} values, not {len(arguments)}")
    return tuple(_from_json(a, d) for a, d in zip(arguments, data))


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"not a list: {str(data)[:40]!r}")
    return data


@cache
def _declarations(declared: type) -> dict[str, Any]:
    hints = get_type_hints(declared)
    return {f.name: hints[f.name] for f in fields(declared) if f.init}
