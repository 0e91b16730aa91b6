from __future__ import annotations

import pytest

from cache.hashing import encode_tokens
from cache.identity import BlockHash
from cache.match import BlockStatus
from cache.reason import MissReason
from tests.cache.world import IDENTITY, Cache

P = list(range(16))  # four blocks of four


def statuses(cache: Cache, tokens: list[int]) -> list[str]:
    return [str(found.status) for found in cache.match(tokens).blocks]


# -- extend, hold, release ---------------------------------------------------------------------------------------------


def test_a_chain_is_found_again() -> None:
    cache = Cache()
    assert cache.chain(P) == cache.chain(P)
    assert len(cache.tree) == 4


def test_nodes_go_with_their_last_holder() -> None:
    cache = Cache()
    nodes = cache.chain(P)
    cache.chain(P[:8])
    cache.tree.release(nodes[3])
    assert {node.index for node in cache.tree} == {0, 1}
    assert nodes[3].forgotten and not nodes[1].forgotten
    cache.tree.release(nodes[1])
    assert len(cache.tree) == 0 and not cache.tree.has_root(IDENTITY)
    cache.check()


def test_a_node_with_a_descendant_in_the_cache_stays() -> None:
    """A node without K/V is the proof of what lies below it."""
    cache = Cache()
    cache.put(P)
    for index in range(3):
        cache.tree.drop(cache.node(P, index))
    assert {node.index for node in cache.tree} == {0, 1, 2, 3}
    cache.tree.drop(cache.node(P, 3))
    assert len(cache.tree) == 0 and cache.pool.available == 8
    cache.check()


def test_pruning_stops_at_the_first_ancestor_that_is_needed() -> None:
    cache = Cache()
    cache.put(P)
    cache.put([*P[:8], 50, 51, 52, 53])
    for index in (3, 2, 1):
        cache.tree.drop(cache.node(P, index))
    assert len(cache.tree) == 3, "block 0 is resident, block 1 proves the other prompt's block 2"
    cache.check()


def test_identities_have_trees_of_their_own() -> None:
    cache = Cache()
    other = BlockHash(b"another identity")
    cache.put(P)
    assert cache.match(P, identity=other).computed() == [(0, 16)]
    cache.put(P, other)
    cache.tree.invalidate(cache.tree.root(IDENTITY))
    assert cache.match(P, identity=other).valid_prefix == 12
    assert cache.match(P).computed() == [(0, 16)]
    cache.check()


# -- publish -----------------------------------------------------------------------------------------------------------


def test_a_second_block_of_a_node_stays_its_owners() -> None:
    cache = Cache()
    first = cache.put(P[:4])[0]
    twin = cache.written()
    assert cache.tree.publish(cache.node(P, 0), twin) is first
    assert twin.node is None and cache.tree.published == 1
    cache.pool.free(twin)
    cache.check()


def test_only_a_full_block_is_published() -> None:
    cache = Cache()
    node = cache.chain(P[:4])[0]
    with pytest.raises(AssertionError):
        cache.tree.publish(node, cache.written(3))


def test_a_pending_block_is_found_and_then_published() -> None:
    cache = Cache()
    node = cache.chain(P[:4])[0]
    block = cache.pool.allocate()
    cache.tree.await_block(node, block)
    assert statuses(cache, P[:5]) == ["pending", "missing"]
    assert cache.match(P[:5]).blocks[0].block is block
    block.written = 4
    assert cache.tree.publish(node, block) is block
    assert statuses(cache, P[:5]) == ["reused", "missing"]
    assert node.pending is None and block.published
    cache.check()


def test_publishing_over_the_pending_block_of_someone_else() -> None:
    """The one that fills first wins; the other's block has no node any more and is swapped when it fills."""
    cache = Cache()
    node = cache.chain(P[:4])[0]
    pending, faster = cache.pool.allocate(), cache.written()
    cache.tree.await_block(node, pending)
    assert cache.tree.publish(node, faster) is faster
    assert pending.node is None and node.pending is None and node.block is faster
    cache.check()
    pending.written = 4
    assert cache.tree.publish(node, pending) is faster
    cache.pool.free(pending)
    cache.check()


def test_a_node_awaits_one_block_at_a_time() -> None:
    cache = Cache()
    node = cache.chain(P[:4])[0]
    cache.tree.await_block(node, cache.pool.allocate())
    with pytest.raises(AssertionError):
        cache.tree.await_block(node, cache.pool.allocate())


def test_an_abandoned_block_is_found_no_more() -> None:
    cache = Cache()
    node = cache.chain(P[:4])[0]
    block = cache.pool.allocate()
    cache.tree.await_block(node, block)
    cache.tree.abandon(block)
    assert statuses(cache, P[:5]) == ["missing", "missing"]
    cache.pool.free(block)
    cache.tree.release(node)
    assert len(cache.tree) == 0
    cache.check()


