"""What onepass needs of Inductor: its passes, its options, its split of training graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)


def inductor_incompatibility() -> str | None:
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


def run_without_codegen(module: Any, inputs: Any, is_inference: bool) -> Callable[..., Any]:
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


def combined_passes(passes: tuple[Any, ...]) -> Any:
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


def configure(passes: tuple[Any, ...], split: Any) -> None:
    """Put passes and a split into Inductor's config for all that is compiled from now on."""
    from torch._inductor import config

    config.post_grad_custom_post_pass = combined_passes(passes)
    if hasattr(config, "custom_partitioner_fn"):
        config.custom_partitioner_fn = split


def partitioner(change: Callable[[Any, Any, int], None], uuid: Callable[[], Any], inner: Any) -> Any:
    """A split of joint graphs that Inductor takes: that of `inner`, or Inductor's own for None, and then `change`.

    `change` gets the forward's module, the backward's, and how many results of the forward are the user's. None where this torch
    has no place for it.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config, custom_graph_pass

    if not hasattr(custom_graph_pass, "CustomPartitionerFn") or not hasattr(config, "custom_partitioner_fn"):
        return None
    base: Any = custom_graph_pass.CustomPartitionerFn

    class Partitioner(base):
        onepass_inner = inner

        def __call__(self, module: Any, inputs: Any, **how: Any) -> tuple[Any, Any]:
            forward, backward = (inner or min_cut_rematerialization_partition)(module, inputs, **how)
            change(forward, backward, how["num_fwd_outputs"])
            return forward, backward

        def uuid(self) -> Any:
            within = inner.uuid() if inner is not None else ""
            return None if within is None else f"{uuid()} {within}"

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (self.uuid(),)  # torch pickles it for the keys of its caches, and for nothing else

    return Partitioner()


def configured_partitioner(patches: dict[str, Any]) -> Any:
    """The split a user has configured, by options or in Inductor's config; None for Inductor's own."""
    from torch._inductor import config

    now = patches.get("custom_partitioner_fn", getattr(config, "custom_partitioner_fn", None))
    return getattr(now, "onepass_inner", now)


def max_autotune() -> bool:
    """Whether Inductor is about to tune matmuls, and would fuse a pointwise op behind one into it."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


def non_python_wrapper() -> str | None:
    """What makes the graph being compiled run where Python does not call its ops; None where Python does."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    if getattr(V, "aot_compilation", False):
        return "AOTInductor"
    wrappers = {"cpp_wrapper": "Inductor's C++ wrapper", "fx_wrapper": "Inductor's FX wrapper"}
    return next((name for switch, name in wrappers.items() if getattr(config, switch, False)), None)


def donated_inputs() -> frozenset[int]:
    """Positions of inputs that the backward graph being compiled may overwrite; none where CUDA graphs would refuse it.

    They are positions in the outermost graph alone (`is_outermost`).
    """
    from torch._inductor import config, utils

    known = getattr(utils, "get_donated_idxs", tuple)  # without it, nothing is known to be given away
    return frozenset() if config.triton.cudagraphs else frozenset(known() or ())


def is_outermost(graph: Any) -> bool:
    """Whether the graph whose passes run is the one Inductor was given, and not a branch, a loop's body or a nested region in it.

    Torch runs the same passes on all of them and does not say which is which, so its frames are looked at. False if in doubt.
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
    return len(modules) == 1 and getattr(modules[0], "graph", None) is graph


def inductor_config(**changes: Any) -> AbstractContextManager[None]:
    """Inductor's config with other values while the context lasts."""
    from torch._inductor import config

    patched: AbstractContextManager[None] = config.patch(changes)
    return patched


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
