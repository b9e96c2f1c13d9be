"""A region is optimized once and planned once per row class; the plan that runs is the one that explain shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.capture import capture
from onepass.codegen.source import Source
from onepass.device import device
from onepass.integration import journal, region_op
from onepass.integration.claim import ClaimOptions, claim
from onepass.integration.engine import Kernels, counts
from onepass.integration.plans import PLANS, Plans, plan_without_lines, without_lines
from onepass.integration.region_spec import decode
from onepass.ir.program import Program
from onepass.pipeline import compile_function, generate, make_plan, optimize
from onepass.plan.plan import Plan
from onepass.plan.recost import at_sizes
from onepass.plan.variant import row_class_bounds, validity, variant_of
from onepass.runtime.binary import Binary
from onepass.runtime.compiled import Artifact
from onepass.tools.model_report import ModelReport
from onepass.tools.workloads import workload
from tests.support.backend_options import EAGER, needs_compiler
from tests.support.processes import run_python
from tests.support.region_calls import inputs, outputs, region
from tests.support.region_graphs import graph_of
from tests.support.stored_graphs import load, read, stored

ROOT = Path(__file__).resolve().parents[2]
CPU, H200 = torch.device("cpu"), device("h200")


def schedules(made: Plan | Artifact) -> list[tuple[str, object]]:
    kernels: Any = made.kernels if isinstance(made, Plan) else made.summary.kernels
    return [(kernel.name, kernel.schedule) for kernel in kernels]


# ---- once, counted in separate processes -------------------------------------------------------------------------------------

COUNTED = """
import json, sys, torch, onepass
from onepass.integration import journal
from onepass.integration.engine import counts

def counted():
    work, seen = counts(), journal.snapshot()
    print(json.dumps({"optimized": work.optimized, "plans": work.plans, "hits": work.hits, "graphs": len(seen.graphs),
                      "calls": sum(seen.calls.values()), "fallbacks": len(seen.fallbacks),
                      "regions": len({r.id for g in seen.graphs for r in g.regions})}))

"""

TRAINING = (
    COUNTED
    + """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(16) for _ in range(2))
        self.linears = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        for norm, linear in zip(self.norms, self.linears):
            x = x + linear(norm(x))
        return torch.softmax(x, -1)

torch.manual_seed(0)
model = Block()
run = torch.compile(model, backend=onepass.backend, dynamic=True, options={"interpret": True, "by_cost": False})
for rows in map(int, sys.argv[1:]):
    run(torch.randn(rows, 16)).square().sum().backward()
counted()
"""
)

FUSED = (
    COUNTED
    + """
def both(x):
    return x.softmax(-1), x.sum(0)

fused = onepass.fuse(both)
for rows in map(int, sys.argv[1:]):
    fused(torch.randn(rows, 16))
