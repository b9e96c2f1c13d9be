"""Correctness cases as data: functions as users write them, their inputs at any size, and the sizes and layouts to test.

Backward passes are traced through torch.func.vjp, so that the tested formulas are those of autograd; the
handwritten ones of the named workloads are here too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.tools.workloads import WORKLOADS, InputMaker, input_maker

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (1, 2, 13, 127, 768, 1000, 1027, 2304, 5120, 8472, 50257)
EPS = 1e-6
IGNORED = -100
GROUPS, CHANNELS = 2, 8  # four channels per group: a norm of only two values is all rounding
MIDDLE, HEADS = 6, 3  # the middle dim of [rows, middle, cols]; heads of qk-norm

Inputs = Callable[..., tuple[Tensor, ...]]  # (maker, rows, cols) -> arguments


@dataclass(frozen=True)
class Case:
    """A function, how its arguments are made from a number of rows and columns, and where it can be tested."""

    name: str
    function: Callable[..., Any]
    make: Inputs
    dtypes: tuple[torch.dtype, ...] = (BF16, F32)
    copies: int = 1  # elements of the largest argument, for each row and column
    multiple: int = 1  # of columns
    special: bool = False  # also test it on rows of infinities and NaNs?
    formula: Callable[..., Any] | None = None  # the reference for those rows if eager's own kernel differs

    def inputs(
        self, rows: int, cols: int, dtype: torch.dtype, device: "str | torch.device" = "cpu", seed: int = 0
    ) -> tuple[Tensor, ...]:
        """Arguments of the function; the same for the same seed and kind of device."""
        return self.make(input_maker(dtype, device, seed), rows, cols)

    def number(self) -> int:
        """A number that spreads cases evenly and never changes."""
        return zlib.crc32(self.name.encode())


def shapes(case: Case, most: int) -> list[tuple[int, int]]:
    """Every (rows, columns) of the list at which a case holds at most so many elements."""
    return [(rows, cols) for rows, cols in product(SIZES, SIZES) if rows * cols * case.copies <= most and cols % case.multiple == 0]


# ---- arguments -------------------------------------------------------------------------------------------------------------


def _data(count: int = 1, vectors: int = 0) -> Inputs:
    def inputs(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
        return (*(make.data(rows, cols) for _ in range(count)), *(make.vector(cols) for _ in range(vectors)))

    return inputs


def _cube(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
    return (make.data(rows, MIDDLE, cols),)


def _factors(shape: Callable[[int, int], tuple[int, ...]]) -> Inputs:
    """1 and -1, and about a hundred 2 and -1/2, so that products are exact in any order."""

    def inputs(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
        z = make.data(*shape(rows, cols)).float()
        far = float(torch.special.ndtri(torch.tensor(1 - min(0.25, 100 / max(1, z.numel())), dtype=torch.float64)))
        sizes = torch.where(z > far, 2.0, torch.where(z < -far, 0.5, 1.0))
        return (torch.where(z < 0, -sizes, sizes).to(make.dtype),)

    return inputs


def _image(gradient: bool) -> Inputs:
    def inputs(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
        data = tuple(make.data(rows, CHANNELS, cols) for _ in range(1 + gradient))
        return *data, make.vector(CHANNELS), make.vector(CHANNELS)

    return inputs


def _heads(count: int) -> Inputs:
    """[batch, tokens, heads, width] tensors, to be permuted by the function."""
    return lambda make, rows, cols: (*(make.data(2, rows, HEADS, cols) for _ in range(count)), make.vector(cols))


def _loss(gradient: str) -> Inputs:
    """Logits and classes; the incoming gradient is one number, one per row, or none."""

    def inputs(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
        incoming = {"none": (), "scalar": (make.data(1)[0],), "rows": (make.data(rows),)}[gradient]
        return *incoming, make.data(rows, cols), make.classes(rows, cols)

    return inputs


def _row_gradient(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
    return make.data(rows), make.data(rows, cols)


def _col_gradient(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
    return make.data(cols), make.data(rows, cols)


def _moment_gradients(make: InputMaker, rows: int, cols: int) -> tuple[Tensor, ...]:
    return make.data(CHANNELS), make.data(CHANNELS), make.data(rows, CHANNELS, cols)


# ---- functions -------------------------------------------------------------------------------------------------------------


def backward(function: Callable[..., Any], incoming: int = 1, fixed: int = 0) -> Callable[..., Any]:
    """(gradients, arguments) -> gradients of all arguments but the last `fixed`, through torch.func.vjp."""

    def gradients(*args: Tensor) -> Any:
        given, rest = args[:incoming], args[incoming:]
        free, held = rest[: len(rest) - fixed], rest[len(rest) - fixed :]
        _, pull = torch.func.vjp(lambda *xs: function(*xs, *held), *free)  # type: ignore[misc]
        return pull(given[0] if incoming == 1 else given)

    return gradients


def rms_norm(x: Tensor, w: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, EPS)


def rms_norm_formula(x: Tensor, w: Tensor | None = None) -> Tensor:
    """torch's own decomposition: an infinity becomes NaN and the rest of its row 0. CUDA's kernel makes the whole row NaN."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return normed if w is None else normed * w


