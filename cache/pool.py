"""BlockPool: sole owner of all Blocks. Four verbs: allocate, share, publish (the tree's) and free."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from cache.block import Block, BlockId
from cache.lineage import NO_LINEAGE


class OutOfBlocks(Exception):
    """More blocks were asked for than are free or evictable. The caller checks `available` first."""


class BlockPool:
    """Blocks in use, blocks free, and cached blocks in the order of their eviction.

        evicted first                                                                          not evicted
        free ... | tails, least recently used first | full blocks, least recently used first | pinned blocks

    Pinned blocks are given up only to a caller that says it cannot do without (`allocate(break_pins=True)`).
    A request frees its blocks last to first, so that of one request the end goes before the beginning.
    `on_evict` is called with a block that loses its content, before it is handed out; the PrefixTree sets it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.blocks = tuple(Block(BlockId(i)) for i in range(num_blocks))
        self.on_evict: Callable[[Block], None] = _no_tree
        self.evictions = 0
        self._free: deque[Block] = deque(self.blocks)
        self._tails: OrderedDict[BlockId, Block] = OrderedDict()
        self._cached: OrderedDict[BlockId, Block] = OrderedDict()
        self._pinned: OrderedDict[BlockId, Block] = OrderedDict()  # those without a reference
        self.pinned = 0  # all pinned blocks

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now, evicting what must be, but no pinned ones."""
        return len(self._free) + len(self._tails) + len(self._cached)

    @property
    def breakable(self) -> int:
        """Pinned blocks without a reference: what `break_pins` adds to `available`."""
        return len(self._pinned)

    @property
    def in_use(self) -> int:
        """Blocks with a reference."""
        return len(self.blocks) - self.available - self.breakable

    @property
    def cached(self) -> int:
        """Published blocks without a reference."""
        return len(self._tails) + len(self._cached) + len(self._pinned)

    @property
    def findable(self) -> int:
        """Blocks that a look-up can lead to, published or pending. Counts them one by one."""
        return sum(block.node is not None for block in self.blocks)

    def allocate(self, *, break_pins: bool = False) -> Block:
        """A block with ref_count 1, nothing written and no node. Raises OutOfBlocks."""
        if not self._free:
            self._evict(break_pins)
        block = self._free.popleft()
        block.ref_count = 1
        return block

    def share(self, block: Block) -> None:
        """One more holder. Reviving a cached block takes it out of the order of eviction."""
        if block.ref_count == 0:
            assert block.published, f"{block} is free and cannot be shared"
            del self._order(block)[block.block_id]
        block.ref_count += 1

    def free(self, block: Block) -> None:
        """One holder less. The last one leaves a published block cached, any other free."""
        assert block.ref_count > 0, f"{block} is freed twice"
        block.ref_count -= 1
        if block.ref_count:
            return
        if block.published:
            self._order(block)[block.block_id] = block
        else:
            assert block.node is None, f"{block} is still pending"
            self._to_free_list(block)

    def forget(self, block: Block) -> None:
        """The published `block`'s content is given up: a cached one becomes free, a held one detached."""
        assert block.published
        self.unpin(block)
        if block.ref_count == 0:
            del self._order(block)[block.block_id]
            block.node = None
            self._to_free_list(block)
        else:
            block.node = None

    def pin(self, block: Block) -> None:
        """Keep a published block from eviction."""
        assert block.published and not block.pinned
        self._move(block, pinned=True)

    def unpin(self, block: Block) -> None:
        """Let a block be evicted again, as the most recently used one; nothing if it was not pinned."""
        if block.pinned:
            self._move(block, pinned=False)

    def _move(self, block: Block, *, pinned: bool) -> None:
        if block.ref_count == 0:
            del self._order(block)[block.block_id]
        block.pinned = pinned
        self.pinned += 1 if pinned else -1
        if block.ref_count == 0:
            self._order(block)[block.block_id] = block

    def _evict(self, break_pins: bool) -> None:
        order = self._tails or self._cached or (self._pinned if break_pins else None)
        if not order:
            raise OutOfBlocks("no block is free or evictable")
        self.evictions += 1
        self.on_evict(next(iter(order.values())))

    def _order(self, block: Block) -> OrderedDict[BlockId, Block]:
        assert block.node is not None
        if block.pinned:
            return self._pinned
        return self._tails if block.node.is_tail else self._cached

    def _to_free_list(self, block: Block) -> None:
        block.written = 0
        block.checksum = None
        block.lineage = NO_LINEAGE
        block.source = None
        self._free.append(block)

    def check_integrity(self) -> None:
        """Every block is in exactly one place, and that place fits its state."""
        free = {block.block_id for block in self._free}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & self._tails.keys()) and not (free & self._cached.keys())
        assert not (self._tails.keys() & self._cached.keys())
        assert self.pinned == sum(block.pinned for block in self.blocks)
        for block in self.blocks:
            if block.block_id in free:
                assert block.ref_count == 0 and block.node is None and block.written == 0, block
            elif block.ref_count == 0:
                assert block.ref_count == 0 and block.published and block.written > 0, block
                assert self._order(block)[block.block_id] is block
            else:
                assert block.published or not block.pinned, block
                orders = (self._tails, self._cached, self._pinned)
                assert not any(block.block_id in order for order in orders), f"{block} is in use and evictable"


def _no_tree(block: Block) -> None:
    raise AssertionError(f"{block} cannot be evicted: no tree watches this pool")
