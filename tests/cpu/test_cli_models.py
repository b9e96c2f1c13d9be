"""Models on the command line."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import onepass
from onepass.__main__ import app
from onepass.errors import BadSpec
from onepass.tools import spec

MODELS = """
import torch
from torch import nn
from neighbour import WIDTH


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, scale=1.0):
        return doubled(self.norm(x * scale)) / 2


def doubled(x):  # Dynamo looks such a function up in the module it is from, which it imports by name
    return torch.add(x, x)


def data():
    return torch.empty(32768, WIDTH, device="meta")


def alone():
    with torch.device("meta"):
        return Norm()


def pair():
    return alone(), data()


def named():
    return alone(), {"x": data()}


def triple(rows=32768):
    return alone(), (data(),), {"scale": 2.0}


def number():
    return 3


def inputs():
    return data()


def keywords():
    return {"x": data(), "scale": 3.0}


def total(x):
    return x.sum(-1)


model = alone()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 512\n")
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path / "models.py"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_name_in_a_file_is_resolved_to_a_model_or_function(file: Path) -> None:
    def found(name: str, inputs: str | None = None) -> spec.Subject:
        return spec.resolve(f"{file}:{name}", None, "bf16", inputs)

    for name in ("alone", "pair", "model", "Norm"):
        subject = found(name)
        assert type(subject.call).__name__ == "Norm" and [tuple(t.shape) for t in subject.args] == [(32768, 512)]
    assert list(found("named").kwargs) == ["x"] and found("named").args == ()
    assert found("triple").kwargs == {"scale": 2.0} and len(found("triple").args) == 1
    assert found("alone", f"{file}:keywords").kwargs["scale"] == 3.0
    assert found("pair", "f32[8,512]").args[0].shape == (8, 512), "--inputs is stronger than what came with the model"
    assert found("total").call.__name__ == "total"
    with pytest.raises(BadSpec, match="must return a module"):
        found("number")
    with pytest.raises(BadSpec, match="must return tensors"):
        found("total", f"{file}:keywords")


def test_explain_a_model(file: Path) -> None:
    found = json.loads(run("explain", f"{file}:triple", "--json", "--device", "h100"))
    assert found["model"] == "Norm" and found["device"] == "h100" and found["graphs"] == ["forward", "backward"]
    assert {r["phase"] for r in (*found["regions"], *found["left"])} == {"forward", "backward"}
    assert "Norm on NVIDIA H200 SXM" in run("explain", f"{file}:pair")


def test_kernels_go_to_a_folder_with_an_index(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    found = json.loads(run("explain", f"{file}:pair", "--json", "--source-dir", str(folder)).partition("\nkernels: ")[0])
    page = (folder / "index.md").read_text()
    for region in found["regions"]:
        assert f"## {region['id']}: {region['name']}" in page and region["lines"][0] in page
        assert all((folder / f"{region['id']}_{k['name']}.py").is_file() for k in region["kernels"])
    run("explain", "rms_norm", "--shape", "4096x1024", "--source-dir", str(tmp_path / "one"))
    assert "| [rms_norm_inner](rms_norm_inner.py) |" in (tmp_path / "one" / "index.md").read_text()
    with pytest.raises(BadSpec, match="folder"):
        run("explain", f"{file}:pair", "--source-dir", str(file))


def test_sources_of_a_model_are_printed(file: Path) -> None:
    text = run("explain", f"{file}:pair", "--source")
    assert "# ----------" in text and "@triton.jit" in text


def test_the_entry_point_names_the_backend() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["onepass"].partition(":")
    assert getattr(importlib.import_module(module), name) is onepass.backend
