"""The command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .errors import OnepassError

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
    device: Annotated[str, typer.Option(help="The GPU to plan and compile for; none has to be present.")] = "h200",
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


def main() -> None:
    """Run the command line; a mistake in what was asked is one line and exit code 2."""
    try:
        app()
    except OnepassError as error:
        typer.echo(" ".join([f"onepass: {error}", *getattr(error, "__notes__", ())]), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
