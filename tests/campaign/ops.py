"""The ops of random graphs: each draws a line of text for the values it finds. A new op is one more row."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .graph import NAMES


class Values(Protocol):
    """What a row may use of the graph under construction."""

    rng: random.Random

    def tensor(self, accept: Callable[[torch.Tensor], bool] = ...) -> int: ...
    def like(self, at: int) -> int: ...
    def integer_index(self, extent: int) -> int: ...
    def value(self, at: int) -> Any: ...


@dataclass(frozen=True)
class Row:
    """An op: `draw` gives its text and arguments, or raises `Unfit` if no value fits."""

    name: str
    draw: Callable[[Values], tuple[str, tuple[int, ...]]]
    weight: float = 1.0


class Unfit(Exception):
    """No value of the graph fits an op."""


ROWS: dict[str, Row] = {}


def row(name: str, weight: float = 1.0) -> Callable[[Callable[[Values], tuple[str, tuple[int, ...]]]], None]:
    """Register a row."""

    def add(draw: Callable[[Values], tuple[str, tuple[int, ...]]]) -> None:
        ROWS[name] = Row(name, draw, weight)

    return add


def any_tensor(t: torch.Tensor) -> bool:
    return True


def is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point()


def is_whole(t: torch.Tensor) -> bool:
    return not t.is_floating_point()


def has_dims(t: torch.Tensor) -> bool:
    return t.dim() > 0


def overlaps(t: torch.Tensor) -> bool:
    """Whether elements share memory in a way that torch does not detect: eager's slice_scatter then changes other elements too."""
    return 0 not in t.stride() and t.numel() * t.element_size() > t.untyped_storage().nbytes()


def dims_of(v: Values, t: torch.Tensor) -> list[int]:
    """Some dims, in any order and sign; at least one."""
    if not t.dim():
        return []
    chosen = v.rng.sample(range(t.dim()), v.rng.randint(1, t.dim()))
    return [d - t.dim() if v.rng.random() < 0.3 else d for d in chosen]


def dim_of(v: Values, t: torch.Tensor) -> int:
    if not t.dim():
        raise Unfit
    return v.rng.randrange(-t.dim(), t.dim())


def number(v: Values, t: torch.Tensor) -> str:
    """A literal, sometimes one that the tensor's type cannot represent."""
    if v.rng.random() < 0.1:
        return v.rng.choice(["-0.0", "float('inf')", "float('nan')", "1e-40", "300", "-129", "2**40", "True"])
    if t.is_floating_point() or v.rng.random() < 0.2:
        return v.rng.choice(["0.1", "-1.25", "2.0", "3", "0.5", "-1", "0.0", "1e4"])
    return v.rng.choice(["1", "2", "3", "-1", "0", "7"])


# ---- one element at a time ------------------------------------------------------------------------------------------------------

for _name in (
    "neg",
    "abs",
    "sign",
    "sgn",
    "square",
    "positive",
    "relu",
    "isfinite",
    "isnan",
    "isinf",
    "logical_not",
    "floor",
    "ceil",
    "trunc",
    "round",
):

    def _unary(v: Values, name: str = _name) -> tuple[str, tuple[int, ...]]:
        return f"torch.{name}({{0}})", (v.tensor(),)

    row(_name)(_unary)

for _name in (
    "exp",
    "exp2",
    "expm1",
    "tanh",
    "sigmoid",
    "sin",
    "cos",
    "erf",
    "erfc",
    "atan",
    "asinh",
    "sinh",
    "cosh",
    "reciprocal",
):

    def _smooth(v: Values, name: str = _name) -> tuple[str, tuple[int, ...]]:
        return f"torch.{name}({{0}})", (v.tensor(),)

    row(_name)(_smooth)

for _name in ("asin", "acos", "atanh", "tan"):

    def _bounded(v: Values, name: str = _name) -> tuple[str, tuple[int, ...]]:
        inner = "{0}" if v.rng.random() < 0.3 else "(0.9 * torch.tanh({0}))"  # away from poles and the ends of the domain
        return f"torch.{name}({inner})", (v.tensor(),)

    row(_name, 0.3)(_bounded)

