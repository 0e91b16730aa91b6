"""Times to live and pins, on a clock that the test turns."""

from __future__ import annotations

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
    retention.published(node, 10.0, pin=False, now=0.0)
    retention.used(node, 10.0, pin=False, now=7.0)
    assert retention.expire(16.9) == 0 and resident(cache) == [0, 1, 2, 3]
    assert retention.expire(17.0) == 1 and resident(cache) == [0, 1, 2]
    assert cache.match([*P, 1]).blocks[3].reason is MissReason.EXPIRED
    cache.check()


def test_without_a_time_to_live_nothing_expires() -> None:
    cache, retention = make()
    retention.published(cache.node(P, 3), None, pin=False, now=0.0)
    assert retention.expire(1e9) == 0


def test_the_longest_time_anybody_asked_for_wins() -> None:
    cache, retention = make()
    node = cache.node(P, 3)
    retention.published(node, 10.0, pin=False, now=0.0)
    retention.used(node, 100.0, pin=False, now=0.0)
    retention.used(node, 1.0, pin=False, now=0.0)
    assert retention.expire(99.0) == 0 and retention.expire(100.0) == 1


def test_a_use_by_one_who_sets_no_limit_lifts_it() -> None:
    cache, retention = make()
    node = cache.node(P, 3)
    retention.published(node, 10.0, pin=False, now=0.0)
    retention.used(node, None, pin=False, now=1.0)
    assert retention.expire(1e9) == 0 and resident(cache) == [0, 1, 2, 3]


def test_what_is_in_use_does_not_expire_before_it_is_let_go() -> None:
    cache, retention = make()
    node = cache.node(P, 3)
    retention.published(node, 10.0, pin=False, now=0.0)
    assert node.block is not None
    cache.pool.share(node.block)
    assert retention.expire(50.0) == 0
    cache.pool.free(node.block)
    assert retention.expire(60.0) == 1
    cache.check()


def test_a_node_that_lost_its_block_meanwhile_is_passed_over() -> None:
    cache, retention = make()
    retention.published(cache.node(P, 3), 10.0, pin=False, now=0.0)
    retention.published(cache.node(P, 2), 10.0, pin=False, now=0.0)
    cache.tree.drop(cache.node(P, 3))
    cache.tree.invalidate(cache.node(P, 2))
    assert retention.expire(20.0) == 0
    cache.check()


def test_an_expired_block_in_the_middle_is_a_gap() -> None:
    cache, retention = make()
    retention.published(cache.node(P, 1), 5.0, pin=False, now=0.0)
    retention.expire(5.0)
    assert resident(cache) == [0, 2, 3]


def test_pins_are_bounded() -> None:
    cache, retention = make(max_pinned=2)
    for index in range(4):
        retention.published(cache.node(P, index), None, pin=True, now=0.0)
    assert cache.pool.pinned == 2
    retention.used(cache.node(P, 0), None, pin=True, now=1.0)
    assert cache.pool.pinned == 2
    cache.check()


def test_a_shorter_time_at_a_later_publication_is_not_held_up_by_the_earlier_longer_one() -> None:
    cache, retention = make()
    node = cache.node(P, 3)
    retention.published(node, 1000.0, pin=False, now=0.0)
    retention.published(node, 5.0, pin=False, now=10.0)
    assert retention.expire(14.9) == 0
    assert retention.expire(15.0) == 1
    assert retention.expire(2000.0) == 0
