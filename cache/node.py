"""PrefixNode: one full block of tokens under one parent, and where its K/V lives now.

    root (identity) -- node "The cat sat" -- node "on the mat." -- tail "And"
                            |                     K/V nowhere: kept, because it proves what lies below it
                            block 7

A node is the proof of lineage: K/V of a later block may be used only because every ancestor's tokens are known here,
even those whose bytes are gone. A *tail* is a childless node of fewer tokens than a block; it is only copied from.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from cache.hashing import common_tokens
from cache.identity import BlockHash
from cache.lineage import NO_LINEAGE

if TYPE_CHECKING:
    from cache.block import Block


def _tokens(node: PrefixNode) -> bytes:
    return node.tokens


class PrefixNode:
    """A node of the PrefixTree. Only the tree changes it.

    `resident` holds the children that have a published block, ordered by their tokens: the child sharing the most
    leading tokens with any given run is a neighbour of that run's place in the order, so it is found by bisection.
    """

    __slots__ = (
        "hash",
        "tokens",
        "parent",
        "index",
        "is_tail",
        "children",
        "resident",
        "block",
        "pending",
        "lineage",
        "holds",
        "forgotten",
        "ttl",
        "last_use",
        "pinned_until",
        "due",
    )

    def __init__(self, hash_: BlockHash, tokens: bytes, parent: PrefixNode | None, *, is_tail: bool = False) -> None:
        self.hash = hash_
        self.tokens = tokens
        self.parent = parent
        self.index: int = -1 if parent is None else parent.index + 1  # place in the chain; a root has -1
        self.is_tail = is_tail
        self.children: set[PrefixNode] = set()
        self.resident: list[PrefixNode] = []
        self.block: Block | None = None  # published K/V on the device
        self.pending: Block | None = None  # K/V being computed; exclusive with `block`
        self.lineage = NO_LINEAGE  # of all K/V it has had: what lies below may have been computed upon any of them
        self.holds = 0  # requests whose chain ends here
        self.forgotten = False  # pruned or invalidated: no longer in the tree, never matched again
        self.ttl: float | None = None  # seconds that the K/V outlive their last use; None: until they are evicted
        self.last_use = 0.0
        self.pinned_until = 0.0  # when the pin of `block` ends, while it has one
        self.due: float | None = None  # when the cache's Retention looks at it next

    def __repr__(self) -> str:
        return f"PrefixNode({self.hash.hex()[:8]}, index={self.index}, tail={self.is_tail}, block={self.block})"

    @property
    def orphaned(self) -> bool:
        """The record of some ancestor is gone: nothing proves what this node depends on."""
        node = self
        while node.parent is not None:
            if node.parent.forgotten:
                return True
            node = node.parent
        return False

    def add_resident(self, child: PrefixNode) -> None:
        insort(self.resident, child, key=_tokens)

    def remove_resident(self, child: PrefixNode) -> None:
        place = bisect_left(self.resident, child.tokens, key=_tokens)
        while self.resident[place] is not child:  # a tail and a short block may have equal tokens
            place += 1
        del self.resident[place]

    def closest_resident(self, tokens: bytes) -> tuple[PrefixNode, int] | None:
        """The resident child that shares the most leading tokens with `tokens`, and how many; None if none shares any.

        In an ordered list the longest common prefix with any string is had by one of its two neighbours.
        """
        place = bisect_left(self.resident, tokens, key=_tokens)
        best: tuple[PrefixNode, int] | None = None
        for neighbour in self.resident[max(0, place - 1) : place + 1]:
            shared = common_tokens(neighbour.tokens, tokens)
            if shared > (best[1] if best else 0):
                best = neighbour, shared
        return best
