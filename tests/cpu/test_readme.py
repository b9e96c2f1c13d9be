"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import onepass
from onepass.tools.check import check, in_float64

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def example() -> str:
    (block,) = blocks("python")
    return block


def test_the_example_runs_and_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    torch.manual_seed(0)
    exec(compile(example(), "README.md", "exec"), names)
    function = names["rms_norm_backward"]
    inputs = [names[n] for n in ("x", "w", "rstd", "dy")]
    for mine, eager, exact in zip((names["dx"], names["dw"]), function(*inputs), in_float64(function, inputs)):  # type: ignore
        assert check(mine, eager, exact).ok  # type: ignore[arg-type]
    assert "rms_norm_backward on NVIDIA H200 SXM" in capsys.readouterr().out


def test_the_example_is_short() -> None:
    assert len([line for line in example().splitlines() if line.strip()]) <= 20


def test_the_readme_names_the_commands_there_are() -> None:
    from onepass.__main__ import app

    commands = {c.callback.__name__ for c in app.registered_commands if c.callback}
    named = {word for block in blocks("bash") for word in re.findall(r"^onepass (\w+)", block, re.MULTILINE)}
    assert named and named <= commands
    assert all(d.upper() in README for d in onepass.DEVICES)
