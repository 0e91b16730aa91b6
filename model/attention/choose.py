"""Which backend computes attention here."""

from __future__ import annotations

import importlib.util
import logging

import torch

from model.attention.base import Attention
from model.attention.torch_reference import TorchReference

log = logging.getLogger("pagekv.attention")

OLDEST_CAPABILITY = (8, 0)
"""Of the GPUs that Triton compiles for: Ampere's."""


def choose_attention(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> Attention:
    """The fastest backend that can run: on a GPU, FA3 through torch where GPU, dtype and package allow, else Triton's
    kernels; plain torch everywhere else.

    Errors: ValueError when the block size suits no backend (it must be a power of two up to 128).
    """
    reference = TorchReference(block_size)
    if device.type != "cuda":
        return reference
    from model.attention import varlen  # imports a part of torch that takes seconds, for GPUs alone

    if varlen.supports(device, dtype, head_dim):
        return varlen.VarlenAttention(block_size)
    if supports_triton(device):
        from model.attention.triton_paged import TritonAttention  # imports Triton, which a CPU does without

        return TritonAttention(block_size, torch.cuda.get_device_properties(device).multi_processor_count)
    log.warning("attention on this GPU is plain torch, and slow: Triton is not installed, or the GPU is too old for it")
    return reference


def supports_triton(device: torch.device) -> bool:
    """Whether Triton compiles for this GPU, and its package is there."""
    return (
        torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY and importlib.util.find_spec("triton") is not None
    )
