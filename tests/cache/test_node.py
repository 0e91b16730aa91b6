"""The closest resident child: by bisection, against a scan of all children."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import common_tokens, encode_tokens
from cache.identity import BlockHash
from cache.node import PrefixNode
from tests.cache.world import IDENTITY, Cache

tokens = st.lists(st.sampled_from([0, 1, 2, 255, 256, 257, 65536]), min_size=1, max_size=4)


def scan(parent: PrefixNode, run: bytes) -> int:
    """The most leading tokens any resident child shares with `run`."""
    return max((common_tokens(child.tokens, run) for child in parent.children if child.block is not None), default=0)


@given(st.lists(st.tuples(tokens, st.booleans()), max_size=12), tokens)
def test_the_closest_child_is_the_one_a_scan_finds(children: list[tuple[list[int], bool]], run: list[int]) -> None:
    """Full blocks and tails, also of equal tokens; some without K/V, which must not be found."""
    cache = Cache(num_blocks=16)
    root = cache.tree.root(IDENTITY)
    for run_of_child, resident in children:
        child = PrefixNode(BlockHash(b""), encode_tokens(run_of_child), root, is_tail=len(run_of_child) < 4)
        root.children.add(child)
        if resident:
            child.block = cache.pool.allocate()
            root.add_resident(child)
    wanted = encode_tokens(run)
    found = root.closest_resident(wanted)
    if found is None:
        assert scan(root, wanted) == 0
    else:
        assert found[1] == scan(root, wanted) > 0
        assert found[0].block is not None and common_tokens(found[0].tokens, wanted) == found[1]


@given(st.lists(tokens, min_size=1, max_size=10), st.data())
def test_residents_stay_in_order_whatever_comes_and_goes(runs: list[list[int]], data: st.DataObject) -> None:
    parent = PrefixNode(IDENTITY, b"", None)
    children = [PrefixNode(BlockHash(b""), encode_tokens(run), parent) for run in runs]
    for child in children:
        parent.add_resident(child)
    gone = data.draw(st.permutations(children))
    while gone:
        assert parent.resident == sorted(parent.resident, key=lambda child: child.tokens)
        parent.remove_resident(gone.pop())
        assert set(parent.resident) == set(gone)


def test_nothing_is_close_to_nothing() -> None:
    cache = Cache()
    root = cache.tree.root(IDENTITY)
    assert root.closest_resident(encode_tokens([1])) is None
    cache.put([1, 2, 3, 4])
    assert cache.tree.root(IDENTITY).closest_resident(b"") is None
    assert cache.tree.root(IDENTITY).closest_resident(encode_tokens([2])) is None


def test_a_longer_run_finds_a_shorter_tail_and_a_shorter_run_a_full_block() -> None:
    cache = Cache()
    cache.put([1, 2])
    cache.put([1, 2, 3, 4])
    root = cache.tree.root(IDENTITY)
    closest = root.closest_resident(encode_tokens([1, 2, 3]))
    assert closest is not None and closest[1] == 3 and not closest[0].is_tail


def test_index_counts_from_the_root() -> None:
    cache = Cache()
    assert [node.index for node in cache.chain(range(8))] == [0, 1]
    assert cache.tree.root(IDENTITY).index == -1
