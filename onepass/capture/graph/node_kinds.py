"""Classifies the nodes of a post-grad graph for region finding."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import torch
from torch import fx

from ... import compat
from ...ir.expr import BY_TORCH
from ..lowering.indexing import INDEXING_OPS
from ..lowering.lower import LOWERINGS
from ..lowering.reductions import MIN_REDUCTION_SIZE, REDUCTIONS
from ..lowering.schema import op_name
from ..lowering.views import VIEWS
from .effects import epochs, is_ordered, used_across_write


class NodeKind(Enum):
    """How region finding treats a node."""

    FREE = "a view, a constant or a widening cast: recomputed wherever it is used"
    FUSIBLE = "a pointwise op or a reduction: part of one region, or of none"
    INDUCTOR = "left to Inductor, which fuses it into a neighboring kernel"
    EXTERN = "an input, an output, or an op with a kernel of its own"


_COPIES = frozenset(
    {"aten.clone.default", "aten.contiguous.default", "aten.copy.default", "prims.clone.default", "aten.lift_fresh_copy.default"}
)
_CASTS = frozenset({"prims.convert_element_type.default", "aten._to_copy.default"})
_CONSTANTS = frozenset(
    {
        "prims.iota.default",
        "aten.arange.default",
        "aten.arange.start",
        "aten.arange.start_step",
        "aten.scalar_tensor.default",
        *(f"aten.{way}.default" for name in ("full", "zeros", "ones") for way in (name, f"{name}_like", f"new_{name}")),
    }
)
# Left to Inductor, which writes the pieces of a concatenation in place.
# fmt: off
_DECLINED = frozenset({"aten.cat.default", "aten.stack.default", "aten.constant_pad_nd.default", "aten.slice_scatter.default",
                       "aten.select_scatter.default", "aten.slice_backward.default", "aten.select_backward.default",
                       "aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"})
# fmt: on
# fmt: off
_INLINED = frozenset({"aten.embedding.default", "aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.bucketize.Tensor",
                      "aten._unsafe_masked_index.default", "prims.inductor_random.default", "prims.inductor_randint.default",
                      "prims.inductor_lookup_seed.default", "aten.rand.default", "aten.bernoulli.default", "aten.bernoulli.p",
                      "aten.flip.default", "aten.roll.default", "aten.tril.default", "aten.triu.default"})
# fmt: on
# Reductions without a Monoid. Named so that reports can count them among the nodes left to Inductor.
# fmt: off
OTHER_REDUCTIONS = frozenset({
    "aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default", "aten.topk.default", "aten.sort.default",
    "aten.sort.stable", "aten.median.default", "aten.median.dim", "aten.kthvalue.default", "aten.mode.default",
    "aten.scatter.reduce", "aten.scatter.value_reduce", "aten.scatter_reduce.two", "aten.scatter_add.default",
    "aten.norm.Scalar", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dtype", "aten.norm.ScalarOpt_dim_dtype",
    "aten.cummax.default", "aten.cummin.default", "aten.nanmedian.default", "aten.nanmedian.dim", "aten.segment_reduce.default",
    "aten.index_reduce.default", "aten.index_add.default", "aten.histc.default", "aten.bincount.default", "aten.renorm.default",
    "aten._foreach_norm.Scalar", "aten._foreach_max.default", "aten._foreach_powsum.Scalar"})
# fmt: on
_REDUCTION_TAG = getattr(torch.Tag, "reduction", None)  # torch's tag of reductions; older releases have none
MATMULS = frozenset({f"aten.{name}.{overload}" for name in ("mm", "bmm", "addmm", "baddbmm") for overload in ("default", "dtype")})
_POINTWISE_TAG = "pointwise"  # torch's tag of elementwise ops


def is_reduction(node: fx.Node) -> bool:
    """Whether a node reduces an axis, in onepass or elsewhere. Small reductions do not count: Inductor unrolls them."""
    if node.op != "call_function":
        return False
    name = op_name(node.target)
    if name in REDUCTIONS:
        return not _is_small_reduction(node)
    return name in OTHER_REDUCTIONS or _REDUCTION_TAG is not None and _REDUCTION_TAG in getattr(node.target, "tags", ())


def _is_small_reduction(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    taken, given = tensors_of(source) if isinstance(source, fx.Node) else (), tensors_of(node)
    if not (taken and given) or _depends_on_data(taken[0]):
        return False
    return numel(taken[0]) < MIN_REDUCTION_SIZE * max(numel(given[0]), 1)


def tensors_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The fake tensors a node computes: none for sizes, several for ops with several results."""
    val = node.meta.get("val")
    several = val if isinstance(val, (tuple, list)) else (val,)
    return tuple(v for v in several if isinstance(v, torch.Tensor))


def nbytes(node: fx.Node) -> int:
    """The size in bytes of a node's results, for the sizes seen at trace time."""
    return sum(numel(t) * t.element_size() for t in tensors_of(node))


