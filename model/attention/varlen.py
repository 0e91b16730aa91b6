"""Paged attention on CUDA by torch's own varlen_attn with a block table (FlashAttention-3 kernels, Hopper).

One row per span, causal mask aligned to the end of its context. `num_splits=1` keeps the order of the sums the same
whatever else is in the batch, so attention adds no dependence on a row's company.

    cu_seq_q    0 . q_len[0] . q_len[0]+q_len[1] ...      int32 [S + 1]
    seqused_k   kv_len                                    int32 [S]
    pages       [num_blocks, block_size, kv_heads, head_dim], a strided view of the block-major plane
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from model.attention.base import Planes
from model.attention.slots import SlotWriter
from model.attention.upload import upload
from model.inputs import StepInputs

KERNEL = "FA3"
MODULE = "flash_attn_interface"  # the package that brings FA3's kernels, by torch's default
MAX_HEAD_DIM = 256

HAS_TRITON = importlib.util.find_spec("triton") is not None


def supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FA3 can run here: a Hopper GPU, 16-bit floats, heads of at most 256 in steps of 8, its package there."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim <= MAX_HEAD_DIM
        and head_dim % 8 == 0
        and torch.cuda.get_device_capability(device)[0] == 9
        and importlib.util.find_spec(MODULE) is not None
    )


def as_pages(plane: torch.Tensor) -> torch.Tensor:
    """[num_blocks, kv_heads, block_size, head_dim] -> the kernel's [num_blocks, block_size, kv_heads, head_dim].

    A view: the kernel takes any strides as long as a head's numbers lie side by side.
    """
    return plane.transpose(1, 2)


class VarlenAttention:
    """The FA3 backend. Activates FA3 for the process when made; RuntimeError where its package is missing."""

    numerics = f"varlen-{KERNEL}-splits1"
    capturable = HAS_TRITON  # else a slot of -1 would be written

    def __init__(self, block_size: int) -> None:
        if current_flash_attention_impl() != KERNEL:
            activate_flash_attention_impl(KERNEL)
        self._block_size = block_size
        self._writer: SlotWriter | None = None

    def prepare(self, inputs: StepInputs) -> None:
        self._slots, self._tables = inputs.slots, inputs.block_tables
        self._writer = None
        self._max_q, self._max_k = max(inputs.q_len), max(inputs.kv_len)
        if self._max_q == 1:  # worked out on the device: this may be captured in a graph
            self._bounds = torch.arange(len(inputs.q_len) + 1, dtype=torch.int32, device=inputs.slots.device)
            self._kv_len = (inputs.positions + 1).to(torch.int32)
        else:
            numbers = np.array((*row_bounds(inputs.q_len), *inputs.kv_len), dtype=np.int32)
            self._bounds, self._kv_len = upload(numbers, inputs.slots.device).tensor_split([len(inputs.q_len) + 1])

    def write(self, planes: Planes, values: Sequence[torch.Tensor]) -> None:
        if HAS_TRITON and self._slots.device.type == "cuda":
            from model.attention.triton_paged import write_slots  # K and V in one launch

            write_slots(planes, values, self._slots)
            return
        self._writer = self._writer or SlotWriter(self._slots, self._block_size)
        self._writer.write(planes, values)

    def attend(self, planes: Planes, query: torch.Tensor) -> torch.Tensor:
        keys, values = planes
        output = varlen_attn(
            query,
            as_pages(keys),
            as_pages(values),
            self._bounds,
            None,
            self._max_q,
            self._max_k,
            scale=query.shape[-1] ** -0.5,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=self._kv_len,
            block_table=self._tables,
            num_splits=1,
        )
        assert isinstance(output, torch.Tensor)  # a pair only when auxiliary outputs are asked for
        return output


def row_bounds(q_len: Sequence[int]) -> list[int]:
    """Where each span's rows begin, and the end: [S] -> [S + 1]."""
    return list(accumulate(q_len, initial=0))
