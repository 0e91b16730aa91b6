"""A causal decoder of the Llama family, in reading order: tokens in, logits out, K/V in the planes it is given.

    token ids -> embedding -> [ norm -> q,k,v -> (q,k norm) -> rotate -> write, attend -> o -> +
                                norm -> gate,up -> silu(gate) * up -> down -> + ] x layers -> norm -> head

One code path for Llama 2 and 3, Mistral, Qwen2, Qwen3 and SmolLM2: what differs between them is in the config. The
network keeps no state between steps but its weights and its table of rotary angles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from model.attention.base import Attention, Planes
from model.config import ModelConfig
from model.inputs import AdapterRows, StepInputs
from model.linear import Linear, fuse, prepack
from model.numerics import pad_rows, rms_norm, silu
from model.rope import RotaryTable, rotate


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; q, k, v share one matrix, gate and up another."""

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Network:
    """A decoder on one device in one dtype.

    `weights` maps Hugging Face names to tensors (`model.tensors.expected_tensors` lists them) and is read once per
    name, layer by layer, so it may load lazily. Tensors of other dtypes are converted.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, torch.Tensor], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        read = _Reader(weights, device, dtype)
        self._embedding = read.tensor("model.embed_tokens.weight")
        self._layers = tuple(_read_layer(config, read, f"model.layers.{index}") for index in range(config.num_layers))
        self._norm = read.tensor("model.norm.weight")
        head = Linear(self._embedding) if config.tie_embeddings else read.linear("lm_head", bias=False)
        self._head = prepack(head)
        self._rotary = RotaryTable(config.rope, config.head_dim, device)

    def reserve(self, positions: int) -> None:
        """Make the rotary table for this many positions now, so that it need not grow (and move) up to there."""
        self._rotary.tables(positions)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, planes: Sequence[Planes], attention: Attention) -> torch.Tensor:
        """One pass: writes the K/V of all T tokens into `planes` (one entry per layer), returns float32 logits.

        The logits are [N, vocab_size], of `inputs.logit_rows`. On CPU a row's bits depend on its tokens alone, not
        on what else is in the pass or in which passes its context was computed.
        """
        attention.prepare(inputs)
        cos, sin = self._rotary.lookup(pad_rows(inputs.positions), max(inputs.kv_len))
        hidden = functional.embedding(pad_rows(inputs.token_ids), self._embedding)
        adapters = inputs.adapters
        last = len(self._layers) - 1
        for index, (layer, layer_planes) in enumerate(zip(self._layers, planes, strict=True)):
            query, key, value = self._heads(layer, hidden, cos, sin, adapters)
            count = inputs.token_ids.shape[0]  # attention sees no padding
            attention.write(layer_planes, (key[:count], value[:count]))
            if index == last and inputs.logit_rows.shape[0] == 0:
                break  # nobody reads this layer's output, its K/V are written
            mixed = attention.attend(layer_planes, query[:count]).flatten(1)
            if index == last:  # only these rows are read from here on
                hidden, mixed = pad_rows(hidden[inputs.logit_rows]), mixed[inputs.logit_rows]
                adapters = _among(inputs.logit_rows, adapters)
            hidden = hidden + layer.o(pad_rows(mixed), adapters)
            hidden = hidden + self._mlp(layer, hidden, adapters)
        return self._logits(hidden, inputs.logit_rows.shape[0])

    def _heads(
        self,
        layer: Layer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        adapters: Sequence[AdapterRows],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden [P, hidden_size] -> q [P, num_heads, head_dim], k and v [P, num_kv_heads, head_dim]."""
        config = self.config
        normed = rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
        heads = layer.qkv(normed, adapters).view(hidden.shape[0], -1, config.head_dim)
        rotated, value = heads[:, : -config.num_kv_heads], heads[:, -config.num_kv_heads :]
        if layer.qk_norm is not None:
            rotated = rms_norm(rotated, layer.qk_norm, config.rms_norm_eps)
        rotated = rotate(rotated, cos, sin)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], value

    def _mlp(self, layer: Layer, hidden: torch.Tensor, adapters: Sequence[AdapterRows]) -> torch.Tensor:
        normed = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
        gate, up = layer.gate_up(normed, adapters).chunk(2, dim=-1)
        return layer.down(silu(gate) * up, adapters)

    def _logits(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        if count == 0:
            return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=self.device)
        return self._head(rms_norm(hidden, self._norm, self.config.rms_norm_eps))[:count].float()


def _among(logit_rows: torch.Tensor, adapters: Sequence[AdapterRows]) -> tuple[AdapterRows, ...]:
    """The adapters' rows among those that are left once only `logit_rows` are."""
    left = [(torch.isin(logit_rows, each.rows).nonzero().flatten(), each.adapter) for each in adapters]
    return tuple(AdapterRows(rows, adapter) for rows, adapter in left if rows.shape[0])


class _Reader:
    """Takes tensors out of a mapping and puts them where the network wants them."""

    def __init__(self, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._weights = weights
        self._device = device
        self._dtype = dtype

    def tensor(self, name: str) -> torch.Tensor:
        return self._weights[name].detach().to(device=self._device, dtype=self._dtype).contiguous()

    def linear(self, name: str, *, bias: bool) -> Linear:
        return Linear(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias") if bias else None, name)


def _read_layer(config: ModelConfig, read: _Reader, name: str) -> Layer:
    return Layer(
        attention_norm=read.tensor(f"{name}.input_layernorm.weight"),
        qkv=_read_fused(read, f"{name}.self_attn.qkv_proj", ("q", "k", "v"), bias=config.qkv_bias),
        qk_norm=_read_qk_norm(config, read, name) if config.qk_norm else None,
        o=prepack(read.linear(f"{name}.self_attn.o_proj", bias=config.o_bias)),
        mlp_norm=read.tensor(f"{name}.post_attention_layernorm.weight"),
        gate_up=_read_fused(read, f"{name}.mlp.gate_up_proj", ("gate", "up"), bias=config.mlp_bias),
        down=prepack(read.linear(f"{name}.mlp.down_proj", bias=config.mlp_bias)),
    )


def _read_fused(read: _Reader, name: str, parts: Sequence[str], *, bias: bool) -> Linear:
    module = name.rpartition(".")[0]
    return prepack(fuse([read.linear(f"{module}.{part}_proj", bias=bias) for part in parts], name))


def _read_qk_norm(config: ModelConfig, read: _Reader, name: str) -> torch.Tensor:
    """One scale per head, so that q and k are normalised together: [num_heads + num_kv_heads, head_dim]."""
    q_norm = read.tensor(f"{name}.self_attn.q_norm.weight").expand(config.num_heads, -1)
    k_norm = read.tensor(f"{name}.self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
    return torch.cat((q_norm, k_norm))
