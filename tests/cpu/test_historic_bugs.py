"""Bugs that other reduction compilers had, each named after the public thread that reported it.

The functions are rewritten from the description in the thread. Their kernels are interpreted and compared with eager and float64;
results that must be exact, such as integers, booleans, indices and signs of zeros, are compared with eager bit by bit.

The threads are from pytorch/pytorch, pytorch/torchdynamo, csarofeen/pytorch, triton-lang/triton, linkedin/Liger-Kernel,
Dao-AILab/quack and NVIDIA/Fuser.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.errors import OnepassError
from onepass.tools.check import as_tuple
from tests.support.correctness import assert_right, once, randoms

Function: TypeAlias = Callable[..., Any]
Make: TypeAlias = Callable[[int], Sequence[Tensor]]
INF, NAN = math.inf, math.nan
f16, bf16, u8, i8, i16, i32 = torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32


def standard_normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Make:
    """Standard normal arguments, times a number."""

    def make(seed: int) -> Sequence[Tensor]:
        made = randoms(seed, *shapes, dtype=dtype)
        return tuple(t * scale for t in (made if isinstance(made, tuple) else (made,)))

    return make


def fixed(*tensors: Tensor) -> Make:
    """Fixed arguments, the same for every seed."""
    return lambda seed: tensors


def tensor(*values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def logits(rows: int, classes: int, *targets: int, dtype: torch.dtype = torch.float32) -> Make:
    """Logits, and target classes for the first rows; the other targets are 0, 1, 2 and so on."""
    chosen = torch.tensor([*targets, *(k % classes for k in range(rows - len(targets)))])
    return lambda seed: (randoms(seed, (rows, classes), dtype=dtype), chosen)


# ---- rounded results ---------------------------------------------------------------------------------------------------------


def softmax_backward(y: Tensor, g: Tensor) -> Tensor:
    inner = (y.float() * g.float()).sum(-1, keepdim=True)
    return (y.float() * (g.float() - inner)).to(y.dtype)


def padded_rows(seed: int) -> tuple[Tensor, Tensor]:
    """Rows of 551 elements with a stride of 576; the padding is NaN."""
    wide = torch.full((2, 6, 576), NAN, dtype=bf16)
    wide[:, :, :551] = randoms(seed, (2, 6, 551), dtype=bf16)
    wide[0, :, :551] = wide[0, :, :551].softmax(-1)
    return wide[0, :, :551], wide[1, :, :551]


def times_weight_backward(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm's backward, its weight's gradient summed over rows in fp32 and rounded once."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    xhat, dy = x.float() * rstd, g.float() * w.float()
    return (rstd * (dy - xhat * (dy * xhat).mean(-1, keepdim=True))).to(x.dtype), (g.float() * xhat).sum(0).to(w.dtype)


def several_moments(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    spread = x.var(0).var()
    return torch.pow(torch.pow(y.float().norm(), spread), spread + z.relu())


def blockwise_norm(x: Tensor, y: Tensor) -> Tensor:
    weights = torch.exp(-(x[:, None] * y))
    return weights / weights.sum(-1, keepdim=True)


def layer_norm_by_hand(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Its statistics, and rows scaled and shifted."""
    var, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
    return ((x.float() - mean) * torch.rsqrt(var + 1e-5) * w + b).to(x.dtype), mean


