"""Compares generated kernels before and after a change of the compiler, by digests of their text. No GPU is needed.

    PYTHONPATH=. python scripts/kernel_text.py dump BEFORE.json     before the change
    PYTHONPATH=. python scripts/kernel_text.py dump AFTER.json      after the change
    python scripts/kernel_text.py compare BEFORE.json AFTER.json    exits with 1 if any kernel differs

A dump covers every named workload at its sizes, each for every row class, the suite `table` also for other GPUs than the H200,
and the regions of the captured model graphs. `--text` also stores the text itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from onepass import pipeline
from onepass.capture import capture
from onepass.device import device
from onepass.integration import region_op  # noqa: F401, defines the op that rewritten graphs call
from onepass.integration.claim import ClaimOptions, claim
from onepass.ir.program import Program
from onepass.ir.size import Bindings
from onepass.measure.suites import Job, suite
from onepass.plan.partition import plan
from onepass.plan.plan import Plan
from onepass.plan.variant import ROW_CLASSES, specialize
from tests.support.stored_graphs import load, read, stored

MAIN_DEVICE, OTHER_DEVICES = "h200", ("a100", "b200")
Entry = tuple[str, Plan]


def workloads() -> Iterator[Entry]:
    """Every workload at its sizes on the main device; those of the suite `table` also on the others."""
    table_ids = {job.id for job in suite("table").jobs}
    for job in suite("all").jobs:
        for name in (MAIN_DEVICE, *(OTHER_DEVICES if job.id in table_ids else ())):
            program, bindings = _captured(job, dynamic=False)
            yield f"{job.id} on {name}", plan(program, bindings, device(name))


def row_classes() -> Iterator[Entry]:
    """Every workload and dtype with a dynamic row count, for each row class."""
    one_each = {(job.workload, job.dtype, job.shape[1:]): job for job in suite("all").jobs}
    card = device(MAIN_DEVICE)
    for job in one_each.values():
        program, bindings = _captured(job, dynamic=None)
        fixed, free = specialize(program, bindings)
        if len(fixed.symbols) == 1:
            for k, (_, rows) in enumerate(ROW_CLASSES):
                sizes = {name: max(2, round(rows * card.sms)) for name in free}
                yield f"{job.id} class {k}", plan(fixed, sizes, card)


def models() -> Iterator[Entry]:
    """Every region claimed in the captured model graphs."""
    for name, path in stored():
        claiming = ClaimOptions(device(MAIN_DEVICE), phase=name.rsplit("_", 1)[-1])
        for region in claim(load(read(path)), claiming).regions:
            yield f"{name} {region.id}", region.plan


def _captured(job: Job, dynamic: bool | None) -> tuple[Program, Bindings]:
    args = job.inputs()
    captured = capture(job.subject.function, args, dynamic=dynamic)
    return pipeline.optimize(captured.program), captured.bind(args) or {}


def dump(text: bool = False) -> dict[str, dict[str, str]]:
    """The digest of each entry's kernels, and optionally their text."""
    found: dict[str, dict[str, str]] = {}
    for entries in (workloads, row_classes, models):
        for name, chosen in entries():
            whole = "\n".join(f"{s.text}\n# {s.params} {s.grid} warps={s.warps}" for s in pipeline.generate(chosen))
            found[name] = {"digest": hashlib.sha256(whole.encode()).hexdigest()[:16]} | ({"text": whole} if text else {})
    return found


def differences(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> Iterator[str]:
    """A line for every entry that is new, gone, or has different kernels."""
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield f"gone    {name}"
        elif name not in before:
            yield f"new     {name}"
        elif before[name]["digest"] != after[name]["digest"]:
            yield f"differs {name}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/kernel_text.py")
    commands = parser.add_subparsers(dest="command", required=True)
    dumping = commands.add_parser("dump")
    dumping.add_argument("file", type=Path)
    dumping.add_argument("--text", action="store_true", help="also store the text")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "dump":
        found = dump(arguments.text)
        arguments.file.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
        print(f"{len(found)} entries in {arguments.file}")
        return 0
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    lines = list(differences(before, after))
    print("\n".join([*lines, f"{len(lines)} of {len(before.keys() | after.keys())} entries differ"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
