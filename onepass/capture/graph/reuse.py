"""Outputs of a region that can reuse the memory of an input, because the region is the input's last reader.

Runs on the rewritten graph, where all users are final. This module only decides whose memory is free; whether kernels may
write where they read is up to their plan.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from ...constants import SHIPPED
from ..lowering.schema import op_name
from ..lowering.views import VIEWS
from .node_kinds import MATMULS, nbytes, tensors_of
from .region_program import RegionProgram

MIN_BYTES = SHIPPED.claim.reuse_bytes

# Besides elementwise ops: ops whose results always have memory of their own, in any compiler. A view, or an op that may return
# its argument, would let a region overwrite a value that others read under another name.
_ATTENTION = frozenset(
    f"aten._scaled_dot_product_{kind}{suffix}.default"
    for suffix in ("", "_backward")
    for kind in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
)
_FRESH_RESULTS = (
    MATMULS
    | _ATTENTION
    | {
        "aten._scaled_mm.default",
        "aten._int_mm.default",
        "aten._grouped_mm.default",
        "aten.convolution.default",
        "aten.convolution_backward.default",
        "aten.embedding.default",
        "aten.embedding_dense_backward.default",
        "aten.index.Tensor",
        "aten.gather.default",
        "aten.cat.default",
    }
)
_CASTS = frozenset({"prims.convert_element_type.default", "aten._to_copy.default"})
_SIZES = frozenset(
    {
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_stride.int,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_storage_offset.default,
    }
)


class GraphMemory:
    """Aliasing of a graph's values: which share storage, as torch traced them."""

    def __init__(self, graph: fx.Graph, calls: Collection[fx.Node], donated_inputs: Collection[int] = ()) -> None:
        """`calls` are the calls of regions; their results own their memory, and so do the inputs at positions `donated_inputs`."""
        self._calls = frozenset(calls)
        self._donated = frozenset(n for k, n in enumerate(graph.find_nodes(op="placeholder")) if k in donated_inputs)
        self._by_storage: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            for storage in _storages(node):
                self._by_storage.setdefault(storage, []).append(node)

    def is_dead_after(self, call: fx.Node, node: fx.Node) -> bool:
        """Whether a call is the last reader of a value that owns its memory."""
        if not self._owns_memory(node):
            return False
        aliases = self._aliases(node)
        read = set(call.all_input_nodes)
        return not any(other in read for other in aliases if other is not node) and all(
            user is call or user in aliases or user.target in _SIZES for each in aliases for user in each.users
        )

    def _owns_memory(self, node: fx.Node) -> bool:
        """Whether a value is computed in this graph, into memory that nothing else refers to."""
        source = _source(node)
        if source in self._calls or source in self._donated:
            return True
        name, schema = op_name(source.target), getattr(source.target, "_schema", None)
        if source.op != "call_function" or schema is None or schema.is_mutable or name in VIEWS:
            return False
        if any(result.alias_info is not None for result in schema.returns):
            return False
        if name in _CASTS:
            before = source.args[0]
            return isinstance(before, fx.Node) and [t.dtype for t in tensors_of(before)] != [t.dtype for t in tensors_of(source)]
        is_pointwise = torch.Tag.pointwise in getattr(source.target, "tags", ())
        return is_pointwise or name in _FRESH_RESULTS

    def _aliases(self, node: fx.Node) -> set[fx.Node]:
        """The value and its views, by storage and by the schemas of ops."""
        source = _source(node)
        found = {node}
        worklist = [node]
        while worklist:
            at = worklist.pop()
            neighbors = [other for storage in _storages(at) for other in self._by_storage[storage]]
            neighbors += [user for user in at.users if _is_view(user)]
            for other in neighbors:
                if other not in found and other is not source and not _is_base_of(other, source):
                    found.add(other)
                    worklist.append(other)
        return found


def reusable(
    region: RegionProgram, call: fx.Node, inputs: tuple[fx.Node, ...], pairs: Collection[tuple[str, str]], memory: GraphMemory
) -> tuple[fx.Node | None, ...]:
    """For each output of a region, an input whose memory it can reuse, or None. No input is used twice.

    `inputs`: what `call` reads now, in the region's order. `pairs`: the (output, input) pairs that its kernels allow.
    """
    buffers = region.program.buffers
    node_of = dict(zip((b.name for b in buffers if b.role == "input"), inputs, strict=True))
    used: dict[fx.Node, None] = {}
    taken: list[fx.Node | None] = []
    for output in (b.name for b in buffers if b.role == "output"):
        candidates = (node_of[name] for out, name in pairs if out == output)
        # A graph input is overwritten without a view in between: torch does not track views of it.
        candidates = (n for n in candidates if n.op != "placeholder" or _same_layout(n, region.outputs[len(taken)]))
        found = next((n for n in candidates if n not in used and _is_reusable(n) and memory.is_dead_after(call, n)), None)
        taken.append(found)
        used |= {found: None} if found is not None else {}
    return tuple(taken)


def _same_layout(one: fx.Node, other: fx.Node) -> bool:
    (a,), (b,) = tensors_of(one), tensors_of(other)
    return [*map(str, (*a.shape, *a.stride()))] == [*map(str, (*b.shape, *b.stride()))] and a.dtype == b.dtype


def _is_reusable(node: fx.Node) -> bool:
    (tensor,) = tensors_of(node)
    return nbytes(node) >= MIN_BYTES and isinstance(tensor.storage_offset(), int) and tensor.storage_offset() == 0


def _storages(node: fx.Node) -> list[int]:
    """The storages of a node's results. Sparse and opaque tensors have none."""
    strided = (tensor for tensor in tensors_of(node) if tensor.layout is torch.strided)
    return [int(StorageWeakRef(tensor.untyped_storage()).cdata) for tensor in strided]


def _source(node: fx.Node) -> fx.Node:
    """The op that computes a value, also if the value is one of several results."""
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    return source


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    known_view = node.op == "call_function" and op_name(node.target) in VIEWS or node.target is operator.getitem
    return known_view or schema is not None and any(result.alias_info is not None for result in schema.returns)


def _is_base_of(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node is the empty tensor that a region's call fills: graphs give it the result's fake tensor."""
    return node.target is torch.ops.aten.empty_strided.default and list(node.users) == [source]
