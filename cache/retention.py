"""Retention: how long blocks stay, where somebody said so: times to live and pins.

A time to live counts from the last use, and the longest anybody asked for wins; a use by someone who asks for none
makes it endless, as blocks are by default. A pinned block is evicted only when a request could not run at all without
its room; pins are bounded by a share of the pool.
"""

from __future__ import annotations

import heapq
from itertools import count

from cache.node import PrefixNode
from cache.pool import BlockPool
from cache.reason import MissReason
from cache.tree import PrefixTree


class Retention:
    """`max_pinned` is the number of blocks that may be pinned at once. Times are seconds of any one clock."""

    def __init__(self, pool: BlockPool, tree: PrefixTree, max_pinned: int) -> None:
        self._pool = pool
        self._tree = tree
        self._max_pinned = max_pinned
        self._due: list[tuple[float, int, PrefixNode]] = []  # a heap; an entry counts if it is its node's due time
        self._order = count()

    def published(self, node: PrefixNode, ttl: float | None, *, pin: bool, now: float) -> None:
        """`node` has just got its K/V from a request that asked for this."""
        node.ttl = ttl
        self._note(node, pin, now)

    def used(self, node: PrefixNode, ttl: float | None, *, pin: bool, now: float) -> None:
        """A request uses the K/V of `node`."""
        if node.ttl is not None:
            node.ttl = None if ttl is None else max(node.ttl, ttl)
        self._note(node, pin, now)

    def _note(self, node: PrefixNode, pin: bool, now: float) -> None:
        node.last_use = now
        if node.ttl is not None and (node.due is None or now + node.ttl < node.due):
            self._look_at(node, now + node.ttl)
        block = node.block
        if pin and block is not None and not (node.is_tail or block.pinned) and self._pool.pinned < self._max_pinned:
            self._pool.pin(block)

    def expire(self, now: float) -> int:
        """Drop what has outlived its time and is in nobody's use. Returns the number of blocks."""
        dropped = 0
        while self._due and self._due[0][0] <= now:
            noted, _, node = heapq.heappop(self._due)
            if noted != node.due:
                continue
            node.due = None
            if node.block is None or node.ttl is None:
                continue
            due = node.last_use + node.ttl
            if node.block.ref_count == 0 and due <= now:
                self._tree.drop(node, MissReason.EXPIRED)
                dropped += 1
            else:
                self._look_at(node, due if due > now else now + 1.0)
        return dropped

    def _look_at(self, node: PrefixNode, due: float) -> None:
        node.due = due
        heapq.heappush(self._due, (due, next(self._order), node))
