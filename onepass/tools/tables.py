"""Formatting of reports: tables, sizes and times as text, with a fixed width and no color outside a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import StringIO

from rich.console import Console, RenderableType
from rich.table import Table

WIDTH = 118  # characters, if there is no terminal


def console() -> Console:
    """The console of the command line: as wide as the terminal, or WIDTH if there is none."""
    return Console(width=None if _is_terminal() else WIDTH, highlight=False)


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # a process can be started without standard output, or close it
        return False


def as_text(*parts: RenderableType) -> str:
    """What rich would print, without color."""
    page = StringIO()
    printer = Console(file=page, width=WIDTH, color_system=None, highlight=False)
    for part in parts:
        printer.print(part)
    return "\n".join(line.rstrip() for line in page.getvalue().rstrip("\n").splitlines())


def table(title: str, *columns: tuple[str, str]) -> Table:
    """An empty table. A column is a name and an alignment: "left", "right", or "name" (left, without line breaks)."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, align in columns:
        made.add_column(name, justify="right" if align == "right" else "left", overflow="fold", no_wrap=align == "name")
    return made


def human_bytes(n: float) -> str:
    """Bytes with three significant digits: 402 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def us(cost: float | None) -> str:
    """A time in microseconds; None means impossible."""
    return "impossible" if cost is None else f"{cost:.1f} us"


def ratio(a: float, b: float) -> str:
    """a / b with three decimals, or a dash if b is 0."""
    return f"{a / b:.3f}" if b else "-"


def counted(n: int, noun: str) -> str:
    """A count with its noun: 1 kernel, 2 kernels."""
    return f"{n} {noun}{'s' * (n != 1)}"


def places(lines: Sequence[str], most: int = 3) -> str:
    """Source locations without their text: `model.py:12, model.py:15 and 2 more`."""
    named = list(dict.fromkeys(line.split(" ")[0] for line in lines))
    shown = ", ".join(named[:most]) or "unknown"
    return shown + (f" and {len(named) - most} more" if len(named) > most else "")