for _name in ("sqrt", "rsqrt", "acosh", "log", "log2", "log10", "log1p"):

    def _positive(v: Values, name: str = _name) -> tuple[str, tuple[int, ...]]:
        inner = "{0}" if v.rng.random() < 0.3 else "({0}.abs() + 0.5)"
        return f"torch.{name}({inner})", (v.tensor(),)

    row(_name)(_positive)

for _name in (
    "silu",
    "gelu",
    "softplus",
    "leaky_relu",
    "elu",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "relu6",
    "mish",
    "logsigmoid",
):

    def _activation(v: Values, name: str = _name) -> tuple[str, tuple[int, ...]]:
        more = ", approximate='tanh'" if name == "gelu" and v.rng.random() < 0.5 else ""
        return f"F.{name}({{0}}{more})", (v.tensor(is_float),)

    row(_name, 0.3)(_activation)

for _name in (
    "add",
    "sub",
    "mul",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "true_divide",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_xor",
    "atan2",
    "hypot",
    "logaddexp",
):

    def _binary(v: Values, name: str = _name) -> tuple[str, tuple[int, ...]]:
        a = v.tensor()
        pair = (a, v.like(a))
        return f"torch.{name}({{0}}, {{1}})", pair if v.rng.random() < 0.5 else pair[::-1]

    row(_name, 0.3 if _name in ("atan2", "hypot", "fmax", "fmin") else 1.5)(_binary)

for _name in (
    "add",
    "sub",
    "mul",
    "true_divide",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "rsub",
    "remainder",
    "fmod",
    "floor_divide",
    "clamp_min",
    "clamp_max",
):

    def _scalar(v: Values, name: str = _name) -> tuple[str, tuple[int, ...]]:
        a = v.tensor()
        return f"torch.{name}({{0}}, {number(v, v.value(a))})", (a,)

    row(f"{_name} scalar", 0.7)(_scalar)

for _name in ("remainder", "fmod", "floor_divide"):

    def _modulo(v: Values, name: str = _name) -> tuple[str, tuple[int, ...]]:
        a = v.tensor()
        b = v.like(a)
        safe = "{1}" if v.value(b).is_floating_point() else "torch.where({1} == 0, 1, {1})"
        return f"torch.{name}({{0}}, {safe})", (a, b)

    row(_name, 0.7)(_modulo)


@row("signs", 0.3)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    """Only of numbers: the sign of a NaN is unspecified."""
    a = v.tensor()
    b = v.like(a)
    return v.rng.choice(["torch.signbit(torch.nan_to_num({1}))", "torch.copysign({0}, torch.nan_to_num({1}))"]), (a, b)


