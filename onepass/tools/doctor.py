"""`onepass doctor`: versions, GPU, driver and settings, for a bug report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from .. import __version__
from ..knobs import describe
from ..runtime.card import doctor_facts


def facts() -> dict[str, Any]:
    """Everything doctor reports."""
    return {"onepass": __version__, **doctor_facts(), "settings": {k.variable: k.now for k in describe()}}


def table(found: Mapping[str, Any]) -> Table:
    """The facts as a two-column table. A nested fact is named by its path."""
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in _flat(found):
        shown.add_row(name, value)
    return shown


def _flat(found: Mapping[str, Any], under: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in found.items():
        path = f"{under} {name}".strip()
        match value:
            case {"ok": bool(), "why": why}:
                rows.append((path, "yes" if why is None else f"no: {why}"))
            case Mapping():
                rows += _flat(value, path)
            case list() | tuple():
                rows.append((path, ", ".join(map(str, value)) or "none"))
            case True | False:
                rows.append((path, "yes" if value else "no"))
            case _:
                rows.append((path, "-" if value is None else str(value)))
    return rows
