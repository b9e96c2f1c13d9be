"""One op of a traced graph, ready for lowering: its arguments as Draft values, and the fake result torch computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch

from ...errors import BitReinterpretation, SymbolicAxis, UnsupportedDtype, UnsupportedOp, UnsupportedView
from ...ir.expr import BY_TORCH, DTYPES, DType
from ...ir.size import Size, Sym
from .draft import Draft, Tensor
from .schema import BoundArguments

ToSize: TypeAlias = Callable[[Any], "Size | None"]  # torch's (symbolic) int as a Size, None if it is no product of symbols


@dataclass(frozen=True)
class Call:
    """One call of an op. `args` holds Tensors, Python values, and Sizes where torch had symbolic ints."""

    draft: Draft
    name: str  # its key in LOWERINGS
    op: str  # torch's full name, for messages
    where: str  # the line of user code
    args: BoundArguments
    input_fake: Any  # the fake tensor of the first argument, None if that is no tensor
    result_fake: Any  # the fake tensor(s) torch computed
    to_size: ToSize
    torch_args: Mapping[str, Any] = field(default_factory=dict)  # arguments as torch passed them: fake tensors, symbolic ints

    def arg(self, name: str, *absent: Any) -> Any:
        """The argument with this schema name; `absent` is returned for overloads without it."""
        return absent[0] if absent and name not in self.args.values else self.args.named(name)

    def torch_arg(self, name: str) -> Any:
        """The argument with this schema name, as torch passed it."""
        self.args.read.add(name)
        return self.torch_args.get(name)

    @property
    def dtype(self) -> DType:
        """The dtype of the result."""
        return self.dtype_of(self.result_fake)

    @property
    def shape(self) -> tuple[Size, ...]:
        """The shape of the result."""
        return self.shape_of(self.result_fake)

    def dtype_of(self, fake: torch.Tensor) -> DType:
        """The DType of a fake tensor."""
        found = BY_TORCH.get(fake.dtype)
        if found is None:
            raise UnsupportedDtype(what=self.op, dtype=fake.dtype, where=self.where, supported=", ".join(DTYPES))
        return found

    def shape_of(self, fake: torch.Tensor) -> tuple[Size, ...]:
        """The shape of a fake tensor, as Sizes."""
        return tuple(self.size(s) for s in fake.shape)

    def size(self, size: Any) -> Size:
        """torch's size as a Size. A sum of symbols is refused, which makes capture retry with fewer symbols."""
        if isinstance(size, Sym):
            return size
        found = self.to_size(size)
        if found is None:
            raise SymbolicAxis(op=self.op, axis=str(size), where=self.where)
        return found

    def static_size(self, size: Any) -> int:
        """A size as an int. Refuses sizes that vary between calls."""
        found = self.size(size)
        if not isinstance(found, int):
            raise SymbolicAxis(op=self.op, axis=str(found), where=self.where)
        return found

    def refuse_bitcast(self) -> NoReturn:
        """Refuse to reinterpret elements as another dtype."""
        raise BitReinterpretation(op=self.op, given=self.input_fake.dtype, dtype=self.result_fake.dtype, where=self.where)

    def unsupported(self, detail: str = "") -> NoReturn:
        """Refuse the op."""
        raise UnsupportedOp(op=f"{self.op} ({detail})" if detail else self.op, where=self.where)

    def unsupported_view(self, detail: str) -> NoReturn:
        """Refuse the view."""
        raise UnsupportedView(op=self.op, where=self.where, detail=detail)


@dataclass(frozen=True)
class Concat:
    """Tensors concatenated along a dim but not yet merged into one value. An output can store each piece directly."""

    dim: int
    pieces: tuple[Tensor, ...]


Lowered: TypeAlias = Tensor | Concat
Handler: TypeAlias = Callable[[Call], Any]  # returns a Lowered, or a tuple of them for an op with several results
TensorHandler: TypeAlias = Callable[[Call], Tensor]


def for_overloads(op: str, overloads: str, handler: Handler) -> dict[str, Handler]:
    """Table entries that give several overloads of an op one handler."""
    return {f"{op}.{overload}": handler for overload in overloads.split()}


def with_shape_args(handler: Handler, *names: str) -> Handler:
    """Mark arguments as read that only set the result's shape or dtype: the handler takes those from torch's fake result."""

    def handle(call: Call) -> Any:
        call.args.read.update(names)
        return handler(call)

    return handle


def normalize_dim(dim: int, rank: int) -> int:
    """Convert a negative dim to a non-negative one."""
    return dim + rank if dim < 0 else dim
