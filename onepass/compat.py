"""Every private or version-dependent import of PyTorch and Triton, in one place.

Functions import lazily, so that importing onepass stays cheap. Tested pairs: torch 2.11 with Triton 3.6, 2.13 with 3.7,
2.14 with 3.8, 2.15 with 3.9.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# ---------------------------------------------------------------------------------------------------------------- Triton

TRITON_PAIRS = {"2.11": "3.6.0", "2.12": "3.7.1", "2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0"}


def triton_pair(torch_version: str) -> str | None:
    """The Triton release a torch release is built and tested with, where known."""
    return TRITON_PAIRS.get(".".join(torch_version.split(".")[:2]))


def triton(purpose: str) -> Any:
    """The triton package, or an error that names the release to install."""
    try:
        return importlib.import_module("triton")
    except ImportError:
        from .errors import TritonMissing

        version = importlib.metadata.version("torch")
        pair = triton_pair(version)
        advice = f"pip install triton=={pair}" if pair else "pip install triton"
        raise TritonMissing(purpose=purpose, torch=version, advice=advice) from None


@dataclass(frozen=True)
class InterpreterParts:
    """The pieces of Triton's CPU interpreter that ours is built from."""

    language: Any  # triton.language
    runtime: Any  # triton.runtime.interpreter
    semantic: Any  # the class that turns language calls into builder calls
    jit_types: tuple[Any, ...]  # what @triton.jit returns, interpreted or not


def triton_interpreter() -> InterpreterParts:
    """Triton's interpreter, whichever way triton itself was imported."""
    package = triton("interpret kernels on CPU tensors")
    runtime = importlib.import_module("triton.runtime.interpreter")
    semantic = importlib.import_module("triton.language.semantic").TritonSemantic
    kernel_interface = importlib.import_module("triton.runtime.jit").KernelInterface
    return InterpreterParts(package.language, runtime, semantic, (kernel_interface,))


