"""The campaign over torch's own samples: the capture table determines which ops it covers, and wrong results are detected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from onepass.capture.lowering.lower import LOWERINGS
from tests.campaign import opinfo
from tests.campaign.checks import Finding
from tests.campaign.opinfo_entries import REFUSED, database, is_captured, title


def info(name: str) -> Any:
    return next(each for each in database() if title(each) == name)


def test_every_op_of_the_capture_table_is_covered() -> None:
    """Every op that torch describes under the name of a row. Decompositions are tested below by examples."""
    rows = {name.split(".")[1] for name in LOWERINGS if name.startswith("aten.")}
    named = [each for each in database() if {each.name, each.aten_name} & rows]
    assert len(named) > 120 and [title(each) for each in named if not is_captured(each)] == []


@pytest.mark.parametrize(
    "name",
    [
        "nn.functional.cross_entropy",
        "nn.functional.instance_norm",
        "masked.logsumexp",
        "nanmean",
        "nn.functional.prelu",
        "special.entr",
        "nn.functional.hardswish",
        "contiguous",
        "native_layer_norm",
    ],
)
def test_ops_that_decompose_into_the_capture_table_are_covered(name: str) -> None:
    assert is_captured(info(name))


@pytest.mark.parametrize(
    "name,row",
    [
        ("erfinv", "erfinv.default"),
        ("cumsum", "cumsum.default"),
        ("sort", "sort.stable"),
        ("nn.functional.conv2d", "convolution.default"),
        ("scatter_add", "scatter_add.default"),
    ],
)
def test_an_op_added_to_the_capture_table_is_covered(name: str, row: str) -> None:
    assert not is_captured(info(name)) and is_captured(info(name), {**LOWERINGS, f"aten.{row}": None})


def test_an_op_removed_from_the_capture_table_is_not_covered() -> None:
    assert not is_captured(info("softmax"), {name: row for name, row in LOWERINGS.items() if name != "aten.exp.default"})


def test_ops_that_must_be_refused_exist() -> None:
    assert {each.name for each in database()} >= REFUSED


def findings(name: str, dtype: torch.dtype = torch.float32, most: int = 6) -> list[str]:
    op = info(name)
    return [opinfo.check_sample(op, dtype, sample, k).kind for k, sample in enumerate(list(opinfo.samples(op, dtype))[:most])]


@pytest.mark.parametrize("name", ["gather", "tensor_split", "masked.sum", "var_mean", "nn.functional.nll_loss", "scatter_add"])
def test_samples_are_right_or_refused(name: str) -> None:
    kinds = findings(name)
    assert kinds and {*kinds} <= ({"refused"} if name in REFUSED else {"right", "refused"})


@pytest.mark.parametrize(
    "answer,kind",
    [
        (lambda f: lambda *a: tuple(r * 1.001 for r in f(*a)), "wrong"),
        (lambda f: lambda *a: tuple(r.double() for r in f(*a)), "form"),
        (lambda f: lambda *a: dict[str, int]()["none"], "uncoded"),
    ],
    ids=["off", "dtype", "error"],
)
def test_wrong_results_are_detected(answer: Callable[..., Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onepass, "fuse", answer)
    assert kind in findings("sum")


def test_samples_of_other_types_are_evenly_spaced() -> None:
    assert opinfo.drawn(450, torch.float32, 0, False) == list(range(450)) == opinfo.drawn(450, torch.int8, 3, True)
    each = [opinfo.drawn(40, dtype, shift, False) for shift, dtype in enumerate(opinfo.OTHERS)]
    assert each[0] == [0, 10, 20, 30] and len({k for drawn in each for k in drawn}) == 4 * len(opinfo.OTHERS)
    assert opinfo.drawn(3, torch.int8, 5, False) == [0, 1, 2]


def test_a_log_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types of which only some samples ran are run again with --all."""
    log, ran = tmp_path / "log.jsonl", list[tuple[str, bool]]()
    monkeypatch.setattr(opinfo, "entries", lambda: [info("sum"), info("neg")])
    line = opinfo._line
    monkeypatch.setattr(opinfo, "check_sample", lambda op, dtype, sample, k: Finding(k, "right"))
    monkeypatch.setattr(opinfo, "_line", lambda op, dtype, *how: ran.append((title(op), how[-1])) or line(op, dtype, *how))
    opinfo.run(log)
    first = [json.loads(text) for text in log.read_text().splitlines()]
    assert len(first) == len(ran) == 2 * (1 + len(opinfo.OTHERS)) and {each["whole"] for each in first} == {True, False}
    opinfo.run(log)
    assert len(ran) == len(first)
    opinfo.run(log, everything=True)
    assert len(ran) == len(first) + sum(not each["whole"] for each in first)
