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

from collections.abc import Callable, Iterator

from cache.block import Block
from cache.hashing import TOKEN_BYTES, BlockHasher
from cache.history import LossHistory
from cache.identity import BlockHash
from cache.lineage import Lineage
from cache.lookup import Lookup
from cache.match import Match
from cache.node import PrefixNode
from cache.pool import BlockPool
from cache.reason import MissReason


class PrefixTree:
    """Nodes by BlockHash, over the blocks of one pool.

    `collisions` counts lookups whose hash was found but whose tokens or parent differ: a miss, never a hit (P6).
    """

    def __init__(self, pool: BlockPool, block_size: int, hasher: BlockHasher | None = None) -> None:
        self.block_size = block_size
        self.collisions = 0
        self.published = 0
        self.history = LossHistory()
        self.on_publish: Callable[[Block], object] = _ignore  # the cache's Integrity sets it
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

    def has_root(self, identity: BlockHash) -> bool:
        """Does the tree keep anything under this identity?"""
        return identity in self._roots

    def chain(self, root: BlockHash, tokens: bytes, hashes: list[BlockHash]) -> list[PrefixNode]:
        """The verified nodes of the leading full blocks of `tokens`, as far as all are known."""
        size = self._block_bytes
        parent = self._roots.get(root)
        nodes: list[PrefixNode] = []
        for index, hash_ in enumerate(hashes):
            node = self._nodes.get(hash_)
            if node is None or node.parent is not parent or node.tokens != tokens[index * size : (index + 1) * size]:
                break
            nodes.append(node)
            parent = node
        return nodes

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
        lookup = Lookup(
            self._nodes.get,
            self.history,
            self._roots.get(root),
            self.block_size,
            keep_after_gap=keep_after_gap,
            copy_siblings=copy_siblings,
        )
        return lookup.run(tokens, hashes)

    # -- a request's chain --------------------------------------------------------------------------------------------

    def extend(self, parent: PrefixNode, hash_: BlockHash, tokens: bytes) -> PrefixNode | None:
        """The node of one more full block under `parent`, made if it is new; None if its hash belongs to other tokens.

        The caller holds a descendant-or-self of `parent`, so that the new node is needed from the start.
        """
        node = self._nodes.get(hash_)
        if node is not None and node.parent is parent and node.tokens == tokens:
            return node
        if node is not None and not node.orphaned:
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
        _name_source(block, node)
        if node.block is not None:
            return node.block
        assert block.written == self.block_size, block
        if node.pending is block:
            node.pending = None
        elif node.pending is not None:
            node.pending.node = None  # its holders go on writing it, detached, and switch when they publish
            node.pending = None
        self._set_block(node, block)
        self.history.clear(node.hash)
        self.published += 1
        return block

    def publish_tail(self, parent: PrefixNode, tokens: bytes, block: Block) -> bool:
        """Keep the first slots of a block that did not fill, to be copied from. `tokens` are those of its written
        slots. False if a resident sibling has them all already."""
        tail = PrefixNode(self._hash(parent.hash, tokens), tokens, parent, is_tail=True)
        _name_source(block, tail)
        closest = parent.closest_resident(tokens)
        if closest is not None and closest[1] * TOKEN_BYTES == len(tokens):
            return False
        if closest is not None and closest[0].is_tail and tokens.startswith(closest[0].tokens):
            self._drop_idle_tail(closest[0])
        parent.children.add(tail)
        self._set_block(tail, block)
        return True

    def _drop_idle_tail(self, tail: PrefixNode) -> None:
        if tail.block is not None and tail.block.ref_count == 0:
            self.drop(tail)

    def _set_block(self, node: PrefixNode, block: Block) -> None:
        node.block = block
        block.node = node
        node.lineage = node.lineage.joined(block.lineage)
        assert node.parent is not None
        node.parent.add_resident(node)
        self.on_publish(block)

    def _unset_block(self, node: PrefixNode) -> Block:
        block = node.block
        assert block is not None and node.parent is not None
        self._pool.forget(block)
        node.parent.remove_resident(node)
        node.block = None
        return block

    def _evicted(self, block: Block) -> None:
        assert block.node is not None
        self.drop(block.node, MissReason.EVICTED)

    # -- the two operations, never mixed up ---------------------------------------------------------------------------

    def drop(self, node: PrefixNode, reason: MissReason = MissReason.DROPPED) -> Block | None:
        """The bytes of `node` are gone, published or pending; its identity stands. Returns the block if requests still
        hold it: they must let go of it and compute it again."""
        block: Block | None
        if node.block is not None:
            block = self._unset_block(node)
            if not node.is_tail:
                self.history.note(node.hash, reason)
        else:
            block = node.pending
            if block is not None:
                node.pending = None
                block.node = None
        self._prune(node)
        return block if block is not None and block.ref_count else None

    def invalidate(self, node: PrefixNode, reason: MissReason = MissReason.INVALIDATED) -> list[PrefixNode]:
        """`node` and all its descendants are no longer true: forget them. Returns the forgotten nodes; blocks that
        requests still hold are detached."""
        if node.forgotten:
            return []
        forgotten = list(subtree(node))
        for gone in forgotten:
            if gone.block is not None:
                self._unset_block(gone)
            if gone.pending is not None:
                gone.pending.node = None
                gone.pending = None
            gone.forgotten = True
            if gone.parent is not None and not gone.is_tail:
                self._nodes.pop(gone.hash, None)
                self.history.note(gone.hash, reason)
        parent = node.parent
        if parent is None:
            self._roots.pop(node.hash, None)
        else:
            parent.children.discard(node)
            self._prune(parent)
        return forgotten

    def copies(self, node: PrefixNode) -> list[PrefixNode]:
        """The nodes that have, or once had, K/V copied from those of `node`, which may be in the tree no longer. They
        are its siblings: what was copied from its descendants are descendants too."""
        siblings = () if node.parent is None else node.parent.children
        return [sibling for sibling in siblings if sibling.lineage.step_from(node) is not None]

    def lineages(self) -> Iterator[Lineage]:
        """Those of all nodes, tails included."""
        for root in self._roots.values():
            for node in subtree(root):
                yield node.lineage

    def lose_record(self, node: PrefixNode) -> None:
        """For tests and tiers: the record of `node` vanishes while its descendants' stay. What lies below can no
        longer be proven and is never matched again."""
        self.drop(node)
        for tail in [child for child in node.children if child.is_tail]:
            self.drop(tail)  # only found through its parent
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


def subtree(node: PrefixNode) -> Iterator[PrefixNode]:
    """`node` and all its descendants, tails included; a parent comes before its children."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(current.children)


def _name_source(block: Block, node: PrefixNode) -> None:
    """What was copied from `block` before it was published was copied from `node`."""
    if block.source is not None:
        block.source.node = node


def _ignore(block: Block) -> None:
    """Nobody signs the blocks of this tree."""
