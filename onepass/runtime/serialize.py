"""Made, and what was measured on a card <-> bytes: JSON with a checksum, read back strictly.

Values are written by what they are and read by what their dataclass declares; whatever does not fit the declaration exactly
is refused. No name in a file is ever looked up as code: classes come from the declarations alone.
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

SCHEMA = 2  # of the files; what they mean is in their key, which names the package's sources


class CorruptEntry(Exception):
    """Bytes that are not what was written. Never reaches a user."""


def pack(key: str, kept: Any) -> bytes:
    """The file of an entry."""
    return _sealed(key, json.dumps(_written(kept), separators=(",", ":")).encode())


def unpack(key: str, content: bytes, declared: type[Any] = Artifact) -> Any:
    """The entry a file holds, as the dataclass it was; Damaged if any byte is not as it was written under this key."""
    _, _, body = content.partition(b"\n")
    if _sealed(key, body) != content:
        raise CorruptEntry("the checksum, the key or the schema does not match")
    try:
        return _read(declared, json.loads(body))
    except Exception as error:  # whatever a value that does not fit makes a class or a parser raise
        raise CorruptEntry(f"it is not readable ({type(error).__name__}: {error})") from None


def _sealed(key: str, body: bytes) -> bytes:
    """A first line that says what the rest is and sums it up; comparing whole files leaves no byte unchecked."""
    head = {"schema": SCHEMA, "key": key, "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(head).encode() + b"\n" + body


def _written(value: Any) -> Any:
    """A value as JSON has it."""
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
            return [_written(v) for v in value]
        case frozenset():
            return sorted(_written(v) for v in value)
        case Mapping():
            return [[_written(k), _written(v)] for k, v in value.items()]
        case _ if is_dataclass(value):
            return {f.name: _written(getattr(value, f.name)) for f in fields(value)}
    raise TypeError(f"{type(value).__name__} is not something the store keeps")


def _read(declared: Any, data: Any) -> Any:
    """JSON as the value a declaration asks for; ValueError where it does not fit."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin in (Union, UnionType):
        return _read_either(arguments, data)
    if origin is tuple:
        return _read_tuple(arguments, _list(data))
    if origin is frozenset:
        return frozenset(_read(arguments[0], d) for d in _list(data))
    if origin is Mapping:
        pair = tuple[arguments[0], arguments[1]]  # type: ignore[valid-type]
        return dict(_read(pair, d) for d in _list(data))
    return _read_plain(declared, data)


def _read_plain(declared: Any, data: Any) -> Any:
    if declared is DType and isinstance(data, str) and data in DTYPES:
        return DTYPES[data]
    if declared is Sym and isinstance(data, str) and isinstance(size := parse_size(data), Sym):
        return size
    if declared is float and type(data) is int:  # a sum of no times is the integer 0
        return float(data)
    if declared in (bool, int, float, str, type(None)) and type(data) is declared:
        return data
    if isinstance(declared, type) and issubclass(declared, Enum) and isinstance(data, str) and data in declared.__members__:
        return declared[data]
    if is_dataclass(declared) and declared not in (DType, Sym) and isinstance(data, dict):
        hints = _declarations(declared)  # type: ignore[arg-type]
        if data.keys() == hints.keys():
            return declared(**{name: _read(hint, data[name]) for name, hint in hints.items()})  # type: ignore[operator]
    raise ValueError(f"not a {getattr(declared, '__name__', declared)}: {str(data)[:40]!r}")


def _read_either(choices: tuple[Any, ...], data: Any) -> Any:
    for choice in choices:
        try:
            return _read(choice, data)
        except ValueError:
            continue
    raise ValueError(f"fits none of its types: {str(data)[:40]!r}")


def _read_tuple(arguments: tuple[Any, ...], data: list[Any]) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_read(arguments[0], d) for d in data)
    if len(arguments) != len(data):
        raise ValueError(f"{len(data)} values, not {len(arguments)}")
    return tuple(_read(a, d) for a, d in zip(arguments, data))


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"not a list: {str(data)[:40]!r}")
    return data


@cache
def _declarations(declared: type) -> dict[str, Any]:
    hints = get_type_hints(declared)
    return {f.name: hints[f.name] for f in fields(declared)}
