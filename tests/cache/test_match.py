"""What a look-up says: per block its status and reason, where computing starts, what is left to compute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import encode_tokens
from cache.match import BlockStatus, Match
from cache.reason import MissReason
from tests.cache.world import Cache

P = list(range(16))  # four blocks of four
R, N, M = BlockStatus.REUSED, BlockStatus.PENDING, BlockStatus.MISSING


def statuses(match: Match) -> list[BlockStatus]:
    return [found.status for found in match.blocks]


def test_nothing_cached() -> None:
    match = Cache().match(P)
    assert statuses(match) == [M] * 4
    assert match.valid_prefix == 0 and match.computed() == [(0, 16)]
    assert match.blocks[0].reason is MissReason.NEVER_SEEN


@pytest.mark.parametrize(
    ("count", "computed"),
    [(1, (0, 1)), (3, (2, 3)), (4, (3, 4)), (5, (4, 5)), (8, (7, 8)), (15, (14, 15)), (16, (15, 16))],
)
def test_a_match_never_reaches_the_last_position(count: int, computed: tuple[int, int]) -> None:
    """P4: also a wholly cached prompt has its last position computed; the rest of that block is copied."""
    cache = Cache()
    cache.put(P[:count])
    match = cache.match(P[:count])
    assert match.computed() == [computed]
    assert match.blocks[-1].status is M and match.blocks[-1].reason is MissReason.LAST_POSITION
    assert match.valid_prefix == (count - 1) // 4 * 4


@pytest.mark.parametrize("count", [1, 4, 5, 8, 15, 16])
def test_without_copies_the_last_block_is_computed_whole(count: int) -> None:
    cache = Cache()
    cache.put(P[:count])
    match = cache.match(P[:count], copy_siblings=False)
    assert match.computed() == [((count - 1) // 4 * 4, count)]
    assert all(found.copy_from is None for found in match.blocks)


def test_the_last_block_is_never_shared_even_where_it_is_resident() -> None:
    cache = Cache()
    blocks = cache.put(P[:8])
    last = cache.match(P[:8]).blocks[1]
    assert last.block is None and last.copy_from is blocks[1] and last.copy_slots == 3


def test_gaps_are_missing_and_nothing_else() -> None:
    cache = Cache()
    cache.put([*P, 1])
    cache.tree.drop(cache.node(P, 0))
    cache.tree.drop(cache.node(P, 2))
    match = cache.match([*P, 1])
    assert statuses(match) == [M, R, M, R, M]
    assert match.computed() == [(0, 4), (8, 12), (16, 17)]
    assert match.valid_prefix == 0


def test_touching_ranges_are_one() -> None:
    cache = Cache()
    cache.put([*P, 1])
    cache.tree.drop(cache.node(P, 1))
    cache.tree.drop(cache.node(P, 2))
    assert cache.match([*P, 1]).computed() == [(4, 12), (16, 17)]


def test_truncation_uses_nothing_after_a_gap() -> None:
    cache = Cache()
    cache.put([*P, 1])
    cache.tree.drop(cache.node(P, 1))
    match = cache.match([*P, 1], keep_after_gap=False)
    assert statuses(match) == [R, M, M, M, M]
    assert match.computed() == [(4, 17)] and match.valid_prefix == 4
    assert [found.reason for found in match.blocks[2:]] == [MissReason.AFTER_GAP] * 3
    assert all(found.block is None and found.copy_from is None for found in match.blocks[1:])


def test_truncation_still_copies_into_the_first_missing_block() -> None:
    """P3 is independent of the policy."""
    cache = Cache()
    cache.put(P)
    edited = [*P[:6], 99, *P[7:]]
    match = cache.match(edited, keep_after_gap=False)
    assert match.computed() == [(6, 16)] and match.blocks[1].copy_slots == 2


def test_an_edited_token_is_named() -> None:
    cache = Cache()
    cache.put(P)
    match = cache.match([*P[:6], 99, *P[7:]])
    assert statuses(match) == [R, M, M, M]
    assert match.blocks[1].reason is MissReason.DIFFERENT_TOKEN and match.blocks[1].first_difference == 6


def test_after_an_unknown_block_nothing_is_copied() -> None:
    """Equal tokens under another parent are other K/V (F8)."""
    cache = Cache()
    cache.put(P)
    match = cache.match([99, *P[1:]])
    assert match.computed() == [(0, 16)]
    assert all(found.copy_from is None for found in match.blocks)


def test_a_gap_is_copied_into_from_a_sibling() -> None:
    cache = Cache()
    cache.put(P)
    sibling = cache.put([*P[:6], 98, 99])[1]
    cache.tree.drop(cache.node(P, 1))
    match = cache.match(P)
    assert match.blocks[1].copy_from is sibling and match.blocks[1].copy_slots == 2
    assert match.computed() == [(6, 8), (15, 16)]


def test_pending_blocks_are_not_computed_and_not_yet_valid() -> None:
    cache = Cache()
    cache.put(P[:4])
    nodes = cache.chain(P[:8])
    cache.tree.await_block(nodes[1], cache.pool.allocate())
    match = cache.match(P[:12])
    assert statuses(match) == [R, N, M]
    assert match.computed() == [(8, 12)] and match.valid_prefix == 4
    assert match.blocks[1].reason is MissReason.IN_FLIGHT


def test_pending_blocks_after_a_gap_are_not_used_when_truncating() -> None:
    cache = Cache()
    cache.put(P[:4])
    nodes = cache.chain(P[:8])
    cache.tree.await_block(nodes[1], cache.pool.allocate())
    cache.tree.drop(nodes[0])
    assert statuses(cache.match(P[:12], keep_after_gap=False)) == [M, M, M]
    assert statuses(cache.match(P[:12])) == [M, N, M]


def test_a_pending_block_does_not_end_what_truncation_uses() -> None:
    cache = Cache()
    cache.put(P[:12])
    cache.tree.hold(cache.node(P, 2))
    cache.tree.drop(cache.node(P, 1))
    cache.tree.await_block(cache.node(P, 1), cache.pool.allocate())
    assert statuses(cache.match(P, keep_after_gap=False)) == [R, N, R, M]


def test_looking_up_changes_nothing() -> None:
    cache = Cache(num_blocks=4)
    cache.put(P)
    evicted = []
    before = len(cache.tree)
    for _ in range(3):
        cache.match([*P[:6], 99, *P[7:]])
        cache.match(P)
    assert len(cache.tree) == before and cache.pool.cached == 4
    cache.pool.free(cache.pool.allocate())
    evicted = [index for index in range(4) if cache.tree.node(cache.hashes(P)[index]) is None]
    assert evicted == [3], "the order of eviction is as if nobody had looked"
    assert cache.tree.has_root(b"unknown") is False  # type: ignore[arg-type]


def test_who_may_use_nothing_computes_everything() -> None:
    match = Match.nothing(9, 4, MissReason.OPTED_OUT)
    assert statuses(match) == [M] * 3 and match.computed() == [(0, 9)] and match.valid_prefix == 0
    assert {found.reason for found in match.blocks} == {MissReason.OPTED_OUT}
    assert Match.nothing(8, 4, MissReason.OPTED_OUT).computed() == [(0, 8)]


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(
    puts=st.lists(tokens, max_size=4),
    drops=st.lists(st.integers(0, 100), max_size=6),
    prompt=tokens,
    keep=st.booleans(),
    copies=st.booleans(),
)
def test_against_what_was_put_in(
    puts: list[list[int]], drops: list[int], prompt: list[int], keep: bool, copies: bool
) -> None:
    """Every position that a match does not compute is held, after exactly these tokens, by a resident block."""
    cache = Cache(num_blocks=32, block_size=4)
    for put in puts:
        cache.put(put)
    for pick in drops:
        nodes = sorted(cache.tree, key=lambda node: node.hash)
        if nodes:
            cache.tree.drop(nodes[pick % len(nodes)])
    cache.check()
    match = cache.match(prompt, keep_after_gap=keep, copy_siblings=copies)
    computed = {position for start, end in match.computed() for position in range(start, end)}
    assert len(prompt) - 1 in computed
    for position in range(len(prompt)):
        index, slot = divmod(position, 4)
        found = match.blocks[index]
        source = found.copy_from if slot < found.copy_slots else found.block
        assert (source is None) == (position in computed)
        if source is not None:
            assert source.published and source.node is not None and source.written > slot
            wanted = encode_tokens(prompt[: position + 1])
            have = b""
            node = source.node
            while node is not None:
                have = node.tokens + have
                node = node.parent
            assert have.startswith(wanted)
    first_missing = min((found.index for found in match.blocks if found.status is M), default=None)
    assert match.valid_prefix == first_missing * 4  # type: ignore[operator]
    if not keep:
        assert match.computed() == [(min(computed), len(prompt))]
