"""The command line."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from . import __version__
from .errors import BadArgument, OnepassError, SystemRefused, UsersCodeFailed, printable

app = typer.Typer(
    name="onepass",
    help="A reduction-fusion compiler for PyTorch on NVIDIA GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
# Help of `explain` that does not fit next to its option.
WHAT = (
    "A name (see `onepass workloads`), file.py:function, or file.py:make_model, which returns a module, (module, inputs) or "
    "(module, args, kwargs)."
)
INPUTS = "For file.py:name: bf16[8192,8192],f32[8192,1] or file.py:name. Default: inputs() in the same file."
COMPILE = "Also compile a model's kernels, to show registers and spills; a function's are always compiled."
WHY = "Also rank the candidate schedules of a function's kernels, with the terms of their predicted times."


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onepass {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def explain(
    what: Annotated[str, typer.Argument(metavar="WORKLOAD", help=WHAT)],
    shape: Annotated[str | None, typer.Option(help="Such as 8192x8192; a named workload has its own default.")] = None,
    dtype: Annotated[str, typer.Option(help="Data type of a named workload.")] = "bf16",
    device: Annotated[str, typer.Option(help="The GPU to plan and compile for; `here` is this machine's.")] = "h200",
    inputs: Annotated[str | None, typer.Option(help=INPUTS)] = None,
    compile: Annotated[bool, typer.Option("--compile", help=COMPILE)] = False,
    why: Annotated[bool, typer.Option("--why", help=WHY)] = False,
    as_json: Json = False,
    source: Annotated[bool, typer.Option("--source", help="Also print the generated kernels.")] = False,
    source_dir: Annotated[Path | None, typer.Option(help="Write the generated kernels and an index to a folder.")] = None,
) -> None:
    """Show the kernels of a function or model: bytes relative to the floor, registers, and what was not fused and why."""
    from .tools import explain as reports  # imported late: --help and --version must not load torch
    from .tools.sources import listing, write_sources  # for the same reason
    from .tools.spec import resolve  # for the same reason
    from .tools.users_code import users_code  # for the same reason

    subject = resolve(what, shape, dtype, inputs)
    with users_code(what, only_marked=True):
        report = reports.explain(subject.call, device=device, compile=compile)(*subject.args, **subject.kwargs)
    if isinstance(report, reports.Report):
        report = replace(report, workload=printable(what))
    elif why:
        raise BadArgument(detail="--why explains the kernels of a function, not of a model.")
    reasons = report.why() if why and isinstance(report, reports.Report) else None
    if as_json:
        typer.echo(json.dumps(report.to_json() | ({"why": reasons.to_json()} if reasons else {}), indent=2))
    else:
        reports.console().print(report, *([reasons] if reasons else []))
    if source:
        for text in listing(report):
            typer.echo(text, err=as_json)  # standard output stays valid JSON
    if source_dir is not None:
        _say(f"kernels: {write_sources(report, source_dir)}", err=as_json)


@app.command()
def bisect(
    what: Annotated[
        str,
        typer.Argument(
            metavar="STEP", help="file.py:train_step, which returns a loss or tensors, or a step or module with its inputs."
        ),
    ],
    inputs: Annotated[str | None, typer.Option(help="file.py:name. Default: those of the step, or inputs() in its file.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="A setting for all runs, such as by_cost=False. Repeatable.")] = None,
    slack: Annotated[float, typer.Option(min=1.0, help="Allowed error of a step, as a multiple of a single kernel's.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Seed of every random number generator.")] = 0,
    as_json: Json = False,
) -> None:
    """Find the regions that make a loss or gradient diverge; exit with 1 if anything diverges."""
    from .tools import bisect as search  # imported late: --help and --version must not load torch
    from .tools.spec import parse_options  # for the same reason

    found = search.bisect(what, inputs, parse_options(option or []), slack, seed, log=lambda line: _say(line, err=True))
    _say(json.dumps(found.to_json(), indent=2) if as_json else str(found))
    if found.diverges:
        raise typer.Exit(1)


@app.command()
def workloads() -> None:
    """List the named workloads."""
    from .tools.workloads import WORKLOADS  # imported late: --help and --version must not load torch

    for w in WORKLOADS.values():
        typer.echo(f"{w.name:36} {'x'.join(map(str, w.default_shape)):16} {w.title}")


@app.command()
def demo() -> None:
    """Plan, compile and check RMSNorm backward; with a GPU, also time it."""
    from .tools.demo import demo as show  # imported late: --help and --version must not load torch
    from .tools.explain import console  # for the same reason

    if not show(console()):
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Report versions, GPU, driver and available features, for bug reports."""
    from .tools.doctor import facts, table  # imported late: --help and --version must not load torch
    from .tools.explain import console  # for the same reason

    found = facts()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        console().print(table(found))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A result file of `onepass bench`.")],
    after: Annotated[Path, typer.Argument(help="The result file to compare with it.")],
    as_json: Json = False,
    every: Annotated[bool, typer.Option("--all", help="Also show changes within noise.")] = False,
    fail_on_slower: Annotated[
        bool, typer.Option("--fail-on-slower", help="Exit with 1 if onepass became slower beyond noise, or wrong.")
    ] = False,
) -> None:
    """Show what changed beyond noise between two bench results."""
    from .measure import compare as runs  # imported late: --help and --version must not load torch
    from .measure.results import load  # for the same reason
    from .tools.tables import console  # for the same reason

    found = runs.compare(load(before), load(after), (str(before), str(after)), every)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        console().print(found)
    if fail_on_slower and found.got_slower:
        raise typer.Exit(1)


