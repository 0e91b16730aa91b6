"""The walk down the PrefixTree that makes a Match: one step a block, from the root to the last position.

tokens      |  block 0  |  block 1  |  block 2  |  block 3  |  last
tree          resident    lost        resident    unknown
`parent`    root ------> 0 --------> 1 --------> 2           None: nothing below an unknown node can be proven
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat

from cache.hashing import TOKEN_BYTES, common_tokens
from cache.history import LossHistory
from cache.identity import BlockHash
from cache.match import BlockMatch, BlockStatus, Match
from cache.node import PrefixNode
from cache.reason import MissReason


class Lookup:
    """One look-up. `find` gives the node of a hash, unverified; nothing is changed or touched."""

    def __init__(
        self,
        find: Callable[[BlockHash], PrefixNode | None],
        history: LossHistory,
        root: PrefixNode | None,
        block_size: int,
        *,
        keep_after_gap: bool,
        copy_siblings: bool,
    ) -> None:
        self._find = find
        self._history = history
        self._block_size = block_size
        self._keep_after_gap = keep_after_gap
        self._copy_siblings = copy_siblings
        self._parent = root  # the deepest node of the chain whose tokens are known and equal; None once it has ended
        self._gap = False
        self._difference: int | None = None  # the first position known to differ from the closest cached prompt

    def run(self, tokens: bytes, hashes: list[BlockHash]) -> Match:
        size = self._block_size * TOKEN_BYTES
        num_tokens = len(tokens) // TOKEN_BYTES
        last = (num_tokens - 1) // self._block_size
        blocks = self._leading_run(last, tokens, hashes)
        valid = len(blocks)
        for index in range(valid, last):
            blocks.append(self._block(index, hashes[index], tokens[index * size : (index + 1) * size]))
        blocks.append(self._last(last, tokens[last * size :], hashes))
        return Match(num_tokens, self._block_size, blocks, valid * self._block_size)

    def _leading_run(self, last: int, tokens: bytes, hashes: list[BlockHash]) -> list[BlockMatch]:
        """The resident blocks before anything is missing, as `_block` would find them one by one.

        Most of most prompts is here, so it is one loop without calls, and all tokens are compared at once.
        """
        parent = self._parent
        run: list[PrefixNode] = []
        for node in map(self._find, hashes[:last]):
            if node is None or node.parent is not parent or node.block is None:
                break
            run.append(node)
            parent = node
        equal = common_tokens(b"".join([node.tokens for node in run]), tokens)
        del run[equal // self._block_size :]
        if run:
            self._parent = run[-1]
        return list(map(BlockMatch, range(len(run)), repeat(BlockStatus.REUSED), run))

    def _block(self, index: int, hash_: BlockHash, tokens: bytes) -> BlockMatch:
        node = self._find(hash_)
        if node is None:
            found = BlockMatch(index, BlockStatus.MISSING)
            self._explain(found, tokens, self._history.reason(hash_))
        elif node.parent is not self._parent or node.tokens != tokens:
            reason = MissReason.LINEAGE_UNKNOWN if node.orphaned else MissReason.COLLISION
            found = BlockMatch(index, BlockStatus.MISSING, reason=reason)
        elif node.block is not None:
            found = BlockMatch(index, BlockStatus.REUSED, node)
        elif node.pending is not None:
            found = BlockMatch(index, BlockStatus.PENDING, node, MissReason.IN_FLIGHT)
        else:
            reason = self._history.reason(hash_) or MissReason.NEVER_SEEN
            found = BlockMatch(index, BlockStatus.MISSING, node, reason)
        if found.status is BlockStatus.MISSING:
            self._copy(found, tokens)
            self._gap = True
        elif self._gap and not self._keep_after_gap:
            found.status, found.reason = BlockStatus.MISSING, MissReason.AFTER_GAP
        self._parent = found.node
        return found

    def _last(self, index: int, tokens: bytes, hashes: list[BlockHash]) -> BlockMatch:
        """The block of the last position, which is computed whatever is cached; the rest of it can be copied."""
        found = BlockMatch(index, BlockStatus.MISSING, reason=MissReason.LAST_POSITION)
        wanted = tokens[:-TOKEN_BYTES]
        closest = self._parent.closest_resident(wanted) if self._parent is not None else None
        covered = not wanted or (closest is not None and closest[1] * TOKEN_BYTES == len(wanted))
        if self._gap and not self._keep_after_gap:
            found.reason = MissReason.AFTER_GAP
        elif not covered:
            known = self._history.reason(hashes[index]) if index < len(hashes) else None
            self._explain(found, tokens, known)
        self._copy(found, wanted)
        return found

    def _copy(self, found: BlockMatch, tokens: bytes) -> None:
        """The sibling to copy the first slots from: not after a gap that ends what is used."""
        if not self._copy_siblings or self._parent is None or (self._gap and not self._keep_after_gap):
            return
        closest = self._parent.closest_resident(tokens)
        if closest is not None:
            found.copy_from, found.copy_slots = closest[0].block, closest[1]

    def _explain(self, found: BlockMatch, tokens: bytes, known: MissReason | None) -> None:
        """Why there is no record of this block: what became of it, else where the closest cached prompt parts from
        this one, else nothing."""
        found.reason = known
        if known is not None:
            return
        if self._difference is None and self._parent is not None and self._parent.resident:
            closest = self._parent.closest_resident(tokens)
            if closest is not None or self._parent.parent is not None:
                shared = closest[1] if closest else 0
                self._difference = found.index * self._block_size + shared
                found.sibling = closest[0] if closest else self._parent.resident[0]
        found.first_difference = self._difference
        found.reason = MissReason.NEVER_SEEN if self._difference is None else MissReason.DIFFERENT_TOKEN
