"""Result files from an untrusted source: one coded error, or charts in the requested folder; never a traceback, an
escape sequence, or minutes of work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onepass import __main__ as cli
from onepass.errors import BadResults, BadSpec, OnepassError, TooManyCharts
from onepass.measure import bounded, plot
from onepass.measure.bench_tables import tables
from onepass.measure.charts import charts
from onepass.measure.compare import compare
from onepass.measure.results import Run, load, parse, to_json
from onepass.tools.tables import as_text
from tests.support.fake_bench import norms, row

Change = Callable[[dict[str, Any]], object]


def changed(change: Change) -> bytes:
    found = to_json(norms())
    change(found)
    return json.dumps(found).encode()


def first(found: dict[str, Any]) -> dict[str, Any]:
    return found["rows"][0]


REFUSED = {
    "nothing": (b"", "not JSON"),
    "a zero": (b"\0", "not JSON"),
    "not text": (b"\xff\xfe{}", "not JSON"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "not JSON"),
    "half of it": (changed(lambda j: None)[:500], "not JSON"),
    "deep lists": (b"[" * 100_000, "deep"),
    "deep objects": (b'{"a":' * 100_000, "deep"),
    "closed deep lists": (b"[" * 500 + b"]" * 500, "deep"),
    "digits": (b"[" + b"1" * 5000 + b"]", "5000 digits"),
    "a long text": (changed(lambda j: j.update(card="x" * 5000)), "5000 characters"),
    "a long name": (changed(lambda j: j.update({"x" * 5000: 1})), "5000 characters"),
    "too long": (b" " * (bounded.MAX_BYTES + 1), "longer than 8 MiB"),
    "many rows": (changed(lambda j: j.update(rows=[0] * 20_000)), "20000 items"),
    "many versions": (changed(lambda j: j["versions"].update({str(k): "1" for k in range(6000)})), "60.. items"),
    "many values": (b"[" + b",".join([b"[" + b"0," * 4000 + b"0]"] * 150) + b"]", "values"),
    "a NaN": (changed(lambda j: first(j).update(floor_us=float("nan"))), "is nan, expected a number"),
    "an infinity": (changed(lambda j: first(j).update(floor_us=float("inf"))), "too large"),
    "1e999": (changed(lambda j: first(j).update(floor_us=1234.5)).replace(b"1234.5", b"1e999"), "too large"),
    "a denormal": (changed(lambda j: first(j)["results"]["onepass"].update(us=5e-324)), "too small"),
    "a long number": (changed(lambda j: first(j).update(floor_us=10**39)), "too large"),
    "a long count": (changed(lambda j: first(j)["results"]["onepass"].update(runs=10**39)), "too large"),
    "no shape": (changed(lambda j: first(j).update(shape=[-1, 0])), "above 0"),
    "many dims": (changed(lambda j: first(j).update(shape=[1] * 17)), "at most 16"),
    "a huge size": (changed(lambda j: first(j).update(shape=[10**30, 1])), "too large"),
    "schema true": (changed(lambda j: j.update(schema=True)), "schema is True"),
    "schema 1.0": (changed(lambda j: j.update(schema=1.0)), "schema is 1.0"),
    "a date of another kind": (changed(lambda j: j.update(date=[5])), "a list, expected a text"),
    "an escape in a name": (changed(lambda j: j.update({"\x1b[2J": 1})), r"\\x1b\[2J"),
    "an escape in a provider": (changed(lambda j: first(j)["results"].update({"\x1b]0;x\x07": {"us": 1.0}})), r"\\x1b\]0;x\\x07"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_files_are_refused(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(BadResults, match=message) as caught:
        load(path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_files_that_are_not_plain_are_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/tty"), tmp_path, tmp_path / "loop", tmp_path / ("x" * 300)):
        with pytest.raises(BadResults):
            load(path)


def hostile(run: Run, text: str) -> Run:
    """The run with `text` in every free-text field."""
    found = to_json(run)
    found.update(suite=text, card=text, device=text, versions={"torch": text, text: text})
    for k, each in enumerate(found["rows"]):
        each.update(workload=text, dtype=text, id=f"{text}{k}")
        each["results"]["eager"] = {"us": None, "error": text or "none"}
    return parse(json.loads(json.dumps(found)))


TEXTS = [
    "\x1b[2J\x1b]0;pwned\x07",
    "\x9b31m",
    "[bold red]x[/]",
    "[/]",
    "[link=file:///etc/passwd]x[/link]",
    "\\",
    "\\[/]",
    ":skull:",
    "../../ESCAPED",
    "/tmp/ESCAPED",
    "a\0b",
    "a\nb",
    "\ud800",
    "\u202etxt.exe",
    "$\\frac{",
    "$x$ & <b>",
    "w" * 400,
    "",
    " ",
    '"><script>alert(1)</script>',
    "--",
    "%s{0}{x}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_in_a_file_is_not_interpreted(text: str, tmp_path: Path) -> None:
    run = hostile(norms(), text)
    shown = [as_text(*tables(run)), str(compare(run, norms())), str(compare(norms(), run, (text, text))), json.dumps(to_json(run))]
    for page in shown:
        assert all(c.isprintable() or c == "\n" for c in page)
    assert parse(to_json(run)) == run
    if text.startswith("["):
        assert text.strip("[]").split("]")[0] in shown[0]  # markup is shown literally


@pytest.mark.parametrize("text", ["../../ESCAPED", "/tmp/ESCAPED$\\frac{", '"><script>alert(1)</script>', ""])
def test_charts_stay_in_their_folder(text: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    rows = tuple(row("softmax", (8192, n), {"onepass": 1.1, "eager": 2.0}) for n in (1024, 2048, 4096))
    run = hostile(replace(norms(), rows=rows, regret=()), text)
    file, out = tmp_path / "r.json", tmp_path / "deep" / "out"
    file.write_text(json.dumps(to_json(run)))
    assert charts([run])
    (written, *_) = every = plot.plot([file], out, themes=("light",), formats=("svg",))
    assert all(p.resolve().parent == out.resolve() and p.is_file() for p in every) and len(set(every)) == len(every)
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {"r.json", *(p.name for p in every)}
    assert "<script>" not in written.read_text()


def test_names_with_the_same_file_name_get_different_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    names, widths = ("a/b", "a-b", "a b"), (1024, 2048, 4096)
    rows = tuple(replace(row(w, (8192, n), {"onepass": 1.1}), id=f"{w} {n}") for w in names for n in widths)
    file = tmp_path / "r.json"
    file.write_text(json.dumps(to_json(replace(norms(), rows=rows, regret=()))))
    written = plot.plot([file], tmp_path / "out", themes=("light",), formats=("svg",))
    assert len(set(written)) == len(charts([load(file)]))


def test_too_many_charts_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    rows = tuple(row("softmax", (8192, 1024 + k), {"onepass": 1.1}) for k in range(2000))
    file = tmp_path / "r.json"
    file.write_text(json.dumps(to_json(replace(norms(), rows=rows, regret=()))))
    with pytest.raises(TooManyCharts, match=r"ONEPASS-820.*74 charts; at most 64"):
        plot.plot([file], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sizes_that_cannot_be_fitted_are_left_out() -> None:
    rows = tuple(row("softmax", (m, 512), {"onepass": 1.1}) for m in (8192, 16384, 32768))
    assert "linear fit over row counts" in as_text(*tables(replace(norms(), rows=rows)))
    for other in (
        [replace(r, floor_us=0.0, floor_bytes=0) for r in rows],
        [replace(r, shape=(10**17 + k, 512), id=str(k)) for k, r in enumerate(rows)],
    ):
        as_text(*tables(replace(norms(), rows=tuple(other))))


@pytest.mark.parametrize("command", [["compare", "FILE", "FILE"], ["plot", "FILE", "--out", "OUT"]])
def test_the_commands_print_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "\x1b[2J.json"
    path.write_bytes(changed(lambda j: j.update({"\x1b[31m": 1})))
    given = [str(path) if word == "FILE" else str(tmp_path / "out") if word == "OUT" else word for word in command]
    shown = CliRunner().invoke(cli.app, given)
    assert isinstance(shown.exception, OnepassError)
    for error, code in ((shown.exception, "811"), (BadSpec(what="\x1b[2J", text="\x9b", detail="\x07"), "803")):
        monkeypatch.setattr(cli, "app", lambda error=error: (_ for _ in ()).throw(error))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert ended.value.code == 2 and not printed.out
        assert printed.err.startswith(f"onepass: [ONEPASS-{code}]") and printed.err.rstrip("\n").isprintable()
