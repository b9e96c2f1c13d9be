"""Sizes: an int, or an int times named symbols (`4096*s0`).

Extents, strides and offsets of a Program are Sizes. Usually the rows are symbolic and the columns are not. The extents and strides
of contiguous tensors are always such products, so no general expressions are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Sym:
    """`coef` times the product of `names` (sorted, repeats allowed, never empty)."""

    coef: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        factors = list(self.names) if self.coef == 1 else [str(self.coef), *self.names]
        return "*".join(factors)


Size: TypeAlias = int | Sym
Bindings: TypeAlias = Mapping[str, int]


def sym(name: str) -> Sym:
    """The size that consists of one symbol."""
    return Sym(1, (name,))


def mul(a: Size, b: Size) -> Size:
    """The product of two sizes."""
    coef = (a.coef if isinstance(a, Sym) else a) * (b.coef if isinstance(b, Sym) else b)
    names = tuple(sorted((a.names if isinstance(a, Sym) else ()) + (b.names if isinstance(b, Sym) else ())))
    return Sym(coef, names) if names and coef else coef


def product(sizes: "tuple[Size, ...] | list[Size]") -> Size:
    """The product of any number of sizes (1 for none)."""
    total: Size = 1
    for size in sizes:
        total = mul(total, size)
    return total


def divide(a: Size, b: Size) -> Size | None:
    """a / b if that is a Size, else None."""
    a_coef, a_names = (a.coef, list(a.names)) if isinstance(a, Sym) else (a, [])
    b_coef, b_names = (b.coef, list(b.names)) if isinstance(b, Sym) else (b, [])
    if b_coef == 0 or a_coef % b_coef:
        return None
    for name in b_names:
        if name not in a_names:
            return None
        a_names.remove(name)
    coef = a_coef // b_coef
    return Sym(coef, tuple(a_names)) if a_names and coef else coef


def value(size: Size, bindings: Bindings) -> int:
    """The size as a number, once its symbols are bound."""
    return size if isinstance(size, int) else size.coef * prod(bindings[n] for n in size.names)


def symbols(size: Size) -> tuple[str, ...]:
    """The symbols in a size."""
    return size.names if isinstance(size, Sym) else ()


def parse_size(text: str) -> Size:
    """The inverse of str(): `12`, `s0`, `4096*s0`."""
    total: Size = 1
    for part in text.split("*"):
        total = mul(total, int(part) if part.lstrip("-").isdigit() else sym(part))
    return total
