"""The suites of `onepass bench`: named lists of workloads and sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import pipeline
from ..capture import capture
from ..errors import BadSpec
from ..plan.footprint import Footprint, footprint
from ..tools.spec import parse_dtype
from ..tools.workloads import Workload, workload
from .results import row_id

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """One workload at one size."""

    workload: str
    shape: Shape
    dtype: str = "bf16"

    @property
    def id(self) -> str:
        """The id of its row."""
        return row_id(self.workload, self.shape, self.dtype)

    @property
    def subject(self) -> Workload:
        return workload(self.workload)

    def inputs(self, device: "str | torch.device" = "meta") -> tuple[Tensor, ...]:
        """The arguments of the workload's function."""
        return self.subject.inputs(self.shape, parse_dtype(self.dtype), device)

    @cached_property
    def footprint(self) -> Footprint:
        """Least DRAM traffic: every input read once, every output written once."""
        args = self.inputs()
        captured = capture(self.subject.function, args)
        return footprint(pipeline.optimize(captured.program), captured.bind(args) or {})

    @property
    def floor_bytes(self) -> int:
        """Least DRAM traffic, in and out."""
        return self.footprint.bytes


@dataclass(frozen=True)
class Suite:
    """Jobs that are measured together."""

    name: str
    about: str
    jobs: tuple[Job, ...]


def _over(shapes: Iterable[Shape], *names: str, dtype: str = "bf16") -> tuple[Job, ...]:
    return tuple(Job(name, shape, dtype) for name in names for shape in shapes)


_BACKWARD_SHAPES = ((4096, 8192), (8192, 8192), (8192, 16384), (32768, 2048), (16384, 4096), (65536, 1024), (98304, 512))
_FORWARD_SHAPES = (
    (131072, 512),
    (32768, 2048),
    (16384, 4096),
    (32768, 4096),
    (8192, 8192),
    (16384, 8192),
    (16384, 16384),
    (8192, 32768),
)
_LAYER_NORM_SHAPES = ((8192, 8192), (32768, 2048), (16384, 5120))
_NORM_SHAPES = (*_LAYER_NORM_SHAPES, (98304, 768))
_LOGITS_SHAPES = ((8192, 50264), (8192, 128256))

_TABLE = (
    *_over(_BACKWARD_SHAPES, "rms_norm_backward"),
    *_over(_LAYER_NORM_SHAPES, "layer_norm_backward"),
    *_over(_LAYER_NORM_SHAPES[:2], "add_rms_norm_backward"),
    *_over(_FORWARD_SHAPES, "rms_norm"),
    *_over(_LAYER_NORM_SHAPES, "layer_norm"),
    *_over(((16384, 4096), (8192, 32768), (32768, 50257)), "softmax"),
    *_over(_LOGITS_SHAPES, "cross_entropy", "cross_entropy_backward"),
    *_over(((4096, 4096), (65536, 256), (256, 65536)), "outer_sum_1", dtype="f32"),
    *_over(((4096, 1024),), "outer_sum_2", "outer_sum_5", dtype="f32"),
    *_over(((4096, 1024),), "outer_sum_5", dtype="f16"),
)

_OUTER_SIDES = (256, 4096, 65536)
_SEEDS = (
    # backward of a norm with similar numbers of rows and columns
    *_over(((4096, 8192), (8192, 8192)), "rms_norm_backward"),
    # a narrow transformer: many rows, and many ops to fuse with a norm's backward
    *_over(
        ((98304, 512),),
        "rms_norm",
        "rms_norm_backward",
        "add_rms_norm_backward",
        "rms_norm_backward_4",
        "rms_norm_backward_8",
        "rms_norm_backward_16",
        "block_backward",
        "three_norms_shared_weight_backward",
    ),
    *_over(((32, 2048, 8, 64),), "qk_norm"),
    # column sums of one input and of several
    *_over(tuple((r, c) for r in _OUTER_SIDES for c in _OUTER_SIDES), "outer_sum_1", dtype="f32"),
    *_over(((4096, 1024),), "outer_sum_2", "outer_sum_3", "outer_sum_5", dtype="f32"),
    *_over(((4096, 1024),), "outer_sum_2", "outer_sum_3", "outer_sum_5", dtype="f16"),
    # rows that are read twice, from rows that fit in registers to a vocabulary
    *_over(
        ((8192, 8192), (16384, 4096), (32768, 2048), (32768, 4096), (16384, 8192), (32768, 8192), (32768, 32768), (16384, 16384)),
        "rms_norm",
    ),
    *_over(((32768, 50257),), "softmax"),
)

