"""Text output of a bench run: one line per workload while it runs, tables at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from ..tools.rows import spill_text
from ..tools.tables import counted, table
from .regret import NEAR_BEST, summarize_regret
from .results import ONEPASS_PROVIDERS, PROVIDERS, Result, Row, Run

MANY = 8192  # row count from which time should grow linearly with rows


def line(row: Row | None) -> str:
    """The progress line of one measured workload."""
    if row is None:
        return "not measured"
    times = [f"{p} {_short(r)}" for p, r in row.results.items()]
    ours = row.times_floor("onepass")
    return f"{row.id}: floor {row.floor_us:.1f}, {', '.join(times)}" + (f"; {ours:.2f} x floor" if ours else "")


def _short(result: Result) -> str:
    return f"{result.us:.1f}" if result.ok and result.us is not None else "wrong" if result.wrong else "failed"


def tables(run: Run) -> Iterator[RenderableType]:
    """All tables and summary lines of a run."""
    versions = ", ".join(f"{k} {v}" for k, v in run.versions.items())
    yield f"[bold]{escape(run.suite)}[/bold] on {escape(run.card)}, {escape(versions)}"
    yield _main(run.rows)
    yield _by_provider(run.rows)
    if any(not r.ok for row in run.rows for r in row.results.values()):
        yield _failures(run.rows)
    if run.anchors:
        yield _anchors(run)
    if found := fits(run.rows):
        yield _fits(found)
    yield from _summary(run)
    if run.regret:
        yield _regret(run)
        yield from _regret_summary(run)


def _main(rows: Sequence[Row]) -> Table:
    shown = table(
        "\nonepass",
        ("workload", "name"),
        ("floor us", "right"),
        ("us", "right"),
        ("x floor", "right"),
        ("GB/s", "right"),
        ("spread", "right"),
        ("best peer", "left"),
        ("speedup", "right"),
        ("regs", "right"),
        ("spill", "right"),
    )
    for row in rows:
        result, speedup = row.results.get("onepass"), row.against_best_peer
        shown.add_row(
            escape(row.id),
            f"{row.floor_us:.1f}",
            _short(result) if result else "-",
            _number(row.times_floor("onepass"), 2),
            _number(row.gbps("onepass"), 0),
            "-" if not result or result.spread is None else f"{100 * result.spread:.1f} %",
            row.best_peer or "-",
            "-" if speedup is None else f"[red]{speedup:.2f}[/red]" if speedup < 0.97 else f"{speedup:.2f}",
            "-" if not result or result.registers is None else str(result.registers),
            spill_text(result.spill_bytes if result else None),
        )
    return shown


def _by_provider(rows: Sequence[Row]) -> Table:
    names = [p for p in PROVIDERS if any(p in row.results for row in rows)]
    columns = [(name.replace("inductor-", "ind-"), "right") for name in names]
    shown = table("\nkernel us (kernels) by provider", ("workload", "name"), *columns)
    for row in rows:
        best = min((us for p in names if (us := row.us(p))), default=None)
        shown.add_row(escape(row.id), *(_cell(row.results.get(p), best) for p in names))
    return shown


def _cell(result: Result | None, best: float | None) -> str:
    if result is None:
        return ""
    text = _short(result)
    if not result.ok:
        return f"[red]{text}[/red]"
    text += f" ({result.kernels})" if result.kernels else ""
    return f"[bold]{text}[/bold]" if result.us == best else text


def _failures(rows: Sequence[Row]) -> Table:
    shown = table("\nnot timed", ("workload", "name"), ("provider", "name"), ("why", "left"))
    for row in rows:
        for provider, result in row.results.items():
            if not result.ok:
                shown.add_row(escape(row.id), provider, escape(f"wrong: {result.wrong}" if result.wrong else result.error or "-"))
    return shown


def _anchors(run: Run) -> Table:
    kinds = list(dict.fromkeys(a.kind for a in run.anchors))
    shown = table("\nplain reads, copies and adds: us (GB/s)", ("MiB", "right"), *((k, "right") for k in kinds))
    for moved in sorted({a.bytes for a in run.anchors}):
        found = {a.kind: a for a in run.anchors if a.bytes == moved}
        shown.add_row(f"{moved / 2**20:.0f}", *(f"{found[k].us:.1f} ({found[k].gbps:.0f})" if k in found else "-" for k in kinds))
    return shown


def _summary(run: Run) -> Iterator[str]:
    found = run.summary
    text = f"\n{counted(len(run.rows), 'workload')}"
    if found.geomean_times_floor is not None and found.worst_times_floor is not None:
        text += (
            f"\n  times the floor         geomean {found.geomean_times_floor:.3f}, worst {found.worst_times_floor.value:.2f} "
            f"({escape(found.worst_times_floor.id)})"
        )
    if found.geomean_against_best_peer is not None and found.worst_against_best_peer is not None:
        text += (
            f"\n  speedup over best peer  geomean {found.geomean_against_best_peer:.3f}, worst "
            f"{found.worst_against_best_peer.value:.2f} ({escape(found.worst_against_best_peer.id)})"
        )
    if found.geomean_against_inductor is not None:
        text += f"\n  speedup over Inductor   geomean {found.geomean_against_inductor:.3f}"
    missing = [row.id for row in run.rows if any(p in row.results and not row.results[p].ok for p in ONEPASS_PROVIDERS)]
    yield text + (f"\n  [red]onepass has no valid time for: {escape(', '.join(missing))}[/red]" if missing else "")


def _regret(run: Run) -> Table:
    shown = table(
        "\nregret of the default plan",
        ("workload", "name"),
        ("picked us", "right"),
        ("best us", "right"),
        ("regret", "right"),
        ("predicted", "right"),
        ("timed", "right"),
        ("best plan", "left"),
    )
    for r in run.regret:
        timed = [c for c in r.candidates if c.us is not None]
        best = min(timed, key=lambda c: c.us or 0.0, default=None)
        worse = f"[red]{100 * r.regret:.1f} %[/red]" if r.regret > NEAR_BEST else f"{100 * r.regret:.1f} %"
        plan = " + ".join(map(str, best.schedules)) if best and r.regret > 0 else "the picked one"
        shown.add_row(
            escape(r.id),
            f"{r.picked_us:.1f}",
            f"{r.best_us:.1f}",
            worse,
            _number(r.predicted_us, 1),
            f"{len(timed)}/{len(r.candidates)}",
            escape(plan),
        )
    return shown


def _regret_summary(run: Run) -> Iterator[str]:
    found = summarize_regret(run.regret)
    worst = f"worst {100 * found.worst[1]:.0f} % ({escape(found.worst[0])})" if found.worst else ""
    yield (
        f"\n  within {100 * NEAR_BEST:.0f} % of the best candidate: {100 * found.good:.0f} % of "
        f"{counted(found.workloads, 'workload')}, {worst}"
    )
    if found.pick_error is not None and found.plan_error is not None:
        yield (
            f"  prediction: median error {100 * found.pick_error:.0f} % for picked plans, "
            f"{100 * found.plan_error:.0f} % for all candidates"
        )


def _number(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"


# ---- linear fit of time over row count


@dataclass(frozen=True, slots=True)
class Fit:
    """The line us = start_us + rows * row_us, fitted over the row counts of one workload and width."""

    what: str
    start_us: float
    row_us: float
    floor_row_us: float
    worst: float  # the largest relative residual


def fits(rows: Iterable[Row]) -> tuple[Fit, ...]:
    """A linear fit for each workload that was measured at three row counts or more."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if len(row.shape) == 2 and row.shape[0] >= MANY and row.floor_us and row.us("onepass"):
            groups.setdefault((row.workload, row.shape[1], row.dtype), []).append(row)
    found = (_fit(" ".join(map(str, key)), rows) for key, rows in groups.items() if len({r.shape[0] for r in rows}) >= 3)
    return tuple(fit for fit in found if fit)


