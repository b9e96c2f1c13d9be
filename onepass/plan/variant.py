"""Variants: which calls of a Program share a plan.

A plan depends on the Program, the sizes it is made for, which tensors are aligned, and the device. Sizes that kernels must know at
compile time are specialized. All other row counts fall into classes, and a class is planned for one representative count, so a plan
never depends on which call came first.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import inf, prod

from ..device import Device
from ..ir.program import Program
from ..ir.size import Bindings, product, sym, value
from ..ir.specialize import substitute, symbols_to_specialize
from ..stages import stage

# (upper bound, representative) of each class of row counts, in rows per SM. A call has at most twice as many rows as its class is
# planned for. Exceptions: the first class is planned for its bound, and the last has none, because waves no longer matter there.
ROW_CLASSES = ((1 / 8, 1 / 8), (1, 1 / 2), (4, 2), (16, 8), (64, 32), (256, 128), (inf, 512))


@dataclass(frozen=True)
class Variant:
    """Everything besides the Program that a plan depends on. Sizes are (symbol, value) pairs."""

    fixed: tuple[tuple[str, int], ...]  # sizes specialized in the Program
    sizes: tuple[tuple[str, int], ...]  # sizes planned for: the representatives of a row class
    aligned: frozenset[str]  # inputs and outputs that start at a multiple of 16 bytes
    device: Device


def variant_of(
    program: Program,
    bindings: Bindings,
    device: Device,
    aligned: frozenset[str] | None = None,
    specialize: frozenset[str] | None = None,
) -> Variant:
    """The Variant that serves a call. `aligned` names the aligned tensors; None: all of them, as torch allocates them.

    `specialize` is `symbols_to_specialize(program)`, if the caller knows it.
    """
    names = symbols_to_specialize(program) if specialize is None else specialize
    fixed = {name: bindings[name] for name in sorted(names)}
    free = {name: bindings[name] for name in program.symbols if name not in fixed}
    sizes = representative_sizes(substitute(program, fixed), free, device)
    buffers = frozenset(program.buffer)
    return Variant(tuple(fixed.items()), tuple(sizes.items()), buffers if aligned is None else aligned & buffers, device)


def specialized(program: Program, variant: Variant) -> Program:
    """The Program that a Variant plans: sizes specialized, and unaligned buffers marked, because TMA cannot read them."""
    fixed = substitute(program, dict(variant.fixed))
    return replace(fixed, buffers=tuple(replace(b, aligned=b.name in variant.aligned) for b in fixed.buffers))


@stage("fixing sizes of a Program")
def specialize(program: Program, bindings: Bindings) -> tuple[Program, Bindings]:
    """Replace the sizes that kernels need at compile time by their values. Returns the Program and the remaining bindings."""
    static = symbols_to_specialize(program)
    fixed = substitute(program, {name: bindings[name] for name in static})
    return fixed, {name: size for name, size in bindings.items() if name not in static}


# ---- row classes -------------------------------------------------------------------------------------------------------------


def row_class_bounds(device: Device) -> tuple[int, ...]:
    """Upper bounds of the row classes of a device, in rows, except for the last."""
    return tuple(int(end * device.sms) for end, _ in ROW_CLASSES[:-1])


def row_class(bindings: Bindings, device: Device) -> int:
    """The index of the row class of some sizes."""
    return bisect_left(row_class_bounds(device), prod(bindings.values()))


def representative_sizes(program: Program, bindings: Bindings, device: Device) -> dict[str, int]:
    """The sizes that a row class is planned for. They depend only on the class, not on which call came first."""
    if not program.symbols:
        return {}
    _, rows = ROW_CLASSES[row_class(bindings, device)]
    each = max(2, round((rows * device.sms) ** (1 / len(program.symbols))))
    return dict.fromkeys(program.symbols, each)


@dataclass(frozen=True)
class Validity:
    """The sizes that a plan holds for."""

    counted: str  # what the bounds count: "rows", or an expression of sizes; "" if every size is fixed
    low: int = 0
    high: int | None = None  # None: no upper bound
    planned_for: tuple[tuple[str, int], ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()  # other sizes make other plans

    def __str__(self) -> str:
        exact = " and ".join(f"{name} = {size:,}" for name, size in self.fixed)
        if not self.counted:
            return f"valid for {exact or 'these sizes'} only"
        span = f"{self.low:,} to {self.high:,} {self.counted}" if self.high else f"{self.low:,} or more {self.counted}"
        alone = self.counted == "rows" and len(self.planned_for) == 1
        made = ", ".join(f"{size:,}" if alone else f"{name} = {size:,}" for name, size in self.planned_for)
        return f"valid for {span}" + (f" with {exact}" if exact else "") + f"; optimized for {made}"


def validity(program: Program, variant: Variant, bindings: Bindings) -> Validity:
    """The sizes that a Variant's plan holds for. `bindings` are the sizes of a call that it serves."""
    if not variant.sizes:
        return Validity("", fixed=variant.fixed)
    k = row_class({name: bindings[name] for name, _ in variant.sizes}, variant.device)
    bounds = (0, *row_class_bounds(variant.device))
    return Validity(
        _counted(program, variant, bindings),
        bounds[k] + 1,
        bounds[k + 1] if k + 1 < len(bounds) else None,
        variant.sizes,
        variant.fixed,
    )


def _counted(program: Program, variant: Variant, bindings: Bindings) -> str:
    """What the product of the free sizes is called: "rows" if the largest tensor has that many."""
    names = [name for name, _ in variant.sizes]
    largest = max((b for b in program.buffers if b.shape), key=lambda b: value(product(b.shape), bindings), default=None)
    rows = largest is not None and product(largest.shape[:-1]) == product([sym(name) for name in names])
    return "rows" if rows else " x ".join(names)
