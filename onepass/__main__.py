"""The command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
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
    what: Annotated[str, typer.Argument(metavar="WORKLOAD", help="A name (see `onepass workloads`) or file.py:function.")],
    shape: Annotated[str | None, typer.Option(help="Such as 8192x8192; a named workload has its own default.")] = None,
    dtype: Annotated[str, typer.Option(help="Of a named workload's data.")] = "bf16",
    device: Annotated[str, typer.Option(help="The GPU to plan and compile for; none has to be present.")] = "h200",
    inputs: Annotated[str | None, typer.Option(
        help="For file.py:function: bf16[8192,8192],f32[8192,1] or file.py:name. Default: inputs() in the same file.")] = None,
    as_json: Json = False,
    source: Annotated[bool, typer.Option("--source", help="Print the generated kernels too.")] = False,
) -> None:
    """Show the kernels a function becomes: bytes against the floor, registers, what was refused and why."""
    from .tools import explain as reports  # --help and --version need not wait for torch
    from .tools.spec import resolve  # the same

    function, arguments = resolve(what, shape, dtype, inputs)
    report = replace(reports.explain(function, device=device)(*arguments), workload=what)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        reports.console().print(report)
    if source:
        for listing in reports.source_listing(report):
            typer.echo(listing, err=as_json)  # what is on standard output stays JSON


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
        typer.echo(f"onepass: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
