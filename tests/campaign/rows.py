"""Random graphs of the kind that models are full of: arithmetic on a few tensors of many columns, reductions along their rows and
down their columns, in one kernel. Few graphs of `draw` have columns enough for kernels that stage rows in shared memory.
"""

from __future__ import annotations

import random

from .graph import Graph, Input, Step

# Numbers of columns that do or do not divide evenly among the threads of a CTA or among two CTAs; aligned and unaligned rows.
SHAPES = (
    (6, 1024),
    (9, 2048),
    (5, 8192),
    (6, 8192),
    (4, 16384),
    (12, 4096),
    (7, 1027),
    (5, 4099),
    (130, 32),
    (70, 64),
    (300, 16),
    (12, 40),
    (2, 20000),
)
LONG = ((1, 20000), (2, 20000), (1, 8192), (2, 12288), (3, 8192), (6, 8192), (9, 2048), (5, 4099), (4, 16385))
TALL = ((2000, 40), (1024, 16), (300, 64), (3000, 7), (130, 512), (40, 24), (64, 64), (16, 300), (600, 136))
KINDS = (("f32",), ("f32",), ("bf16",), ("f16",), ("f32", "bf16"), ("f64",), ("i64",), ("e4m3", "f32"))
FLOATS, WIDE = (("f32",), ("bf16",), ("f16",), ("f32", "bf16")), 8192
# Scaled, because otherwise a tanh comes so close to 1 that its last digit decides its variance.
# fmt: off
ALONE = ("{0} * 0.5", "{0}.abs()", "-{0}", "{0} * {0}", "torch.relu({0})", "torch.sigmoid({0}.to(f32) * 0.125)",
         "torch.tanh({0}.to(f32) * 0.125)", "torch.exp({0}.to(f32).clamp(-4, 4))", "torch.where({0} > 0, {0}, {0} * 2)",
         "{0}.to(f32)")
# fmt: on
TOGETHER = ("{0} + {1}", "{0} * {1}", "{0} - {1}", "torch.maximum({0}.to(f32), {1}.to(f32))")
ALONG = (
    "{0}.sum(-1, keepdim=True)",
    "{0}.to(f32).mean(-1, keepdim=True)",
    "{0}.amax(-1, keepdim=True)",
    "{0}.to(f32).var(-1, correction=0, keepdim=True)",
    "{0}.to(f32).logsumexp(-1, keepdim=True)",
    "{0}.to(f32).square().mean(-1, keepdim=True).add(1e-5).rsqrt()",
    "{0}.to(f32).mul(8).round().argmax(-1, keepdim=True)",
)
DOWN = (
    "{0}.sum(0)",
    "{0}.to(f32).mean(0)",
    "{0}.amax(0)",
    "{0}.to(f32).var(0, correction=0)",
    "{0}.to(f32).logsumexp(0)",
    "({0} > 0).any(0)",
    "{0}.to(f32).mul(8).round().argmin(0)",
)  # rounded, so that the last digit of a tanh decides nothing
OVER = (
    "{0}.sum(DIMS, keepdim=True)",
    "{0}.to(f32).mean(DIMS, keepdim=True)",
    "{0}.amax(DIMS, keepdim=True)",
    "{0}.to(f32).var(DIMS, correction=0, keepdim=True)",
    "{0}.to(f32).logsumexp(DIMS, keepdim=True)",
)


def row_graph(seed: int) -> Graph:
    """The graph of a seed: 1 to 3 tensors, perhaps a row vector and a column vector, up to two reductions each way."""
    return _Drawing(random.Random(seed)).graph(seed)


def one_way_graph(seed: int) -> Graph:
    """The graph of a seed: reductions along rows alone or down columns alone, at sizes that suit the rarer kernel families."""
    return _Drawing(random.Random(seed)).one_way(seed)


def small_graph(seed: int) -> Graph:
    """The graph of a seed: few rows of few columns in three dims, all but the last of which a capture leaves symbolic."""
    return _Drawing(random.Random(seed)).small(seed)


