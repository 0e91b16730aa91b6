"""Writing a step's K/V into its slots: the same for every backend that keeps the block-major layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.attention.base import Planes


class SlotWriter:
    """Where the tokens of one step go: block and offset of each, worked out once for all layers.

    slots [T] = block_id * block_size + offset        plane [num_blocks, heads, block_size, head_dim]
    """

    def __init__(self, slots: torch.Tensor, block_size: int) -> None:
        self._blocks = torch.div(slots, block_size, rounding_mode="floor")
        self._offsets = torch.remainder(slots, block_size)

    def write(self, planes: Planes, values: Sequence[torch.Tensor]) -> None:
        """values: per plane [T, heads, head_dim], stored in the plane's dtype."""
        for plane, value in zip(planes, values, strict=True):
            by_slot = plane.permute(0, 2, 1, 3)  # [num_blocks, block_size, heads, head_dim], still a view
            by_slot[self._blocks, self._offsets] = value.to(plane.dtype)
