"""Every writing system call fails, or is the last one: `python -m tests.campaign.writes --log FILE`.

A clean run of a scenario counts its calls: create, mkdir, write, flush, fsync, close, replace, unlink, and look, which opens an
existing file. Then the scenario is repeated, in a process, once for each call and each fault: the call fails with ENOSPC, EIO,
EDQUOT or EROFS, alone or with all calls after it, or the process is killed there, halfway through a write. Looking fails only with
EIO. Whatever happened: results are right, readable files are complete, errors and warnings are coded, no descriptor is left open.
Then it is run once more, without a fault, and leaves the same files as the clean run and no draft.

The log has one JSON line per fault. A run with the same log resumes where the last one ended.
"""

from __future__ import annotations

import argparse
import builtins
import errno
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import onepass
from onepass import files, pipeline
from onepass.capture.function.trace import capture
from onepass.device import device
from onepass.errors import OnepassError, OnepassWarning
from onepass.integration import repro
from onepass.measure import results
from onepass.measure.results import Result, Row, Run
from onepass.plan.partition import plan
from onepass.runtime import cache, keep_sources

from . import store

NUMBERS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)
CALLS = ("open", "mkdir", "replace", "unlink", "fsync", "close")
FAULTS: tuple[Fault, ...] = (*((number, persistent) for number in NUMBERS for persistent in (False, True)), "kill")
LOOKING: tuple[Fault, ...] = ((errno.EIO, False), (errno.EIO, True))
LONGEST = 600  # seconds a fault may take before it counts as hanging: the machine may be busy
LONG_AGO = (0, 0)
Fault = tuple[int, bool] | str


@dataclass(frozen=True)
class Scenario:
    """A function that writes to a folder. Its result must be the same whatever fails; or it may raise one of the `plain` errors."""

    name: str
    run: Callable[[Path], object]
    plain: tuple[type[Exception], ...] = ()


# ---- what writes -----------------------------------------------------------------------------------------------------------


def keeping(folder: Path) -> object:
    """Entries, measurements of a card and binaries are stored and found."""
    kept, found = cache.Store(folder), []
    entry = KNOWN["entry"]
    kept.check()
    for key in ("0" * 64, "1" * 64):
        kept.save(key, entry)
        found.append(kept.load(key) in (entry, None))
    kept.save_measurement(store.CARD_KEY, store.CARD)
    found.append(kept.load_measurement(store.CARD_KEY, type(store.CARD)) in (store.CARD, None))
    for key, group in store.BINARIES.items():
        with store.manager(kept.kernels, key) as triton:
            paths = {name: triton.put(content, name) for name, content in group.items()}
            with suppress(OSError):
                triton.put_group("k.json", paths)
            found += [Path(path).read_bytes() == group[name] for name, path in paths.items()]
    kept.sweep()
    return all(found)


def computing(folder: Path) -> object:
    """A function is fused and called, with a store and a folder for its sources."""
    os.environ["ONEPASS_KEEP_SOURCES"] = str(folder / "sources")
    keep_sources._warn_not_kept.cache_clear()
    try:
        return bool(torch.equal(store.result(store.FUNCTIONS[0], folder / "store"), KNOWN["right"]))
    finally:
        del os.environ["ONEPASS_KEEP_SOURCES"]


def reproducing(folder: Path) -> object:
    """A region's reproducer is written, or the reason why not is reported."""
    os.environ["ONEPASS_REPRO_DIR"] = str(folder / "repros")
    where = repro.write_region("0123456789", "it", KNOWN["program"], {"s0": 6}, repro.Layout("cpu"))
    return where.startswith("[ONEPASS-707]") or Path(where).read_text().startswith("# Region 0123456789")


def measuring(folder: Path) -> object:
    """Results of a benchmark are written twice, and read."""
    path = folder / "results" / "run.json"
    run = Run("table", "2026-01-31", "card", "h200", {"torch": "2"})
    results.save(run, path)
    row = Row("softmax", (2, 3), "bf16", "softmax-2x3-bf16", 12, 0.1, {"onepass": Result(us=1.0)})
    results.save(Run("table", "2026-01-31", "card", "h200", {"torch": "2"}, rows=(row,)), path)
    return len(results.load(path).rows) == 1


SCENARIOS = (
    Scenario("store", keeping, (OSError,)),
    Scenario("fused function", computing),
    Scenario("reproducer", reproducing),
    Scenario("results", measuring),
)
KNOWN: dict[str, Any] = {}


