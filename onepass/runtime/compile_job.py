"""Source and GPU -> compile job. Offline compilation and launching build the same job, so they get the same binary."""

from __future__ import annotations

from ..codegen.source import Param, ParamKind, Source, TensorView
from ..ir.expr import DType
from .module import Job


def job(source: Source, target: int, aligned: frozenset[str] | None = None) -> Job:
    """The job that compiles `source` for sm_`target`. `aligned` names the buffers that are 16-byte aligned (None: all)."""
    divisible = tuple(
        i for i, p in enumerate(source.params) if p.kind is ParamKind.POINTER and (aligned is None or p.name in aligned)
    )
    signature = tuple((p.text_name, _type(p, source.wide_index)) for p in source.params)
    return Job(source.name, source.text, signature, divisible, source.warps, source.stages, source.max_registers, target)


def _type(param: Param, wide: bool) -> str:
    """A parameter's type in Triton's signature language. Kernels are never specialized on the values of sizes."""
    match param:
        case Param(kind=ParamKind.POINTER, dtype=DType() as dtype):
            return "*" + _pointee(dtype)
        case Param(kind=ParamKind.TENSOR_MAP, dtype=DType() as dtype, view=TensorView(box=box)):
            layout = f"NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth={8 * dtype.size}, rank={len(box)})"
            return f"tensordesc<{_pointee(dtype)}{list(box)},{layout}>"
        case Param(kind=ParamKind.SIZE) if wide:
            return "i64"
        case Param(kind=ParamKind.SIZE | ParamKind.ZERO):
            return "i32"
        case _:
            raise ValueError(f"parameter {param.text_name} has no pointee dtype")


def _pointee(dtype: DType) -> str:
    """float32 -> fp32, bfloat16 -> bf16, float8e5 -> fp8e5, uint8 -> u8, int1 -> i1."""
    for long, short in (("bfloat", "bf"), ("float", "fp"), ("uint", "u"), ("int", "i")):
        if dtype.kernel.startswith(long):
            return short + dtype.kernel.removeprefix(long)
    raise ValueError(f"Triton has no pointer to {dtype}")
