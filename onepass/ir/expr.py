"""Scalar types and the table of elementwise ops.

Each row of OPS holds everything the compiler knows of one op: arity, argument and result types, torch reference (for the oracle),
kernel text (shared by Triton and Gluon), what the interpreter computes for it, and cost. No other module lists ops by such facts.
To add an op, add a row here, and the aten ops that it serves in `capture/lowering/pointwise.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class DType:
    """A scalar type: its size in bytes as stored, and its names in torch and in kernels."""

    name: str
    size: int
    kind: str  # "bool" | "int" | "float"
    torch_name: str
    kernel: str  # the name after `tl.`

    @property
    def torch(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.torch_name)
        return found

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_float8(self) -> bool:
        return self.kind == "float" and self.size == 1

    @property
    def is_narrow_float(self) -> bool:
        """Whether this is a 16- or 8-bit float. These are computed in fp32."""
        return self.kind == "float" and self.size < 4

    def __str__(self) -> str:
        return self.name


DTYPES = {
    d.name: d
    for d in (
        DType("bool", 1, "bool", "bool", "int1"),
        DType("i8", 1, "int", "int8", "int8"),
        DType("u8", 1, "int", "uint8", "uint8"),
        DType("i16", 2, "int", "int16", "int16"),
        DType("i32", 4, "int", "int32", "int32"),
        DType("i64", 8, "int", "int64", "int64"),
        DType("f8e4m3", 1, "float", "float8_e4m3fn", "float8e4nv"),
        DType("f8e5m2", 1, "float", "float8_e5m2", "float8e5"),
        DType("f16", 2, "float", "float16", "float16"),
        DType("bf16", 2, "float", "bfloat16", "bfloat16"),
        DType("f32", 4, "float", "float32", "float32"),
        DType("f64", 8, "float", "float64", "float64"),
    )
}
BOOL, I32, I64, BF16, F32, F64 = (DTYPES[n] for n in ("bool", "i32", "i64", "bf16", "f32", "f64"))
BY_TORCH = {d.torch: d for d in DTYPES.values()}


def compute_dtype(dtype: DType) -> DType:
    """The type that arithmetic on values of `dtype` uses: fp32 for 16- and 8-bit floats, otherwise `dtype` itself."""
    return F32 if dtype.is_narrow_float else dtype


def min_value(dtype: DType) -> float | int:
    """The lowest value of a type (-inf for floats)."""
    if dtype.is_float:
        return -math.inf
    return 0 if dtype.name in ("u8", "bool") else -(1 << (8 * dtype.size - 1))


def max_value(dtype: DType) -> float | int:
    """The highest value of a type (inf for floats)."""
    if dtype.is_float:
        return math.inf
    return {"u8": 255, "bool": 1}.get(dtype.name, (1 << (8 * dtype.size - 1)) - 1)


def as_dtype(value: float | int | bool, dtype: DType) -> float | int | bool:
    """Convert a Python number to a type's value. Integers wrap around, as on the GPU. NaN is always the object math.nan."""
    if dtype.is_float:
        return _as_float(float(value), dtype)
    if dtype is BOOL:
        return bool(value)
    low = int(min_value(dtype))
    return (int(value) - low) % (1 << 8 * dtype.size) + low


_F32_NORMAL = (2.0**-126, (2 - 2.0**-23) * 2.0**127)  # the range in which Triton treats a literal as float32


def _as_float(value: float, dtype: DType) -> float:
    """Round float32 values outside the normal range. All others round the same way later, and stay readable in kernel text."""
    if math.isnan(value):
        return math.nan
    if dtype.name == "f32" and value and not _F32_NORMAL[0] <= abs(value) <= _F32_NORMAL[1]:
        return float(torch.tensor(value, dtype=torch.float32))
    return value


def can_fill(value: float | int | bool, dtype: DType) -> bool:
    """Whether torch accepts a number as fill value for a type.

    Negative numbers wrap around in unsigned types. Numbers too large for a narrow float become inf.
    """
    if dtype is BOOL:
        return True
    if dtype.is_float:
        limit = torch.finfo(torch.float64 if dtype.is_narrow_float else dtype.torch).max
        return not math.isfinite(value) or abs(value) <= limit
    wraps = dtype.name == "u8" and isinstance(value, int)
    return (-max_value(dtype) if wraps else min_value(dtype)) <= value <= max_value(dtype)


