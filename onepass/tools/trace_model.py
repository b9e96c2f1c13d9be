"""Traces a model and claims regions in its graphs, forward and backward, without running it.

Every tensor is replaced by a fake tensor, so a model of any size can be explained on any machine. torch.compile traces the model as
usual, up to the point where the graph pass of onepass runs; there a copy of the graph is claimed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import compat
from ..capture.graph.recompute import Recomputed
from ..device import Device
from ..errors import ModelNotTraced, OnepassError
from ..integration.claim import Claimed, ClaimOptions, claim
from ..integration.failure import describe_error
from ..integration.passes import phase_of
from ..integration.plans import Plans
from ..integration.settings import resolve
from ..integration.split import split


def uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """The original of a compiled module or function; anything else unchanged."""
    return getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None) or model


def is_model(model: object) -> bool:
    """Whether to explain something as a model, not as one function: true for a module and for what torch.compile returned."""
    return isinstance(model, nn.Module) or uncompiled(model) is not model  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Traced:
    """The claimed graphs of a model, and the values its backward recomputes instead of loading."""

    graphs: tuple[Claimed, ...]
    recomputed: tuple[Recomputed, ...]


def trace(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: Device) -> Traced:
    """Trace a model and claim regions in each of its graphs, in trace order.

    The backward starts from the scalar results if there are any, else from all results. Without gradients there is no backward.
    """
    name = name_of(model)
    try:
        fakes = _FakeInputs.of(model, args, kwargs)
        fake_model = fakes.model(uncompiled(model))
        fake_args, fake_kwargs = fakes.tree((args, dict(kwargs)))
        recorder = _Recorder(device)
        with fakes.mode:
            results = torch.compile(_with_own_code(fake_model), backend=recorder, dynamic=False)(*fake_args, **fake_kwargs)
            _backward(results)
    except OnepassError:
        raise
    except Exception as error:
        raise ModelNotTraced(model=name, error=describe_error(root_cause(error))) from error
    return Traced(tuple(recorder.graphs), tuple(recorder.recomputed))


def name_of(model: Callable[..., Any]) -> str:
    """The class name of a module, or the name of a function."""
    inner = uncompiled(model)
    return type(inner).__name__ if isinstance(inner, nn.Module) else getattr(inner, "__name__", type(inner).__name__)


def _with_own_code(model: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper with its own code object: Dynamo limits recompilations per code object; these must not count for the model."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = call.__code__.replace(co_filename="<explained>")  # belongs to no file
    return FunctionType(code, globals(), "call", None, call.__closure__)


class _Recorder:
    """A torch.compile backend that claims regions in a copy of every graph Inductor would lower, and runs the graph unchanged."""

    def __init__(self, device: Device) -> None:
        self.device, self.plans = device, Plans()  # plans that name the lines of this model
        self.graphs: list[Claimed] = []
        self.recomputed: list[Recomputed] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        others = tuple(p for p in compat.configured_passes({}) if not compat.is_our_pass(p))
        passes = compat.combined_passes((*others, compat.graph_pass(self.record, lambda: None)))
        patches = {"force_disable_caches": True, "post_grad_custom_post_pass": passes}
        if (chosen := split(resolve({"interpret": True}), {}, self.recomputed.extend)) is not None:
            patches["custom_partitioner_fn"] = chosen
        return compat.compile_by_inductor(module, inputs, patches, _run_as_is)

    def record(self, graph: fx.Graph, is_inference: bool | None) -> None:
        """Claim regions in a copy of the graph; the graph itself runs without onepass."""
        copied, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in graph.nodes:
            made[node] = copied.node_copy(node, made.__getitem__)
        options = ClaimOptions(self.device, interpret=True, max_autotune=compat.max_autotune(), phase=phase_of(graph, is_inference))
        self.graphs.append(claim(copied, options, self.plans))


def _run_as_is(module: fx.GraphModule, inputs: Sequence[Any], *, is_inference: bool = False, **_: Any) -> Any:
    return compat.run_without_codegen(module, inputs, is_inference)


def root_cause(error: BaseException) -> BaseException:
    """The exception behind torch's wrapper exceptions."""
    if not type(error).__module__.startswith("torch."):
        return error
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error if inner is None else root_cause(inner)


# ---- fake tensors ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _FakeInputs:
    """A fake tensor mode, and the fake tensor that replaces each real tensor, by id."""

    mode: Any
    replacements: dict[int, Tensor]

    @staticmethod
    def of(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _FakeInputs:
        """Fake tensors for a model and its arguments. Uses the mode of existing fake tensors, if there are any."""
        tensors = [*_module_tensors(uncompiled(model)), *tensors_in((args, dict(kwargs)))]
        modes = [t.fake_mode for t in tensors if compat.is_fake(t)]  # type: ignore[attr-defined]
        mode = modes[0] if modes else compat.fake_mode()
        mode.allow_non_fake_inputs = True  # for tensors in closures
        replacements: dict[int, Tensor] = {}
        for tensor in tensors:
            if id(tensor) not in replacements:
                replacements[id(tensor)] = _to_fake(tensor, mode)
        return _FakeInputs(mode, replacements)

    def model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """A copy of the model with fake tensors; the original is unchanged."""
        return copy.deepcopy(model, dict(self.replacements)) if isinstance(model, nn.Module) else model

    def tree(self, values: Any) -> Any:
        """Nested arguments with their tensors replaced."""
        leaves, spec = compat.pytree_flatten(values)
        return compat.pytree_unflatten([self.replacements.get(id(leaf), leaf) for leaf in leaves], spec)


def _to_fake(tensor: Tensor, mode: Any) -> Tensor:
    """A fake copy of a tensor. A meta tensor becomes a fake CUDA tensor (CPU without a GPU), because meta traces to other ops."""
    if compat.is_fake(tensor):
        return tensor
    if tensor.device.type != "meta":
        fake: Tensor = mode.from_tensor(tensor, static_shapes=True)
        return fake
    with mode:
        where = "cuda" if torch.cuda.is_available() else "cpu"
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _module_tensors(model: object) -> Iterator[Tensor]:
    """Every tensor in a module's attributes, registered or not."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        yield from tensors_in(vars(module))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers and dataclasses."""
    for leaf in compat.pytree_flatten(values)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in({f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)})


def _backward(results: Any) -> None:
    """Run the backward, so that it is traced."""
    wanted = [t for t in tensors_in(results) if t.requires_grad]
    losses = [t for t in wanted if t.numel() == 1] or wanted
    if losses:
        torch.autograd.backward(losses, [torch.ones_like(t) for t in losses])
