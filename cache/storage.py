"""KVStorage: the bytes of all blocks, block-major.

    [num_blocks][ layer 0: K [kv_heads, block_size, head_dim] | V [...] ][ layer 1: ... ] ...
     '--------------------------- one Block, contiguous -------------------------------'

One Block is one memcpy to another tier, one checksum, one value in a remote store. Attention backends get strided
views per layer and plane. The engine tells the planes' widths, so a network whose cache is not K and V per head has
its own planes inside the same contiguous block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from cache.block import BlockId


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """One plane of one layer within a block: [heads, block_size, width]."""

    heads: int
    width: int


class KVStorage:
    """All blocks' bytes, zero when allocated. `layers[l]` are the views of layer l, each
    [num_blocks, heads, block_size, width].

    On CPU the zero pages are the operating system's: memory is touched only when a block is first written.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[Sequence[PlaneShape]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        elements = sum(plane.heads * block_size * plane.width for layer in layers for plane in layer)
        self.num_blocks = num_blocks
        self.device = device
        self.block_bytes = elements * dtype.itemsize
        self._blocks = _zeros(num_blocks, elements, dtype, device)  # [num_blocks, elements]
        self.layers: list[tuple[torch.Tensor, ...]] = []
        offset = 0
        for layer in layers:
            views = []
            for plane in layer:
                size = plane.heads * block_size * plane.width
                plane_of_all = self._blocks[:, offset : offset + size]
                views.append(plane_of_all.view(num_blocks, plane.heads, block_size, plane.width))
                offset += size
            self.layers.append(tuple(views))

    def copy(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Copy whole blocks, sources[i] over targets[i]. No target may be a source of the same call."""
        if sources:
            self._blocks[list(targets)] = self._blocks[list(sources)]

    def checksum(self, block_id: BlockId) -> int:
        """xxh3-64 of all the block's bytes."""
        raw = self._blocks[block_id].view(torch.uint8).cpu().numpy()
        return xxhash.xxh3_64_intdigest(raw.data)

    def is_finite(self, block_id: BlockId) -> bool:
        """Whether the block holds neither NaN nor infinity, in any slot."""
        return bool(self._blocks[block_id].isfinite().all())

    def zero(self, block_id: BlockId, from_slot: int = 0) -> None:
        """Zero the slots from `from_slot` on: what a failed step may have left there must not spread (a NaN in a
        masked slot still can)."""
        for views in self.layers:
            for view in views:
                view[block_id, :, from_slot:] = 0


def block_bytes(block_size: int, layers: Sequence[Sequence[PlaneShape]], dtype: torch.dtype) -> int:
    """Bytes of one block, to size a pool before it is allocated."""
    return sum(plane.heads * block_size * plane.width for layer in layers for plane in layer) * dtype.itemsize


def _zeros(num_blocks: int, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros((num_blocks, elements), dtype=dtype, device=device)
    raw = torch.from_numpy(np.zeros(num_blocks * elements * dtype.itemsize, dtype=np.uint8))
    return raw.view(dtype).view(num_blocks, elements)
