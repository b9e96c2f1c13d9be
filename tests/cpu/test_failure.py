"""Failures: one coded warning, the right result, a reproducer that runs; and errors that must never have a fallback."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

import onepass
from onepass import pipeline
from onepass.errors import InputsOverwritten, NoPlan, NotWarmedUp, OnepassError, OnepassWarning, WrongAnswer
from onepass.integration import engine, failure, fallback, journal, passes, plans, region_op, settings, split
from onepass.runtime.executable import Executable
from tests.support.processes import run_python
from tests.support.region_calls import ROWS, assert_filled, inputs, outputs, region
from tests.support.region_graphs import graph_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("ONEPASS_REPRO_DIR", str(tmp_path / "repros"))
    torch._dynamo.reset()
    region_op.forget()
    journal.reset()
    failure.reset_warnings()
    yield
    region_op.forget()


def no_plan(*_: Any, **__: Any) -> Any:
    raise NoPlan(what="it", device="here", detail="a test says so")


def replay(path: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "ONEPASS_CACHE": "0"}
    return run_python(Path(path), env=env)


def test_a_region_that_cannot_be_planned_runs_as_inductor_compiles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Kernels, "executable", no_plan)
    monkeypatch.setattr(region_op, "MAX_INDUCTOR_FALLBACKS", 1)  # the second of two sizes is computed op by op
    text = region("0123456789", lines=("model.py:12", "model.py:13"))
    with pytest.warns(OnepassWarning, match=r"ONEPASS-701.*model\.py:12, model\.py:13.*ONEPASS-201.*repro_0123456789") as caught:
        for rows in (4, 4, 6):
            ins, outs = inputs(rows), outputs(rows)
            region_op.run(outs, ins, [rows], text)
            assert_filled(outs, ins)
    assert len([w for w in caught if w.category is OnepassWarning]) == 1
    seen = journal.snapshot()
    assert [f.runs_as for f in seen.fallbacks] == ["inductor", "torch, op by op"]
    assert seen.fallbacks_by_code == {"ONEPASS-201": 2} and seen.calls == {"0123456789": 3}
    done = replay(seen.fallbacks[0].repro)
    assert done.returncode == 0, done.stderr
    assert "is correct" in done.stdout


def test_a_region_runs_op_by_op_if_inductor_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Kernels, "executable", no_plan)
    monkeypatch.setattr(torch, "compile", no_plan)
    ins, outs = inputs(4), outputs(4)
    with pytest.warns(OnepassWarning):
        region_op.run(outs, ins, [4], region("a"))
    assert_filled(outs, ins)
    assert journal.snapshot().fallbacks[0].runs_as == "torch, op by op"


def test_on_error_raise_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Kernels, "executable", no_plan)
    with pytest.raises(NoPlan):
        region_op.run(outputs(4), inputs(4), [4], region("a", on_error="raise"))
    monkeypatch.setenv("ONEPASS_ON_ERROR", "raise")
    with pytest.raises(NoPlan):
        region_op.run(outputs(4), inputs(4), [4], region("b"))


@pytest.mark.parametrize("error", [RuntimeError("any text"), OSError(28, "any text"), MemoryError("any text")])
@pytest.mark.parametrize("where", ["compiled", "first launch", "later launch", "checked launch", "claimed", "planned", "split"])
def test_raised_errors_have_a_code_and_a_cause(monkeypatch: pytest.MonkeyPatch, error: Exception, where: str) -> None:
    """Whatever fails inside onepass with on_error="raise"."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    chosen = settings.resolve({"interpret": True, "on_error": "raise", "by_cost": False})
    module = torch.fx.GraphModule({}, graph_of(norm, (64, 16)))
    text = region("a", lines=("test_failure.py:12",), on_error="raise", verify=9 * where.startswith("checked"))
    match where:
        case "compiled":
            monkeypatch.setattr(engine.Kernels, "executable", fail)
        case "first launch" | "later launch" | "checked launch":
            monkeypatch.setattr(Executable, "bound", failing_from(1 if where == "first launch" else 2, error))
        case "claimed":
            monkeypatch.setattr(passes, "claim", fail)
        case "planned":
            monkeypatch.setattr(passes, "PLANS", plans.Plans())
            monkeypatch.setattr(pipeline, "search", fail)
        case "split":
            monkeypatch.setattr(split, "recompute", fail)
    with pytest.raises(OnepassError, match="any text") as caught:
        if where in ("claimed", "planned"):
            passes.RegionPass(chosen)(module.graph, False)
        elif where == "split":
            split.SplitPass(chosen)(module, module, 1)
        for _ in range(2):
            region_op.run(outputs(4), inputs(4), [4], text)
    assert caught.value.__cause__ is error and not journal.snapshot().fallbacks


