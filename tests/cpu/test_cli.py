"""The report, the command line, the settings, and what importing onepass costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import onepass
from onepass.__main__ import app, main
from onepass.codegen.source import Source
from onepass.device import DEVICES
from onepass.errors import BadArgument, BadSpec, OnepassError
from onepass.knobs import describe, knobs
from onepass.plan.legality import Reason, Refusal
from onepass.plan.schedule import MixOrder
from onepass.plan.variant import Validity
from onepass.runtime.compiled import Rejected
from onepass.tools import spec, tables
from onepass.tools.doctor import table
from onepass.tools.explain import Report, as_text, human_bytes, report
from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
KERNEL = SimpleNamespace(
    name="rms_norm_backward_rows",
    family="mix-order",
    dram_bytes=403_000_000,
    predicted_us=95.25,
    loads=("x bf16 once", "dy bf16 once"),
    stores=("dx bf16",),
    schedule=SimpleNamespace(warps=8),
    ops=("mul", "mean"),
)
JOIN = SimpleNamespace(
    name="rms_norm_backward_join",
    family="outer",
    dram_bytes=16_384,
    predicted_us=3.5,
    loads=("partial dw f32 once",),
    stores=("dw bf16",),
    schedule=SimpleNamespace(warps=8),
    ops=("sum",),
)
REFUSALS = (
    Refusal(Reason.SLOWER, ("dx", "dw"), "[dw] would leave one CTA an SM", 120.0, 99.5),
    Refusal(Reason.AXES, ("dx", "db"), "", None, 50.0),
)


def compiled() -> Any:
    """A stand-in for the compiled function that a report is made from."""
    plan = SimpleNamespace(
        program=SimpleNamespace(name="rms_norm_backward"),
        device=DEVICES["h200"],
        floor_bytes=402_700_000,
        floor_us=89.5,
        predicted_us=98.75,
        kernels=(KERNEL, JOIN),
        refusals=REFUSALS,
    )
    sources = tuple(Source(k.name, f"# text of {k.name}\n", (), (), warps=8) for k in plan.kernels)
    binaries = tuple(SimpleNamespace(registers=r, spill_bytes=0, smem_bytes=s) for r, s in ((127, 64), (32, 0)))
    rejected = (
        Rejected(KERNEL.name, MixOrder(4, 1, (4096, 1024), 8), 255, 312),
        Rejected(KERNEL.name, MixOrder(8, 1, (4096, 1024), 8), 148, 0),
    )
    return SimpleNamespace(plan=plan, sources=sources, binaries=binaries, rejected=rejected)


def reported(made: Any = None) -> Report:
    made = made or compiled()
    return report(made, made.plan, Validity("rows", 8449, 33792, (("s0", 16896),)))


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """A pipeline that records its calls and always returns the same report."""
    calls: list[tuple[object, ...]] = []

    def explain(function: object, device: str, compile: bool) -> object:
        def call(*arguments: torch.Tensor) -> Report:
            calls.append((function, device, *arguments))
            return reported()

        return call

    monkeypatch.setattr("onepass.tools.explain.explain", explain)
    return calls


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_report_as_json_has_exactly_the_promised_keys() -> None:
    found = reported().to_json()
    assert list(found) == ["workload", "device", "holds", "floor_bytes", "floor_us", "kernels", "refusals", "predicted_us"]
    assert list(found["kernels"][0]) == [
        "name",
        "family",
        "loads",
        "stores",
        "dram_bytes",
        "registers",
        "spill_bytes",
        "smem_bytes",
        "ctas_per_sm",
        "predicted_us",
        "ops",
    ]
    assert list(found["refusals"][0]) == ["reason", "cost_fused_us", "cost_apart_us", "detail"]
    assert json.loads(json.dumps(found)) == found


def test_report_takes_plan_and_binary_of_the_same_kernel() -> None:
    rows, join = reported().to_json()["kernels"]
    assert (rows["name"], rows["registers"], rows["smem_bytes"], rows["ctas_per_sm"]) == ("rms_norm_backward_rows", 127, 64, 2)
    assert (join["name"], join["registers"], join["loads"]) == ("rms_norm_backward_join", 32, ["partial dw f32 once"])


def test_report_as_text_shows_bytes_refusals_and_rejected_plans() -> None:
    text = str(reported())
    assert "rms_norm_backward on NVIDIA H200 SXM: 2 kernels" in text
    assert "valid for 8,449 to 33,792 rows; optimized for 16,896" in text
    assert "1.001 x the bytes, 1.103 x the time" in text
    assert "dx + dw: [dw] would leave one CTA an SM" in text and "120.0 us" in text and "99.5 us" in text
    assert "impossible" in text  # a merge without a cost
    assert "rows loop 4, cols cover 4096+1024, 8 warps" in text and "312 B" in text
    assert "0, but too few CTAs fit" in text
    assert max(map(len, text.splitlines())) <= 118 and "\x1b" not in text


def test_a_report_without_refusals_has_no_table_of_them() -> None:
    one = compiled()
    one.plan.refusals, one.rejected = (), ()
    text = str(reported(one))
    assert "not merged" not in text and "rejected" not in text


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (999, "999 B"), (402_653_184, "403 MB"), (3_300_000_000, "3.3 GB")])
def test_human_bytes(n: int, text: str) -> None:
    assert human_bytes(n) == text


def test_explain_a_named_workload(pipeline: list[tuple[object, ...]]) -> None:
    found = json.loads(run("explain", "rms_norm", "--shape", "16x64", "--dtype", "f16", "--device", "h100", "--json"))
    ((_, device, x, w),) = pipeline
    assert found["workload"] == "rms_norm" and device == "h100"
    assert isinstance(x, torch.Tensor) and (x.shape, x.dtype, x.device.type) == ((16, 64), torch.float16, "meta")
    assert isinstance(w, torch.Tensor) and w.shape == (64,)


def test_explain_compiles_and_writes_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_KEEP_SOURCES", str(tmp_path / "kept"))
    found = json.loads(run("explain", "rms_norm", "--shape", "4096x1024", "--json"))
    (kernel,) = found["kernels"]
    assert 16 <= kernel["registers"] <= 255 and kernel["spill_bytes"] == 0
    assert found["floor_bytes"] == 2 * (2 * 4096 * 1024) + 2 * 1024  # x and y, then w, in bf16
    assert found["floor_bytes"] <= kernel["dram_bytes"] <= 1.06 * found["floor_bytes"]
    assert f"def {kernel['name']}(" in (tmp_path / "kept" / f"{kernel['name']}.py").read_text()


def test_explain_prints_sources_on_request(pipeline: list[tuple[object, ...]]) -> None:
    assert "# text of" not in run("explain", "rms_norm")
    assert "# text of rms_norm_backward_rows" in run("explain", "rms_norm", "--source")


def test_explain_a_function_in_a_file(pipeline: list[tuple[object, ...]], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def total(x): return x.sum(-1)\n"
        "def inputs(): return torch.empty(3, 5, device='meta')\n"
        "def other(): return [torch.empty(7, device='meta')]\n"
    )
    run("explain", f"{file}:total")
    run("explain", f"{file}:total", "--inputs", f"{file}:other")
    run("explain", f"{file}:total", "--inputs", "bf16[2,4], i64[2],f32[]")
    assert [[tuple(t.shape) for t in calls[2:]] for calls in pipeline] == [[(3, 5)], [(7,)], [(2, 4), (2,), ()]]  # type: ignore[attr-defined]
    assert [t.dtype for t in pipeline[2][2:]] == [torch.bfloat16, torch.int64, torch.float32]  # type: ignore[attr-defined]
    assert pipeline[0][0].__name__ == "total"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("explain", "rms_nrom"), "rms_norm_backward"),
        (("explain", "rms_norm", "--shape", "8k"), "such as 8192x8192"),
        (("explain", "rms_norm", "--shape", "8x8x8"), "rows x columns"),
        (("explain", "rms_norm", "--dtype", "bf17"), "bf16"),
        (("explain", "rms_norm", "--inputs", "bf16[8]"), "--shape"),
        (("explain", "absent.py:f"), "no file absent.py"),
        (("explain", "rms_norm", "--shape", ""), "such as 8192x8192"),
        (("explain", "rms_norm", "--shape", "²x²"), "such as 8192x8192"),
        (("explain", "rms_norm", "--shape", "9" * 5000 + "x8"), "2^59"),
        (("explain", "rms_norm", "--shape", "99999999999x99999999999"), "2^59"),
        (("explain", "rms_norm", "--dtype", "i64"), "floating-point"),
        (("bisect", "rms_norm"), "write file.py:name"),
        (("bisect", "absent.py:f", "--slack", "nan"), "1 or more"),
        (("bisect", "absent.py:f", "--seed", "4294967296"), "2^32"),
    ],
)
def test_user_errors_are_one_line_and_exit_with_2(
    arguments: tuple[str, ...],
    says: str,
    pipeline: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["onepass", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    printed = capsys.readouterr().err
    assert exit.value.code == 2 and printed.startswith("onepass: [ONEPASS-") and says in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "says", "frames"),
    [
        ("raise RuntimeError('no \\x1b[31m')", r"mine.py raised RuntimeError: no \x1b[31m.", 1),
        ("def f(:", "SyntaxError", 0),
        ("import sys; sys.exit(0)", "sys.exit under", 0),
        ("def f(x): return x\ndef inputs(): raise ValueError('no')", "mine.py:inputs raised ValueError: no.", 1),
        ("def f(x): return x\ndef inputs(): raise SystemExit", "sys.exit under", 0),
        ("def f(): raise KeyError('no')", "mine.py:f raised KeyError", 1),
        ("def f(x): raise KeyError('no')\ninputs = lambda: torch.empty(2)", "mine.py:f raised KeyError", 1),
        ("def f(x, y): return x + y\ninputs = lambda: torch.empty(2)", "missing a required argument", 0),
        ("f = type", "has no signature", 0),
        ("def f(): return torch.nn.ReLU(), torch.empty(2), 5", "must be a dict", 0),
    ],
)
def test_failures_of_user_code_show_its_part_of_the_traceback(
    code: str, says: str, frames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\n{code}\n")
    monkeypatch.setattr(sys, "argv", ["onepass", "explain", f"{file}:f"])
    with pytest.raises(SystemExit) as exit:
        main()
    *trace, said = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and said.startswith("onepass: [ONEPASS-") and says in said
    shown = [line for line in trace if line.lstrip().startswith("File ")]
    assert len([line for line in shown if "mine.py" in line and "line 2" in line or "line 3" in line]) >= frames
    assert not any("onepass/" in line for line in shown)


def test_output_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onepass", "workloads"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "ONEPASS-810" in done.stderr


def test_the_console_works_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert tables.console().width == tables.WIDTH


def test_control_characters_in_file_names_are_escaped(pipeline: list[tuple[object, ...]], tmp_path: Path) -> None:
    file = tmp_path / "\x1b[31m.py"
    file.write_text("import torch\ndef f(x): return x\ninputs = lambda: torch.empty(2)\n")
    assert "\x1b" not in run("explain", f"{file}:f", "--source-dir", str(tmp_path / "\x1b[32m"))


def test_missing_files_and_functions_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(x): return x\ndef inputs(): return 3\n")
    with pytest.raises(BadSpec, match="defines no function g"):
        spec.load(f"{file}:g")
    with pytest.raises(BadSpec, match="must return tensors"):
        spec.example_inputs(f"{file}:f", None)
    with pytest.raises(BadSpec, match=r"dtype\[sizes\]"):
        spec.parse_tensors("bf16[8,8],nonsense")
    with pytest.raises(BadArgument, match="--inputs"):
        spec.resolve(f"{file}:f", "8x8", "bf16", None)


def test_version_and_list_of_workloads() -> None:
    assert run("--version").strip() == f"onepass {onepass.__version__}"
    assert "block_backward" in run("workloads")


def test_doctor_prints_json_and_tables() -> None:
    found = json.loads(run("doctor", "--json"))
    assert torch.__version__.startswith(found["versions"]["torch"])
    assert set(found["settings"]) == {k.variable for k in describe({})}
    text = as_text(table({"a": {"b": True, "c": [1, 2]}, "launch": {"ok": False, "why": "no card"}, "card": None}))
    assert [line.split() for line in text.splitlines()] == [
        ["a", "b", "yes"],
        ["a", "c", "1,", "2"],
        ["launch", "no:", "no", "card"],
        ["card", "-"],
    ]


def test_settings_are_read_and_checked(tmp_path: Path) -> None:
    assert knobs({}).keep_sources is None and knobs({"ONEPASS_KEEP_SOURCES": ""}).keep_sources is None
    read = knobs({"ONEPASS_COMPILE_WORKERS": "3", "ONEPASS_KEEP_SOURCES": str(tmp_path)})
    assert (read.compile_workers, read.keep_sources) == (3, tmp_path)
    assert knobs({}).compile_timeout == 300 and knobs({"ONEPASS_COMPILE_TIMEOUT": "2.5"}).compile_timeout == 2.5
    for bad in ("0", "soon", "-1", "nan", "inf", "1e9"):
        with pytest.raises(BadSpec, match="ONEPASS_COMPILE_TIMEOUT"):
            knobs({"ONEPASS_COMPILE_TIMEOUT": bad})
    for bad in ("0", "two", "-1", "1000", "²"):
        with pytest.raises(BadSpec, match=r"ONEPASS_COMPILE_WORKERS.*from 1 to 256"):
            knobs({"ONEPASS_COMPILE_WORKERS": bad})
    with pytest.raises(BadSpec, match="it is a file"):
        knobs({"ONEPASS_KEEP_SOURCES": __file__})


def python(code: str) -> str:
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_onepass_imports_no_compiler() -> None:
    heavy = "('triton', 'torch._inductor', 'torch._dynamo', 'rich', 'typer')"
    assert (
        python(
            f"import torch, sys; had = set(sys.modules); import onepass; onepass.OnepassError, onepass.DEVICES; "
            f"print([m for m in sys.modules if m not in had and m.startswith({heavy})])"
        )
        == "[]"
    )


def test_importing_onepass_is_cheap() -> None:
    """It loads few modules, the errors and the devices; the planner is loaded when it is first needed."""
    code = "import torch, sys; had = len(sys.modules); import onepass; print(len(sys.modules) - had)"
    assert int(python(code)) < 15


def test_public_names() -> None:
    assert set(dir(onepass)) == set(onepass.__all__)
    assert issubclass(onepass.OnepassError, Exception) and onepass.OnepassError is OnepassError
    assert onepass.Report is Report
    with pytest.raises(AttributeError, match="fussion"):
        onepass.fussion