_NORMS = (
    *_over(
        _NORM_SHAPES,
        "rms_norm",
        "rms_norm_backward",
        "layer_norm",
        "layer_norm_backward",
        "add_rms_norm",
        "add_rms_norm_backward",
        "add_layer_norm",
        "add_layer_norm_backward",
    ),
    *_over(((8192, 8192), (32768, 2048)), "rms_norm_fp8", "l2_normalize"),
    *_over(((98304, 512),), "rms_norm_backward_4", "block_backward"),
    *_over(((32768, 768),), "three_norms_shared_weight_backward"),
    *_over(((8, 2048, 32, 128),), "qk_norm"),
    *_over(((64, 256, 1024),), "group_norm"),
)

_SOFTMAX = (
    *_over(((65536, 1024), (16384, 4096), (8192, 32768), (8192, 50257), (32768, 50257)), "softmax"),
    *_over(((16384, 4096), (8192, 32768), (8192, 50257)), "softmax_backward", "log_softmax", "logsumexp"),
    *_over(((4096, 4096), (256, 65536)), "softmax_dim0"),
)

_LOSSES = _over(
    ((8192, 32000), (8192, 50257), *_LOGITS_SHAPES, (2048, 151936)), "cross_entropy", "cross_entropy_backward", "cross_entropy_mean"
)

_OUTER = (
    *_over(((4096, 4096), (65536, 256), (256, 65536), (65536, 4096), (4096, 65536)), "outer_sum_1", dtype="f32"),
    *_over(((4096, 1024),), "outer_sum_2", "outer_sum_3", "outer_sum_5", dtype="f32"),
    *_over(((4096, 1024), (65536, 4096)), "outer_sum_5", dtype="f16"),
    *_over(((65536, 4096),), "outer_sum_3"),
    *_over(((16384, 4096), (8192, 16384)), "gelu_backward_bias", "silu_backward_bias", "swiglu_backward_bias"),
    *_over(((8192, 8192), (98304, 768)), "sum_cols", "sum_both"),
    *_over(((64, 256, 1024),), "batch_norm_stats"),
)

_LONG = (
    *_over(((32768, 50257),), "softmax"),
    *_over(((8192, 50257),), "softmax_backward"),
    *_over(_LOGITS_SHAPES[1:], "cross_entropy", "cross_entropy_backward"),
    *_over(((4096, 65536),), "rms_norm"),
    *_over(((8192, 32768), (4096, 65536)), "rms_norm_backward"),
    *_over(((16384, 12288), (8192, 16384), (8192, 32768), (4096, 65536)), "layer_norm_backward"),
    *_over(((16384, 4096),), "outer_sum_5", "outer_sum_8", "outer_sum_14"),
)

_SWEEP_WORKLOADS = ("rms_norm", "rms_norm_backward", "softmax")
_ROWS = _over(
    (*((m, 4096) for m in (1, 16, 256, 2048, 8192, 16384, 32768, 65536, 131072)), *((m, 65536) for m in (1, 16, 256))),
    *_SWEEP_WORKLOADS,
)

_WIDE = (256, 512, 768, 1024, 1536, 2048, 2304, 2880, 4096, 5120, 7168, 8192, 12288, 16384, 32768, 50257, 65536, 131072)


def rows_at(width: int, elements: int = 1 << 26) -> int:
    """A power-of-two row count with which a tensor of this width has about `elements` elements."""
    return 1 << (elements // width).bit_length() - 1


_WIDTHS = _over(tuple((rows_at(n), n) for n in _WIDE), *_SWEEP_WORKLOADS)

_SUITES = (
    Suite("table", "the main shapes, tracked over time", _TABLE),
    Suite("seeds", "shapes where other compilers are slow", _SEEDS),
    Suite("norms", "norms, forward and backward, with adjacent ops", _NORMS),
    Suite("softmax", "softmax, its backward, log-softmax and log-sum-exp", _SOFTMAX),
    Suite("losses", "cross-entropy over vocabularies", _LOSSES),
    Suite("outer", "column sums", _OUTER),
    Suite("long", "shapes that need shared memory: long rows read twice, many inputs", _LONG),
    Suite("rows", "one width, from 1 row to 131072", _ROWS),
    Suite("widths", "similar element counts, from 256 columns to 131072", _WIDTHS),
)
_ALL = Suite(
    "all", "all of the above, each workload once", tuple({job.id: job for found in _SUITES for job in found.jobs}.values())
)

SUITES = {s.name: s for s in (*_SUITES, _ALL)}
MODELS = "models"  # whole training steps, measured by bench/models.py


def suite(name: str) -> Suite:
    """The suite with a name."""
    found = SUITES.get(name)
    if found is None:
        raise BadSpec(what="The suite", text=name, detail=f"known are {', '.join((*SUITES, MODELS))}")
    return found
