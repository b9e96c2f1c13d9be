"""Renders charts with matplotlib, in a light and a dark theme. onepass has a strong color, other providers muted ones.

Output is deterministic: the same chart gives the same bytes, independent of the date and the user's matplotlib settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from .charts import CLOSE_PREDICTION, RATE, TIME, BarChart, Chart, Line, LineChart, Panel, ScatterChart
from .results import ONEPASS_PROVIDERS, PROVIDERS
from .ticks import floor_ticks, labeled_ticks, nice_ticks, spread_out

WIDTH = 8.6  # inches; with DPI, twice the width of a README, for high-density screens
DPI = 200
MARGIN = 0.25  # inches
HEADER_INCHES, FOOTER_INCHES = 0.78, 0.42  # above all axes for the titles, below them for the data source
BAR_STEP = 0.27  # inches


@dataclass(frozen=True, slots=True)
class Style:
    """Colors, marker and line style of a provider."""

    light: str
    dark: str
    marker: str
    dash: str = "-"
    width: float = 1.4


@dataclass(frozen=True, slots=True)
class Theme:
    """Colors of the background and of everything drawn on it."""

    name: str
    background: str
    foreground: str
    faint: str  # axes and small print
    grid: str

    def color(self, provider: str) -> str:
        """The color of a provider in this theme."""
        look = STYLES[provider]
        return look.dark if self.name == "dark" else look.light


THEMES = {
    t.name: t
    for t in (Theme("light", "#ffffff", "#1f2328", "#59636e", "#e4e8ec"), Theme("dark", "#0d1117", "#f0f6fc", "#9198a1", "#262c34"))
}

STYLES = {
    "onepass": Style("#d9480f", "#ff8a3d", "o", width=2.6),
    "onepass-tuned": Style("#d9480f", "#ff8a3d", "D", ":", width=1.6),
    "eager": Style("#9aa1a9", "#7d858f", "v"),
    "inductor": Style("#4f6d93", "#7f9cc4", "s"),
    "inductor-nonstrict": Style("#7391b5", "#5f7ea8", "^", "--"),
    "inductor-max": Style("#7391b5", "#a9c1e2", "P", ":"),
    "liger": Style("#7c9a7e", "#7fa383", "X"),
    "quack": Style("#8d7aa8", "#a794c4", "h"),
}


def render(chart: Chart, theme: Theme, footer: str, kind: str) -> bytes:
    """A chart as file content; `kind` is png or svg."""
    nothing = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    page = BytesIO()
    with settings(theme):
        draw(chart, theme, footer).savefig(page, format=kind, dpi=DPI, metadata=nothing)
    return page.getvalue()


def draw(chart: Chart, theme: Theme, footer: str) -> Figure:
    """The figure of a chart, with titles and footer."""
    match chart:
        case LineChart():
            figure = _draw_lines(chart, theme)
        case BarChart():
            figure = _draw_bars(chart, theme)
        case ScatterChart():
            figure = _draw_scatter(chart, theme)
    height = figure.get_figheight()
    _write_line(figure, 1 - 0.2 / height, chart.title, fontsize=13, fontweight="bold", va="top")
    _write_line(figure, 1 - 0.46 / height, chart.subtitle, fontsize=9, color=theme.faint, va="top")
    _write_line(figure, 0.14 / height, footer, fontsize=7, color=theme.faint, va="bottom")
    return figure


@contextmanager
def settings(theme: Theme) -> Iterator[None]:
    """Set up matplotlib for a theme; restore its settings on exit."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's settings
        matplotlib.rcParams.update(
            {
                "text.parse_math": False,
                "text.usetex": False,  # a dollar sign in a name is literal
                "svg.hashsalt": "onepass",
                "svg.fonttype": "path",
                "font.family": ["DejaVu Sans"],
                "font.size": 9,
                "text.color": theme.foreground,
                "figure.facecolor": theme.background,
                "savefig.facecolor": theme.background,
                "axes.facecolor": theme.background,
                "axes.edgecolor": theme.faint,
                "axes.labelcolor": theme.faint,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.linewidth": 0.8,
                "axes.axisbelow": True,
                "xtick.color": theme.faint,
                "ytick.color": theme.faint,
                "xtick.labelsize": 8.5,
                "ytick.labelsize": 8.5,
                "grid.color": theme.grid,
                "grid.linewidth": 0.8,
            }
        )
        yield