def numel(tensor: torch.Tensor) -> int:
    """The number of elements, for the sizes seen at trace time."""
    total = 1
    for size in tensor.shape:
        total *= compat.size_hint(size) or 0
    return total


def why_unsupported(node: fx.Node, device: torch.device) -> str | None:
    """Why onepass cannot compute a node although it has a handler for it. None if it can."""
    for tensor in tensors_of(node):
        if tensor.device != device:
            return f"it is on {tensor.device}, not on {device}"
        if tensor.dtype not in BY_TORCH:
            return f"its dtype is {tensor.dtype}"
        if tensor.layout is not torch.strided:
            return f"its layout is {tensor.layout}"
        if _depends_on_data(tensor):
            return "a size depends on data"
        if numel(tensor) == 0:
            return "it has no elements"
    return next((why for source in node.all_input_nodes for tensor in tensors_of(source) if (why := _why_unreadable(tensor))), None)


def _why_unreadable(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be read in a Program; None if it can."""
    if tensor.dtype not in BY_TORCH:
        return f"it reads {tensor.dtype}"
    if tensor.layout is not torch.strided:
        return f"it reads {tensor.layout}"
    return "it reads a tensor with a size that depends on data" if _depends_on_data(tensor) else None


def _depends_on_data(tensor: torch.Tensor) -> bool:
    """Whether a size is known only once the graph runs."""
    return any(compat.size_hint(size) is None for size in tensor.shape)


def feed_sparse(graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes that a sparse or opaque tensor is computed from, and why none may be in a region: torch computes the fake tensors
    behind a rewritten node anew, and cannot compare those that have no storage."""
    found: dict[fx.Node, str] = {}
    for node in reversed(graph.nodes):
        layouts = [t.layout for t in tensors_of(node) if t.layout is not torch.strided]
        because = [found[user] for user in node.users if user in found]
        if layouts or because:
            found[node] = because[0] if because else f"a tensor of layout {layouts[0]} is computed from it"
    return found


def classify_nodes(graph: fx.Graph, device: torch.device, blocked: Mapping[fx.Node, str]) -> dict[fx.Node, NodeKind]:
    """The kind of every node. `blocked` nodes have a handler but could not be lowered."""
    found: dict[fx.Node, NodeKind] = {}
    epoch = dict(zip(graph.nodes, epochs(graph.nodes), strict=True))
    for node in graph.nodes:
        kind = _kind(node, device, blocked, found)
        # A node used across a write must not be recomputed there, so its value is kept in memory.
        in_memory = kind is NodeKind.FREE and _may_read_memory(node) and used_across_write(node, epoch)
        found[node] = NodeKind.EXTERN if in_memory else kind
    return found


def _may_read_memory(node: fx.Node) -> bool:
    """Whether a free node reads memory, or is a view of memory."""
    return node.target is not operator.getitem and op_name(node.target) not in _CONSTANTS


def _kind(node: fx.Node, device: torch.device, blocked: Collection[fx.Node], before: Mapping[fx.Node, NodeKind]) -> NodeKind:
    if node.op != "call_function" or not tensors_of(node):
        return NodeKind.EXTERN
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return NodeKind.FREE if before[source] in (NodeKind.FUSIBLE, NodeKind.FREE) else before[source]
    name = op_name(node.target)
    is_small = name in REDUCTIONS and _is_small_reduction(node)
    computed = name in LOWERINGS and name not in _DECLINED and node not in blocked and not is_ordered(node)
    if not computed or why_unsupported(node, device) or is_small and _reduces_contiguous(node):
        return NodeKind.INDUCTOR if _is_inlined(node, name) else NodeKind.EXTERN
    if name in _CONSTANTS:
        return NodeKind.FREE
    if name in _COPIES:
        return NodeKind.FUSIBLE
    if name in VIEWS or name in _CASTS and _widens(node):
        return NodeKind.FREE
    return NodeKind.FUSIBLE


def _reduces_contiguous(node: fx.Node) -> bool:
    """Whether a reduction covers several dims, or a contiguous one."""
    dims = node.args[1] if len(node.args) > 1 else None
    source = node.args[0]
    if not (isinstance(dims, (list, tuple)) and len(dims) == 1 and isinstance(dims[0], int) and isinstance(source, fx.Node)):
        return True
    stride = tensors_of(source)[0].stride(dims[0])
    return isinstance(stride, int) and stride == 1


def _widens(node: fx.Node) -> bool:
    """Whether a cast's result is at least as large as its argument. If so, recomputing the cast reads no more bytes."""
    source = node.args[0]
    return isinstance(source, fx.Node) and nbytes(node) >= nbytes(source)


def _is_inlined(node: fx.Node, name: str) -> bool:
    if name in REDUCTIONS:
        return _is_small_reduction(node)
    target: Any = node.target
    tags = getattr(target, "tags", ())
    is_pointwise = any(str(tag).endswith(_POINTWISE_TAG) for tag in tags)
    return is_pointwise or name in _INLINED or name in _DECLINED or name in VIEWS or name in INDEXING_OPS
