"""Drop and invalidate, aimed by an operator: from a CacheTarget to the nodes it means, and what they lost."""

from __future__ import annotations

from collections.abc import Iterable

from cache.hashing import TOKEN_BYTES, common_tokens, encode_tokens
from cache.identity import BlockHash
from cache.node import PrefixNode
from cache.pool import BlockPool
from cache.tree import PrefixTree, subtree
from scheduler.commands import CacheEffect, CacheTarget, CommandRefused, Operation
from scheduler.identities import Root
from scheduler.scheduler import Scheduler


class CacheChanges:
    """Finds what a target means and has the scheduler change it. `block_bytes` is the size of one block."""

    def __init__(self, pool: BlockPool, tree: PrefixTree, scheduler: Scheduler, block_bytes: int) -> None:
        self._pool = pool
        self._tree = tree
        self._scheduler = scheduler
        self._block_bytes = block_bytes

    def change(self, operation: Operation, target: CacheTarget, roots: Iterable[Root]) -> CacheEffect:
        """Carry `operation` out on `target`, between steps. `roots` are those the target is confined to: of its
        prompt's adapter and salt, of the adapter or salt it names, or all. Raises CommandRefused."""
        if target.prompt is not None:
            tops = [node for root in roots for node in self._of_prompt(operation, target, root.hash)]
            whole = False
        elif target.block_hash is not None:
            tops = self._of_hash(operation, target.block_hash)
            whole = False
        else:
            tops = [self._tree.root(root.hash) for root in roots]
            whole = True
        before = self._pool.findable
        if operation is Operation.DROP:
            for node in [node for top in tops for node in (subtree(top) if whole else (top,))]:
                self._scheduler.drop(node)
        else:
            for node in tops:
                self._scheduler.invalidate(node)
        blocks = before - self._pool.findable
        return CacheEffect(blocks, blocks * self._block_bytes, {"device": blocks})

    def _of_hash(self, operation: Operation, text: str) -> list[PrefixNode]:
        try:
            hash_ = BlockHash(bytes.fromhex(text))
        except ValueError:
            raise CommandRefused(f"{text!r} is not a block hash, which is hexadecimal", "block_hash") from None
        node = self._tree.node(hash_)
        if node is None and operation is Operation.INVALIDATE:
            return self._scheduler.sources(lambda source: source.hash == hash_)
        return [] if node is None else [node]

    def _of_prompt(self, operation: Operation, target: CacheTarget, root: BlockHash) -> list[PrefixNode]:
        """For a drop the nodes themselves, for an invalidation the one where it begins, or what is left of it."""
        assert target.prompt is not None
        size = self._tree.block_size
        count = -(-len(target.prompt) // size)
        for place, index in enumerate(target.blocks or ()):
            if not 0 <= index < count:
                raise CommandRefused(f"the prompt has {count} blocks, and no block {index}", f"blocks[{place}]")
        tokens = encode_tokens(target.prompt)
        hashes: list[BlockHash] = []
        self._tree.extend_hashes(hashes, root, tokens)
        chain = self._tree.chain(root, tokens, hashes)
        wanted = sorted(set(range(count) if target.blocks is None else target.blocks))
        if operation is Operation.INVALIDATE:
            wanted = wanted[:1]
        found = [chain[index] for index in wanted if index < len(chain)]
        if len(chain) == count or len(chain) not in wanted or not self._tree.has_root(root):
            return found
        parent = chain[-1] if chain else self._tree.root(root)
        ending = tokens[len(chain) * size * TOKEN_BYTES :][: size * TOKEN_BYTES]

        def is_next(node: PrefixNode) -> bool:
            """Does it hold the first block of the prompt that has no node, or its unfilled end?"""
            same = node.tokens == ending if len(chain) < len(hashes) else node.is_tail and _is_end(node, ending)
            return node.parent is parent and same

        found += filter(is_next, parent.children)
        if operation is Operation.INVALIDATE:
            found += self._scheduler.sources(is_next)
        return found


def _is_end(tail: PrefixNode, tokens: bytes) -> bool:
    """Does it hold nothing but the first of `tokens`, or begin with all of them?"""
    return common_tokens(tail.tokens, tokens) * TOKEN_BYTES == min(len(tail.tokens), len(tokens))
