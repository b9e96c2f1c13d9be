"""Lowering of views: the same value under other dims, or at other coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import compat
from ...ir.size import Size
from .align import reshape
from .call import Call, Handler, for_overloads, normalize_dim, with_shape_args
from .draft import Tensor
from .substitute import Affine, Coordinate, substitute


def moved(call: Call, tensor: Tensor, dim: int, to: Coordinate, atoms: tuple[str, ...]) -> Tensor:
    """Index one dim by another coordinate. `atoms` are the atoms of the new dim."""
    dims = call.draft.dims(tensor)
    node = substitute(call.draft, tensor.node, {dims[dim]: to}) if dims[dim] else tensor.node
    return call.draft.tensor(node, (*dims[:dim], atoms, *dims[dim + 1 :]))


def sliced(call: Call, tensor: Tensor, dim: int, start: Size, length: Size, step: int = 1) -> Tensor:
    """Every `step`-th position of a dim from `start`, `length` in all."""
    if start == 0 and step == 1 and length == call.draft.atoms.size(tensor.dims[dim]):
        return tensor
    atoms = call.draft.atoms.dim(length)
    return moved(call, tensor, dim, Affine(tuple((a, step) for a in atoms), start), atoms)


def picked(call: Call, tensor: Tensor, dim: int, position: Size) -> Tensor:
    """One position of a dim, which is removed."""
    one = moved(call, tensor, dim, Affine((), position), ())
    return Tensor(one.node, (*one.dims[:dim], *one.dims[dim + 1 :]))


def _view(call: Call) -> Tensor:
    """Reshape. Sizes named in the call are preferred to those of the result, where torch may write 2 as `s // (s // 2)`."""
    values, shape = call.args.values, call.shape
    named = values.get("size", values.get("shape"))
    if isinstance(named, (list, tuple)) and len(named) == len(shape):
        shape = tuple(n if isinstance(n, int) and n >= 0 else s for n, s in zip(named, shape, strict=True))
    return reshape(call.draft, call.args[0], shape)


def _identity(call: Call) -> Tensor:
    tensor: Tensor = call.args[0]
    return tensor


def _copy(call: Call) -> Tensor:
    """copy(old, new): the new values in the shape and dtype of the old tensor."""
    draft, shape, new = call.draft, call.shape, call.args[1]
    padded = ((),) * (len(shape) - len(new.dims)) + new.dims
    dims = tuple(dim or draft.atoms.dim(size) for dim, size in zip(padded, shape, strict=True))
    return draft.tensor(draft.cast(new.node, call.dtype), dims)


def _permute(call: Call) -> Tensor:
    tensor, order = call.args[:2]
    return Tensor(tensor.node, tuple(tensor.dims[normalize_dim(d, len(tensor.dims))] for d in order))


def _transpose(call: Call) -> Tensor:
    """transpose and t; the dims default to 0 and 1."""
    tensor, swapped = call.args[0], [call.arg(f"dim{k}", k) for k in (0, 1)]
    dims, rank = list(tensor.dims), len(tensor.dims)
    if rank > 1:
        a, b = (normalize_dim(d, rank) for d in swapped)
        dims[a], dims[b] = dims[b], dims[a]
    return Tensor(tensor.node, tuple(dims))


def _unsqueeze(call: Call) -> Tensor:
    tensor = call.args[0]
    at = normalize_dim(call.arg("dim"), len(tensor.dims) + 1)
    return Tensor(tensor.node, (*tensor.dims[:at], (), *tensor.dims[at:]))


def _squeeze(call: Call) -> Tensor:
    tensor, *rest = call.args
    rank, given = len(tensor.dims), rest[0] if rest else None
    chosen = range(rank) if given is None else given if isinstance(given, (list, tuple)) else (given,)
    removed = {normalize_dim(d, rank) for d in chosen} if rank else set()
    return Tensor(tensor.node, tuple(dim for d, dim in enumerate(tensor.dims) if dim or d not in removed))


def _expand(call: Call) -> Tensor:
    tensor, shape = call.args[0], call.shape
    padded = ((),) * (len(shape) - len(tensor.dims)) + tensor.dims
    dims = tuple(dim or call.draft.atoms.dim(size) for dim, size in zip(padded, shape, strict=True))
    return call.draft.tensor(tensor.node, dims)


def _broadcast_in_dim(call: Call) -> Tensor:
    """The prim behind expand: names the result dim of each dim."""
    tensor, shape, places = call.args[0], call.shape, call.arg("broadcast_dimensions")
    kept = {place: dim for place, dim in zip(places, tensor.dims, strict=True) if dim}
    return call.draft.tensor(tensor.node, tuple(kept.get(d) or call.draft.atoms.dim(s) for d, s in enumerate(shape)))


def _repeat(call: Call) -> Tensor:
    """Each dim gets the copies as its outer atom."""
    tensor, times = call.args[0], call.arg("repeats")
    padded = ((),) * (len(times) - len(tensor.dims)) + tensor.dims
    dims = tuple(call.draft.atoms.dim(call.size(n)) + dim for n, dim in zip(times, padded, strict=True))
    return call.draft.tensor(tensor.node, dims)


def _slice(call: Call) -> Tensor:
    tensor = call.args[0]
    dim = normalize_dim(call.arg("dim"), len(tensor.dims))
    return sliced(call, tensor, dim, _position(call, dim, "start"), call.shape[dim], call.static_size(call.arg("step")))


def _select(call: Call) -> Tensor:
    tensor = call.args[0]
    dim = normalize_dim(call.arg("dim"), len(tensor.dims))
    return picked(call, tensor, dim, _position(call, dim, "index"))


def normalize_position(call: Call, tensor: Tensor, dim: int, position: Any) -> Size:
    """A position counted from the front. Negative positions count from the end, and out-of-range ones are clamped, as in Python."""
    start = call.size(position)
    if not isinstance(start, int) or start == 0:
        return start
    extent = call.draft.atoms.size(tensor.dims[dim])
    if start > 0 and not isinstance(extent, int):
        return start
    size = call.static_size(extent)
    return max(start + size, 0) if start < 0 else min(start, size)


def _position(call: Call, dim: int, name: str) -> Size:
    """A slice position that may be symbolic and negative. Torch has guarded on which side of 0 and of the end it lies."""
    position, extent = call.torch_arg(name), call.input_fake.shape[dim]
    if position is None:
        return 0
    if (compat.size_hint(position) or 0) < 0:
        position = position + extent
    hint, most = (compat.size_hint(size) or 0 for size in (position, extent))
    return call.size(0 if hint < 0 else position if hint <= most else extent)


def _split(call: Call) -> tuple[Tensor, ...]:
    """split, split_with_sizes and chunk: adjacent slices, with lengths from torch's result."""
    dim = normalize_dim(call.arg("dim"), len(call.args[0].dims))
    return consecutive(call, call.args[0], dim, [call.shape_of(piece)[dim] for piece in call.result_fake])


