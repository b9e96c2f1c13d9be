"""Reproducers: text of a program or an error never becomes code, the file lies where only this user can write, and a
failure to write it fails nothing else."""

from __future__ import annotations

import ast
import errno
import os
import platform
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from onepass import files
from onepass.capture.function.trace import capture
from onepass.errors import NoReproducer, OnepassWarning
from onepass.integration import engine, failure, journal, region_op, repro
from onepass.integration.settings import Settings
from onepass.ir.text import show
from onepass.runtime.keep_sources import keep_sources
from tests.support.artifacts import artifact_of
from tests.support.fixture_types import Anothers
from tests.support.region_calls import assert_filled, inputs, outputs, region

# fmt: off
BREAKOUTS = ['""" ; boom() ; r"""', "''' ; boom() ; '''", "\nboom()\n", "\rboom()\r", "\x0cboom()", "\\", "\\\nboom()", "{boom()}",
             "{0!r}", "\ud800boom()", "\u2028boom()\u2028", "\x85boom()", "é", "\x1b[2J", "# coding: utf-7", "\0boom()"]
# fmt: on


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONEPASS_REPRO_DIR", str(tmp_path / "repros"))
    repro._temporary_folder.cache_clear()
    region_op.forget()
    journal.reset()
    failure.reset_warnings()


def program() -> Any:
    return capture(lambda x: x.sum(-1), (torch.randn(3, 4),), dynamic=False).program


def calls(text: str) -> set[str]:
    return {ast.unparse(n.func) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)}


