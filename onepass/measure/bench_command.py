"""The command `onepass bench`: from command-line arguments to a run, printed as tables or JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path

from rich.console import Console

from ..errors import BadArgument
from ..tools.tables import WIDTH, console, counted
from .bench import Options, bench, bench_models
from .bench_tables import tables
from .providers import parse_providers
from .results import to_json
from .suites import MODELS, SUITES, suite


@dataclass(frozen=True)
class BenchArguments:
    """The command-line arguments."""

    suite: str
    out: Path | None
    fresh: bool
    time_limit: float | None
    only: str
    providers: str | None
    regret: bool
    max_candidates: int
    graphs: bool
    as_json: bool


def run(arguments: BenchArguments) -> int:
    """Measure, print the results, and return the exit code."""
    if arguments.time_limit is not None and not 0 < arguments.time_limit < inf:
        raise BadArgument(detail=f"--time-limit is a number of seconds above 0, not {arguments.time_limit}.")
    if arguments.suite == MODELS:
        return bench_models(_models_arguments(arguments))
    providers = parse_providers(arguments.providers, arguments.suite)
    options = Options(
        suite(arguments.suite),
        providers,
        arguments.out,
        arguments.fresh,
        arguments.time_limit,
        arguments.only,
        arguments.graphs,
        arguments.regret,
        arguments.max_candidates,
    )
    progress = Console(stderr=True, highlight=False, width=None if Console(stderr=True).is_terminal else 2 * WIDTH)
    found = bench(options, progress)
    if arguments.as_json:
        print(json.dumps(to_json(found), indent=1))
    else:
        page = console()
        for part in tables(found):
            page.print(part)
    return 0


def show_suites(as_json: bool = False) -> None:
    """Print the suites and their workloads."""
    if as_json:
        print(json.dumps({s.name: {"about": s.about, "workloads": [job.id for job in s.jobs]} for s in SUITES.values()}, indent=1))
        return
    for found in SUITES.values():
        print(f"{found.name}: {found.about} ({counted(len(found.jobs), 'workload')})")
        for job in found.jobs:
            print(f"  {job.id}")
    print(f"{MODELS}: whole training steps, from a checkout of the repository")


def _models_arguments(arguments: BenchArguments) -> list[str]:
    """The arguments for bench/models.py."""
    if arguments.out is None:
        raise BadArgument(detail="The suite models needs --out FILE. It writes the file after every model.")
    flags = {
        "--providers": arguments.providers,
        "--regret": arguments.regret,
        "--json": arguments.as_json,
        "--fresh": arguments.fresh,
        "--time-limit": arguments.time_limit,
    }
    unsupported = [flag for flag, given in flags.items() if given]
    if unsupported:
        raise BadArgument(
            detail=f"{', '.join(unsupported)} cannot be used with the suite models: it always runs "
            "Inductor and onepass, and writes JSON."
        )
    models = ["--models", *arguments.only.split(",")] if arguments.only else []
    return [str(arguments.out.resolve()), *models, *(["--graphs"] * arguments.graphs)]
