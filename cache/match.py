"""Match: what looking a token list up found, block by block, and where computing must start again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cache.block import Block
from cache.node import PrefixNode
from cache.reason import MissReason


class BlockStatus(StrEnum):
    REUSED = "reused"  # resident, verified: shared
    PENDING = "pending"  # another request is computing it: shared
    MISSING = "missing"  # to be computed, from `copy_slots` on


@dataclass(slots=True)
class BlockMatch:
    """One block of the looked-up tokens. `node` is its record where the tree has one, `reason` why it is not reused.

    `copy_from` is the resident block (a sibling under the same parent, or this very block's published twin) whose
    first `copy_slots` slots hold the K/V of this block's first tokens.
    """

    index: int
    status: BlockStatus
    node: PrefixNode | None = None
    reason: MissReason | None = None
    copy_from: Block | None = None
    copy_slots: int = 0
    first_difference: int | None = None  # with DIFFERENT_TOKEN: the position, in this block or an earlier one
    sibling: PrefixNode | None = None  # in the block that position is in: who has the other token

    @property
    def block(self) -> Block | None:
        """The block to share; None if it is missing."""
        if self.node is None or self.status is BlockStatus.MISSING:
            return None
        return self.node.block if self.status is BlockStatus.REUSED else self.node.pending


@dataclass(slots=True)
class Match:
    """A token list of `num_tokens` looked up; its last block holds the last position and is always MISSING (P4).

    `valid_prefix` is the number of leading positions in resident, verified blocks: where an engine that stops at the
    first miss would start computing.
    """

    num_tokens: int
    block_size: int
    blocks: list[BlockMatch]
    valid_prefix: int

    @classmethod
    def nothing(cls, num_tokens: int, block_size: int, reason: MissReason) -> Match:
        """The match of one who may use nothing: every block is missing, for the same reason."""
        count = (num_tokens - 1) // block_size + 1
        blocks = [BlockMatch(index, BlockStatus.MISSING, reason=reason) for index in range(count)]
        return cls(num_tokens, block_size, blocks, 0)

    def computed(self) -> list[tuple[int, int]]:
        """The positions left to compute, as ascending disjoint [start, end) ranges; those of pending blocks are not
        among them."""
        ranges: list[tuple[int, int]] = []
        for match in self.blocks:
            if match.status is not BlockStatus.MISSING:
                continue
            start = match.index * self.block_size
            end = min(start + self.block_size, self.num_tokens)
            start += match.copy_slots
            if ranges and ranges[-1][1] == start:
                ranges[-1] = ranges[-1][0], end
            else:
                ranges.append((start, end))
        return ranges
