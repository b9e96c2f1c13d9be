"""The models of tests and benchmarks: `ZOO[name]("tiny")` for a CPU, `ZOO[name]("real", device="cuda")` for a card."""

from __future__ import annotations

import functools

from . import pieces, published, transformer
from .example import SIZES, Example, Maker

_OWN = (
    Maker(
        "seed_transformer",
        functools.partial(transformer.build, learnable=False),
        {"tiny": transformer.TINY, "real": transformer.REAL},
    ),
    Maker(
        "seed_transformer_learnable",
        functools.partial(transformer.build, learnable=True),
        {"tiny": transformer.TINY, "real": transformer.REAL},
    ),
    Maker(
        "prenorm_layernorm_block",
        pieces.layernorm_block,
        {"tiny": {"dim": 32, "heads": 4, "batch": 2, "length": 8}, "real": {"dim": 1024, "heads": 16, "batch": 16, "length": 1024}},
    ),
    Maker(
        "groupnorm_silu_conv",
        pieces.conv_block,
        {
            "tiny": {"channels": 16, "groups": 4, "batch": 2, "side": 6},
            "real": {"channels": 320, "groups": 32, "batch": 8, "side": 64},
        },
    ),
    Maker(
        "masked_softmax_attention",
        pieces.masked_attention,
        {"tiny": {"dim": 32, "heads": 4, "batch": 2, "length": 12}, "real": {"dim": 1024, "heads": 16, "batch": 8, "length": 1024}},
        softmax=True,
    ),
    Maker(
        "moe_router",
        pieces.router,
        {
            "tiny": {"dim": 16, "experts": 8, "chosen": 2, "rows": 12},
            "real": {"dim": 4096, "experts": 64, "chosen": 6, "rows": 16384},
        },
        routed=True,
    ),
    Maker(
        "cross_entropy_zloss",
        pieces.loss,
        {"tiny": {"dim": 16, "vocabulary": 97, "rows": 12}, "real": {"dim": 1024, "vocabulary": 50257, "rows": 8192}},
    ),
)
ZOO: dict[str, Maker] = {maker.name: maker for maker in (*_OWN, *published.MAKERS)}

__all__ = ["SIZES", "ZOO", "Example", "Maker"]