class _Drawing:
    """One graph under construction."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.inputs: list[Input] = []
        self.lines: list[tuple[str, str, tuple[str, ...]]] = []  # op, text, names of what it reads

    def graph(self, seed: int) -> Graph:
        """Draw it all."""
        rng, shape, kinds = self.rng, self.rng.choice(SHAPES), self.rng.choice(KINDS)
        spans = shape[0] > 2 and shape[1] >= WIDE and rng.random() < 0.8  # a form for which several CTAs per row are possible
        kinds = rng.choice(FLOATS) if spans else kinds
        full = [self.input(shape, kinds) for _ in range(rng.choice((1, 1, 2, 3)))]
        thin = [self.input(size, kinds) for size in ((1, shape[1]), (shape[0], 1)) if rng.random() < 0.4]
        value = self.chain(full[0], [*full[1:], *thin])
        ends: list[str] = []
        for _ in range(1 if spans else rng.choice((0, 1, 1, 2))):
            row = self.line("along", rng.choice(ALONG[:3] if spans else ALONG), value)
            ends += [row] if rng.random() < 0.3 and not spans else []
            value = self.chain(self.line("meet", rng.choice(TOGETHER), value, row), thin)
        downs = [self.line("down", rng.choice(DOWN), value) for _ in range(rng.choice((1, 2) if spans else (0, 0, 1, 1, 2)))]
        ends += downs + ([value] if not (downs or ends) or spans or rng.random() < 0.6 else [])
        return self.made(seed, ends)

    def one_way(self, seed: int) -> Graph:
        """Draw reductions in one direction. A value that is combined with its own reduction may stay on chip."""
        rng = self.rng
        reductions, shapes = rng.choice(((ALONG, LONG), (DOWN, TALL)))
        shape, kinds = rng.choice(shapes), rng.choice(KINDS)
        full = [self.input(shape, kinds) for _ in range(rng.choice((1, 1, 2)))]
        value = self.chain(full[0], full[1:])
        ends = [self.line("reduce", rng.choice(reductions), value) for _ in range(rng.choice((1, 1, 2)))]
        if rng.random() < 0.4:
            ends.append(self.chain(self.line("meet", rng.choice(TOGETHER), value, ends[0]), []))
        return self.made(seed, ends)

    def small(self, seed: int) -> Graph:
        """Draw reductions over some dims, sometimes combined with the value that was reduced."""
        rng = self.rng
        shape = (rng.choice((2, 3, 6, 9, 40)), rng.choice((2, 3, 5, 17)), rng.choice((1, 2, 3, 5, 8, 33)))
        layouts, kinds = ("contiguous", "contiguous", "reversed dims", "transposed", "misaligned"), rng.choice(KINDS)
        full = [self.input(shape, kinds, rng.choice(layouts)) for _ in range(rng.choice((1, 1, 2)))]
        value = self.chain(full[0], full[1:])
        over = rng.choice(((0,), (1,), (2,), (1, 2), (1, 2), (0, 1), (0, 2), (0, 1, 2)))
        ends = [self.line("reduce", rng.choice(OVER).replace("DIMS", str(over)), value) for _ in range(rng.choice((1, 1, 2)))]
        if rng.random() < 0.3:
            ends.append(self.chain(self.line("meet", rng.choice(TOGETHER), value, ends[0]), []))
        return self.made(seed, ends)

    def input(self, shape: tuple[int, ...], kinds: tuple[str, ...], layout: str = "") -> str:
        layout = layout or ("misaligned" if self.rng.random() < 0.15 else "contiguous")
        self.inputs.append(Input(shape, self.rng.choice(kinds), layout, self.rng.choice(("normal", "normal", "normal", "special"))))
        return f"x{len(self.inputs) - 1}"

    def chain(self, value: str, others: list[str]) -> str:
        """Some arithmetic that uses every one of the others."""
        if self.inputs[0].dtype[0] == "e":
            value = self.line("float", "{0}.to(f32)", value)
        for other in others:
            if self.inputs[int(other[1:])].dtype[0] == "e":
                other = self.line("float", "{0}.to(f32)", other)
            value = self.line("together", self.rng.choice(TOGETHER), value, other)
        for _ in range(self.rng.choice((0, 1, 2, 3))):
            value = self.line("alone", self.rng.choice(ALONE), value)
        return value

    def line(self, op: str, text: str, *read: str) -> str:
        self.lines.append((op, text, read))
        return f"v{len(self.lines) - 1}"

    def made(self, seed: int, ends: list[str]) -> Graph:
        """Names become positions: inputs first."""
        at = {f"x{k}": k for k in range(len(self.inputs))} | {f"v{k}": len(self.inputs) + k for k in range(len(self.lines))}
        steps = tuple(Step(op, text, tuple(at[name] for name in read)) for op, text, read in self.lines)
        return Graph(seed, tuple(self.inputs), steps, tuple(dict.fromkeys(at[name] for name in ends))).pruned()
