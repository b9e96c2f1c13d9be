"""A small transformer: queries and keys normalized per head, shared keys, squared leaky ReLUs. Plain, or with learnable vectors.

In the learnable form every norm has a weight, and every block scales what it adds and mixes the embedding back in.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .example import Parts, tokens

SLOPE = 0.5  # of the leaky ReLU


class Norm(nn.Module):
    """RMSNorm over the last dim, with a weight or without."""

    def __init__(self, width: int, learnable: bool) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(width)) if learnable else None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self.weight)


class Attention(nn.Module):
    """Causal attention; queries and keys are normalized per head, and a few heads share keys and values."""

    def __init__(self, dim: int, heads: int, kv_heads: int, learnable: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.query_norm, self.key_norm = Norm(self.width, learnable), Norm(self.width, learnable)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        query = self.query_norm(self.query(x).view(batch, length, self.heads, self.width)).transpose(1, 2)
        key = self.key_norm(self.key(x).view(batch, length, self.kv_heads, self.width)).transpose(1, 2)
        value = self.value(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        shared = self.heads // self.kv_heads
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return result


class MLP(nn.Module):
    """Two linear layers around a squared leaky ReLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.leaky_relu(self.up(x), SLOPE).square())
        return result


class Block(nn.Module):
    """Attention and MLP, each on normalized input and added to the stream."""

    def __init__(self, dim: int, heads: int, kv_heads: int, learnable: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(dim, learnable), Norm(dim, learnable)
        self.attention = Attention(dim, heads, kv_heads, learnable)
        self.mlp = MLP(dim, 4 * dim)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class ScaledBlock(Block):
    """The same with a per-channel scale on both additions, after mixing the stream with its initial value."""

    def __init__(self, dim: int, heads: int, kv_heads: int, learnable: bool) -> None:
        super().__init__(dim, heads, kv_heads, learnable)
        self.mix = nn.Parameter(torch.stack((torch.ones(dim), torch.zeros(dim))))
        self.attention_scale, self.mlp_scale = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        x = self.mix[0] * x + self.mix[1] * first
        x = x + self.attention_scale * self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp_scale * self.mlp(self.mlp_norm(x))
        return result


class Transformer(nn.Module):
    """The loss of predicting the next token."""

    def __init__(self, vocabulary: int, dim: int, layers: int, heads: int, kv_heads: int, learnable: bool) -> None:
        super().__init__()
        block = ScaledBlock if learnable else Block
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(block(dim, heads, kv_heads, learnable) for _ in range(layers))
        self.first_norm, self.last_norm = Norm(dim, learnable), Norm(dim, learnable)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        first = x = self.first_norm(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, first)
        logits = self.head(self.last_norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def build(*, learnable: bool, vocabulary: int, dim: int, layers: int, heads: int, kv_heads: int, batch: int, length: int) -> Parts:
    """The transformer and random text."""

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        text = tokens(generator, batch, length + 1, vocabulary)
        return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}

    return Parts(Transformer(vocabulary, dim, layers, heads, kv_heads, learnable), draw, lambda loss: loss)


TINY: dict[str, Any] = {"vocabulary": 61, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "batch": 2, "length": 8}
REAL: dict[str, Any] = {"vocabulary": 4096, "dim": 512, "layers": 11, "heads": 8, "kv_heads": 4, "batch": 32, "length": 2048}