counted()
"""
)


@pytest.fixture
def in_a_process(tmp_path: Path) -> Callable[..., dict[str, int]]:
    """Run a script that counts calls; all processes of a test share their caches."""

    def process(script: str, *rows: int) -> dict[str, int]:
        env = {
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin:/usr/local/bin",
            "HOME": str(tmp_path),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            "ONEPASS_CACHE_DIR": str(tmp_path / "store"),
        }
        path = tmp_path / "counted.py"
        path.write_text(script)
        done = run_python(path, *map(str, rows), env=env)
        assert done.returncode == 0, done.stderr
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return found

    return process


@needs_compiler
def test_a_training_step_optimizes_and_plans_each_region_once(in_a_process: Callable[..., dict[str, int]]) -> None:
    cold = in_a_process(TRAINING, 6, 7, 70)
    assert cold["graphs"] == 2 and cold["regions"] >= 4 and cold["calls"] >= 3 * cold["regions"] and not cold["fallbacks"]
    assert cold["optimized"] == cold["regions"]
    assert cold["plans"] == 2 * cold["regions"], "in two row classes"
    warm = in_a_process(TRAINING, 6, 7, 70)
    assert (warm["optimized"], warm["plans"], warm["graphs"], warm["fallbacks"]) == (0, 0, 0, 0)
    assert warm["hits"] == cold["plans"] and warm["calls"] == cold["calls"]


def test_a_fused_function_is_optimized_and_planned_once(in_a_process: Callable[..., dict[str, int]]) -> None:
    cold = in_a_process(FUSED, 6, 7, 70, 80, 9)
    assert (cold["optimized"], cold["plans"]) == (1, 2), "two row classes"
    warm = in_a_process(FUSED, 6, 70)
    assert (warm["optimized"], warm["plans"], warm["hits"]) == (1, 0, 2), "a function is traced again in each process"


@pytest.mark.usefixtures("nothing_compiled", "empty_store")
def test_equal_regions_of_two_graphs_are_planned_once() -> None:
    before = counts()
    plans = Plans()
    for lines in range(2):
        graph = graph_of(partial(torch.softmax, dim=-1), (64, 128))
        for node in graph.nodes:
            node.stack_trace = f'  File "model{lines}.py", line 3, in forward\n    x\n'
        [claimed] = claim(graph, ClaimOptions(H200, interpret=True, by_cost=False), plans).regions
        assert claimed.lines == (f"model{lines}.py:3",)
    work = counts() - before
    assert (work.optimized, work.plans) == (1, 1)


@pytest.mark.usefixtures("nothing_compiled", "empty_store")
def test_a_call_with_unaligned_tensors_is_planned_separately() -> None:
    text = region("a")
    ins, outs = inputs(4), outputs(4)
    spec = decode(text)
    before = counts()
    PLANS.plan(spec.program, variant_of(spec.program, {"s0": 5}, H200))  # as a claim does
    region_op.run(outs, ins, [4], text)
    assert (counts() - before).plans == 1
    shifted = torch.empty(4 * 24 + 1, dtype=torch.bfloat16)[1:].view(4, 24).copy_(ins[0])
    for _ in range(2):
        region_op.run(outs, [shifted, ins[1]], [4], text)
    assert (counts() - before).plans == 2


def test_the_number_of_kept_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.integration.plans.MAX_PLANS", 2)
    plans, program = Plans(), optimize(capture(lambda x: x.softmax(-1), (torch.empty(8, 64),)).program)
    few, more, most = (variant_of(program, {"s0": rows}, H200) for rows in (8, 80, 800))
    before = counts()
    first = plans.plan(program, few)
    assert plans.plan(program, more) is not first and plans.plan(program, few) is first
    plans.plan(program, most)  # and the least recently used one is evicted
    assert plans.plan(program, few) is first and (counts() - before).plans == 3
    plans.plan(program, more)
    assert (counts() - before).plans == 4


def test_lines_of_user_code_change_no_plan() -> None:
    compared = 0
    for name, path in [*stored()][:6]:
        for claimed in claim(load(read(path)), ClaimOptions(H200, phase=name.rsplit("_", 1)[-1])).regions:
            again = make_plan(without_lines(claimed.optimized), claimed.variant)
            assert [s.text for s in generate(plan_without_lines(claimed.plan))] == [s.text for s in generate(again)]
            assert again.refusals == claimed.plan.refusals
            compared += len(again.kernels)
    assert compared > 10


# ---- what explain shows is what runs -----------------------------------------------------------------------------------------

SHAPES = {
    "rms_norm_backward": [(98304, 512), (8192, 8192), (16, 4096)],
    "add_rms_norm_backward": [(8192, 8192)],
    "softmax": [(4096, 50257)],
    "layer_norm_backward": [(262144, 256)],
}


def unmeasured(source: Source) -> Binary:
    return Binary(32, 0, 0, 0, 0, {}, {})


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, shapes in SHAPES.items() for shape in shapes])
@pytest.mark.usefixtures("nothing_compiled", "empty_store")
def test_explain_shows_the_plan_that_a_fused_function_runs(name: str, shape: tuple[int, int]) -> None:
    chosen = workload(name)
    args = chosen.inputs(shape)
    explained = compile_function(chosen.function, args, H200, unmeasured)
    program, bindings = explained.program, explained.bindings
    assert bindings == {"s0": shape[0]}
    runs = Kernels(program, name).executable(bindings, CPU, frozenset(program.buffer)).artifact
    assert schedules(explained.plan) == schedules(runs)
    assert [s.text for s in generate(plan_without_lines(explained.plan))] == [s.text for s in runs.sources]
    holds = validity(program, explained.variant, bindings)
    assert holds.low <= shape[0] <= (holds.high or shape[0])
    assert explained.variant == variant_of(program, {"s0": holds.low}, H200), "it holds from there on"


def test_explain_says_for_which_rows_a_plan_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.runtime.offline.compile", lambda source, target: unmeasured(source))
    chosen = workload("rms_norm_backward")
    args = chosen.inputs((98304, 512))
    report: Any = onepass.explain(chosen.function)(*args)
    assert "  valid for 33,793 or more rows; optimized for 67,584\n" in str(report)
    assert report.floor_bytes == pytest.approx(3 * 98304 * 512 * 2, rel=0.01), "bytes are those of the given size"
    static: Any = onepass.explain(onepass.fuse(chosen.function, dynamic=False))(*args)
    assert "  valid for these sizes only\n" in str(static)
    assert static.to_json()["holds"]["counted"] == ""


@pytest.mark.parametrize(("rows", "span"), [(1, "1 to 16"), (17, "17 to 132"), (8448, "2,113 to 8,448"), (33793, "33,793 or more")])
def test_row_classes_in_words(rows: int, span: str) -> None:
    program = optimize(capture(lambda x: x.softmax(-1), (torch.empty(8, 64),)).program)
    holds = validity(program, variant_of(program, {"s0": rows}, H200), {"s0": rows})
    assert str(holds).startswith(f"valid for {span} rows; optimized for ")
    assert {0, *row_class_bounds(H200)} >= {holds.low - 1}


def test_sizes_that_are_not_rows_are_named() -> None:
    column = optimize(capture(lambda x: x.softmax(0), (torch.empty(12, 64),)).program)
    assert str(validity(column, variant_of(column, {"s0": 12}, H200), {"s0": 12})) == "valid for s0 = 12 only"
    cube = optimize(capture(lambda x: x.softmax(-1), (torch.empty(4, 6, 64),)).program)
    both = validity(cube, variant_of(cube, {"s0": 4, "s1": 6}, H200), {"s0": 4, "s1": 6})
    assert str(both) == "valid for 17 to 132 rows; optimized for s0 = 8, s1 = 8", "their product counts"
    heads = Program(cube.name, cube.axes, tuple(cube.buffers), cube.nodes)
    assert validity(heads, variant_of(heads, {"s0": 4, "s1": 6}, H200), {"s0": 4, "s1": 6}).counted == "rows"


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(width, dtype=torch.bfloat16), nn.Linear(width, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x + self.linear(self.norm(x)), x.shape[-1:])


@pytest.mark.usefixtures("nothing_compiled", "empty_store")
def test_explain_shows_the_plans_that_a_model_runs() -> None:
    model, x = Model(64), torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    shown = onepass.explain(model)(x)
    assert isinstance(shown, ModelReport)
    torch.compile(model, backend=onepass.backend, options=EAGER)(x).sum().backward()
    ran = {record.region: record.artifact for record in journal.snapshot().regions}
    assert {row.id for row in shown.regions} <= ran.keys() and len(shown.regions) >= 2
    for row in shown.regions:
        artifact = ran[row.id]
        assert artifact is not None and schedules(row.plan) == schedules(artifact)
        assert str(row.holds) == "valid for these sizes only"


@pytest.mark.usefixtures("nothing_compiled", "empty_store")
def test_explain_shows_the_plan_of_a_large_backward() -> None:
    """RMSNorm backward of 98304 x 512 in a model, whose sizes are static."""
    with torch.device("meta"):
        model, x = Model(512), torch.empty(98304, 512, dtype=torch.bfloat16)
    shown = onepass.explain(model)(x)
    assert isinstance(shown, ModelReport)
    plans = Plans()
    found = [row for row in shown.regions if row.phase == "backward"]
    assert found
    for row in found:
        program = row.plan.program
        runs = Kernels(program, row.id).executable({}, CPU, frozenset(program.buffer)).artifact
        assert schedules(row.plan) == schedules(runs)
        assert schedules(plans.plan(program, variant_of(program, {}, H200))) == schedules(runs)


@pytest.mark.usefixtures("nothing_compiled", "empty_store")
def test_a_graph_with_symbolic_rows_is_claimed_by_the_plan_that_runs() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x * 2, (512,))

    run = torch.compile(step, backend=onepass.backend, dynamic=True, options=EAGER)
    with torch.no_grad():
        run(torch.randn(40, 512))
    [graph], [record] = journal.snapshot().graphs, journal.snapshot().regions
    [claimed] = graph.regions
    assert dict(claimed.plan.bindings) != dict(claimed.bindings), "planned for the class"
    assert dict(claimed.at_trace.bindings) == dict(claimed.bindings), "evaluated at the trace-time sizes"
    assert record.artifact is not None and schedules(claimed.plan) == schedules(record.artifact)
    assert record.artifact.summary.floor_bytes == claimed.plan.floor_bytes > claimed.floor_bytes


# ---- times of a plan at other sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms_norm_backward", "layer_norm_backward", "softmax", "cross_entropy"])
@pytest.mark.parametrize("rows", [16, 1000, 65536])
def test_predicted_times_at_other_sizes_match_planning_at_those_sizes(name: str, rows: int) -> None:
    chosen = workload(name)
    captured = capture(chosen.function, chosen.inputs((rows, 4096)))
    program = optimize(captured.program)
    variant = variant_of(program, {"s0": rows}, H200)
    made = make_plan(program, variant)
    assert at_sizes(made, dict(variant.sizes)) is made
    moved = at_sizes(made, {"s0": 3 * rows})
    assert moved.floor_bytes > made.floor_bytes and schedules(moved) == schedules(made)
    back = at_sizes(moved, dict(variant.sizes))
    assert [k.cost for k in back.kernels] == [k.cost for k in made.kernels]
    assert back.predicted_us == made.predicted_us <= moved.predicted_us


def test_predicted_times_of_split_sums_match_too() -> None:
    total = partial(torch.sum, dim=0)
    program = optimize(capture(lambda x: total(x.float()), (torch.empty(65536, 256, device="meta"),)).program)
    made = make_plan(program, variant_of(program, {"s0": 65536}, H200))
    assert len(made.kernels) == 2, "a sum of few columns is split and joined"
    assert at_sizes(at_sizes(made, {"s0": 40000}), made.bindings) == made
