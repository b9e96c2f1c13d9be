"""The mutation campaign: each mutant changes one line of onepass so that a promise breaks, and names tests that must fail.

    python -m tests.campaign.mutants --log mutants.jsonl

Each mutant is run in a copy of the checkout, with the tests it names, which get a minute. It is killed if one of them fails, and
survives if all pass or none has failed by then. A log is resumed; `--again` runs the survivors once more.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from . import mutations
from .graphs import read
from .mutations import Mutant

ROOT = Path(__file__).resolve().parents[2]
# fmt: off
COPIED = ("onepass", "tests", "bench", "scripts", "docs", "constraints", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile",
          "pyproject.toml")
# fmt: on
DEADLINE = 60  # seconds of one core that the tests of a mutant may take, so that a busy machine changes nothing
STUCK = 600.0  # seconds of wall clock after which tests that use no core are ended
FAILED, PASSED = 1, 0  # pytest's exit statuses; any other means that the tests themselves could not run
PYTEST = "import resource, sys, pytest; resource.setrlimit(resource.RLIMIT_CPU, ({0}, {0})); sys.exit(pytest.main(sys.argv[1:]))"


def all_mutants() -> list[Mutant]:
    """The mutants of every module of `mutations`."""
    modules = [importlib.import_module(f"{mutations.__name__}.{m.name}") for m in pkgutil.iter_modules(mutations.__path__)]
    return [mutant for module in modules for mutant in module.MUTANTS]


def mutated(mutant: Mutant, text: str) -> str:
    """The text of a mutant's file with its line changed; the line must be there once."""
    if text.count(mutant.before) != 1:
        times = text.count(mutant.before)
        raise ValueError(f"{mutant.name}: {mutant.file} holds {mutant.before!r} {times} times; it must be there once")
    return text.replace(mutant.before, mutant.after)


def verdict_of(folder: Path, tests: tuple[str, ...], deadline: int = DEADLINE, stuck: float = STUCK) -> tuple[str, str]:
    """The verdict of the tests on the copy in a folder (killed, survived, late or broken), and the end of their output."""
    command = [sys.executable, "-c", PYTEST.format(deadline), "-x", "-q", "-m", "", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = child.wait(stuck)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return "late", f"no test failed within {stuck:.0f} s"
        out.seek(0)
        output = out.read()
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return "late", f"no test failed within {deadline} s"
    verdict = {FAILED: "killed", PASSED: "survived"}.get(status, "broken")
    if status < 0 and any(line.startswith("FAILED") for line in output.splitlines()):
        verdict = "killed"  # a test failed, and a stray write of the mutant crashed the process afterwards
    return verdict, _line(output) if verdict == "killed" else output[-600:]


def _line(output: str) -> str:
    """The test that failed."""
    return next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), output[-300:])[:300]


def copied() -> Path:
    """A copy of the checkout."""
    folder = Path(tempfile.mkdtemp(prefix="onepass-mutants-"))
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def run_mutant(mutant: Mutant, folder: Path) -> dict[str, Any]:
    """One mutant's line of the log; restores the copy afterwards."""
    path, started = folder / mutant.file, time.monotonic()
    original = path.read_text()
    path.write_text(mutated(mutant, original))
    try:
        verdict, detail = verdict_of(folder, mutant.tests)
    finally:
        path.write_text(original)
    return {
        "name": mutant.name,
        "kind": verdict,
        "promise": mutant.promise,
        "file": mutant.file,
        "detail": detail,
        "seconds": round(time.monotonic() - started, 1),
    }


def run(todo: list[Mutant], log: Path, jobs: int) -> None:
    """Run every mutant and log one line for each."""
    folders: SimpleQueue[Path] = SimpleQueue()
    for _ in range(jobs):
        folders.put(copied())

    def through(out: Any, mutant: Mutant) -> None:
        folder = folders.get()
        try:
            line = run_mutant(mutant, folder)
        finally:
            folders.put(folder)
        out.write(json.dumps(line) + "\n")
        out.flush()

    try:
        with log.open("a") as out, ThreadPoolExecutor(jobs) as threads:
            for _ in threads.map(partial(through, out), todo):
                pass
    finally:
        while not folders.empty():
            shutil.rmtree(folders.get(), ignore_errors=True)


def unbroken(todo: list[Mutant]) -> list[str]:
    """Test selections that fail, or time out, on unchanged code: they prove nothing."""
    folder = copied()
    try:
        verdicts = {tests: verdict_of(folder, tests) for tests in sorted({m.tests for m in todo})}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [f"{' '.join(tests)}: {kind} {detail[-300:]}" for tests, (kind, detail) in verdicts.items() if kind != "survived"]


def latest(log: Path) -> dict[str, dict[str, Any]]:
    """The last line of each mutant."""
    return {line["name"]: line for line in read(log)}


def show(lines: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The summary as lines."""
    kinds = Counter(line["kind"] for line in lines.values())
    killed = kinds["killed"]
    yield f"{len(lines)} mutants: {killed} killed ({100 * killed / max(len(lines), 1):.1f} %), " + ", ".join(
        f"{n} {kind}" for kind, n in kinds.items() if kind != "killed"
    )
    for name, line in lines.items():
        if line["kind"] != "killed":
            yield f"  {line['kind']} {name} in {line['file']}: {line['promise']} ({line['detail'][-200:].strip()})"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.mutants")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--only", default="*", help="a pattern of names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="run what was not killed once more")
    parser.add_argument("--unchanged", action="store_true", help="run the tests that mutants name where nothing is changed, too")
    given = parser.parse_args()
    chosen = [m for m in all_mutants() if fnmatch(m.name, given.only)]
    if given.unchanged and (failing := unbroken(chosen)):
        sys.stdout.write("these tests do not pass on the code as it is:\n" + "\n".join(failing) + "\n")
        return 1
    known = latest(given.log)
    run([m for m in chosen if m.name not in known or given.again and known[m.name]["kind"] != "killed"], given.log, given.jobs)
    names = {m.name for m in all_mutants()}
    lines = {name: line for name, line in latest(given.log).items() if name in names}
    sys.stdout.write("\n".join(show(lines)) + "\n")
    return 0 if all(line["kind"] == "killed" for line in lines.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
