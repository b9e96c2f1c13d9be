"""The edge of each stage: unforeseen exceptions become one coded error, exceptions from outside pass unchanged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

import onepass
from onepass import errors
from onepass.stages import external_code, stage, to_coded_error
from tests.support.correctness import randoms

WITHIN = {  # the function that is broken, and the stage that the error names
    "arguments": ("onepass.capture.function.trace.flatten", "capturing a function"),
    "ops": ("onepass.capture.function.trace._needs_values", "checking the ops of a function"),
    "lowering": ("onepass.capture.function.trace.lower", "capturing a function"),
    "outputs": ("onepass.capture.function.trace.plan_outputs", "capturing a function"),
    "rewrites": ("onepass.pipeline.simplify", "simplifying a Program"),
    "classes": ("onepass.plan.variant.representative_sizes", "choosing kernels"),
    "planning": ("onepass.plan.partition.score", "planning kernels"),
    "text": ("onepass.codegen.triton.lower", "writing kernels"),
    "kernels": ("onepass.integration.engine.assemble", "making kernels"),
    "interpreter": ("onepass.runtime.interpreter.interpret.load", "running a kernel under Triton's interpreter"),
}
UNFORESEEN = (
    KeyError("7"),
    AssertionError(),
    ValueError("one {brace}"),
    IndexError("two\nlines"),
    TypeError(),
    RecursionError("deep"),
    RuntimeError("anything"),
    StopIteration(),
)
OUTSIDE = (
    KeyboardInterrupt(),
    SystemExit(3),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    OSError(28, "disk full"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    UserWarning("raised"),
)


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def broken(*_: Any, **__: Any) -> NoReturn:
        raise error

    return broken


def fused(function: Callable[..., Any] = lambda x: x.sum(1), **how: Any) -> Any:
    return onepass.fuse(function, **how)(randoms(0, (3, 4)))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear caches, so that the broken stage runs."""
    from onepass.integration import engine

    engine.forget()
    monkeypatch.setenv("ONEPASS_CACHE", "0")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("stage_name", WITHIN)
def test_an_unforeseen_exception_is_one_coded_error(stage_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, doing = WITHIN[stage_name]
    cause = KeyError("7")
    monkeypatch.setattr(broken, raising(cause))
    with pytest.raises(errors.InternalError, match=f"ONEPASS-900.*{doing}.*KeyError: '7'") as caught:
        fused()
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("cause", UNFORESEEN, ids=lambda e: type(e).__name__)
def test_an_unforeseen_exception_of_any_type_is_coded(cause: Exception) -> None:
    with pytest.raises(errors.InternalError) as caught, stage("outer"), stage("counting"):
        raise cause
    assert caught.value.__cause__ is cause and caught.value.fields["doing"] == "counting"
    assert type(cause).__name__ in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [*OUTSIDE, errors.NoPlan(what="a", device="b", detail="c")], ids=lambda e: type(e).__name__)
def test_exceptions_from_outside_pass_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, stage("counting"):
        raise error
    assert caught.value is error and error.__cause__ is None


def test_exceptions_a_stage_declares_pass_unchanged() -> None:
    with pytest.raises(StopIteration), stage("counting", StopIteration):
        raise StopIteration


def test_exceptions_of_foreign_code_pass_unchanged() -> None:
    with pytest.raises(KeyError), stage("counting"), external_code():
        raise KeyError("theirs")
    assert isinstance(to_coded_error(KeyError("ours"), "counting"), errors.InternalError)


def lookup(x: Tensor) -> Tensor:
    return {"a": x}["b"]


def deep(x: Tensor) -> Tensor:
    return deep(x)


OWN: tuple[tuple[Callable[..., Any], type[Exception]], ...] = (
    (lookup, KeyError),
    (deep, RecursionError),
    (lambda x: x + x[:, :2], RuntimeError),
    (lambda x: x.sum(nope=1), TypeError),
    (lambda x: x.sum(7), IndexError),
    (lambda x: [x, x][2], IndexError),
    (lambda x: x.view(5), RuntimeError),
)


@pytest.mark.parametrize(("function", "kind"), OWN)
@pytest.mark.parametrize("dynamic", [None, False])
def test_exceptions_of_the_users_function_pass_unchanged(
    function: Callable[..., Any], kind: type[Exception], dynamic: bool | None
) -> None:
    with pytest.raises(kind):
        fused(function, dynamic=dynamic)
    with pytest.raises(kind):
        onepass.explain(function)(torch.empty(3, 4, device="meta"))


@pytest.mark.usefixtures("fresh")
def test_explain_reports_the_coded_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.tools.explain.report", raising(KeyError("7")))
    with pytest.raises(errors.InternalError, match="explaining a function"):
        onepass.explain(lambda x: x.sum(1))(torch.empty(3, 4, device="meta"))


@pytest.mark.usefixtures("fresh", "nothing_compiled")
@pytest.mark.parametrize(
    "broken",
    [
        "onepass.capture.graph.region_program._renamed",
        "onepass.plan.partition.score",
        "onepass.codegen.triton.lower",
        "onepass.runtime.interpreter.interpret.load",
        "onepass.integration.claim.find_regions",
    ],
)
def test_a_region_that_fails_unforeseen_is_declined_with_the_code(
    broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(broken, raising(KeyError("7")))
    monkeypatch.setattr("onepass.integration.region_op.inductor_fallback", raising(RuntimeError("it takes long")))
    monkeypatch.setenv("ONEPASS_REPRO_DIR", str(tmp_path))
    compiled = torch.compile(
        lambda x: x.softmax(1), backend=onepass.backend, options={"interpret": True, "rest": "eager", "by_cost": False}
    )
    x = randoms(0, (64, 64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(compiled(x), x.softmax(1))
    assert sum("[ONEPASS-900]" in str(w.message) for w in caught) == 1
