"""PrefixTree: every prefix the cache knows, as nodes found by their chained hash.

The tree is the only place where a block's content gets, changes and loses its meaning:

    extend   a node for one more block of tokens, found or made
    publish  a block's K/V become a node's K/V: from now on it is read-only and anyone may share it
    drop     the bytes are gone, the node stands: descendants keep their proof of lineage (RECOVERY F3, P8)
    invalidate   the node is no longer true, nor is anything after it: all of it is forgotten (RECOVERY F4, P8)
    evict    a drop, chosen by the pool because it needs room

A node without K/V stays while something below it, or a request whose chain ends in it, needs it.
"""

from __future__ import annotations

from collections.abc import Iterator

from cache.block import Block
from cache.hashing import TOKEN_BYTES, BlockHasher
from cache.identity import BlockHash
from cache.match import BlockMatch, BlockStatus, Match, MissReason
from cache.node import PrefixNode
from cache.pool import BlockPool


class PrefixTree:
    """Nodes by BlockHash, over the blocks of one pool.

    `collisions` counts lookups whose hash was found but whose tokens or parent differ: a miss, never a hit (P6).
    """

    def __init__(self, pool: BlockPool, block_size: int, hasher: BlockHasher | None = None) -> None:
        self.block_size = block_size
        self.collisions = 0
        self.published = 0
        self._block_bytes = block_size * TOKEN_BYTES
        self._pool = pool
        self._hash = hasher or BlockHasher()
        self._roots: dict[BlockHash, PrefixNode] = {}
        self._nodes: dict[BlockHash, PrefixNode] = {}
        pool.on_evict = self._evicted

    # -- looking up ---------------------------------------------------------------------------------------------------

    def root(self, identity: BlockHash) -> PrefixNode:
        """The parent of every first block under an identity's root hash."""
        if identity not in self._roots:
            self._roots[identity] = PrefixNode(identity, b"", None)
        return self._roots[identity]

    def node(self, hash_: BlockHash) -> PrefixNode | None:
        """The node of a full block by its hash, unverified: for operators who name a block."""
        return self._nodes.get(hash_)

    def extend_hashes(self, hashes: list[BlockHash], root: BlockHash, tokens: bytes) -> None:
        """Append the hashes of all full blocks of `tokens` that `hashes` does not have yet."""
        size = self._block_bytes
        parent = hashes[-1] if hashes else root
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            parent = self._hash(parent, tokens[start : start + size])
            hashes.append(parent)

    def match(
        self,
        root: BlockHash,
        tokens: bytes,
        hashes: list[BlockHash],
        *,
        keep_after_gap: bool = True,
        copy_siblings: bool = True,
    ) -> Match:
        """Look up encoded `tokens` (at least one), whose full blocks have `hashes`; nothing is changed or touched.

        The result is capped at N-1 positions. With `keep_after_gap` off nothing after the first missing block is
        used. With `copy_siblings` off no block is a source of copies.
        """
        size = self._block_bytes
        num_tokens = len(tokens) // TOKEN_BYTES
        last = (num_tokens - 1) // self.block_size
        parent: PrefixNode | None = self._roots.get(root)
        blocks: list[BlockMatch] = []
        valid_blocks = 0
        gap = False
        for index in range(last):
            block_tokens = tokens[index * size : (index + 1) * size]
            found = self._match_block(index, parent, hashes[index], block_tokens)
            if found.status is BlockStatus.MISSING:
                if copy_siblings and (keep_after_gap or not gap):
                    self._find_copy(found, parent, block_tokens)
                gap = True
            elif gap and not keep_after_gap:
                found.status, found.reason = BlockStatus.MISSING, MissReason.AFTER_GAP
            elif valid_blocks == index and found.status is BlockStatus.REUSED:
                valid_blocks += 1
            parent = found.node
            blocks.append(found)
        final = BlockMatch(last, BlockStatus.MISSING, reason=MissReason.LAST_POSITION)
        if copy_siblings and (keep_after_gap or not gap):
            self._find_copy(final, parent, tokens[last * size : -TOKEN_BYTES])
        blocks.append(final)
        return Match(num_tokens, self.block_size, blocks, valid_blocks * self.block_size)

    def _match_block(self, index: int, parent: PrefixNode | None, hash_: BlockHash, tokens: bytes) -> BlockMatch:
        node = self._nodes.get(hash_)
        if node is None:
            return BlockMatch(index, BlockStatus.MISSING, reason=MissReason.NEVER_SEEN)
        if node.parent is not parent or node.tokens != tokens:
            reason = MissReason.LINEAGE_UNKNOWN if _orphaned(node) else MissReason.COLLISION
            return BlockMatch(index, BlockStatus.MISSING, reason=reason)
        if node.block is not None:
            return BlockMatch(index, BlockStatus.REUSED, node)
        if node.pending is not None:
            return BlockMatch(index, BlockStatus.PENDING, node)
        return BlockMatch(index, BlockStatus.MISSING, node, MissReason.LOST)

    def _find_copy(self, match: BlockMatch, parent: PrefixNode | None, tokens: bytes) -> None:
        closest = parent.closest_resident(tokens) if parent is not None and tokens else None
        if closest is not None:
            sibling, match.copy_slots = closest
            match.copy_from = sibling.block

    # -- a request's chain --------------------------------------------------------------------------------------------

    def extend(self, parent: PrefixNode, hash_: BlockHash, tokens: bytes) -> PrefixNode | None:
        """The node of one more full block under `parent`, made if it is new; None if its hash belongs to other tokens.

        The caller holds a descendant-or-self of `parent`, so that the new node is needed from the start.
        """
        node = self._nodes.get(hash_)
        if node is not None and node.parent is parent and node.tokens == tokens:
            return node
        if node is not None and not _orphaned(node):
            self.collisions += 1
            return None
        if node is not None:
            self.invalidate(node)  # its proof is gone, and its place is wanted by one that has it
        node = PrefixNode(hash_, tokens, parent)
        self._nodes[hash_] = node
        parent.children.add(node)
        return node

    def hold(self, node: PrefixNode) -> None:
        """A request's chain ends in `node`: it and all its ancestors stay."""
        node.holds += 1

    def release(self, node: PrefixNode) -> None:
        node.holds -= 1
        self._prune(node)

    # -- where K/V live -----------------------------------------------------------------------------------------------

    def await_block(self, node: PrefixNode, block: Block) -> None:
        """`block` will hold the K/V of `node`: others may share it while it is being written."""
        assert node.block is None and node.pending is None and block.node is None
        node.pending = block
        block.node = node

    def abandon(self, block: Block) -> None:
        """Nobody will go on writing the pending `block`, or nobody may find it any more."""
        node = block.node
        assert node is not None and node.pending is block
        node.pending = None
        block.node = None
        self._prune(node)

    def publish(self, node: PrefixNode, block: Block) -> Block:
        """The full `block` holds the K/V of `node`. Returns the block that does so from now on: if the node already
        has one, that one, and `block` stays the caller's own."""
        if node.block is not None:
            return node.block
        assert block.written == self.block_size, block
        if node.pending is block:
            node.pending = None
        elif node.pending is not None:
            node.pending.node = None  # its holders go on writing it, detached, and switch when they publish
            node.pending = None
        self._set_block(node, block)
        self.published += 1
        return block

    def publish_tail(self, parent: PrefixNode, tokens: bytes, block: Block) -> bool:
        """Keep the first slots of a block that did not fill, to be copied from. `tokens` are those of its written
        slots. False if a resident sibling has them all already."""
        closest = parent.closest_resident(tokens)
        if closest is not None and closest[1] * TOKEN_BYTES == len(tokens):
            return False
        if closest is not None and closest[0].is_tail and tokens.startswith(closest[0].tokens):
            self._drop_idle_tail(closest[0])
        tail = PrefixNode(self._hash(parent.hash, tokens), tokens, parent, is_tail=True)
        parent.children.add(tail)
        self._set_block(tail, block)
        return True

    def _drop_idle_tail(self, tail: PrefixNode) -> None:
        if tail.block is not None and tail.block.ref_count == 0:
            self.drop(tail)

    def _set_block(self, node: PrefixNode, block: Block) -> None:
        node.block = block
        block.node = node
        assert node.parent is not None
        node.parent.add_resident(node)

    def _unset_block(self, node: PrefixNode) -> Block:
        block = node.block
        assert block is not None and node.parent is not None
        self._pool.forget(block)
        node.parent.remove_resident(node)
        node.block = None
        return block

    def _evicted(self, block: Block) -> None:
        assert block.node is not None
        self.drop(block.node)

    # -- the two operations, never mixed up ---------------------------------------------------------------------------

    def drop(self, node: PrefixNode) -> Block | None:
        """The bytes of `node` are gone, published or pending; its identity stands. Returns the block if requests still
        hold it: they must let go of it and compute it again."""
        block: Block | None
        if node.block is not None:
            block = self._unset_block(node)
        else:
            block = node.pending
            if block is not None:
                node.pending = None
                block.node = None
        self._prune(node)
        return block if block is not None and block.ref_count else None

    def invalidate(self, node: PrefixNode) -> list[PrefixNode]:
        """`node` and all its descendants are no longer true: forget them. Returns the forgotten nodes; blocks that
        requests still hold are detached."""
        forgotten = list(_subtree(node))
        for gone in forgotten:
            if gone.block is not None:
                self._unset_block(gone)
            if gone.pending is not None:
                gone.pending.node = None
                gone.pending = None
            gone.forgotten = True
            if not gone.is_tail:
                self._nodes.pop(gone.hash, None)
        parent = node.parent
        if parent is None:
            self._roots.pop(node.hash, None)
        else:
            parent.children.discard(node)
            self._prune(parent)
        return forgotten

    def lose_record(self, node: PrefixNode) -> None:
        """For tests and tiers: the record of `node` vanishes while its descendants' stay. What lies below can no
        longer be proven and is never matched again."""
        self.drop(node)
        if node.hash in self._nodes:
            del self._nodes[node.hash]
            node.forgotten = True
            assert node.parent is not None
            node.parent.children.discard(node)
            self._prune(node.parent)

    def _prune(self, node: PrefixNode) -> None:
        """Remove `node` and then its ancestors while nothing needs them as proof of lineage."""
        while not (node.forgotten or node.children or node.holds or node.block or node.pending):
            node.forgotten = True
            if node.parent is None:
                self._roots.pop(node.hash, None)
                return
            if not node.is_tail:
                del self._nodes[node.hash]
            node.parent.children.remove(node)
            node = node.parent

    # -- integrity ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[PrefixNode]:
        """All nodes of full blocks, in no particular order."""
        return iter(list(self._nodes.values()))

    def __len__(self) -> int:
        return len(self._nodes)

    def check_integrity(self) -> None:
        """Re-derive every link between nodes and blocks."""
        seen: set[int] = set()
        stack = list(self._roots.values())
        stack += [node for node in self._nodes.values() if node.parent is not None and node.parent.forgotten]
        while stack:
            node = stack.pop()
            assert not node.forgotten, node
            assert node.parent is None or node.children or node.holds or node.block or node.pending, f"{node} is idle"
            self._check_node(node)
            if node.block is not None:
                seen.add(node.block.block_id)
            stack.extend(node.children)
        for block in self._pool.blocks:
            assert block.published == (block.block_id in seen), block

    def _check_node(self, node: PrefixNode) -> None:
        if node.parent is not None and not node.is_tail:
            assert self._nodes[node.hash] is node and len(node.tokens) == self._block_bytes
        if node.is_tail:
            assert not node.children and node.block is not None and node.block.written * TOKEN_BYTES >= len(node.tokens)
        assert node.block is None or (node.block.node is node and node.pending is None)
        assert node.pending is None or (node.pending.node is node and node.pending.ref_count > 0)
        assert node.is_tail or node.block is None or node.block.written == self.block_size
        tokens = [child.tokens for child in node.resident]
        assert tokens == sorted(tokens)
        assert set(node.resident) == {child for child in node.children if child.block is not None}


def _orphaned(node: PrefixNode) -> bool:
    """The record of some ancestor is gone."""
    while node.parent is not None:
        if node.parent.forgotten:
            return True
        node = node.parent
    return False


def _subtree(node: PrefixNode) -> Iterator[PrefixNode]:
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(current.children)
