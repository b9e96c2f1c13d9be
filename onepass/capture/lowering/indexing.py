"""Lowering of ops on positions: cat, pad, gather, scatter, arange, full."""

from __future__ import annotations

from itertools import accumulate
from math import nan
from typing import Any

from ...ir.expr import BOOL, I64, compute_dtype
from ...ir.program import Reduce, operands
from ...ir.size import Size
from .align import broadcast, join
from .call import Call, Concat, Handler, for_overloads, normalize_dim, with_shape_args
from .draft import Draft, Tensor
from .elementwise import checked_literal, literal
from .substitute import Lookup, substitute
from .views import moved, normalize_position, sliced


def _cat(call: Call) -> Concat | Tensor:
    """Keep the pieces separate. Empty pieces, including torch's legacy shape [0], are dropped."""
    dim = normalize_dim(call.arg("dim"), len(call.result_fake.shape))
    pieces = [p for p in call.args[0] if len(p.dims) == len(call.result_fake.shape) and _length(call.draft, p, dim) != 0]
    converted = tuple(Tensor(call.draft.cast(p.node, call.dtype), p.dims) for p in pieces)
    if not converted:
        return _filled(call, 0)
    return converted[0] if len(converted) == 1 else _concat(call.draft, dim, converted)


def _concat(draft: Draft, dim: int, pieces: tuple[Tensor, ...]) -> Concat:
    """Concatenate pieces along a dim. Their other dims are aligned to the same atoms."""
    first, *rest = pieces
    onto = tuple(() if d == dim else atoms for d, atoms in enumerate(first.dims))
    return Concat(dim, (first, *(join(draft, piece, onto) for piece in rest)))


def _stack(call: Call) -> Concat | Tensor:
    """Concatenate along a new dim in which each piece has size 1."""
    dim = normalize_dim(call.arg("dim"), len(call.result_fake.shape))
    stacked = [Tensor(call.draft.cast(p.node, call.dtype), (*p.dims[:dim], (), *p.dims[dim:])) for p in call.args[0]]
    return stacked[0] if len(stacked) == 1 else _concat(call.draft, dim, tuple(stacked))


