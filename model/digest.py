"""A digest of everything a network computes with: the bytes of its weights as loaded, and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import xxhash

from model.config import ModelConfig


def digest_model(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> bytes:
    """xxh3-128 (16 bytes) over every config value and every tensor in order of name: name, dtype, shape, bytes.

    Each part is written with its length before it, so that no two models spell the same bytes. The tensors are taken
    as they were loaded, after conversion, so the same file in two dtypes gives two digests, and the path gives none.
    """
    state = xxhash.xxh3_128()
    for name, value in _config_values("", config):
        _update(state, name.encode())
        _update(state, value)
    _update_weights(state, weights)
    return state.digest()


def digest_weights(weights: Mapping[str, torch.Tensor]) -> bytes:
    """xxh3-128 (16 bytes) over every tensor, written as in `digest_model`."""
    state = xxhash.xxh3_128()
    _update_weights(state, weights)
    return state.digest()


def _update_weights(state: xxhash.xxh3_128, weights: Mapping[str, torch.Tensor]) -> None:
    for name in sorted(weights):
        tensor = weights[name]
        _update(state, name.encode())
        _update(state, str(tensor.dtype).encode())
        _update(state, repr(tuple(tensor.shape)).encode())
        _update(state, _bytes_of(tensor))


def _update(state: xxhash.xxh3_128, part: bytes | memoryview) -> None:
    state.update(len(part).to_bytes(8, "little"))
    state.update(part)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def _config_values(prefix: str, config: Any) -> list[tuple[str, bytes]]:
    """(dotted field name, type and exact value) of every field, nested dataclasses included."""
    values: list[tuple[str, bytes]] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            values += _config_values(f"{prefix}{field.name}.", value)
        else:
            values.append((prefix + field.name, f"{type(value).__name__} {value!r}".encode()))
    return values
