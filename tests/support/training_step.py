"""One training step of a model in eager, compiled, and in float64; and whether the compiled one is as accurate as eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from bench.zoo import Example
from tests.support.correctness import Judged, compared, pooled

Run = Callable[..., Any]
NOISE = 4  # times eager's noise
DRAWS = 16  # inputs that are tried if one looks wrong
MOST_POOLED = 1 << 27  # elements of a result over all draws, so that they fit on a card


class Float64(TorchFunctionMode):
    """Gives a model float64 where it asks for fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args, kwargs = tree_map(lambda a: torch.float64 if a is torch.float32 else a, (args, kwargs or {}))
        return func(*args, **kwargs)


def step(run: Run, module: nn.Module, example: Example, inputs: Mapping[str, Tensor], autocast: bool = False) -> dict[str, Tensor]:
    """Every tensor the module gives, the loss, and the gradient of every parameter and every input that can have one, by name.

    `run` is the module or its compiled form.
    """
    module.zero_grad(set_to_none=True)
    given = {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    device = next(iter(given.values())).device.type
    with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
        output = run(**given)
        loss = example.loss(output)
    loss.backward()
    # A library's result class is a dict that includes the loss.
    flat = [t for t in tree_flatten(dict(output) if isinstance(output, dict) else output)[0] if isinstance(t, Tensor)]
    found = {f"output {k}": t.detach().clone() for k, t in enumerate(flat)} | {"loss": loss.detach()}
    leaves = {f"gradient of {name}": leaf.grad for name, leaf in (*module.named_parameters(), *given.items())}
    return found | {name: grad.clone() for name, grad in leaves.items() if grad is not None}


def in_float64(module: nn.Module, example: Example, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same step of a float64 copy."""
    wide = copy.deepcopy(module).double()
    with Float64():
        return step(wide, wide, example, {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()})


def assert_as_right_as_eager(run: Run, example: Example, autocast: bool = False, only: Iterable[str] | None = None) -> None:
    """Check every result of one step against float64 and eager by the criterion.

    The largest error of few elements is a matter of chance: a result that fails is judged again, pooled with the same result
    for other inputs.
    """
    draws = {name: [judged] for name, judged in _judged(run, example, example.inputs, autocast, only).items() if not judged.ok}
    for k in range(1, DRAWS):
        names = [name for name, judged in draws.items() if k < 2 or judged[0].actual.numel() * k < MOST_POOLED]
        if names:
            for name, judged in _judged(run, example, example.draw(k), autocast, names).items():
                draws[name].append(judged)
    together = {name: pooled(judged) for name, judged in draws.items()}
    wrong = [f"{name}: {judged.check}" for name, judged in together.items() if not (judged.ok or _noise_alone(judged))]
    assert not wrong, "\n".join(wrong)


def _noise_alone(judged: Judged) -> bool:
    """Whether eager's result and ours consist of rounding errors only: the gradient of a key's bias, which softmax cancels
    out, is exactly zero. The remaining rounding depends on the order of sums and says nothing about accuracy."""
    expected = float((judged.eager.double() - judged.reference).abs().max())
    return float(judged.reference.abs().max()) < expected and judged.check.max_error <= NOISE * expected


def _judged(
    run: Run, example: Example, inputs: Mapping[str, Tensor], autocast: bool, only: Iterable[str] | None
) -> dict[str, Judged]:
    actual = step(run, example.module, example, inputs, autocast)
    eager = step(example.module, example.module, example, inputs, autocast)
    exact = in_float64(example.module, example, inputs)
    assert actual.keys() == eager.keys() == exact.keys()
    wanted = eager.keys() if only is None else only
    # Values after a model's matmuls have errors relative to whole tensors: bands would judge the order of their sums.
    return {name: replace(compared(actual[name], eager[name], exact[name], name), bands=False) for name in wanted}