@pytest.mark.parametrize("text", BREAKOUTS)
def test_error_text_is_not_code(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = show(program()).replace("\n", f"  # {text}\n", 1)
    monkeypatch.setattr(repro, "show", lambda program: shown)
    monkeypatch.setattr(platform, "platform", lambda: text)
    layout = repro.Layout(text, (text,), ((text, text),))
    content = Path(repro.write_region("abc", text, program(), {text: 3}, layout)).read_text(encoding="ascii")
    assert calls(content) == {"replay"}
    assigned = next(n for n in ast.parse(content).body if isinstance(n, ast.Assign))
    assert ast.literal_eval(assigned.value) == shown  # no character is lost
    replayed = next(n for n in ast.walk(ast.parse(content)) if isinstance(n, ast.Call))
    given = {k.arg: ast.literal_eval(k.value) for k in replayed.keywords}
    assert (given["device"], given["unaligned"], given["sizes"]) == (text, (text,), {text: 3})


@pytest.mark.parametrize("text", BREAKOUTS)
def test_text_about_a_graph_is_not_code(text: str) -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    content = Path(repro.write_graph(graph, text, text, "abc", Settings(skip=(text,)))).read_text(encoding="ascii")
    assert calls(content) == {"Graph", "replay_graph"}


@pytest.mark.parametrize("region", ["../../up", "/etc/x", "a\0b", "\ud800", "x" * 300, "", "a\nb"])
def test_the_name_of_a_region_is_not_a_path(region: str, tmp_path: Path) -> None:
    where = Path(repro.write_region(region, "what", program(), {}, repro.Layout("cpu")))
    assert where.parent == tmp_path / "repros" and where.is_file()


def test_a_reproducer_runs(capsys: pytest.CaptureFixture[str]) -> None:
    where = repro.write_region("abc", "boom", program(), {}, repro.Layout("cpu"))
    exec(compile(Path(where).read_text(), where, "exec"), {"__name__": "it"})
    assert "region abc is correct" in capsys.readouterr().out


# ---- location --------------------------------------------------------------------------------------------------------------


def test_a_reproducer_is_private_and_follows_no_link(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "repros"
    victim.write_text("precious")
    folder.mkdir(mode=0o700)
    (folder / "repro_abc.py").symlink_to(victim)
    where = Path(repro.write_region("abc", "boom", program(), {}, repro.Layout("cpu")))
    assert victim.read_text() == "precious" and not where.is_symlink() and where.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("how", ["open to others", "another user's", "a link"])
def test_no_reproducer_is_written_to_an_unsafe_folder(how: str, tmp_path: Path, anothers: Anothers) -> None:
    folder = tmp_path / "repros"
    (tmp_path / "elsewhere").mkdir()
    if how == "a link":
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777) if how == "open to others" else anothers(folder)
    result = repro.write_region("abc", "boom", program(), {}, repro.Layout("cpu"))
    assert NoReproducer.code in result and not list((tmp_path / "elsewhere").iterdir()) and not list(folder.iterdir())


@pytest.mark.parametrize("planted", [False, True])
def test_by_default_reproducers_go_to_the_working_directory_or_a_fresh_folder(
    planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never to a predictable name in the temporary folder."""
    monkeypatch.delenv("ONEPASS_REPRO_DIR")
    here, shared = tmp_path / "here", tmp_path / "tmp"
    for folder in (here, shared):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    where = Path(repro._write("repro_abc.py", "1"))
    assert where.resolve() == here / "onepass_repros" / "repro_abc.py"
    here.chmod(0o777)
    shared.chmod(0o1777)
    if planted:
        (shared / "onepass_repros").mkdir()
        (shared / "onepass_repros").chmod(0o777)
    first, second = (Path(repro._write(f"repro_{k}.py", "1")) for k in range(2))
    assert first.parent == second.parent and first.parent.parent == shared and first.parent.name != "onepass_repros"
    assert first.parent.stat().st_mode & 0o777 == 0o700
    shared.chmod(0o777)
    assert NoReproducer.code in repro._write("repro_abc.py", "1")


# ---- reporting that fails --------------------------------------------------------------------------------------------------


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("str fails")


ERRORS = [
    RuntimeError("caf\udce9 \ud800"),
    RuntimeError(""),
    RuntimeError("\x1b[2J\n\n"),
    Silent(),
    Silent,
    UnicodeDecodeError("utf-8", b"x", 0, 1, "r"),
    OSError(errno.ENOSPC, "full"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_that_cannot_be_printed_does_not_fail_the_call(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(engine.Kernels, "executable", failing)
    monkeypatch.setattr(region_op, "MAX_INDUCTOR_FALLBACKS", 0)
    ins, outs = inputs(4), outputs(4)
    with pytest.warns(OnepassWarning, match="ONEPASS-701") as caught:
        region_op.run(outs, ins, [4], region("a"))
    assert_filled(outs, ins)
    assert [str(w.message).isprintable() for w in caught if w.category is OnepassWarning] == [True]
    assert Path(journal.snapshot().fallbacks[0].repro).is_file() and "ONEPASS" in str(onepass.report())


@pytest.mark.parametrize("what", ["show", "ascii", "knobs", "warnings", "layout_of", "versions"])
def test_a_report_that_fails_does_not_fail_the_call(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range")

    monkeypatch.setattr(engine.Kernels, "executable", failing)
    monkeypatch.setattr(region_op, "MAX_INDUCTOR_FALLBACKS", 0)
    ins, outs = inputs(4), outputs(4)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        if what == "warnings":
            monkeypatch.setattr(warnings, "showwarning", failing)
        else:
            monkeypatch.setattr(repro, what, failing, raising=False)
        region_op.run(outs, ins, [4], region("a"))
    assert_filled(outs, ins)
    assert sum(journal.snapshot().fallbacks_by_code.values()) == 1


def test_a_stream_that_cannot_encode_a_warning_does_not_fail_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine.Kernels, "executable", lambda *_: (_ for _ in ()).throw(RuntimeError("é")))
    monkeypatch.setattr(region_op, "MAX_INDUCTOR_FALLBACKS", 0)
    ins, outs = inputs(4), outputs(4)
    with (tmp_path / "err").open("w", encoding="ascii") as stream, warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda m, *_, **__: stream.write(str(m)))
        monkeypatch.setattr(sys, "stderr", stream)
        region_op.run(outs, ins, [4], region("a"))
    assert_filled(outs, ins)


# ---- kept sources ----------------------------------------------------------------------------------------------------------


def test_sources_that_cannot_be_written_cause_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = artifact_of("softmax-last").sources
    x = torch.randn(4, 16)
    for folder in ("/proc/nowhere", str(tmp_path / ("x" * 300))):
        monkeypatch.setenv("ONEPASS_KEEP_SOURCES", folder)
        with pytest.warns(OnepassWarning, match="ONEPASS-503") as caught:
            assert keep_sources(sources) is sources and keep_sources(sources) is sources
            torch.testing.assert_close(onepass.fuse(lambda x: x.softmax(-1))(x), x.softmax(-1))
        assert len([w for w in caught if w.category is OnepassWarning]) == 1


def test_kept_sources_stay_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source, *_) = artifact_of("softmax-last").sources
    monkeypatch.setenv("ONEPASS_KEEP_SOURCES", str(tmp_path / "here"))
    keep_sources((replace(source, name="../up"), replace(source, name=str(tmp_path / "elsewhere"))))
    assert len(os.listdir(tmp_path / "here")) == 2 and os.listdir(tmp_path) == ["here"]


def test_kept_sources_follow_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source, *_) = artifact_of("softmax-last").sources
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"{source.name}.py").symlink_to(victim)
    monkeypatch.setenv("ONEPASS_KEEP_SOURCES", str(tmp_path))
    keep_sources((source,))
    assert victim.read_text() == "precious" and (tmp_path / f"{source.name}.py").read_text() == source.text
    assert files.slug(source.name) == source.name and os.listdir(tmp_path)
