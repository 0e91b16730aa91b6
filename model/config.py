"""The numbers that shape a network of the Llama family, whatever file they were read from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position angles. `kind` is none | linear | llama3; a scheme whose angles depend on the total length
    (dynamic, longrope, yarn with dynamic factors) is refused when the config is read: it would make cached K stale.

    `frequency_factors`, where a GGUF ships them as `rope_freqs.weight`, divide the inverse frequencies one by one and
    stand in place of `kind`.
    """

    theta: float = 10000.0
    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A causal decoder with RMSNorm, rotary positions, grouped-query attention and a SiLU-gated MLP.

    Every value here that changes what the network computes is part of the CacheIdentity.
    """

    architecture: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int  # the longest context the model was made for
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # served only while max_model_len is within it
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