@app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Result files of `onepass bench` on one GPU.")],
    out: Annotated[Path, typer.Option(help="The folder to write images to.")] = Path("plots"),
    theme: Annotated[str, typer.Option(help="light, dark or both.")] = "both",
    format: Annotated[str, typer.Option(help="png, svg or both.")] = "both",
    metric: Annotated[str, typer.Option(help="Quantity in charts over widths: gbps, us, or floor (times the floor).")] = "gbps",
) -> None:
    """Draw bench results: rates by width and row count, times relative to the floor, predicted and measured time."""
    from .measure import plot as charts  # imported late: --help and --version must not load torch
    from .tools.workloads import WORKLOADS  # for the same reason

    for path in charts.plot(
        files,
        out,
        themes=charts.expand_both("The theme", theme, charts.THEME_NAMES),
        formats=charts.expand_both("The format", format, charts.FORMATS),
        metric=metric,
        titles={w.name: w.title for w in WORKLOADS.values()},
    ):
        _say(str(path))


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(help="The suite of workloads; `onepass bench --list` shows all.")] = "table",
    out: Annotated[Path | None, typer.Option(help="The result file, written after every workload; an earlier run resumes.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything again; ignore results in the file.")] = False,
    time_limit: Annotated[float | None, typer.Option(help="Stop between workloads before this many seconds have passed.")] = None,
    only: Annotated[str, typer.Option(help="Only workloads with this in their name, such as backward or 8192x8192.")] = "",
    providers: Annotated[
        str | None, typer.Option(help="Such as onepass,eager,inductor; default: all installed, except those that tune.")
    ] = None,
    regret: Annotated[bool, typer.Option("--regret", help="Also measure other plans: does onepass pick the best?")] = False,
    most: Annotated[int, typer.Option(min=1, help="With --regret: plans per workload.")] = 12,
    graphs: Annotated[bool, typer.Option("--graphs", help="Also time CUDA graph replays, as a cross-check.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the suites and their workloads; measure nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Measure kernel times of onepass and other providers on this machine's GPU, relative to the memory floor."""
    from .measure import bench_command  # imported late: --help and --version must not load torch

    arguments = bench_command.BenchArguments(suite, out, fresh, time_limit, only, providers, regret, most, graphs, as_json)
    if show:
        bench_command.show_suites(as_json)
    elif code := bench_command.run(arguments):
        raise typer.Exit(code)


@app.command()
def calibrate(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and show; store nothing.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Delete the stored measurements; use the package's defaults.")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine's GPU (rates, latency, launches) and use the results for planning from then on."""
    from .measure import calibrate as measuring  # imported late: --help and --version must not load torch
    from .tools.tables import console  # for the same reason

    if forget:
        typer.echo("deleted" if measuring.forget_card() else "nothing was stored for this GPU")
        return
    found = measuring.calibrate(dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        console().print(found)


@app.command()
def fit(
    results: Annotated[Path, typer.Argument(help="The folder with the stored results of one GPU.")] = Path("bench/results/h200"),
    out: Annotated[Path | None, typer.Option(help="The file to write; default: the package's own.")] = None,
    ablate: Annotated[bool, typer.Option("--ablate", help="Also show what it costs to do without each constant.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Fit and show; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Fit the cost model's constants and the floor to stored measurements; no GPU is needed."""
    from .constants import SHIPPED_FILE  # imported late, as all of onepass is
    from .measure import fit_command as fitting  # imported late: --help and --version must not load torch
    from .tools.tables import console  # for the same reason

    report = fitting.fit_constants(results, with_ablation=ablate, log=lambda line: typer.echo(line, err=True))
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        console().print(report)
    if not dry_run:
        path = out or SHIPPED_FILE
        _say(f"{path}: {'written' if fitting.write(report, path) else 'unchanged'}", err=as_json)


def _say(text: str, err: bool = False) -> None:
    """Print lines that may contain what a user or a file named: no control character of theirs reaches the terminal."""
    typer.echo("\n".join(map(printable, text.split("\n"))), err=err)


def _fail(error: OnepassError) -> NoReturn:
    """Print an error as one message, after the traceback of the user's code if it is that which failed, and exit with 2."""
    if isinstance(error, UsersCodeFailed) and error.__cause__ is not None:
        from .tools.users_code import users_traceback  # imported late: most errors do not need it

        for line in users_traceback(error.__cause__):
            _say(line, err=True)
    _say(" ".join([f"onepass: {error}", *getattr(error, "__notes__", ())]), err=True)
    sys.exit(2)


def _discard_output() -> None:
    """Send what is left of the output nowhere: writing it failed, and Python would try again at exit."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def main() -> None:
    """Run the command line. An OnepassError is printed as one message, with exit code 2."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale may lack the characters of a name
    try:
        try:
            app()
        finally:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except OnepassError as error:
        _fail(error)
    except BrokenPipeError:  # whoever read the output has enough
        _discard_output()
        sys.exit(1)
    except OSError as error:
        _discard_output()
        _fail(SystemRefused(detail=error))


if __name__ == "__main__":
    main()
