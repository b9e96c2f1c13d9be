"""Every private or version-dependent import of PyTorch and Triton, in one place.

Functions import lazily, so that importing onepass stays cheap. Tested pairs: torch 2.11 with Triton 3.6, 2.13 with 3.7,
2.14 with 3.8, 2.15 with 3.9.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


def gluon_language(purpose: str) -> Any:
    """triton.experimental.gluon.language, with what it has for Hopper under `.nvidia.hopper`."""
    return triton(purpose) and importlib.import_module("triton.experimental.gluon.language")


_GLUON = ("triton.experimental.gluon._runtime", "GluonASTSource")  # what a @gluon.jit function is compiled through


def triton_compile(function: Any, signature: dict[str, str], aligned: tuple[int, ...], target: int,
                   options: dict[str, Any]) -> Any:
    """Compile one @triton.jit function for sm_`target`, with pointers at `aligned` positions divisible by 16."""
    package = triton("compile kernels")
    if not hasattr(function, "cache_key"):
        raise RuntimeError("TRITON_INTERPRET is set, so this process cannot compile kernels; unset it and start again")
    gpu_target = importlib.import_module("triton.backends.compiler").GPUTarget
    module, name = _GLUON if getattr(function, "is_gluon", bool)() else ("triton.compiler", "ASTSource")
    ast_source = getattr(importlib.import_module(module), name)
    source = ast_source(function, signature, {}, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return package.compile(source, target=gpu_target("cuda", target, 32), options=options)


_TRITON_FILES = threading.RLock()


@contextmanager
def triton_files(folder: str | None, heard: Callable[[bool], None]) -> Iterator[None]:
    """Let Triton keep what this thread compiles in `folder` (None: where it always does).

    `heard` is told of every kernel this thread asks for, whether Triton's cache had it. Triton's settings are the process's,
    so one thread compiles at a time; a kernel another library compiles meanwhile may land in `folder`, which does no harm.
    """
    knobs, thread = triton("compile kernels").knobs, threading.get_ident()
    with _TRITON_FILES:
        listener, settings = knobs.compilation.listener, vars(knobs.cache)
        before = settings.get("dir")

        def listening(**event: Any) -> None:
            if threading.get_ident() == thread:
                heard(bool(event.get("cache_hit")))
            if listener is not None:
                listener(**event)

        knobs.compilation.listener = listening
        if folder is not None:
            settings["dir"] = folder  # assigning the attribute would also change the environment, which other threads read
        try:
            yield
        finally:
            knobs.compilation.listener = listener
            if before is not None:
                settings["dir"] = before
            elif folder is not None:
                settings.pop("dir", None)


def triton_used(kernel: Any) -> None:
    """Mark the files of a compiled kernel as used just now, for whoever removes old ones."""
    for path in list(getattr(kernel, "metadata_group", {}).values())[:1]:
        with suppress(OSError):
            os.utime(os.path.dirname(path))


def triton_toolchain(target: int) -> str:
    """What beside a kernel's text decides its binary for sm_`target`: the assembler, and variables that Triton heeds."""
    triton("compile kernels")
    gpu_target = importlib.import_module("triton.backends.compiler").GPUTarget
    backend = importlib.import_module("triton.compiler.compiler").make_backend(gpu_target("cuda", target, 32))
    heeded: Any = getattr(importlib.import_module("triton._C.libtriton"), "get_cache_invalidating_env_vars", dict)
    return f"{backend.hash()} {sorted(heeded().items())}"


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


def size_hint(size: Any) -> int | None:
    """A (symbolic) size's value when the graph was traced; None for one that depends on data."""
    import torch

    if isinstance(size, int):
        return size
    if not isinstance(size, torch.SymInt):
        return None
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if hint is not None else None


def size_expression(size: Any) -> str:
    """torch's own text for a (symbolic) size; equal texts are equal sizes."""
    return str(size) if isinstance(size, int) else str(size.node.expr)


def size_symbols(size: Any) -> dict[str, int]:
    """The symbols of a (symbolic) size with their values when the graph was traced."""
    if isinstance(size, int):
        return {}
    environment = size.node.shape_env
    values = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    return {str(s): int(values[s]) for s in size.node.expr.free_symbols if s in values}


def raw_stream() -> Callable[[int], int]:
    """A function from a CUDA device's index to the address of its current stream."""
    import torch

    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # no Stream object is made
    return quick if quick is not None else lambda index: torch.cuda.current_stream(index).cuda_stream


