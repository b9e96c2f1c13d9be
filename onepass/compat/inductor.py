"""Private Inductor APIs: graph passes, options, and the partitioner of training graphs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from .uninterrupted import Once

_import_inductor = Once(lambda: importlib.import_module("torch._inductor.compile_fx"))  # a partial import could not be repeated
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)


def inductor_incompatibility() -> str | None:
    """Why this torch's Inductor cannot take a graph pass of onepass; None if it can."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST_TORCH <= version <= NEWEST_TORCH:
        return f"this is torch {torch.__version__}"
    _import_inductor()
    try:
        from torch._inductor import compile_fx, config, custom_graph_pass

        _ = compile_fx.compile_fx, custom_graph_pass.CustomGraphPass, config.post_grad_custom_post_pass
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} lacks a hook that onepass needs ({error})"
    return None


def inductor_options(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The Inductor config that torch.compile(backend="inductor") makes of a mode and options. Raises torch's own errors."""
    import torch

    return dict(torch._TorchCompileInductorWrapper(mode, options, None).config)


def compile_by_inductor(module: Any, inputs: Any, patches: dict[str, Any], inner: Callable[..., Any] | None = None) -> Any:
    """Compile with Inductor. `inner` replaces its last step, which turns a graph into a callable."""
    _import_inductor()
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs, config_patches=patches, **({"inner_compile": inner} if inner else {}))


def run_without_codegen(
    module: Any, inputs: Any, is_inference: bool, finish: Callable[[Any], None] | None = None
) -> Callable[..., Any]:
    """Run Inductor's passes on a graph, custom ones included, then `finish`, and skip code generation: the graph runs op by op."""
    import torch
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
    from torch._inductor import compile_fx

    compile_fx.view_to_reshape(module)
    with torch.no_grad():
        mode = compile_fx.fake_tensor_prop(module, inputs)
    with compile_fx.V.set_fake_mode(mode):
        compile_fx._recursive_post_grad_passes(module, is_inference=is_inference)
    if finish is not None:
        finish(module.graph)
    module.recompile()
    boxed: Callable[..., Any] = make_boxed_func(module.forward)
    return boxed


def graph_pass(run: Callable[[Any, bool | None], None], uuid: Callable[[], Any], parts: tuple[Any, ...] = ()) -> Any:
    """Wrap `run(graph, is_inference)` as an Inductor graph pass. `is_inference` is None if Inductor does not provide it."""
    from torch._inductor import custom_graph_pass

    base: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)

    class Pass(base):  # type: ignore[misc]  # Inductor's class is known at run time alone
        onepass_parts = parts  # empty for onepass's own pass

        def __call__(self, graph: Any, is_inference: bool | None = None) -> None:
            run(graph, is_inference)

        def uuid(self) -> Any:
            return uuid()

    return Pass()


def is_our_pass(configured: Any) -> bool:
    """Whether a configured pass is onepass's own."""
    return getattr(configured, "onepass_parts", None) == ()


def configured_passes(patches: dict[str, Any]) -> tuple[Any, ...]:
    """The user's post_grad_custom_post_pass, from options or Inductor's config, as a tuple of passes."""
    from torch._inductor import config

    now = patches.get("post_grad_custom_post_pass", config.post_grad_custom_post_pass)
    return () if now is None else tuple(now) if isinstance(now, (list, tuple)) else getattr(now, "onepass_parts", ()) or (now,)


def combined_passes(passes: tuple[Any, ...]) -> Any:
    """Combine several passes into one config value: a list since torch 2.13, before that one pass that runs them all."""
    from torch._inductor import custom_graph_pass

    if len(passes) < 2 or hasattr(custom_graph_pass, "get_custom_graph_passes"):
        return list(passes) if len(passes) > 1 else passes[0] if passes else None
    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())

    def run(graph: Any, is_inference: bool | None) -> None:
        for each in passes:
            each(graph, is_inference) if is_our_pass(each) or isinstance(each, aware) else each(graph)

    def uuid() -> Any:
        ids = [each.uuid() if hasattr(each, "uuid") else None for each in passes]
        return None if None in ids else repr(ids)  # one pass without an id disables Inductor's cache for all

    return graph_pass(run, uuid, passes)


def configure(passes: tuple[Any, ...], split: Any) -> None:
    """Set the graph passes and the partitioner in Inductor's global config."""
    from torch._inductor import config

    config.post_grad_custom_post_pass = combined_passes(passes)
    if hasattr(config, "custom_partitioner_fn"):
        config.custom_partitioner_fn = split


