from __future__ import annotations

import pytest
import torch

from cache.block import BlockId
from cache.storage import TILE, KVStorage, PlaneShape, SlotOrder, block_bytes

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8]
KV = [(PlaneShape(2, 4), PlaneShape(2, 4))] * 3
LATENT = [(PlaneShape(1, 7), PlaneShape(1, 3)), (PlaneShape(1, 5),)]  # planes that are not K and V per head
ONE, TWO, THREE = BlockId(1), BlockId(2), BlockId(3)


def make(dtype: torch.dtype = torch.float32, layers=KV, num_blocks: int = 5, block_size: int = 4) -> KVStorage:  # type: ignore[no-untyped-def]
    return KVStorage(num_blocks, block_size, layers, dtype, CPU)


def fill(storage: KVStorage, seed: int = 0) -> None:
    """Random bits in every plane, of any value that the dtype can spell: NaN, infinity and denormals too."""
    generator = torch.Generator().manual_seed(seed)
    for views in storage.layers:
        for view in views:
            raw = torch.randint(0, 256, (*view.shape[:-1], view.shape[-1] * view.itemsize), generator=generator)
            view.copy_(raw.to(torch.uint8).view(view.dtype))


def content(storage: KVStorage, block: int) -> bytes:
    planes = [view[block].contiguous() for views in storage.layers for view in views]
    return b"".join(plane.flatten().view(torch.uint8).numpy().tobytes() for plane in planes)


@pytest.mark.parametrize("layers", [KV, LATENT])
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_have_the_shape_that_attention_wants(dtype: torch.dtype, layers) -> None:  # type: ignore[no-untyped-def]
    storage = make(dtype, layers)
    assert len(storage.layers) == len(layers)
    for views, planes in zip(storage.layers, layers, strict=True):
        for view, plane in zip(views, planes, strict=True):
            assert view.shape == (5, plane.heads, 4, plane.width) and view.dtype is dtype
    assert storage.block_bytes == block_bytes(4, layers, dtype)


def test_the_bytes_of_a_block() -> None:
    assert block_bytes(4, KV, torch.float32) == 3 * 2 * 2 * 4 * 4 * 4
    assert block_bytes(4, LATENT, torch.bfloat16) == (7 + 3 + 5) * 4 * 2


@pytest.mark.parametrize("layers", [KV, LATENT])
def test_a_block_is_one_contiguous_range(layers) -> None:  # type: ignore[no-untyped-def]
    """Block-major: every plane of every layer of block 2 lies between the bytes of block 1 and those of block 3."""
    storage = make(torch.float32, layers)
    start = storage.layers[0][0].data_ptr()
    ranges = []
    for views in storage.layers:
        for view in views:
            block = view[2]
            assert block.is_contiguous()
            ranges.append((block.data_ptr() - start, block.numel() * block.itemsize))
    ranges.sort()
    assert ranges[0][0] == 2 * storage.block_bytes
    for (offset, size), (following, _) in zip(ranges, ranges[1:], strict=False):
        assert offset + size == following
    assert sum(ranges[-1]) == 3 * storage.block_bytes


def test_all_is_zero_at_first() -> None:
    storage = make()
    assert all(not view.any() for views in storage.layers for view in views)


def test_planes_do_not_overlap() -> None:
    storage = make(layers=LATENT)
    views = [view for views in storage.layers for view in views]
    for number, view in enumerate(views):
        view.fill_(number + 1)
    assert all((view == number + 1).all() for number, view in enumerate(views))


@pytest.mark.parametrize("layers", [KV, LATENT])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_exact(dtype: torch.dtype, layers) -> None:  # type: ignore[no-untyped-def]
    storage = make(dtype, layers)
    fill(storage)
    before = [content(storage, block) for block in range(5)]
    storage.copy([ONE, ONE, THREE], [BlockId(0), TWO, BlockId(4)])
    after = [content(storage, block) for block in range(5)]
    assert after == [before[1], before[1], before[1], before[3], before[3]]


def test_copying_nothing() -> None:
    storage = make()
    fill(storage)
    before = [content(storage, block) for block in range(5)]
    storage.copy([], [])
    assert [content(storage, block) for block in range(5)] == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot", [0, 1, 3, 4])
