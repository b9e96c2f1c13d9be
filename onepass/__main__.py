"""The command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .errors import OnepassError, printable

app = typer.Typer(name="onepass", help="A reduction-fusion compiler for PyTorch on NVIDIA GPUs.", no_args_is_help=True,
                  add_completion=False, pretty_exceptions_enable=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onepass {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]
             = False) -> None:
    """Options of the command itself."""


@app.command()
def explain(
    what: Annotated[str, typer.Argument(metavar="WORKLOAD", help="A name (see `onepass workloads`), file.py:function, or "
                                        "file.py:make_model, which returns a module, (module, inputs) or (module, args, kwargs).")],
    shape: Annotated[str | None, typer.Option(help="Such as 8192x8192; a named workload has its own default.")] = None,
    dtype: Annotated[str, typer.Option(help="Of a named workload's data.")] = "bf16",
    device: Annotated[str, typer.Option(help="The GPU to plan and compile for; `here` is the one present.")] = "h200",
    inputs: Annotated[str | None, typer.Option(
        help="For file.py:name: bf16[8192,8192],f32[8192,1] or file.py:name. Default: inputs() in the same file.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile a model's kernels too, for registers and spills; those of "
                                          "a function always are.")] = False,
    as_json: Json = False,
    source: Annotated[bool, typer.Option("--source", help="Print the generated kernels too.")] = False,
    source_dir: Annotated[Path | None, typer.Option(help="Write the generated kernels and an index to a folder.")] = None,
) -> None:
    """Show the kernels a function or a model becomes: bytes against the floor, registers, what was refused or left and why."""
    from .tools import explain as reports  # --help and --version need not wait for torch
    from .tools.sources import listing, write_sources  # the same
    from .tools.spec import resolve  # the same

    subject = resolve(what, shape, dtype, inputs)
    report = reports.explain(subject.call, device=device, compile=compile)(*subject.args, **subject.kwargs)
    if isinstance(report, reports.Report):
        report = replace(report, workload=what)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        reports.console().print(report)
    if source:
        for text in listing(report):
            typer.echo(text, err=as_json)  # what is on standard output stays JSON
    if source_dir is not None:
        typer.echo(f"kernels: {write_sources(report, source_dir)}", err=as_json)


@app.command()
def bisect(
    what: Annotated[str, typer.Argument(metavar="STEP", help="file.py:train_step, which returns a loss or tensors, or a step with "
                                        "its inputs, or a module with its.")],
    inputs: Annotated[str | None, typer.Option(help="file.py:name. Default: those of the step, or inputs() beside it.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="A setting for all runs, such as by_cost=False. Repeatable.")] = None,
    slack: Annotated[float, typer.Option(min=1.0, help="How many times a single kernel's allowed error a step may make.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Of every source of random numbers.")] = 0,
    as_json: Json = False,
) -> None:
    """Find the regions that make a loss or a gradient diverge; exit with 1 if any does."""
    from .tools import bisect as search  # --help and --version need not wait for torch
    from .tools.spec import parse_options  # the same

    found = search.bisect(what, inputs, parse_options(option or []), slack, seed, say=lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else found)
    if found.diverges:
        raise typer.Exit(1)


@app.command()
def workloads() -> None:
    """List the named workloads."""
    from .tools.workloads import WORKLOADS  # --help and --version need not wait for torch

    for w in WORKLOADS.values():
        typer.echo(f"{w.name:36} {'x'.join(map(str, w.default_shape)):16} {w.title}")


@app.command()
def demo() -> None:
    """Plan, compile and check RMSNorm backward; on a GPU also time it."""
    from .tools.demo import demo as show  # --help and --version need not wait for torch
    from .tools.explain import console  # the same

    if not show(console()):
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Report versions, card, driver and what is usable; paste it into a bug report."""
    from .tools.doctor import facts, table  # --help and --version need not wait for torch
    from .tools.explain import console  # the same

    found = facts()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        console().print(table(found))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A result of `onepass bench`.")],
    after: Annotated[Path, typer.Argument(help="Another, to hold against it.")],
    as_json: Json = False,
    every: Annotated[bool, typer.Option("--all", help="Show changes within noise too.")] = False,
    fail_on_slower: Annotated[bool, typer.Option("--fail-on-slower", help="Exit with 1 if onepass lost time beyond noise, or a "
                                                 "right answer.")] = False,
) -> None:
    """Show what changed beyond noise between two bench results."""
    from .tools import compare as runs  # --help and --version need not wait for it
    from .tools.results import load  # the same
    from .tools.tables import console  # the same

    found = runs.compare(load(before), load(after), (str(before), str(after)), every)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        console().print(found)
    if fail_on_slower and found.got_slower:
        raise typer.Exit(1)


