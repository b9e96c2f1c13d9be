"""Ops that make values from positions: cat, gather, scatter, arange, full."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from ..ir.expr import I64, compute_dtype
from ..ir.program import Reduce, operands
from ..ir.size import Size
from .align import broadcast, join
from .call import Call, Concat, Handler, positive
from .draft import Draft, Tensor
from .pointwise import literal
from .substitute import Lookup, substitute
from .views import moved, sliced


def _cat(call: Call) -> Concat | Tensor:
    """The pieces, unjoined. Empty pieces (a legacy shape [0] among them) add nothing."""
    dim = positive(call.arg(1, "dim", 0), len(call.gives.shape))
    pieces = [p for p in call.args[0] if len(p.dims) == len(call.gives.shape) and _length(call.draft, p, dim) != 0]
    converted = tuple(Tensor(call.draft.cast(p.node, call.dtype), p.dims) for p in pieces)
    if not converted:
        return _filled(call, 0)
    return converted[0] if len(converted) == 1 else _side_by_side(call.draft, dim, converted)


def _side_by_side(draft: Draft, dim: int, pieces: tuple[Tensor, ...]) -> Concat:
    """Pieces that run over the same atoms, except along the dim they are put together in."""
    first, *rest = pieces
    onto = tuple(() if d == dim else atoms for d, atoms in enumerate(first.dims))
    return Concat(dim, (first, *(join(draft, piece, onto) for piece in rest)))


def _stack(call: Call) -> Concat | Tensor:
    """cat along a new dim, in which each piece has size 1."""
    dim = positive(call.arg(1, "dim", 0), len(call.gives.shape))
    rows = [Tensor(call.draft.cast(p.node, call.dtype), (*p.dims[:dim], (), *p.dims[dim:])) for p in call.args[0]]
    return rows[0] if len(rows) == 1 else _side_by_side(call.draft, dim, tuple(rows))


def _pad(call: Call) -> Concat | Tensor:
    """A number before and after each dim, from the last dim on."""
    tensor, pad, value = call.args[0], call.args[1], call.arg(2, "value", 0)
    padded: Concat | Tensor = tensor
    for k in range(len(pad) // 2):
        dim, before, after = len(tensor.dims) - 1 - k, call.number(pad[2 * k]), call.number(pad[2 * k + 1])
        if before < 0 or after < 0:
            call.unsupported("negative padding")
        inner = joined(call, padded) if isinstance(padded, Concat) else padded
        ends = [_constant_like(call, inner, dim, n, value) for n in (before, after)]
        pieces = tuple(p for p in (ends[0], inner, ends[1]) if _length(call.draft, p, dim) != 0)
        padded = inner if len(pieces) == 1 else _side_by_side(call.draft, dim, pieces)
    return padded


def _constant_like(call: Call, like: Tensor, dim: int, length: int, value: float) -> Tensor:
    """A number in the shape of a tensor, but for the length of one dim."""
    dims = (*like.dims[:dim], call.draft.atoms.dim(length), *like.dims[dim + 1:])
    return call.draft.tensor(literal(call, value, call.dtype), dims)


def _length(draft: Draft, tensor: Tensor, dim: int) -> Size:
    return draft.atoms.size(tensor.dims[dim])


def starts(call: Call, concat: Concat) -> tuple[int, ...]:
    """Where each piece begins."""
    lengths = [call.number(_length(call.draft, p, concat.dim)) for p in concat.pieces]
    return tuple(accumulate(lengths[:-1], initial=0))


def joined(call: Call, concat: Concat) -> Tensor:
    """A concatenation as one value: each piece looked up where it is not past its end, then chosen by position."""
    draft, begins = call.draft, starts(call, concat)
    total = begins[-1] + call.number(_length(draft, concat.pieces[-1], concat.dim))
    along = draft.atoms.dim(total)
    position = draft.index(along)
    tensors = [_spread(call, p, concat.dim, begin, position, along)
               for p, begin in zip(concat.pieces, begins, strict=True)]
    nodes, dims = broadcast(draft, tensors)
    chosen = nodes[0]
    for node, begin in zip(nodes[1:], begins[1:], strict=True):
        chosen = _chosen(draft, draft.op("lt", position, draft.const(begin, I64)), chosen, node)
    return draft.tensor(chosen, dims)


def _chosen(draft: Draft, test: int, a: int, b: int) -> int:
    """where, computed in a type it may run in."""
    dtype = draft.dtype(a)
    wide = compute_dtype(dtype)
    return draft.cast(draft.op("where", test, draft.cast(a, wide), draft.cast(b, wide)), dtype)


def _spread(call: Call, piece: Tensor, dim: int, begin: int, position: int, along: tuple[str, ...]) -> Tensor:
    """A piece over the whole length; outside its own place it repeats its first or last element."""
    draft = call.draft
    length = call.number(_length(draft, piece, dim))
    if length == 1:
        return draft.tensor(piece.node, (*piece.dims[:dim], along, *piece.dims[dim + 1:]))
    if _folds_along(draft, piece.node, frozenset(draft.dims(piece)[dim])):
        call.unsupported("a concatenated piece holds a reduction, and more is computed from it")
    own = draft.op("sub", position, draft.const(begin, I64))
    own = draft.op("minimum", draft.op("maximum", own, draft.const(0, I64)), draft.const(length - 1, I64))
    return moved(call, piece, dim, Lookup(own, length), along)


def _folds_along(draft: Draft, node: int, atoms: frozenset[str]) -> bool:
    """Whether a reduction that varies over some atoms is part of a value."""
    waiting, seen = [node], {node}
    while waiting:
        at = waiting.pop()
        if draft.free(at) & atoms:
            if isinstance(draft.nodes[at], Reduce):
                return True
            waiting += [o for o in operands(draft.nodes[at]) if o not in seen]
            seen.update(waiting)
    return False


def _gather(call: Call) -> Tensor:
    """One element of the dim for every index: the source's expression with a looked-up coordinate."""
    source, index = call.args[0], call.args[2]
    draft, dim = call.draft, positive(call.args[1], len(call.args[0].dims))
    if not source.dims:
        return source
    source, index = _lined_up(call, source, index, dim)
    node = draft.cast(index.node, I64)
    extent = _length(draft, source, dim)
    moves = {draft.dims(source)[dim]: Lookup(node, extent)} if extent != 1 else {}
    return draft.tensor(substitute(draft, source.node, moves), draft.dims(index))


