from __future__ import annotations

from cache.history import LossHistory
from cache.identity import BlockHash
from cache.reason import MissReason
from tests.cache.world import Cache

A, B, C = (BlockHash(letter) for letter in (b"a", b"b", b"c"))
P = list(range(16))


def test_the_latest_reason_is_remembered_until_the_block_is_back() -> None:
    history = LossHistory()
    assert history.reason(A) is None
    history.note(A, MissReason.EVICTED)
    history.note(A, MissReason.DROPPED)
    assert history.reason(A) is MissReason.DROPPED and len(history) == 1
    history.clear(A)
    history.clear(B)
    assert history.reason(A) is None


def test_it_is_bounded_and_forgets_the_oldest_loss() -> None:
    history = LossHistory(capacity=2)
    for hash_ in (A, B, A, C):
        history.note(hash_, MissReason.EVICTED)
    assert len(history) == 2 and history.reason(B) is None and history.reason(A) is MissReason.EVICTED


def test_reasons_outlive_the_nodes() -> None:
    cache = Cache()
    cache.put(P)
    cache.tree.invalidate(cache.node(P, 2))
    assert len(cache.tree) == 2
    assert [found.reason for found in cache.match([*P, 1]).blocks[2:4]] == [MissReason.INVALIDATED] * 2
    cache.put(P)
    assert all(found.reason is None for found in cache.match([*P, 1]).blocks[:4])


def test_an_evicted_tail_is_not_worth_remembering() -> None:
    cache = Cache(num_blocks=1)
    cache.put([1, 2])
    cache.pool.free(cache.pool.allocate())
    assert len(cache.tree.history) == 0
