"""Times to live and pins, on a clock that the test turns."""

from __future__ import annotations

from math import inf

from cache.reason import MissReason
from cache.retention import Retention
from tests.cache.world import Cache

P = list(range(16))


def make(max_pinned: int = 8) -> tuple[Cache, Retention]:
    cache = Cache()
    cache.put(P)
    return cache, Retention(cache.pool, cache.tree, max_pinned)


def resident(cache: Cache) -> list[int]:
    return [found.index for found in cache.match([*P, 1]).blocks if found.block is not None]


def test_a_block_outlives_its_last_use_by_its_time_to_live() -> None:
    cache, retention = make()
    node = cache.node(P, 3)
    retention.published(node, 10.0, now=0.0)
    retention.used(node, 10.0, now=7.0)
    assert retention.expire(16.9) == 0 and resident(cache) == [0, 1, 2, 3]
    assert retention.expire(17.0) == 1 and resident(cache) == [0, 1, 2]
    assert cache.match([*P, 1]).blocks[3].reason is MissReason.EXPIRED
    cache.check()


def test_without_a_time_to_live_nothing_expires() -> None:
    cache, retention = make()
    retention.published(cache.node(P, 3), None, now=0.0)
    assert retention.expire(1e9) == 0


def test_the_longest_time_anybody_asked_for_wins() -> None:
    cache, retention = make()
    node = cache.node(P, 3)
    retention.published(node, 10.0, now=0.0)
    retention.used(node, 100.0, now=0.0)
    retention.used(node, 1.0, now=0.0)
    assert retention.expire(99.0) == 0 and retention.expire(100.0) == 1


def test_a_use_by_one_who_sets_no_limit_lifts_it() -> None:
    cache, retention = make()
    node = cache.node(P, 3)
    retention.published(node, 10.0, now=0.0)
    retention.used(node, None, now=1.0)
    assert retention.expire(1e9) == 0 and resident(cache) == [0, 1, 2, 3]


def test_what_is_in_use_does_not_expire_before_it_is_let_go() -> None:
    cache, retention = make()
    node = cache.node(P, 3)
    retention.published(node, 10.0, now=0.0)
    assert node.block is not None
    cache.pool.share(node.block)
    assert retention.expire(50.0) == 0
    cache.pool.free(node.block)
    assert retention.expire(60.0) == 1
    cache.check()


def test_a_node_that_lost_its_block_meanwhile_is_passed_over() -> None:
    cache, retention = make()
    retention.published(cache.node(P, 3), 10.0, now=0.0)
    retention.published(cache.node(P, 2), 10.0, now=0.0)
    cache.tree.drop(cache.node(P, 3))
    cache.tree.invalidate(cache.node(P, 2))
    assert retention.expire(20.0) == 0
    cache.check()


def test_an_expired_block_in_the_middle_is_a_gap() -> None:
    cache, retention = make()
    retention.published(cache.node(P, 1), 5.0, now=0.0)
    retention.expire(5.0)
    assert resident(cache) == [0, 2, 3]


def test_pins_are_bounded() -> None:
    cache, retention = make(max_pinned=2)
    for index in range(4):
        retention.published(cache.node(P, index), None, pin_for=inf, now=0.0)
    assert cache.pool.pinned == 2
    retention.used(cache.node(P, 0), None, pin_for=inf, now=1.0)
    assert cache.pool.pinned == 2
    cache.check()


def test_a_shorter_time_at_a_later_publication_is_not_held_up_by_the_earlier_longer_one() -> None:
    cache, retention = make()
    node = cache.node(P, 3)
    retention.published(node, 1000.0, now=0.0)
    retention.published(node, 5.0, now=10.0)
    assert retention.expire(14.9) == 0
    assert retention.expire(15.0) == 1
    assert retention.expire(2000.0) == 0


def pinned(cache: Cache) -> list[int]:
    blocks = [found.block for found in cache.match([*P, 1]).blocks]
    return [index for index, block in enumerate(blocks) if block is not None and block.pinned]


def test_a_pin_ends_and_leaves_the_block_cached() -> None:
    cache, retention = make()
    for index in (0, 1):
        retention.used(cache.node(P, index), None, pin_for=5.0, now=0.0)
    retention.used(cache.node(P, 1), None, pin_for=5.0, now=3.0)
    retention.used(cache.node(P, 1), None, pin_for=1.0, now=4.0)
    retention.used(cache.node(P, 0), None, now=4.0)  # one who asks for no pin does not prolong it
    assert retention.expire(4.9) == 0 and pinned(cache) == [0, 1]
    assert retention.expire(5.0) == 0 and pinned(cache) == [1]
    assert retention.expire(8.0) == 0 and pinned(cache) == []
    assert resident(cache) == [0, 1, 2, 3]
    cache.check()


def test_a_pin_of_a_block_in_use_ends_as_well() -> None:
    cache, retention = make()
    node = cache.node(P, 3)
    retention.used(node, None, pin_for=5.0, now=0.0)
    assert node.block is not None
    cache.pool.share(node.block)
    retention.expire(6.0)
    assert pinned(cache) == [] and cache.pool.pinned == 0
    cache.check()


def test_a_pin_that_ends_before_the_time_to_live_and_one_that_ends_after() -> None:
    cache, retention = make()
    retention.published(cache.node(P, 2), 10.0, pin_for=5.0, now=0.0)
    retention.published(cache.node(P, 3), 5.0, pin_for=10.0, now=0.0)
    assert retention.expire(5.0) == 1
    assert pinned(cache) == [] and resident(cache) == [0, 1, 2]
    assert retention.expire(10.0) == 1
    assert resident(cache) == [0, 1]
    cache.check()


def test_a_pin_without_an_end_outlasts_one_with_an_end() -> None:
    cache, retention = make()
    retention.used(cache.node(P, 0), None, pin_for=5.0, now=0.0)
    retention.used(cache.node(P, 0), None, pin_for=inf, now=1.0)
    retention.used(cache.node(P, 0), None, pin_for=5.0, now=2.0)
    retention.expire(1e9)
    assert pinned(cache) == [0]
