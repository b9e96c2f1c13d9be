"""Views: other dims over the same atoms, or the same value at moved coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir.size import Size
from .align import reshape
from .call import Call, Handler, positive
from .draft import Tensor
from .substitute import Affine, Coordinate, substitute


def moved(call: Call, tensor: Tensor, dim: int, to: Coordinate, atoms: tuple[str, ...]) -> Tensor:
    """The tensor with one dim indexed by other coordinates; `atoms` are what the dim then runs over."""
    dims = call.draft.dims(tensor)
    node = substitute(call.draft, tensor.node, {dims[dim]: to}) if dims[dim] else tensor.node
    return call.draft.tensor(node, (*dims[:dim], atoms, *dims[dim + 1:]))


def sliced(call: Call, tensor: Tensor, dim: int, start: Size, length: Size, step: int = 1) -> Tensor:
    """Every `step`-th of the positions from `start` on, `length` in all."""
    if start == 0 and step == 1 and length == call.draft.atoms.size(tensor.dims[dim]):
        return tensor
    atoms = call.draft.atoms.dim(length)
    return moved(call, tensor, dim, Affine(tuple((a, step) for a in atoms), start), atoms)


def picked(call: Call, tensor: Tensor, dim: int, position: Size) -> Tensor:
    """One position of a dim; the dim is gone."""
    one = moved(call, tensor, dim, Affine((), position), ())
    return Tensor(one.node, (*one.dims[:dim], *one.dims[dim + 1:]))


def _view(call: Call) -> Tensor:
    return reshape(call.draft, call.args[0], call.shape)


def _same(call: Call) -> Tensor:
    return call.args[0]


def _copy(call: Call) -> Tensor:
    """(old, new): the new values in the old tensor's shape and type."""
    draft, shape, new = call.draft, call.shape, call.args[1]
    padded = ((),) * (len(shape) - len(new.dims)) + new.dims
    dims = tuple(dim or draft.atoms.dim(size) for dim, size in zip(padded, shape, strict=True))
    return draft.tensor(draft.cast(new.node, call.dtype), dims)


def _permute(call: Call) -> Tensor:
    tensor, order = call.args[0], call.arg(1, "dims")
    return Tensor(tensor.node, tuple(tensor.dims[positive(d, len(tensor.dims))] for d in order))


def _swap(call: Call) -> Tensor:
    """transpose, and t with its default dims."""
    tensor = call.args[0]
    dims, rank = list(tensor.dims), len(tensor.dims)
    if rank > 1:
        a, b = (positive(call.arg(k, f"dim{k - 1}", k - 1), rank) for k in (1, 2))
        dims[a], dims[b] = dims[b], dims[a]
    return Tensor(tensor.node, tuple(dims))


def _unsqueeze(call: Call) -> Tensor:
    tensor = call.args[0]
    at = positive(call.arg(1, "dim"), len(tensor.dims) + 1)
    return Tensor(tensor.node, (*tensor.dims[:at], (), *tensor.dims[at:]))


def _squeeze(call: Call) -> Tensor:
    tensor, given = call.args[0], call.arg(1, "dim")
    rank = len(tensor.dims)
    chosen = range(rank) if given is None else given if isinstance(given, (list, tuple)) else (given,)
    gone = {positive(d, rank) for d in chosen} if rank else set()
    return Tensor(tensor.node, tuple(dim for d, dim in enumerate(tensor.dims) if dim or d not in gone))


def _expand(call: Call) -> Tensor:
    tensor, shape = call.args[0], call.shape
    padded = ((),) * (len(shape) - len(tensor.dims)) + tensor.dims
    dims = tuple(dim or call.draft.atoms.dim(size) for dim, size in zip(padded, shape, strict=True))
    return call.draft.tensor(tensor.node, dims)


def _broadcast_in_dim(call: Call) -> Tensor:
    """The prim behind expand: names the dim of the result each dim becomes."""
    tensor, shape, places = call.args[0], call.shape, call.arg(2, "broadcast_dimensions")
    kept = {place: dim for place, dim in zip(places, tensor.dims, strict=True) if dim}
    return call.draft.tensor(tensor.node, tuple(kept.get(d) or call.draft.atoms.dim(s) for d, s in enumerate(shape)))


