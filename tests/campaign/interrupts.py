"""Ctrl-C at random moments: `python -m tests.campaign.interrupts --count 100 --seed 0 --log FILE`.

Commands and sessions, each in a process of its own with an empty store, get SIGINT at a moment drawn from the length of an
uninterrupted run: the process alone, or its group, as from a terminal. The process ends within a minute, with KeyboardInterrupt or
the command's abort and no other error; a session that catches it goes on and is right. Then no process it started is alive,
and its store and its temporary folder hold no draft and nothing half-written. The next run over the same store gives the same
result.

The log has one JSON line per interruption. A run with the same seed and log resumes where the last one ended.
"""

from __future__ import annotations

import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from onepass.errors import OnepassError
from onepass.measure import results
from tests.support.processes import FOREVER, ROOT

from . import sessions, workers, writes

LONGEST = 60.0  # seconds from the interruption to the end
SPARE = 60.0  # seconds in which a process that lost its parent notices
CODE = re.compile(r"\[ONEPASS-\d+]")
RAISED = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit|Abort|Failure|Failed))\b", re.MULTILINE)
STARTING = "Fatal Python error: init_import_site"  # nothing has been imported yet
SILENT = "ended while Python started or ended"  # before it has a handler of its own
ABORTED = 130  # how the command says that it was interrupted
TEMPORARY = ("onepass", "tmp")  # prefixes of the names that onepass, Triton and Python's tempfile use


@dataclass(frozen=True)
class Kind:
    """A command to interrupt: arguments of Python, and how often it is chosen."""

    name: str
    arguments: tuple[str, ...]
    weight: int


def _session(name: str, weight: int, *more: str) -> Kind:
    return Kind(" ".join((name, *more)), ("-m", "tests.campaign.sessions", name, *more), weight)


EXPLAIN = ("-m", "onepass", "explain")
KINDS = (
    Kind("explain a function", (*EXPLAIN, "rms_norm_backward", "--shape", "64x1024", "--device", "h200", "--source"), 30),
    Kind("explain a model", (*EXPLAIN, f"{sessions.__file__}:tiny_model", "--device", "h200", "--compile"), 10),
    _session("explaining", 10, "--go-on"),
    _session("training", 15),
    _session("training", 20, "--go-on"),
    _session("bench", 12),
    _session("bench with Inductor", 2),
)


@dataclass(frozen=True)
class Ended:
    """How a process ended; `at` is when it was interrupted, in seconds from its start."""

    status: int
    out: str
    errors: str
    took: float
    at: float | None = None
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Truth:
    """An uninterrupted run, and the files of its store."""

    ended: Ended
    store: dict[str, bytes]


class Wrong(Exception):
    """A violated expectation."""


# ---- processes -------------------------------------------------------------------------------------------------------------


