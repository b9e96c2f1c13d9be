"""Parts of models, each for one reduction and its surroundings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .example import Parts, sum_against, tokens

IGNORED = -100  # the target of a position that is not predicted


class LayerNormBlock(nn.Module):
    """A pre-norm transformer block: LayerNorms, biases, GELU."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.packed, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        packed = self.packed(self.attention_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        result: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))
        return result


def layernorm_block(*, dim: int, heads: int, batch: int, length: int) -> Parts:
    """The block and a random stream."""
    return Parts(LayerNormBlock(dim, heads), lambda g: {"x": torch.randn(batch, length, dim, generator=g)}, sum_against)


class ConvBlock(nn.Module):
    """GroupNorm, SiLU and a convolution, twice, around a skip connection."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x)))
        result: Tensor = x + self.conv2(F.silu(self.norm2(inner)))
        return result


def conv_block(*, channels: int, groups: int, batch: int, side: int) -> Parts:
    """The block and random images."""
    return Parts(ConvBlock(channels, groups), lambda g: {"x": torch.randn(batch, channels, side, side, generator=g)}, sum_against)


class MaskedAttention(nn.Module):
    """Explicit attention: scores, a mask, softmax, and the weighted sum."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        batch, length, dim = x.shape
        query, key, value = (
            project(x).view(batch, length, self.heads, -1).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(dim // self.heads)
        scores = scores.masked_fill(~visible, -torch.inf)
        mixed = torch.softmax(scores, dim=-1) @ value
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return result


def masked_attention(*, dim: int, heads: int, batch: int, length: int) -> Parts:
    """Attention whose mask is causal, with padding at the end of every row but the first."""

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        kept = torch.randint(length // 2, length, (batch,), generator=generator)
        kept[0] = length
        padded = torch.arange(length) < kept[:, None]
        return {"x": torch.randn(batch, length, dim, generator=generator), "visible": causal & padded[:, None, None, :]}

    return Parts(MaskedAttention(dim, heads), draw, sum_against)


class Router(nn.Module):
    """Routes tokens to experts: softmax, top-k, normalized weights, and a load-balancing loss."""

    def __init__(self, dim: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.gate = nn.Linear(dim, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probabilities = torch.softmax(self.gate(x).float(), dim=-1)
        weights, which = torch.topk(probabilities, self.chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        share = F.one_hot(which, self.experts).to(probabilities.dtype).sum(dim=-2).mean(dim=0)
        balance = self.experts * (share * probabilities.mean(dim=0)).sum()
        return weights, which, balance


def router(*, dim: int, experts: int, chosen: int, rows: int) -> Parts:
    """The router and random tokens."""
    return Parts(
        Router(dim, experts, chosen),
        lambda g: {"x": torch.randn(rows, dim, generator=g)},
        lambda result: sum_against(result[0]) + 0.01 * result[2],
    )


class Loss(nn.Module):
    """A head, cross-entropy over positions that have a target, and a penalty on large normalizers."""

    def __init__(self, dim: int, vocabulary: int, penalty: float) -> None:
        super().__init__()
        self.head, self.penalty = nn.Linear(dim, vocabulary, bias=False), penalty

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(x).float()
        counted = (targets != IGNORED).to(logits.dtype)
        normaliser = torch.logsumexp(logits, dim=-1)
        extra = (normaliser.square() * counted).sum() / counted.sum()
        return F.cross_entropy(logits, targets, ignore_index=IGNORED) + self.penalty * extra


def loss(*, dim: int, vocabulary: int, rows: int) -> Parts:
    """The loss, random activations, and targets, a third of which are ignored."""

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        targets = tokens(generator, 1, rows, vocabulary)[0]
        left_out = torch.rand(rows, generator=generator) < 1 / 3
        left_out[0] = False
        return {"x": torch.randn(rows, dim, generator=generator), "targets": targets.masked_fill(left_out, IGNORED)}

    return Parts(Loss(dim, vocabulary, 1e-3), draw, lambda result: result)
