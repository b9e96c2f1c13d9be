"""Runs kernels with explicit shared memory at small sizes and checks them against float64, for use with a sanitizer.

    PYTHONPATH=. compute-sanitizer --tool memcheck|racecheck|synccheck python bench/sanitize.py [NAME ...]
    PYTHONPATH=. TRITON_INSTRUMENTATION_MODE=consan python bench/sanitize.py [NAME ...]

The second command uses Triton's concurrency sanitizer: it compiles kernels with checks of every shared memory access against the
barriers that guard it, and a failed check ends the process with an assertion. Compilation takes up to a minute per kernel. Kernels
for unaligned rows take many minutes and are skipped, as are kernels that cannot be instrumented; the script prints their number.

Without a sanitizer, this is a quick check of every kind of such kernels on the GPU. It exits with 1 if any result is wrong.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import triton

from onepass.codegen.source import Source
from onepass.device import device
from onepass.errors import CompileFailed
from onepass.ir.oracle import evaluate
from onepass.knobs import knobs
from onepass.measure.captured_function import ALL_PLANS, CapturedFunction
from onepass.pipeline import generate
from onepass.plan.plan import Plan
from onepass.plan.schedule import RowVectors
from onepass.runtime import offline
from onepass.runtime.binary import Binary
from onepass.runtime.compiled import Compiled
from onepass.runtime.executable import aligned_of, assemble
from onepass.tools.workloads import workload

CARD = torch.device("cuda", 0)
# More rows than the ring slots of all CTAs on a GPU, so that slots are reused.
SHAPES = {
    "softmax": ((700, 4096), (700, 4501)),
    "softmax_backward": ((700, 4096),),
    "rms_norm": ((700, 4096), (700, 4501)),
    "layer_norm": ((700, 4096),),
    "logsumexp": ((300, 32768),),
    "rms_norm_backward": ((700, 4096), (700, 8192)),
    "layer_norm_backward": ((700, 4096), (700, 16384)),
    "outer_sum_1": ((2100, 512),),
    "outer_sum_5": ((2100, 512),),
    "batch_norm_stats": ((8, 64, 1024),),
}
INSTRUMENTED = bool(os.environ.get("TRITON_INSTRUMENTATION_MODE"))
PLANS_PER_KIND = 1 if INSTRUMENTED else 3  # per family, ring size and placement of row vectors
MAX_STAGES = 3 if INSTRUMENTED else 8  # code size grows with the ring


def plans(ours: CapturedFunction) -> Iterator[Plan]:
    """A few plans of every kind that stages something in shared memory."""
    taken: dict[tuple[str, int, RowVectors], int] = {}
    for plan in ours.plans(device("h200"), ALL_PLANS):
        staged = [k.schedule for k in plan.kernels if k.schedule.staged]
        if any(s.stages > MAX_STAGES or INSTRUMENTED and s.sector_elems for s in staged):
            continue
        kinds = [(s.family, s.stages, s.row_vectors) for s in staged]
        if kinds and all(taken.get(kind, 0) < PLANS_PER_KIND for kind in kinds):
            taken |= {kind: taken.get(kind, 0) + 1 for kind in kinds}
            yield plan


def compiled(ours: CapturedFunction, plan: Plan) -> tuple[Plan, tuple[Source, ...], tuple[Binary, ...]] | None:
    """A plan with its compiled kernels; None if they cannot be instrumented."""
    sources = generate(plan)
    try:
        return plan, sources, tuple(offline.compile(s, device("h200"), aligned_of(s, ours.aligned, ours.outputs)) for s in sources)
    except CompileFailed:
        if INSTRUMENTED:
            return None
        raise


def wrong(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
    """Check the plans of one workload: an error message per plan, empty if its results are right."""
    case = workload(name)
    args = case.inputs(shape, dtype, CARD)
    ours = CapturedFunction.of(case.function, args)
    tensors = ours.captured.tensors(tuple(args))
    exact = evaluate(ours.program, {k: v.cpu() for k, v in tensors.items()}, ours.bindings)
    with ThreadPoolExecutor(knobs().compile_workers) as threads:
        made = list(threads.map(lambda plan: compiled(ours, plan), plans(ours)))
    if None in made:
        print(f"{name} {shape} {dtype}: {made.count(None)} plans cannot be instrumented", flush=True)
    for plan, sources, binaries in filter(None, made):
        found = assemble(Compiled(plan, sources, binaries).artifact, CARD, ours.aligned)(tensors, ours.bindings)
        torch.cuda.synchronize()
        schedule = next(k.schedule for k in plan.kernels if k.schedule.staged)
        bad_outputs = [
            k
            for k, right in exact.items()
            if not float((found[k].cpu().double() - right).abs().max()) <= 0.02 * float(right.abs().max()) + 1e-6
        ]
        yield f"{name} {shape} {schedule}: {', '.join(bad_outputs)} wrong" if bad_outputs else ""


def main() -> int:
    """Run all workloads, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SHAPES))
    arguments = parser.parse_args()
    if INSTRUMENTED:  # the checks keep their state in memory that the launch allocates
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=CARD))
    messages = [
        text
        for name in arguments.names
        for shape in SHAPES[name]
        for dtype in (torch.bfloat16, torch.float32)
        for text in wrong(name, shape, dtype)
    ]
    print(f"{len(messages)} plans, {sum(map(bool, messages))} wrong", *filter(None, messages), sep="\n")
    return int(any(messages))


if __name__ == "__main__":
    raise SystemExit(main())