def failing(error: Exception, damage: bool = False) -> Any:
    def bound(self: Executable, bindings: Any) -> Any:
        def fill(outs: Any, ins: Any) -> None:
            if damage:
                ins[0].zero_()
            raise error

        return fill

    return bound


def test_a_failed_launch_does_not_destroy_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executable, "bound", failing(ValueError("half way"), damage=True))
    ins = inputs(5)
    kept = [t.clone() for t in ins]
    outs = [ins[0], torch.empty(5)]
    with pytest.warns(OnepassWarning, match="could not be launched"):
        region_op.run(outs, ins, [5], region("c"))
    assert_filled(outs, kept)


def test_a_failed_launch_does_not_destroy_an_unaligned_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executable, "bound", failing(ValueError("half way"), damage=True))
    given = inputs(5)
    x = torch.zeros(16 + 5 * 24, dtype=torch.bfloat16)[16:].view(5, 24).copy_(given[0])
    outs = [x, torch.empty(5)]
    with pytest.warns(OnepassWarning, match="could not be launched"):
        region_op.run(outs, [x, given[1]], [5], region("c"))
    assert_filled(outs, given)


def test_the_fallback_through_inductor_takes_unaligned_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Kernels, "executable", no_plan)
    with pytest.warns(OnepassWarning):
        for start in (16, 0, 32):
            given, outs = inputs(5, start), outputs(5)
            x = torch.zeros(start + 5 * 24, dtype=torch.bfloat16)[start:].view(5, 24).copy_(given[0])
            region_op.run(outs, [x, given[1]], [5], region("c"))
            assert_filled(outs, given)
    assert [f.runs_as for f in journal.snapshot().fallbacks] == ["inductor"]


@pytest.mark.parametrize("error", [NotWarmedUp(function="it"), WrongAnswer(region="r", output="o", detail="d", repro="p")])
def test_errors_that_must_be_seen_have_no_fallback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(engine.Kernels, "executable", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        region_op.run(outputs(4), inputs(4), [4], region("d"))
    assert not journal.snapshot().fallbacks


# ---- a later call --------------------------------------------------------------------------------------------------------------


LATER = RuntimeError("later")


def failing_from(call: int, error: Exception = LATER) -> Any:
    """Launches that work before that call, and then fail after writing garbage to half of an output."""
    right, seen = Executable.bound, [0]

    def bound(self: Executable, bindings: Any) -> Any:
        fill = right(self, bindings)

        def counted(outs: Any, ins: Any) -> None:
            seen[0] += 1
            if seen[0] >= call:
                outs[0][: len(outs[0]) // 2].fill_(7)
                raise error
            fill(outs, ins)

        return counted

    return bound


@pytest.mark.parametrize("verify", ["0", "9"])
def test_a_launch_that_fails_later_falls_back_too(monkeypatch: pytest.MonkeyPatch, verify: str) -> None:
    monkeypatch.setattr(Executable, "bound", failing_from(3))
    monkeypatch.setenv("ONEPASS_VERIFY", verify)
    with pytest.warns(OnepassWarning, match=r"ONEPASS-701.*model\.py:12.*could not be launched.*later.*repro_") as caught:
        for seed in range(5):
            ins, outs = inputs(6, seed), outputs(6)
            region_op.run(outs, ins, [6], region("c", lines=("model.py:12",)))
            assert_filled(outs, ins)
    assert len([w for w in caught if w.category is OnepassWarning]) == 1
    [seen] = journal.snapshot().fallbacks
    assert (seen.stage, seen.runs_as) == ("launched", "inductor")


def test_an_in_place_launch_that_fails_later_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executable, "bound", failing_from(2))
    ins = inputs(5)
    region_op.run([ins[0], torch.empty(5)], ins, [5], region("0123456789", lines=("model.py:12",)))
    ins = inputs(5)
    with pytest.raises(InputsOverwritten, match=r"ONEPASS-715.*0123456789 \(model\.py:12\).*later.*in_place"):
        region_op.run([ins[0], torch.empty(5)], ins, [5], region("0123456789", lines=("model.py:12",)))


def test_an_in_place_launch_that_fails_later_falls_back_if_inputs_were_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executable, "bound", failing_from(2))
    monkeypatch.setenv("ONEPASS_VERIFY", "9")
    with pytest.warns(OnepassWarning, match="could not be launched"):
        for seed in range(3):
            ins = inputs(5, seed)
            outs = [ins[0], torch.empty(5)]
            region_op.run(outs, ins, [5], region("d"))
            assert_filled(outs, inputs(5, seed))


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access was encountered"), torch.OutOfMemoryError("CUDA out of memory")]
)
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_errors_that_must_be_seen_are_raised_by_later_calls_too(
    monkeypatch: pytest.MonkeyPatch, error: Exception, on_error: str
) -> None:
    monkeypatch.setattr(Executable, "bound", failing_from(2, error))
    region_op.run(outputs(4), inputs(4), [4], region("e", on_error=on_error))
    with pytest.raises(type(error), match=str(error)):
        region_op.run(outputs(4), inputs(4), [4], region("e", on_error=on_error))
    assert not journal.snapshot().fallbacks


