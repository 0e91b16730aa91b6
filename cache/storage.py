"""KVStorage: the bytes of all blocks, block-major.

    [num_blocks][ layer 0: K [kv_heads, block_size, head_dim] | V [...] ][ layer 1: ... ] ...
     '--------------------------- one Block, contiguous -------------------------------'

One Block is one memcpy to another tier, one checksum, one value in a remote store. Attention backends get strided
views per layer and plane. The engine tells the planes' widths, so a network whose cache is not K and V per head has
its own planes inside the same contiguous block.

Where slots lie within a head of a plane is the backend's choice (`SlotOrder`); all else here is bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
import xxhash

from cache.block import BlockId

TILE = 16
"""Slots of a tile, in the orders that have tiles."""


class SlotOrder(StrEnum):
    """How the slots and the width of one head of a plane are laid out. A word is 4 bytes: `depth` = 2 or 1 elements."""

    ROWS = "rows"  # [block_size, width]
    COLUMNS = "columns"  # [tiles, width / depth, 16 slots, depth]: a word holds neighbours along the width
    PAIRS = "pairs"  # [tiles, 16 slots / depth, width, depth]: a word holds neighbouring slots


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """One plane of one layer within a block: `heads` times `block_size` slots of `width` elements."""

    heads: int
    width: int
    order: SlotOrder = SlotOrder.ROWS


class KVStorage:
    """All blocks' bytes, zero when allocated: `blocks` [num_blocks, elements]. `layers[l]` are the views of layer l,
    each [num_blocks, heads, block_size, width] (which tells slots apart only where the order is ROWS).

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
        self.blocks = _zeros(num_blocks, elements, dtype, device)  # [num_blocks, elements]
        self.layers: list[tuple[torch.Tensor, ...]] = []
        self._planes: list[_Plane] = []
        offset = 0
        for layer in layers:
            views = []
            for plane in layer:
                size = plane.heads * block_size * plane.width
                plane_of_all = self.blocks[:, offset : offset + size]
                views.append(plane_of_all.view(num_blocks, plane.heads, block_size, plane.width))
                self._planes.append(_Plane(views[-1], plane.order))
                offset += size
            self.layers.append(tuple(views))

    def copy(self, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> None:
        """Copy whole blocks, sources[i] over targets[i]. No target may be a source of the same call."""
        for source, target in zip(sources, targets, strict=True):  # each is one piece of memory: no index is needed
            self.blocks[target].copy_(self.blocks[source])

    def checksum(self, block_id: BlockId) -> int:
        """xxh3-64 of all the block's bytes."""
        raw = self.blocks[block_id].view(torch.uint8).cpu().numpy()
        return xxhash.xxh3_64_intdigest(raw.data)

    def is_finite(self, block_id: BlockId) -> bool:
        """Whether the block holds neither NaN nor infinity, in any slot."""
        return bool(self.blocks[block_id].isfinite().all())

    def zero(self, block_id: BlockId, from_slot: int = 0) -> None:
        """Zero the slots from `from_slot` on: what a failed step may have left there must not spread (a NaN in a
        masked slot still can)."""
        for plane in self._planes:
            plane.zero(block_id, from_slot)

    def slots(self, layer: int, plane: int, block_id: BlockId) -> torch.Tensor:
        """A copy of one plane of a block, slot by slot whatever the order: [heads, block_size, width]."""
        index = sum(len(views) for views in self.layers[:layer]) + plane
        return self._planes[index].slots(block_id)


class _Plane:
    """All blocks of one plane, with the slot that each element belongs to."""

    def __init__(self, rows: torch.Tensor, order: SlotOrder) -> None:
        """rows [num_blocks, heads, block_size, width]: the memory, whatever its order."""
        size, width = rows.shape[2:]
        depth = 4 // rows.dtype.itemsize
        slots = torch.arange(size, device=rows.device)
        self._order = order
        self._shape = rows.shape[1:]
        if order is SlotOrder.ROWS:
            self._elements, self._slot = rows, slots[:, None]
        elif order is SlotOrder.COLUMNS:
            self._elements = rows.view(*rows.shape[:2], size // TILE, width // depth, TILE, depth)
            self._slot = slots.view(-1, 1, TILE, 1)
        else:
            self._elements = rows.view(*rows.shape[:2], size // TILE, TILE // depth, width, depth)
            self._slot = slots.view(-1, TILE // depth, 1, depth)

    def zero(self, block_id: BlockId, from_slot: int) -> None:
        if from_slot == 0:
            self._elements[block_id] = 0
        else:
            self._elements[block_id].masked_fill_(self._slot >= from_slot, 0)

    def slots(self, block_id: BlockId) -> torch.Tensor:
        elements = self._elements[block_id]
        if self._order is SlotOrder.COLUMNS:
            elements = elements.permute(0, 1, 3, 2, 4)
        elif self._order is SlotOrder.PAIRS:
            elements = elements.permute(0, 1, 2, 4, 3)
        return elements.reshape(self._shape).clone()


def block_bytes(block_size: int, layers: Sequence[Sequence[PlaneShape]], dtype: torch.dtype) -> int:
    """Bytes of one block, to size a pool before it is allocated."""
    return sum(plane.heads * block_size * plane.width for layer in layers for plane in layer) * dtype.itemsize


def _zeros(num_blocks: int, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros((num_blocks, elements), dtype=dtype, device=device)
    raw = torch.from_numpy(np.zeros(num_blocks * elements * dtype.itemsize, dtype=np.uint8))
    return raw.view(dtype).view(num_blocks, elements)
