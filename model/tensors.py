"""The tensors a network of the Llama family is made of, by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator

from model.config import ModelConfig

Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every weight that a network of this config reads; no more and no fewer.

    Matrices are [out_features, in_features], as `torch.nn.functional.linear` takes them. Rows of q and k are in the
    half-rotation layout of Hugging Face checkpoints (a GGUF of architecture llama interleaves them instead).
    """
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        tensors.update((f"model.layers.{index}.{name}", shape) for name, shape in _layer_tensors(config))
    tensors["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return tensors


def _layer_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    for name, out_size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        yield from _linear(f"self_attn.{name}", out_size, hidden, config.qkv_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield from _linear("self_attn.o_proj", hidden, q_size, config.o_bias)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from _linear("mlp.gate_proj", inner, hidden, config.mlp_bias)
    yield from _linear("mlp.up_proj", inner, hidden, config.mlp_bias)
    yield from _linear("mlp.down_proj", hidden, inner, config.mlp_bias)


def _linear(name: str, out_size: int, in_size: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)
