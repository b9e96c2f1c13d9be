"""Where walks read staged rows: chunks in the ring, and row vectors that were stored in shared memory before the loop over rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..ir.program import Store
from .folds import Folds
from .kernel_ir import Expr, Name, SharedLoad, Slot
from .row_access import REST, RowAccess
from .row_copies import Geometry, RowMemory
from .scope import Scope
from .steps import Steps
from .tile_refs import TileRef
from .values import Values


@dataclass(frozen=True, slots=True)
class RowParts:
    """The parts that all work on one row shares."""

    scope: Scope
    at: Geometry
    steps: Steps
    values: Values
    folds: Folds


@dataclass(frozen=True, slots=True)
class RowNames:
    """Variables of a row: its index, its slot in the ring, and the index of its first chunk there."""

    row: Expr = "row_index"
    slot: Expr = "slot"
    first_chunk: Expr = "first_chunk"


class StagedRows:
    """Reads staged loads from shared memory, of the row that `names` are about."""

    first_rows = "row == 0"

    def __init__(
        self, memory: Mapping[int, RowMemory], access: RowAccess, chunk_count: int, numbers: dict[str, int | Expr]
    ) -> None:
        self._memory, self._access, self._count, self._numbers = memory, access, chunk_count, numbers
        self.vectors: dict[int, Name] = {}  # shared memory of row vectors, indexed by chunk
        self.names = RowNames()

    def read(self, i: int, ref: TileRef) -> SharedLoad | None:
        """A chunk or the tail of a staged row, or a chunk of a row vector."""
        if i in self.vectors:
            return SharedLoad(Slot(self.vectors[i], str(self._numbers[ref.tag])))
        if i not in self._memory:
            return None
        ring, names = self._memory[i], self.names
        if ref.tag == REST:
            slot, box = Slot(ring.rest, names.slot), ring.rest_box
        else:
            at = f"{names.first_chunk} + {self._numbers[ref.tag]}" if self._count > 1 else names.slot
            slot, box = Slot(ring.chunks, at), ring.chunk
        return SharedLoad(slot, () if len(box) == 2 else (ref.height, ref.width))

    def scalar_ref(self, ref: TileRef) -> TileRef:
        """One element per row has a scalar address, because a tensor load would repeat it for every lane."""
        return replace(ref, row=self.names.row)

    def store_parts(self, node: Store, ref: TileRef) -> tuple[TileRef, ...]:
        """As rows lie in memory."""
        return self._access.store_parts(node, ref)
