"""When a captured Program may serve a call, and what is never captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onepass import errors
from onepass.capture import Captured, capture
from onepass.ir.size import parse_size, sym


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def captured_softmax(*shape: int, **options: Any) -> Captured:
    return capture(softmax, (torch.zeros(shape),), **options)


# Sizes


def test_one_program_serves_every_row_count() -> None:
    captured = captured_softmax(64, 128)
    assert captured.program.symbols == ("s0",)
    assert captured.program == captured_softmax(100, 128).program
    assert captured.bind((torch.zeros(100, 128),)) == {"s0": 100}
    assert captured.bind((torch.zeros(2, 128),)) == {"s0": 2}


@pytest.mark.parametrize("shape", [(64, 129), (1, 128), (0, 128), (2, 64, 128), (128,)], ids=str)
def test_other_columns_other_ranks_and_zero_or_one_row_need_another_program(shape: tuple[int, ...]) -> None:
    assert captured_softmax(64, 128).bind((torch.zeros(shape),)) is None


def test_all_dims_but_the_last_vary() -> None:
    captured = captured_softmax(4, 5, 6)
    assert captured.program.buffer["x"].shape == (sym("s0"), sym("s1"), 6)
    assert captured.bind((torch.zeros(7, 8, 6),)) == {"s0": 7, "s1": 8}
    assert captured_softmax(1, 5, 6).program.buffer["x"].shape == (1, sym("s0"), 6)


def test_the_first_dim_alone_varies_where_the_others_cannot() -> None:
    def grouped(x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 2)

    captured = capture(grouped, (torch.zeros(3, 4, 5),))
    assert captured.program.buffer["x"].shape == (sym("s0"), 4, 5)
    assert captured.bind((torch.zeros(7, 4, 5),)) == {"s0": 7}
    assert captured.bind((torch.zeros(3, 6, 5),)) is None


def test_equal_sizes_are_one_symbol_and_must_stay_equal() -> None:
    def scaled(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x * rows[:, None]

    captured = capture(scaled, (torch.zeros(6, 9), torch.zeros(6)))
    assert captured.program.buffer["rows"].shape == (sym("s0"),)
    assert captured.bind((torch.zeros(8, 9), torch.zeros(8))) == {"s0": 8}
    assert captured.bind((torch.zeros(8, 9), torch.zeros(6))) is None


def test_a_vector_as_long_as_columns_is_fixed() -> None:
    captured = capture(lambda x, w: x * w, (torch.zeros(6, 6), torch.zeros(6)))
    assert captured.program.buffer["w"].shape == (6,)


def test_fixed_by_request() -> None:
    captured = captured_softmax(64, 128, dynamic=False)
    assert captured.program.symbols == ()
    assert captured.bind((torch.zeros(64, 128),)) == {}
    assert captured.bind((torch.zeros(65, 128),)) is None


@pytest.mark.parametrize(
    "fn",
    [lambda x: x.view(4, -1, 8).sum(1), lambda x: x + x.t(), lambda x: x[1:] * 2, lambda x: torch.cat([x, x]).sum(1)],
    ids=["split rows", "rows are columns", "fewer rows", "more rows"],
)
def test_functions_that_need_the_row_count_are_captured_for_one_count(fn: Callable[..., Any]) -> None:
    x = torch.zeros(8, 8)
    captured = capture(fn, (x,))
    assert captured.program.symbols == ()
    assert captured.bind((x,)) == {} and captured.bind((torch.zeros(12, 8),)) is None
    with pytest.raises(errors.SymbolicAxis, match="dynamic=False"):
        capture(fn, (x,), dynamic=True)


def test_branches_on_sizes_are_guards() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 10 else x + 1

    captured = capture(fn, (torch.zeros(16, 4),), dynamic=True)
    assert captured.guards
    assert captured.bind((torch.zeros(12, 4),)) == {"s0": 12}
    assert captured.bind((torch.zeros(9, 4),)) is None


# Layouts


def test_contiguous_strides_follow_the_sizes() -> None:
    captured = captured_softmax(4, 5, 6)
    assert captured.program.buffer["x"].strides == (parse_size("6*s1"), 6, 1)


@pytest.mark.parametrize(
    "other",
    [torch.zeros(16, 8).t(), torch.zeros(8, 32)[:, ::2], torch.zeros(8, 32)[:, :16], torch.zeros(16).expand(8, 16)],
    ids=["transposed", "every other", "wider rows", "expanded"],
)
def test_other_strides_need_another_program(other: torch.Tensor) -> None:
    captured = captured_softmax(8, 16)
    assert other.shape == (8, 16) and captured.bind((other,)) is None
    assert capture(softmax, (other,)).bind((other,)) is not None


def test_where_a_tensor_starts_does_not_matter() -> None:
    assert captured_softmax(8, 16).bind((torch.zeros(10, 16)[1:],)) == {"s0": 9}


# Everything else a trace depends on


def test_types_and_devices() -> None:
    captured = captured_softmax(8, 16)
    assert captured.bind((torch.zeros(8, 16, dtype=torch.bfloat16),)) is None
    assert captured.bind((torch.zeros(8, 16, device="meta"),)) is None
    assert captured.bind((3.0,)) is None


class Doubling(torch.Tensor):
    """A subclass, whose ops may do anything."""


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(8, 16).requires_grad_(),
        torch._neg_view(torch.ones(8, 16)),
        torch.ones(8, 16).as_subclass(Doubling),
        torch.ones(8, 16).to_sparse(),
    ],
    ids=["needs a gradient", "negated", "a subclass", "sparse"],
)
def test_special_tensors_do_not_match_a_plain_one(other: torch.Tensor) -> None:
    captured = captured_softmax(8, 16)
    assert captured.bind((torch.ones(8, 16),)) is not None and captured.bind((other,)) is None
    with pytest.raises(errors.OnepassError):
        capture(softmax, (other,))


def test_number_and_structure_of_arguments() -> None:
    x = torch.zeros(8, 16)
    captured = capture(lambda pair: pair[0] + pair[1], ((x, x),))
    assert captured.bind(((x, x),)) is not None
    assert captured.bind(([x, x],)) is None and captured.bind(((x,),)) is None and captured.bind(()) is None


@pytest.mark.parametrize(("first", "then"), [(2, 3), (2, 2.0), (1, True), (None, 0), ("none", "tanh")], ids=str)
def test_other_plain_values_need_another_program(first: Any, then: Any) -> None:
    def fn(x: torch.Tensor, option: Any) -> torch.Tensor:
        return F.gelu(x, approximate=option) if isinstance(option, str) else x * (option or 1)

    x = torch.zeros(8, 16)
    captured = capture(fn, (x, first))
    assert captured.bind((x, first)) is not None and captured.bind((x, then)) is None


def test_autocast() -> None:
    x = torch.zeros(8, 16, dtype=torch.bfloat16)
    plain = capture(F.mse_loss, (x, x))
    with torch.autocast("cpu", torch.bfloat16):
        assert plain.bind((x, x)) is None
        under = capture(F.mse_loss, (x, x))
        assert under.bind((x, x)) is not None
    assert [str(c.program.buffer["out0"].dtype) for c in (plain, under)] == ["bf16", "f32"]
    assert under.bind((x, x)) is None


def test_grad_mode_default_dtype_and_determinism() -> None:
    x = torch.zeros(8, 16)
    captured = captured_softmax(8, 16)
    with torch.no_grad():
        assert captured.bind((x,)) is None
    with torch.inference_mode():
        assert captured.bind((x,)) is None
    torch.set_default_dtype(torch.float64)
    try:
        assert captured.bind((x,)) is None
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert captured.bind((x,)) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert captured.bind((x,)) is not None


SCALE = 2.0


def scaled_by_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def test_numbers_from_outside_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    x, factor = torch.zeros(8, 16), 2.0

    def scaled_by_a_closure(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    closure, module = capture(scaled_by_a_closure, (x,)), capture(scaled_by_a_global, (x,))
    assert closure.bind((x,)) is not None and module.bind((x,)) is not None
    factor = 3.0
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    assert closure.bind((x,)) is None and module.bind((x,)) is None


# Refusals


def refused(error: type[errors.OnepassError], fn: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(error) as caught:
        capture(fn, args)
    assert type(caught.value) is error
    return str(caught.value)


X = torch.zeros(4, 8)


def test_unsupported_ops_are_named_with_their_line() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sort().values

    text = refused(errors.UnsupportedOp, fn, X)
    assert "aten.sort.default" in text
    assert f"test_fuse_guards.py:{fn.__code__.co_firstlineno + 1} return (x * 2).sort().values" in text
    refused(errors.UnsupportedOp, lambda x: x @ x.t(), X)
    refused(errors.UnsupportedOp, lambda x: x.cumsum(0), X)
    refused(errors.UnsupportedOp, lambda x, i: x[i], X, torch.tensor([1, 2]))
    refused(errors.UnsupportedOp, lambda x: torch.cat([x.sum(0), x.amax(0)]).sum(), torch.zeros(16, 8))


@pytest.mark.parametrize("name", ["<string>", "<stdin>", "<ipython-input-3-0a1b>"])
def test_code_without_a_file_is_reported_by_its_function(name: str) -> None:
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def fn(x):\n    y = x * 2\n    return y.sort()[0]\n", name, "exec"), made)
    assert f"(at {name}:3 in fn)" in refused(errors.UnsupportedOp, made["fn"], X)
    exec(compile("def fn(x):\n    return x.sort()[0]\n", "<generated>", "exec"), made)
    assert "test_fuse_guards.py:" in refused(errors.UnsupportedOp, made["fn"], X)  # the line of the caller


def test_unsupported_views() -> None:
    refused(errors.UnsupportedView, lambda x: x.as_strided((3, 3), (2, 1)) * 2, X)
    refused(errors.UnsupportedView, lambda x: x.unfold(1, 3, 1) * 2, X)
    refused(errors.UnsupportedView, lambda x: (x.t() * 2).reshape(5, 8).t().sum(0), torch.zeros(8, 5).t().contiguous())


def test_tensors_from_outside_are_refused() -> None:
    outside = torch.ones(8)
    text = refused(errors.ClosureTensor, lambda x: x * outside, X)
    assert "[8]" in text and "Pass it as an argument" in text
    refused(errors.ClosureTensor, lambda x: x * outside.sum(), X)
    refused(errors.ClosureTensor, lambda x: (x * 2, outside), X)
    refused(errors.ClosureTensor, lambda x: x * torch.tensor([1.0] * 8), X)
    scalar = torch.tensor(2.0)
    refused(errors.ClosureTensor, lambda x: x * scalar, X)
    refused(errors.ClosureTensor, torch.nn.LayerNorm(8), X)


def test_mutation_of_inputs() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.t()
        y[1:] += 1
        return y

    text = refused(errors.Mutation, fn, X)
    assert f"test_fuse_guards.py:{fn.__code__.co_firstlineno + 2} y[1:] += 1" in text
    refused(errors.Mutation, lambda x: x.mul_(2), X)
    refused(errors.Mutation, lambda x, y: torch.exp(x, out=y), X, torch.zeros(4, 8))


def test_randomness() -> None:
    assert "F.dropout" in refused(errors.Randomness, lambda x: F.dropout(x), X)
    refused(errors.Randomness, lambda x: x + torch.randn(8), X)
    refused(errors.Randomness, lambda x: torch.empty_like(x).uniform_(), X)
    capture(lambda x: F.dropout(x, training=False) * 2, (X,))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * x.sum().item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x * x.tolist()[0][0],
        lambda x: x.tensor_split(x.sum().long() * 0 + 1),
    ],
    ids=["item", "bool", "mask", "nonzero", "tolist", "tensor_split"],
)
def test_reading_values_on_the_host(fn: Callable[..., Any]) -> None:
    refused(errors.DataDependent, fn, X)


def test_unsupported_types_and_layouts_are_refused() -> None:
    refused(errors.UnsupportedDtype, lambda x: x.real, torch.zeros(4, 8, dtype=torch.complex64))
    refused(errors.UnsupportedDtype, lambda x: x.to(torch.complex64), X)
    refused(errors.UnsupportedDtype, lambda x: x, torch.quantize_per_tensor(X, 0.1, 0, torch.qint8))
    assert ".to_dense()" in refused(errors.UnsupportedLayout, lambda x: x * 2, X.to_sparse())
    assert "nested" in refused(errors.BadArgument, lambda x: x * 2, torch.nested.nested_tensor([X, X]))


def test_devices() -> None:
    assert "cpu, meta" in refused(errors.MixedDevices, lambda x, y: x + y, X, torch.zeros(4, 8, device="meta"))


def test_unsupported_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.capture.function.arguments.DEVICES", ("cuda",))  # no other device exists on every machine
    assert "CUDA device" in refused(errors.UnsupportedDevice, lambda x: x, X)


def test_absurd_shapes() -> None:
    refused(errors.InvalidShape, lambda x: x, torch.zeros([1] * 21))
    refused(errors.InvalidShape, lambda x: x.sum(), torch.empty(1, device="meta").expand(2**31, 2**31))
    refused(errors.InvalidShape, lambda x: x.expand(2**31, 2**31) > 0, torch.zeros(1, 1))


def test_inputs_that_need_gradients() -> None:
    x = torch.zeros(4, 8, requires_grad=True)
    assert "Argument x" in refused(errors.NeedsGrad, softmax, x)
    with torch.no_grad():
        assert capture(softmax, (x,)).bind((x,)) is not None


def test_objects_that_may_change_unnoticed_are_refused() -> None:
    class Options:
        scale = 2.0

    assert "Options" in refused(errors.BadArgument, lambda x, o: x * o.scale, X, Options())


def test_errors_of_the_function_itself_are_passed_on() -> None:
    with pytest.raises(RuntimeError, match=r"size|shape|broadcast"):
        capture(lambda x: x + torch.zeros(3), (X,))
    with pytest.raises(ZeroDivisionError):
        capture(lambda x: x * (1 // 0), (X,))
