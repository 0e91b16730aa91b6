from __future__ import annotations

import pytest

from cache.pool import BlockPool, OutOfBlocks
from tests.cache.world import Cache

A, B = list(range(10, 18)), list(range(20, 28))  # two blocks each


def evictions(cache: Cache) -> list[int]:
    """Allocate until nothing is left; the ids of the blocks in the order in which they lost their content."""
    order: list[int] = []
    evict = cache.pool.on_evict
    cache.pool.on_evict = lambda block: (order.append(block.block_id), evict(block))[1]
    while True:
        try:
            cache.pool.allocate()
        except OutOfBlocks:
            return order


def ids(blocks) -> list[int]:  # type: ignore[no-untyped-def]
    return [block.block_id for block in blocks]


@pytest.mark.parametrize("count", [0, -1])
def test_a_pool_has_a_block(count: int) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(count)


def test_allocate_gives_empty_blocks_until_there_are_none() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    assert sorted(ids(blocks)) == [0, 1, 2]
    assert all(block.ref_count == 1 and block.written == 0 and block.node is None for block in blocks)
    assert (pool.available, pool.in_use, pool.cached) == (0, 3, 0)
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.check_integrity()


def test_a_freed_block_comes_back_empty() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    block.written = 4
    pool.free(block)
    assert pool.available == 1
    assert pool.allocate() is block and block.written == 0


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.share(block)
    pool.free(block)
    assert pool.available == 0
    pool.free(block)
    assert pool.available == 1
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(block)


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.free(block)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(block)


def test_a_pending_block_is_not_freed_before_it_is_abandoned() -> None:
    cache = Cache()
    node = cache.chain(A)[0]
    block = cache.pool.allocate()
    cache.tree.await_block(node, block)
    with pytest.raises(AssertionError, match="still pending"):
        cache.pool.free(block)


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    cache = Cache()
    blocks = cache.put(A + B)
    assert evictions(cache) == ids(blocks)[::-1]
    cache.check()


def test_the_least_recently_used_prompt_goes_first() -> None:
    cache = Cache()
    a, b = cache.put(A), cache.put(B)
    for block in a:
        cache.pool.share(block)
    for block in reversed(a):
        cache.pool.free(block)
    assert evictions(cache) == ids(b)[::-1] + ids(a)[::-1]


def test_tails_go_before_all_full_blocks_the_oldest_first() -> None:
    cache = Cache()
    old, tail, new = cache.put([*A, 1]), cache.put([2, 3]), cache.put(B)
    assert evictions(cache) == ids([old[2], tail[0], new[1], new[0], old[1], old[0]])[:2] + ids(
        [old[1], old[0], new[1], new[0]]
    )


def test_free_blocks_are_taken_before_anything_is_evicted() -> None:
    cache = Cache(num_blocks=4)
    cache.put(A)
    cache.pool.allocate(), cache.pool.allocate()
    assert cache.pool.evictions == 0
    cache.pool.allocate()
    assert cache.pool.evictions == 1
    assert cache.match([*A, 1]).valid_prefix == 4
    cache.check()


def test_sharing_revives_a_cached_block() -> None:
    cache = Cache()
    first, second = cache.put(A)
    cache.pool.share(first)
    assert (cache.pool.in_use, cache.pool.cached, cache.pool.available) == (1, 1, 7)
    assert evictions(cache) == [second.block_id]
    assert first.published and first.ref_count == 1
    cache.check()


def test_what_is_in_use_is_never_evicted() -> None:
    cache = Cache(num_blocks=2)
    for block in cache.put(A):
        cache.pool.share(block)
    with pytest.raises(OutOfBlocks):
        cache.pool.allocate()
    assert cache.match([*A, 1]).valid_prefix == 8


def test_a_pinned_block_is_given_up_only_to_one_who_cannot_do_without() -> None:
    cache = Cache(num_blocks=2)
    pinned, other = cache.put(A)
    cache.pool.pin(pinned)
    assert (cache.pool.available, cache.pool.breakable, cache.pool.pinned, cache.pool.cached) == (1, 1, 1, 2)
    assert evictions(cache) == [other.block_id]
    cache.check()
    assert cache.pool.allocate(break_pins=True) is pinned
    assert not pinned.pinned and cache.pool.pinned == 0
    cache.check()


def test_a_pin_outlives_use_and_ends_with_the_content() -> None:
    cache = Cache(num_blocks=2)
    block = cache.put(A)[0]
    cache.pool.pin(block)
    cache.pool.share(block)
    cache.check()
    cache.pool.free(block)
    assert cache.pool.breakable == 1
    cache.tree.drop(cache.node(A, 0))
    assert cache.pool.breakable == 0 and not block.pinned
    cache.check()


def test_an_unpinned_block_counts_as_just_used() -> None:
    cache = Cache()
    a, b = cache.put(A), cache.put(B)
    cache.pool.pin(a[1])
    cache.pool.unpin(a[1])
    assert evictions(cache) == ids([a[0], b[1], b[0], a[1]])
