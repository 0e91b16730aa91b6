"""Tiny caches: a pool, a tree over it, and prompts put into them without any scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from cache.block import Block
from cache.hashing import BlockHasher, encode_tokens
from cache.identity import BlockHash
from cache.match import Match
from cache.node import PrefixNode
from cache.pool import BlockPool
from cache.tree import PrefixTree

IDENTITY = BlockHash(b"identity of test")


class Cache:
    """A pool and its tree. `put` does what a request that computes a whole prompt does, in one go."""

    def __init__(self, num_blocks: int = 8, block_size: int = 4, hash_bits: int = 128) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, block_size, BlockHasher(hash_bits))

    def hashes(self, tokens: Sequence[int], identity: BlockHash = IDENTITY) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        self.tree.extend_hashes(hashes, identity, encode_tokens(tokens))
        return hashes

    def node(self, tokens: Sequence[int], index: int) -> PrefixNode:
        node = self.tree.node(self.hashes(tokens)[index])
        assert node is not None
        return node

    def chain(self, tokens: Sequence[int], identity: BlockHash = IDENTITY) -> list[PrefixNode]:
        """The nodes of the full blocks of `tokens`, made where they are new; the last one is held."""
        size = self.tree.block_size
        end = root = self.tree.root(identity)
        self.tree.hold(root)
        nodes = []
        for index, hash_ in enumerate(self.hashes(tokens, identity)):
            node = self.tree.extend(end, hash_, encode_tokens(tokens[index * size : (index + 1) * size]))
            assert node is not None
            nodes.append(node)
            end = node
        self.tree.hold(end)
        self.tree.release(root)
        return nodes

    def written(self, slots: int | None = None) -> Block:
        """A new block with this many slots written; all of them if nothing is said."""
        block = self.pool.allocate()
        block.written = self.tree.block_size if slots is None else slots
        return block

    def put(self, tokens: Sequence[int], identity: BlockHash = IDENTITY) -> list[Block]:
        """Publish all full blocks of a prompt and a tail of the rest; nobody holds them afterwards."""
        size = self.tree.block_size
        nodes = self.chain(tokens, identity)
        root = self.tree.root(identity)
        blocks = []
        for node in nodes:
            block = self.written()
            kept = self.tree.publish(node, block)
            if kept is not block:
                self.pool.share(kept)
                self.pool.free(block)
            blocks.append(kept)
        rest = list(tokens[len(nodes) * size :])
        if rest:
            tail = self.written(len(rest))
            self.tree.publish_tail(nodes[-1] if nodes else root, encode_tokens(rest), tail)
            blocks.append(tail)
        for block in reversed(blocks):
            self.pool.free(block)
        self.tree.release(nodes[-1] if nodes else root)
        return blocks

    def match(
        self,
        tokens: Sequence[int],
        *,
        keep_after_gap: bool = True,
        copy_siblings: bool = True,
        identity: BlockHash = IDENTITY,
    ) -> Match:
        return self.tree.match(
            identity,
            encode_tokens(tokens),
            self.hashes(tokens, identity),
            keep_after_gap=keep_after_gap,
            copy_siblings=copy_siblings,
        )

    def evict_all(self) -> None:
        """Evict everything that may be evicted, by allocating it all and freeing it again."""
        blocks = [self.pool.allocate() for _ in range(self.pool.available)]
        for block in blocks:
            self.pool.free(block)

    def check(self) -> None:
        self.pool.check_integrity()
        self.tree.check_integrity()
