"""A random function as data: inputs to make, steps of source text, outputs. It can be run, run in float64, printed and stored.

The text is the single source of truth: the same lines are run, shown in reports, and kept for a shrunk failure.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = {
    "bool": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("f32", "bf16", "f16", "f64", "e4m3", "e5m2")
INTS = ("i64", "i32", "i16", "i8", "u8")
LAYOUTS = ("contiguous", "transposed", "sliced", "misaligned", "expanded", "overlapping", "reversed dims", "channels last")
CONTENTS = ("normal", "whole", "special", "large", "tiny", "constant", "extreme")


@dataclass(frozen=True)
class Input:
    """A tensor argument, or a Python number (`number` is set)."""

    shape: tuple[int, ...] = ()
    dtype: str = "f32"
    layout: str = "contiguous"
    content: str = "normal"
    number: float | int | bool | None = None

    @property
    def is_tensor(self) -> bool:
        return self.number is None


@dataclass(frozen=True)
class Step:
    """One line: `text` with {0}, {1}.. for its arguments, which are positions among inputs and earlier steps."""

    op: str  # its row in the table of ops, for counting
    text: str
    args: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A function of `inputs`: value k is input k, then step k - len(inputs)."""

    seed: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def name(self, position: int) -> str:
        """The name of a value in the text."""
        return f"x{position}" if position < len(self.inputs) else f"v{position - len(self.inputs)}"

    def source(self) -> str:
        """The function's text."""
        lines = [f"def f({', '.join(self.name(k) for k in range(len(self.inputs)))}):"]
        for k, step in enumerate(self.steps):
            lines.append(f"    v{k} = " + step.text.format(*map(self.name, step.args)))
        results = ", ".join(map(self.name, self.outputs)) + ("," if len(self.outputs) == 1 else "")
        return "\n".join([*lines, f"    return {results}"]) + "\n"

    def function(self, exact: bool = False) -> Callable[..., tuple[Any, ...]]:
        """The function itself; `exact` names float64 wherever the text names a floating type."""
        names = {n: torch.float64 if exact and d.is_floating_point else d for n, d in DTYPES.items()}
        scope: dict[str, Any] = {"torch": torch, "F": F, **names}
        text, file = self.source(), f"<graph {self.seed} {next(_NUMBER)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), scope)
        made: Callable[..., tuple[Any, ...]] = scope["f"]
        return made

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @staticmethod
    def of_json(data: dict[str, Any]) -> Graph:
        """The inverse of `to_json`."""
        inputs = tuple(Input(**{**i, "shape": tuple(i["shape"])}) for i in data["inputs"])
        steps = tuple(Step(s["op"], s["text"], tuple(s["args"])) for s in data["steps"])
        return Graph(data["seed"], inputs, steps, tuple(data["outputs"]))

    def pruned(self) -> Graph:
        """Without the steps and inputs that no output needs."""
        needed, waiting = set[int](), list(self.outputs)
        base = len(self.inputs)
        while waiting:
            at = waiting.pop()
            if at not in needed:
                needed.add(at)
                waiting += self.steps[at - base].args if at >= base else ()
        # Lines that change a value in place belong to it even if nothing reads their result.
        inputs = [k for k in range(base) if k in needed]
        steps = [k for k in range(len(self.steps)) if base + k in needed]
        new = {old: k for k, old in enumerate([*inputs, *(base + k for k in steps)])}
        return replace(
            self,
            inputs=tuple(self.inputs[k] for k in inputs),
            outputs=tuple(new[o] for o in self.outputs),
            steps=tuple(replace(self.steps[k], args=tuple(new[a] for a in self.steps[k].args)) for k in steps),
        )


_NUMBER = itertools.count()


def make_inputs(graph: Graph, draw: int = 0, device: str = "cpu") -> list[Any]:
    """Arguments for a graph: the same for the same seed and draw, fresh memory each time."""
    return [made(i, graph.seed * 1009 + draw * 31 + k, device) for k, i in enumerate(graph.inputs)]


def made(spec: Input, seed: int, device: str = "cpu") -> Any:
    """One argument."""
    if not spec.is_tensor:
        return spec.number
    generator = torch.Generator().manual_seed(seed)
    if spec.layout == "overlapping" and spec.shape:  # windows that share elements
        line = contents(spec, (spec.shape[0] + sum(spec.shape[1:]) + 1,), generator).to(device)
        return line.as_strided(spec.shape, (1,) * len(spec.shape), 1)
    if spec.layout == "expanded" and spec.shape:
        return contents(spec, (1, *spec.shape[1:]), generator).to(device).expand(spec.shape)
    return with_layout(contents(spec, spec.shape, generator).to(device), spec.layout)


def contents(spec: Input, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values of the input's kind of content, in its type."""
    dtype, count = DTYPES[spec.dtype], 1
    for extent in shape:
        count *= extent
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        if spec.content == "extreme":
            pool = torch.tensor([least, least + 1, max(least, -1), 0, 1, 2, most - 1, most]).to(dtype)
            return pool[torch.randint(0, len(pool), shape, generator=generator)]
        return torch.randint(max(least, -4), 9, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    match spec.content:
        case "whole":
            values = values.mul(3).round()
        case "large":
            values = values * 1e3
        case "tiny":
            values = values * 1e-6
        case "constant":
            values = torch.full(shape, 1.5, dtype=torch.float64)
        case "special":
            pool = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1e-40, -6e-8, 1.0], dtype=torch.float64)
            odd = pool[torch.randint(0, len(pool), shape, generator=generator)]
            values = torch.where(torch.rand(shape, generator=generator, dtype=torch.float32) < 0.15, odd, values)
        case "extreme":
            pool = torch.tensor(
                [torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny, 0.0, 1.0], dtype=torch.float64
            )
            values = pool[torch.randint(0, len(pool), shape, generator=generator)]
    return values.to(dtype)


def with_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same elements, stored another way."""
    match layout:
        case "transposed" if tensor.dim() >= 2:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        case "reversed dims" if tensor.dim() >= 2:
            order = tuple(reversed(range(tensor.dim())))
            return tensor.permute(order).contiguous().permute(order)
        case "channels last" if tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        case "sliced" if tensor.dim() >= 1:
            wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] * 2 + 1))
            wide[..., 1::2] = tensor
            return wide[..., 1::2]
        case "misaligned":
            line = tensor.new_zeros(tensor.numel() + 1)
            line[1:] = tensor.reshape(-1)
            return line[1:].view(tensor.shape)
    return tensor


@contextmanager
def default_float64() -> Iterator[None]:
    """Make torch's default dtype float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
