"""The interface of the models of the zoo: a module, its inputs, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SIZES = ("tiny", "real")  # for the interpreter on a CPU; for a card
Draw = Callable[[torch.Generator], dict[str, Tensor]]


@dataclass(frozen=True)
class Example:
    """A module in training mode, its keyword arguments, and its loss as a function of its result."""

    module: nn.Module
    inputs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]
    draw: Callable[[int], dict[str, Tensor]]  # other inputs of the same form, by seed


@dataclass(frozen=True)
class Parts:
    """The result of a builder: `draw` makes inputs from a generator, on the CPU; the rest is as in Example."""

    module: nn.Module
    draw: Draw
    loss: Callable[[Any], Tensor]


@dataclass(frozen=True)
class Maker:
    """A model that can be built at any of its sizes. `sizes` names the arguments of `build`; callers may replace some."""

    name: str
    build: Callable[..., Parts]
    sizes: Mapping[str, Mapping[str, Any]]
    missing: Callable[[], str | None] = lambda: None  # why it cannot be built here, if it cannot
    autocast: bool = True  # how it is trained in bf16: fp32 weights under autocast, or bf16 weights
    routed: bool = False  # routes by comparing values, so different rounding may route differently
    softmax: bool = False  # attention written out, so that its softmax is in the graph

    def __call__(
        self,
        size: str = "tiny",
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        **changes: Any,
    ) -> Example:
        """The model at a size, with weights of `dtype` on `device`; `changes` replace single sizes, as in layers=2."""
        arguments = {**self.sizes[size], **changes}
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            parts = self.build(**arguments)
        _unlike_fresh(parts.module, seed)
        for parameter in parts.module.parameters():
            # Buffers are unchanged: tables such as rotary frequencies are commonly kept in fp32.
            parameter.data = parameter.data.to(device=device, dtype=dtype)

        def draw(which: int) -> dict[str, Tensor]:
            made = parts.draw(torch.Generator().manual_seed(1000 * seed + which))
            return {name: t.to(device, dtype if t.is_floating_point() else t.dtype) for name, t in made.items()}

        return Example(parts.module.train(), draw(0), parts.loss, draw)


def _unlike_fresh(module: nn.Module, seed: int) -> None:
    """Move scales away from 1 and biases away from 0, so that errors in their use show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() <= 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))


def tokens(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> Tensor:
    """Random token numbers."""
    return torch.randint(vocabulary, (batch, length), generator=generator)


def sum_against(output: Tensor) -> Tensor:
    """A loss for a module without one: a weighted mean, with weights that vary over every dim and are exact in every dtype."""
    places = torch.arange(output.numel(), device=output.device).reshape(output.shape)
    return (output * ((places * 37 % 17 - 8) / 8).to(output.dtype)).mean()
