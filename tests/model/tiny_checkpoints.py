"""Tiny random networks of transformers, saved the ways models are published: safetensors directories and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
}


def make_network(family: str, **overrides: Any) -> Any:
    """A network with random weights, and random where transformers starts with zeros (biases) or ones (norms)."""
    config_type, network_type = FAMILIES[family]
    torch.manual_seed(0)
    network = network_type(config_type(**{**SIZES, **overrides}))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=1.0, std=0.1)
    return network.eval()


def save_hf(network: Any, path: Path, **options: Any) -> Path:
    network.save_pretrained(path, **options)
    return path


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to q and k of the Llama family (LlamaModel.permute)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(network: Any, architecture: str) -> dict[str, np.ndarray]:
    """The network's tensors as float32 under their GGUF names, laid out as llama.cpp's converter does."""
    config = network.config
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
    names = gguf.get_tensor_name_map(arch[architecture], config.num_hidden_layers)
    tensors = {}
    for name, tensor in network.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors


def write_gguf(
    path: Path,
    architecture: str,
    config: Any,
    tensors: dict[str, np.ndarray],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    raw: dict[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
    **metadata: Any,
) -> Path:
    """Write matrices as `kind`, vectors as float32; `raw` replaces tensors by bytes that are already quantized.

    `metadata` adds `<architecture>.*` keys, dots written as two underscores; None leaves a key out.
    """
    writer = GGUFWriter(path, architecture)
    theta = config.rope_parameters["rope_theta"]
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": theta,
        "attention.key_length": config.head_dim if architecture == "qwen3" else None,
        **{key.replace("__", "."): value for key, value in metadata.items()},
    }
    for key, value in values.items():
        _add(writer, f"{architecture}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for name, tensor in tensors.items():
        if raw and name in raw:
            data, raw_kind = raw[name]
            writer.add_tensor(name, data, raw_dtype=raw_kind)
        elif tensor.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