def started(kind: Kind, place: Path, out: Any, errors: Any) -> subprocess.Popen[bytes]:
    """A process in a session of its own, with all folders it may write to in `place`."""
    for name in ("it", "tmp"):
        (place / name).mkdir(mode=0o700, exist_ok=True)
    environment = {
        **os.environ,
        "ONEPASS_CACHE_DIR": str(place / "store"),
        "TMPDIR": str(place / "tmp"),
        "PYTHONPATH": str(ROOT),
        "ONEPASS_REPRO_DIR": str(place / "repros"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(place.parent / "inductor"),
    }
    return subprocess.Popen(
        [sys.executable, *kind.arguments],
        env=environment,
        cwd=place / "it",
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=errors,
        start_new_session=True,
    )


def of_session(number: int) -> list[int]:
    """The living processes of a session: those its leader started are in it, whatever their group is."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == number and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def survivors(number: int) -> list[str]:
    """The processes of a session that do not end by themselves; they are ended."""
    end = time.monotonic() + SPARE
    while (living := of_session(number)) and time.monotonic() < end:
        time.sleep(0.05)
    found = []
    for process in living:
        with suppress(OSError):
            found.append(Path(f"/proc/{process}/cmdline").read_text().replace("\0", " "))
            os.kill(process, signal.SIGKILL)
    return found


def run_interrupted(kind: Kind, place: Path, at: float | None = None, group: bool = False, longest: float = FOREVER) -> Ended:
    """Run it until it ends, interrupted after `at` seconds, and then in at most `longest`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        began = time.monotonic()
        process = started(kind, place, out, errors)
        try:
            if at is not None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(at)
                with suppress(ProcessLookupError):
                    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
            process.wait(longest)
        except subprocess.TimeoutExpired:
            raise Wrong(f"it did not end: {stack(process)}") from None
        finally:
            took = time.monotonic() - began
            left = survivors(process.pid) if process.poll() is not None else []
            for number in of_session(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.wait()
        for file in (out, errors):
            file.seek(0)
        return Ended(process.returncode, out.read(), errors.read(), took, at, left)


def stack(process: subprocess.Popen[bytes]) -> str:
    """Where the system says that a process is."""
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/wchan").read_text()
    return "unknown"


# ---- checks ---------------------------------------------------------------------------------------------------------------


def reaction(ended: Ended, truth: Truth) -> str:
    """How the process reacted to the interruption, in a word; raises Wrong if that is not allowed."""
    if codes := set(CODE.findall(ended.errors)) - set(CODE.findall(truth.ended.errors)):
        raise Wrong(f"it spoke of {codes}: {ended.errors[-2000:]}")
    if ended.status == 0:
        if ended.out != truth.ended.out:
            raise Wrong(f"the result is another: {differing(truth.ended.out, ended.out)}")
        if sessions.INTERRUPTED in ended.errors:
            return "went on"
        return "was done" if ended.errors == truth.ended.errors else f"passed over: {ended.errors[-1500:]}"
    if STARTING in ended.errors:
        return SILENT
    raised = RAISED.findall(ended.errors)
    first = raised.index("KeyboardInterrupt") if "KeyboardInterrupt" in raised else len(raised)
    if set(raised[first:]) - {"KeyboardInterrupt"}:
        raise Wrong(f"it made another error of the interruption: {ended.errors[-2000:]}")
    if ended.status in (ABORTED, -signal.SIGINT) and "Traceback" not in ended.errors:
        return "aborted" if ended.status == ABORTED else SILENT
    if ended.status == -signal.SIGINT and ended.errors.rstrip().endswith("\nKeyboardInterrupt"):
        return "KeyboardInterrupt"
    raise Wrong(f"it ended with {ended.status}: {ended.errors[-2000:]}")


def differing(right: str, found: str) -> str:
    """The lines in which two texts differ."""
    return "\n".join(islice(difflib.unified_diff(right.splitlines(), found.splitlines(), "right", "found", n=0, lineterm=""), 30))


def leftovers(ended: Ended, place: Path, truth: Truth) -> list[str]:
    """What an interrupted process should not have left behind."""
    wrong = [f"left alive: {process}" for process in ended.left]
    wrong += [f"a draft is left: {draft.relative_to(place)}" for draft in writes.drafts(place)]
    wrong += writes.same(writes.tree(place / "store"), truth.store)
    wrong += [f"left in the temporary folder: {name}" for name in os.listdir(place / "tmp") if name.startswith(TEMPORARY)]
    file = place / "it" / sessions.RESULTS
    if file.exists():
        try:
            results.load(file)
        except OnepassError as error:
            wrong.append(str(error))
    return wrong


def afterwards(kind: Kind, place: Path, truth: Truth) -> list[str]:
    """What is wrong with the next run over the same store, which must be as if nothing had happened."""
    ended = run_interrupted(kind, place)
    wrong = [f"left alive by the next run: {process}" for process in ended.left]
    if (ended.status, ended.out) != (0, truth.ended.out):
        wrong.append(f"the next run ended with {ended.status}: {differing(truth.ended.out, ended.out)} {ended.errors[-1000:]}")
    if codes := set(CODE.findall(ended.errors)) - set(CODE.findall(truth.ended.errors)):
        wrong.append(f"the next run spoke of {codes}: {ended.errors[-1000:]}")
    left = writes.tree(place / "store")
    return wrong + writes.same(left, truth.store) + [f"{name} is missing" for name in truth.store.keys() - left.keys()]


def check_interruption(kind: Kind, place: Path, truth: Truth, rng: random.Random) -> dict[str, Any]:
    """One interruption and its outcome."""
    at, group = rng.uniform(0.0, truth.ended.took), rng.random() < 0.5
    found: dict[str, Any] = {"kind": kind.name, "at": round(at, 3), "of": round(truth.ended.took, 1), "group": group}
    try:
        ended = run_interrupted(
            kind, place, at, group, LONGEST + 5 * truth.ended.took
        )  # the machine may be busy, and a session goes on
        found |= {"outcome": reaction(ended, truth), "ended after": round(ended.took - at, 3)}
        if wrong := leftovers(ended, place, truth) + afterwards(kind, place, truth):
            raise Wrong("; ".join(wrong))
    except Wrong as error:
        return found | {"ok": False, "why": str(error)}
    return found | {"ok": True}


# ---- all of them -----------------------------------------------------------------------------------------------------------


def learn(kind: Kind, place: Path) -> Truth:
    """The expected outcome, from an uninterrupted run."""
    place.mkdir()
    ended = run_interrupted(kind, place)
    if ended.status or ended.left:
        raise Wrong(f"{kind.name} ended with {ended.status}, {ended.left}: {ended.errors}")
    return Truth(ended, writes.tree(place / "store"))


def rows(count: int, seed: int, before: set[int], kinds: tuple[Kind, ...] = KINDS) -> Iterator[dict[str, Any]]:
    """One row of the log per interruption."""
    truths: dict[str, Truth] = {}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored, and so by children
    with tempfile.TemporaryDirectory(prefix="onepass-interrupts-") as folder:
        for fault in sorted(set(range(count)) - before):
            rng, began = random.Random(f"{seed}/{fault}"), time.monotonic()
            (kind,) = rng.choices(kinds, [each.weight for each in kinds])
            if kind.name not in truths:
                truths[kind.name] = learn(kind, Path(folder) / f"truth-{len(truths)}")
            place = Path(folder) / "place"
            place.mkdir()
            found = check_interruption(kind, place, truths[kind.name], rng)
            shutil.rmtree(place)
            yield {"seed": seed, "fault": fault, **found, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """The command; 1 where anything was wrong."""
    return workers.command(rows, __doc__, 100)


if __name__ == "__main__":
    raise SystemExit(main())
