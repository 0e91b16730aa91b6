from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import TOKEN_BYTES, BlockHasher, common_tokens, encode_tokens
from tests.cache.world import IDENTITY, Cache

tokens = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3) | st.sampled_from([255, 256, 65536]), max_size=8)


def test_tokens_are_four_little_endian_bytes() -> None:
    assert encode_tokens([1, 256, 2**32 - 1]) == b"\1\0\0\0" + b"\0\1\0\0" + b"\xff\xff\xff\xff"
    assert TOKEN_BYTES == 4 and encode_tokens([]) == b""


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_does_not_fit_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        encode_tokens([token])


@given(tokens, tokens)
def test_encoding_tells_token_lists_apart(left: list[int], right: list[int]) -> None:
    assert (encode_tokens(left) == encode_tokens(right)) == (left == right)


def naive_common(left: list[int], right: list[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


@given(tokens, tokens, tokens)
def test_common_tokens_against_a_loop(stem: list[int], left: list[int], right: list[int]) -> None:
    """Also where two tokens share their first bytes and differ in a later one."""
    left, right = stem + left, stem + right
    assert common_tokens(encode_tokens(left), encode_tokens(right)) == naive_common(left, right)


@pytest.mark.parametrize("bits", [0, 7, 12, 129, -8])
def test_a_hash_has_whole_bytes(bits: int) -> None:
    with pytest.raises(ValueError, match="bits must be a multiple of 8"):
        BlockHasher(bits)


def test_a_hash_is_over_parent_and_tokens() -> None:
    hasher = BlockHasher()
    first = hasher(IDENTITY, encode_tokens([1, 2]))
    assert len(first) == 16
    assert first == hasher(IDENTITY, encode_tokens([1, 2]))
    assert first != hasher(IDENTITY, encode_tokens([1, 3]))
    assert first != hasher(first, encode_tokens([1, 2]))
    assert len(BlockHasher(8)(IDENTITY, b"")) == 1


def test_equal_tokens_after_other_tokens_have_other_hashes() -> None:
    """F8: a block's identity is its parent's and its own tokens."""
    cache = Cache(block_size=2)
    assert cache.hashes([1, 2, 3, 4])[1] != cache.hashes([9, 2, 3, 4])[1]
    assert cache.hashes([1, 2, 3, 4])[0] == cache.hashes([1, 2, 9, 9])[0]


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 30))
def test_hashes_can_be_extended_piece_by_piece(prompt: list[int], cut: int) -> None:
    cache = Cache(block_size=4)
    hashes = cache.hashes(prompt[:cut])
    assert len(hashes) == len(prompt[:cut]) // 4
    cache.tree.extend_hashes(hashes, IDENTITY, encode_tokens(prompt))
    assert hashes == cache.hashes(prompt)