# ---- lines


def _draw_lines(chart: LineChart, theme: Theme) -> Figure:
    height = 4.4
    figure = Figure((WIDTH, height))
    labels = max(_inches(figure, line.provider) for line in chart.panels[-1].lines) + 0.34
    count, between = len(chart.panels), 0.62
    left, right = MARGIN + 0.5, WIDTH - MARGIN - labels
    each = (right - left - between * (count - 1)) / count
    for i, panel in enumerate(chart.panels):
        bottom, top = (FOOTER_INCHES + 0.5) / height, 1 - (HEADER_INCHES + 0.2) / height
        axes = figure.add_axes(((left + i * (each + between)) / WIDTH, bottom, each / WIDTH, top - bottom))
        _set_size_axis(axes, chart.places, chart.x_title, each)
        _draw_panel(axes, panel, chart.places, theme)
        if i == count - 1:
            _label_lines(axes, panel, chart.places, theme)
    return figure


def _set_size_axis(axes: Axes, places: Sequence[int], title: str, width: float) -> None:
    """A logarithmic x axis, `width` inches wide, with a plain number at every size where one fits."""
    axes.set_xscale("log", base=2)
    low, high = math.log2(places[0]), math.log2(places[-1])
    pad = 2 ** (0.03 * (high - low))
    axes.set_xlim(places[0] / pad, places[-1] * pad)
    shown = labeled_ticks(places, width / (1.06 * (high - low)))
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(FixedLocator([p for p in places if p not in shown]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(title)


def _draw_panel(axes: Axes, panel: Panel, places: Sequence[int], theme: Theme) -> None:
    axes.grid(axis="y")
    better = "higher" if panel.quantity == RATE else "lower"
    axes.set_title(f"{panel.quantity}, {better} is better", loc="left", fontsize=9, color=theme.faint, pad=8)
    axes.plot(places, panel.floor, color=theme.foreground, linewidth=1, linestyle=(0, (5, 3)), zorder=2)
    for line in reversed(panel.lines):  # onepass is drawn last, on top
        look = STYLES[line.provider]
        values = [math.nan if v is None else v for v in line.values]
        axes.plot(
            places,
            values,
            color=theme.color(line.provider),
            linewidth=look.width,
            linestyle=look.dash,
            marker=look.marker,
            markersize=5.5 if line.provider == "onepass" else 4,
            markeredgecolor=theme.background,
            markeredgewidth=0.6,
            zorder=4 if line.provider in ONEPASS_PROVIDERS else 3,
        )
    if panel.quantity == RATE:
        axes.set_ylim(0, 1.1 * max(*panel.floor, *_values(panel.lines)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0f}"))
    else:
        measured = _values(panel.lines)  # for few rows the floor is far below any measured time
        floors = [v for v in panel.floor if v >= min(measured) / 2]
        _ratio_axis(axes, [*floors, *measured])
    _label_floor(axes, panel, places, theme)


def _label_floor(axes: Axes, panel: Panel, places: Sequence[int], theme: Theme) -> None:
    """Label the floor line on its faster side, where there are hardly any points."""
    if panel.quantity == RATE:
        place, offset, align = 0, (0, 4), ("left", "bottom")
    elif panel.quantity == TIME:
        low = axes.get_ylim()[0]
        place = next((i for i, v in enumerate(panel.floor) if v > 1.2 * low), len(places) - 1)
        offset, align = (6, -2), ("left", "top")
    else:
        place, offset, align = 0, (0, -4), ("left", "top")
    axes.annotate(
        "floor",
        (places[place], panel.floor[place]),
        offset,
        textcoords="offset points",
        fontsize=8,
        color=theme.foreground,
        ha=align[0],
        va=align[1],
    )


def _ratio_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic y axis with plain numbers."""
    low, high = min(values) / 1.4, max(values) * 1.15
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator(nice_ticks(low, high)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _label_lines(axes: Axes, panel: Panel, places: Sequence[int], theme: Theme) -> None:
    """Label each line next to its last point. Labels move apart if they would overlap; a thin line connects each to its point."""
    scale = 72 / axes.figure.dpi  # points, which are the same in every format
    box = axes.get_window_extent()
    ends = [next((i, v) for i, v in reversed(tuple(enumerate(line.values))) if v is not None) for line in panel.lines]
    points = [scale * axes.transData.transform((places[i], v)) for i, v in ends]
    heights = spread_out([float(y) for _, y in points], 11.5, scale * box.y0, scale * box.y1)
    x = scale * box.x1 + 12
    for line, point, y in zip(panel.lines, points, heights, strict=True):
        color = theme.color(line.provider)
        if line.values[-1] is not None:  # a connecting line from further left would cross the others
            axes.annotate(
                "",
                tuple(point),
                (x, y),
                "figure points",
                "figure points",
                annotation_clip=False,
                zorder=2,
                arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 2, "shrinkB": 4},
            )
        axes.annotate(
            line.provider,
            (x, y),
            xycoords="figure points",
            fontsize=9,
            color=color,
            va="center",
            annotation_clip=False,
            fontweight="bold" if line.provider == "onepass" else "normal",
        )


def _values(lines: Sequence[Line]) -> list[float]:
    return [v for line in lines for v in line.values if v is not None]


# ---- bars


def _draw_bars(chart: BarChart, theme: Theme) -> Figure:
    rows = len(chart.bars)
    legend, below = 0.3, 0.42
    height = HEADER_INCHES + legend + rows * BAR_STEP + below + FOOTER_INCHES
    figure = Figure((WIDTH, height))
    left = MARGIN + max(_inches(figure, b.label) for b in chart.bars) + 0.12
    columns = 1.35
    axes = figure.add_axes(
        (left / WIDTH, (FOOTER_INCHES + below) / height, (WIDTH - MARGIN - columns - left) / WIDTH, rows * BAR_STEP / height)
    )
    places = range(rows)
    axes.barh(places, [b.values["onepass"] - 1 for b in chart.bars], left=1, height=0.56, color=theme.color("onepass"), zorder=2)
    peers = [p for p in PROVIDERS if p != "onepass" and any(p in b.values for b in chart.bars)]
    for p in peers:
        at = [(b.values[p], y) for y, b in enumerate(chart.bars) if p in b.values]
        axes.plot(
            *zip(*at),
            linestyle="none",
            marker=STYLES[p].marker,
            markersize=5.5,
            color=theme.color(p),
            markeredgewidth=0.7,
            markeredgecolor=theme.background,
            zorder=3,
            clip_on=False,
        )
    _bar_axes(axes, chart, theme)
    _bar_columns(axes, chart, theme)
    _legend(figure, peers, theme, 1 - (HEADER_INCHES - 0.08) / height)
    return figure


def _legend(figure: Figure, peers: Sequence[str], theme: Theme, top: float) -> None:
    def handle(provider: str, marker: str, size: float) -> Line2D:
        return Line2D([], [], linestyle="none", marker=marker, markersize=size, color=theme.color(provider), label=provider)

    handles = [handle("onepass", "s", 8), *(handle(p, STYLES[p].marker, 6) for p in peers)]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=((MARGIN - 0.05) / WIDTH, top),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        borderaxespad=0,
        handletextpad=0.3,
        columnspacing=1.2,
        borderpad=0,
    )


def _bar_axes(axes: Axes, chart: BarChart, theme: Theme) -> None:
    """A logarithmic x axis that starts at the floor."""
    values = [v for b in chart.bars for v in b.values.values()]
    low, high = min(0.98, *values), max(1.5, *values) * 1.04
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(floor_ticks(high)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
    axes.grid(axis="x")
    axes.axvline(1, color=theme.foreground, linewidth=1.2, zorder=4)
    axes.set_ylim(len(chart.bars) - 0.45, -0.55)
    axes.set_yticks(range(len(chart.bars)), [b.label for b in chart.bars], color=theme.foreground)
    axes.tick_params(axis="y", length=0, pad=6)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("times the floor (1× is the floor)")


def _bar_columns(axes: Axes, chart: BarChart, theme: Theme) -> None:
    """Columns to the right of the bars: the values of onepass and of the best other provider."""
    inches = axes.get_window_extent().width / axes.figure.dpi
    own = [b.values["onepass"] for b in chart.bars]
    best = [b.against_best_peer and b.values["onepass"] * b.against_best_peer for b in chart.bars]
    for end, title, values, color, weight in (
        (0.55, "onepass", own, theme.color("onepass"), "bold"),
        (1.33, "best peer", best, theme.faint, "normal"),
    ):
        placement: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right"}
        axes.text(1 + end / inches, -0.85, title, fontsize=7.5, color=theme.faint, va="bottom", **placement)
        for y, value in enumerate(values):
            text = f"{value:.{2 if value < 100 else 0}f}×" if value else "–"
            axes.text(1 + end / inches, y, text, fontsize=8.5, color=color, fontweight=weight, va="center_baseline", **placement)


# ---- predictions


def _draw_scatter(chart: ScatterChart, theme: Theme) -> Figure:
    height = 5.4
    figure = Figure((WIDTH, height))
    side = height - HEADER_INCHES - FOOTER_INCHES - 0.75
    axes = figure.add_axes(
        ((MARGIN + 0.6) / WIDTH, (FOOTER_INCHES + 0.5) / height, (WIDTH - 2 * MARGIN - 2.2) / WIDTH, side / height)
    )
    times = [t for p in (*chart.picked, *chart.others) for t in (p.us, p.predicted_us)]
    low, high = min(times) / 1.4, max(times) * 1.4
    axes.plot([low, high], [low, high], color=theme.foreground, linewidth=1, linestyle=(0, (5, 3)), zorder=2)
    below, above = ([end * factor for end in (low, high)] for factor in (1 - CLOSE_PREDICTION, 1 + CLOSE_PREDICTION))
    axes.fill_between([low, high], below, above, color=theme.grid, zorder=1, linewidth=0)
    handles: list[Any] = []
    for points, label, provider in ((chart.others, "other plans", "eager"), (chart.picked, "picked plans", "onepass")):
        if points:
            handles.insert(
                0,
                axes.scatter(
                    [p.us for p in points],
                    [p.predicted_us for p in points],
                    s=22,
                    linewidth=0.5,
                    zorder=3,
                    color=theme.color(provider),
                    edgecolor=theme.background,
                    label=label,
                ),
            )
    for axis, scale, limits in ((axes.xaxis, axes.set_xscale, axes.set_xlim), (axes.yaxis, axes.set_yscale, axes.set_ylim)):
        scale("log")
        limits(low, high)
        axis.set_major_locator(FixedLocator(nice_ticks(low, high)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.set_xlabel(f"measured, {TIME}")
    axes.set_title(f"predicted, {TIME}", loc="left", fontsize=9, color=theme.faint, pad=8)
    handles += [
        Line2D([], [], color=theme.foreground, linewidth=1, linestyle=(0, (5, 3)), label="as predicted"),
        Patch(color=theme.grid, label=f"within {CLOSE_PREDICTION:.0%}"),
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.03, 1), frameon=False, fontsize=9, borderaxespad=0)
    return figure


def _write_line(figure: Figure, y: float, text: str, **style: Any) -> None:
    """Write one line of text, in a smaller font if it would exceed the page width."""
    written = figure.text(MARGIN / WIDTH, y, text, **style)
    room = (WIDTH - 2 * MARGIN) * figure.dpi
    written.set_fontsize(float(written.get_fontsize()) * min(1, room / max(1, written.get_window_extent().width)))


def _inches(figure: Figure, text: str) -> float:
    """The width of a text in the label font, in inches."""
    probe = figure.text(0, 0, text, fontsize=9, fontweight="bold")
    width = probe.get_window_extent().width / figure.dpi
    probe.remove()
    return float(width)
