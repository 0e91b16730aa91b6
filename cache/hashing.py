"""Token ids as bytes, and the chain of hashes over them.

Tokens are kept as 4 little-endian bytes each: a block of 16 tokens is one 64-byte string that is hashed, compared and
ordered in single C calls. Chaining (parent's hash, then the tokens) is what makes equal tokens after different
prefixes different blocks (RECOVERY F8); vLLM's prefix cache names its blocks the same way.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from os.path import commonprefix

import xxhash

from cache.identity import BlockHash

TOKEN_BYTES = 4


def encode_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids, each in [0, 2**32), as 4 little-endian bytes."""
    encoded = array("I", token_ids)
    if sys.byteorder == "big":
        encoded.byteswap()
    return encoded.tobytes()


def common_tokens(left: bytes, right: bytes) -> int:
    """How many leading tokens two encoded runs share."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit // TOKEN_BYTES
    return len(commonprefix([left, right])) // TOKEN_BYTES


class BlockHasher:
    """xxh3-128 over the parent's hash and the block's tokens.

    `bits` below 128 is for tests only: a short hash collides at will and shows that a hit is verified, not believed.
    """

    def __init__(self, bits: int = 128) -> None:
        if not 0 < bits <= 128 or bits % 8:
            raise ValueError(f"bits must be a multiple of 8 from 8 to 128, not {bits}")
        self._bytes = bits // 8

    def __call__(self, parent: bytes, tokens: bytes) -> BlockHash:
        return BlockHash(xxhash.xxh3_128_digest(parent + tokens)[: self._bytes])
