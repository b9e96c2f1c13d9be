"""Models of the `transformers` library, built from configurations: weights are random and nothing is downloaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from .example import Maker, Parts, tokens

IGNORED = -100
LEFT_OUT = 3  # every third position of a masked-language model is predicted


@functools.cache
def _library() -> Any:
    """The library, or None."""
    try:
        import transformers
    except Exception:  # a broken installation counts as none
        return None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers


def _missing(config: str, model: str) -> str | None:
    library = _library()
    if library is None:
        return "transformers is not installed"
    try:
        getattr(library, config), getattr(library, model)
    except (AttributeError, ImportError) as error:
        return f"transformers {library.__version__} cannot give {model}: {error}"
    return None


def _made(config: str, model: str, attention: str, experts: str | None, settings: dict[str, Any]) -> nn.Module:
    library = _library()
    loss = settings.pop("loss_type", None)
    described = getattr(library, config)(**settings)
    described.use_cache = False
    described._attn_implementation = attention
    made: Any = getattr(library, model)(described)
    if experts and hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation(experts)
    if loss:
        made.loss_type = loss  # without one, the library warns from inside the model, which breaks the graph
    return cast(nn.Module, made)


def _loss_of(result: Any) -> Tensor:
    loss: Tensor = result.loss
    return loss


def _causal(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    text = tokens(generator, batch, length, vocabulary)
    return {"input_ids": text, "labels": text.clone()}


def _masked(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    text = tokens(generator, batch, length, vocabulary)
    predicted = torch.arange(length) % LEFT_OUT == 0
    seen = torch.ones(batch, length, dtype=torch.int64)
    seen[-1, length - length // 4 :] = 0
    return {"input_ids": text, "attention_mask": seen, "labels": text.masked_fill(~predicted, IGNORED)}


def _pairs(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(generator, batch, length, vocabulary), "labels": tokens(generator, batch, length // 2, vocabulary)}


def text_model(
    *,
    config: str,
    model: str,
    attention: str,
    draw: Callable[..., dict[str, Tensor]],
    layers_are: tuple[str, ...],
    layers: int,
    batch: int,
    length: int,
    vocabulary: int,
    experts: str | None = None,
    **settings: Any,
) -> Parts:
    """A text model and random text. `layers_are` names the settings that hold the number of layers."""
    for name in layers_are:
        settings[name] = layers
    made = _made(config, model, attention, experts, {**settings, "vocab_size": vocabulary})
    return Parts(made, lambda g: draw(g, batch, length, vocabulary), _loss_of)


def image_model(
    *, config: str, model: str, attention: str, layers: int, batch: int, side: int, classes: int, **settings: Any
) -> Parts:
    """An image model and random images."""
    sizes = {"num_hidden_layers": layers, "image_size": side, "num_labels": classes}
    made = _made(config, model, attention, None, {**settings, **sizes})

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.randn(batch, 3, side, side, generator=generator),
            "labels": torch.randint(classes, (batch,), generator=generator),
        }

    return Parts(made, draw, _loss_of)


def _maker(
    name: str,
    build: Callable[..., Parts],
    config: str,
    model: str,
    *,
    tiny: dict[str, Any],
    real: dict[str, Any],
    attention: str = "sdpa",
    routed: bool = False,
    **fixed: Any,
) -> Maker:
    shared = {"config": config, "model": model, "attention": attention, **fixed}
    sizes = {"tiny": {**shared, **tiny}, "real": {**shared, **real}}
    return Maker(name, build, sizes, lambda: _missing(config, model), autocast=False, routed=routed, softmax=attention == "eager")


_TEXT: dict[str, Any] = {"draw": _causal, "layers_are": ("num_hidden_layers",)}
_TINY: dict[str, Any] = {
    "layers": 2,
    "batch": 2,
    "length": 8,
    "vocabulary": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
}
_GROUPED: dict[str, Any] = {**_TINY, "num_key_value_heads": 2}
_SHORT: dict[str, Any] = {"length": 5, "num_attention_heads": 2, "num_key_value_heads": 1}  # norms per head have many rows
_BATCH: dict[str, Any] = {"batch": 8, "length": 2048}

MAKERS = (
    _maker(
        "llama",
        text_model,
        "LlamaConfig",
        "LlamaForCausalLM",
        **_TEXT,
        tiny=_GROUPED,
        real={
            **_BATCH,
            "layers": 8,
            "vocabulary": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    _maker(
        "qwen3",
        text_model,
        "Qwen3Config",
        "Qwen3ForCausalLM",
        **_TEXT,
        tiny={**_GROUPED, **_SHORT, "head_dim": 8},
        real={
            **_BATCH,
            "batch": 4,
            "layers": 14,
            "vocabulary": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    _maker(
        "gemma3",
        text_model,
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        **_TEXT,
        attention="eager",
        tiny={**_GROUPED, **_SHORT, "head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
        real={
            **_BATCH,
            "batch": 2,
            "layers": 6,
            "vocabulary": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
    _maker(
        "gpt2",
        text_model,
        "GPT2Config",
        "GPT2LMHeadModel",
        draw=_causal,
        layers_are=("n_layer",),
        loss_type="ForCausalLM",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tiny={"layers": 2, "batch": 2, "length": 8, "vocabulary": 61, "n_embd": 32, "n_head": 4, "n_positions": 16},
        real={"layers": 24, "batch": 8, "length": 1024, "vocabulary": 50257, "n_embd": 1024, "n_head": 16, "n_positions": 1024},
    ),
    _maker(
        "bert",
        text_model,
        "BertConfig",
        "BertForMaskedLM",
        draw=_masked,
        layers_are=("num_hidden_layers",),
        attention="eager",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tiny={**_TINY, "max_position_embeddings": 16},
        real={
            "layers": 8,
            "batch": 16,
            "length": 512,
            "vocabulary": 30522,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "max_position_embeddings": 512,
        },
    ),
    _maker(
        "vit",
        image_model,
        "ViTConfig",
        "ViTForImageClassification",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tiny={
            "layers": 2,
            "batch": 2,
            "side": 16,
            "patch_size": 8,
            "classes": 7,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
        },
        real={
            "layers": 12,
            "batch": 64,
            "side": 224,
            "patch_size": 16,
            "classes": 1000,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
        },
    ),
    _maker(
        "t5",
        text_model,
        "T5Config",
        "T5ForConditionalGeneration",
        draw=_pairs,
        layers_are=("num_layers", "num_decoder_layers"),
        attention="eager",
        dropout_rate=0.0,
        decoder_start_token_id=0,
        tiny={"layers": 1, "batch": 2, "length": 8, "vocabulary": 61, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4},
        real={
            "layers": 6,
            "batch": 16,
            "length": 512,
            "vocabulary": 32128,
            "d_model": 768,
            "d_ff": 3072,
            "d_kv": 64,
            "num_heads": 12,
        },
    ),
    _maker(
        "deepseek_v3",
        text_model,
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        **_TEXT,
        routed=True,
        n_shared_experts=1,
        first_k_dense_replace=1,
        tiny={
            **_TINY,
            "length": 5,
            "num_key_value_heads": 4,
            "experts": "batched_mm",
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        real={
            **_BATCH,
            "batch": 2,
            "layers": 4,
            "vocabulary": 32000,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1024,
            "n_routed_experts": 32,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
    ),
    _maker(
        "mixtral",
        text_model,
        "MixtralConfig",
        "MixtralForCausalLM",
        **_TEXT,
        routed=True,
        num_experts_per_tok=2,
        tiny={**_GROUPED, "num_local_experts": 4, "experts": "batched_mm"},
        real={
            **_BATCH,
            "batch": 2,
            "layers": 4,
            "vocabulary": 32000,
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
        },
    ),
)
