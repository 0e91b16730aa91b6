"""Integrity: are the bytes of published blocks still those that were published, and if not, what did they touch?

A block found corrupt on the device was attended to, or copied from, at unknown times since it was last found good:

    step              12        13        14        15
    block X           found good          damaged        found corrupt
    below it          A published         B published
    copied from it              C                   D

B and D may carry the damage, and so may whatever was published below them or copied from them since. A and C do not,
nor does anything that was published before X was last found good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cache.block import Block, BlockId
from cache.lineage import Lineage
from cache.node import PrefixNode
from cache.pool import BlockPool
from cache.tree import PrefixTree, subtree

LOOKS = 64


@dataclass(slots=True)
class Taint:
    """What a corrupt block may have spoilt: the nodes whose K/V must go, and unpublished blocks with copied slots.

    `since` is the number of the step after which the corrupt block was last found good.
    """

    since: int
    nodes: list[PrefixNode] = field(default_factory=list)  # the corrupt one first
    blocks: set[BlockId] = field(default_factory=set)  # of those nodes, and unpublished ones


class Integrity:
    """Signs blocks as they are published and checks them later. `checksum` and `is_finite` read a block's bytes."""

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        checksum: Callable[[BlockId], int],
        is_finite: Callable[[BlockId], bool],
    ) -> None:
        self.checked = 0
        self.failures = 0
        self._pool = pool
        self._checksum = checksum
        self._is_finite = is_finite
        self._next = 0
        self._fresh: list[Block] = []
        tree.on_publish = self._fresh.append

    def sign(self, step: int) -> None:
        """Take the checksums of all blocks published since the last call, which is after every step."""
        for block in self._fresh:
            if block.published and block.checksum is None:
                block.checksum = self._checksum(block.block_id)
                block.published_at = block.checked_at = step
        self._fresh.clear()

    def is_sound(self, block: Block) -> bool:
        """Could the block's K/V have come from a network that works? Damage by NaN or infinity is published like
        anything else when nobody asked for the logits above it."""
        return self._is_finite(block.block_id)

    def check(self, block: Block, step: int) -> bool:
        """Is the published `block` as it was signed? If so it is good as of `step`."""
        self.checked += 1
        if self._checksum(block.block_id) == block.checksum:
            block.checked_at = step
            return True
        self.failures += 1
        return False

    def scrub(self, count: int, step: int) -> Iterator[Block]:
        """Check the next `count` published blocks, round and round; yields the corrupt ones. Looks at no more than
        `LOOKS` blocks for each one to check, lest an empty pool cost more than a full one."""
        for _ in range(min(len(self._pool.blocks), count * LOOKS)):
            block = self._pool.blocks[self._next]
            self._next = (self._next + 1) % len(self._pool.blocks)
            if not block.published or block.checksum is None:
                continue
            count -= 1
            if not self.check(block, step):
                yield block
            if count == 0:
                return

    def taint(self, corrupt: Block) -> Taint:
        """Follow the damage through descendants and copies. Rare, so it looks at every block."""
        assert corrupt.node is not None
        taint = Taint(since=corrupt.checked_at)
        todo = [(corrupt.node, corrupt.checked_at)]
        seen: set[PrefixNode] = set()
        while todo:
            node, since = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.block is not None:
                taint.nodes.append(node)
                taint.blocks.add(node.block.block_id)
            todo += _below(node, since)
            todo += _copies(node, since)
            taint.blocks |= {
                block.block_id
                for block in self._pool.blocks
                if not block.published and _copied_since(block.lineage, node, since)
            }
        return taint


def _below(node: PrefixNode, since: int) -> Iterator[tuple[PrefixNode, int]]:
    """What was published below `node` since that step, and the step before its publication."""
    for below in subtree(node):
        if below is not node and below.block is not None and below.block.published_at > since:
            yield below, below.block.published_at - 1


def _copies(node: PrefixNode, since: int) -> Iterator[tuple[PrefixNode, int]]:
    """What was copied from `node` since that step. Where the copy itself is gone, what was published below it."""
    for copy in () if node.parent is None else node.parent.children:
        if copy.block is not None and _copied_since(copy.block.lineage, node, since):
            yield copy, copy.block.published_at - 1
        elif _copied_since(copy.lineage, node, since):
            yield from _below(copy, since)


def _copied_since(lineage: Lineage, node: PrefixNode, since: int) -> bool:
    step = lineage.step_from(node)
    return step is not None and step > since
