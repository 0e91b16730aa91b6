"""The numbers that shape a network of the Llama family, whatever file they were read from."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position angles. `kind` is none | linear | llama3 | yarn | longrope.

    Angles must not depend on the length of a text: cached K would become stale. So `dynamic` is refused when the
    config is read, and of longrope's two sets of factors one is chosen at start, for all texts (`settled`).

    `frequency_factors`, where a GGUF file has them as `rope_freqs.weight`, divide the inverse frequencies one by one
    and replace `kind`. For a settled longrope they are the chosen set.
    """

    theta: float = 10000.0
    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    frequency_factors: tuple[float, ...] | None = None
    beta_fast: float = 32.0  # yarn: dimensions that turn more often within the original context are left alone
    beta_slow: float = 1.0  # yarn: those that turn less often are interpolated
    truncate: bool = True  # yarn: round the bounds between the two to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: cosines and sines are multiplied by it
    short_factors: tuple[float, ...] | None = None  # longrope, until it is settled
    long_factors: tuple[float, ...] | None = None

    def settled(self, longest: int) -> RopeConfig:
        """The same angles for texts of any length up to `longest` tokens.

        longrope takes its long factors where `longest` exceeds the original context, else the short ones, as vLLM
        does; transformers changes from one to the other as a text grows.
        """
        if self.short_factors is None or self.long_factors is None:
            return self
        chosen = self.long_factors if longest > self.original_max_positions else self.short_factors
        return replace(self, frequency_factors=chosen, short_factors=None, long_factors=None)


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
