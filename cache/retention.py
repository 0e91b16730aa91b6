"""Retention: how long blocks stay, where somebody said so: times to live and pins.

A time to live counts from the last use, and the longest anybody asked for wins; a use by someone who asks for none
makes it endless, as blocks are by default. A pinned block is evicted only when a request could not run at all without
its room; pins are bounded by a share of the pool. A pin may end too: the block is then cached like any other.
"""

from __future__ import annotations

import heapq
from itertools import count

from cache.node import PrefixNode
from cache.pool import BlockPool
from cache.reason import MissReason
from cache.tree import PrefixTree


class Retention:
    """`max_pinned` is the number of blocks that may be pinned at once. Times are seconds of any one clock.

    A node that something will happen to has one place in a heap, at the time `due` or earlier; what is true by then is
    looked up when that time has come.
    """

    def __init__(self, pool: BlockPool, tree: PrefixTree, max_pinned: int) -> None:
        self._pool = pool
        self._tree = tree
        self._max_pinned = max_pinned
        self._due: list[tuple[float, int, PrefixNode]] = []  # a heap; an entry counts if it is its node's due time
        self._order = count()

    def published(self, node: PrefixNode, ttl: float | None, *, pin_for: float = 0.0, now: float) -> None:
        """`node` has just got its K/V from a request that asked for this. `pin_for` is infinite for a pin without an
        end."""
        node.ttl = ttl
        self._note(node, pin_for, now)

    def used(self, node: PrefixNode, ttl: float | None, *, pin_for: float = 0.0, now: float) -> None:
        """A request uses the K/V of `node`."""
        if node.ttl is not None:
            node.ttl = None if ttl is None else max(node.ttl, ttl)
        self._note(node, pin_for, now)

    def _note(self, node: PrefixNode, pin_for: float, now: float) -> None:
        node.last_use = now
        if pin_for > 0.0:
            self._pin(node, now + pin_for)
        self._look_again(node, now)

    def _pin(self, node: PrefixNode, until: float) -> None:
        block = node.block
        if block is None or node.is_tail:
            return
        if block.pinned:
            node.pinned_until = max(node.pinned_until, until)
        elif self._pool.pinned < self._max_pinned:
            self._pool.pin(block)
            node.pinned_until = until

    def expire(self, now: float) -> int:
        """End pins, and drop what outlived its time and is in nobody's use. Returns the number of blocks dropped."""
        dropped = 0
        while self._due and self._due[0][0] <= now:
            noted, _, node = heapq.heappop(self._due)
            if noted != node.due:
                continue
            node.due = None
            block = node.block
            if block is None:
                continue
            if block.pinned and node.pinned_until <= now:
                self._pool.unpin(block)
            if node.ttl is not None and block.ref_count == 0 and node.last_use + node.ttl <= now:
                self._tree.drop(node, MissReason.EXPIRED)
                dropped += 1
            else:
                self._look_again(node, now)
        return dropped

    def _look_again(self, node: PrefixNode, now: float) -> None:
        """See that `node` is looked at by the time that something is to happen to it."""
        times = []
        if node.ttl is not None:
            times.append(node.last_use + node.ttl)
        if node.block is not None and node.block.pinned and node.pinned_until < float("inf"):
            times.append(node.pinned_until)
        if not times:
            return
        due = min(times)
        if due <= now:
            due = now + 1.0  # it is in use, or it would have gone
        if node.due is None or due < node.due:
            node.due = due
            heapq.heappush(self._due, (due, next(self._order), node))
