"""The metadata of a GGUF file as a ModelConfig, and where each of the network's tensors lies in it.

The keys and the layout are llama.cpp's (gguf-py/gguf/constants.py and convert_hf_to_gguf.py there).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gguf
import torch

from model.config import ModelConfig
from model.config_check import check_config
from model.errors import BadConfig, BadWeights, UnsupportedModel
from model.gguf_file import GgufFile, shorten
from model.gguf_rope import rope_from_gguf
from model.gguf_values import Values

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,  # Llama and Mistral
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}

_READ = frozenset(
    """
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    attention.sliding_window rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow
    """.split()  # noqa: SIM905
)
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope": "rope.freq_base",
    "max_positions": "context_length",
}
NO_TOKEN = 2**32 - 1
"""How llama.cpp writes -1, which says that there is no such token, into an unsigned key."""
# Keys that say nothing about what is computed, or that may only hold the value at which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The ModelConfig of a GGUF file.

    Raises:
        UnsupportedModel: another architecture, or a key that changes what is computed; it is named.
        BadWeights: a key or tensor that every file of the architecture has is missing.
    """
    architecture = file.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{file.path}: GGUF architecture {shorten(architecture)} is not one of {known}.")
    _refuse_other_math(file, architecture)
    values = Values(file, architecture)
    _refuse_missing_layers(file, values)
    num_heads, hidden_size = values.integer("attention.head_count"), values.integer("embedding_length")
    head_dim = values.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.integer(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{file.path}: {architecture}.{key} is not the head size, {head_dim}.")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=values.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=values.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope=rope_from_gguf(file, values, head_dim),
        max_positions=values.integer("context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        sliding_window=values.integer("attention.sliding_window", 0) or None,
        bos_token_id=_token_id(file, "tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file),
    )
    check_config(config, file.path, {name: f"{architecture}.{key}" for name, key in _KEYS.items()})
    return config


def _refuse_missing_layers(file: GgufFile, values: Values) -> None:
    """Before anything is made for each of them: a damaged file may count billions."""
    wanted, there = values.integer("block_count"), len({name.split(".")[1] for name in file.tensors if _is_block(name)})
    if wanted > there:
        raise BadConfig(f"{file.path}: {values.name('block_count')} is {wanted}, but the file has tensors of {there}.")


def _is_block(tensor: str) -> bool:
    return tensor.startswith("blk.") and tensor.count(".") > 1


def _refuse_other_math(file: GgufFile, architecture: str) -> None:
    for key in file.keys:
        name = key.removeprefix(f"{architecture}.")
        if name == key or name in _READ:
            continue
        value = file.get(key)
        if name not in _NEUTRAL or value not in _NEUTRAL[name]:
            raise UnsupportedModel(f"{file.path}: {key} = {value!r} is not supported.")


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: what the network computes with, whatever the metadata counts."""
    if "token_embd.weight" not in file.tensors:
        raise BadWeights(f"{file.path} has no tensor token_embd.weight.")
    return file.shape("token_embd.weight")[0]


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (_token_id(file, f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _token_id(file: GgufFile, key: str) -> int | None:
    """Raises BadConfig for what no token of the vocabulary can be."""
    value = file.get(key)
    if value is None or value in (-1, NO_TOKEN):
        return None
    size = _vocab_size(file)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise BadConfig(f"{file.path}: {key} is {shorten(value)}, expected a token id below {size}.")
    return value


def tensor_names(config: ModelConfig, names: Iterable[str]) -> dict[str, str]:
    """Hugging Face name -> GGUF name, for the tensors a network of `config` reads."""
    name_map = gguf.get_tensor_name_map(ARCHITECTURES[config.architecture], config.num_layers)
    found = {}
    for name in names:
        gguf_name = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise UnsupportedModel(f"GGUF has no name for the tensor {name}.")
        found[name] = gguf_name
    return found


def restore_rows(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Undo what llama.cpp's converter did to the rows of q and k of architecture llama, and only there.

    It interleaves the two halves of each head, because its rotary kernel for that architecture turns neighbouring
    pairs; Hugging Face's (and ours) turns pairs half a head apart. See `permute` in convert_hf_to_gguf.py.
    """
    if config.architecture != "llama" or not name.endswith(_ROTARY):
        return tensor
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
    if tensor.shape[0] != heads * config.head_dim:
        return tensor  # of a wrong shape: told by the check that follows, which names it
    pairs = tensor.reshape(heads, config.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


_ROTARY = tuple(f"self_attn.{name}_proj.{part}" for name in "qk" for part in ("weight", "bias"))
