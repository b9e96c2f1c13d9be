"""Writer of Python text: lines, fresh names and indented blocks. Lines are not changed once written."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Writer:
    """Collects the lines of one module."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._lines: list[str] = []
        self._depth = 0
        self._names: dict[str, int] = dict.fromkeys((*reserved, *keyword.kwlist), 1)
        self._last_note = ""

    def line(self, text: str = "", note: str = "") -> None:
        """Write one line. `note` is its place in the user's code, written once per run of lines from the same place."""
        comment = f"  # {note}" if note and note != self._last_note else ""
        self._last_note = note or self._last_note
        self._lines.append(f"{'    ' * self._depth}{text}{comment}".rstrip())

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """An indented block under `header:`."""
        self.line(f"{header}:")
        self._depth += 1
        yield
        self._depth -= 1

    def fresh(self, hint: str) -> str:
        """An unused name: the hint itself, or the hint with a number."""
        seen = self._names.get(hint, 0)
        self._names[hint] = seen + 1
        name = hint if seen == 0 else f"{hint}_{seen}"
        if seen and name in self._names:
            return self.fresh(name)
        self._names.setdefault(name, 1)  # a later hint may equal this name
        return name

    def done(self) -> str:
        """The module's text."""
        text = "\n".join(self._lines) + "\n"
        compile(text, "<a kernel>", "exec", dont_inherit=True)  # not ast.parse: it is not thread-safe in Python 3.11
        return text