@row("div rounded", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor()
    b = v.like(a)
    safe = "{1}" if v.value(b).is_floating_point() else "torch.where({1} == 0, 1, {1})"
    return f"torch.div({{0}}, {safe}, rounding_mode={v.rng.choice(['None', repr('trunc'), repr('floor')])})", (a, b)


for _name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"):

    def _bits(v: Values, name: str = _name) -> tuple[str, tuple[int, ...]]:
        a = v.tensor(is_whole)
        b = v.like(a)
        if v.value(b).is_floating_point():
            raise Unfit
        return f"torch.{name}({{0}}, {{1}})", (a, b)

    row(_name, 0.5)(_bits)


@row("pow of integers", 0.3)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(is_whole)
    b = v.like(a)
    if v.value(b).is_floating_point():
        raise Unfit
    return v.rng.choice(["torch.pow({0}, {1})", "{0} ** 11", "2 ** {1}"]), (a, b)


@row("bitwise_not", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    return "~{0}", (v.tensor(is_whole),)


@row("add alpha", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor()
    return f"torch.{v.rng.choice(['add', 'sub'])}({{0}}, {{1}}, alpha={v.rng.choice(['2', '-1', '3', '0.5'])})", (a, v.like(a))


@row("pow")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor()
    return f"{{0}} ** {v.rng.choice(['2', '3', '0.5', '-1', '0', '1', '2.0', '-0.5', '4'])}", (a,)


@row("where", 2)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor()
    b, c = v.like(a), v.like(a)
    if v.rng.random() < 0.3:
        return f"torch.where({{0}} > 0, {{1}}, {number(v, v.value(b))})", (a, b)
    return "torch.where({0} > 0, {1}, {2})", (a, b, c)


@row("masked_fill")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor()
    return f"{{0}}.masked_fill({{1}} > 0, {number(v, v.value(a))})", (a, v.like(a))


@row("clamp")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    bounds = v.rng.choice(["-1, 1", "min=0", "max=2", "-0.5, 0.5", "2, 1", "min=-300"])
    return f"torch.clamp({{0}}, {bounds})", (v.tensor(),)


@row("clamp tensors", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor()
    return "torch.clamp({0}, {1}, {2})", (a, v.like(a), v.like(a))


@row("addcmul", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(is_float)
    return f"torch.{v.rng.choice(['addcmul', 'addcdiv'])}({{0}}, {{1}}, {{2}}, value={v.rng.choice(['0.5', '-2', '1'])})", (
        a,
        v.like(a),
        v.like(a),
    )


@row("lerp", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(is_float)
    return "torch.lerp({0}, {1}, 0.3)", (a, v.like(a))


@row("nan_to_num", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    return f"torch.nan_to_num({{0}}{v.rng.choice(['', ', 1.0', ', 1.0, 2.0, 3.0'])})", (v.tensor(),)


@row("to", 3)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor()
    to_float = v.rng.random() < 0.7
    if to_float or not v.value(a).is_floating_point():
        pool = ["f32", "bf16", "f16", "f64", "e4m3", "e5m2"] if to_float else ["i64", "i32", "i8", "u8", "i16", "bool"]
        return f"{{0}}.to({v.rng.choice(pool)})", (a,)
    return f"torch.nan_to_num({{0}}, 0.0, 1.0, -1.0).clamp(-100, 100).to({v.rng.choice(['i64', 'i32', 'i16', 'i8', 'bool'])})", (a,)


@row("view dtype", 0.2)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    """Only of integers: the float64 reference of a float has other bits."""
    pairs = {torch.int32: "u32", torch.int8: "u8", torch.uint8: "i8", torch.int16: "u16", torch.int64: "i64"}
    a = v.tensor(lambda t: t.dtype in pairs)
    return f"{{0}}.view({pairs[v.value(a).dtype]})", (a,)


# ---- reductions ---------------------------------------------------------------------------------------------------------------

for _name in ("sum", "mean", "amax", "amin", "any", "all", "nansum"):

    def _reduce(v: Values, name: str = _name) -> tuple[str, tuple[int, ...]]:
        a = v.tensor(is_float if name == "mean" else any_tensor)
        dims = dims_of(v, v.value(a))
        if not dims or v.rng.random() < 0.15:
            return f"torch.{name}({{0}})", (a,)
        return f"torch.{name}({{0}}, {tuple(dims)}, keepdim={v.rng.random() < 0.5})", (a,)

    row(_name, 3 if _name == "sum" else 1.2)(_reduce)


@row("sum dtype", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(has_dims)
    dtype = v.rng.choice(["f32", "f64", "bf16"])
    return f"torch.{v.rng.choice(['sum', 'mean'])}({{0}}, {dim_of(v, v.value(a))}, dtype={dtype})", (a,)


for _name in ("argmax", "argmin", "prod"):

    def _one_dim(v: Values, name: str = _name) -> tuple[str, tuple[int, ...]]:
        a = v.tensor()
        if v.rng.random() < 0.2 or not v.value(a).dim():
            return f"torch.{name}({{0}})", (a,)
        return f"torch.{name}({{0}}, {dim_of(v, v.value(a))}, keepdim={v.rng.random() < 0.5})", (a,)

    row(_name)(_one_dim)


@row("max dim")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(has_dims)
    text = f"torch.{v.rng.choice(['max', 'min'])}({{0}}, {dim_of(v, v.value(a))}, keepdim={v.rng.random() < 0.5})"
    return f"{text}[{v.rng.randrange(2)}]", (a,)


@row("var", 1.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(is_float)
    dims = dims_of(v, v.value(a))
    where = f"dim={tuple(dims)}, " if dims and v.rng.random() < 0.9 else ""
    name = v.rng.choice(["var", "std", "var_mean", "std_mean"])
    text = f"torch.{name}({{0}}, {where}correction={v.rng.choice([0, 1, 1, 2])}, keepdim={bool(where) and v.rng.random() < 0.5})"
    return (f"{text}[{v.rng.randrange(2)}]" if "mean" in name else text), (a,)


@row("logsumexp")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: is_float(t) and has_dims(t))
    return f"torch.logsumexp({{0}}, {tuple(dims_of(v, v.value(a)))}, keepdim={v.rng.random() < 0.5})", (a,)


@row("norm")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: is_float(t) and has_dims(t))
    order = v.rng.choice(["2", "1", "float('inf')", "0", "3"])
    return f"torch.linalg.vector_norm({{0}}, {order}, dim={tuple(dims_of(v, v.value(a)))}, keepdim={v.rng.random() < 0.5})", (a,)


@row("softmax", 2)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: is_float(t) and has_dims(t))
    dtype = v.rng.choice(["", "", ", dtype=f32"])
    return f"F.{v.rng.choice(['softmax', 'log_softmax', 'softmin'])}({{0}}, {dim_of(v, v.value(a))}{dtype})", (a,)


@row("layer_norm", 2)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: is_float(t) and has_dims(t))
    tail = tuple(v.value(a).shape[-v.rng.randint(1, v.value(a).dim()) :])
    name = v.rng.choice(["layer_norm", "rms_norm"])  # the default eps of rms_norm follows from the type
    return f"F.{name}({{0}}, {tail}, eps=1e-5)", (a,)


@row("group_norm", 0.6)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: is_float(t) and t.dim() >= 2 and t.shape[1] > 0)
    channels = v.value(a).shape[1]
    return f"F.group_norm({{0}}, {v.rng.choice([g for g in range(1, channels + 1) if channels % g == 0])})", (a,)


@row("normalize", 0.6)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: is_float(t) and has_dims(t))
    return f"F.normalize({{0}}, dim={dim_of(v, v.value(a))})", (a,)


@row("loss")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(is_float)
    name = v.rng.choice(["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div"])
    return f"F.{name}({{0}}, {{1}}.expand_as({{0}}), reduction={v.rng.choice(['mean', 'sum', 'none'])!r})", (a, v.like(a))


@row("cross_entropy")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: is_float(t) and t.dim() == 2 and t.shape[1] > 0)
    more = v.rng.choice(["", ", label_smoothing=0.1", ", ignore_index=0", ", reduction='none'", ", reduction='sum'"])
    index = f"(torch.arange({v.value(a).shape[0]}) * 7 % {v.value(a).shape[1]})"
    return f"F.cross_entropy({{0}}, {index}{more})", (a,)


# ---- views and moves ----------------------------------------------------------------------------------------------------------


@row("reshape", 1.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor()
    t = v.value(a)
    shape = list(t.shape)
    match v.rng.randrange(4):
        case 0:
            return "{0}.reshape(-1)", (a,)
        case 1 if len(shape) >= 2:
            at = v.rng.randrange(len(shape) - 1)
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        case _ if shape:
            at = v.rng.randrange(len(shape))
            factors = [f for f in range(1, shape[at] + 1) if shape[at] % f == 0] or [1]
            factor = v.rng.choice(factors)
            shape[at : at + 1] = [factor, shape[at] // factor]
    return f"{{0}}.reshape({tuple(shape)})", (a,)


@row("permute")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: t.dim() >= 2)
    order = list(range(v.value(a).dim()))
    v.rng.shuffle(order)
    return v.rng.choice([f"{{0}}.permute({tuple(order)})", f"{{0}}.transpose({order[0]}, {order[1]})"]), (a,)


@row("unsqueeze")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: t.dim() < 5)
    return f"{{0}}.unsqueeze({v.rng.randint(0, v.value(a).dim())})", (a,)


@row("squeeze", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(has_dims)
    return v.rng.choice(["{0}.squeeze()", f"{{0}}.squeeze({dim_of(v, v.value(a))})"]), (a,)


@row("expand")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: t.dim() < 4)
    shape = [v.rng.choice([2, 3]) if s == 1 and v.rng.random() < 0.7 else s for s in v.value(a).shape]
    return f"{{0}}.expand({tuple([v.rng.choice([1, 2, 3])] * (v.rng.random() < 0.5) + shape)})", (a,)


@row("slice", 2)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: has_dims(t) and t.numel() > 0)
    dim = v.rng.randrange(v.value(a).dim())
    extent = v.value(a).shape[dim]
    start, end = sorted((v.rng.randint(0, extent), v.rng.randint(0, extent)))
    step = v.rng.choice(["", "", "::2"[1:]])
    return f"{{0}}[{':, ' * dim}{start}:{v.rng.choice([end, '', extent + 3, -1])}{step}]", (a,)


@row("select")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: has_dims(t) and t.numel() > 0)
    dim = v.rng.randrange(v.value(a).dim())
    extent = v.value(a).shape[dim]
    return f"{{0}}.select({dim}, {v.rng.randrange(-extent, extent)})", (a,)