def partitioner(change: Callable[[Any, Any, int], None], uuid: Callable[[], Any], inner: Any) -> Any:
    """A partitioner of joint graphs for Inductor: run `inner` (Inductor's own for None), then `change` its result.

    `change` gets the forward module, the backward module, and the number of forward results that belong to the user. Returns None
    if this torch has no hook for it.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config, custom_graph_pass

    if not hasattr(custom_graph_pass, "CustomPartitionerFn") or not hasattr(config, "custom_partitioner_fn"):
        return None
    base: Any = custom_graph_pass.CustomPartitionerFn

    class Partitioner(base):  # type: ignore[misc]  # as above
        onepass_inner = inner

        def __call__(self, module: Any, inputs: Any, **how: Any) -> tuple[Any, Any]:
            forward, backward = (inner or min_cut_rematerialization_partition)(module, inputs, **how)
            change(forward, backward, how["num_fwd_outputs"])
            return forward, backward

        def uuid(self) -> Any:
            within = inner.uuid() if inner is not None else ""
            return None if within is None else f"{uuid()} {within}"

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (self.uuid(),)  # torch pickles it only to compute cache keys

    return Partitioner()


def configured_partitioner(patches: dict[str, Any]) -> Any:
    """The user's partitioner, from options or Inductor's config; None for Inductor's own."""
    from torch._inductor import config

    now = patches.get("custom_partitioner_fn", getattr(config, "custom_partitioner_fn", None))
    return getattr(now, "onepass_inner", now)


def max_autotune() -> bool:
    """Whether Inductor autotunes matmuls, which lets it fuse a pointwise op into the epilogue of one."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


def non_python_wrapper() -> str | None:
    """The name of the non-Python wrapper (AOTInductor, C++, FX) that the current graph is compiled for; None for Python."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    if getattr(V, "aot_compilation", False):
        return "AOTInductor"
    wrappers = {"cpp_wrapper": "Inductor's C++ wrapper", "fx_wrapper": "Inductor's FX wrapper"}
    return next((name for switch, name in wrappers.items() if getattr(config, switch, False)), None)


def donated_inputs() -> frozenset[int]:
    """Positions of donated inputs: the backward graph being compiled may overwrite them. Empty under CUDA graphs, which forbid it.

    The positions are valid only in the outermost graph (`is_outermost`).
    """
    from torch._inductor import config, utils

    known = getattr(utils, "get_donated_idxs", tuple)  # without it, no input counts as donated
    return frozenset() if config.triton.cudagraphs else frozenset(known() or ())


def is_outermost(graph: Any) -> bool:
    """Whether the graph whose passes run is the outermost one, not a branch, a loop body or a nested region in it.

    False if in doubt.
    """
    modules = _modules_of_passes()
    return len(modules) == 1 and getattr(modules[0], "graph", None) is graph


def is_branch_or_body(graph: Any) -> bool:
    """Whether the graph whose passes run is a branch, a loop body or the like, not the outermost graph or a nested region."""
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

    inner, *outer = _modules_of_passes() or [None]
    if not outer or inner.graph is not graph:
        return False
    owner = outer[0]
    held = [n for n in owner.graph.nodes if n.op == "get_attr" and getattr(owner, n.target, None) is inner]
    callers = [user.target for node in held for user in node.users]
    return not callers or any(caller is not invoke_subgraph for caller in callers)


def _modules_of_passes() -> list[Any]:
    """The modules whose passes run, innermost first.

    Torch runs the same passes on all of them and offers no way to tell, so this inspects torch's stack frames.
    """
    import inspect
    import sys

    from torch._inductor import compile_fx

    passes = getattr(compile_fx, "_recursive_post_grad_passes", None)
    code = getattr(inspect.unwrap(passes), "__code__", None) if passes is not None else None
    modules: list[Any] = []
    at: FrameType | None = sys._getframe()
    while at is not None:
        if at.f_code is code:
            modules.append(at.f_locals.get("gm"))
        at = at.f_back
    return modules


def inductor_config(**changes: Any) -> AbstractContextManager[None]:
    """A context manager that patches Inductor's config."""
    from torch._inductor import config

    patched: AbstractContextManager[None] = config.patch(changes)
    return patched


def reset_cuda_graphs() -> None:
    """Drop recorded CUDA graphs, if Inductor's cudagraph trees were imported at all."""
    import sys

    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace, for tlparse. `text` is called only if a trace is written."""
    from torch._logging import trace_structured  # type: ignore[attr-defined]

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