class ResultKind(Enum):
    """How an op's result type follows from its arguments."""

    SAME = "the common type of the arguments"
    BOOL = "bool"
    LAST = "the type of the last argument; the first is a bool (where: cond, a, b)"
    CAST = "the dtype of the node"


class Takes(Enum):
    """Which types an op or a reduction takes: the kinds, and what to say of others. 16- and 8-bit floats are cast to fp32 first."""

    FLOATS = (("float",), "only floats")
    INTEGERS = (("int",), "only integers")
    BITS = (("bool", "int"), "only bool and integers")
    NUMBERS = (("int", "float"), "bool is cast to an integer first")
    ANY = (("bool", "int", "float"), "")

    def accepts(self, dtype: DType) -> bool:
        """Whether values may have this type."""
        return dtype.kind in self.value[0]

    def error(self, dtype: DType) -> str:
        """What is wrong with a type; empty if it is accepted."""
        return "" if self.accepts(dtype) else self.value[1]


Interpreted = Callable[..., Any]  # a function of numpy arrays


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One row of the op table."""

    name: str
    arity: int
    reference: Callable[..., torch.Tensor]
    text: str  # kernel text: {0}.. are arguments, {L} is tl or gl, {T} is the compute type of the result
    takes: Takes
    result_kind: ResultKind = ResultKind.SAME
    issue_slots: float = 1.0  # issue slots per element
    mufu: float = 0.0  # special-function operations per element
    exact: str = ""  # kernel text for full fp32 accuracy, if `text` is only accurate enough for 16-bit results
    libdevice: Mapping[str, Interpreted] = field(default_factory=dict)  # what the interpreter computes for functions the texts call
    discontinuous: bool = False  # whether a difference in an argument's last bit may change the result by any amount
    helper: str = ""  # the function of codegen's table of helpers that `text` calls
    takes_literals: bool = True  # whether `text` accepts bare numbers as arguments
    compares: bool = False  # whether it is an order or equality of two numbers
    divides: bool = False  # whether it is undefined where the last argument is 0


def _row(name: str, arity: int, reference: Callable[..., torch.Tensor], text: str, takes: Takes, **more: Any) -> OpSpec:
    return OpSpec(name, arity, reference, text, takes, **more)


def _compare(name: str, reference: Callable[..., torch.Tensor], sign: str) -> OpSpec:
    return _row(
        name, 2, reference, f"{{0}} {sign} {{1}}", Takes.ANY, result_kind=ResultKind.BOOL, discontinuous=True, compares=True
    )


def _function(
    name: str, arity: int, reference: Callable[..., torch.Tensor], interpreted: Interpreted, issue_slots: float, **more: Any
) -> OpSpec:
    """A function of floats that libdevice has by the same name."""
    text = f"libdevice.{name}({', '.join(f'{{{k}}}' for k in range(arity))})"
    return _row(
        name,
        arity,
        reference,
        text,
        Takes.FLOATS,
        issue_slots=issue_slots,
        libdevice={name: interpreted},
        takes_literals=arity == 1,
        **more,
    )


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The truncated integer quotient. A divisor of -1 negates instead: on a CPU, INT_MIN / -1 crashes the process."""
    if b.dtype == torch.uint8:
        return torch.div(a, b, rounding_mode="trunc")
    flips = b == -1
    return torch.where(flips, -a, torch.div(a, torch.where(flips, 1, b), rounding_mode="trunc"))


_NAN = "propagate_nan=tl.PropagateNan.ALL"  # Triton and Gluon use the same name


def _table(*rows: OpSpec) -> dict[str, OpSpec]:
    """The rows by name. Every libdevice function that a text calls is given to the interpreter by one row."""
    table = {row.name: row for row in rows}
    given = [name for row in rows for name in row.libdevice]
    called = {name for row in rows for name in re.findall(r"libdevice\.(\w+)", row.text + row.exact)}
    if len(table) != len(rows) or len({*given}) != len(given):
        raise ValueError("the op table has a name twice")
    if {*given} != called:
        raise ValueError(f"functions of the op table that are not both called and interpreted: {called ^ {*given}}")
    return table


