"""Small random checkpoints of every family the network serves, made by transformers in-process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 160
MAX_POSITIONS = 512

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

ARCHITECTURES = ("llama2", "llama3", "smollm2", "mistral", "qwen2", "qwen3")
WIDE = ("wide llama2", "wide llama3", "wide smollm2", "wide mistral", "wide qwen2", "wide qwen3")
"""The same families with heads of 64, 96 and 128 dimensions, for the CPU backend. Between them: 1, 2, 3, 8 and 9 query
heads to a K/V head, biases everywhere, widths that fill no whole panel, a vocabulary of odd size."""
MANY_HEADS = "wide heads"
"""8 K/V heads, and contexts of up to 1600 positions."""


def tiny_config(architecture: str) -> PretrainedConfig:
    """A transformers config. Between them: MHA and GQA, odd head counts, biases, q/k norm, tied and untied heads."""
    if architecture in (*WIDE, MANY_HEADS):
        return _wide_config(architecture.removeprefix("wide "))
    match architecture:
        case "llama2":
            return LlamaConfig(**_SMALL)
        case "llama3":
            return LlamaConfig(**(_SMALL | {"num_key_value_heads": 2, "rope_parameters": _LLAMA3_ROPE}))
        case "smollm2":
            odd = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}
            return LlamaConfig(**(_SMALL | odd))
        case "mistral":
            return MistralConfig(**(_SMALL | {"num_key_value_heads": 1, "sliding_window": None}))
        case "qwen2":
            return Qwen2Config(**(_SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True}))
        case "qwen3":
            return Qwen3Config(**(_SMALL | {"num_key_value_heads": 2, "head_dim": 32}))
    raise ValueError(f"no tiny checkpoint of architecture {architecture!r}")


def _heads(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def _wide_config(architecture: str) -> PretrainedConfig:
    match architecture:
        case "llama2":
            odd = {"vocab_size": 171, "intermediate_size": 83, "attention_bias": True, "mlp_bias": True}
            return LlamaConfig(**(_SMALL | _heads(2, 2, 64) | odd))
        case "llama3":
            return LlamaConfig(**(_SMALL | _heads(4, 2, 64) | {"rope_parameters": _LLAMA3_ROPE}))
        case "smollm2":
            return LlamaConfig(**(_SMALL | _heads(9, 1, 64) | {"hidden_size": 288, "tie_word_embeddings": True}))
        case "mistral":
            linear = {"rope_parameters": _LINEAR_ROPE, "intermediate_size": 80, "sliding_window": None}
            return MistralConfig(**(_SMALL | _heads(8, 1, 128) | linear))
        case "qwen2":
            tied = {"hidden_size": 96, "tie_word_embeddings": True, "vocab_size": 193}
            return Qwen2Config(**(_SMALL | _heads(6, 2, 64) | tied))
        case "heads":
            long = {"num_hidden_layers": 2, "max_position_embeddings": 1600}
            return LlamaConfig(**(_SMALL | _heads(16, 8, 64) | long))
        case "qwen3":
            return Qwen3Config(**(_SMALL | _heads(4, 2, 96) | {"hidden_size": 32, "intermediate_size": 80}))
    raise ValueError(f"no wide checkpoint of architecture {architecture!r}")


def build_tiny(architecture: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model whose every parameter is random and large enough that each matters to the logits."""
    model = AutoModelForCausalLM.from_config(tiny_config(architecture), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def save_tiny(architecture: str, path: Path, seed: int = 0) -> PreTrainedModel:
    """Write the checkpoint to a directory (config.json, model.safetensors) and return the model that was written."""
    model = build_tiny(architecture, seed)
    model.save_pretrained(path)
    return model
