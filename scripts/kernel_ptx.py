"""Compares the PTX of sampled kernels before and after a change of their text. No GPU is needed.

    PYTHONPATH=. python scripts/kernel_ptx.py dump BEFORE.json     before the change
    PYTHONPATH=. python scripts/kernel_ptx.py dump AFTER.json      after the change
    python scripts/kernel_ptx.py compare BEFORE.json AFTER.json    exits with 1 if any kernel differs

A dump compiles, for sm_90 and without line info, some kernels of every family among the entries of `kernel_text.py`. Comments, and
directives that say where code came from, are left out. The sample follows from plans alone, so both dumps hold the same kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from onepass import pipeline
from onepass.device import device
from onepass.plan.plan import KernelPlan, Plan
from onepass.runtime.compile_job import job
from onepass.runtime.module import build
from scripts.kernel_text import MAIN_DEVICE, models, row_classes, workloads

TARGET = 90
EACH = 6  # kernels of a family
UNCOMPARED = re.compile(r"\s*//.*|^\s*\.(loc|file|section)\b.*", re.M)


def sampled(each: int) -> Iterator[tuple[str, Plan, KernelPlan]]:
    """Kernels of every family, spread over all that differ in program or schedule."""
    families: dict[str, dict[str, tuple[str, Plan, KernelPlan]]] = defaultdict(dict)
    for entries in (workloads, row_classes, models):
        for name, plan in entries():
            if plan.device == device(MAIN_DEVICE):
                for kernel in plan.kernels:
                    families[kernel.family].setdefault(f"{kernel.kernel.program} {kernel.schedule}", (name, plan, kernel))
    for found in families.values():
        every = [*found.values()]
        yield from every[:: max(1, -(-len(every) // each))]


def ptx(plan: Plan, kernel: KernelPlan) -> str:
    """The PTX of a kernel, without comments and line info."""
    at = plan.kernels.index(kernel)
    text = build(job(pipeline.generate(plan)[at], TARGET)).asm["ptx"]
    return "\n".join(line for line in UNCOMPARED.sub("", text).splitlines() if line.strip())


def dump(each: int) -> dict[str, str]:
    """The PTX of every sampled kernel, by family, entry and name."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": folder}
        return {f"{kernel.family}: {name}, {kernel.name}": ptx(plan, kernel) for name, plan, kernel in sampled(each)}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/kernel_ptx.py")
    commands = parser.add_subparsers(dest="command", required=True)
    dumping = commands.add_parser("dump")
    dumping.add_argument("file", type=Path)
    dumping.add_argument("--each", type=int, default=EACH, help="kernels of a family")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "dump":
        found = dump(arguments.each)
        arguments.file.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
        print(f"{len(found)} kernels in {arguments.file}")
        return 0
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    names = sorted(before.keys() | after.keys())
    lines = [f"differs {name}" for name in names if before.get(name) != after.get(name)]
    print("\n".join([*lines, f"{len(lines)} of {len(names)} kernels differ"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
