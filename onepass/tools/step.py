"""Runs a training step from scratch: `file.py:train_step` -> its results and gradients, by name.

The file is executed again for every run, with the same seeds, so that no state carries over: no gradients, optimizer state or
running statistics of a norm.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import compat
from ..errors import NothingToCompare
from .spec import Subject, load, resolve_step
from .trace_model import tensors_in, uncompiled

Results = dict[str, Tensor]


@dataclass(frozen=True)
class StepFactory:
    """Creates a fresh copy of the same step on every call."""

    text: str  # file.py:function
    inputs: str | None
    seed: int
    is_step: bool  # the named function is the step itself, not a function that returns it

    @staticmethod
    def of(text: str, inputs: str | None, seed: int) -> StepFactory:
        """A factory for the step that a text names. Calls the function once to see what it returns."""
        seed_all(seed)
        return StepFactory(text, inputs, seed, resolve_step(text, load(text), inputs) is None)

    def __call__(self) -> Subject:
        """A fresh step."""
        torch.compiler.reset()
        seed_all(self.seed)
        found = load(self.text)
        made = Subject(found) if self.is_step else resolve_step(self.text, found, self.inputs)
        assert made is not None
        seed_all(self.seed)
        return made


def seed_all(seed: int) -> None:
    """Seed every random number generator."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def random_state() -> bytes:
    """The state of torch's generators. If a run changes it, the run drew random numbers."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
    return b"".join(state.numpy().tobytes() for state in states)


# ---- results of a run --------------------------------------------------------------------------------------------------------


def results(step: Subject, call: Callable[..., Any], what: str) -> Results:
    """Run `call` instead of the step: every tensor it returns, and every gradient. If it does not call backward, the gradients are
    those of its losses."""
    leaves = dict(_leaves(step))
    returned = call(*step.args, **step.kwargs)
    found = {f"result {k}": t for k, t in enumerate(_as_tensors(returned))}
    if leaves and all(leaf.grad is None for leaf in leaves.values()):
        _backward([t for t in found.values() if t.requires_grad])
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    if not found and not gradients:
        raise NothingToCompare(what=what, detail=f"it returned {type(returned).__name__} and left no gradient")
    return {name: t.detach().clone() for name, t in {**found, **gradients}.items()}


def _as_tensors(returned: Any) -> list[Tensor]:
    """The tensors in a step's return value. Floats count too, as `loss.item()` returns them."""
    numbers = [v for v in compat.pytree_flatten(returned)[0] if isinstance(v, float)]
    return [*tensors_in(returned), *map(torch.tensor, numbers)]


def _backward(wanted: list[Tensor]) -> None:
    """Backpropagate from the scalar results, else from all, weighted: the gradient of a plain sum of a norm's output is 0."""
    losses = [t for t in wanted if t.numel() == 1] or wanted
    if losses:
        torch.autograd.backward(losses, [_weights(t) for t in losses])


def _weights(result: Tensor) -> Tensor:
    if result.numel() == 1:
        return torch.ones_like(result)
    return torch.arange(result.numel(), device=result.device, dtype=torch.float64).cos().to(result.dtype).view(result.shape)


def _leaves(step: Subject) -> Iterator[tuple[str, Tensor]]:
    """The leaf tensors of a step that may get gradients, by name: parameters of its modules, and inputs that require grad."""
    seen: set[int] = set()
    for name, value in (*_known(step.call), *((f"input {k}", a) for k, a in enumerate(step.args)), *step.kwargs.items()):
        value = uncompiled(value) if callable(value) else value
        named = value.named_parameters() if isinstance(value, nn.Module) else [("", value)]
        for rest, leaf in named:
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf and id(leaf) not in seen:
                seen.add(id(leaf))
                yield ".".join(filter(None, (name, rest))), leaf


def _known(call: Callable[..., Any]) -> list[tuple[str, Any]]:
    """The values a step refers to, by name: the module itself, or attributes, closure variables and globals of a function."""
    call = uncompiled(call)
    if isinstance(call, nn.Module):
        return [("", call)]
    bound = getattr(call, "__self__", None)
    own = list(vars(bound).items()) if hasattr(bound, "__dict__") else []
    try:
        variables = inspect.getclosurevars(call)
    except TypeError:
        return own
    return [*own, *variables.nonlocals.items(), *variables.globals.items()]


# ---- float64 -----------------------------------------------------------------------------------------------------------------


class Float64(TorchFunctionMode):
    """Replaces explicit conversions to fp32 by conversions to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        leaves, form = compat.pytree_flatten((args, kwargs or {}))
        args, kwargs = compat.pytree_unflatten([torch.float64 if leaf is torch.float32 else leaf for leaf in leaves], form)
        return func(*args, **kwargs)


def to_float64(step: Subject) -> Subject:
    """The step with float64 tensors."""
    call = uncompiled(step.call)
    if isinstance(call, nn.Module):
        call = copy.deepcopy(call).double()
    elif any(isinstance(value, Tensor | nn.Module) for _, value in _known(call)):
        raise TypeError(
            "its code refers to tensors that are not inputs; return (module, inputs), or (step, inputs) with a step "
            "that refers to none"
        )
    return Subject(call, tuple(map(_wide, step.args)), {name: _wide(value) for name, value in step.kwargs.items()})


def _wide(value: Any) -> Any:
    leaves, form = compat.pytree_flatten(value)
    return compat.pytree_unflatten([_wide_tensor(leaf) for leaf in leaves], form)


def _wide_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf.double() if isinstance(leaf, nn.Module) else leaf
    return leaf.detach().double().requires_grad_(leaf.requires_grad)


# ---- differences -------------------------------------------------------------------------------------------------------------


def relative_rms(one: Tensor, other: Tensor) -> float:
    """The RMS difference of two tensors divided by the RMS of the second; infinite if they cannot be compared."""
    if one.shape != other.shape:
        return math.inf
    a, b = (_comparable(t) for t in (one, other))
    if torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()):
        return 0.0
    if not (a.isfinite() == b.isfinite()).all():
        return math.inf
    finite = b.isfinite()
    scale = float(b[finite].square().mean().sqrt())
    difference = float((a - b)[finite].square().mean().sqrt())
    return difference / scale if scale else math.inf


def _comparable(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
