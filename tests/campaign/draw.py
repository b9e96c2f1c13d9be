"""Random graphs: inputs of every type, layout and content, then ops that fit the values at hand."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .graph import CONTENTS, FLOATS, INTS, LAYOUTS, Graph, Input, Step, made, make_inputs
from .ops import ROWS, Row, Unfit, any_tensor

SHAPES = (
    (),
    (1,),
    (5,),
    (33,),
    (3, 4),
    (1, 8),
    (8, 1),
    (7, 33),
    (2, 3, 4),
    (4, 1, 5),
    (16, 24),
    (2, 2, 3, 5),
    (3, 130),
    (65, 3),
    (2, 9, 8),
    (1, 1),
    (0,),
    (3, 0),
    (0, 4),
    (1, 300),
)
RARE = ("bool", "bool", "bool", "u16", "u32")
CLASSES = (("f32",), ("bf16", "f16"), ("f64",), ("e4m3", "e5m2"), INTS, ("bool",), ("u16", "u32"))
CONVERSIONS = ("{0}.to(f32)", "torch.nan_to_num({0}.to(f32), 0.0, 1.0, -1.0).clamp(-100, 100).to(i32)")
NO_INDEX = (torch.bool, torch.uint16, torch.uint32)
MOST_ELEMENTS = 2048
TRIES = 8


def graph(seed: int) -> Graph:
    """The graph of a seed: 1 to 4 inputs, 3 to 25 ops, 1 to 4 outputs."""
    return Drawing(seed).graph()


def pair_graph(seed: int) -> Graph:
    """A graph that applies a given op to a given class of types. Seeds go through all pairs in turn."""
    turn, at = divmod(seed, len(ROWS))
    dtypes = CLASSES[turn % len(CLASSES)]
    return Drawing(seed).pair(list(ROWS.values())[at], dtypes[turn // len(CLASSES) % len(dtypes)])


class Drawing:
    """One graph under construction. Every step is run as it is added, so its value is known."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.values: list[Any] = []

    def graph(self) -> Graph:
        """Draw it all."""
        shape = self.rng.choice(SHAPES)
        floats = FLOATS if self.rng.random() < 0.3 else ("f32", "bf16", "f16")
        calm = self.rng.random() < 0.6
        for _ in range(self.rng.randint(1, 4)):
            self.input(shape, floats, calm)
        wanted = self.rng.choice((3, 4, 5, 6, 8, 10, 14, 25))
        for _ in range(wanted * 3):
            if len(self.steps) < wanted:
                self.step()
        return Graph(self.seed, tuple(self.inputs), tuple(self.steps), self.outputs()).pruned()

    def pair(self, chosen: Row, dtype: str) -> Graph:
        """Up to three inputs of a type, the op, and up to two more steps. Inputs the op does not accept are converted first."""
        shape = self.rng.choice([s for s in SHAPES if len(s) in (1, 2, 3)] if self.rng.random() < 0.8 else SHAPES)
        for _ in range(self.rng.choice((1, 2, 3))):
            layout = self.rng.choice(("contiguous", *LAYOUTS))
            self.inputs.append(Input(shape, dtype, layout, self.rng.choice(("normal", *CONTENTS))))
            self.values.append(made(self.inputs[-1], self.seed * 1009 + len(self.values)))
        for conversion in ("", *CONVERSIONS):
            if conversion:
                self.steps.append(Step("to", conversion, (0,)))
                self.values.append(self.run(conversion, (0,)))
            if self.add(chosen):
                break
        first = len(self.values) - 1
        for _ in range(self.rng.choice((0, 1, 2))):
            self.step()
        return Graph(self.seed, tuple(self.inputs), tuple(self.steps), tuple(dict.fromkeys((first, *self.outputs())))).pruned()

    def outputs(self) -> tuple[int, ...]:
        """Up to four values, most of them not read by other steps."""
        base = len(self.inputs)
        tensors = list(range(base, len(self.values))) or [0]
        read = {a for step in self.steps for a in step.args}
        ends = [k for k in tensors if k not in read]
        chosen = self.rng.sample(ends, min(len(ends), self.rng.choice((1, 1, 2, 3, 4)))) or tensors[-1:]
        if self.rng.random() < 0.3:
            chosen.append(self.rng.choice(tensors))
        return tuple(dict.fromkeys(chosen))

    def input(self, shape: tuple[int, ...], floats: tuple[str, ...], calm: bool) -> None:
        """One more argument: of the graph's shape, of one it broadcasts with, or a number."""
        if self.inputs and self.rng.random() < 0.08:
            self.inputs.append(Input(number=self.rng.choice((0.5, 2, -3, True, 0.0))))
        else:
            kind = self.rng.random()
            dtype = self.rng.choice(floats if kind < 0.7 else INTS if kind < 0.92 else RARE)
            own = shape if not self.inputs or self.rng.random() < 0.6 else self.smaller(shape)
            layout = "contiguous" if self.rng.random() < 0.5 else self.rng.choice(LAYOUTS)
            content = "normal" if calm else self.rng.choice(CONTENTS)
            self.inputs.append(Input(own, dtype, layout, content))
        position = len(self.inputs) - 1
        self.values.append(made(self.inputs[-1], self.seed * 1009 + position))

    def smaller(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to another, or another one altogether."""
        if self.rng.random() < 0.1:
            return self.rng.choice(SHAPES)
        kept = shape[self.rng.randint(0, len(shape)) :] if self.rng.random() < 0.5 else shape
        return tuple(1 if self.rng.random() < 0.3 else s for s in kept)

    def step(self) -> None:
        """Add one line, if there are values for the drawn op and eager accepts it."""
        rows = list(ROWS.values())
        self.add(self.rng.choices(rows, [r.weight for r in rows])[0])

    def add(self, chosen: Row) -> bool:
        """Add a line with this op, and return whether that was possible."""
        for _ in range(TRIES):
            try:
                text, args = chosen.draw(self)
                result = self.run(text, args)
            except (Unfit, RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
                continue
            if isinstance(result, torch.Tensor) and result.numel() <= MOST_ELEMENTS and not result.is_complex():
                self.steps.append(Step(chosen.name, text, args))
                self.values.append(result)
                return True
        return False

    def run(self, text: str, args: tuple[int, ...]) -> Any:
        """The result of a line in eager torch."""
        probe = Graph(self.seed, tuple(Input() for _ in args), (Step("", text, tuple(range(len(args)))),), (len(args),))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return probe.function()(*(self.values[a] for a in args))[0]

    # What rows of the op table call

    def value(self, at: int) -> Any:
        return self.values[at]

    def tensor(self, accept: Callable[[torch.Tensor], bool] = any_tensor) -> int:
        """Some value that fits; later ones are more likely."""
        fitting = [k for k, t in enumerate(self.values) if isinstance(t, torch.Tensor) and accept(t)]
        if not fitting:
            raise Unfit
        return fitting[-1] if self.rng.random() < 0.55 else self.rng.choice(fitting)

    def like(self, at: int) -> int:
        """Some value that broadcasts with another."""
        shape = self.values[at].shape

        def fits(t: torch.Tensor) -> bool:
            pairs = zip(reversed(shape), reversed(t.shape))
            return all(a == b or a == 1 or b == 1 for a, b in pairs)

        return self.tensor(fits)

    def integer_index(self, extent: int) -> int:
        """Some value whose text makes it valid as indices."""
        if not extent:
            raise Unfit
        return self.tensor(lambda t: not t.is_floating_point() and t.dtype not in NO_INDEX and t.numel() > 0)


__all__ = ["graph", "make_inputs"]
