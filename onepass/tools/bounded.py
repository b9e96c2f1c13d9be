"""JSON that somebody else may have written: read within bounds, so that no file takes more than a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import files
from ..errors import printable

MOST_BYTES = 8 << 20  # the largest result of the project has 420 kB
MOST_DEPTH = 16  # they have 5
MOST_VALUES = 400_000
MOST_ITEMS = 5_000  # of one list or object; `onepass bench all` has 205 rows
MOST_TEXT = 4_096  # characters of one text
MOST_DIGITS = 40  # of a whole number
LARGEST, LEAST = 1e18, 1e-9  # of numbers that are not 0: what follows from two of them is finite too


class OutOfBounds(ValueError):
    """What is too much in a file, as the rest of a sentence about it."""


def load_json(path: Path) -> Any:
    """What a file holds. OSError where it cannot be read; ValueError where it is not JSON, or too much of it."""
    try:
        value = json.loads(files.look(path, MOST_BYTES).decode("utf-8"), parse_int=_whole)
    except RecursionError:
        raise OutOfBounds(f"it is nested more than {MOST_DEPTH} deep") from None
    except OutOfBounds:
        raise
    except ValueError as error:  # not JSON, or not text
        raise OutOfBounds(f"it is not JSON ({clipped(str(error))})") from None
    _check(value)
    return value


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise OutOfBounds(f"a number in it has {len(digits)} digits")
    return int(digits)


def _check(value: Any) -> None:
    """Level by level, so that no value can be too deep to look at."""
    level, seen = [value], 0
    for _ in range(MOST_DEPTH):
        seen += len(level)
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str) and len(each) > MOST_TEXT:
                raise OutOfBounds(f"a text in it has {len(each)} characters, and at most {MOST_TEXT} are read")
            if isinstance(each, (list, dict)):
                if len(each) > MOST_ITEMS:
                    raise OutOfBounds(f"a list in it has {len(each)} items, and at most {MOST_ITEMS} are read")
                inner += each if isinstance(each, list) else [*each.keys(), *each.values()]
        if seen + len(inner) > MOST_VALUES:
            raise OutOfBounds(f"it holds more than {MOST_VALUES} values")
        if not inner:
            return
        level = inner
    raise OutOfBounds(f"it is nested more than {MOST_DEPTH} deep")


def in_bounds(value: int | float) -> bool:
    """Whether a number is finite and of a size that can be reckoned with."""
    return value == 0 or LEAST <= abs(value) <= LARGEST  # a NaN is not, and an int of any length can be compared


def clipped(text: str, most: int = 300) -> str:
    """Text of a file as part of a message."""
    return printable(text if len(text) <= most else text[:most] + "…")