# -- tails -------------------------------------------------------------------------------------------------------------


def test_a_tail_is_copied_from_and_never_shared() -> None:
    cache = Cache()
    tail = cache.put(P[:6])[1]
    match = cache.match(P[:8])
    assert [found.status for found in match.blocks] == [BlockStatus.REUSED, BlockStatus.MISSING]
    assert match.blocks[1].copy_from is tail and match.blocks[1].copy_slots == 2
    assert match.computed() == [(6, 8)]
    cache.check()


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    cache = Cache()
    short = cache.put([1])[0]
    long = cache.put([1, 2, 3])[0]
    assert not short.published and long.published and cache.pool.cached == 1
    cache.check()


def test_a_shorter_tail_is_not_kept_beside_a_longer_one() -> None:
    cache = Cache()
    cache.put([1, 2, 3])
    assert not cache.put([1, 2])[0].published
    assert cache.pool.cached == 1 and cache.pool.available == 8
    cache.check()


def test_a_tail_is_not_kept_beside_a_full_block_that_has_it_all() -> None:
    cache = Cache()
    cache.put([1, 2, 3, 4])
    assert not cache.put([1, 2])[0].published
    cache.check()


def test_a_shorter_tail_in_use_is_left_to_its_user() -> None:
    cache = Cache()
    short = cache.put([1])[0]
    cache.pool.share(short)  # somebody is copying from it
    cache.put([1, 2])
    assert short.published and cache.pool.cached == 1
    cache.pool.free(short)
    assert cache.pool.cached == 2
    cache.check()


def test_tails_of_different_tokens_live_side_by_side() -> None:
    cache = Cache()
    cache.put([1, 2]), cache.put([1, 3]), cache.put([2])
    assert cache.pool.cached == 3
    assert [cache.match([1, third, 9]).blocks[0].copy_slots for third in (2, 3, 4)] == [2, 2, 1]
    cache.check()


# -- drop --------------------------------------------------------------------------------------------------------------


def test_a_dropped_block_is_free_and_its_descendants_stay() -> None:
    cache = Cache()
    cache.put(P)
    assert cache.tree.drop(cache.node(P, 1)) is None
    assert cache.pool.cached == 3 and cache.pool.available == 8
    match = cache.match([*P, 1])
    assert [str(found.status) for found in match.blocks] == ["reused", "missing", "reused", "reused", "missing"]
    assert match.blocks[1].reason is MissReason.DROPPED and match.valid_prefix == 4
    cache.check()


def test_a_dropped_block_in_use_is_told_of_and_kept() -> None:
    cache = Cache()
    block = cache.put(P)[1]
    cache.pool.share(block)
    assert cache.tree.drop(cache.node(P, 1)) is block
    assert block.node is None and block.ref_count == 1
    cache.pool.free(block)
    cache.check()


def test_dropping_twice_is_dropping_once() -> None:
    cache = Cache()
    cache.put(P)
    node = cache.node(P, 1)
    cache.tree.drop(node)
    assert cache.tree.drop(node) is None
    cache.check()


def test_a_pending_block_can_be_dropped() -> None:
    cache = Cache()
    node = cache.chain(P[:4])[0]
    block = cache.pool.allocate()
    cache.tree.await_block(node, block)
    assert cache.tree.drop(node) is block
    assert node.pending is None and block.node is None
    cache.pool.free(block)
    cache.check()


def test_an_evicted_block_is_a_dropped_one_with_another_reason() -> None:
    cache = Cache(num_blocks=4)
    cache.put(P)
    cache.pool.free(cache.pool.allocate())
    assert cache.match([*P, 1]).blocks[3].reason is MissReason.EVICTED
    assert cache.match([*P, 1]).valid_prefix == 12
    cache.check()


# -- invalidate --------------------------------------------------------------------------------------------------------


def test_an_invalidated_node_takes_all_below_it() -> None:
    cache = Cache(num_blocks=12)
    cache.put([*P, 1, 2])
    cache.put([*P[:8], 50, 51, 52, 53])
    cache.put([*P[:4], 60, 61, 62, 63])
    forgotten = cache.tree.invalidate(cache.node(P, 1))
    assert sorted(node.index for node in forgotten) == [1, 2, 2, 3, 4]
    assert {node.index for node in cache.tree} == {0, 1}
    assert cache.match([*P, 1]).computed() == [(4, 17)]
    assert cache.match([*P[:4], 60, 61, 62, 63, 1]).computed() == [(8, 9)]
    assert cache.pool.available == 12
    cache.check()


