"""Every op of the table as users call it: fused functions compared with float64, at odd sizes and for special values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onepass
from onepass.capture.function.trace import capture
from onepass.errors import OnepassError
from onepass.ir.criterion import judge
from onepass.ir.expr import BY_TORCH, OPS, OpSpec
from onepass.ir.program import Op
from tests.support.correctness import assert_right, randoms

SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.5, 1e-7, -1e-7, 20.0, -41.0, 1e4, -2.5)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# The references of these are not traceable functions of torch.
BY_TORCH_FUNCTION: dict[str, Callable[..., Tensor]] = {"cast": lambda a: a.to(torch.float32) * 1, "fma": lambda a, b, c: a * b + c}
FLOAT_OPS = sorted(name for name, spec in OPS.items() if spec.takes.accepts(BY_TORCH[torch.float32]))


def function_of(spec: OpSpec) -> Callable[..., Tensor]:
    """A function of only the reference: a fused function guards everything it can reach."""
    reference = spec.reference
    return BY_TORCH_FUNCTION.get(spec.name, lambda *args: reference(*args))


def spread(spec: OpSpec, dtype: torch.dtype, position: int) -> Tensor:
    """One argument: ordinary values of many sizes, positive and negative, in an odd number of columns."""
    generator = torch.Generator().manual_seed(position)
    x = torch.randn(5, 37, generator=generator, dtype=torch.float64) * torch.tensor([0.01, 0.3, 0.9, 2.0, 8.0])[:, None]
    return x.to(dtype)


def special(dtype: torch.dtype, arity: int) -> list[Tensor]:
    """All pairs of special values."""
    values = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    turned = [values.repeat_interleave(len(values)), values.repeat(len(values)), values.flip(0).repeat(len(values))]
    return [t.reshape(len(values), -1) for t in turned[:arity]]


def error_of(spec: OpSpec, args: list[Tensor]) -> str | None:
    if spec.name == "where":
        args[0] = args[0] > 0
    function = function_of(spec)
    reference = function(*(a.double() if a.is_floating_point() else a for a in args))
    actual, eager = onepass.fuse(lambda *a: function(*a))(*args), function(*args)
    assert actual.dtype == eager.dtype and actual.shape == eager.shape
    if not eager.is_floating_point():
        reference = eager
    if eager.dtype == torch.float64:  # eager itself is the reference here, and another library may be an ulp or two off
        torch.testing.assert_close(actual, eager, rtol=1e-15, atol=1e-16, equal_nan=True)
        return None
    return judge(actual, eager, reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLOAT_OPS)
def test_floats(name: str, dtype: torch.dtype) -> None:
    spec = OPS[name]
    assert error_of(spec, [spread(spec, dtype, k) for k in range(spec.arity)]) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLOAT_OPS)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    assert error_of(OPS[name], special(dtype, OPS[name].arity)) is None


# ---- integers -------------------------------------------------------------------------------------------------------------------


def grid(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All pairs of numbers at the limits of a type, around 0 and around the widths of all types."""
    info = torch.iinfo(dtype)
    near = (*range(-9, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, -32, -64, info.max // 3, info.min, info.max, info.max - 1)
    values = torch.tensor(sorted({v for v in near if info.min <= v <= info.max}), dtype=dtype)
    return tuple(t.contiguous() for t in torch.meshgrid(values, values, indexing="ij"))  # type: ignore[return-value]


WITH_INTEGERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "left": torch.bitwise_left_shift,
    "right": torch.bitwise_right_shift,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "<< 3": lambda a, b: a << 3,
    ">> 1": lambda a, b: a >> 1,
    "<< 70": lambda a, b: a << 70,
    ">> 70": lambda a, b: a >> 70,
    "<< -1": lambda a, b: a << -1,
    ">> -1": lambda a, b: a >> -1,
    "3 <<": lambda a, b: 3 << b,
    "-3 >>": lambda a, b: -3 >> b,
    "**": torch.pow,
    "** 9": lambda a, b: a**9,
    "** 100": lambda a, b: a**100,
    "2 **": lambda a, b: 2**b,
    "-1 **": lambda a, b: (-1) ** b,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "signbit": lambda a, b: torch.signbit(a),
    "copysign": torch.copysign,
}


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", WITH_INTEGERS)
def test_integers(name: str, dtype: torch.dtype) -> None:
    """Results match torch bit for bit: shifts by counts out of range, and powers that are negative or wrap around."""
    function, args = WITH_INTEGERS[name], grid(dtype)
    if name == "-3 >>" and dtype is torch.uint8:
        pytest.skip("torch refuses it")
    actual, eager = onepass.fuse(lambda a, b: function(a, b))(*args), function(*args)
    assert actual.dtype == eager.dtype and torch.equal(actual, eager)


@pytest.mark.parametrize("name", ["shl", "shr"])
def test_out_of_range_counts_never_reach_a_shift(name: str) -> None:
    """A kernel's result would be undefined, whatever the interpreter's is."""
    a, b = grid(torch.int32)
    program = capture(lambda a, b: a << b if name == "shl" else a >> b, (a, b)).program
    (shift,) = [n for n in program.nodes if isinstance(n, Op) and n.name == name]
    count = program.nodes[shift.args[1]]
    assert isinstance(count, Op) and count.name == "where"


# ---- special functions of few arguments -----------------------------------------------------------------------------------------

WITH_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "xlogy(2, x)": lambda x: torch.xlogy(2.0, x),
    "xlogy(x, 2)": lambda x: torch.xlogy(x, 2.0),
    "frac": torch.frac,
    "copysign(x, -1)": lambda x: torch.copysign(x, -1.0),
    "copysign(x, -0)": lambda x: torch.copysign(x, -0.0),
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
    "log10": torch.log10,
    "softplus": torch.nn.functional.softplus,
    "mish": torch.nn.functional.mish,
    "silu": torch.nn.functional.silu,
    "logaddexp": lambda x: torch.logaddexp(x, x * 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_composite_functions(name: str, dtype: torch.dtype) -> None:
    function = WITH_NUMBERS[name]
    for x in (*special(dtype, 1), spread(OPS["exp"], dtype, 0)):
        assert judge(onepass.fuse(lambda x: function(x))(x), function(x), function(x.double())) is None


def test_the_sign_of_zeros_and_nans() -> None:
    x = torch.tensor([[0.0, -0.0, math.nan, -math.nan, -1.0, math.inf, -math.inf]])
    assert torch.equal(onepass.fuse(lambda x: torch.signbit(x))(x), torch.signbit(x))
    actual = onepass.fuse(lambda x: torch.copysign(torch.ones_like(x), x))(x)
    assert torch.equal(actual, torch.copysign(torch.ones_like(x), x))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["atan", "asinh", "erfc", "atan2", "copysign", "fmax", "fmin", "signbit", "hypot"])
def test_other_types_are_as_eager_or_refused(name: str, dtype: torch.dtype) -> None:
    function, x = getattr(torch, name), torch.tensor([[1, 0, 1, 1, 0]]).to(dtype)
    args = (x, x.flip(1)) if name in ("atan2", "copysign", "fmax", "fmin", "hypot") else (x,)
    try:
        expected = function(*args)
    except NotImplementedError:
        with pytest.raises(OnepassError, match="ONEPASS-101"):
            onepass.fuse(lambda *a: function(*a))(*args)
        return
    torch.testing.assert_close(onepass.fuse(lambda *a: function(*a))(*args), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_images(reduction: str) -> None:
    """Classes along the second of four dims, with ignored targets, weights, and the gradient."""

    def loss(x: Tensor, at: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x, at, weight, ignore_index=2, reduction=reduction)

    def make(seed: int) -> list[Tensor]:
        at = torch.randint(0, 7, (3, 5, 9), generator=torch.Generator().manual_seed(seed))
        return [randoms(seed, (3, 7, 5, 9)), at, randoms(seed + 50, (7,)).abs() + 0.1]

    assert_right(onepass.fuse(loss), loss, make)
    if reduction != "none":
        gradient = torch.func.grad(loss)
        actual = onepass.fuse(lambda x, at, weight: torch.func.grad(loss)(x, at, weight))(*make(0))
        torch.testing.assert_close(actual, gradient(*make(0)))


# ---- torch's own functions ------------------------------------------------------------------------------------------------------

DIRECTLY: dict[str, tuple[Callable[..., Tensor], tuple[object, ...], dict[str, object]]] = {
    "gelu": (torch.nn.functional.gelu, (), {}),
    "gelu by name": (torch.nn.functional.gelu, (), {"approximate": "tanh"}),
    "softmax": (torch.softmax, (-1,), {}),
    "softmax by name": (torch.softmax, (), {"dim": -1}),
    "softmax by two names": (torch.softmax, (), {"dtype": torch.float64, "dim": 0}),
    "sum": (torch.sum, (), {"dim": (0, 1)}),
    "exp": (torch.exp, (), {}),
    "layer_norm": (torch.layer_norm, ([37],), {}),
    "aten": (torch.ops.aten.exp.default, (), {}),
}


@pytest.mark.parametrize("name", DIRECTLY)
def test_functions_of_torch_are_fused_directly(name: str) -> None:
    """Including functions in C, which do not expose the names of their arguments."""
    function, more, named = DIRECTLY[name]
    x, fused = randoms(0, (5, 37)), onepass.fuse(function)
    for _ in range(2):
        torch.testing.assert_close(fused(x, *more, **named), function(x, *more, **named))


def test_keyword_values_are_distinguished() -> None:
    x, fused = randoms(0, (5, 37)), onepass.fuse(torch.softmax)
    for dim in (0, 1, 0):
        torch.testing.assert_close(fused(x, dim=dim), torch.softmax(x, dim=dim))
    assert fused._named.keys() == {("dim",)}


@pytest.mark.parametrize("function", [max, torch._C._get_default_device, torch.rand_like, torch.relu_])
def test_foreign_and_impure_c_functions_are_refused(function: Callable[..., Tensor]) -> None:
    with pytest.raises(OnepassError):
        onepass.fuse(function)(randoms(0, (5, 37)))
