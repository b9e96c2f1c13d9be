"""Many processes write and read the same folders at the same moment: `python -m tests.campaign.crowd --count 64 --log FILE`.

Processes of the first wave find nothing and each create everything; those of the second find what the first wrote. All results are
right, no process warns, the folders end up as a single process leaves them, and no draft remains.

The log has one JSON line per wave. A run with the same log resumes with the first round of two waves that is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

import onepass
from onepass.runtime.counters import counts

from . import store, writes

WAVES = 2
TOGETHER = writes.SCENARIOS[:3]  # the last writes two states of one file in turns


def work_of_process(folder: Path, wave: int) -> list[str]:
    """The work of one process; returns what went wrong."""
    wrong, before = [], counts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scenario in TOGETHER:
            try:
                if scenario.run(folder / scenario.name) is not True:
                    wrong.append(f"{scenario.name}: a result is wrong")
            except Exception as error:
                wrong.append("".join(traceback.format_exception(error))[-1500:])
    spent = counts() - before
    if wave and (spent.plans or spent.misses):
        wrong.append(f"{spent.plans} plans were made and {spent.misses} entries not found, though another wave came first")
    return wrong + [f"a warning: {w.message}" for w in caught]


def crowd(folder: Path, wave: int, count: int) -> list[list[str]]:
    """Start `count` processes, release them all at once, and wait for them."""
    gate, opened = os.pipe()
    alive, pipes = [], []
    for _ in range(count):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(opened)
            os.read(gate, 1)  # until the parent opens it
            with open(writing, "w") as pipe:
                json.dump(work_of_process(folder, wave), pipe)
            os._exit(0)
        os.close(writing)
        alive.append(child)
        pipes.append(reading)
    os.close(gate)
    os.close(opened)
    found = []
    for child, reading in zip(alive, pipes, strict=True):
        with open(reading) as pipe:
            report = pipe.read()
        _, status = os.waitpid(child, 0)
        found.append(json.loads(report) if report and not status else [f"a process ended with {os.waitstatus_to_exitcode(status)}"])
    return found


def waves(count: int, number: int) -> list[dict[str, Any]]:
    """A round: two waves over one set of folders."""
    report = []
    with tempfile.TemporaryDirectory(prefix="onepass-one-") as alone, tempfile.TemporaryDirectory(prefix="onepass-crowd-") as place:
        for folder in (alone, place):
            for scenario in TOGETHER:
                (Path(folder) / scenario.name).mkdir(mode=0o700)
        assert work_of_process(Path(alone), 0) == []
        whole = writes.tree(Path(alone))
        for wave in range(WAVES):
            began = time.monotonic()
            wrong = [each for found in crowd(Path(place), wave, count) for each in found]
            left = writes.tree(Path(place))
            wrong += writes.same(left, whole) + [f"{name} is missing" for name in whole.keys() - left.keys()]
            wrong += [f"{draft} is left" for draft in writes.drafts(Path(place))]
            report.append(
                {"round": number, "wave": wave, "processes": count, "wrong": wrong, "seconds": round(time.monotonic() - began, 1)}
            )
    return report


def run(count: int, rounds: int, log: Path) -> list[dict[str, Any]]:
    """Run all rounds that are not in the log yet, and return the whole log."""
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    with tempfile.TemporaryDirectory(prefix="onepass-known-") as place, log.open("a") as file:
        writes.learn(Path(place) / "store")
        for number in sorted(set(range(rounds)) - {report["round"] for report in done}):
            report = waves(count, number)
            done += report
            file.writelines(json.dumps(each) + "\n" for each in report)
            file.flush()
    return done


def main() -> int:
    """The command; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--log", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["ONEPASS_CACHE_DIR"] = tempfile.mkdtemp(prefix="onepass-campaign-")
    onepass.fuse(store.FUNCTIONS[0])(store.X)  # says once that it interprets
    found = run(given.count, given.rounds, given.log)
    for report in found:
        print(
            f"round {report['round']}, wave {report['wave']}: {report['processes']} processes, {report['seconds']} s, "
            f"{'WRONG: ' + '; '.join(report['wrong'][:3]) if report['wrong'] else 'all right'}"
        )
    return int(any(report["wrong"] for report in found))


if __name__ == "__main__":
    sys.exit(main())