@app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Results of `onepass bench` on one card.")],
    out: Annotated[Path, typer.Option(help="The folder to write pictures to.")] = Path("plots"),
    theme: Annotated[str, typer.Option(help="light, dark or both.")] = "both",
    format: Annotated[str, typer.Option(help="png, svg or both.")] = "both",
    metric: Annotated[str, typer.Option(help="What lines over widths show: gbps, us, or floor (times the floor).")] = "gbps",
) -> None:
    """Draw bench results: rates by width and row count, times the floor, predicted against measured time."""
    from .tools import plot as pictures  # --help and --version need not wait for it
    from .tools.workloads import WORKLOADS  # nor for torch

    for path in pictures.plot(files, out, themes=pictures.chosen("The theme", theme, pictures.GROUNDS),
                              formats=pictures.chosen("The format", format, pictures.FORMATS), metric=metric,
                              titles={w.name: w.title for w in WORKLOADS.values()}):
        typer.echo(path)


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(help="Which workloads; `onepass bench --list` shows the suites.")] = "table",
    out: Annotated[Path | None, typer.Option(help="Write here after every workload; an earlier run goes on.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything anew, whatever the file holds.")] = False,
    time_limit: Annotated[float | None, typer.Option(help="Stop between two workloads before so many seconds are over.")] = None,
    only: Annotated[str, typer.Option(help="Only workloads with this in their name, such as backward or 8192x8192.")] = "",
    providers: Annotated[str | None, typer.Option(help="Such as onepass,eager,inductor; default: all that are here, but for those "
                                                  "that tune.")] = None,
    regret: Annotated[bool, typer.Option("--regret", help="Measure other plans too: is the one onepass picks the best?")] = False,
    most: Annotated[int, typer.Option(min=1, help="With --regret: how many plans of a workload.")] = 12,
    graphs: Annotated[bool, typer.Option("--graphs", help="Time replays of CUDA graphs too, as a cross-check.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Show the suites and their workloads; measure nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Measure kernel times of onepass and others on this machine's card, against the fewest bytes that must move."""
    from .tools import bench_command  # --help and --version need not wait for torch

    asked = bench_command.Asked(suite, out, fresh, time_limit, only, providers, regret, most, graphs, as_json)
    if show:
        bench_command.show_suites()
    elif code := bench_command.run(asked):
        raise typer.Exit(code)


@app.command()
def calibrate(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and show; keep nothing.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Measure nothing; go back to the facts of the package.")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine's card (rates, latency, launches), and plan with the figures from then on."""
    from .tools import calibrate as measuring  # --help and --version need not wait for torch
    from .tools.tables import console  # the same

    if forget:
        typer.echo("forgotten" if measuring.forget_card() else "nothing was kept of this card")
        return
    found = measuring.calibrate(dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        console().print(found)


def main() -> None:
    """Run the command line; a mistake in what was asked is one line and exit code 2."""
    try:
        app()
    except OnepassError as error:
        said = " ".join([f"onepass: {error}", *getattr(error, "__notes__", ())])
        typer.echo("\n".join(map(printable, said.split("\n"))), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