OPS = _table(
    _row("add", 2, torch.add, "{0} + {1}", Takes.NUMBERS),
    _row("sub", 2, torch.sub, "{0} - {1}", Takes.NUMBERS),
    _row("mul", 2, torch.mul, "{0} * {1}", Takes.NUMBERS),
    _row(
        "div",
        2,
        torch.true_divide,
        "{0} / {1}",
        Takes.FLOATS,
        issue_slots=4,
        mufu=1,
        exact="libdevice.div_rn({0}, {1})",
        libdevice={"div_rn": np.divide},
    ),
    _row("fma", 3, lambda a, b, c: a * b + c, "{0} * {1} + {2}", Takes.NUMBERS),
    _row("neg", 1, torch.neg, "-{0}", Takes.NUMBERS),
    _row("abs", 1, torch.abs, "{L}.abs({0})", Takes.NUMBERS),
    _row(
        "reciprocal",
        1,
        torch.reciprocal,
        "1.0 / {0}",
        Takes.FLOATS,
        issue_slots=4,
        mufu=1,
        exact="libdevice.rcp_rn({0})",
        libdevice={"rcp_rn": np.reciprocal},
    ),
    _row("sqrt", 1, torch.sqrt, "libdevice.sqrt_rn({0})", Takes.FLOATS, issue_slots=6, mufu=1, libdevice={"sqrt_rn": np.sqrt}),
    _row("rsqrt", 1, torch.rsqrt, "{L}.rsqrt({0})", Takes.FLOATS, issue_slots=2, mufu=1),
    _row(
        "exp",
        1,
        torch.exp,
        "fast_exp({0})",
        Takes.FLOATS,
        helper="fast_exp",
        issue_slots=2,
        mufu=1,
        exact="libdevice.exp({0})",
        libdevice={"exp": np.exp},
    ),
    _row(
        "exp2",
        1,
        torch.exp2,
        "{L}.exp2({0})",
        Takes.FLOATS,
        issue_slots=1,
        mufu=1,
        exact="libdevice.exp2({0})",
        libdevice={"exp2": np.exp2},
    ),
    _row("expm1", 1, torch.expm1, "libdevice.expm1({0})", Takes.FLOATS, issue_slots=12, mufu=1, libdevice={"expm1": np.expm1}),
    _row("log", 1, torch.log, "libdevice.log({0})", Takes.FLOATS, issue_slots=12, mufu=1, libdevice={"log": np.log}),
    _row("log2", 1, torch.log2, "libdevice.log2({0})", Takes.FLOATS, issue_slots=12, mufu=1, libdevice={"log2": np.log2}),
    _row("log1p", 1, torch.log1p, "libdevice.log1p({0})", Takes.FLOATS, issue_slots=12, mufu=1, libdevice={"log1p": np.log1p}),
    _row("sin", 1, torch.sin, "{L}.sin({0})", Takes.FLOATS, issue_slots=16),
    _row("cos", 1, torch.cos, "{L}.cos({0})", Takes.FLOATS, issue_slots=16),
    _row(
        "tanh",
        1,
        torch.tanh,
        "fast_tanh({0})",
        Takes.FLOATS,
        helper="fast_tanh",
        issue_slots=10,
        mufu=2,
        exact="libdevice.tanh({0})",
        libdevice={"tanh": np.tanh},
    ),
    _row(
        "sigmoid",
        1,
        torch.sigmoid,
        "fast_sigmoid({0})",
        Takes.FLOATS,
        helper="fast_sigmoid",
        issue_slots=5,
        mufu=2,
        exact="libdevice.rcp_rn(1.0 + libdevice.exp(-{0}))",
    ),
    _row("erf", 1, torch.erf, "fast_erf({0})", Takes.FLOATS, helper="fast_erf", issue_slots=18, mufu=2, exact="{L}.erf({0})"),
    _function("erfc", 1, torch.erfc, np.vectorize(math.erfc, otypes=[np.float64]), issue_slots=30, mufu=1),
    _function("tan", 1, torch.tan, np.tan, issue_slots=30),
    _function("asin", 1, torch.asin, np.arcsin, issue_slots=25, mufu=1),
    _function("acos", 1, torch.acos, np.arccos, issue_slots=25, mufu=1),
    _function("atan", 1, torch.atan, np.arctan, issue_slots=25),
    _function("sinh", 1, torch.sinh, np.sinh, issue_slots=25, mufu=2),
    _function("cosh", 1, torch.cosh, np.cosh, issue_slots=12, mufu=2),
    _function("asinh", 1, torch.asinh, np.arcsinh, issue_slots=30, mufu=2),
    _function("acosh", 1, torch.acosh, np.arccosh, issue_slots=30, mufu=2),
    _function("atanh", 1, torch.atanh, np.arctanh, issue_slots=30, mufu=1),
    _function("atan2", 2, torch.atan2, np.arctan2, issue_slots=35, mufu=1, discontinuous=True),  # where the first changes its sign
    _function("hypot", 2, torch.hypot, np.hypot, issue_slots=20, mufu=1),
    _function("copysign", 2, torch.copysign, np.copysign, issue_slots=1, discontinuous=True),
    _row("floor", 1, torch.floor, "{L}.floor({0})", Takes.FLOATS, discontinuous=True),
    _row("ceil", 1, torch.ceil, "{L}.ceil({0})", Takes.FLOATS, discontinuous=True),
    _row("trunc", 1, torch.trunc, "libdevice.trunc({0})", Takes.FLOATS, discontinuous=True, libdevice={"trunc": np.trunc}),
    _row("round", 1, torch.round, "libdevice.rint({0})", Takes.FLOATS, discontinuous=True, libdevice={"rint": np.rint}),
    _row(
        "pow",
        2,
        torch.pow,
        "libdevice.pow({0}, {1})",
        Takes.FLOATS,
        issue_slots=30,
        mufu=2,
        takes_literals=False,
        libdevice={"pow": np.power},
    ),
    _row("maximum", 2, torch.maximum, f"{{L}}.maximum({{0}}, {{1}}, {_NAN})", Takes.NUMBERS, takes_literals=False),
    _row("minimum", 2, torch.minimum, f"{{L}}.minimum({{0}}, {{1}}, {_NAN})", Takes.NUMBERS, takes_literals=False),
    _row("fmax", 2, torch.fmax, "{L}.maximum({0}, {1})", Takes.NUMBERS, takes_literals=False),  # of NaN and a number, the number
    _row("fmin", 2, torch.fmin, "{L}.minimum({0}, {1})", Takes.NUMBERS, takes_literals=False),
    _row("rem", 2, torch.fmod, "{0} % {1}", Takes.INTEGERS, issue_slots=20, divides=True),
    _row(
        "fmod",
        2,
        torch.fmod,
        "libdevice.fmod({0}, {1})",
        Takes.FLOATS,
        issue_slots=40,
        discontinuous=True,
        libdevice={"fmod": np.fmod},
    ),
    _row("floordiv", 2, _quotient, "{0} // {1}", Takes.INTEGERS, issue_slots=20, divides=True),
    _row("and", 2, torch.bitwise_and, "{0} & {1}", Takes.BITS),
    _row("or", 2, torch.bitwise_or, "{0} | {1}", Takes.BITS),
    _row("xor", 2, torch.bitwise_xor, "{0} ^ {1}", Takes.BITS),
    _row("not", 1, torch.bitwise_not, "~{0}", Takes.BITS),
    _row("shl", 2, torch.bitwise_left_shift, "{0} << {1}", Takes.INTEGERS),
    _row("shr", 2, torch.bitwise_right_shift, "{0} >> {1}", Takes.INTEGERS),
    _compare("eq", torch.eq, "=="),
    _compare("ne", torch.ne, "!="),
    _compare("lt", torch.lt, "<"),
    _compare("le", torch.le, "<="),
    _compare("gt", torch.gt, ">"),
    _compare("ge", torch.ge, ">="),
    _row("isnan", 1, torch.isnan, "{0} != {0}", Takes.ANY, result_kind=ResultKind.BOOL),
    _row("where", 3, torch.where, "{L}.where({0}, {1}, {2})", Takes.ANY, result_kind=ResultKind.LAST, takes_literals=False),
    _row("cast", 1, lambda a: a, "{0}.to({T})", Takes.ANY, result_kind=ResultKind.CAST),
)
# `rem` and `floordiv` are for integers and truncate toward zero, as the hardware and Triton do. Capture builds Python's flooring
# versions from them and guards against a zero divisor, which is undefined behavior in the compiler. `fmod` is the exact remainder
# of floats; `%` is not. The kernel text of `shl` and `shr` is undefined for counts that are negative or not below the type's
# width: capture guards against them. `shr` keeps the sign of a signed type.


def result_dtype(spec: OpSpec, args: tuple[DType, ...], named: DType | None = None) -> DType:
    """The result type of an op. Argument types must already agree (capture inserts casts). `named` is the target type of a cast."""
    match spec.result_kind:
        case ResultKind.BOOL:
            return BOOL
        case ResultKind.CAST:
            if named is None:
                raise ValueError("a cast needs a target dtype")
            return named
        case ResultKind.LAST | ResultKind.SAME:
            return args[-1]