def test_zeroing_from_a_slot_on(dtype: torch.dtype, slot: int) -> None:
    storage, reference = make(dtype), make(dtype)
    fill(storage), fill(reference)
    storage.zero(TWO, slot)
    for views, wanted in zip(storage.layers, reference.layers, strict=True):
        for view, want in zip(views, wanted, strict=True):
            assert not view[2, :, slot:].contiguous().view(torch.uint8).any()
            assert torch.equal(
                view[2, :, :slot].contiguous().view(torch.uint8), want[2, :, :slot].contiguous().view(torch.uint8)
            )
    for block in (0, 1, 3, 4):
        assert content(storage, block) == content(reference, block)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_is_over_every_byte_of_its_block_alone(dtype: torch.dtype) -> None:
    storage = make(dtype)
    fill(storage)
    before = [storage.checksum(BlockId(block)) for block in range(5)]
    assert len(set(before)) == 5
    for views in storage.layers:
        for view in views:
            raw = view[2, -1, -1, -1:].view(torch.uint8)
            raw[-1] ^= 1
            after = [storage.checksum(BlockId(block)) for block in range(5)]
            assert [block for block in range(5) if after[block] != before[block]] == [2]
            raw[-1] ^= 1
    storage.copy([ONE], [TWO])
    assert storage.checksum(TWO) == before[1]


# -- where slots lie --------------------------------------------------------------------------------------------------

TILED = [(PlaneShape(2, 6, SlotOrder.COLUMNS), PlaneShape(3, 4, SlotOrder.PAIRS))] * 2
WORDS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SLOTS = 48  # of a block: three tiles


def element(order: SlotOrder, size: int, width: int, depth: int, head: int, slot: int, dim: int) -> int:
    """Where one element lies within its plane of a block, as the pictures in storage.py and pk.h say."""
    at = (head * size + slot // TILE * TILE) * width
    within = slot % TILE
    if order is SlotOrder.COLUMNS:  # words of neighbours along the width, 16 slots side by side
        return at + (dim // depth * TILE + within) * depth + dim % depth
    if order is SlotOrder.PAIRS:  # words of neighbouring slots, the width side by side
        return at + (within // depth * width + dim) * depth + within % depth
    return at + within * width + dim


@WORDS
@pytest.mark.parametrize("order", SlotOrder)
def test_slots_are_found_in_any_order(order: SlotOrder, dtype: torch.dtype) -> None:
    planes = [(PlaneShape(2, 6, order), PlaneShape(3, 4, order))] * 2
    storage = make(dtype, planes, block_size=SLOTS)
    fill(storage)
    depth = 4 // dtype.itemsize
    for layer, plane, heads, width in ((0, 0, 2, 6), (0, 1, 3, 4), (1, 0, 2, 6), (1, 1, 3, 4)):
        raw = storage.layers[layer][plane][2].flatten()
        at = [
            [[element(order, SLOTS, width, depth, head, slot, dim) for dim in range(width)] for slot in range(SLOTS)]
            for head in range(heads)
        ]
        found = storage.slots(layer, plane, TWO)
        assert torch.equal(found.view(torch.uint8), raw[torch.tensor(at)].view(torch.uint8))
        found.zero_()  # it is a copy
        assert torch.equal(storage.layers[layer][plane][2].flatten().view(torch.uint8), raw.view(torch.uint8))


@WORDS
@pytest.mark.parametrize("slot", [0, 1, 15, 16, 17, 31, 47, 48])
def test_zeroing_tiles_from_a_slot_on(dtype: torch.dtype, slot: int) -> None:
    storage, reference = (make(dtype, TILED, block_size=SLOTS) for _ in range(2))
    fill(storage), fill(reference)
    storage.zero(TWO, slot)
    for layer in range(2):
        for plane in range(2):
            found, wanted = storage.slots(layer, plane, TWO), reference.slots(layer, plane, TWO)
            wanted[:, slot:] = 0
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    for block in (0, 1, 3, 4):
        assert content(storage, block) == content(reference, block)


@WORDS
def test_whole_tiles_are_copied_exactly(dtype: torch.dtype) -> None:
    storage = make(dtype, TILED, block_size=SLOTS)
    fill(storage)
    storage.copy([ONE], [TWO])
    assert content(storage, 2) == content(storage, 1) and storage.checksum(TWO) == storage.checksum(ONE)
