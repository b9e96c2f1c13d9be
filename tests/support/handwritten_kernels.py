"""Sources of handwritten kernels."""

from __future__ import annotations

from onepass.codegen.expr import TRITON
from onepass.codegen.helpers import FUNCTIONS, definitions
from onepass.codegen.printer import imports
from onepass.codegen.source import GridDim, Param, ParamKind, Source
from onepass.ir.expr import DType

HEAD = "\n\n\n".join(
    (
        *imports(TRITON, frozenset({"libdevice"})),
        *definitions(frozenset(FUNCTIONS), TRITON),
        '@triton.jit(do_not_specialize=["zero"])\n',
    )
)


def kernel(
    name: str,
    pointers: dict[str, DType],
    body: list[str],
    grid: tuple[GridDim, ...] = (GridDim(1),),
    warps: int = 4,
    sizes: tuple[str, ...] = (),
) -> Source:
    """A handwritten Source: pointers, then sizes, then zero."""
    params = [Param(p, ParamKind.POINTER, p, dtype) for p, dtype in pointers.items()]
    params += [Param(s, ParamKind.SIZE, s) for s in sizes] + [Param("zero", ParamKind.ZERO, "zero")]
    signature = ", ".join(p.text_name for p in params)
    text = HEAD + f"def {name}({signature}):\n" + "".join(f"    {line}\n" for line in body)
    return Source(name, text, tuple(params), grid, warps)
