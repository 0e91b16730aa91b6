"""Times of this project's cache, one JSON object:  python -m benchmarks.micro.ours TOKENS BLOCK_SIZE RUNS"""

from __future__ import annotations

import gc
import json
import random
import sys

from benchmarks.micro.clock import microseconds
from cache.block import Block
from cache.hashing import encode_tokens
from cache.identity import BlockHash
from cache.node import PrefixNode
from cache.pool import BlockPool
from cache.tree import PrefixTree

ROOT = BlockHash(b"identity of bench")


class World:
    """A cache that holds one prompt and nothing else, and room for another one."""

    def __init__(self, prompt: list[int], block_size: int) -> None:
        self.prompt = prompt
        self.block_size = block_size
        self.blocks = len(prompt) // block_size
        self.encoded = encode_tokens(prompt)
        self.pool = BlockPool(self.blocks)
        self.tree = PrefixTree(self.pool, block_size)
        self.hashes = self.hash()

    def hash(self) -> list[BlockHash]:
        """All a request pays for its hashes: its tokens encoded, then block by block."""
        hashes: list[BlockHash] = []
        self.tree.extend_hashes(hashes, ROOT, encode_tokens(self.prompt))
        return hashes

    def match(self) -> object:
        return self.tree.match(ROOT, self.encoded, self.hashes)

    def hash_and_match(self) -> object:
        return self.tree.match(ROOT, encode_tokens(self.prompt), self.hash())

    def take(self) -> list[Block]:
        """A block for each block of the prompt; evicts those that are cached."""
        return [self.pool.allocate() for _ in range(self.blocks)]

    def publish(self, blocks: list[Block]) -> PrefixNode:
        """The chain of the prompt, then each block as its node's."""
        size = len(self.encoded) // self.blocks
        node = self.tree.root(ROOT)
        self.tree.hold(node)
        nodes = []
        for index, hash_ in enumerate(self.hashes):
            found = self.tree.extend(node, hash_, self.encoded[index * size : (index + 1) * size])
            assert found is not None
            nodes.append(found)
            node = found
        self.tree.hold(node)
        self.tree.release(self.tree.root(ROOT))
        for found, block in zip(nodes, blocks, strict=True):
            block.written = self.block_size
            self.tree.publish(found, block)
        return node

    def free(self, blocks: list[Block], end: PrefixNode | None) -> None:
        for block in reversed(blocks):
            self.pool.free(block)
        if end is not None:
            self.tree.release(end)


def main() -> None:
    tokens, block_size, runs = map(int, sys.argv[1:])
    rng = random.Random(0)
    prompt = [rng.randrange(49152) for _ in range(tokens)]
    world = World(prompt, block_size)
    gc.disable()
    times = {"hash": microseconds(world.hash, runs), "match, nothing cached": microseconds(world.match, runs)}
    publish, evict = [], []
    for _ in range(runs):
        blocks = world.take()
        ends: list[PrefixNode] = []
        publish.append(microseconds(lambda blocks=blocks, ends=ends: ends.append(world.publish(blocks)), 1))  # type: ignore[misc]
        world.free(blocks, ends[0])
        taken: list[Block] = []
        evict.append(microseconds(lambda taken=taken: taken.extend(world.take()), 1))  # type: ignore[misc]
        world.free(taken, None)
    times |= {"publish": min(publish), "evict and allocate": min(evict)}
    blocks = world.take()
    world.free(blocks, world.publish(blocks))
    times["match, all cached"] = microseconds(world.match, runs)
    times["hash and match, all cached"] = microseconds(world.hash_and_match, runs)
    print(json.dumps({name: value / world.blocks for name, value in times.items()}))


if __name__ == "__main__":
    main()