def first_class_alone(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Losses that ignore an existing class, which stays in the denominator of the softmax."""
    return F.cross_entropy(x, t, ignore_index=0, reduction="none"), F.cross_entropy(x, t, ignore_index=0)


def one_bad_row(seed: int) -> tuple[Tensor, Tensor]:
    x = randoms(seed, (5, 7))
    x[0, 3], x[1] = NAN, -INF
    return x, torch.tensor([-100, -100, 2, 3, 4])


ROUNDED: dict[str, tuple[Function, Make]] = {
    # Softmax and its sums.
    "pytorch#163932 a softmax of numbers times 1e14 was NaN": (lambda x: (x * 1e14).softmax(-1), standard_normal((5, 25))),
    "pytorch#100775 so was one of differences times a negative number of 1e14": (
        lambda x, s: (x[:, None] * x[None, :]).mul(s).softmax(-1),
        lambda seed: (randoms(seed, (10,)), tensor(-1.7197e14)),
    ),
    "pytorch#161150 rows with both infinities became ones, not NaN": (
        lambda x: (x, (x * 1.0).softmax(0)),
        fixed(tensor([-INF, INF, INF, -INF, INF, 1.0]).reshape(1, 6)),
    ),
    "pytorch#101039 two numbers of a softmax added up to 1.2": (lambda x: (x / 1e-6).softmax(-1), standard_normal((1, 10, 2))),
    "pytorch#159469 a softmax's backward read past rows of 551 in 576": (softmax_backward, padded_rows),
    "pytorch#163971 softmax of a tensor without dims failed": (
        lambda x: F.gelu(x.softmax(0)).softmax(0),
        lambda seed: (randoms(seed, (), dtype=bf16),),
    ),
    "pytorch#189787 sums of softmax were taken for 1, NaN rows too": (
        lambda x: x.softmax(1).sum(1),
        fixed(torch.cat([randoms(0, (4, 59)), torch.full((1, 59), -INF)])),
    ),
    "pytorch#188225 NaNs known while compiling were compared": (
        lambda x: torch.log2(torch.full((2, 2), -1.0)).softmax(-1) + x,
        fixed(torch.ones(2)),
    ),
    "pytorch#131060 rows that are masked throughout are NaN, others are not": (
        lambda x, m: x.masked_fill(m, -INF).softmax(-1)[1:],
        lambda seed: (randoms(seed, (4, 9)), torch.tensor([[True], [False], [False], [True]]).expand(4, 9)),
    ),
    "pytorch#71502 the backward of a masked softmax is zero where masked": (
        lambda y, g, m: softmax_backward(y.masked_fill(m, 0), g.masked_fill(m, 0)),
        lambda seed: (*(t.softmax(-1) for t in randoms(seed, (6, 33), (6, 33))), (torch.arange(33) % 3 == 0).expand(6, 33)),
    ),
    "pytorch#159154 a row's normalizer had the memory of 32 elements, not 1024": (
        blockwise_norm,
        lambda seed: (torch.ones(5), randoms(seed, (5, 1024))),
    ),
    # Losses.
    "pytorch#116349 the mean over classes that are all ignored is 0 / 0": (
        lambda x, t: (F.cross_entropy(x, t), F.cross_entropy(x, t, reduction="none")),
        logits(5, 10, -100, -100, -100, -100, -100),
    ),
    "pytorch#75181 a single row, ignored by -1": (lambda x, t: F.cross_entropy(x, t, ignore_index=-1), logits(1, 3, -1)),
    "pytorch#70348 the sum over none is 0": (
        lambda x, t: F.cross_entropy(x, t, reduction="sum"),
        logits(4, 5, -100, -100, -100, -100),
    ),
    "pytorch#63004 an ignored class that exists is part of the denominator": (first_class_alone, logits(6, 5, 0, 1, 0)),
    "pytorch#12670 an ignored class, with reduction none": (
        lambda x, t: F.cross_entropy(x, t, ignore_index=-1, reduction="none").mean(),
        logits(3, 5, 2, 4, -1),
    ),
    "pytorch#15508 an ignored class of 255 among three": (
        lambda x, t: F.cross_entropy(x, t, ignore_index=255, reduction="none"),
        logits(6, 3, 0, 1, 255),
    ),
    "pytorch#192685 what is not finite in an ignored row stays out of the mean": (F.cross_entropy, one_bad_row),
    "Liger-Kernel#507 the loss of four rows of three classes was 0": (F.cross_entropy, logits(4, 3, 0, 0, 0, 0)),
    "Liger-Kernel#421 losses one by one came as one number": (
        lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), reduction="none"),
        lambda seed: (randoms(seed, (3, 4, 5)), torch.tensor([[0, 1, 2, -100], [3, 4, -100, -100], [1, 1, 2, 0]])),
    ),
    # Variances and norms.
    "pytorch#171438 tiles of a row had means of their own": (
        lambda x: torch.var_mean(x, (1, 2)),
        lambda seed: (randoms(seed, (3, 33, 129)) + torch.arange(33.0)[:, None],),
    ),
    "pytorch#104725 statistics of columns that were cut into pieces": (
        lambda x: torch.var_mean(x, (0, 2, 3), correction=0),
        lambda seed: (randoms(seed, (5, 3, 17, 13)) * 3 + 1,),
    ),
    "csarofeen/pytorch#2149 a variance over dims of size 1 counted none": (
        lambda x: (*torch.var_mean(x, (1, 2), correction=0), x.var(1)),
        standard_normal((5, 1, 1)),
    ),
    "csarofeen/pytorch#2325 a variance of variances": (
        lambda x: x.var(1, correction=0).var(-1, correction=0),
        standard_normal((3, 7, 5)),
    ),
    "pytorch#145401 means of long fp16 columns": (
        lambda x: torch.var_mean(x, 0),
        lambda seed: (randoms(seed, (4099, 3), dtype=f16) + 1,),
    ),
    "pytorch#197089 the spread of numbers about 1e5": (
        lambda x: (x.std(-1), *torch.var_mean(x, -1)),
        lambda seed: (randoms(seed, (5, 1000)) + 1e5,),
    ),
    "pytorch#197108 the mean of var_mean of nothing is NaN": (
        lambda x: (*torch.var_mean(x, 0), *torch.std_mean(x, 0, correction=0)),
        fixed(torch.empty(0, 1)),
    ),
    "pytorch#29372 the deviation of a single number is NaN, or 0 uncorrected": (
        lambda x: (x.std(), x.std(correction=0)),
        fixed(tensor(4.0)),
    ),
    "pytorch#113167 a correction beyond the count leaves no degrees of freedom": (
        lambda x: torch.var_mean(x, 0, correction=4.9),
        fixed(tensor([0.16])),
    ),
    "pytorch#190417 layer norm of negative infinities": (lambda x: F.layer_norm(torch.log2(x), (1,)), fixed(torch.zeros(2, 1))),
    "pytorch#173793 layer norm of numbers near the greatest was NaN": (
        lambda x: F.layer_norm(x, (512,)),
        lambda seed: (8.5071e37 * (1 + 1e-5 * randoms(seed, (2, 512))),),
    ),
    "pytorch#173885 layer norm of fp16 rows with an infinity": (
        lambda x: F.layer_norm(x, (16,)),
        fixed(torch.cat([tensor([INF], [1.0]), randoms(0, (2, 15))], 1).half()),
    ),
    "pytorch#183120 normalizing rows that are constant is 0, not noise scaled up": (
        lambda x: F.group_norm(F.elu(x), 10),
        fixed(torch.ones(6, 10, 12)),
    ),
    "pytorch#186577 reciprocals of what is normalized": (
        lambda x: torch.reciprocal(F.layer_norm(x, (128,)).abs() + 0.1),
        standard_normal((16, 128)),
    ),
    "pytorch#143182 layer norm over two dims at once": (lambda x: F.layer_norm(x, (100, 130)), standard_normal((2, 100, 130))),
    "pytorch#142839 instance norm of large images": (lambda x: F.instance_norm(x), standard_normal((1, 2, 61, 127))),
    "pytorch#181696 batch norm by what it has learned, then a group norm": (
        lambda x, m, v: F.group_norm(F.batch_norm(x, m, v), 5),
        lambda seed: (randoms(seed, (6, 10, 12)), torch.arange(10.0), torch.arange(1.0, 11.0)),
    ),
    "pytorch#163449 moments of moments, as powers of each other": (
        several_moments,
        lambda seed: (*randoms(seed, (3, 4, 5, 2)).reshape(1, 3, 4, 5, 2), randoms(seed, (5, 4)), tensor(0.7)),
    ),
    "Fuser#2632 layer norm's statistics for rows of 18688": (layer_norm_by_hand, standard_normal((2, 18688), (18688,), (18688,))),
    "Fuser#1471 a sum over the outer and the inner dim, then over the rest": (
        lambda x: (x.sum((0, 2)), x.sum((0, 2)).sum()),
        standard_normal((3, 5, 67)),
    ),
    "Liger-Kernel#950 a weight's gradient was added up in bfloat16": (
        times_weight_backward,
        standard_normal((65, 33), (33,), (65, 33), dtype=bf16),
    ),
    "Liger-Kernel#92 RMSNorm was rounded before the weight": (
        lambda x, w: F.rms_norm(x.float(), (40,), eps=1e-6).to(x.dtype) * w,
        standard_normal((9, 40), (40,), dtype=bf16),
    ),
    "quack#88 a gradient that is one number, expanded": (
        times_weight_backward,
        lambda seed: (randoms(seed, (7, 32)), torch.ones(32), torch.ones(()).expand(7, 32)),
    ),
    # Rows and columns at once.
    "pytorch#177782 sums of rows and columns that keep their dim": (
        lambda x: (x.sum(0, keepdim=True), x.sum(1, keepdim=True), x.mean((0, 1), keepdim=True)),
        standard_normal((67, 40)),
    ),
    "pytorch#186370 rows of a square and columns of its transpose": (
        lambda x, y: (x.sum(1), x.t().sum(1), (x.t() * y).sum(0)),
        standard_normal((48, 48), (48, 48)),
    ),
    "pytorch#176483 columns of two tensors, one below the other": (
        lambda x, y: (torch.cat([x, y]).sum(0), torch.cat([x, y]).sum(1)),
        standard_normal((37, 16), (28, 16)),
    ),
    "pytorch#189895 what is padded was counted in a sum in pieces": (
        lambda x: (F.pad(x, (1, 0), value=3.0).sum(0), F.pad(x, (2, 1, 1, 0), value=-1.0).sum()),
        standard_normal((130, 15)),
    ),
    # Sums of narrow numbers.
    "pytorch#141052 sums of bfloat16 that stopped at 256": (
        lambda x: (x.sum(-1), x.mean(-1)),
        fixed(torch.ones(2, 1000, dtype=bf16)),
    ),
    "pytorch#93708 sums of fp16 beyond its integers": (lambda x: x.sum(0), fixed(torch.ones(4097, 2, dtype=f16))),
    "pytorch#95185 the greatest of bfloat16": (lambda x: (x.amax(1), x.amin(0)), standard_normal((6, 50), dtype=bf16)),
    "pytorch#102546 the mean of a tensor without dims, over its dim": (
        lambda x: (x.mean(0), x.sum(-1), x.amax(0)),
        fixed(tensor(2.5)),
    ),
    "pytorch#148808 scaled by the least and the greatest": (
        lambda x: (x - x.amin()) / (x.amax() - x.amin()),
        standard_normal((1, 10)),
    ),
    "pytorch#88263 sums and products over dims of size 0": (
        lambda x: (x.sum(1), x.prod(1), x.sum(), x.mean(1)),
        fixed(torch.empty(3, 0)),
    ),
    "pytorch#107066 nothing is read of what has no elements": (
        lambda x, y: (torch.cat([x, y]).sum(0), (x.sum() + y).sum(-1)),
        lambda seed: (torch.empty(0, 6), randoms(seed, (4, 6))),
    ),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_results_are_right(name: str) -> None:
    function, make = ROUNDED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager's, of degrees of freedom
        assert_right(onepass.fuse(function), function, make)


# ---- exact results -----------------------------------------------------------------------------------------------------------


def ties(*shape: int, dtype: torch.dtype = i32, most: int = 4) -> Tensor:
    return torch.randint(-most, most, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def few_zeros_among_nans() -> Tensor:
    x = torch.zeros(10, 9)
    x[torch.rand(10, 9, generator=torch.Generator().manual_seed(1)) < 0.4] = NAN
    return x


def far_apart() -> Tensor:
    """Three rows 2**30 bytes apart; the system allocates only the pages that are written."""
    rows = torch.empty(2 * (2**30 + 64) + 16, dtype=u8).as_strided((3, 16), (2**30 + 64, 1))
    return rows.copy_(torch.arange(48).reshape(3, 16))


SMALL = tensor(5, 1, 100, 3, 7, 8, 9, 13, 100, 120, 127, 2, 6, 4, 11, 12, 90, 80, dtype=i32)
ZEROS = tensor(-0.0, 0.0, -0.5, 0.5, -1.0)

EXACT: dict[str, tuple[Function, Sequence[Tensor]]] = {
    "pytorch#187935 the sign of -0.0": (lambda x: x.signbit().any(), [ZEROS.double()]),
    # Positions.
    "pytorch#118358 the position of the greatest is that of the first NaN": (
        lambda x: (x.argmax(-1), x.argmin(-1), x.argmax()),
        [tensor([NAN, 4.6, 9.0], [1.0, NAN, NAN], [3.0, 1.0, 2.0])],
    ),
    "pytorch#118266 NaNs that log1p makes": (lambda x: torch.log1p(x).argmax(), [tensor(-3.0, 100.0, 2.0)]),
    "pytorch#113175 zeros among NaNs": (lambda x: (x.argmax(), x.argmax(0), x.argmin(1)), [few_zeros_among_nans()]),
    "pytorch#100573 positions of equal numbers were added up": (lambda x: (x.argmax(0), x.argmin(1), x.argmin()), [ties(20, 70)]),
    "pytorch#93630 the last of equal numbers was taken": (lambda x: x.argmax(0), [ties(10, 10, most=2)]),
    "pytorch#93815 the same of short integers": (lambda x: (x.argmax(0), x.argmin(0)), [ties(20, 20, dtype=i16, most=100)]),
    "pytorch#113636 positions next to the quotients they are found in": (
        lambda x: (x / x, (x / x).argmin(0), (x / x).argmax(0)),
        [torch.cat([randoms(0, (12, 30)), torch.zeros(1, 30)])],
    ),
    "pytorch#114229 a difference of equal products has a greatest, too": (
        lambda x, y: (x * y, (x * y - x * y).argmax(-1)),
        [tensor([2.0, INF, 1.0], [1.0, 2.0, 3.0]), tensor([1.0, 0.5, 3.0])],
    ),
    "pytorch#193661 sums of rows that are stored apart, and where the greatest is": (
        lambda x: (x.sum(-1).argmax(-1), x.amax(-1).argmax(0), x.mean(-1).argmin()),
        [ties(4, 6, 20).float().transpose(0, 1)[..., ::2]],
    ),
    "pytorch#95370 positions in rows of which there are none": (lambda x: x.argmin(1).view(0, 3), [torch.empty(0, 3)]),
    "triton#802 all are equal, and less than a power of two": (lambda x: (x.argmax(-1), x.argmin(0)), [torch.full((3, 37), 2.5)]),
    "triton#1813 ties of NaNs": (lambda x: (x.argmax(1), x.argmin(1)), [torch.full((2, 70), NAN)]),
    "pytorch#94055 the least of numbers and positions": (
        lambda x, y: torch.minimum(y, x.argmax(3)).amin(3),
        [ties(3, 4, 2, 1), ties(2, 2, 1, 4, 1)],
    ),
    # The least and the greatest.
    "triton#10291 the greatest of NaN and numbers is NaN": (lambda x: (x.amax(), x.argmax()), [tensor(NAN, 6.0, 8.0)]),
    "triton#10697 the least and the sum, too": (lambda x: (x.amin(), x.argmin(), x.sum()), [tensor(3.0, NAN, 1.0, 2.0)]),
    "triton#7349 NaN was lost among infinities": (
        lambda x: (x.amax(-1), x.amin(-1)),
        [torch.cat([tensor([NAN], [INF]), torch.full((2, 63), INF)], 1)],
    ),
    "triton#3013 rows of one element each": (lambda x: (x.amax(1), x.sum(1), x.amax(0)), [randoms(0, (16, 1))]),
    "triton#3814 the greatest is 0": (lambda x: (x.amax(), x.amax(0)), [-randoms(0, (4, 6)).abs().relu()]),
    "pytorch#191499 the least of positive bytes was 0": (
        lambda x, y, z: (x.amin(), x.argmin(), y.amin(), y.amax(), z.amax(), z.argmax()),
        [SMALL.to(u8), SMALL.to(i8), (-SMALL).to(i8)],
    ),
    "pytorch#93380 the greatest of negated integers": (
        lambda x: ((-x).amax(0), (-x).amin(1)),
        [tensor([5, -128, 7], [0, 1, 127], dtype=i8)],
    ),
    "pytorch#97968 bytes bounded by a tensor": (
        lambda x, y: (torch.clamp_max(x & y, y), torch.maximum(x & y, y)),
        [ties(5, 10, 1, dtype=i8), ties(10, 1, dtype=i8)],
    ),
    # Integers.
    "pytorch#187018 sums of negated bytes joined": (
        lambda x: (torch.cat([-x.abs(), -x.abs()]).sum(), torch.cat([x, x]).neg().sum()),
        [tensor(200, 200, dtype=u8)],
    ),
    "pytorch#93829 a negated byte is compared as a byte": (
        lambda x: (-x, -x < torch.tensor(4, dtype=u8)),
        [torch.tensor(6, dtype=u8)],
    ),
    "pytorch#113253 bytes wrap around before they are widened": (
        lambda x, y: (-(x + y)).to(i32),
        [tensor(250, 3, dtype=u8), tensor(10, 5, dtype=u8)],
    ),
    "pytorch#105264 two times 128 is 0": (lambda x: ((x + x).to(i16), (x + x).sum()), [tensor(128, 130, dtype=u8)]),
    "pytorch#109105 products of small integers wrap around, factored out or not": (
        lambda c, x, y: (c * (x + y), c * x + c * y, (c * x + c * y).sum()),
        [tensor(6, 100, dtype=i8), tensor(5, 77, dtype=i8), tensor(20, 90, dtype=i8)],
    ),
    "pytorch#49247 no byte is less than -1": (lambda x: (x < -1, x.ge(-1), (x < -1).any()), [tensor(1, 255, dtype=u8)]),
    "pytorch#58489 a byte and a number without dims are a byte": (
        lambda x, y: (x + y, (x * y).sum()),
        [tensor(250, 7, dtype=u8), torch.tensor(10)],
    ),
    "pytorch#175966 positions times 1e9 are 64 bits wide": (lambda x: torch.arange(11) * x, [torch.tensor([10**9])]),
    "pytorch#183901 sums of such products": (lambda x: (torch.arange(9) * x).sum(), [torch.tensor([1_500_000_000])]),
    "pytorch#164486 a quotient of short integers is a float": (
        lambda x, y: ((x + 1) / y, (x / y).sum()),
        [torch.tensor(4, dtype=i16), torch.tensor(3, dtype=i16)],
    ),
    "pytorch#189518 a sum of truths in bfloat16": (
        lambda x: (x.sum(1, dtype=bf16), x.sum(1)),
        [torch.ones(2, 4, 4, dtype=torch.bool)],
    ),
    # Signs of zeros.
    "pytorch#189799 -0.0 plus 0.0 is 0.0": (
        lambda x: (x.ceil() + torch.zeros_like(x), torch.reciprocal(x.ceil() + torch.zeros_like(x))),
        [ZEROS[2:4]],
    ),
    "pytorch#183606 the fraction of -0.0": (lambda x: (torch.frac(x), 1 / torch.frac(x)), [ZEROS]),
    # Layouts.
    "pytorch#130394 sums of strided rows keep eager's strides": (
        lambda x: x + x,
        [randoms(0, (16, 16)).as_strided((16, 8), (16, 1))],
    ),
    "pytorch#146746 columns of what is joined": (
        lambda x, y: (torch.cat([x, y], 1)[:, 0] * 2, torch.cat([x, y], 1)[:, 1].sum()),
        [ties(5, 1).long(), ties(5, 1).long() + 9],
    ),
    "pytorch#92063 the greatest of channels stored last": (
        lambda x: (x.amax((2, 3)), (x + 1).amax(1)),
        [randoms(0, (2, 8, 5, 5)).to(memory_format=torch.channels_last)],
    ),
    "pytorch#100314 inputs of a joined tensor that are used again": (
        lambda x, y: (torch.cat([x, y]).amax(0), x + 1, y.neg()),
        [randoms(0, (3, 4)), randoms(1, (2, 4))],
    ),
    # Explicit types.
    "pytorch#197106 sums and products as truths": (
        lambda x, y: (x.sum(dtype=torch.bool), y.prod(dtype=torch.bool), y.sum(1, dtype=torch.bool), x.prod(0, dtype=torch.bool)),
        [randoms(0, (3, 4), dtype=f16), tensor([1.0, -1.0], [0.0, 0.0])],
    ),
    "pytorch#190421 sums of infinities as integers": (lambda x: torch.log(x).sum(dtype=i32).float(), [torch.zeros(2)]),
    "pytorch#124821 sums of floats as wide integers": (
        lambda x: (x.sum(dtype=torch.int64), x.sum(0, dtype=torch.int64)),
        [randoms(0, (6, 8)) * 5],
    ),
    # Far apart.
    "pytorch#154168 elements more than 2**31 from the first": (lambda x: (x.sum(1), x.amax(0)), [far_apart()]),
}


def same_bits(actual: Tensor, eager: Tensor) -> bool:
    """Whether form, values and signs of zeros are equal, with NaNs in the same places."""
    steps = [[step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1] for t in (actual, eager)]
    if (actual.dtype, actual.shape) != (eager.dtype, eager.shape) or steps[0] != steps[1]:
        return False
    if not eager.is_floating_point():
        return torch.equal(actual, eager)
    number = ~eager.isnan()
    return (
        torch.equal(actual.isnan(), eager.isnan())
        and torch.equal(actual[number], eager[number])
        and torch.equal(actual.signbit()[number], eager.signbit()[number])
    )


@pytest.mark.parametrize("name", EXACT)
def test_exact_results_match_eager(name: str) -> None:
    function, inputs = EXACT[name]
    actual, eager = once(onepass.fuse(function), inputs), as_tuple(function(*inputs))
    for k, (one, other) in enumerate(zip(actual, eager, strict=True)):
        assert same_bits(one, other), f"output {k}: {one} {one.stride()}, not {other} {other.stride()}"


# ---- refusals ----------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, Function, Sequence[Tensor]]] = {
    "pytorch#118177 the position in a tensor that is turned around": (
        "ONEPASS-101",
        lambda x: x.fliplr().argmax(),
        [randoms(0, (4, 6))],
    ),
    "pytorch#132107 running sums of infinities": ("ONEPASS-101", lambda x: x.cumsum(-1).sum(), [torch.full((100,), INF)]),
    "pytorch#174016 running products of zeros": ("ONEPASS-101", lambda x: x.cumprod(0).sum(), [torch.zeros(8)]),
    "pytorch#193263 a running sum of one number": ("ONEPASS-101", lambda x: torch.cumsum(x, 0) + 1, [torch.tensor(5.0)]),
    "pytorch#154168 bits added up without carry": ("ONEPASS-101", lambda x: torch.ops.prims.xor_sum(x, [0, 1]), [ties(3, 4)]),
    "pytorch#97365 elements before the first": ("ONEPASS-101", lambda a, b: a[b - 1], [randoms(0, (20,)), torch.zeros(4).long()]),
    "pytorch#183986 rows that share memory, added to": (
        "ONEPASS-101",
        lambda s, i: torch.zeros(1, 8).expand(4, -1).index_add(0, i, s),
        [torch.ones(3, 8), torch.tensor([0, 1, 0])],
    ),
    "pytorch#94778 rows added to by positions": (
        "ONEPASS-101",
        lambda x, i, v: torch.index_add(x, 0, i, v),
        [randoms(0, (5, 5)), torch.arange(5), randoms(1, (5, 5))],
    ),
    "pytorch#191571 a row that is added to, then looked up": (
        "ONEPASS-101",
        lambda x, i: torch.zeros(1, 4).scatter_add(0, i[:, None].expand(-1, 4), x).index_select(0, i),
        [randoms(0, (8, 4)), torch.zeros(8).long()],
    ),
    "pytorch#179931 means of windows, added up": (
        "ONEPASS-101",
        lambda x: F.adaptive_avg_pool2d(x, 7).flatten(1).sum(-1),
        [randoms(0, (2, 5, 8, 8))],
    ),
    "pytorch#144029 complex numbers": ("ONEPASS-102", torch.logaddexp, [torch.tensor([1 + 1j]), torch.tensor([2 + 1j])]),
    "pytorch#174889 the remainder of a division by the number 0": ("ONEPASS-116", lambda x: torch.remainder(x, 0), [ties(5)]),
    "pytorch#198101 bits read as narrower numbers": ("ONEPASS-110", lambda x: (x.view(i32) * 2).sum(), [torch.arange(24)]),
    "pytorch#92063 another layout of what is computed": (
        "ONEPASS-103",
        lambda x: torch.as_strided(x + 1, (4, 2, 3), (16, 3, 5)) + 2,
        [randoms(0, (8, 8))],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_functions_are_refused(name: str) -> None:
    code, function, inputs = REFUSED[name]
    with pytest.raises(OnepassError) as refused:
        onepass.fuse(lambda *args: function(*args))(*inputs)
    assert refused.value.code == code


def test_integers_divided_by_zeros() -> None:
    """pytorch#178013, pytorch#147206: the quotient has all bits set, the remainder is the dividend; eager raises or varies."""
    x = torch.tensor([5, -5, 0])
    quotient, remainder = onepass.fuse(lambda x, y: (x // y, x % y))(x, torch.zeros_like(x))
    assert quotient.tolist() == [-1, -2, -1] and torch.equal(remainder, x)


def test_a_loss_with_weights_smoothing_and_ignored_classes() -> None:
    """pytorch#69339: the weight of a class that does not exist was looked up."""
    for reduction in ("none", "sum", "mean"):

        def loss(x: Tensor, t: Tensor, w: Tensor, reduction: str = reduction) -> Tensor:
            return F.cross_entropy(x, t, w, label_smoothing=0.1, reduction=reduction)

        make = logits(9, 4, -100, 1, -100)
        assert_right(onepass.fuse(loss), loss, lambda seed, make=make: (*make(seed), tensor(0.2, 0.3, 1.5, 0.7)))  # type: ignore[misc]