def triton_compile(function: Any, signature: dict[str, str], aligned: tuple[int, ...], target: int,
                   options: dict[str, Any]) -> Any:
    """Compile one @triton.jit function for sm_`target`, with pointers at `aligned` positions divisible by 16."""
    package = triton("compile kernels")
    if not hasattr(function, "cache_key"):
        raise RuntimeError("TRITON_INTERPRET is set, so this process cannot compile kernels; unset it and start again")
    gpu_target = importlib.import_module("triton.backends.compiler").GPUTarget
    ast_source = importlib.import_module("triton.compiler").ASTSource
    source = ast_source(function, signature, {}, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return package.compile(source, target=gpu_target("cuda", target, 32), options=options)


@contextmanager
def ptxas_verbose(always: bool) -> Iterator[None]:
    """A context in which Triton prints what `ptxas -v` says; `always` compiles even what Triton's cache already holds.

    Triton's settings write themselves to the environment until the context ends, so this is for worker processes.
    """
    knobs = triton("compile kernels").knobs
    with knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = True
        if always:
            knobs.compilation.always_compile = True
        yield


def cuobjdump() -> str:
    """The path of the cubin reader in Triton's wheel."""
    return str(triton("read compiled kernels").knobs.nvidia.cuobjdump.path)


def ptxas(target: int) -> str:
    """The path of the assembler Triton uses for sm_`target`."""
    return str(importlib.import_module("triton.backends.nvidia.compiler").get_ptxas(target).path)


def triton_launcher(kernel: Any) -> Callable[..., None]:
    """Load a compiled kernel on the current CUDA device; the result is called with (grid, stream, *args).

    Triton 3.6 to 3.9 share this call: grid, stream, function and packed metadata, then launch metadata and two hooks, which
    only profilers of Triton need, then the arguments. Pointers may be plain integers.
    """
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata

    def launch(grid: int, stream: int, *args: int) -> None:
        run(grid, 1, 1, stream, function, packed, None, None, None, *args)

    return launch


def is_out_of_resources(error: Exception) -> bool:
    """Did a compiled kernel ask for more than the card has?"""
    return isinstance(error, importlib.import_module("triton.runtime.errors").OutOfResources)


def triton_usage(kernel: Any) -> tuple[int, int, int]:
    """Registers a thread, bytes of local memory a thread and bytes of shared memory of a loaded kernel."""
    return kernel.n_regs, 4 * kernel.n_spills, kernel.metadata.shared  # n_spills counts 32-bit words


def cuda_driver_level() -> str | None:
    """The newest CUDA version the installed driver supports ("13.0"), or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")  # torch has asked the driver this in several places over the years
    except OSError:
        return None
    level = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(level)) != 0 or not level.value:
        return None
    return f"{level.value // 1000}.{level.value % 1000 // 10}"


# ----------------------------------------------------------------------------------------------------------------- torch

# What is rewritten into simpler ops while tracing: norms, softmax, losses, activations and their backward passes. A name a
# torch release does not have is passed over.
_DECOMPOSED = """
native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm
_fused_rms_norm_backward native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
_native_batch_norm_legit_functional native_batch_norm_backward
_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax nll_loss_forward nll_loss_backward
gelu gelu_backward silu silu_backward leaky_relu leaky_relu_backward elu elu_backward celu hardtanh hardtanh_backward
hardswish hardswish_backward hardsigmoid hardsigmoid_backward softplus softplus_backward mish mish_backward
log_sigmoid_forward log_sigmoid_backward threshold threshold_backward sigmoid_backward tanh_backward glu glu_backward
_prelu_kernel _prelu_kernel_backward softshrink hardshrink logit logit_backward
mse_loss mse_loss_backward huber_loss huber_loss_backward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss
soft_margin_loss_backward binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
addcdiv lerp nan_to_num norm linalg_vector_norm std_mean dist aminmax xlogy masked_fill tril triu logaddexp logaddexp2
heaviside sinc special_entr special_xlog1py isposinf isneginf eye linspace nansum count_nonzero frac
"""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's own rewritings of the composite ops that capture does not lower itself."""
    import torch
    from torch._decomp import get_decompositions

    packets = [getattr(torch.ops.aten, name) for name in _DECOMPOSED.split() if hasattr(torch.ops.aten, name)]
    return dict(get_decompositions(packets))


def pytree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of nested tuples, lists and dicts."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def pytree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """The inverse of pytree_flatten."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, spec)


def fake_mode() -> Any:
    """A world of shape-only tensors with its own symbols and guards."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def fake_symbol(mode: Any, hint: int) -> Any:
    """A symbolic size (2 or more) whose present value is `hint`."""
    import torch
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return mode.from_tensor(torch.empty(hint, device="meta"), symbolic_context=context).shape[0]


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has a shape only."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def constant_tensor(tensor: Any) -> Any:
    """The tensor behind a constant of a traced graph, None if only its shape is known."""
    return getattr(tensor, "constant", None) if is_fake(tensor) else tensor


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What torch raises when a trace needs a tensor's value."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode


@contextmanager
def watching(watch: Callable[[Any, tuple, dict], str]) -> Iterator[None]:
    """Call `watch(op, args, kwargs)` before every op; what it returns becomes the stack trace of the nodes made for it."""
    from torch.fx import traceback
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            traceback.set_stack_trace([watch(func, args, kwargs or {})])
            return func(*args, **(kwargs or {}))

    with Watch():
        yield


def trace_graph(fn: Callable[..., Any], fakes: list[Any], mode: Any) -> Any:
    """The graph of ops `fn(*fakes)` runs, decomposed; nodes keep the stack traces set while they were made."""
    from torch.fx import traceback
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, traceback.preserve_node_meta():
        return make_fx(fn, decomposition_table=decompositions())(*fakes)


def without_mutations(graph_module: Any, fakes: list[Any], mode: Any) -> Any:
    """The same graph with in-place ops on its own intermediates written as plain ones."""
    import torch

    return trace_graph(torch.func.functionalize(torch.fx.Interpreter(graph_module).run, remove="mutations"), fakes, mode)


def size_factors(size: Any) -> tuple[int, tuple[str, ...]] | None:
    """A (symbolic) size as coefficient and torch's names of the symbols it multiplies; None if it is no such product."""
    import sympy

    if isinstance(size, int):
        return size, ()
    coefficient, symbols = sympy.sympify(size.node.expr).as_coeff_Mul()
    names: list[str] = []
    for base, exponent in symbols.as_powers_dict().items():
        if base == 1:
            continue
        if not (base.is_Symbol and exponent.is_Integer and exponent > 0 and coefficient.is_Integer):
            return None
        names += [str(base)] * int(exponent)
    return int(coefficient), tuple(names)


def shape_guards(mode: Any, names: dict[str, str]) -> tuple[str, ...]:
    """What tracing assumed about symbols, as Python expressions over `names` (from torch's name of each symbol to ours)."""
    import sympy
    from torch.utils._sympy.printers import PythonPrinter

    texts = []
    for guard in mode.shape_env.guards:
        renamed = {s: sympy.Symbol(names[str(s)], integer=True, positive=True) for s in guard.expr.free_symbols}
        texts.append(PythonPrinter().doprint(guard.expr.xreplace(renamed)))
    return tuple(dict.fromkeys(texts))
