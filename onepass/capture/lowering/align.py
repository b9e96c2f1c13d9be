"""Broadcasting and reshaping of dims, expressed as splitting and unifying atoms.

Dims that meet in an op have equal sizes, and a reshape keeps the element count; torch has checked and guarded both. The
symbolic sizes need not show it: `s - s//2` and `s//2` are two different symbols here. In that case torch is trusted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import CaptureTooLong
from ...ir.budget import Budget
from ...ir.size import Size, product
from .axes import Dim, Dims, Inexpressible, Segment, common_factors, cut, segments
from .draft import Draft, Tensor
from .substitute import Affine, rename, substitute

REFINE_BUDGET = Budget("Aligning the dims of two tensors", CaptureTooLong, base=64, per_item=16)  # per_item: per dim


def broadcast(draft: Draft, tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], Dims]:
    """Broadcast several tensors to a common set of dims. Returns their nodes and those dims."""
    rank = max(len(t.dims) for t in tensors)
    dims: Dims = ((),) * rank
    nodes: list[int] = []
    for tensor in tensors:
        padded = Tensor(tensor.node, ((),) * (rank - len(tensor.dims)) + tensor.dims)
        joined = join(draft, padded, dims)
        nodes.append(joined.node)
        dims = tuple(own or other for own, other in zip(draft.dims(joined), _resolved(draft, dims), strict=True))
        draft.atoms.keep_distinct(a for dim in dims for a in dim)
    return tuple(nodes), dims


def join(draft: Draft, tensor: Tensor, onto: Dims) -> Tensor:
    """Return the tensor with the dims of `onto` wherever both have one.

    Atoms that meet are unified. Where they must stay distinct because one value is indexed by both (`x + x.t()`), the value is
    rewritten over the other atoms instead.
    """
    tensor = _with_common_factors(draft, tensor, onto)
    own, other = draft.dims(tensor), _resolved(draft, onto)
    pairs = [(a, b) for target, dim in zip(other, own, strict=True) if target and dim for a, b in zip(target, dim, strict=True)]
    other_atoms = {a for dim in other for a in dim}
    extra = [b for target, dim in zip(other, own, strict=True) if dim and not target for b in dim]
    if not other_atoms.intersection(extra) and _unify(draft, pairs):
        return tensor
    other = _resolved(draft, onto)  # _unify may have unified some pairs before it failed
    old = draft.atoms.resolve(b for dim in own for b in dim)
    target = {draft.atoms.final(b)[0]: draft.atoms.final(a)[0] for a, b in pairs}
    new = tuple(target.get(b) or _free_atom(draft, b, {a for dim in other for a in dim}) for b in old)
    moved = dict(zip(old, new, strict=True))
    node = substitute(draft, tensor.node, rename(old, new))
    return draft.tensor(node, tuple(tuple(moved[b] for b in dim) for dim in draft.dims(tensor)))


def _free_atom(draft: Draft, atom: str, other_atoms: set[str]) -> str:
    return draft.atoms.fresh(draft.atoms.extent(atom)) if atom in other_atoms else atom


def _unify(draft: Draft, pairs: Sequence[tuple[str, str]]) -> bool:
    """Unify atoms pair by pair. Returns False at the first pair that must stay distinct."""
    for a, b in pairs:
        a, b = draft.atoms.final(a)[0], draft.atoms.final(b)[0]
        if draft.atoms.are_distinct(a, b):
            return False
        draft.atoms.unify(a, b)
    return True


def _with_common_factors(draft: Draft, tensor: Tensor, onto: Dims) -> Tensor:
    """Split atoms on both sides until dims that meet have the same factors."""
    steps = REFINE_BUDGET.steps(len(onto))
    while (position := _first_mismatch(draft, tensor, onto)) is not None:
        steps.spend()
        tensor = _refined_once(draft, tensor, position, draft.atoms.resolve(onto[position]))
    return tensor


def _refined_once(draft: Draft, tensor: Tensor, position: int, onto: Dim) -> Tensor:
    """Resolve the first mismatch between a dim and the dim it meets: split atoms, or merge them into one."""
    dim = draft.dims(tensor)[position]
    pairs = segments(_extents(draft, dim), _extents(draft, onto))
    segment = next(s for s in pairs if _extents(draft, dim[slice(*s.left)]) != _extents(draft, onto[slice(*s.right)]))
    own, other = dim[slice(*segment.left)], onto[slice(*segment.right)]
    factors = common_factors(_extents(draft, other), _extents(draft, own))
    if factors is not None:
        draft.atoms.split(own if _extents(draft, own) != factors else other, factors)
    elif not own or not other:
        raise Inexpressible
    elif len(other) == 1 and (len(own) > 1 or isinstance(draft.atoms.extent(own[0]), int)):
        draft.atoms.split_as(other[0], _extents(draft, own))
    elif len(own) == 1:
        draft.atoms.split_as(own[0], _extents(draft, other))
    else:
        return _with_merged_run(draft, tensor, position, segment)
    return tensor


def _first_mismatch(draft: Draft, tensor: Tensor, onto: Dims) -> int | None:
    """The first dim whose factors differ from those of the dim it meets. Splitting one dim can also change another."""
    pairs = enumerate(zip(draft.dims(tensor), _resolved(draft, onto), strict=True))
    return next((d for d, (own, other) in pairs if own and other and _extents(draft, own) != _extents(draft, other)), None)


def _with_merged_run(draft: Draft, tensor: Tensor, position: int, run: Segment) -> Tensor:
    """The tensor with a run of atoms in one dim replaced by a single new atom."""
    dims = draft.dims(tensor)
    dim, (start, end) = dims[position], run.left
    node, atom = _merge_atoms(draft, tensor.node, dim[start:end])
    return draft.tensor(node, (*dims[:position], (*dim[:start], atom, *dim[end:]), *dims[position + 1 :]))


def _merge_atoms(draft: Draft, node: int, run: Dim) -> tuple[int, str]:
    atom = draft.atoms.fresh(draft.atoms.size(run))
    return substitute(draft, node, {run: Affine(((atom, 1),))}), atom


def reshape(draft: Draft, tensor: Tensor, sizes: Sequence[Size]) -> Tensor:
    """Reshape a tensor to `sizes` in row-major order."""
    if product(list(sizes)) == 0:
        zero = draft.const(0, draft.dtype(tensor.node))  # no element is ever read
        return draft.tensor(zero, tuple(draft.atoms.dim(s) for s in sizes))
    atoms = tuple(a for dim in draft.dims(tensor) for a in dim)
    target_sizes = tuple(s for s in sizes if s != 1)
    node, dims = tensor.node, list[Dim]()
    for segment in segments(_extents(draft, atoms), target_sizes):
        node, run = _regroup(draft, node, atoms[slice(*segment.left)], target_sizes[slice(*segment.right)])
        dims += run
    given = iter(dims)
    return draft.tensor(node, tuple(() if s == 1 else next(given) for s in sizes))


def _regroup(draft: Draft, node: int, run: Dim, target_sizes: tuple[Size, ...]) -> tuple[int, Dims]:
    """Regroup a run of atoms into dims of other sizes. Returns the value over them, and the dims.

    If the sizes share no common factors with the atoms, the run is first merged into one new atom.
    """
    factors = common_factors(_extents(draft, run), target_sizes)
    if factors is not None:
        atoms = draft.atoms.split(run, factors)
        return node, cut(atoms, _extents(draft, atoms), target_sizes)
    if not run or not target_sizes:
        raise Inexpressible
    if len(target_sizes) == 1:
        return node, (run,)
    if len(run) == 1:
        return node, tuple((atom,) for atom in draft.atoms.split_as(run[0], target_sizes))
    node, atom = _merge_atoms(draft, node, run)
    return _regroup(draft, node, (atom,), target_sizes)


def _extents(draft: Draft, dim: Dim) -> tuple[Size, ...]:
    return tuple(draft.atoms.extent(a) for a in dim)


def _resolved(draft: Draft, dims: Dims) -> Dims:
    return tuple(draft.atoms.resolve(dim) for dim in dims)