@row("split")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: has_dims(t) and t.numel() > 0)
    dim = v.rng.randrange(v.value(a).dim())
    return f"{{0}}.{v.rng.choice(['chunk', 'split'])}({v.rng.choice([1, 2, 3])}, {dim})[{v.rng.choice([0, -1])}]", (a,)


@row("flip or roll", 0.4)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(has_dims)
    dim = dim_of(v, v.value(a))
    return v.rng.choice([f"{{0}}.flip({dim})", f"{{0}}.roll(1, {dim})", f"{{0}}.repeat_interleave(2, {dim})"]), (a,)


@row("diagonal", 0.4)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: t.dim() >= 2)
    return v.rng.choice(["{0}.diagonal(0, -2, -1)", "{0}.tril()", "{0}.triu(1)", "{0}.tril(-1)"]), (a,)


@row("unfold", 0.3)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: has_dims(t) and t.shape[-1] >= 3)
    return "{0}.unfold(-1, 3, 2)", (a,)


@row("repeat", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: 0 < t.dim() < 4)
    return f"{{0}}.repeat({tuple(v.rng.choice([1, 1, 2]) for _ in v.value(a).shape)})", (a,)


@row("cat", 1.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(has_dims)
    b = v.tensor(lambda t: t.shape == v.value(a).shape)
    name = v.rng.choice(["cat", "cat", "stack"])
    return f"torch.{name}([{{0}}, {{1}}], {dim_of(v, v.value(a))})", (a, b)


@row("pad")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(has_dims)
    return f"F.pad({{0}}, {v.rng.choice(['(1, 2)', '(0, 1)', '(-1, 1)', '(2, 0)'])}, value={v.rng.choice(['0', '1', '-2'])})", (a,)


@row("clone", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    return v.rng.choice(["{0}.clone()", "{0}.contiguous()", "{0}.detach()", "{0}.view_as({0})"]), (v.tensor(),)


@row("filled")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor()
    return v.rng.choice(
        [
            "torch.zeros_like({0})",
            "torch.ones_like({0})",
            "torch.full_like({0}, 3)",
            "{0}.new_zeros({0}.shape)",
            "torch.full({0}.shape, 0.375)",
            "torch.tensor(0.375) * {0}",
            "{0}.new_ones(2, 3)",
            "torch.empty_like({0}).fill_(2)",
        ]
    ), (a,)


@row("arange")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(has_dims)
    return v.rng.choice(
        [
            "torch.arange({0}.shape[-1])",
            "torch.arange({0}.shape[0] - 1, -1, -1)",
            "torch.arange(1, 2 * {0}.shape[-1], 2)",
            "torch.arange({0}.shape[-1], dtype=f32)",
        ]
    ), (a,)


@row("gather", 1.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: has_dims(t) and t.numel() > 0)
    dim = v.rng.randrange(v.value(a).dim())
    i = v.integer_index(v.value(a).shape[dim])
    index = f"({{1}}.to(i64).abs() % {v.value(a).shape[dim]})"
    if v.value(i).dim() == v.value(a).dim() and v.rng.random() < 0.6:
        return f"{{0}}.gather({dim}, {index}{{clip}})".replace("{clip}", _clip(v, a, i, dim)), (a, i)
    return v.rng.choice([f"{{0}}.index_select({dim}, {index}.reshape(-1))", f"{{0}}[{':, ' * dim}{index}]"]), (a, i)


def _clip(v: Values, a: int, i: int, dim: int) -> str:
    """An index may not be longer than the tensor it indexes, except along `dim`."""
    pairs = zip(v.value(i).shape, v.value(a).shape, strict=True)
    return "[" + ", ".join(":" if k == dim else f":{min(own, other)}" for k, (own, other) in enumerate(pairs)) + "]"


@row("scatter", 0.7)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: has_dims(t) and t.numel() > 0)
    t = v.value(a)
    dim = v.rng.randrange(t.dim())
    index = f"torch.zeros({tuple(1 if k == dim else s for k, s in enumerate(t.shape))}, dtype=i64)"
    how = v.rng.choice(["scatter", "scatter", "scatter_add", "reduce"])
    if how == "reduce":
        return f"{{0}}.scatter({dim}, {index}, 2, reduce={v.rng.choice(['add', 'multiply'])!r})", (a,)
    value = "{0}.new_ones({0}.shape)" if how == "scatter_add" else v.rng.choice(["5", "0", "{0}.new_ones({0}.shape)"])
    return f"{{0}}.{how}({dim}, {index}, {value})", (a,)


@row("slice scatter")
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(lambda t: has_dims(t) and t.shape[0] > 1 and not overlaps(t))
    return v.rng.choice(
        [
            "torch.slice_scatter({0}, {0}[1:] * 2, 0, 1)",
            "torch.select_scatter({0}, {0}[0] + 1, 0, 1)",
            "torch.slice_scatter({0}, torch.zeros_like({0}[:1]), 0, 0, 1)",
        ]
    ), (a,)


@row("one hot", 0.5)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor(has_dims)
    return f"(torch.arange(5)[:, None] == ({{0}}.reshape(-1)[:4] > 0).to(i64)).to({NAMES[v.value(a).dtype]})", (a,)


@row("in place", 0.7)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    """On a local value of the function."""
    a = v.tensor(has_dims)
    return v.rng.choice(
        [
            "({0} + 0).add_(1)",
            "({0} + 0).mul_({0})",
            "({0} * 1).zero_()",
            "({0} + 0).copy_({0}.flip(0))",
            "({0} + 0).clamp_(-1, 1)",
            "({0} + 0).fill_(3)",
        ]
    ), (a,)


@row("foreach", 0.2)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    a = v.tensor()
    return v.rng.choice(["torch._foreach_add([{0}, {0}], 1)[0]", "torch._foreach_mul([{0}], 2)[0]"]), (a,)


@row("unsupported", 0.3)
def _(v: Values) -> tuple[str, tuple[int, ...]]:
    """Ops that onepass may refuse, with a code."""
    a = v.tensor(has_dims)
    return v.rng.choice(
        [
            "{0}.cumsum(0)",
            "{0}.sort(0)[0]",
            "{0}.flatten().topk(1)[0]",
            "torch.median({0})",
            "torch.cummax({0}, 0)[0]",
            "{0}.unique()",
            "{0}[{0} > 0]",
            "torch.count_nonzero({0})",
        ]
    ), (a,)
