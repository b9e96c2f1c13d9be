"""Reads untrusted JSON within limits on size, depth and values, so that no file can use much time or memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import files
from ..errors import printable

MAX_BYTES = 8 << 20  # the largest result file in the repository has 420 kB
MAX_DEPTH = 16  # result files have 5
MAX_VALUES = 400_000
MAX_ITEMS = 5_000  # per list or object; `onepass bench all` has 205 rows
MAX_TEXT_LENGTH = 4_096  # characters per string
MAX_DIGITS = 40  # per integer
MAX_MAGNITUDE, MIN_MAGNITUDE = 1e18, 1e-9  # of nonzero numbers; products and quotients of two stay finite


class OutOfBounds(ValueError):
    """A file exceeds a limit. The message completes a sentence about the file."""


def load_json(path: Path) -> Any:
    """The parsed JSON of a file. Raises OSError if it cannot be read, OutOfBounds if it is not JSON or exceeds a limit."""
    try:
        value = json.loads(files.read_user_file(path, MAX_BYTES).decode("utf-8"), parse_int=_whole)
    except RecursionError:
        raise OutOfBounds(f"it is nested more than {MAX_DEPTH} deep") from None
    except OutOfBounds:
        raise
    except ValueError as error:  # not JSON, or not text
        raise OutOfBounds(f"it is not JSON ({truncated(str(error))})") from None
    _check(value)
    return value


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise OutOfBounds(f"a number in it has {len(digits)} digits")
    return int(digits)


def _check(value: Any) -> None:
    """Check all limits, level by level: recursion could overflow the stack."""
    level, seen = [value], 0
    for _ in range(MAX_DEPTH):
        seen += len(level)
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str) and len(each) > MAX_TEXT_LENGTH:
                raise OutOfBounds(f"a text in it has {len(each)} characters; the limit is {MAX_TEXT_LENGTH}")
            if isinstance(each, (list, dict)):
                if len(each) > MAX_ITEMS:
                    raise OutOfBounds(f"a list in it has {len(each)} items; the limit is {MAX_ITEMS}")
                inner += each if isinstance(each, list) else [*each.keys(), *each.values()]
        if seen + len(inner) > MAX_VALUES:
            raise OutOfBounds(f"it holds more than {MAX_VALUES} values")
        if not inner:
            return
        level = inner
    raise OutOfBounds(f"it is nested more than {MAX_DEPTH} deep")


def in_bounds(value: int | float) -> bool:
    """Whether a number is finite and its magnitude is within the limits."""
    return value == 0 or MIN_MAGNITUDE <= abs(value) <= MAX_MAGNITUDE  # false for NaN; an int of any size can be compared


def truncated(text: str, most: int = 300) -> str:
    """Text from a file, shortened and made printable for an error message."""
    return printable(text if len(text) <= most else text[:most] + "…")