def layer_norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


def added(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The residual stream and its norm."""
    return lambda x, r, *weights: (x + r, norm(x + r, *weights))


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, GROUPS, w, b, EPS)


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x, (0, 2), correction=0)


def cross_entropy(reduction: str, smoothing: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, target: F.cross_entropy(
        logits, target, None, ignore_index=IGNORED, reduction=reduction, label_smoothing=smoothing
    )


def qk_norm(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x.permute(0, 2, 1, 3), w)


def three_norms(x1: Tensor, x2: Tensor, x3: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return rms_norm(x1, w), rms_norm(x2, w), rms_norm(x3, w)


def _over(function: Callable[..., Any], dim: int) -> Callable[[Tensor], Any]:
    return lambda x: function(x, dim)


def moments(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.var(dim), x.std(dim), x.mean(dim), torch.var_mean(x, dim, correction=0)[0]


def both_ways(fold: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    return fold(x, -1), fold(x, 0)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda x, b: F.gelu(x + b),
    "gelu_tanh": lambda x, b: F.gelu(x + b, approximate="tanh"),
    "silu": lambda x, b: F.silu(x + b),
    "swiglu": lambda gate, up, b, c: F.silu(gate + b) * (up + c),
}


# ---- every reduction over every set of dims --------------------------------------------------------------------------------

Dims = tuple[int, ...] | None
DIMS: dict[str, Dims] = {"0": (0,), "1": (1,), "2": (2,), "01": (0, 1), "02": (0, 2), "12": (1, 2), "all": None}


def _one_by_one(fold: Callable[..., Tensor], x: Tensor, dims: Dims) -> Tensor:
    """For the reductions that take one dim or all."""
    if dims is None:
        return fold(x)
    for dim in sorted(dims, reverse=True):
        x = fold(x, dim)
    return x


REDUCTIONS: dict[str, Callable[[Tensor, Dims], Tensor]] = {
    "sum": lambda x, d: x.sum(d),
    "mean": lambda x, d: x.mean(d),
    "prod": partial(_one_by_one, torch.prod),
    "amax": lambda x, d: x.amax(d if d is not None else ()),
    "amin": lambda x, d: x.amin(d if d is not None else ()),
    "argmax": lambda x, d: x.argmax(d[0] if d else None),
    "argmin": lambda x, d: x.argmin(d[0] if d else None),
    "any": lambda x, d: torch.any(x > 3, d) if d else torch.any(x > 3),
    "all": lambda x, d: torch.all(x < 3, d) if d else torch.all(x < 3),
    "var": lambda x, d: x.var(d),
}
ONE_DIM_ONLY = ("argmax", "argmin")


def _reductions() -> Iterable[Case]:
    for (name, fold), (label, dims) in product(REDUCTIONS.items(), DIMS.items()):
        if name in ONE_DIM_ONLY and dims is not None and len(dims) > 1:
            continue
        make = _factors(lambda r, c: (r, MIDDLE, c)) if name == "prod" else _cube
        yield Case(f"{name}-{label}", partial(lambda f, d, x: f(x, d), fold, dims), make, copies=MIDDLE, special=name != "var")


# ---- all cases -------------------------------------------------------------------------------------------------------------


def _norms() -> Iterable[Case]:
    for name, norm, most in (("rms_norm", rms_norm, 1), ("layer_norm", layer_norm, 2)):
        for vectors in range(most + 1):
            label = name + ("", "-w", "-wb")[vectors]
            formula = rms_norm_formula if norm is rms_norm else None
            yield Case(label, norm, _data(1, vectors), special=True, formula=formula)
            yield Case(f"{label}-backward", backward(norm), _data(2, vectors))
        yield Case(f"add-{name}", added(norm), _data(2, most))
        yield Case(f"add-{name}-backward", backward(added(norm), incoming=2), _data(4, most))
    yield Case("group_norm", group_norm, _image(False), copies=CHANNELS)
    yield Case("group_norm-backward", backward(group_norm), _image(True), copies=CHANNELS)
    yield Case("batch_norm_stats", channel_moments, lambda make, r, c: (make.data(r, CHANNELS, c),), copies=CHANNELS)
    yield Case("batch_norm_stats-backward", backward(channel_moments, incoming=2), _moment_gradients, copies=CHANNELS)
    yield Case("qk_norm", qk_norm, _heads(1), copies=2 * HEADS)
    yield Case("qk_norm-backward", _qk_norm_backward, _heads(2), copies=2 * HEADS)
    yield Case("three_norms", three_norms, _data(3, 1))
    yield Case("three_norms-backward", backward(three_norms, incoming=3), _data(6, 1))
    yield Case("l2_normalize", lambda x: F.normalize(x, dim=-1), _data())
    yield Case("l2_normalize-backward", backward(lambda x: F.normalize(x, dim=-1)), _data(2))


def _qk_norm_backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return backward(qk_norm)(dy.permute(0, 2, 1, 3), x, w)


def _softmaxes() -> Iterable[Case]:
    for dim, label in ((-1, "last"), (0, "first")):
        for name, function in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
            over = _over(function, dim)
            yield Case(f"{name}-{label}", over, _data(), dtypes=(BF16, F16, F32), special=True)
            yield Case(f"{name}-{label}-backward", backward(over), _data(2), special=True)
        lse = _over(torch.logsumexp, dim)
        yield Case(f"logsumexp-{label}", lse, _data(), dtypes=(BF16, F16, F32), special=True)
        yield Case(f"logsumexp-{label}-backward", backward(lse), _row_gradient if dim == -1 else _col_gradient, special=True)
    for reduction, smoothing in product(("none", "mean", "sum"), (0.0, 0.1)):
        loss = cross_entropy(reduction, smoothing)
        label = f"cross_entropy-{reduction}" + ("-smoothed" if smoothing else "")
        yield Case(label, loss, _loss("none"))
        yield Case(f"{label}-backward", backward(loss, fixed=1), _loss("rows" if reduction == "none" else "scalar"))


def _others() -> Iterable[Case]:
    for name, function in ACTIVATIONS.items():
        data = 2 if name == "swiglu" else 1
        yield Case(f"{name}-bias", function, _data(data, data))
        yield Case(f"{name}-bias-backward", backward(function), _data(data + 1, data))
    for dim, label in ((-1, "rows"), (0, "cols")):
        yield Case(f"moments-{label}", _over(moments, dim), _data())
    for name, fold in (("sum", torch.sum), ("mean", torch.mean), ("prod", torch.prod)):
        make = _factors(lambda r, c: (r, c)) if name == "prod" else _data()
        yield Case(f"{name}-both", partial(both_ways, fold), make)


# fmt: off
HAND_WRITTEN = ("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward", "add_rms_norm_backward",
                "add_layer_norm_backward", "softmax", "softmax_dim0", "softmax_backward", "logsumexp", "cross_entropy",
                "cross_entropy_mean", "cross_entropy_backward", "gelu_backward_bias", "swiglu_backward_bias", "rms_norm_fp8",
                "three_norms_shared_weight_backward", "rms_norm_backward_3", "block_backward")
# fmt: on


def _hand_written() -> Iterable[Case]:
    for name in HAND_WRITTEN:
        multiple = 128 if name == "rms_norm_fp8" else 1
        yield Case(f"formula-{name}", WORKLOADS[name].function, WORKLOADS[name].make, multiple=multiple)


CASES = {case.name: case for case in (*_norms(), *_softmaxes(), *_others(), *_reductions(), *_hand_written())}


# ---- layouts and special values --------------------------------------------------------------------------------------------


def _transposed(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else t


def _sliced(t: Tensor) -> Tensor:
    """Each row is followed by padding."""
    return torch.cat([t, t.new_full((*t.shape[:-1], 3), 7)], -1)[..., : t.shape[-1]] if t.dim() > 1 else t


def _misaligned(t: Tensor) -> Tensor:
    """One element past an aligned address."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) if t.dim() else t


def _expanded(t: Tensor) -> Tensor:
    """The first row again and again, without copies."""
    return t[:1].expand(t.shape) if t.dim() > 1 and t.shape[0] else t


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "sliced": _sliced,
    "misaligned": _misaligned,
    "expanded": _expanded,
}


def with_specials(t: Tensor) -> Tensor:
    """Rows of only -inf, with one inf, with one NaN, with one -inf; the rest is unchanged."""
    if not t.is_floating_point() or t.dim() < 2 or not t.numel():
        return t
    t = t.clone()
    t[0] = -torch.inf
    for row, number in ((1, torch.inf), (2, torch.nan), (3, -torch.inf)):
        if row < t.shape[0]:
            t[row, ..., t.shape[-1] // 2] = number
    return t
