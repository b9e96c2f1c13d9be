"""The campaign of random graphs: a range of seeds through one stage, by several processes, into a log that can be resumed.

    python -m tests.campaign.graphs --stage oracle --seeds 0:30000 --log oracle.jsonl

The log has one JSON line per graph, so that an interrupted run resumes where it stopped. Its summary says how often
each op was applied to each type, what was refused and why, and shows every class of defects with its smallest graph.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TextIO

# fmt: off
NAMES = ("oracle", "pairs", "pair kernels", "interpret", "schedules", "families", "one way",
         "other sizes", "integers", "compile", "card")
# fmt: on
PROCESS = 500  # graphs per process: its memory grows with them, and starting a process takes seconds
DEADLINE = 600  # wall-clock seconds after which a graph counts as stuck, even on a busy machine; slowness is judged by CPU time


def run(stage: str, seeds: range, log: Path, jobs: int) -> dict[str, Any]:
    """Run every seed that the log does not contain yet, and return the summary of the whole log."""
    done = {line["seed"] for line in read(log)}
    todo = [s for s in seeds if s not in done]
    parts = [todo[k : k + PROCESS] for k in range(0, len(todo), PROCESS)]
    with log.open("a") as out, ThreadPoolExecutor(jobs) as threads:
        for _ in threads.map(partial(_through_processes, stage, out), parts):
            pass
    return summary(read(log))


def _through_processes(stage: str, out: TextIO, seeds: list[int]) -> None:
    """Run seeds in a fresh process, and in another one after each that ends early. The graph that ended it has a line as well."""
    command = [sys.executable, "-m", "tests.campaign.graphs", "--stage", stage, "--child", "--log", os.devnull]
    while seeds:
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps(seeds))
            child.stdin.close()
            for line in child.stdout:
                if line.endswith("\n"):
                    out.write(line)
                    out.flush()
                    seeds = seeds[1:]
            child.wait()
            errors.seek(0)
            if seeds:
                why = f"the process ended with {child.returncode}: {errors.read()[-300:]}"
                crash = {"seed": seeds[0], "kind": "crash", "where": str(child.returncode), "detail": why, "ops": [], "dtypes": []}
                out.write(json.dumps(crash) + "\n")
                seeds = seeds[1:]


def _as_child(stage: str) -> None:
    """The seeds on the standard input, a line each on the standard output."""
    quiet()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # anything else that is printed is not part of the log
    for seed in json.load(sys.stdin):
        answers.write(json.dumps(check_seed(stage, seed)) + "\n")
        answers.flush()


def read(log: Path) -> list[dict[str, Any]]:
    """The lines of a log; a truncated last line does not count."""
    if not log.exists():
        return []
    found = []
    for line in log.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


class Stuck(BaseException):
    """A graph that takes longer than the deadline. No handler of ordinary errors may swallow it."""


def check_seed(stage: str, seed: int) -> dict[str, Any]:
    """One seed's line of the log; a defect comes with its smallest graph."""
    from .checks import STAGES, Finding, check
    from .shrink import shrunk

    def bounded(candidate: Any) -> Finding:
        signal.alarm(DEADLINE)
        try:
            return check(candidate, stage)
        except Stuck:
            return Finding(seed, "slow", f"more than {DEADLINE} s of wall clock")
        finally:
            signal.alarm(0)

    signal.signal(signal.SIGALRM, _raise_stuck)
    drawn = STAGES[stage].draw(seed)
    found = bounded(drawn)
    dtypes = sorted({i.dtype for i in drawn.inputs if i.is_tensor})
    line = found.to_json() | {"ops": sorted({s.op for s in drawn.steps}), "dtypes": dtypes}
    if found.is_bad and found.kind != "slow":
        small = shrunk(drawn, lambda g: bounded(g).signature == found.signature)
        line |= {
            "source": small.source(),
            "inputs": [str(i) for i in small.inputs],
            "graph": small.to_json(),
            "small": bounded(small).detail,
        }
    return line


