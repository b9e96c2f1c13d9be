"""The README shows what really happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import onepass
from onepass.integration.settings import NAMES
from onepass.tools.check import check, in_float64

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FUSE = (ROOT / "docs/fuse.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def example() -> str:
    """The function that docs/fuse.md fuses and explains."""
    (block,) = blocks("python", FUSE)
    return block


def test_the_example_runs_and_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    torch.manual_seed(0)
    exec(compile(example(), "README.md", "exec"), names)
    function = names["rms_norm_backward"]
    inputs = [names[n] for n in ("x", "w", "rstd", "dy")]
    for actual, eager, exact in zip((names["dx"], names["dw"]), function(*inputs), in_float64(function, inputs)):  # type: ignore
        assert check(actual, eager, exact).ok  # type: ignore[arg-type]
    assert "rms_norm_backward on NVIDIA H200 SXM" in capsys.readouterr().out


def test_the_model_is_explained_compiled_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python")
    on_a_cpu = block.replace('backend="onepass"', 'backend=onepass.backend, options={"interpret": True, "rest": "eager"}')
    assert on_a_cpu != block
    exec(compile(on_a_cpu, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Sequential on NVIDIA H200 SXM" in printed and "onepass in this process" in printed


def test_every_setting_of_the_backend_is_documented() -> None:
    settings = (ROOT / "docs/settings.md").read_text()
    assert not [name for name in NAMES if f"| `{name}` |" not in settings]


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 900


def test_the_example_is_short() -> None:
    assert len([line for line in example().splitlines() if line.strip()]) <= 20


def test_the_readme_names_existing_commands() -> None:
    from onepass.__main__ import app

    commands = {c.callback.__name__ for c in app.registered_commands if c.callback}
    named = {
        word for block in (*blocks("bash"), *blocks("bash", FUSE)) for word in re.findall(r"^onepass (\w+)", block, re.MULTILINE)
    }
    assert named and named <= commands
    assert all(" ".join(d.title.split()[1:]).removeprefix("GeForce ").split(" SXM")[0] in README for d in onepass.DEVICES.values())