def test_invalidated_blocks_stay_with_their_holders() -> None:
    cache = Cache()
    blocks = cache.put(P)
    node = cache.node(P, 3)
    cache.tree.hold(node)
    for block in blocks:
        cache.pool.share(block)
    cache.tree.invalidate(cache.node(P, 2))
    assert [block.published for block in blocks] == [True, True, False, False]
    assert all(block.ref_count == 1 for block in blocks) and node.forgotten
    for block in blocks:
        cache.pool.free(block)
    cache.tree.release(node)
    assert cache.pool.cached == 2
    cache.check()


def test_an_invalidated_node_is_made_anew_by_the_next_who_needs_it() -> None:
    cache = Cache()
    cache.put(P)
    old = cache.node(P, 2)
    cache.tree.invalidate(old)
    cache.put(P)
    assert cache.node(P, 2) is not old and cache.match([*P, 1]).valid_prefix == 16
    cache.check()


def test_invalidating_prunes_what_only_served_as_proof() -> None:
    cache = Cache()
    cache.put(P)
    for index in range(3):
        cache.tree.drop(cache.node(P, index))
    cache.tree.invalidate(cache.node(P, 3))
    assert len(cache.tree) == 0 and not cache.tree.has_root(IDENTITY)
    cache.check()


def test_a_pending_block_below_an_invalidated_node_is_detached() -> None:
    cache = Cache()
    cache.put(P[:4])
    nodes = cache.chain(P[:8])
    block = cache.pool.allocate()
    cache.tree.await_block(nodes[1], block)
    cache.tree.invalidate(nodes[0])
    assert block.node is None and nodes[1].pending is None
    cache.pool.free(block)
    cache.tree.release(nodes[1])
    cache.check()


# -- lineage -----------------------------------------------------------------------------------------------------------


def test_below_a_lost_record_nothing_is_proven() -> None:
    cache = Cache()
    cache.put([*P, 1])
    cache.tree.lose_record(cache.node(P, 1))
    match = cache.match([*P, 1])
    assert match.computed() == [(4, 17)] and match.valid_prefix == 4
    assert {found.reason for found in match.blocks[2:4]} == {MissReason.LINEAGE_UNKNOWN}
    cache.check()


def test_whoever_computes_a_lost_record_again_replaces_the_orphans() -> None:
    cache = Cache()
    cache.put(P)
    cache.tree.lose_record(cache.node(P, 1))
    orphans = [cache.node(P, 2), cache.node(P, 3)]
    cache.put(P)
    assert all(orphan.forgotten for orphan in orphans)
    assert cache.match([*P, 1]).valid_prefix == 16
    assert cache.tree.collisions == 0 and cache.pool.cached == 4
    cache.check()


def test_the_tails_of_a_lost_record_go_with_it() -> None:
    cache = Cache()
    cache.put(P[:6])
    cache.tree.lose_record(cache.node(P, 0))
    assert cache.pool.cached == 0 and cache.pool.available == 8
    cache.check()


# -- collisions --------------------------------------------------------------------------------------------------------


def colliding(cache: Cache, parent: list[int]) -> tuple[list[int], list[int]]:
    """Two different blocks of tokens that have one hash under the same parent."""
    seen: dict[BlockHash, list[int]] = {}
    for token in range(10_000):
        block = [token, 1, 2, 3]
        other = seen.setdefault(cache.hashes(parent + block)[-1], block)
        if other != block:
            return other, block
    raise AssertionError("no collision")


@pytest.mark.parametrize("parent", [[], P[:4]])
def test_a_collision_is_a_miss_and_is_counted(parent: list[int]) -> None:
    cache = Cache(hash_bits=8)
    mine, other = colliding(cache, parent)
    cache.put(parent + mine)
    match = cache.match([*parent, *other, 1])
    found = match.blocks[len(parent) // 4]
    assert found.status is BlockStatus.MISSING and found.reason is MissReason.COLLISION and found.node is None
    assert match.valid_prefix == len(parent)
    node = cache.chain(parent)[-1] if parent else cache.tree.root(IDENTITY)
    hash_ = cache.hashes(parent + other)[-1]
    assert cache.tree.extend(node, hash_, encode_tokens(other)) is None
    assert cache.tree.collisions == 1
    assert cache.match([*parent, *mine, 1]).valid_prefix == len(parent) + 4
    cache.check()


def test_equal_tokens_and_hash_under_another_parent_are_a_miss() -> None:
    """The parent is compared as a node, not as a hash: two first blocks collide, their children are alike."""
    cache = Cache(hash_bits=8)
    mine, other = colliding(cache, [])
    cache.put([*mine, 7, 7, 7, 7])
    match = cache.match([*other, 7, 7, 7, 7, 1])
    assert cache.hashes([*mine, 7, 7, 7, 7]) == cache.hashes([*other, 7, 7, 7, 7])
    assert match.computed() == [(0, 9)]
    assert [found.reason for found in match.blocks[:2]] == [MissReason.COLLISION] * 2
    cache.check()
