"""`onepass plot`: reads bench results and writes chart images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import BadSpec, PlotsNeedMatplotlib, TooManyCharts
from ..files import slug
from .charts import charts, footer
from .results import load, write_atomically

FORMATS = ("png", "svg")
THEME_NAMES = ("light", "dark")
MAX_CHARTS = 64  # all suites of a card together give 30


def plot(
    files: Sequence[Path],
    out: Path,
    *,
    themes: Iterable[str] = THEME_NAMES,
    formats: Iterable[str] = FORMATS,
    metric: str = "gbps",
    titles: Mapping[str, str] | None = None,
) -> tuple[Path, ...]:
    """Draw every chart of some bench results, in each theme and format. Returns the paths written, in order.

    `metric` is the quantity in charts over widths: gbps, us or floor.
    """
    if find_spec("matplotlib") is None:
        raise PlotsNeedMatplotlib
    from .drawing import THEMES, render  # imported late: matplotlib is optional

    runs = [load(f) for f in files]
    found = charts(runs, metric, titles)
    if not found:
        raise BadSpec(what="The choice of results", text=", ".join(map(str, files)), detail="no row has a time of onepass to draw")
    if len(found) > MAX_CHARTS:
        raise TooManyCharts(found=len(found), most=MAX_CHARTS)
    note = footer(runs)
    written = []
    for chart in found:
        for theme in themes:
            for kind in formats:
                path = out / f"{slug(chart.name)}-{theme}.{kind}"  # names from a file must not escape the folder
                write_atomically(path, render(chart, THEMES[theme], note, kind))
                written.append(path)
    return tuple(written)


def expand_both(what: str, given: str, known: Sequence[str]) -> tuple[str, ...]:
    """The value of an option as a tuple: "both" selects every known value."""
    if given != "both" and given not in known:
        raise BadSpec(what=what, text=given, detail=f"known are {', '.join(known)} and both")
    return tuple(known) if given == "both" else (given,)