def learn(folder: Path) -> None:
    """Learn the expected results before anything fails."""
    captured = capture(store.FUNCTIONS[0], (store.X,))
    KNOWN["program"] = pipeline.optimize(captured.program)
    KNOWN["entry"] = pipeline.interpret(plan(KNOWN["program"], {"s0": 6}, device("h200"))).artifact
    KNOWN["right"] = store.result(store.FUNCTIONS[0], folder)
    for scenario in SCENARIOS:  # lazy imports and compilations happen now and are not among the calls counted later
        assert scenario.run(folder / scenario.name) is True, scenario.name


# ---- how it fails ----------------------------------------------------------------------------------------------------------


@contextmanager
def hooked(before: Callable[[str], None]) -> Iterator[None]:
    """Call `before`, which may raise, before every writing call of this process through the modules of onepass."""
    real, created = {name: getattr(os, name) for name in CALLS}, set[int]()

    def hook(name: str) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            before(name)
            return real[name](*given, **more)

        return call

    def opening(path: Any, flags: int, *given: Any, **more: Any) -> int:
        before("create" if flags & os.O_CREAT else "look")
        handle: int = real["open"](path, flags, *given, **more)
        if flags & os.O_CREAT:
            created.add(handle)
        return handle

    def closing(handle: int) -> None:
        real["close"](handle)  # also where that fails
        if handle in created:
            created.remove(handle)
            before("close")

    def opener(handle: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
        return (
            Failing(builtins_open(handle, mode, *given, **more), before)
            if "w" in mode
            else builtins_open(handle, mode, *given, **more)
        )

    builtins_open = builtins.open
    with ExitStack() as patched:
        for name in CALLS:
            call = {"open": opening, "close": closing}.get(name, hook(name))
            patched.enter_context(mock.patch.object(os, name, call))
        patched.enter_context(mock.patch.object(files, "open", opener, create=True))
        yield


class Failing:
    """A file whose content, or half of it, reaches the disk when it is flushed."""

    def __init__(self, file: Any, before: Callable[[str], None]) -> None:
        self._file, self._before, self._content = file, before, b""

    def write(self, content: bytes) -> int:
        self._before("write")
        self._content += content
        return len(content)

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.write(self._content[: len(self._content) // 2])
            self._file.flush()
            self._before("flush")
            self._file.write(self._content[len(self._content) // 2 :])


def faulty(fault: Fault, at: int) -> Callable[[str], None]:
    """The hook that is called before each call."""
    seen, unlinked = [0], [False]

    def before(name: str) -> None:
        seen[0] += 1
        if fault == "kill" and seen[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault != "kill" and (seen[0] == at or fault[1] and seen[0] > at and (name != "look" or fault[0] == errno.EIO)):
            unlinked[0] = unlinked[0] or name == "unlink"
            raise OSError(fault[0], os.strerror(int(fault[0])))

    before.unlinked = unlinked  # type: ignore[attr-defined]
    return before


# ---- checks ----------------------------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes]:
    """All files in a folder except drafts and quarantined entries."""
    found = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix != ".tmp" and p.parent.name != cache.QUARANTINE]
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def drafts(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.tmp"))


def same(left: dict[str, bytes], whole: dict[str, bytes]) -> list[str]:
    """Files that differ from those of the clean run. Of groups of binaries only names count: they contain paths."""

    def fits(name: str, content: bytes) -> bool:
        return "__grp__" in name or content == whole.get(name) or name == "results/run.json" and b'"rows": []' in content

    return [f"{name} is half-written, or of nobody" for name, content in left.items() if not fits(name, content)]


def attempted(scenario: Scenario, folder: Path, before: Callable[[str], None]) -> list[str]:
    """Run a scenario under a fault, and return what is wrong with its outcome."""
    handles, wrong = len(os.listdir("/proc/self/fd")), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with hooked(before):
                right = scenario.run(folder)
            wrong += [] if right is True else ["a result is wrong"]
        except OnepassError:
            pass
        except Exception as error:
            if not isinstance(error, scenario.plain):
                wrong.append("".join(traceback.format_exception(error))[-1500:])
    wrong += [f"not coded: {w.message}" for w in caught if not issubclass(w.category, OnepassWarning)]
    if len(os.listdir("/proc/self/fd")) != handles:
        wrong.append("descriptors are left open")
    return wrong


def in_child(work: Callable[[], list[str]]) -> tuple[int, list[str]]:
    """Run something in a child process; returns its status and its findings."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(LONGEST)  # which ends it
        try:
            found = work()
        except BaseException as error:
            found = ["".join(traceback.format_exception(error))[-1500:]]
        with open(writing, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        report = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(report) if report else []


def check_fault(scenario: Scenario, fault: Fault, at: int, whole: dict[str, bytes]) -> list[str]:
    """One fault, and what was wrong during and after it."""
    with tempfile.TemporaryDirectory(prefix="onepass-writes-") as place:
        folder, temporary = Path(place) / "it", Path(place) / "tmp"
        folder.mkdir(mode=0o700)
        temporary.mkdir(mode=0o700)

        def under_fault() -> list[str]:
            tempfile.tempdir = str(temporary)
            before = faulty(fault, at)
            wrong = attempted(scenario, folder, before)
            if drafts(folder) and not before.unlinked[0]:  # type: ignore[attr-defined]
                wrong.append(f"drafts are left: {drafts(folder)}")
            return wrong

        status, wrong = in_child(under_fault)
        if status != (-signal.SIGKILL if fault == "kill" else 0):
            wrong.append(f"the process ended with {status}")
        wrong += same(tree(folder), whole)
        for draft in drafts(folder):
            os.utime(draft, LONG_AGO)
        status, again = in_child(lambda: afterwards(scenario, folder, whole))
        return wrong + again + ([f"afterwards: {status}"] if status else [])


def afterwards(scenario: Scenario, folder: Path, whole: dict[str, bytes]) -> list[str]:
    """Run a scenario again without a fault: it must leave the usual files, and no old draft in a store."""
    wrong = [] if scenario.run(folder) is True else ["afterwards a result is wrong"]
    wrong += [f"afterwards {name} is missing" for name in whole.keys() - tree(folder).keys()] + same(tree(folder), whole)
    for each in (folder, folder / "store"):
        if (each / "entries").exists():
            cache.Store(each).sweep()
            wrong += [f"afterwards there is {draft}" for draft in drafts(each)]
    return wrong


# ---- all of them -----------------------------------------------------------------------------------------------------------


def counted(scenario: Scenario) -> tuple[list[str], dict[str, bytes]]:
    """The calls a clean run makes, and what it leaves."""
    with tempfile.TemporaryDirectory(prefix="onepass-writes-") as place:
        folder = Path(place) / "it"
        folder.mkdir(mode=0o700)
        calls: list[str] = []
        assert attempted(scenario, folder, calls.append) == [], scenario.name
        return calls, tree(folder)


def faults(step: int = 1) -> Iterator[tuple[Scenario, Fault, int, dict[str, bytes]]]:
    """Every call of every scenario, with every fault; or only every `step`-th."""
    k = 0
    for scenario in SCENARIOS:
        calls, whole = counted(scenario)
        for at, name in enumerate(calls, 1):
            for fault in FAULTS if name != "look" else LOOKING:
                k += 1
                if k % step == 0:
                    yield scenario, fault, at, whole


def run(log: Path, step: int = 1) -> Counter[str]:
    """Run all faults that are not in the log yet, and count the outcomes."""
    lines = log.read_text().splitlines() if log.exists() else []
    done = {(report["scenario"], report["fault"], report["call"]): report for report in map(json.loads, lines)}
    with tempfile.TemporaryDirectory(prefix="onepass-known-") as place, log.open("a") as file:
        learn(Path(place) / "store")
        for scenario, fault, at, whole in faults(step):
            name = fault if isinstance(fault, str) else errno.errorcode[fault[0]] + (" from then on" if fault[1] else "")
            if (scenario.name, name, at) not in done:
                began = time.monotonic()
                report = {"scenario": scenario.name, "fault": name, "call": at, "wrong": check_fault(scenario, fault, at, whole)}
                done[scenario.name, name, at] = report
                file.write(json.dumps(report | {"ms": round(1e3 * (time.monotonic() - began), 1)}) + "\n")
                file.flush()
    return Counter(f"{t['scenario']}, {t['fault']}: {'WRONG' if t['wrong'] else 'right'}" for t in done.values())


def main() -> int:
    """The command; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=1, help="only every so many of the faults")
    parser.add_argument("--log", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["ONEPASS_CACHE_DIR"] = tempfile.mkdtemp(prefix="onepass-campaign-")
    onepass.fuse(store.FUNCTIONS[0])(store.X)  # says once that it interprets
    found = run(given.log, given.step)
    for name, number in sorted(found.items()):
        print(f"{number:6} {name}")
    return int(any("WRONG" in name for name in found))


if __name__ == "__main__":
    sys.exit(main())