def consecutive(call: Call, tensor: Tensor, dim: int, lengths: Sequence[Size]) -> tuple[Tensor, ...]:
    """Adjacent slices of the given lengths."""
    parts, start = list[Tensor](), 0
    for k, length in enumerate(lengths):
        parts.append(sliced(call, tensor, dim, start, length))
        if k + 1 < len(lengths):
            start += call.static_size(length)
    return tuple(parts)


def _unbind(call: Call) -> tuple[Tensor, ...]:
    dim = normalize_dim(call.arg("dim"), len(call.args[0].dims))
    return tuple(picked(call, call.args[0], dim, k) for k in range(len(call.result_fake)))


def _as_strided(call: Call) -> Tensor:
    """Refuse arbitrary strides, but accept those of a reshape: decompositions write reshapes of new tensors this way."""
    before, after = call.input_fake, call.result_fake
    dense = before.is_contiguous() and after.is_contiguous() and before.numel() == after.numel()
    if not dense or not _is_own_offset(call, before, call.arg("storage_offset")):
        _refuse_strides(call)
    return _view(call)


def _is_own_offset(call: Call, tensor: Any, offset: Any) -> bool:
    """Whether a storage offset is that of a tensor. None stands for the tensor's own offset."""
    return offset is None or call.size(offset) == call.size(tensor.storage_offset())


def _view_as_type(call: Call) -> Tensor:
    """A view as the same dtype is a no-op. As another dtype it reinterprets bits, which is refused."""
    if call.arg("dtype") is not call.input_fake.dtype:
        call.refuse_bitcast()
    return _identity(call)


def _refuse_strides(call: Call) -> Tensor:
    call.unsupported_view("it sets arbitrary strides")


VIEWS: dict[str, Handler] = {
    **dict.fromkeys(("aten.view.default", "aten._unsafe_view.default"), with_shape_args(_view, "size")),
    **dict.fromkeys(("aten.reshape.default", "prims.reshape.default"), with_shape_args(_view, "shape")),
    "aten.flatten.using_ints": with_shape_args(_view, "start_dim", "end_dim"),
    "prims.collapse_view.default": with_shape_args(_view, "start", "end"),
    "aten.view.dtype": _view_as_type,
    **dict.fromkeys(
        (
            "aten.clone.default",
            "aten.contiguous.default",
            "aten.alias.default",
            "aten.detach.default",
            "aten.lift_fresh.default",
            "aten.lift_fresh_copy.default",
            "aten.positive.default",
            "prims.clone.default",
            "prims.view_of.default",
        ),
        _identity,
    ),
    "aten.copy.default": with_shape_args(_copy, "self"),
    "aten.permute.default": _permute,
    "prims.transpose.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _transpose,
    "aten.unsqueeze.default": _unsqueeze,
    **for_overloads("aten.squeeze", "default dim dims", _squeeze),
    "prims.squeeze.default": _squeeze,
    "aten.expand.default": with_shape_args(_expand, "size"),
    "prims.broadcast_in_dim.default": with_shape_args(_broadcast_in_dim, "shape"),
    "aten.repeat.default": _repeat,
    "aten.slice.Tensor": with_shape_args(_slice, "end"),
    "aten.select.int": _select,
    **for_overloads("aten.split", "Tensor sizes", with_shape_args(_split, "split_size")),
    "aten.unsafe_split.Tensor": with_shape_args(_split, "split_size"),
    **dict.fromkeys(
        ("aten.split_with_sizes.default", "aten.unsafe_split_with_sizes.default"), with_shape_args(_split, "split_sizes")
    ),
    "aten.chunk.default": with_shape_args(_split, "chunks"),
    "aten.unbind.int": _unbind,
    "aten.as_strided.default": with_shape_args(_as_strided, "size", "stride"),
    "aten.unfold.default": _refuse_strides,
    "aten.diagonal.default": _refuse_strides,
}