def filling_call(argument: str, bases: list[Any]) -> tuple[Any, dict[str, Any]]:
    """How a graph calls an op that fills `bases`, given as its list `argument`, without looking like a mutation.

    The call returns the op's own result and then one tensor for each base. ImportError where torch has no such form.
    """
    from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

    places = {f"_{argument}_{k}_base_index": k for k in range(len(bases))}
    return auto_functionalized_v2, {f"_{argument}_length": len(bases), **places, "_all_bases": bases}


# -------------------------------------------------------------------------------------------------------------- Inductor

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)


def inductor_trouble() -> str | None:
    """Why a graph pass cannot be given to this torch's Inductor; None if it can."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST_TORCH <= version <= NEWEST_TORCH:
        return f"this is torch {torch.__version__}"
    try:
        from torch._inductor import compile_fx, config, custom_graph_pass

        _ = compile_fx.compile_fx, custom_graph_pass.CustomGraphPass, config.post_grad_custom_post_pass
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} lacks a hook that onepass needs ({error})"
    return None


def inductor_options(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """What torch.compile(backend="inductor") would make of a mode and options, with its errors for what it does not know."""
    import torch

    return dict(torch._TorchCompileInductorWrapper(mode, options, None).config)


def compile_by_inductor(module: Any, inputs: Any, patches: dict[str, Any], inner: Callable[..., Any] | None = None) -> Any:
    """Inductor's compile function; `inner` takes the place of its last step, from a graph to a callable."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs, config_patches=patches, **({"inner_compile": inner} if inner else {}))


def run_as_is(module: Any, inputs: Any, is_inference: bool) -> Callable[..., Any]:
    """A graph after Inductor's passes (custom ones among them), run op by op: the steps before Inductor generates code."""
    import torch
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx

    compile_fx.view_to_reshape(module)
    with torch.no_grad():
        mode = compile_fx.fake_tensor_prop(module, inputs)
    with compile_fx.V.set_fake_mode(mode):
        compile_fx._recursive_post_grad_passes(module, is_inference=is_inference)
    module.recompile()
    return make_boxed_func(module.forward)


def graph_pass(run: Callable[[Any, bool | None], None], uuid: Callable[[], Any], parts: tuple[Any, ...] = ()) -> Any:
    """`run(graph, is_inference)` as a pass Inductor takes; `is_inference` is None where Inductor does not say."""
    from torch._inductor import custom_graph_pass

    base: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)

    class Pass(base):
        onepass_parts = parts  # empty for the pass of onepass itself

        def __call__(self, graph: Any, is_inference: bool | None = None) -> None:
            run(graph, is_inference)

        def uuid(self) -> Any:
            return uuid()

    return Pass()


def is_our_pass(configured: Any) -> bool:
    """Whether a configured pass is that of onepass."""
    return getattr(configured, "onepass_parts", None) == ()


def configured_passes(patches: dict[str, Any]) -> tuple[Any, ...]:
    """The passes a user has in the last place before code generation, by options or in Inductor's config."""
    from torch._inductor import config

    now = patches.get("post_grad_custom_post_pass", config.post_grad_custom_post_pass)
    return () if now is None else tuple(now) if isinstance(now, (list, tuple)) else getattr(now, "onepass_parts", ()) or (now,)


def as_configured(passes: tuple[Any, ...]) -> Any:
    """Several passes as the one config value: a list from torch 2.13 on, before that one pass that runs them all."""
    from torch._inductor import custom_graph_pass

    if len(passes) < 2 or hasattr(custom_graph_pass, "get_custom_graph_passes"):
        return list(passes) if len(passes) > 1 else passes[0] if passes else None
    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())

    def run(graph: Any, is_inference: bool | None) -> None:
        for each in passes:
            each(graph, is_inference) if is_our_pass(each) or isinstance(each, aware) else each(graph)

    def uuid() -> Any:
        ids = [each.uuid() if hasattr(each, "uuid") else None for each in passes]
        return None if None in ids else repr(ids)  # a pass without an id keeps Inductor from caching, in company too

    return graph_pass(run, uuid, passes)


def configure_passes(passes: tuple[Any, ...]) -> None:
    """Put passes into Inductor's config for all that is compiled from now on."""
    from torch._inductor import config

    config.post_grad_custom_post_pass = as_configured(passes)


def max_autotune() -> bool:
    """Whether Inductor is about to tune matmuls, and would fuse a pointwise op behind one into it."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


def given_away() -> frozenset[int]:
    """Positions of inputs that the backward graph being compiled may overwrite; none where CUDA graphs would refuse it."""
    from torch._inductor import config, utils

    return frozenset() if config.triton.cudagraphs else frozenset(utils.get_donated_idxs() or ())


def reset_cuda_graphs() -> None:
    """Forget CUDA graphs that were recorded, where any could have been."""
    import sys

    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Leave a text in torch's structured trace, where tlparse shows it; not even made where no trace is written."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