def test_a_failing_fallback_or_captured_call_has_no_further_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executable, "bound", failing_from(2))
    region_op.run(outputs(4), inputs(4), [4], region("f"))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="later"):
        patch.setattr(region_op, "_capturing", lambda tensor: True)
        region_op.run(outputs(4), inputs(4), [4], region("f"))
    with pytest.warns(OnepassWarning):
        region_op.run(outputs(4), inputs(4), [4], region("f"))
    monkeypatch.setattr(fallback.Fallback, "__call__", lambda self, outs, ins: (_ for _ in ()).throw(RuntimeError("as well")))
    with pytest.raises(RuntimeError, match="as well"):
        region_op.run(outputs(4), inputs(4), [4], region("f"))
    assert len(journal.snapshot().fallbacks) == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_cuda_errors_have_no_fallback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(Executable, "bound", failing(error))
    with pytest.raises(type(error)):
        region_op.run(outputs(4), inputs(4), [4], region("d"))
    assert not journal.snapshot().fallbacks


def test_verifying_catches_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Executable.bound

    def wrong(self: Executable, bindings: Any) -> Any:
        fill = right(self, bindings)

        def slightly(outs: Any, ins: Any) -> None:
            fill(outs, ins)
            outs[1][2] *= 1.001

        return slightly

    monkeypatch.setattr(Executable, "bound", wrong)
    monkeypatch.setenv("ONEPASS_VERIFY", "2")
    with pytest.raises(WrongAnswer, match=r"ONEPASS-703.*out1.*float64") as caught:
        region_op.run(outputs(4), inputs(4), [4], region("0123456789"))
    assert Path(str(caught.value.fields["repro"])).exists()
    monkeypatch.setattr(Executable, "bound", right)
    assert replay(str(caught.value.fields["repro"])).returncode == 0


def test_a_reproducer_fails_as_its_region_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Kernels, "executable", no_plan)
    unknown = ROWS.replace("rsqrt %6", "log %6")
    with pytest.warns(OnepassWarning):
        region_op.run(outputs(4), inputs(4), [4], region("e", unknown))
    path = Path(journal.snapshot().fallbacks[0].repro)
    path.write_text(path.read_text().replace("log %6", "nothing %6"))
    done = replay(str(path))
    assert done.returncode != 0 and "ONEPASS-804" in done.stderr


def test_a_folder_that_cannot_be_written_costs_only_the_reproducer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_REPRO_DIR", "/proc/nowhere")
    monkeypatch.setattr(engine.Kernels, "executable", no_plan)
    ins, outs = inputs(4), outputs(4)
    with pytest.warns(OnepassWarning, match="ONEPASS-707"):
        region_op.run(outs, ins, [4], region("f"))
    assert_filled(outs, ins)


# ---- the pass ------------------------------------------------------------------------------------------------------------------


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x * 2, (16,))


def compiled() -> Any:
    return torch.compile(norm, backend=onepass.backend, options={"interpret": True, "rest": "eager", "by_cost": False})


