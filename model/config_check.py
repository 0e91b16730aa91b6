"""Whether a network can be built from a ModelConfig: what no file of a working model says.

Every value is compared on its own when it is read; here they are compared with one another. Each format calls them by
its own keys, so a message names what the operator finds in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from model.config import ModelConfig
from model.errors import BadConfig

LARGEST = 2**31 - 1
"""Of any size or count; a tensor or a position beyond it cannot be addressed."""


def check_config(config: ModelConfig, file: Path, keys: Mapping[str, str]) -> None:
    """`keys` maps fields of ModelConfig to the file's own names. Raises BadConfig, which names file and key."""

    def refuse(field: str, why: str) -> None:
        raise BadConfig(f"{file}: {keys.get(field, field)} is {getattr(config, field)!r}, {why}.")

    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
        if not 0 < getattr(config, field) <= LARGEST:
            refuse(field, f"expected an integer from 1 to {LARGEST}")
    if not 0 < config.max_positions <= LARGEST:
        refuse("max_positions", f"expected an integer from 1 to {LARGEST}")
    if config.num_heads % config.num_kv_heads:
        heads = f"{keys.get('num_heads', 'num_heads')} of {config.num_heads}"
        refuse("num_kv_heads", f"which does not divide the {heads}")
    if not 0 < config.head_dim <= LARGEST or config.head_dim % 2:
        refuse("head_dim", "expected an even number above 0: rotary positions turn pairs")
    if not 0 < config.rms_norm_eps < 1:  # false for NaN
        refuse("rms_norm_eps", "expected a number above 0 and below 1")
    if not 1 < config.rope.theta < 1e30:
        raise BadConfig(f"{file}: {keys.get('rope', 'rope')} is {config.rope.theta!r}, expected a number above 1.")
    if config.bos_token_id is not None and not 0 <= config.bos_token_id < config.vocab_size:
        refuse("bos_token_id", f"expected a token id below {config.vocab_size}, the vocabulary's size")
    if any(not 0 <= token < config.vocab_size for token in config.eos_token_ids):
        refuse("eos_token_ids", f"expected token ids below {config.vocab_size}, the vocabulary's size")
