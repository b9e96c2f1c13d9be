"""Where dims meet: broadcasting, and reshaping as regrouping of atoms."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.size import Size, product
from .axes import Dim, Dims, common_factors, cut, segments
from .draft import Draft, Tensor
from .substitute import Affine, rename, substitute


def broadcast(draft: Draft, tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], Dims]:
    """The nodes of several tensors over one set of dims, as an elementwise op needs them."""
    rank = max(len(t.dims) for t in tensors)
    dims: Dims = ((),) * rank
    nodes: list[int] = []
    for tensor in tensors:
        padded = Tensor(tensor.node, ((),) * (rank - len(tensor.dims)) + tensor.dims)
        joined = join(draft, padded, dims)
        nodes.append(joined.node)
        dims = tuple(own or met for own, met in zip(draft.dims(joined), _resolved(draft, dims), strict=True))
        draft.atoms.keep_apart(a for dim in dims for a in dim)
    return tuple(nodes), dims


def join(draft: Draft, tensor: Tensor, onto: Dims) -> Tensor:
    """The tensor with its dims made those of `onto` wherever both have one.

    The atoms that meet become one. Where they cannot, because both index one value already (`x + x.t()`), the tensor is
    written again over the atoms it must have.
    """
    tensor = _refined(draft, tensor, onto)
    own, met = draft.dims(tensor), _resolved(draft, onto)
    pairs = [(a, b) for target, dim in zip(met, own, strict=True) if target and dim for a, b in zip(target, dim, strict=True)]
    taken = {a for dim in met for a in dim}
    extra = [b for target, dim in zip(met, own, strict=True) if dim and not target for b in dim]
    if not taken.intersection(extra) and _unify(draft, pairs):
        return tensor
    met = _resolved(draft, onto)  # some pairs may have become one before the first that cannot
    old = draft.atoms.resolve(b for dim in own for b in dim)
    target = {draft.atoms.final(b)[0]: draft.atoms.final(a)[0] for a, b in pairs}
    new = tuple(target.get(b) or _elsewhere(draft, b, {a for dim in met for a in dim}) for b in old)
    moved = dict(zip(old, new, strict=True))
    node = substitute(draft, tensor.node, rename(old, new))
    return draft.tensor(node, tuple(tuple(moved[b] for b in dim) for dim in draft.dims(tensor)))


def _elsewhere(draft: Draft, atom: str, taken: set[str]) -> str:
    return draft.atoms.fresh(draft.atoms.extent(atom)) if atom in taken else atom


def _unify(draft: Draft, pairs: Sequence[tuple[str, str]]) -> bool:
    """Make atoms one, pair by pair; False at the first pair that must stay apart."""
    for a, b in pairs:
        a, b = draft.atoms.final(a)[0], draft.atoms.final(b)[0]
        if draft.atoms.are_apart(a, b):
            return False
        draft.atoms.unify(a, b)
    return True


def _refined(draft: Draft, tensor: Tensor, onto: Dims) -> Tensor:
    """The tensor with atoms split, on both sides, until the dims that meet have the same factors."""
    while (position := _unlike(draft, tensor, onto)) is not None:
        own, met = draft.dims(tensor)[position], draft.atoms.resolve(onto[position])
        factors = common_factors(_extents(draft, met), _extents(draft, own))
        if factors is None:
            tensor = merged(draft, tensor, position)
        else:
            draft.atoms.split(own if _extents(draft, own) != factors else met, factors)
    return tensor


def _unlike(draft: Draft, tensor: Tensor, onto: Dims) -> int | None:
    """The first dim whose factors differ from those of the dim it meets. A split in one dim may show in another."""
    pairs = enumerate(zip(draft.dims(tensor), _resolved(draft, onto), strict=True))
    return next((d for d, (own, met) in pairs if own and met and _extents(draft, own) != _extents(draft, met)), None)


def merged(draft: Draft, tensor: Tensor, position: int) -> Tensor:
    """The tensor with one dim counted by a single new atom, whatever it was made of."""
    dims = draft.dims(tensor)
    dim = dims[position]
    if len(dim) < 2:
        return tensor
    node, atom = _merge(draft, tensor.node, dim)
    return draft.tensor(node, (*dims[:position], (atom,), *dims[position + 1:]))


def _merge(draft: Draft, node: int, run: Dim) -> tuple[int, str]:
    atom = draft.atoms.fresh(draft.atoms.size(run))
    return substitute(draft, node, {run: Affine(((atom, 1),))}), atom


def reshape(draft: Draft, tensor: Tensor, sizes: Sequence[Size]) -> Tensor:
    """The tensor's elements in row-major order under another shape."""
    if product(list(sizes)) == 0:
        nothing = draft.const(0, draft.dtype(tensor.node))  # no element is ever read
        return draft.tensor(nothing, tuple(draft.atoms.dim(s) for s in sizes))
    atoms = tuple(a for dim in draft.dims(tensor) for a in dim)
    wanted = tuple(s for s in sizes if s != 1)
    if common_factors(_extents(draft, atoms), wanted) is None:
        tensor, atoms = _regrouped(draft, tensor, atoms, wanted)
    factors = common_factors(_extents(draft, atoms), wanted)
    assert factors is not None
    atoms = draft.atoms.split(atoms, factors)
    return draft.tensor(tensor.node, cut(atoms, _extents(draft, atoms), sizes))


def _regrouped(draft: Draft, tensor: Tensor, atoms: Dim, wanted: tuple[Size, ...]) -> tuple[Tensor, Dim]:
    """The tensor with every run of atoms that has no common factors with what is wanted counted by one new atom."""
    node, found = tensor.node, list[str]()
    extents = _extents(draft, atoms)
    for segment in segments(extents, wanted):
        run = atoms[slice(*segment.left)]
        if common_factors(extents[slice(*segment.left)], wanted[slice(*segment.right)]) is None:
            node, atom = _merge(draft, node, run)
            run = (atom,)
        found += run
    return Tensor(node, (tuple(found),)), tuple(found)


def _extents(draft: Draft, dim: Dim) -> tuple[Size, ...]:
    return tuple(draft.atoms.extent(a) for a in dim)


def _resolved(draft: Draft, dims: Dims) -> Dims:
    return tuple(draft.atoms.resolve(dim) for dim in dims)