def _repeat(call: Call) -> Tensor:
    """Each dim counts the copies first, then what is copied."""
    tensor, times = call.args[0], call.arg(1, "repeats")
    padded = ((),) * (len(times) - len(tensor.dims)) + tensor.dims
    dims = tuple(call.draft.atoms.dim(call.size(n)) + dim for n, dim in zip(times, padded, strict=True))
    return call.draft.tensor(tensor.node, dims)


def _slice(call: Call) -> Tensor:
    tensor = call.args[0]
    dim = positive(call.arg(1, "dim", 0), len(tensor.dims))
    start, step = call.arg(2, "start"), call.arg(4, "step", 1)
    return sliced(call, tensor, dim, _from_front(call, tensor, dim, start or 0), call.shape[dim], call.number(step))


def _select(call: Call) -> Tensor:
    tensor = call.args[0]
    dim = positive(call.arg(1, "dim"), len(tensor.dims))
    return picked(call, tensor, dim, _from_front(call, tensor, dim, call.arg(2, "index")))


def _from_front(call: Call, tensor: Tensor, dim: int, position: Any) -> Size:
    """A position counted from the front, where Python counts negative ones from the end and stops at the ends."""
    start = call.size(position)
    if not isinstance(start, int) or start == 0:
        return start
    extent = call.draft.atoms.size(tensor.dims[dim])
    if start > 0 and not isinstance(extent, int):
        return start
    size = call.number(extent)
    return max(start + size, 0) if start < 0 else min(start, size)


def _pieces(call: Call) -> tuple[Tensor, ...]:
    """split, split_with_sizes, chunk: neighbouring slices, as long as torch says they are."""
    dim = positive(call.arg(2, "dim", 0), len(call.args[0].dims))
    return consecutive(call, call.args[0], dim, [call.shape_of(piece)[dim] for piece in call.gives])


def consecutive(call: Call, tensor: Tensor, dim: int, lengths: Sequence[Size]) -> tuple[Tensor, ...]:
    """Slices of the given lengths, one after the other."""
    parts, start = list[Tensor](), 0
    for k, length in enumerate(lengths):
        parts.append(sliced(call, tensor, dim, start, length))
        if k + 1 < len(lengths):
            start += call.number(length)
    return tuple(parts)


def _unbind(call: Call) -> tuple[Tensor, ...]:
    dim = positive(call.arg(1, "dim", 0), len(call.args[0].dims))
    return tuple(picked(call, call.args[0], dim, k) for k in range(len(call.gives)))


def _as_strided(call: Call) -> Tensor:
    """Free strides are refused, but decompositions write plain reshapes of fresh memory this way too."""
    before, after = call.takes, call.gives
    dense = before.is_contiguous() and after.is_contiguous() and before.numel() == after.numel()
    if call.arg(3, "storage_offset") or not dense:
        _refused(call)
    return _view(call)


def _refused(call: Call) -> Tensor:
    call.no_view("its strides are free")


VIEWS: dict[str, Handler] = {
    **dict.fromkeys(("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.flatten",
                     "prims.view_of", "prims.collapse_view", "prims.reshape"), _view),
    **dict.fromkeys(("aten.clone", "aten.contiguous", "aten.alias", "aten.detach", "aten.lift_fresh", "aten.lift_fresh_copy",
                     "prims.clone", "aten.positive"), _same),
    "aten.copy": _copy,
    "aten.permute": _permute,
    "prims.transpose": _permute,
    "aten.transpose": _swap,
    "aten.t": _swap,
    "aten.unsqueeze": _unsqueeze,
    "aten.squeeze": _squeeze,
    "prims.squeeze": _squeeze,
    "aten.expand": _expand,
    "prims.broadcast_in_dim": _broadcast_in_dim,
    "aten.repeat": _repeat,
    "aten.slice": _slice,
    "aten.select": _select,
    **dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unsafe_split", "aten.unsafe_split_with_sizes"),
                    _pieces),
    "aten.unbind": _unbind,
    "aten.as_strided": _as_strided,
    "aten.unfold": _refused,
    "aten.diagonal": _refused,
}