def _lined_up(call: Call, source: Tensor, index: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Source and index over the same atoms, except along the looked-up dim, where they have nothing in common."""
    draft = call.draft
    for d in range(len(source.dims)):
        if d != dim and _length(draft, index, d) != _length(draft, source, d):
            source = sliced(call, source, d, 0, _length(draft, index, d))
    onto = tuple(() if d == dim else dims for d, dims in enumerate(draft.dims(source)))
    return source, join(draft, index, onto)


def _scatter(call: Call) -> Tensor:
    """One place a row is overwritten: where(position == index, new, old)."""
    old, index, new = call.args[0], call.args[2], call.arg(3, "src", call.kwargs.get("value"))
    draft, dim = call.draft, positive(call.args[1], len(call.args[0].dims))
    if index.dims[dim] or any(_length(draft, index, d) != _length(draft, old, d) for d in range(len(old.dims)) if d != dim):
        call.unsupported("only one place a row")
    value = new if isinstance(new, Tensor) else Tensor(literal(call, new, call.dtype), ())
    along = draft.dims(old)[dim]
    position = Tensor(draft.index(along), (along, *((),) * (len(old.dims) - dim - 1)))
    (before, at, here, after), dims = broadcast(draft, [old, index, position, value])
    hit = draft.op("eq", draft.cast(at, I64), here)
    return draft.tensor(_chosen(draft, hit, draft.cast(after, call.dtype), before), dims)


def _iota(call: Call) -> Tensor:
    """start + step * position."""
    return _ramp(call, call.kwargs.get("start", 0), call.kwargs.get("step", 1))


def _arange(call: Call) -> Tensor:
    start, step = {1: (0, 1), 2: (call.args[0], 1)}.get(len(call.args), (call.args[0], call.args[-1]))
    return _ramp(call, start, step)


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
    """The same number everywhere."""
    draft = call.draft
    return draft.tensor(literal(call, value, call.dtype), tuple(draft.atoms.dim(s) for s in call.shape))


def _replaced(call: Call, old: Tensor, new: Tensor, dim: int, start: Any) -> Concat | Tensor:
    """A run of a dim overwritten: what is before it, the new, what is after it."""
    if _length(call.draft, new, dim) == _length(call.draft, old, dim):
        return new
    start = call.number(start or 0)
    start += call.number(_length(call.draft, old, dim)) if start < 0 else 0
    length, total = (call.number(_length(call.draft, t, dim)) for t in (new, old))
    end = start + length
    before, after = sliced(call, old, dim, 0, start), sliced(call, old, dim, end, total - end)
    return _side_by_side(call.draft, dim, tuple(p for p in (before, new, after) if _length(call.draft, p, dim) != 0))


def _slice_scatter(call: Call) -> Concat | Tensor:
    old, new = call.args[:2]
    dim = positive(call.arg(2, "dim", 0), len(old.dims))
    if call.arg(5, "step", 1) != 1:
        call.unsupported("a step")
    return _replaced(call, old, _cast_to(call, new), dim, call.arg(3, "start"))


def _select_scatter(call: Call) -> Concat | Tensor:
    old, new = call.args[:2]
    dim = positive(call.arg(2, "dim"), len(old.dims))
    row = Tensor(new.node, (*new.dims[:dim], (), *new.dims[dim:]))
    return _replaced(call, old, _cast_to(call, row), dim, call.arg(3, "index"))


def _slice_backward(call: Call) -> Concat | Tensor:
    """(grad, sizes, dim, start, end, step): grad among zeros."""
    grad, _, dim, start, _, step = call.args
    zeros = _filled(call, 0)
    dim = positive(dim, len(zeros.dims))
    if step != 1:
        call.unsupported("a step")
    return _replaced(call, zeros, grad, dim, start)


def _select_backward(call: Call) -> Concat | Tensor:
    """(grad, sizes, dim, index): grad among zeros."""
    grad, _, dim, index = call.args
    zeros = _filled(call, 0)
    dim = positive(dim, len(zeros.dims))
    row = Tensor(grad.node, (*grad.dims[:dim], (), *grad.dims[dim:]))
    return _replaced(call, zeros, row, dim, index)


def _cast_to(call: Call, tensor: Tensor) -> Tensor:
    return Tensor(call.draft.cast(tensor.node, call.dtype), tensor.dims)


def _complete(call: Call) -> Tensor:
    """full, fill and full_like; fill may take its number from a tensor."""
    value = call.arg(1, "fill_value", call.kwargs.get("value"))
    if isinstance(value, Tensor):
        return call.draft.tensor(call.draft.cast(value.node, call.dtype), tuple(call.draft.atoms.dim(s) for s in call.shape))
    return _filled(call, value)


LOOKUPS: dict[str, Handler] = {
    "aten.cat": _cat,
    "aten.stack": _stack,
    "aten.constant_pad_nd": _pad,
    "aten.gather": _gather,
    "aten.scatter": _scatter,
    "aten.slice_scatter": _slice_scatter,
    "aten.select_scatter": _select_scatter,
    "aten.slice_backward": _slice_backward,
    "aten.select_backward": _select_backward,
    "prims.iota": _iota,
    "aten.arange": _arange,
    **dict.fromkeys(("aten.full", "aten.full_like", "aten.fill"), _complete),
    **dict.fromkeys(("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.zero", "aten.empty", "aten.empty_like",
                     "aten.new_empty"), lambda call: _filled(call, 0)),
    **dict.fromkeys(("aten.ones", "aten.ones_like", "aten.new_ones"), lambda call: _filled(call, 1)),
    "aten.new_full": lambda call: _filled(call, call.arg(2, "fill_value")),
    "aten.scalar_tensor": lambda call: _filled(call, call.args[0]),
}