def test_a_graph_whose_claim_fails_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_way(graph: torch.fx.Graph, *_: Any) -> Any:
        last = [n for n in graph.nodes if n.op == "call_function"][-1]
        last.replace_all_uses_with(last.args[0])
        graph.erase_node(last)
        raise KeyError("half way")

    monkeypatch.setattr(passes, "claim", half_way)
    x = torch.randn(4, 16)
    with pytest.warns(OnepassWarning, match=r"ONEPASS-702.*test_failure\.py.*KeyError"):
        torch.testing.assert_close(compiled()(x), norm(x))
    seen = journal.snapshot()
    assert seen.graphs[0].error and not seen.calls


def test_the_reproducer_of_a_graph_repeats_the_claim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(passes, "claim", no_plan)
    with pytest.warns(OnepassWarning):
        compiled()(torch.randn(4, 16))
    [path] = (tmp_path / "repros").glob("repro_graph_*.py")
    done = replay(str(path))
    assert done.returncode == 0, done.stderr
    assert "1 regions claimed" in done.stdout


def test_a_region_whose_planning_fails_stays_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    engine.forget()
    monkeypatch.setattr(pipeline, "make_plan", no_plan)
    x = torch.randn(4, 16)
    with pytest.warns(OnepassWarning, match="could not be planned"):
        torch.testing.assert_close(compiled()(x), norm(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="ONEPASS-201"), onepass.settings(on_error="raise"):
        compiled()(x)


def test_failures_inside_a_compiled_model_are_only_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Kernels, "executable", no_plan)
    monkeypatch.setattr(region_op, "MAX_INDUCTOR_FALLBACKS", 0)
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.warns(OnepassWarning, match="test_failure"):
        compiled()(x).sum().backward()
    actual, x.grad = x.grad, None
    norm(x).sum().backward()
    torch.testing.assert_close(actual, x.grad)


def test_an_untested_torch_is_plain_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass import compat

    monkeypatch.setattr(compat, "inductor_incompatibility", lambda: "this is torch 9.9")
    monkeypatch.setattr(compat, "compile_by_inductor", lambda module, inputs, patches, inner=None: module.forward)
    with pytest.warns(OnepassWarning, match="ONEPASS-706.*9.9"):
        compiled()(torch.randn(4, 16))
    assert not journal.snapshot().graphs


# ---- compiled to run without Python --------------------------------------------------------------------------------------------


def ahead_of_time() -> Any:
    from torch._inductor.virtualized import V

    return V.set_aot_compilation(True)


@pytest.mark.parametrize(
    ("compiling", "by"),
    [
        (ahead_of_time, "AOTInductor"),
        (lambda: torch._inductor.config.patch(cpp_wrapper=True), "C\\+\\+ wrapper"),
        (lambda: torch._inductor.config.patch(fx_wrapper=True), "FX wrapper"),
    ],
)
def test_code_that_runs_without_python_gets_no_regions(compiling: Callable[[], Any], by: str) -> None:
    options = settings.resolve({"interpret": True, "by_cost": False})
    graph = graph_of(norm, (64, 16))
    before = str(graph)
    with pytest.warns(OnepassWarning, match=f"ONEPASS-711.*inference graph.*{by}") as warned, compiling():
        for _ in range(2):
            passes.RegionPass(options)(graph, True)
    assert str(graph) == before and len(warned) == 1
    assert all(not seen.regions and "ONEPASS-711" in str(seen.error) for seen in journal.snapshot().graphs)
    passes.RegionPass(options)(graph, True)
    assert str(graph) != before, "nothing else keeps the region from being claimed"


def test_code_that_runs_without_python_gets_no_other_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "recompute", no_plan)
    module = torch.fx.GraphModule({}, graph_of(norm, (64, 16)))
    change = split.SplitPass(settings.resolve({"interpret": True, "on_error": "raise"}))
    with ahead_of_time():
        change(module, module, 1)
    with pytest.raises(NoPlan):
        change(module, module, 1)


def test_an_op_by_op_run_under_the_cpp_wrapper_warns_too() -> None:
    x = torch.randn(4, 16)
    with pytest.warns(OnepassWarning, match="ONEPASS-711.*test_failure.py"), torch._inductor.config.patch(cpp_wrapper=True):
        torch.testing.assert_close(compiled()(x), norm(x))
    assert not journal.snapshot().calls
