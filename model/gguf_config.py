"""The metadata of a GGUF file as a ModelConfig, and where each of the network's tensors lies in it.

The keys and the layout are llama.cpp's (gguf-py/gguf/constants.py and convert_hf_to_gguf.py there).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import gguf
import numpy as np
import torch

from model.config import ModelConfig, RopeConfig
from model.errors import BadWeights, UnsupportedModel
from model.gguf_file import GgufFile

_log = logging.getLogger(__name__)

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,  # Llama and Mistral
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
ROPE_FREQS = "rope_freqs.weight"

_READ = frozenset(
    """
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    attention.sliding_window rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length
    """.split()  # noqa: SIM905
)
# Keys that say nothing about what is computed, or that may only hold the value at which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.attn_factor": (0.0, 1.0),
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
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{file.path}: GGUF architecture {architecture!r} is not one of {known}.")
    _refuse_other_math(file, architecture)
    values = _Values(file, architecture)
    num_heads, hidden_size = values.integer("attention.head_count"), values.integer("embedding_length")
    head_dim = values.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.integer(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{file.path}: {architecture}.{key} is not the head size, {head_dim}.")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=values.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=values.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, values, head_dim),
        max_positions=values.integer("context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        sliding_window=values.integer("attention.sliding_window", 0) or None,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file),
    )


class _Values:
    """The `<architecture>.*` keys of a file, by type."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture

    def get(self, key: str, default: Any = None) -> Any:
        value = self._file.get(f"{self._prefix}.{key}", default)
        if value is None:
            raise BadWeights(f"{self._file.path} has no {self._prefix}.{key} in its metadata.")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list):  # one value per layer, as networks with uneven layers have
            if len(set(value)) != 1:
                raise UnsupportedModel(f"{self._file.path}: {self._prefix}.{key} differs between layers: {value}")
            value = value[0]
        if int(value) <= 0 and default != 0:
            raise BadWeights(f"{self._file.path}: {self._prefix}.{key} is {value}.")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 of the file as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06.

        That is what the number was before it was written, so the same model read from either format agrees.
        """
        return float(str(np.float32(self.get(key, default))))


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


def _rope(file: GgufFile, values: _Values, head_dim: int) -> RopeConfig:
    theta = values.number("rope.freq_base", 10000.0)
    kind = values.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{file.path}: rope scaling {kind!r} is not supported; its angles may depend on the length of the text, "
            "which would make cached keys stale. Supported: none, linear, and factors in rope_freqs.weight."
        )
    factors = _frequency_factors(file, head_dim)
    if kind == "none":
        return RopeConfig(theta=theta, frequency_factors=factors)
    factor = values.number("rope.scaling.factor", 1.0)
    if factors is not None and factor != 1.0:
        raise UnsupportedModel(f"{file.path}: linear rope scaling together with {ROPE_FREQS} is not supported.")
    return RopeConfig(theta=theta, kind="linear", factor=factor, frequency_factors=factors)


def _frequency_factors(file: GgufFile, head_dim: int) -> tuple[float, ...] | None:
    if ROPE_FREQS not in file.tensors:
        return None
    factors = file.tensor(ROPE_FREQS).flatten().tolist()
    if len(factors) != head_dim // 2 or not all(factor > 0 for factor in factors):
        raise BadWeights(f"{file.path}: {ROPE_FREQS} holds {len(factors)} factors, expected {head_dim // 2} above 0.")
    return tuple(factors)


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (file.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))


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