def _fit(what: str, rows: Sequence[Row]) -> Fit | None:
    """Least squares of relative residuals, so that short times count as much as long ones. None if the fit is degenerate."""
    points = [(row.shape[0], us) for row in rows if (us := row.us("onepass"))]
    w = [1 / us**2 for _, us in points]
    s, sx, sy = sum(w), sum(a * m for a, (m, _) in zip(w, points)), sum(a * us for a, (_, us) in zip(w, points))
    sxx, sxy = sum(a * m * m for a, (m, _) in zip(w, points)), sum(a * m * us for a, (m, us) in zip(w, points))
    spread = s * sxx - sx * sx
    if spread <= 0:
        return None
    slope = (s * sxy - sx * sy) / spread
    start = (sy - slope * sx) / s
    short, tall = min(rows, key=lambda r: r.shape[0]), max(rows, key=lambda r: r.shape[0])
    floor_slope = (tall.floor_us - short.floor_us) / (tall.shape[0] - short.shape[0])
    return Fit(what, start, slope, floor_slope, max(abs((start + slope * m) / us - 1) for m, us in points))


def _fits(found: Sequence[Fit]) -> Table:
    shown = table(
        f"\nlinear fit over row counts of {MANY} and more",
        ("workload, columns", "name"),
        ("fixed us", "right"),
        ("ns per row", "right"),
        ("x floor", "right"),
        ("largest residual", "right"),
    )
    for fit in found:
        shown.add_row(
            escape(fit.what),
            f"{fit.start_us:.1f}",
            f"{1e3 * fit.row_us:.2f}",
            f"{fit.row_us / fit.floor_row_us:.3f}",
            f"{100 * fit.worst:.1f} %",
        )
    return shown
