"""Reports on whole models and on the process, without a card and without running the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass import compat
from onepass.errors import ModelNotTraced, UnsupportedOp
from onepass.integration import failure, journal, region_op
from onepass.tools.model_report import ModelReport
from onepass.tools.rows import KernelRow
from onepass.tools.sources import write_sources
from onepass.tools.tables import places

ROWS, WIDTH, LAYERS = 16384, 1024, 3


class Layer(nn.Module):
    """A norm and a linear layer with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    """Equal layers, a softmax, and a cumulative sum, for which onepass has no kernel."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.scales = [torch.ones(width)]  # neither parameter nor buffer

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.softmax(x * self.scales[0] * scale, -1).cumsum(0)


@pytest.fixture(scope="module")
def shown() -> ModelReport:
    """The report on a model on the meta device."""
    with torch.device("meta"):
        model, x = Stack().bfloat16(), torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)
    found = onepass.explain(model)(x, scale=2.0)
    assert isinstance(found, ModelReport)
    return found


def test_forward_and_backward_of_a_meta_model(shown: ModelReport) -> None:
    assert shown.graphs == ("forward", "backward") and shown.model == "Stack"
    assert {r.phase for r in shown.regions} == {"forward", "backward"}
    for r in shown.regions:
        assert r.predicted_us + r.charged_us <= r.inductor_us and r.floor_bytes <= r.dram_bytes and r.kernels
        assert all("test_model_report.py:" in line for line in r.lines) and r.lines


def test_equal_regions_are_one_row(shown: ModelReport) -> None:
    assert all(
        len({r.id for r in rows}) == len(rows)
        for phase in ("forward", "backward")
        if (rows := [r for r in shown.regions if r.phase == phase])
    )
    everything: list[Any] = [*shown.regions, *shown.declined]
    assert max(r.count for r in everything) >= LAYERS - 1, "layers inside the stack are alike"
    *each, all_of_it = shown.totals
    assert all_of_it.regions == sum(r.count for r in shown.regions) == sum(t.regions for t in each)
    assert all_of_it.kernels == sum(r.count * len(r.kernels) for r in shown.regions)


def test_declined_regions_have_a_reason(shown: ModelReport) -> None:
    sums = [r for r in shown.declined if r.ops == ("aten.cumsum",)]
    assert {r.phase for r in sums} == {"forward", "backward"}
    assert all(r.reason == "onepass does not support aten.cumsum.default" and r.predicted_us is None for r in sums)
    assert all(r.reason for r in shown.declined)


def test_the_text_is_a_table_of_regions(shown: ModelReport) -> None:
    text = str(shown)
    first, *_ = text.splitlines()
    assert first.startswith("Stack on NVIDIA H200 SXM: ") and "in 2 graphs" in first
    assert "every plan is valid for these sizes only" in text
    for title in ("claimed", "regions", "lines of code", "left to Inductor"):
        assert f"\n{title}" in text
    assert "return x + self.linear(self.norm(x))" in text
    assert "cumsum      test_model_report.py:" in text and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 118


def test_json_has_exactly_the_promised_keys(shown: ModelReport) -> None:
    found = shown.to_json()
    assert list(found) == ["model", "device", "graphs", "regions", "left", "recomputed", "totals"]
    assert set(found["regions"][0]) == {
        "id",
        "phase",
        "count",
        "lines",
        "name",
        "reductions",
        "kernels",
        "refusals",
        "rejected",
        "floor_bytes",
        "dram_bytes",
        "floor_us",
        "predicted_us",
        "left_us",
        "charged_us",
        "in_place",
        "holds",
    }
    assert list(found["regions"][0]["kernels"][0]) == ["name", "family", "loads", "stores", "dram_bytes", "predicted_us", "ops"]
    assert set(found["left"][0]) == {"phase", "count", "ops", "lines", "reason", "id", "predicted_us", "left_us"}
    assert list(found["totals"]) == ["forward", "backward", "all"]
    assert json.loads(json.dumps(found)) == found


def test_the_model_is_neither_changed_nor_run() -> None:
    model, x = Stack(64), torch.randn(4096, 64, requires_grad=True)
    before = dict(model.named_parameters())
    seen = journal.snapshot()
    onepass.explain(model)(x)
    assert all(p is before[name] and not compat.is_fake(p) and p.grad is None for name, p in model.named_parameters())
    assert x.grad is None and journal.snapshot() == seen


def test_compiled_models_and_functions_are_explained_too() -> None:
    model, x = Layer(256), torch.randn(32768, 256)
    plain, wrapped = onepass.explain(model)(x), onepass.explain(torch.compile(model, backend=onepass.backend))(x)
    assert plain == wrapped
    function = torch.compile(lambda t: torch.softmax(t @ t, -1))
    with torch.no_grad():
        assert onepass.explain(function)(torch.empty(4096, 4096, device="meta")).graphs == ("inference",)  # type: ignore[union-attr]


def test_explaining_often_does_not_use_up_recompilations() -> None:
    model = Layer(64)
    for rows in range(64, 80):
        assert onepass.explain(model)(torch.randn(rows, 64)).graphs == ("forward", "backward")  # type: ignore[union-attr]


def test_fake_tensors_keep_their_mode() -> None:
    with compat.fake_mode():
        model, x = Layer(1024), torch.empty(ROWS, 1024)
    assert onepass.explain(model)(x).graphs == ("forward", "backward")  # type: ignore[union-attr]


def test_a_function_that_cannot_be_fused_says_what_to_explain() -> None:
    with pytest.raises(UnsupportedOp) as raised:
        onepass.explain(lambda x: torch.softmax(x @ x, -1))(torch.empty(64, 64, device="meta"))
    assert "torch.compile(f)" in raised.value.__notes__[0]


class ByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1) if x.sum() > 0 else x


def test_data_dependent_models_are_refused_with_advice() -> None:
    with pytest.raises(ModelNotTraced, match=r"ByValue could not be traced.*onepass\.report\(\)"):
        onepass.explain(ByValue())(torch.randn(4, 4))
    with pytest.raises(ModelNotTraced, match="normalized_shape"):
        onepass.explain(Layer(64))(torch.randn(4, 5))


def test_compiling_fills_in_registers(tmp_path: Path) -> None:
    with torch.device("meta"), torch.no_grad():
        found = onepass.explain(nn.Softmax(-1), compile=True)(torch.empty(32768, 1000, dtype=torch.bfloat16))
    assert isinstance(found, ModelReport)
    (region,) = found.regions
    assert all((k.registers or 0) >= 16 and k.spill_bytes == 0 and k.ctas_per_sm for k in region.kernels)
    assert "regs" in str(found) and "registers" in found.to_json()["regions"][0]["kernels"][0]
    index = write_sources(found, tmp_path / "kernels")
    page = index.read_text()
    for kernel in region.kernels:
        file = f"{region.id}_{kernel.name}.py"
        assert f"({file})" in page and f"def {kernel.name}(" in (index.parent / file).read_text()


def test_source_lines_are_abbreviated() -> None:
    assert places(()) == "unknown" and places(("a.py:1 x", "a.py:1 y")) == "a.py:1"
    assert places([f"a.py:{n} x" for n in range(5)]) == "a.py:0, a.py:1, a.py:2 and 2 more"


# ---- this process ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    region_op.forget()
    journal.reset()
    failure.reset_warnings()
    yield
    journal.reset()


OPTIONS: dict[str, Any] = {"interpret": True, "rest": "eager", "by_cost": False}


def test_the_process_report_counts_calls(fresh: None) -> None:
    model, x = Layer(16), torch.randn(6, 16)
    run = torch.compile(model, backend=onepass.backend, options=OPTIONS)
    for _ in range(3):
        run(x).sum().backward()
    found = onepass.report()
    assert [g.phase for g in found.graphs] == ["forward", "backward"] and not found.fallbacks
    assert all((r.calls, r.claimed, r.runs_as) == (3, 1, "onepass") for r in found.called)
    assert found.calls == 3 * len(found.called) and all(isinstance(k, KernelRow) for r in found.called for k in r.kernels)
    text = str(found)
    assert text.startswith(f"onepass in this process: 2 graphs, {found.calls} region calls, 0 fallbacks")
    assert "test_model_report.py:" in text and max(map(len, text.splitlines())) <= 118
    format_lines = found.to_json()
    assert list(format_lines) == [
        "graphs",
        "regions",
        "left",
        "fallbacks",
        "fallbacks_by_code",
        "totals",
        "calls",
        "work",
        "recomputed",
    ]
    assert json.loads(json.dumps(format_lines)) == format_lines


def test_the_process_report_shows_fallbacks_by_code(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONEPASS_REPRO_DIR", str(tmp_path))

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("nothing works")

    monkeypatch.setattr("onepass.integration.region_op.Kernels", broken)
    monkeypatch.setattr("onepass.integration.region_op.MAX_INDUCTOR_FALLBACKS", 0)
    with pytest.warns(UserWarning, match="ONEPASS-701"), torch.no_grad():
        torch.compile(nn.Softmax(-1), backend=onepass.backend, options=OPTIONS)(torch.randn(4, 16))
    found = onepass.report()
    assert found.fallbacks_by_code == {"ONEPASS-900": 1} and [r.runs_as for r in found.called] == ["torch, op by op"]
    assert "nothing works" in str(found) and "repro_" in found.to_json()["fallbacks"][0]["repro"]


def test_the_report_of_an_idle_process(fresh: None) -> None:
    assert str(onepass.report()).startswith("onepass in this process: 0 graphs, 0 region calls, 0 fallbacks")
