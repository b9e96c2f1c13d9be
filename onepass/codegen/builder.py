"""Builder of kernel IR: fresh names, and statements in nested blocks. A statement is not changed once it is there."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from .kernel_ir import Assign, For, If, Name, RightSide, Statement


class Builder:
    """Collects the statements of one kernel."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._body: list[Statement] = []
        self._names: dict[str, int] = dict.fromkeys((*reserved, *keyword.kwlist), 1)
        self._legend: dict[str, None] = {}

    def add(self, *statements: Statement) -> None:
        """Add statements to the current block."""
        self._body += statements

    def assign(self, hint: str, value: RightSide, *notes: str) -> Name:
        """Assign a value to a fresh name and return the name."""
        name = self.fresh(hint)
        self.add(Assign((name,), value, notes))
        return name

    def set(self, name: str, value: RightSide, *notes: str) -> Name:
        """Assign a value to a name that is reserved for it, or used already."""
        target = Name(name)
        self.add(Assign((target,), value, notes))
        return target

    def explain(self, suffix: str) -> None:
        """Say once in the kernel what a suffix of its names means."""
        self._legend[suffix] = None

    @property
    def legend(self) -> str:
        """What the suffixes of the kernel's names mean."""
        return "; ".join(self._legend)

    @contextmanager
    def block(self, header: For | If) -> Iterator[None]:
        """Statements added meanwhile go into the body of a loop or branch."""
        outer, self._body = self._body, []
        yield
        inner, self._body = self._body, outer
        self.add(replace(header, body=tuple(inner)))

    def fresh(self, hint: str) -> Name:
        """An unused name: the hint itself, or the hint with a number."""
        seen = self._names.get(hint, 0)
        self._names[hint] = seen + 1
        name = hint if seen == 0 else f"{hint}_{seen}"
        if seen and name in self._names:
            return self.fresh(name)
        self._names.setdefault(name, 1)  # a later hint may equal this name
        return Name(name)

    def done(self) -> tuple[Statement, ...]:
        """All statements."""
        return tuple(self._body)
