"""A sample of the campaign of random graphs, and its components."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.campaign import graphs
from tests.campaign.checks import STAGES, Stage, check, checked
from tests.campaign.draw import graph
from tests.campaign.graph import Graph, Input, Step, make_inputs
from tests.campaign.shrink import shrunk

# Fixed seeds: a defect found by the full campaign becomes a separate test.
SAMPLES = [
    ("oracle", 25, 24),
    ("pairs", 25, 4),
    ("pair kernels", 6, 4),
    ("interpret", 6, 10),
    ("schedules", 6, 8),
    ("families", 4, 6),
    ("one way", 4, 4),
    ("other sizes", 10, 4),
    ("integers", 6, 5),
    ("compile", 2, 10),
]


def sampled() -> list[Any]:
    """Small batches, so that they spread over test processes."""
    return [pytest.param(stage, 10**6 + 100 * k, size, id=f"{stage}-{k}") for stage, size, many in SAMPLES for k in range(many)]


@pytest.mark.parametrize("stage,first,size", sampled())
def test_a_sample_of_seeds_finds_no_defect(stage: str, first: int, size: int) -> None:
    for seed in range(first, first + size):
        drawn = STAGES[stage].draw(seed)
        found = check(drawn, stage)
        assert not found.is_bad or found.kind == "slow", f"{found}\n{drawn.inputs}\n{drawn.source()}"


def test_every_stage_is_a_choice_of_the_command() -> None:
    assert set(graphs.NAMES) == set(STAGES)


def softmax_of_a_sum() -> Graph:
    steps = (
        Step("add", "torch.add({0}, {1})", (0, 1)),
        Step("exp", "torch.exp({0})", (2,)),
        Step("softmax", "F.softmax({0}, -1)", (2,)),
    )
    return Graph(1, (Input((6, 40), "bf16"), Input((6, 40), "f32", "transposed", "special")), steps, (4, 3))


def test_a_graph_is_the_same_after_being_stored() -> None:
    for seed in range(20):
        assert Graph.of_json(json.loads(json.dumps(graph(seed).to_json()))) == graph(seed) == graph(seed)


def test_inputs_are_the_same_each_time_and_share_no_memory() -> None:
    spec = softmax_of_a_sum()
    for one, other in zip(make_inputs(spec), make_inputs(spec), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()) and one.data_ptr() != other.data_ptr()


def stage_with(change: object) -> Stage:
    """A stage whose results are eager's results with a change."""
    return Stage(lambda g, inputs: (change(g.function()(*inputs)), ""))  # type: ignore[operator]


@pytest.mark.parametrize(
    "change,kind",
    [
        (lambda r: r, "right"),
        (lambda r: (r[0] + 1e-2, r[1]), "wrong"),
        (lambda r: (torch.where(r[0] == r[0].nan_to_num().amax(), torch.inf, r[0]), r[1]), "wrong"),
        (lambda r: (r[0].double(), r[1]), "form"),
        (lambda r: (r[0].t().contiguous().t(), r[1]), "form"),
        (lambda r: r[:1], "form"),
        (lambda r: 1 / 0, "uncoded"),
    ],
    ids=["right", "off", "infinity", "dtype", "strides", "count", "error"],
)
def test_wrong_results_are_detected(change: object, kind: str) -> None:
    assert checked(softmax_of_a_sum(), stage_with(change)).kind == kind


def test_the_strides_of_the_traced_result_are_accepted() -> None:
    """For a vector and a transposed matrix, eager's logaddexp has the matrix's layout, and torch's decomposition a new one."""
    inputs = (Input((2, 2), layout="reversed dims"), Input((1,)))
    assert check(Graph(1, inputs, (Step("logaddexp", "torch.logaddexp({1}, {0})", (0, 1)),), (2,)), "oracle").kind == "right"
    added = Graph(1, inputs, (Step("add", "torch.add({1}, {0})", (0, 1)),), (2,))
    assert checked(added, stage_with(lambda r: (r[0].contiguous(),))).kind == "form"


def test_either_result_is_accepted_where_a_rounding_decides() -> None:
    decides = Graph(1, (Input((40,), "bf16", content="constant"),), (Step("gt", "{0} * 0.1 > 0.15", (0,)),), (1,))
    assert checked(decides, stage_with(lambda r: (~r[0],))).kind in ("right", "noise")
    sure = replace(decides, steps=(Step("gt", "{0} * 0.1 > 0.05", (0,)),))
    assert checked(sure, stage_with(lambda r: (~r[0],))).kind == "wrong"


def test_a_failure_is_shrunk_to_its_cause() -> None:
    large = graph(41)
    culprit = Step("floor", "torch.floor({0})", (0,))
    base = len(large.inputs)
    grown = replace(large, steps=(*large.steps, culprit), outputs=(*large.outputs, base + len(large.steps)))
    small = shrunk(grown, lambda g: any(s.op == "floor" for s in g.steps))
    assert [s.op for s in small.steps] == ["floor"] and len(small.inputs) == len(small.outputs) == 1


def test_a_log_is_resumed_and_summarized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    lines = [graphs.check_seed("oracle", seed) for seed in range(3)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"seed": 3, "ki')
    assert [line["seed"] for line in graphs.read(log)] == [0, 1, 2]
    counts = graphs.summary(graphs.read(log))
    assert counts["graphs"] == 3 and sum(counts["kinds"].values()) == 3 and any("3 graphs" in line for line in graphs.show(counts))


def test_a_process_that_ends_early_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding names the seed; later seeds go to another process."""
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        """
import json, sys
for seed in json.load(sys.stdin):
    if seed == 7:
        sys.exit("the stack overflowed")
    print(json.dumps({"seed": seed, "kind": "right", "where": "", "detail": "", "ops": [], "dtypes": []}), flush=True)
"""
    )
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    counts = graphs.run("oracle", range(4, 10), tmp_path / "log.jsonl", 1)
    assert counts["kinds"] == {"right": 5, "crash": 1}
    assert [line["seed"] for line in graphs.read(tmp_path / "log.jsonl")] == [4, 5, 6, 7, 8, 9]
    assert "the stack overflowed" in counts["defects"]["crash 1"]["detail"]


def test_every_stage_returns_a_finding() -> None:
    plain = Graph(1, (Input((5, 8)),), (Step("sum", "{0}.sum(-1)", (0,)),), (1,))
    assert {check(plain, stage).kind for stage in STAGES if STAGES[stage].device == "cpu"} == {"right"}