def _pad(call: Call) -> Concat | Tensor:
    """Concatenate constants before and after each dim, starting with the last dim."""
    tensor, pad, value = call.args
    padded: Concat | Tensor = tensor
    for k in range(len(pad) // 2):
        dim, before, after = len(tensor.dims) - 1 - k, call.static_size(pad[2 * k]), call.static_size(pad[2 * k + 1])
        if before < 0 or after < 0:
            call.unsupported("negative padding")
        inner = materialized(call, padded) if isinstance(padded, Concat) else padded
        ends = [_constant_like(call, inner, dim, n, value) for n in (before, after)]
        pieces = tuple(p for p in (ends[0], inner, ends[1]) if _length(call.draft, p, dim) != 0) or (inner,)
        padded = pieces[0] if len(pieces) == 1 else _concat(call.draft, dim, pieces)
    return padded


def _constant_like(call: Call, like: Tensor, dim: int, length: int, value: float) -> Tensor:
    """A constant shaped like a tensor except for the length of one dim."""
    dims = (*like.dims[:dim], call.draft.atoms.dim(length), *like.dims[dim + 1 :])
    return call.draft.tensor(call.draft.cast(checked_literal(call, value, call.dtype), call.dtype), dims)


def _length(draft: Draft, tensor: Tensor, dim: int) -> Size:
    return draft.atoms.size(tensor.dims[dim])


def piece_offsets(call: Call, concat: Concat) -> tuple[int, ...]:
    """The start position of each piece."""
    lengths = [call.static_size(_length(call.draft, p, concat.dim)) for p in concat.pieces]
    return tuple(accumulate(lengths[:-1], initial=0))


def materialized(call: Call, concat: Concat) -> Tensor:
    """Turn a concatenation into one value: index each piece with a position clamped to its range, then select by position."""
    draft, begins = call.draft, piece_offsets(call, concat)
    total = begins[-1] + call.static_size(_length(draft, concat.pieces[-1], concat.dim))
    along = draft.atoms.dim(total)
    position = draft.index(along)
    tensors = [_extended(call, p, concat.dim, begin, position, along) for p, begin in zip(concat.pieces, begins, strict=True)]
    nodes, dims = broadcast(draft, tensors)
    chosen = nodes[0]
    for node, begin in zip(nodes[1:], begins[1:], strict=True):
        chosen = _select(draft, draft.op("lt", position, draft.const(begin, I64)), chosen, node)
    return draft.tensor(chosen, dims)


def _select(draft: Draft, test: int, a: int, b: int) -> int:
    """`where`, computed in the compute type of the operands."""
    dtype = draft.dtype(a)
    wide = compute_dtype(dtype)
    return draft.cast(draft.op("where", test, draft.cast(a, wide), draft.cast(b, wide)), dtype)


def _extended(call: Call, piece: Tensor, dim: int, begin: int, position: int, along: tuple[str, ...]) -> Tensor:
    """A piece extended to the full length: positions outside it repeat its first or last element."""
    draft = call.draft
    length = call.static_size(_length(draft, piece, dim))
    if length == 1:
        return draft.tensor(piece.node, (*piece.dims[:dim], along, *piece.dims[dim + 1 :]))
    if _reduces_along(draft, piece.node, frozenset(draft.dims(piece)[dim])):
        call.unsupported("a concatenated piece contains a reduction, and the result is used in further ops")
    own = draft.op("sub", position, draft.const(begin, I64))
    own = draft.op("minimum", draft.op("maximum", own, draft.const(0, I64)), draft.const(length - 1, I64))
    return moved(call, piece, dim, Lookup(own, length), along)


def _reduces_along(draft: Draft, node: int, atoms: frozenset[str]) -> bool:
    """Whether a value contains a reduction that varies over any of the atoms."""
    worklist, seen = [node], {node}
    while worklist:
        at = worklist.pop()
        if draft.free(at) & atoms:
            if isinstance(draft.nodes[at], Reduce):
                return True
            worklist += [o for o in operands(draft.nodes[at]) if o not in seen]
            seen.update(worklist)
    return False


def _gather(call: Call) -> Tensor:
    """Gather along a dim: the source's expression with a looked-up coordinate.

    Out-of-range indices read nothing; docs/architecture.md says under Numerics what they yield.
    """
    given, dim, places = call.args
    source, index = map(_at_least_1d, (given, places))
    draft, dim = call.draft, normalize_dim(dim, len(source.dims))
    if len(index.dims) != len(source.dims):
        return _filled(call, 0)  # torch allows this only for an index without elements
    source, index = _align_index(call, source, index, dim)
    node = draft.cast(index.node, I64)
    extent = _length(draft, source, dim)
    dims = draft.dims(index) if places.dims else ()
    if extent == 1:
        return draft.tensor(_single_element(draft, source.node, node), dims)
    moves = {draft.dims(source)[dim]: Lookup(node, extent)}
    return draft.tensor(substitute(draft, source.node, moves), dims)


def _at_least_1d(tensor: Tensor) -> Tensor:
    """The tensor, or a 0-dim tensor as one of a single element: torch accepts either."""
    return tensor if tensor.dims else Tensor(tensor.node, ((),))


def _single_element(draft: Draft, value: int, index: int) -> int:
    """The only element of a dim of size 1; NaN (0 for types without NaN) for any other index."""
    dtype = draft.dtype(value)
    outside = draft.const(nan if dtype.is_float else False if dtype is BOOL else 0, dtype)
    return _select(draft, draft.op("eq", index, draft.const(0, I64)), value, outside)


def _align_index(call: Call, source: Tensor, index: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Align source and index to the same atoms in every dim but the looked-up one."""
    draft = call.draft
    for d in range(len(source.dims)):
        if d != dim and _length(draft, index, d) != _length(draft, source, d):
            source = sliced(call, source, d, 0, _length(draft, index, d))
    onto = tuple(() if d == dim else dims for d, dims in enumerate(draft.dims(source)))
    return source, join(draft, index, onto)


def _scatter(call: Call) -> Tensor:
    """Scatter to one position per row: where(position == index, new, old)."""
    given: Tensor
    given, dim, places, new = call.args
    old, index = map(_at_least_1d, (given, places))
    draft, dim = call.draft, normalize_dim(dim, len(old.dims))
    if len(index.dims) != len(old.dims):
        return given  # torch allows this only for an index without elements
    if index.dims[dim] or any(_length(draft, index, d) != _length(draft, old, d) for d in range(len(old.dims)) if d != dim):
        call.unsupported("only one index per row is supported")
    if isinstance(new, Tensor):
        value = _leading_slice(call, _at_least_1d(new), index)
    else:
        value = Tensor(checked_literal(call, new, call.dtype), ())
    along = draft.dims(old)[dim]
    position = Tensor(draft.index(along), (along, *((),) * (len(old.dims) - dim - 1)))
    (before, at, here, after), dims = broadcast(draft, [old, index, position, value])
    hit = draft.op("eq", draft.cast(at, I64), here)
    return draft.tensor(_select(draft, hit, draft.cast(after, call.dtype), before), dims if given.dims else ())


def _leading_slice(call: Call, tensor: Tensor, like: Tensor) -> Tensor:
    """The leading elements of each dim, as many as `like` has. torch uses only those of the new values that an index meets."""
    for d in range(len(tensor.dims)):
        tensor = sliced(call, tensor, d, 0, _length(call.draft, like, d))
    return tensor


def _arange(call: Call) -> Tensor:
    """start + step * position. The length comes from the result's shape."""
    return _ramp(call, call.arg("start", 0), call.arg("step", 1))


def _iota(call: Call) -> Tensor:
    if call.arg("requires_grad"):
        call.unsupported("requires_grad=True")
    return _arange(call)


def _ramp(call: Call, start: Any, step: Any) -> Tensor:
    draft = call.draft
    (dim,) = (draft.atoms.dim(s) for s in call.shape)
    dtype = compute_dtype(call.dtype)
    node = draft.cast(draft.index(dim), dtype)
    if step != 1:
        node = draft.op("mul", node, literal(call, step, dtype))
    if start != 0:
        node = draft.op("add", node, literal(call, start, dtype))
    return draft.tensor(draft.cast(node, call.dtype), (dim,))


def _filled(call: Call, value: Any) -> Tensor:
    """A constant tensor."""
    draft = call.draft
    node = draft.cast(checked_literal(call, value, call.dtype), call.dtype)
    return draft.tensor(node, tuple(draft.atoms.dim(s) for s in call.shape))


def _overwrite(call: Call, old: Tensor, new: Tensor, dim: int, start: Any, end: Any) -> Concat | Tensor:
    """Replace a range of a dim by new values: concatenate what is before it, the new values, and what is after it."""
    shapes = [[call.draft.atoms.size(atoms) for atoms in t.dims] for t in (new, old)]
    if shapes[0] == shapes[1]:
        return new
    if len(new.dims) != len(old.dims) or any(a != b for d, (a, b) in enumerate(zip(*shapes, strict=True)) if d != dim):
        call.unsupported("the new values do not have the shape of those they replace")
    length, total = (call.static_size(_length(call.draft, t, dim)) for t in (new, old))
    start = call.static_size(normalize_position(call, old, dim, start or 0))
    end = total if end is None else call.static_size(normalize_position(call, old, dim, end))
    if end - start != length:
        call.unsupported("the new values do not have the shape of those they replace")
    before, after = sliced(call, old, dim, 0, start), sliced(call, old, dim, end, total - end)
    return _concat(call.draft, dim, tuple(p for p in (before, new, after) if _length(call.draft, p, dim) != 0))


def _slice_scatter(call: Call) -> Concat | Tensor:
    old, new = call.args[:2]
    dim = normalize_dim(call.arg("dim"), len(old.dims))
    if call.arg("step") != 1:
        call.unsupported("a step other than 1")
    return _overwrite(call, old, _cast_to(call, new), dim, call.arg("start"), call.arg("end"))


def _select_scatter(call: Call) -> Concat | Tensor:
    old, new = call.args[:2]
    dim = normalize_dim(call.arg("dim"), len(old.dims))
    row = Tensor(new.node, (*new.dims[:dim], (), *new.dims[dim:]))
    return _overwrite_position(call, old, _cast_to(call, row), dim)


def _slice_backward(call: Call) -> Concat | Tensor:
    """The gradient, padded with zeros."""
    grad, dim, start, end, step = (call.arg(name) for name in ("grad_output", "dim", "start", "end", "step"))
    zeros = _filled(call, 0)
    dim = normalize_dim(dim, len(zeros.dims))
    if step != 1:
        call.unsupported("a step other than 1")
    return _overwrite(call, zeros, grad, dim, start, end)


def _select_backward(call: Call) -> Concat | Tensor:
    """The gradient, padded with zeros."""
    grad, zeros = call.arg("grad_output"), _filled(call, 0)
    dim = normalize_dim(call.arg("dim"), len(zeros.dims))
    row = Tensor(grad.node, (*grad.dims[:dim], (), *grad.dims[dim:]))
    return _overwrite_position(call, zeros, row, dim)


def _overwrite_position(call: Call, old: Tensor, row: Tensor, dim: int) -> Concat | Tensor:
    """Replace the position `index` of a dim."""
    at = call.static_size(normalize_position(call, old, dim, call.arg("index")))
    return _overwrite(call, old, row, dim, at, at + 1)


def _cast_to(call: Call, tensor: Tensor) -> Tensor:
    return Tensor(call.draft.cast(tensor.node, call.dtype), tensor.dims)


def _full(call: Call, value: Any) -> Tensor:
    """A constant tensor. The value may be a 0-dim tensor."""
    if isinstance(value, Tensor):
        return call.draft.tensor(call.draft.cast(value.node, call.dtype), tuple(call.draft.atoms.dim(s) for s in call.shape))
    return _filled(call, value)


def _fill_with(value: int) -> Handler:
    return lambda call: _filled(call, value)


def _constructors(op: str, overload: str, handler: Handler) -> dict[str, Handler]:
    """Table entries for the three forms of a constructor: `op(size)`, `op_like(tensor)` and `tensor.new_op(size)`."""
    return {
        f"aten.{op}.{overload}": with_shape_args(handler, "size", "dtype"),
        f"aten.{op}_like.default": with_shape_args(handler, "self", "dtype"),
        f"aten.new_{op}.default": with_shape_args(handler, "self", "size", "dtype"),
    }


INDEXING_OPS: dict[str, Handler] = {
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.constant_pad_nd.default": _pad,
    "aten.gather.default": _gather,
    **for_overloads("aten.scatter", "src value", _scatter),
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.slice_backward.default": with_shape_args(_slice_backward, "input_sizes"),
    "aten.select_backward.default": with_shape_args(_select_backward, "input_sizes"),
    "prims.iota.default": with_shape_args(_iota, "length", "dtype"),
    **for_overloads("aten.arange", "default start start_step", with_shape_args(_arange, "end", "dtype")),
    **_constructors("full", "default", lambda call: _full(call, call.arg("fill_value"))),
    **_constructors("zeros", "default", _fill_with(0)),
    **_constructors("ones", "default", _fill_with(1)),
    **_constructors("empty", "memory_format", _fill_with(0)),
    **for_overloads("aten.fill", "Scalar Tensor", with_shape_args(lambda call: _full(call, call.arg("value")), "self")),
    "aten.zero.default": with_shape_args(_fill_with(0), "self"),
    "aten.scalar_tensor.default": with_shape_args(lambda call: _full(call, call.arg("s")), "dtype"),
    "prims.scalar_tensor.default": with_shape_args(lambda call: _full(call, call.arg("s")), "dtype"),
}
