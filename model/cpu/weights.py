"""A network's weights in the memory and the structures that the C backend reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import torch

from model.config import ModelConfig
from model.cpu import library as c
from model.cpu.memory import Arena
from model.cpu.pack import PackedMatrix, interleave, padded
from model.cpu.quantized import QuantizedPanels, can_pack, interleave_rows
from model.quantized import QuantizedTensor


class WeightForm(StrEnum):
    """In what form matrices are kept that the file has quantized. The products are the same bit for bit."""

    BOTH = "both"
    QUANTIZED = "quantized"  # the least memory
    DENSE = "dense"  # unpacked, in the compute dtype


class PackedModel:
    """All weights, and `struct`, which names where they lie. `weights` is emptied: each is packed and let go.

    `quantized` gives a matrix as the file has it, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        quantized: Callable[[str], QuantizedTensor | None],
        form: WeightForm,
        block_size: int,
        library: c.Library,
    ) -> None:
        self._config = config
        self._library = library
        self._weights = weights
        self._quantized = quantized
        self._form = form
        self._arena = Arena()
        self._kept: list[torch.Tensor | PackedMatrix] = []
        self._layers = (c.Layer * config.num_layers)()
        for index in range(config.num_layers):
            self._read_layer(self._layers[index], f"model.layers.{index}")
        embedding = weights["model.embed_tokens.weight"].contiguous()
        head = self._matrix(["model.embed_tokens" if config.tie_embeddings else "lm_head"], has_bias=False)
        self.struct = c.Model(
            hidden=config.hidden_size,
            intermediate=padded(config.intermediate_size),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            layers=config.num_layers,
            vocab=config.vocab_size,
            block_size=block_size,
            eps=config.rms_norm_eps,
            embedding=self._pointer(embedding),
            norm=self._vector("model.norm.weight"),
            head=head,
            layer=self._layers,
        )
        weights.clear()

    @property
    def has_quantized(self) -> bool:
        """Whether any matrix is kept as the file has it."""
        return any(isinstance(kept, PackedMatrix) and kept.is_quantized for kept in self._kept)

    def forget_quantized(self) -> None:
        """Free what quantized rows of 0 keep from being read ever again."""
        for kept in self._kept:
            if isinstance(kept, PackedMatrix):
                kept.forget_quantized()

    def _read_layer(self, layer: c.Layer, name: str) -> None:
        config = self._config
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        layer.attention_norm = self._vector(f"{name}.input_layernorm.weight")
        layer.mlp_norm = self._vector(f"{name}.post_attention_layernorm.weight")
        if config.qk_norm:
            q = self._weights.pop(f"{attention}.q_norm.weight").float().expand(config.num_heads, -1)
            k = self._weights.pop(f"{attention}.k_norm.weight").float().expand(config.num_kv_heads, -1)
            layer.qk_norm = self._pointer(torch.cat((q, k)))
        layer.qkv = self._matrix([f"{attention}.{part}_proj" for part in "qkv"], has_bias=config.qkv_bias)
        layer.o = self._matrix([f"{attention}.o_proj"], has_bias=config.o_bias)
        layer.gate_up = self._gate_up(f"{mlp}.gate_proj", f"{mlp}.up_proj")
        layer.down = self._matrix([f"{mlp}.down_proj"], has_bias=config.mlp_bias)

    def _matrix(self, names: Sequence[str], *, has_bias: bool) -> c.Matrix:
        """The matrices of `names` side by side."""
        weight = torch.cat([self._take(f"{name}.weight") for name in names])
        bias = torch.cat([self._take(f"{name}.bias") for name in names]) if has_bias else None
        return self._keep(weight, bias, [self._as_stored(f"{name}.weight") for name in names])

    def _gate_up(self, gate: str, up: str) -> c.Matrix:
        weight = interleave(*(self._take(f"{name}.weight") for name in (gate, up)))
        bias = interleave(*(self._take(f"{name}.bias") for name in (gate, up))) if self._config.mlp_bias else None
        return self._keep(weight, bias, [interleave_rows(*(self._as_stored(f"{name}.weight") for name in (gate, up)))])

    def _as_stored(self, name: str) -> QuantizedTensor | None:
        return None if self._form is WeightForm.DENSE else self._quantized(name)

    def _keep(
        self, weight: torch.Tensor, bias: torch.Tensor | None, stored: Sequence[QuantizedTensor | None]
    ) -> c.Matrix:
        panels = QuantizedPanels(self._library, self._arena, stored) if can_pack(stored) else None
        dense = panels is None or self._form is not WeightForm.QUANTIZED
        packed = PackedMatrix(self._library, self._arena, weight, bias, panels, dense=dense)
        self._kept.append(packed)
        return packed.struct

    def _take(self, name: str) -> torch.Tensor:
        """The embedding may be the head as well."""
        return self._weights[name] if name.startswith("model.embed_tokens.") else self._weights.pop(name)

    def _vector(self, name: str) -> int:
        return self._pointer(self._weights.pop(name).float())

    def _pointer(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()
