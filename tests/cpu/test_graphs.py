"""Captured graphs survive being written and read back, on a machine without the card and the operators they came from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from scripts.capture_graphs import Job, capture
from tests.support.stored_graphs import FORM, dump, load, mode_of, packed, read, stored, target_of


def written(*nodes: dict[str, Any], **symbols: int) -> dict[str, Any]:
    return {"form": FORM, "symbols": symbols, "nodes": list(nodes)}


def tensor_form(shape: list[Any], stride: list[Any]) -> dict[str, Any]:
    return {"dtype": "bfloat16", "shape": shape, "stride": stride, "device": "cuda:0"}


@pytest.mark.parametrize(
    "job",
    [Job("masked_softmax_attention", "masked_softmax_attention", "cpu", "tiny"), Job("moe_router", "moe_router", "cpu", "tiny")],
    ids=lambda job: job.name,
)
def test_a_captured_model_round_trips(job: Job, tmp_path: Path) -> None:
    outcome = capture(job)
    assert outcome.error is None and outcome.breaks == 0
    assert outcome.files.keys() == {f"{job.name}_forward", f"{job.name}_backward"}
    for name, data in outcome.files.items():
        path = tmp_path / f"{name}.json.gz"
        path.write_bytes(data)
        graph = read(path)
        assert dump(load(graph))["nodes"] == graph["nodes"]
        assert any("softmax" in n["target"] or "sum" in n["target"] for n in graph["nodes"] if n["op"] == "call_function")


def test_symbolic_sizes_are_read_with_their_hints() -> None:
    form = tensor_form(["s77", "(s77//2)", 8], ["8*((s77//2))", 8, 1])
    graph = load(
        written(
            {"op": "placeholder", "name": "n", "target": "n", "val": {"symbolic": "s77"}},
            {"op": "placeholder", "name": "x", "target": "x", "val": form},
            s77=6,
        )
    )
    _, x = graph.nodes
    value = x.meta["val"]
    assert value.device == torch.device("cuda:0") and [int(s) for s in value.shape] == [6, 3, 8]
    assert all(isinstance(s, torch.SymInt) for s in value.shape[:2]) and mode_of(graph) is value.fake_mode


def test_an_operator_this_torch_lacks_can_be_read() -> None:
    graph = load(
        written(
            {"op": "placeholder", "name": "x", "target": "x", "val": tensor_form([4], [1])},
            {"op": "call_function", "name": "y", "target": "vendor.secret.default", "args": [{"node": "x"}]},
            {"op": "output", "name": "output", "args": [[{"node": "y"}]]},
        )
    )
    unknown = list(graph.nodes)[1].target
    assert callable(unknown) and unknown is target_of("vendor.secret.default")
    with pytest.raises(NotImplementedError, match=r"vendor\.secret\.default"):
        unknown()


def test_arguments_without_a_json_type_round_trip() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(
        torch.ops.aten.full.default,
        ([2, 3], -math.inf),
        {"dtype": torch.int64, "device": torch.device("cuda:1"), "layout": torch.strided},
    )
    graph.call_function(torch.ops.aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    graph.output((x, None))
    full, clone = list(load(json.loads(json.dumps(dump(graph)))).nodes)[1:3]
    assert full.args == ([2, 3], -math.inf) and full.kwargs["device"].index == 1 and full.kwargs["dtype"] is torch.int64
    assert clone.kwargs == {"memory_format": torch.contiguous_format} and clone.target is torch.ops.aten.clone.default


@pytest.mark.parametrize("name", [name for name, _ in stored()])
def test_every_stored_graph_can_be_read(name: str) -> None:
    graph = read(dict(stored())[name])
    assert packed(graph) and len(load(graph).nodes) == len(graph["nodes"])
