"""Which backend computes attention here."""

from __future__ import annotations

import torch

from model.attention import varlen
from model.attention.base import Attention
from model.attention.torch_reference import TorchReference


def choose_attention(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> Attention:
    """The fastest backend that can run: FA3 through torch where GPU, dtype and package allow, else plain torch.

    Errors: ValueError when the block size suits no backend (it must be a power of two up to 128).
    """
    reference = TorchReference(block_size)
    if varlen.supports(device, dtype, head_dim):
        return varlen.VarlenAttention(block_size)
    return reference