def _raise_stuck(number: int, frame: object) -> None:
    raise Stuck


def quiet() -> None:
    """One thread, no store, and nothing on the terminal but the summary."""
    import logging

    os.environ["ONEPASS_CACHE"] = "0"
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def summary(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts over a log."""
    kinds, refused, pairs, hows = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    classes: dict[str, dict[str, Any]] = {}
    for line in lines:
        kinds[line["kind"]] += 1
        if line["kind"] == "refused":
            refused[" ".join((line["where"], _reason(line["detail"])))] += 1
        hows.update([line["where"]] if line["kind"] == "right" and line["where"] else [])
        pairs.update(f"{op} {kind}" for op in line["ops"] for kind in {family(d) for d in line["dtypes"]})
        if "source" in line or line["kind"] in ("slow", "crash"):
            name = f"{line['kind']} {line['where']}"
            known = classes.setdefault(
                name, {"count": 0, "seeds": [], "source": line.get("source", ""), "detail": line.get("small", line["detail"])}
            )
            known["count"] += 1
            known["seeds"].append(line["seed"])
            if len(line.get("source", "")) < len(known["source"]):
                known |= {"source": line["source"], "inputs": line["inputs"], "detail": line["small"]}
            known.setdefault("inputs", line.get("inputs"))
    rare = {pair: n for pair, n in sorted(pairs.items(), key=lambda item: item[1]) if n < 20}
    return {
        "graphs": sum(kinds.values()),
        "kinds": dict(kinds.most_common()),
        "refused": dict(refused.most_common(60)),
        "op x dtype pairs": len(pairs),
        "met fewer than 20 times": rare,
        "right by": dict(hows.most_common()),
        "defects": classes,
    }


def family(dtype: str) -> str:
    """The class of types an input belongs to."""
    return {"e4m3": "fp8", "e5m2": "fp8", "f16": "half", "bf16": "half", "u16": "unsigned", "u32": "unsigned"}.get(
        dtype, "int" if dtype[0] in "iu" else dtype
    )


def _reason(detail: str) -> str:
    """The first words of a refusal, without what differs from graph to graph."""
    words = detail.split("] ", 1)[-1].split(" (at ")[0]
    return " ".join(words.split()[:6])


def show(counts: dict[str, Any]) -> Iterator[str]:
    """The summary as lines."""
    yield f"{counts['graphs']} graphs: " + ", ".join(f"{n} {kind}" for kind, n in counts["kinds"].items())
    rare = counts["met fewer than 20 times"]
    yield f"{counts['op x dtype pairs']} pairs of op and class of types, {len(rare)} of them met fewer than 20 times"
    if counts["right by"]:
        yield "right: " + ", ".join(f"{n} {how}" for how, n in counts["right by"].items())
    for reason, n in list(counts["refused"].items())[:25]:
        yield f"  refused {n}: {reason}"
    for name, known in sorted(counts["defects"].items(), key=lambda item: -item[1]["count"]):
        yield (
            f"\n{name}: {known['count']} graphs, such as seed {known['seeds'][0]}\n  {known['detail'][:300]}\n"
            f"  {known.get('inputs')}\n{known['source']}"
        )


def main() -> int:
    """The command."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m tests.campaign.graphs")
    parser.add_argument("--stage", choices=NAMES, default="oracle")
    parser.add_argument("--seeds", default="0:1000", help="first:end")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--child", action="store_true", help="take seeds from the standard input; used by this command itself")
    given = parser.parse_args()
    if given.child:
        _as_child(given.stage)
        return 0
    first, end = map(int, given.seeds.split(":"))
    counts = run(given.stage, range(first, end), given.log, given.jobs)
    sys.stdout.write("\n".join(show(counts)) + "\n")
    return 1 if counts["defects"] else 0


if __name__ == "__main__":
    sys.exit(main())
